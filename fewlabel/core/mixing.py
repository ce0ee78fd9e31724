"""Blends of two images and of their labels: the arithmetic of mixup (Zhang et al., ICLR 2018)."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

Batch = tuple[Tensor, Tensor]  # images, and their labels: hard, or soft


def mix(first: Batch, second: Batch, share: float, num_classes: int) -> Batch:
    """Return share * first + (1 - share) * second, of the images and of their labels. The labels become soft."""
    x = share * first[0] + (1 - share) * second[0]
    return x, share * soft(first[1], num_classes, x.dtype) + (1 - share) * soft(second[1], num_classes, x.dtype)


def soft(y: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return labels as probabilities of the classes. Those that are soft already stay as they are."""
    return y if y.ndim > 1 else one_hot(y, num_classes).to(dtype)


def draw_share(alpha: float, rng: torch.Generator) -> float:
    """Draw a share by Beta(alpha, alpha), for alpha up to 1 (Jöhnk 1964); PyTorch's own takes no generator.

    Of two uniform numbers to the power of 1/alpha whose sum is at most 1, the first one's part of the sum is so
    distributed.
    """
    while True:
        first, second = (torch.rand(2, generator=rng, dtype=torch.float64) ** (1 / alpha)).tolist()
        if 0 < first + second <= 1:
            return float(first / (first + second))
