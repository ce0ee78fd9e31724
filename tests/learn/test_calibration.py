"""Temperature scaling, worked out by hand."""

import math

import pytest
import torch

from fewlabel.learn.calibration import COOLEST, HOTTEST, fit_temperature


def says(logit: float, right: int, wrong: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (logit, 0) for all images, of which so many are of class 0 and so many of class 1."""
    y = torch.tensor([0] * right + [1] * wrong)
    return torch.tensor([[logit, 0.0]]).expand(len(y), -1), y


@pytest.mark.parametrize(("logit", "right", "wrong"), [(4.0, 3, 1), (0.5, 9, 1), (1.0, 7, 3)])
def test_the_temperature_makes_the_mean_probability_the_share_that_is_right(logit, right, wrong):
    # sigmoid(logit / T) = right / (right + wrong), so T = logit / ln(right / wrong).
    assert fit_temperature(*says(logit, right, wrong)) == pytest.approx(logit / math.log(right / wrong), rel=1e-6)


def test_the_temperature_of_honest_probabilities_is_1_and_doubles_with_the_logits():
    logits, y = says(math.log(3), 3, 1)
    assert fit_temperature(logits, y) == pytest.approx(1, rel=1e-6)
    assert fit_temperature(2 * logits, y) == pytest.approx(2, rel=1e-6)
    assert fit_temperature(logits + 5, y) == pytest.approx(1, rel=1e-6)


def test_it_is_the_lowest_cross_entropy_of_many_classes():
    draw = torch.Generator().manual_seed(0)
    logits, y = 3 * torch.randn(200, 5, generator=draw), torch.randint(5, (200,), generator=draw)
    logits[torch.arange(200), y] += 2
    best = fit_temperature(logits, y)

    def loss(temperature: float) -> float:
        return torch.nn.functional.cross_entropy(logits.double() / temperature, y).item()

    assert loss(best) < min(loss(best * 1.01), loss(best / 1.01))


def test_a_temperature_has_ends_and_without_labels_it_is_1():
    assert fit_temperature(*says(2.0, 5, 0)) == pytest.approx(COOLEST)
    assert fit_temperature(*says(2.0, 1, 4)) == pytest.approx(HOTTEST)
    assert fit_temperature(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)) == 1.0
