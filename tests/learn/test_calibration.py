"""Calibration: the temperature with the least cross-entropy, worked out by hand, and priors added to logits."""

import math

import pytest
import torch

from fewlabel.learn.calibration import calibrated, log_shares, shares, temperature

LN3 = math.log(3)


def two(right: int, wrong: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits 2 and 0 for all images, of which so many are of class 0 and so many of class 1."""
    y = torch.tensor([0] * right + [1] * wrong)
    return torch.tensor([[2.0, 0.0]] * len(y)), y


def test_the_temperature_makes_three_of_four_as_sure_as_three_in_four():
    """softmax(2 / T, 0) = 3/4 if 2 / T = ln 3. The cross-entropy has its minimum there."""
    assert temperature(*two(3, 1)) == pytest.approx(2 / LN3)
    assert calibrated(torch.tensor([2.0, 0.0]), 2 / LN3, None).softmax(0)[0].item() == pytest.approx(3 / 4)


def test_with_a_prior_the_temperature_explains_only_what_the_prior_does_not():
    """9 of 10 are right, and the prior has odds of 3 to 1: 2 / T + ln 3 = ln 9, so 2 / T = ln 3."""
    prior = torch.tensor([3 / 4, 1 / 4]).log()
    assert temperature(*two(9, 1), prior) == pytest.approx(2 / LN3)


@pytest.mark.parametrize(("right", "wrong"), [(4, 0), (0, 4), (2, 2), (1, 3), (0, 0)])
def test_without_a_minimum_there_is_no_temperature(right, wrong):
    """All right: the colder the better. Half right or less: the hotter the better."""
    assert temperature(*two(right, wrong)) is None


def test_a_class_without_labels_still_has_a_share():
    assert shares(torch.tensor([3, 1, 0])).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert log_shares(torch.tensor([0, 0, 0, 1]), 3).exp().tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_a_prior_is_added_after_the_temperature():
    """Logits 2 and 0 at T = 2 are odds of e; a prior of 1 to e makes them even."""
    shift = torch.tensor([0.0, 1.0])
    assert calibrated(torch.tensor([2.0, 0.0]), 2.0, shift).softmax(0).tolist() == pytest.approx([0.5, 0.5])
