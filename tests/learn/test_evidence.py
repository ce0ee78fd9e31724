"""Evidence on which of two models is better, worked out by hand."""

import math

import pytest
import torch

from fewlabel.core.federation import ClientInfo
from fewlabel.core.tasks import Asked
from fewlabel.learn.evidence import Exam, exam, gain, nothing, right, total
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
    # Class 0: (6 - 1) / 10 with variance (6.5 + 1.5 - 25/12) / 144. Class 2: (1 - 2) / 4 with (1.5 + 2.5 - 1/6) / 36.
    found = gain(counts([10, 0, 4], [6, 0, 1], [1, 0, 2]))
    error = math.sqrt((8 - 25 / 12) / 144 + (4 - 1 / 6) / 36) / 2
    assert found.value == pytest.approx((0.5 - 0.25) / 2)
    assert (found.low, found.high) == pytest.approx((0.125 - 1.96 * error, 0.125 + 1.96 * error))
    assert found.images == 14


def test_without_held_out_labels_there_is_no_gain():
    assert gain(nothing(3)) is None


def test_a_model_is_right_where_its_most_likely_class_is_the_label():
    one = site(0, [(1, 0), (2, 1), (-1, 1)])  # by the weights (1, 0), class 0 is likely if the pixel is above 0
    one.load(weights([1.0, 0.0]))
    assert right(one.model, one.labeled, size=2).tolist() == [True, False, True]


def test_three_images_on_which_models_differ_are_no_proof():
    found = gain(counts([1] * 10, [1] + [0] * 9, [0] + [1] * 2 + [0] * 7))
    assert found.value == pytest.approx(-0.1)
    assert found.low < 0 < found.high


@pytest.mark.parametrize(
    ("images", "first", "second", "why"),
    [
        ([2, 0], [-1, 0], [0, 0], "impossible"),
        ([2**62, 0], [0, 0], [0, 0], "impossible"),
        ([2, 0], [2, 0], [1, 0], "more answers than images"),
        ([2], [1], [1], "2 whole numbers"),
        ([2.0, 0.0], [1.0, 0.0], [1.0, 0.0], "2 whole numbers"),
    ],
)
def test_counts_that_cannot_be_are_refused(images, first, second, why):
    with pytest.raises(ValueError, match=why):
        counts(images, first, second).check_answer(Asked(ClientInfo(0, 5, 5), 2))
