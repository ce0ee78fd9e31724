"""The one training loop of every method, at clients and at the server."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from fewlabel.strict import Count, NonNegative, Positive, Share

B = TypeVar("B")


@dataclass(frozen=True)
class Local:
    """How a site trains; the defaults are RSCFed's, and the last two its code's, on which the papers are silent."""

    epochs: Count = 1
    batch_size: Count = 64
    lr: Positive = 0.03
    momentum: Share = 0.9
    weight_decay: NonNegative = 5e-4
    clip: Positive | None = 5.0  # largest norm of the gradient


def sgd(model: nn.Module, local: Local) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay)


def fit(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[B],
    loss: Callable[[B], Tensor],
    clip: float | None = None,
) -> None:
    """One step per batch."""
    model.train()
    for batch in batches:
        optimizer.zero_grad()
        loss(batch).backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
