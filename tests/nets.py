"""Networks of the tests, by `tests.nets:NAME`: small enough that a whole run takes a second."""

import torch
from torch import nn

from fewlabel.engine.conformance import small_network as tiny  # noqa: F401


def linear(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """Softmax regression from zero, whose steps can be worked out by hand."""
    layer = nn.Linear(in_channels * image_size**2, num_classes)
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.zero_()
    return nn.Sequential(nn.Flatten(), layer)


def orthogonal(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """A network whose first weights come from a factorisation, whose bits depend on the number of threads."""
    wide = nn.Linear(in_channels * image_size**2, 1024)
    nn.init.orthogonal_(wide.weight)
    return nn.Sequential(nn.Flatten(), wide, nn.ReLU(), nn.Linear(1024, num_classes))
