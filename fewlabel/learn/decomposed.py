"""FedMatch's network: its parameters are the sum of two parts. One part is frozen while the other learns."""

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
from fewlabel.learn.sparse import Packed, pack, placed, unpack

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
    """Warn about a second learning rate, which FedMatch does not have."""
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
        # One large batch reads the weights only once, which is faster if they are many. Else small batches are faster.
        self._at_once = isinstance(model, Headed) and not normed and sum(map(Tensor.numel, self.psi.values())) > 2**20
        self._others: list[tuple[Tree, Tree]] = []  # other psis, each with its sum with the present sigma

    def __call__(self, x: Tensor, sigma: Tree, psi: Tree) -> Tensor:
        return self._borrowed(summed(sigma, psi), x)

    def logits(self, weights: Tree, *views: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of each view. All views share one sum of sigma and psi: `weights`."""
        if self._at_once:
            return torch.split(self._borrowed(weights, torch.cat(views)), [len(x) for x in views])
        return tuple(self._borrowed(weights, x) for x in views)

    @torch.no_grad()
    def with_others(self, x: Tensor, others: list[Tree]) -> list[Tensor]:
        """Return the logits with each of `others` in place of psi. Their sums with sigma are kept until sigma moves."""
        if [id(psi) for psi, _ in self._others] != [id(psi) for psi in others]:
            self._others = [(psi, summed(self.sigma, psi)) for psi in others]
        return [self._borrowed.judge(weights, x) for _, weights in self._others]

    def optimizers(self, local: Local, lr: float) -> tuple[Optimizer, Optimizer]:
        """Return an optimizer of sigma and one of psi."""
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
        """In each step, train sigma on the batch with labels, then psi on the batch without."""
        for labeled, unlabeled in steps:
            if labeled:
                fit(self.model, optimizers[0], [labeled], by_labels, clip)
                self._others = []  # sigma moved; its version does not show it, because of fused kernels
            if unlabeled:
                fit(self.model, optimizers[1], [unlabeled], by_images, clip)

    def far(self) -> Tensor:
        """Return psi's squared distance from a frozen sigma."""
        parts = [mse_loss(psi, self.sigma[name].detach(), reduction="sum") for name, psi in self.psi.items()]
        return torch.stack(parts).sum()

    def large(self) -> Tensor:
        """Return the sum of psi's absolute values."""
        return torch.stack([psi.abs().sum() for psi in self.psi.values()]).sum()


def summed(sigma: Tree, psi: Tree) -> Tree:
    return {name: sigma[name] + value for name, value in psi.items()}


def together(sigma: Tree, psi: Tree) -> Tree:
    return sigma | summed(sigma, psi)


def frozen(part: Tree) -> Tree:
    return {name: value.detach() for name, value in part.items()}


def floats(part: Tree) -> Tree:
    """Return the entries that can be trained or averaged."""
    return {name: value for name, value in part.items() if value.is_floating_point()}


def zeros(part: Tree) -> Tree:
    return {name: torch.zeros_like(value) for name, value in tree.parameters(part).items()}


@dataclass(frozen=True)
class Update:
    """A client's upload in FedMatch: the parts of the model that it moved."""

    sigma: Packed | None = None  # if labels moved it
    psi: Packed | None = None  # if unlabeled images moved it

    def check(self, network: Tree) -> None:
        for part, whole in ((self.sigma, floats(network)), (self.psi, tree.parameters(network))):
            if part:
                placed(part, whole)

    def trees(self, sent: Any) -> dict[str, tuple[Tree, Tree]]:
        """Return the parts as they were sent and as they came back."""
        sigma, psi = floats(sent.sigma), unpack(sent.psi, zeros(sent.sigma))
        parts = {"sigma": (self.sigma, sigma), "psi": (self.psi, psi)}
        return {name: (old, unpack(part, old)) for name, (part, old) in parts.items() if part}

    def with_trees(self, sent: Any, trees: Mapping[str, Tree]) -> "Update":
        """Return the update with other parts in place of those that came back."""
        sigma, psi = floats(sent.sigma), unpack(sent.psi, zeros(sent.sigma))
        return Update(
            pack(trees["sigma"], sigma) if "sigma" in trees else None,
            pack(trees["psi"], psi) if "psi" in trees else None,
        )

    def moved(self, labeled: int, unlabeled: int) -> "Update":
        """Return the parts that a client with so many images can move. A sigma that no label moved must not count."""
        return Update(self.sigma if labeled else None, self.psi if unlabeled else None)


def average(parts: Mapping[str, Packed], old: Tree, weights: Iterable[float]) -> Tree:
    """Average sigmas, or psis, that were packed against `old`, one at a time. If there are none, return `old`."""
    moved = (old | unpack(part, floats(old)) for part in parts.values())
    return tree.mean(zip(weights, moved, strict=True), default=old)


def traffic(sigmas: Mapping[str, Packed], psis: Mapping[str, Packed], old: Tree, clients: int) -> dict[str, float]:
    """Return two shares of a model's numbers, as means over clients: those sent, and those of psi that are not zero."""
    count = sum(value.numel() for value in old.values())
    sent = sum(len(part.values) for parts in (sigmas, psis) for part in parts.values())
    filled = sum(int(value.count_nonzero()) for part in psis.values() for value in unpack(part, old).values())
    return {"sent": sent / (clients * count), "psi_density": filled / (max(1, len(psis)) * count)}


def shares(**parts: tuple[Mapping[str, Packed], Sequence[float]]) -> dict[str, float]:
    """Return each client's weight in the averages of sigma and psi, by its name in the round's line."""
    return {
        f"weight_{part}_{who}": weight / sum(weights)
        for part, (moved, weights) in parts.items()
        for who, weight in zip(moved, weights, strict=True)
    }
