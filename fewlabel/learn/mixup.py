"""Mixup: train on blends of two images and of their labels (Zhang et al., ICLR 2018)."""

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fewlabel.core.rng import Rng

Batch = tuple[Tensor, Tensor]  # images, and their labels: hard, or soft


def mix(first: Batch, second: Batch, share: float, num_classes: int) -> Batch:
    """Return share * first + (1 - share) * second, of the images and of their labels. The labels become soft."""
    x = share * first[0] + (1 - share) * second[0]
    return x, share * soft(first[1], num_classes, x.dtype) + (1 - share) * soft(second[1], num_classes, x.dtype)


def mixup(batch: Batch, rng: Rng, alpha: float, num_classes: int, other: Batch | None = None) -> Batch:
    """Mix a batch with another one as large, or with itself in random order. The share is drawn by Beta(alpha, alpha).

    Give `rng` a name of its own, such as `site.rng.stream("mixup")`, and the same stream in every step.
    """
    share = float(rng.numpy.beta(alpha, alpha))
    if other is None:
        order = torch.randperm(len(batch[0]), generator=rng.torch).to(batch[0].device)
        other = batch[0][order], batch[1][order]
    return mix(batch, other, share, num_classes)


def soft(y: Tensor, num_classes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return labels as probabilities of the classes. Those that are soft already stay as they are."""
    return y if y.ndim > 1 else one_hot(y, num_classes).to(dtype)
