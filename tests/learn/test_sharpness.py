"""The weights nearby where a loss is highest, worked out by hand."""

import pytest
import torch

from fewlabel.learn.sharpness import uphill


def test_asam_moves_large_weights_further_by_a_radius_in_their_own_scale():
    weights = {"1.weight": torch.tensor([2.99, -3.99]), "1.bias": torch.tensor([12.0])}
    gradients = [torch.tensor([1.0, 1.0]), torch.tensor([12.0])]
    # T is 3 and 4 for the weights and 1 for the bias, so |T g| = |(3, 4, 12)| = 13 and T^2 g = (9, 16, 12).
    moved = uphill(weights, gradients, 1.3)
    assert moved["1.weight"].tolist() == pytest.approx([2.99 + 0.9, -3.99 + 1.6])
    assert moved["1.bias"].tolist() == pytest.approx([12 + 1.2])


def test_without_a_slope_the_weights_stay():
    weights = {"1.weight": torch.tensor([1.0, 0.0])}
    assert torch.equal(uphill(weights, [torch.zeros(2)], 0.1)["1.weight"], weights["1.weight"])


def test_the_gradient_at_the_moved_weights_reaches_the_weights_unchanged():
    weight = torch.tensor([0.99], requires_grad=True)
    moved = uphill({"weight": weight}, [torch.tensor([5.0])], 0.5)  # T is 1: to 1.49
    moved["weight"].square().sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == pytest.approx([2 * 1.49])
