"""Evidence on which of two models is better, worked out by hand."""

import math

import pytest
import torch

from fewlabel.core.federation import ClientInfo
from fewlabel.core.tasks import Asked
from fewlabel.learn.evidence import Exam, bounded, exam, gain, nothing, right, total, worse_without_any
from tests.hand import site, weights


def counts(images: list[int], first: list[int], second: list[int]) -> Exam:
    return Exam(*map(torch.tensor, (images, first, second)))


def told(one: Exam) -> list[list[int]]:
    return [part.tolist() for part in (one.images, one.first, one.second)]


def test_an_exam_counts_by_class_what_only_one_model_gets_right():
    y = torch.tensor([0, 0, 0, 2, 2])
    first = torch.tensor([True, True, False, False, True])
    second = torch.tensor([True, False, False, True, True])
    assert told(exam(first, second, y, 3)) == [[3, 0, 2], [1, 0, 0], [0, 0, 1]]


def test_exams_of_sites_add_up():
    assert told(total([counts([3, 1], [1, 0], [0, 1]), nothing(2), counts([2, 2], [0, 2], [1, 0])])) == [
        [5, 3],
        [1, 2],
        [1, 1],
    ]


def test_a_gain_is_the_mean_over_classes_and_its_error_that_of_pairs():
    # Class 0: (6 - 1) / 10 with variance (6.5 + 1.5 - 25/12) / 144. Class 2: (1 - 2) / 8 with (1.5 + 2.5 - 1/10) / 100.
    # Class 1 has too few images to count.
    found = gain(counts([10, 4, 8], [6, 4, 1], [1, 0, 2]))
    error = math.sqrt((8 - 25 / 12) / 144 + (4 - 1 / 10) / 100) / 2
    assert found.value == pytest.approx((0.5 - 0.125) / 2)
    assert (found.low, found.high) == pytest.approx((0.1875 - 1.96 * error, 0.1875 + 1.96 * error))
    assert found.images == 18


def test_without_held_out_labels_there_is_no_gain():
    assert gain(nothing(3)) is None
    assert gain(counts([4, 4], [0, 0], [4, 4])) is None


def test_a_model_is_right_where_its_most_likely_class_is_the_label():
    one = site(0, [(1, 0), (2, 1), (-1, 1)])  # by the weights (1, 0), class 0 is likely if the pixel is above 0
    one.load(weights([1.0, 0.0]))
    assert right(one.model, one.labeled, size=2).tolist() == [True, False, True]


def test_three_images_on_which_models_differ_are_no_proof():
    found = gain(counts([5] * 10, [1] + [0] * 9, [0] + [1] * 2 + [0] * 7))
    assert found.value == pytest.approx(-0.02)
    assert found.low < 0 < found.high


@pytest.mark.parametrize(
    ("images", "first", "second", "why"),
    [
        ([2, 0], [-1, 0], [0, 0], "counts below 0, or beyond the 5 labels"),
        ([2**62, 2**62], [0, 0], [0, 0], "beyond the 5 labels"),
        ([6, 0], [0, 0], [6, 0], "beyond the 5 labels"),
        ([3, 3], [0, 0], [3, 3], "its exam has 6 images, and it holds out 5 labels"),
        ([2, 0], [2, 0], [1, 0], "more answers than images"),
        ([2], [1], [1], "2 whole numbers"),
        ([2.0, 0.0], [1.0, 0.0], [1.0, 0.0], "2 whole numbers"),
    ],
)
def test_counts_that_cannot_be_are_refused(images, first, second, why):
    with pytest.raises(ValueError, match=why):
        counts(images, first, second).check_answer(Asked(ClientInfo(0, 20, 5), 2, held_out=5))


def test_counts_of_all_labels_that_a_site_holds_out_are_accepted():
    counts([3, 2], [1, 0], [2, 2]).check_answer(Asked(ClientInfo(0, 20, 5), 2, held_out=5))
    nothing(2).check_answer(Asked(ClientInfo(0, 20, 5), 2))


def test_of_a_site_that_claims_too_much_only_a_part_counts():
    assert told(bounded(counts([8, 4], [4, 0], [0, 4]), 0.25)) == [[2, 1], [1, 0], [0, 1]]
    whole = counts([8, 4], [4, 0], [0, 4])
    assert bounded(whole, 1.0) is whole


# On 40 images each: labels alone get 20 more right, or 4 fewer. Together: (20 - 4 - 4) / 120 of one class.
WORSE, BETTER = counts([40], [0], [20]), counts([40], [6], [2])


def test_no_single_site_decides_that_a_model_is_worse():
    assert gain(total([WORSE, BETTER, BETTER])).high < 0  # in all, the one site decides
    assert not worse_without_any([WORSE, BETTER, BETTER], [])
    assert not worse_without_any([WORSE, BETTER], [])
    assert worse_without_any([WORSE, WORSE, BETTER], [])  # two of three may
    assert worse_without_any([WORSE, WORSE, nothing(1)], [])


def test_a_site_that_is_alone_decides_and_so_does_the_server():
    assert worse_without_any([WORSE, nothing(1)], [])
    assert worse_without_any([], [WORSE])
    assert worse_without_any([nothing(1)], [WORSE])
    assert not worse_without_any([WORSE], [BETTER])  # without the site, the server's images speak against it
    assert not worse_without_any([WORSE], [counts([5], [0], [5])])  # without the site, too few are left
    assert not worse_without_any([counts([29], [0], [29])], [])
    assert not worse_without_any([], [])
    assert not worse_without_any([nothing(1)], [nothing(1)])
