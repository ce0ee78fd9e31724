"""FedMatch's network: its parameters are the sum of two sets, of which one is frozen while the other learns."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from fewlabel.core import tree
from fewlabel.core.plots import WEIGHTS, WEIGHTS_ABOUT, PerClient
from fewlabel.core.tree import Tree
from fewlabel.learn.functional import Borrowed, Headed
from fewlabel.learn.loop import fit
from fewlabel.learn.optim import SGD, Adam, Local, Optimizer
from fewlabel.learn.sparse import Packed, placed, unpack

LEAVES = (
    "Sigma and psi after training, or psi alone. Sparse ones travel as a bitmap of what changed and the new values. "
    "A curious server can learn about training images from them, and "
)
PARTS = "Sigma learns from labels, psi from unlabeled images."
WEIGHTS_OF_PARTS = tuple(
    PerClient(WEIGHTS, f"{WEIGHTS_ABOUT} {PARTS}", f"weight_{part}", f"weight of each client in the average of {part}")
    for part in ("sigma", "psi")
)


def one_rate(method: Any, experiment: Any) -> Iterator[str]:
    """Caution about a second learning rate, which FedMatch does not have."""
    if method.local.lr_unlabeled not in (None, method.local.lr):
        yield (
            f"{experiment.name}: method.local.lr_unlabeled changes nothing, as labeled and unlabeled clients have one "
            "learning rate, method.local.lr"
        )


class Decomposed:
    """A network that runs with sigma + psi as its parameters."""

    def __init__(self, model: nn.Module, sigma: Tree, psi: Tree) -> None:
        self.model = model
        self.sigma = {name: value.clone().requires_grad_() for name, value in tree.parameters(sigma).items()}
        self.psi = {name: value.clone().requires_grad_() for name, value in psi.items()}
        self._borrowed = Borrowed(model)
        normed = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
        # Where weights are many, to read them once is faster; where they are few, smaller batches are.
        self._at_once = isinstance(model, Headed) and not normed and sum(map(Tensor.numel, self.psi.values())) > 2**20
        self._others: list[tuple[Tree, Tree]] = []  # what stood in for psi, and its sum with sigma as it is

    def __call__(self, x: Tensor, sigma: Tree, psi: Tree) -> Tensor:
        return self._borrowed(summed(sigma, psi), x)

    def logits(self, weights: Tree, *views: Tensor) -> tuple[Tensor, ...]:
        """Its logits for each of these, with a sum of sigma and psi that serves them all."""
        if self._at_once:
            return torch.split(self._borrowed(weights, torch.cat(views)), [len(x) for x in views])
        return tuple(self._borrowed(weights, x) for x in views)

    @torch.no_grad()
    def with_others(self, x: Tensor, others: list[Tree]) -> list[Tensor]:
        """What it says with each of these in place of psi; they are added to sigma again only after it moved."""
        if [id(psi) for psi, _ in self._others] != [id(psi) for psi in others]:
            self._others = [(psi, summed(self.sigma, psi)) for psi in others]
        return [self._borrowed.judge(weights, x) for _, weights in self._others]

    def optimizers(self, local: Local, lr: float) -> tuple[Optimizer, Optimizer]:
        """Of sigma and of psi."""
        kind = SGD if local.optimizer == "sgd" else Adam
        return kind(self.sigma.values(), local, lr), kind(self.psi.values(), local, lr)

    def train(
        self,
        optimizers: tuple[Optimizer, Optimizer],
        steps: Iterable[tuple[Any | None, Any | None]],
        by_labels: Callable[[Any], Tensor],
        by_images: Callable[[Any], Tensor],
        clip: float | None = None,
    ) -> None:
        """In each step sigma by the batch with labels, then psi by the one without."""
        for labeled, unlabeled in steps:
            if labeled:
                fit(self.model, optimizers[0], [labeled], by_labels, clip)
                self._others = []  # the optimizers' kernels do not count up a tensor's version
            if unlabeled:
                fit(self.model, optimizers[1], [unlabeled], by_images, clip)

    def far(self) -> Tensor:
        """Psi's squared distance from a frozen sigma."""
        parts = [mse_loss(psi, self.sigma[name].detach(), reduction="sum") for name, psi in self.psi.items()]
        return torch.stack(parts).sum()

    def large(self) -> Tensor:
        """The sum of psi's absolute values."""
        return torch.stack([psi.abs().sum() for psi in self.psi.values()]).sum()


def summed(sigma: Tree, psi: Tree) -> Tree:
    return {name: sigma[name] + value for name, value in psi.items()}


def together(sigma: Tree, psi: Tree) -> Tree:
    return sigma | summed(sigma, psi)


def frozen(part: Tree) -> Tree:
    return {name: value.detach() for name, value in part.items()}


def floats(part: Tree) -> Tree:
    """What can be trained or averaged."""
    return {name: value for name, value in part.items() if value.is_floating_point()}


def zeros(part: Tree) -> Tree:
    return {name: torch.zeros_like(value) for name, value in tree.parameters(part).items()}


@dataclass(frozen=True)
class Update:
    """What a client sends of FedMatch's model: the parts that it moved."""

    sigma: Packed | None = None  # where labels moved it
    psi: Packed | None = None  # where unlabeled images did

    def check(self, network: Tree) -> None:
        for part, whole in ((self.sigma, floats(network)), (self.psi, tree.parameters(network))):
            if part:
                placed(part, whole)

    def moved(self, labeled: int, unlabeled: int) -> "Update":
        """By so many images; where nobody else moves sigma, that of a client without labels would be the average."""
        return Update(self.sigma if labeled else None, self.psi if unlabeled else None)


def average(parts: Mapping[str, Packed], old: Tree, weights: Iterable[float]) -> Tree:
    """The mean of sigmas or psis that were packed against `old`, one at a time; of none, the old one."""
    moved = (old | unpack(part, floats(old)) for part in parts.values())
    return tree.mean(zip(weights, moved, strict=True), default=old)


def traffic(sigmas: Mapping[str, Packed], psis: Mapping[str, Packed], old: Tree, clients: int) -> dict[str, float]:
    """What a client sent, and what is not zero in its psi, in the mean, as shares of one model's numbers."""
    count = sum(value.numel() for value in old.values())
    sent = sum(len(part.values) for parts in (sigmas, psis) for part in parts.values())
    filled = sum(int(value.count_nonzero()) for part in psis.values() for value in unpack(part, old).values())
    return {"sent": sent / (clients * count), "psi_density": filled / (max(1, len(psis)) * count)}


def shares(**parts: tuple[Mapping[str, Packed], Sequence[float]]) -> dict[str, float]:
    """How much each client counts in the averages of sigma and of psi, by names for the round's line."""
    return {
        f"weight_{part}_{who}": weight / sum(weights)
        for part, (moved, weights) in parts.items()
        for who, weight in zip(moved, weights, strict=True)
    }
