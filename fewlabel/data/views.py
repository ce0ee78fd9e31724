"""Views: uint8 images to the floating-point batch a network sees, each image with random parameters of its own."""

from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

View = Callable[[Tensor, torch.Generator], Tensor]  # uint8 [N, C, H, W] -> uint8 of the same shape


def plain(images: Tensor, rng: torch.Generator) -> Tensor:
    return images


def weak(images: Tensor, rng: torch.Generator) -> Tensor:
    """Each image shifted by up to an eighth of its size, what comes in from outside being black."""
    count, channels, height, width = images.shape
    pad = max(1, width // 8)
    down, right = torch.randint(0, 2 * pad + 1, (2, count, 1, 1), generator=rng)
    padded = functional.pad(images, (pad, pad, pad, pad))
    rows = down + torch.arange(height).view(1, height, 1)
    pixel = rows * (width + 2 * pad) + right + torch.arange(width)
    pixel = pixel.view(count, 1, height * width).expand(-1, channels, -1)
    return padded.flatten(2).gather(2, pixel).view_as(images)


VIEWS: dict[str, View] = {"plain": plain, "weak": weak}
