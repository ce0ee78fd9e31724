"""Losses, each a pure function of what a network says and what it should have said."""

from torch import Tensor, nn

from fewlabel.tree import Tree


def proximal(model: nn.Module, anchor: Tree) -> Tensor:
    """FedProx: half the squared distance of a network's parameters from those it started with."""
    parts = [(value - anchor[name]).square().sum() for name, value in model.named_parameters()]
    return sum(parts[1:], start=parts[0]) / 2
