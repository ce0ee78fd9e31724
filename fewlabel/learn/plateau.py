"""How well a network does on labeled images, and a learning rate that falls when the network stops improving."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fewlabel.core.federation import Site
from fewlabel.core.images import Labeled
from fewlabel.core.tree import Tree


@dataclass(frozen=True)
class Score:
    accuracy: float
    loss: float  # mean cross-entropy


@torch.no_grad()
def score(say: Callable[[Tensor], Tensor], labeled: Labeled) -> Score:
    """Score a network, given as a function from images to logits, on labeled images."""
    right, loss = 0, 0.0
    for x, y in labeled.batches("plain", 500, shuffle=False):
        logits = say(x)
        right += int((logits.argmax(1) == y).sum())
        loss += float(cross_entropy(logits, y, reduction="sum"))
    return Score(right / len(labeled), loss / len(labeled))


def score_on_validation(site: Site[Any], weights: Tree) -> Score:
    """Score weights on the server's validation set, which must exist."""
    assert site.validation is not None
    return score(site.load(weights).eval(), site.validation)


@dataclass(frozen=True)
class Rate:
    lr: float
    best: float | None = None  # the lowest validation loss so far
    worse: int = 0  # rounds since then

    def after(self, loss: float, patience: int, factor: float) -> "Rate":
        """Return the rate after a round with this validation loss: lower if `patience` rounds were no better."""
        if loss < (math.inf if self.best is None else self.best):
            return Rate(self.lr, loss)
        if self.worse + 1 < patience:
            return replace(self, worse=self.worse + 1)
        return Rate(self.lr / factor, self.best)


def updated(
    rates: dict[str, Rate], scores: dict[str, Score], lr: float, patience: int, factor: float
) -> dict[str, Rate]:
    """Return all rates by name after a round in which some models were scored. A new rate starts as `lr`."""
    return rates | {who: rates.get(who, Rate(lr)).after(found.loss, patience, factor) for who, found in scores.items()}
