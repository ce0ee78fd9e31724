"""Temperature scaling: one number that makes a network's probabilities honest (Guo et al., ICML 2017)."""

import math

import torch
from torch import Tensor

COOLEST, HOTTEST = 0.05, 20.0  # between which a temperature is looked for


@torch.no_grad()
def fit_temperature(logits: Tensor, y: Tensor) -> float:
    """Return the temperature T for which `softmax(logits / T)` has the least cross-entropy on held-out labels `y`.

    The derivative of the cross-entropy by 1 / T grows with 1 / T, so halving an interval finds its zero. If all labels
    are right, the best temperature is 0; then, and if none would be hot enough, the end of the range is returned.
    Without labels it is 1.
    """
    if not len(y):
        return 1.0
    logits = logits.double()
    given = logits.gather(1, y[:, None])[:, 0]

    def slope(log_temperature: float) -> float:
        p = (logits / math.exp(log_temperature)).softmax(1)
        return float(((p * logits).sum(1) - given).mean())

    low, high = math.log(COOLEST), math.log(HOTTEST)
    for _ in range(60):
        middle = (low + high) / 2
        if slope(middle) > 0:  # too sure
            low = middle
        else:
            high = middle
    return math.exp((low + high) / 2)
