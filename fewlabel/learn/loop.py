"""The one training loop of every method, at clients and at the server."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

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


class Optimizer(Protocol):
    parameters: list[Tensor]

    def zero_grad(self) -> None: ...

    def step(self) -> None: ...


class SGD:
    """SGD with momentum and weight decay: the kernel of `torch.optim.SGD(fused=True)` without what lies around it.

    The first use of torch.optim loads PyTorch's compiler, two seconds in each process, and each of its steps costs a
    small network a quarter of a millisecond; this one a tenth of that. Momentum is open to methods that keep it.
    """

    def __init__(self, parameters: Iterable[Tensor], local: Local) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.momentum = [torch.zeros_like(parameter) for parameter in self.parameters]
        self.local = local

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        used = [(p, p.grad, m) for p, m in zip(self.parameters, self.momentum, strict=True) if p.grad is not None]
        parameters, gradients, momentum = (list(part) for part in zip(*used, strict=True))
        torch._fused_sgd_(
            parameters,
            gradients,
            momentum if self.local.momentum else [],  # without momentum the kernel wants no buffers
            lr=self.local.lr,
            momentum=self.local.momentum,
            weight_decay=self.local.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


def fit(
    model: nn.Module,
    optimizer: Optimizer,
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
            nn.utils.clip_grad_norm_(optimizer.parameters, clip)
        optimizer.step()
