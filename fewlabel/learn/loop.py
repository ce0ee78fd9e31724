"""The one training loop of every method, at clients and at the server."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fewlabel.core import tree
from fewlabel.core.images import Labeled, Unlabeled, cut
from fewlabel.core.schema import Count, NonNegative, Positive, Share
from fewlabel.core.tree import Tree

B = TypeVar("B")


@dataclass(frozen=True)
class Local:
    """How a site trains; the defaults are RSCFed's, and decay and clipping its code's, as the papers are silent."""

    epochs: Count = 1
    batch_size: Count = 64
    lr: Positive = 0.03
    lr_unlabeled: Positive | None = None  # at sites without labels; by default the same
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: Share = 0.9  # Adam's first
    second_momentum: Share = 0.999  # Adam's alone
    weight_decay: NonNegative = 5e-4
    clip: Positive | None = 5.0  # largest norm of the gradient


class Optimizer(Protocol):
    parameters: list[Tensor]
    lr: float
    slots: dict[str, list[Tensor]]  # what it remembers of each parameter

    def step(self) -> None: ...


class SGD:
    """SGD with momentum and weight decay: the kernel of `torch.optim.SGD(fused=True)` without what lies around it.

    The first use of torch.optim loads PyTorch's compiler, two seconds in each process, and each of its steps costs a
    small network a quarter of a millisecond; this one a tenth of that.
    """

    def __init__(self, parameters: Iterable[Tensor], local: Local, lr: float | None = None) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        # Without momentum the kernel wants no buffers.
        self.slots = {"momentum": [torch.zeros_like(p) for p in self.parameters]} if local.momentum else {}
        self.local, self.lr = local, lr or local.lr

    @torch.no_grad()
    def step(self) -> None:
        gradients, parameters, momentum = _used(self)
        torch._fused_sgd_(
            parameters,
            gradients,
            *momentum or [[]],
            lr=self.lr,
            momentum=self.local.momentum,
            weight_decay=self.local.weight_decay,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )


class Adam:
    """Adam with L2 weight decay, as `torch.optim.Adam`, by its fused kernel."""

    def __init__(self, parameters: Iterable[Tensor], local: Local, lr: float | None = None) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.slots = {name: [torch.zeros_like(p) for p in self.parameters] for name in ("first", "second")}
        self.slots["steps"] = [p.new_zeros((), dtype=torch.float32) for p in self.parameters]
        self.local, self.lr = local, lr or local.lr

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
            lr=self.lr,
            beta1=self.local.momentum,
            beta2=self.local.second_momentum,
            weight_decay=self.local.weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )


def _used(optimizer: Optimizer) -> tuple[list[Tensor], list[Tensor], list[list[Tensor]]]:
    """Gradients, parameters and slots of the parameters that have a gradient."""
    which = [i for i, parameter in enumerate(optimizer.parameters) if parameter.grad is not None]
    gradients = [gradient for parameter in optimizer.parameters if (gradient := parameter.grad) is not None]
    slots = [[slot[i] for i in which] for slot in optimizer.slots.values()]
    return gradients, [optimizer.parameters[i] for i in which], slots


def optimizer(model: nn.Module, local: Local, labels: bool = True, memory: Tree | None = None) -> Optimizer:
    """The optimizer of a site with or without labels; with what `memory_of` kept of an earlier one, if given."""
    kind = SGD if local.optimizer == "sgd" else Adam
    made = kind(dict.fromkeys(tree.state(model).values()), local, local.lr if labels else local.lr_unlabeled)
    slots = memory_of(made)
    for name, value in (memory or {}).items():
        slots[name].copy_(value)
    return made


def memory_of(optimizer: Optimizer) -> Tree:
    """What an optimizer remembers, to be kept between rounds."""
    return {f"{name}.{i}": value for name, slot in optimizer.slots.items() for i, value in enumerate(slot)}


def fit(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Iterable[B],
    loss: Callable[[B], Tensor | None],
    clip: float | None = None,
    after: Callable[[], None] = lambda: None,
) -> None:
    """One step per batch, and what comes after each; none for a batch without a loss."""
    for batch in batches:
        if not model.training:
            model.train()
        value = loss(batch)
        if value is None:
            continue
        for parameter in optimizer.parameters:
            parameter.grad = None
        value.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            shorten([gradient for parameter in optimizer.parameters if (gradient := parameter.grad) is not None], clip)
        optimizer.step()
        after()


@torch.no_grad()
def shorten(gradients: list[Tensor], longest: float) -> None:
    """`nn.utils.clip_grad_norm_` to the bit, in a third of its time where a network is small."""
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    torch._foreach_mul_(gradients, (longest / (norm + 1e-6)).clamp(max=1.0))


def paired(
    labeled: Labeled | None,
    unlabeled: Unlabeled | None,
    views: tuple[str, ...],
    size: int,
    size_unlabeled: int | None = None,
    counted: int = 1,
) -> Iterator[tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, ...] | None]]:
    """One pass over a site's images in steps of a labeled and an unlabeled batch, None where it has no such images.

    Where it has both, the kind with fewer batches begins again until the other is through.
    """
    other = size_unlabeled or size
    first = _again(lambda: labeled.batches("weak", size)) if labeled else repeat(None)
    second = _again(lambda: unlabeled.batches(views, other, counted=counted)) if unlabeled else repeat(None)
    yield from islice(zip(first, second, strict=False), steps(labeled, unlabeled, size, other))


def steps(labeled: Labeled | None, unlabeled: Unlabeled | None, size: int, size_unlabeled: int) -> int:
    """How many steps `paired` makes of them."""
    sets = ((labeled, size), (unlabeled, size_unlabeled))
    return max(len(cut(torch.arange(len(some)), number)) if some else 0 for some, number in sets)


def _again(start: Callable[[], Iterator[B]]) -> Iterator[B]:
    while True:
        yield from start()
