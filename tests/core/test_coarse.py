"""What a site tells of its test images is coarse, right on average, and hardly depends on any single image."""

from dataclasses import replace

import pytest
import torch

from fewlabel.core import coarse
from fewlabel.core.errors import BadInput


def scored(right: int, wrong: int, classes: int = 2, own: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores of images of class `own`, of which the first are right."""
    y = torch.full((right + wrong,), own)
    scores = torch.full((right + wrong, classes), 0.1)
    scores[:right, own], scores[right:, (own + 1) % classes] = 0.9, 0.9
    return scores, y


def both(first: tuple, second: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.cat([first[0], second[0]]), torch.cat([first[1], second[1]])


def test_an_answer_by_hand():
    """120 images of class 0, 80 right; 60 of class 1, 45 right; of class 2 there are 30.

    All: 125 of 210 right, told in 210 // 50 = 4 steps: 2.38 of 4. Class 0: 80 / 120 in 2 steps: 1.33. Class 1: 45 / 60
    in 1 step: 0.75. With a chance of 0.5, that is rounded to the nearest: 2 of 4, 1 of 2, 1 of 1.
    """
    scores, y = both(both(scored(80, 40, 3, 0), scored(45, 15, 3, 1)), scored(0, 30, 3, 2))
    found = coarse.answer(scores, y, 50, lambda name: 0.5)
    assert (found.least, found.images, found.per_class.tolist()) == (50, 200, [100, 50, 0])
    assert (found.accuracy, found.recall.tolist()) == (2 / 4, [1 / 2, 1.0, 0.0])
    up = coarse.answer(scores, y, 50, lambda name: 0.999)
    down = coarse.answer(scores, y, 50, lambda name: 0.0)
    assert (up.accuracy, up.recall.tolist()) == (3 / 4, [1.0, 1.0, 0.0])
    assert (down.accuracy, down.recall.tolist()) == (2 / 4, [1 / 2, 0.0, 0.0])
    coarse.check(found, 3)


def test_steps_of_the_auc_by_hand():
    """Two classes of 100: an image moves its own AUC by 1/100 and the other's by 1/100, so their mean by 1/100.

    So 100 / 50 = 2 steps. Of classes of 100 and 300, it is (1/100 + 1/100) / 2 for the smaller: 2 steps again. With 40
    in a class, nothing is told.
    """
    assert coarse.auc_steps([100, 100], 50) == ([0, 1], 2)
    assert coarse.auc_steps([100, 300], 50) == ([0, 1], 2)
    assert coarse.auc_steps([40, 300], 50) == ([], 0)
    # Three of 100: an image of class 0 moves it by (1/100 + 2/200) / 3 = 1/150.
    assert coarse.auc_steps([100, 100, 100], 50) == ([0, 1, 2], 3)


def test_an_answer_is_right_on_average():
    scores, y = both(scored(83, 37), scored(45, 45, own=1))
    drawn = torch.rand(4000, generator=torch.Generator().manual_seed(0)).tolist()
    found = [coarse.answer(scores, y, 50, lambda name, u=u: u) for u in drawn]
    assert sum(one.accuracy for one in found) / len(found) == pytest.approx(128 / 210, abs=0.01)
    assert torch.stack([one.recall for one in found]).mean(0).tolist() == pytest.approx([83 / 120, 0.5], abs=0.02)


def test_one_image_changes_each_share_for_at_most_one_chance_in_fifty():
    """Whatever a model says of it: its score goes from one end to the other."""
    generator = torch.Generator().manual_seed(1)
    y = torch.arange(330) % 3
    scores = torch.rand(330, 3, generator=generator).softmax(1)
    other = scores.clone()
    other[0] = torch.tensor([1.0, 0.0, 0.0]) if scores[0].argmax() else torch.tensor([0.0, 0.0, 1.0])
    chances = (torch.arange(5000) + 0.5) / 5000
    changed = torch.zeros(3)
    for u in chances.tolist():
        one, two = (coarse.answer(some, y, 50, lambda name, u=u: u) for some in (scores, other))
        changed += torch.tensor([one.accuracy != two.accuracy, not one.recall.equal(two.recall), one.auc != two.auc])
    assert (changed / 5000 <= 1 / 50 + 1e-3).all(), changed
    assert (changed[:2] > 0).all()  # the test can fail: the image does count


def test_nothing_is_told_of_few_images():
    with pytest.raises(BadInput, match="49 images are fewer than 50"):
        coarse.answer(*scored(40, 9), 50, lambda name: 0.5)


GOOD = coarse.answer(*both(scored(80, 40), scored(45, 15, own=1)), 50, lambda name: 0.5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"images": 0},
        {"least": 0},
        {"accuracy": 1.5},
        {"accuracy": -0.5},
        {"auc": 2.0},
        {"recall": GOOD.recall + 1},
        {"recall": GOOD.recall.float()},
        {"recall": GOOD.recall[:1]},
        {"per_class": GOOD.per_class * 3},
        {"per_class": -GOOD.per_class},
    ],
)
def test_answers_that_cannot_be_are_refused(wrong):
    coarse.check(GOOD, 2)
    with pytest.raises(BadInput, match="its answer is refused"):
        coarse.check(replace(GOOD, **wrong), 2)


def test_sites_count_by_their_images():
    """150 images with 1/3 right and 50 with all: (50 + 50) / 200. The first alone tells of class 1, nobody of 2."""
    first = replace(GOOD, images=150, accuracy=1 / 3, auc=0.5)
    first = replace(first, per_class=torch.tensor([100, 50, 0]), recall=torch.tensor([0.5, 1.0, 0.0]).double())
    second = replace(first, images=50, accuracy=1.0, auc=None)
    second = replace(second, per_class=torch.tensor([50, 0, 0]), recall=torch.tensor([1.0, 0.0, 0.0]).double())
    found = coarse.pooled([first, second])
    assert (found["images"], found["images_per_class"], found["auc"]) == (200, [150, 50, 0], 0.5)
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["recall_per_class"] == [pytest.approx(2 / 3), 1.0, None]
    assert found["balanced_accuracy"] == pytest.approx(5 / 6)
    assert found["confusion"] is None
