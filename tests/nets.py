"""Networks of the tests, by `tests.nets:NAME`: small enough that a whole run takes a second."""

import torch
from torch import nn


def tiny(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """One of each that a federation must treat apart: weights, BatchNorm in two places, and dropout."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, num_classes),
    )


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
