"""The images of a split in memory, and the views of them that methods ask for."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fewlabel.core.errors import BadInput
from fewlabel.data.views import make_views


@dataclass(frozen=True)
class Images:
    """A split's images, held in memory once as uint8 [N, C, H, W]. Views are made and normalised batch by batch.

    The batches of a site are on the device of the pixels.
    """

    pixels: Tensor
    mean: tuple[float, ...]  # per channel, for pixels in 0..1
    std: tuple[float, ...]
    weak: str = "shift"  # names in VIEWS of the views that a method may ask for
    strong: str = "randaugment"

    @property
    def device(self) -> torch.device:
        return self.pixels.device

    @cached_property
    def _affine(self) -> tuple[Tensor, Tensor]:
        mean, std = (torch.tensor(each).view(-1, 1, 1).to(self.pixels.device) for each in (self.mean, self.std))
        return 1 / (255 * std), mean / std

    def view(self, index: Tensor, name: str, rng: torch.Generator) -> Tensor:
        """Return one view of these images, normalised."""
        return self.views(index, (name,), rng)[0]

    def views(self, index: Tensor, names: tuple[str, ...], rng: torch.Generator) -> list[Tensor]:
        """Return several views of these images, normalised."""
        recipes = {"plain": "none", "weak": self.weak, "strong": self.strong}
        for name in names:
            if name not in recipes:
                raise BadInput(f"there is no view '{name}'; there are {', '.join(recipes)}")
        views = make_views([recipes[name] for name in names], self.pixels.index_select(0, index), rng)
        scale, shift = self._affine
        return [one.to(torch.float32).mul_(scale).sub_(shift) for one in views]
