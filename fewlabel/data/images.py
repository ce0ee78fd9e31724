"""The images of a split in memory, and the views of them that methods ask for."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fewlabel.core.errors import BadInput
from fewlabel.data.views import see_all


@dataclass(frozen=True)
class Images:
    """A split's images, kept once in memory as uint8 [N, C, H, W]; views are made and normalised per batch.

    What a site takes of them is where their pixels are.
    """

    pixels: Tensor
    mean: tuple[float, ...]  # per channel, of pixels in 0..1
    std: tuple[float, ...]
    weak: str = "shift"  # recipes of the views that a method may ask for, by their names in VIEWS
    strong: str = "randaugment"

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @cached_property
    def _affine(self) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(each).view(-1, 1, 1).to(self.pixels.device) for each in (self.mean, self.std))
        return 1 / (255 * std), mean / std

    def view(self, index: Tensor, name: str, rng: torch.Generator) -> Tensor:
        return self.views(index, (name,), rng)[0]

    def views(self, index: Tensor, names: tuple[str, ...], rng: torch.Generator) -> list[Tensor]:
        recipes = {"plain": "none", "weak": self.weak, "strong": self.strong}
        for name in names:
            if name not in recipes:
                raise BadInput(f"there is no view '{name}'; there are {', '.join(recipes)}")
        seen = see_all([recipes[name] for name in names], self.pixels.index_select(0, index), rng)
        scale, shift = self._affine
        return [one.to(torch.float32).mul_(scale).sub_(shift) for one in seen]
