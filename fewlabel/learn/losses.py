"""Losses, each a pure function of what a network says and what it should have said."""

from torch import Tensor, nn

from fewlabel.core.tree import Tree


def proximal(model: nn.Module, anchor: Tree) -> Tensor:
    """FedProx: half the squared distance of a network's parameters from those it started with."""
    parts = [(value - anchor[name]).square().sum() for name, value in model.named_parameters()]
    return sum(parts[1:], start=parts[0]) / 2


def information(p: Tensor) -> Tensor:
    """IsoFed eq. 4: low where each prediction is sure and all together are diverse; log p is kept finite."""
    mean, floor = p.mean(0), 1e-12
    diversity = (mean * mean.clamp(min=floor).log()).sum()
    return diversity - (p * p.clamp(min=floor).log()).sum(1).mean()
