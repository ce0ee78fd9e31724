"""FedMatch's network: its parameters are the sum of two sets, of which one is frozen while the other learns."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewlabel import tree
from fewlabel.learn.loop import SGD, Adam, Local, Optimizer, fit
from fewlabel.learn.sparse import Packed, unpack
from fewlabel.tree import Tree


class Decomposed:
    """A network that runs with sigma + psi as its parameters."""

    def __init__(self, model: nn.Module, sigma: Tree, psi: Tree) -> None:
        self.model = model
        self.sigma = {name: value.clone().requires_grad_() for name, value in tree.parameters(sigma).items()}
        self.psi = {name: value.clone().requires_grad_() for name, value in psi.items()}

    def __call__(self, x: Tensor, sigma: Tree, psi: Tree) -> Tensor:
        logits: Tensor = functional_call(self.model, {name: sigma[name] + psi[name] for name in psi}, (x,))
        return logits

    @torch.no_grad()
    def with_others(self, x: Tensor, others: list[Tree]) -> list[Tensor]:
        """What it says with each of these in place of psi."""
        self.model.eval()
        said = [self(x, self.sigma, psi) for psi in others]
        self.model.train()
        return said

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
            if unlabeled:
                fit(self.model, optimizers[1], [unlabeled], by_images, clip)

    def norms(self) -> tuple[Tensor, Tensor]:
        """Of psi: its squared distance from a frozen sigma, and the sum of its absolute values."""
        far = [(self.sigma[name].detach() - psi).square().sum() for name, psi in self.psi.items()]
        return torch.stack(far).sum(), torch.stack([psi.abs().sum() for psi in self.psi.values()]).sum()


def together(sigma: Tree, psi: Tree) -> Tree:
    return sigma | {name: sigma[name] + value for name, value in psi.items()}


def frozen(part: Tree) -> Tree:
    return {name: value.detach() for name, value in part.items()}


def floats(part: Tree) -> Tree:
    """What can be trained or averaged."""
    return {name: value for name, value in part.items() if value.is_floating_point()}


def zeros(part: Tree) -> Tree:
    return {name: torch.zeros_like(value) for name, value in tree.parameters(part).items()}


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
