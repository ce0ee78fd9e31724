"""FedMatch's network: its parameters are the sum of two sets, of which one is frozen while the other learns."""

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fewlabel import tree
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


def together(sigma: Tree, psi: Tree) -> Tree:
    return sigma | {name: sigma[name] + value for name, value in psi.items()}


def frozen(part: Tree) -> Tree:
    return {name: value.detach() for name, value in part.items()}


def floats(part: Tree) -> Tree:
    """What can be trained or averaged."""
    return {name: value for name, value in part.items() if value.is_floating_point()}


def zeros(part: Tree) -> Tree:
    return {name: torch.zeros_like(value) for name, value in tree.parameters(part).items()}
