"""Mixup as part of a method. The recipe mixes the images of labels by itself (`train.mixup`)."""

import torch

from fewlabel.core.mixing import Batch, mix
from fewlabel.core.rng import Rng


def mixup(batch: Batch, rng: Rng, alpha: float, num_classes: int, other: Batch | None = None) -> Batch:
    """Mix a batch with another one as large, or with itself in random order. The share is drawn by Beta(alpha, alpha).

    Give `rng` a name of its own, such as `site.rng.stream("mixup")`, and the same stream in every step.
    """
    share = float(rng.numpy.beta(alpha, alpha))
    if other is None:
        order = torch.randperm(len(batch[0]), generator=rng.torch).to(batch[0].device)
        other = batch[0][order], batch[1][order]
    return mix(batch, other, share, num_classes)
