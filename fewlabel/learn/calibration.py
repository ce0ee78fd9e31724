"""Calibration: one temperature for all logits, and the classes that a model should expect.

Temperature scaling is by Guo et al. (ICML 2017). Logits of a model that was trained with logit adjustment stand for
classes that are equally frequent; for others, the logarithm of their shares is added (Menon et al., ICLR 2021).
"""

import torch
from torch import Tensor

HOTTEST, COLDEST = 20.0, 1e-3  # bounds of temperatures; beyond, labels do not tell one from another
HALVINGS = 50


def temperature(logits: Tensor, y: Tensor, log_prior: Tensor | None = None) -> float | None:
    """Return the temperature T with the least cross-entropy of `logits / T` [N, C] with the classes `y` [N].

    `log_prior` [C] is added after the division, where logits stand for equal classes and those in `y` are not. There is
    no such temperature if all images are right, or if the logits say nothing: then it is None.
    """
    logits, shift = logits.double(), 0.0 if log_prior is None else log_prior.double()

    def slope(inverse: float) -> float:
        """Return the derivative of the cross-entropy by 1/T, in which it is convex."""
        expected = ((inverse * logits + shift).softmax(1) * logits).sum(1)
        return float((expected - logits.gather(1, y[:, None])[:, 0]).mean())

    low, high = 1 / HOTTEST, 1 / COLDEST
    if not len(y) or not slope(low) < 0 < slope(high):
        return None
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / low


def shares(counts: Tensor) -> Tensor:
    """Return the share of each class, with one image more of each, so that none is impossible."""
    return (counts.double() + 1) / (counts.sum() + len(counts))


def calibrated(logits: Tensor, temperature: float | None, shift: Tensor | None) -> Tensor:
    """Return logits divided by a temperature, and moved to the classes that are expected."""
    logits = logits if temperature is None else logits / temperature
    return logits if shift is None else logits + shift


def log_shares(y: Tensor, classes: int) -> Tensor:
    return shares(torch.bincount(y, minlength=classes)).log()
