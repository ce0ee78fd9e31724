"""A small residual network for images of 28 to 64 pixels, made to learn from few labels and to be fast on a CPU.

The first convolution halves the image, and each of the two blocks halves it again. So most of the work is done by
convolutions with many channels on few pixels, which a processor does best. GroupNorm has no statistics that clients
would have to agree on, unlike BatchNorm.
"""

import torch
from torch import Tensor, nn

from fewlabel.networks.parts import Network, head

GROUP = 8  # channels that are normalised together


def small_resnet(in_channels: int, num_classes: int, image_size: int, *, dropout: float = 0.0) -> Network:
    backbone = nn.Sequential(
        *convolution(in_channels, 32, size=5, stride=2),
        nn.ReLU(),
        Block(32, 64),
        Block(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )
    return Network(backbone, head(nn.Linear(128, num_classes), dropout))


class Block(nn.Module):
    """Two convolutions of which the first halves the image, added to the input, which a third brings to their shape."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        halved = convolution(inputs, outputs, stride=2)
        self.body = nn.Sequential(*halved, nn.ReLU(), *convolution(outputs, outputs))
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def convolution(inputs: int, outputs: int, *, size: int = 3, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return (
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False),
        nn.GroupNorm(outputs // GROUP, outputs),
    )
