"""Optimizers: SGD and Adam on PyTorch's fused kernels, and the settings of a site's training."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from fewlabel.core import tree
from fewlabel.core.schedule import allowed, scaled
from fewlabel.core.schema import Count, NonNegative, Positive, Share
from fewlabel.core.tree import Tree


@dataclass(frozen=True)
class Local:
    """How a site trains. The defaults are RSCFed's; weight decay and clipping are from its code, not its paper."""

    epochs: Count = 1  # passes over a site's images in a round
    batch_size: Count = 64  # images in a batch
    lr: Positive = 0.03  # learning rate
    lr_unlabeled: Positive | None = None  # learning rate at sites without labels; by default the same
    optimizer: Literal["sgd", "adam"] = "sgd"  # which optimizer
    momentum: Share = 0.9  # momentum of SGD, or beta_1 of Adam
    second_momentum: Share = 0.999  # beta_2 of Adam
    weight_decay: NonNegative = 5e-4  # pull of weights towards zero
    clip: Positive | None = 5.0  # largest norm of a gradient; longer ones are shortened to it


class Optimizer(Protocol):
    """An optimizer changes parameters by their gradients, one step at a time."""

    parameters: list[Tensor]
    lr: float
    slots: dict[str, list[Tensor]]  # what it remembers about each parameter

    def step(self) -> None: ...


class SGD:
    """SGD with momentum and weight decay: the kernel of `torch.optim.SGD(fused=True)` without the rest of torch.optim.

    The first use of torch.optim loads PyTorch's compiler, which takes two seconds in each process. Each of its steps
    takes a quarter of a millisecond for a small network. A step here takes a tenth of that.
    """

    def __init__(self, parameters: Iterable[Tensor], local: Local, lr: float | None = None) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        # Without momentum the kernel wants no buffers.
        self.slots = {"momentum": [torch.zeros_like(p) for p in self.parameters]} if local.momentum else {}
        self.local, self.lr = local, scaled(local.lr if lr is None else lr)

    @torch.no_grad()
    def step(self) -> None:
        gradients, parameters, momentum = _used(self)
        torch._fused_sgd_(
            parameters,
            gradients,
            *momentum or [[]],
            lr=allowed(self.lr),
            momentum=self.local.momentum,
            weight_decay=self.local.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Adam:
    """Adam with L2 weight decay, like `torch.optim.Adam`, on its fused kernel."""

    def __init__(self, parameters: Iterable[Tensor], local: Local, lr: float | None = None) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.slots = {name: [torch.zeros_like(p) for p in self.parameters] for name in ("first", "second")}
        self.slots["steps"] = [p.new_zeros((), dtype=torch.float32) for p in self.parameters]
        self.local, self.lr = local, scaled(local.lr if lr is None else lr)

    @torch.no_grad()
    def step(self) -> None:
        gradients, parameters, (first, second, steps) = _used(self)
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            parameters,
            gradients,
            first,
            second,
            [],
            steps,
            lr=allowed(self.lr),
            beta1=self.local.momentum,
            beta2=self.local.second_momentum,
            weight_decay=self.local.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def _used(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Return gradients, parameters and slots of the parameters that have a gradient."""
    which = [i for i, parameter in enumerate(optimizer.parameters) if parameter.grad is not None]
    gradients = [gradient for parameter in optimizer.parameters if (gradient := parameter.grad) is not None]
    slots = [[slot[i] for i in which] for slot in optimizer.slots.values()]
    return gradients, [optimizer.parameters[i] for i in which], slots


def optimizer(model: nn.Module, local: Local, labels: bool = True, memory: Tree | None = None) -> Optimizer:
    """Make the optimizer of a site with or without labels. With a `memory` from `memory_of`, it goes on from there."""
    kind = SGD if local.optimizer == "sgd" else Adam
    made = kind(dict.fromkeys(tree.state(model).values()), local, local.lr if labels else local.lr_unlabeled)
    slots = memory_of(made)
    for name, value in (memory or {}).items():
        slots[name].copy_(value)
    return made


def memory_of(optimizer: Optimizer) -> Tree:
    """Return what an optimizer remembers, to keep it between rounds."""
    return {f"{name}.{i}": value for name, slot in optimizer.slots.items() for i, value in enumerate(slot)}
