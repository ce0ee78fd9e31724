"""What a site holds: images with labels and images without. The latter have no label that a method could misuse."""

from collections.abc import Iterator
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


def cut(order: Tensor, size: int) -> list[Tensor]:
    """An order of images as batches. A single image left over joins the batch before: BatchNorm needs two."""
    batches = list(torch.split(order, size)) if len(order) else []
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def shuffled(images: Tensor, rng: torch.Generator) -> Tensor:
    """A random order to train in. Where there is a single image, it comes twice, seen anew: BatchNorm needs two."""
    order = images[torch.randperm(len(images), generator=rng)]
    return order.repeat(2) if len(order) == 1 else order


@dataclass
class Tally:
    """How many images a site trained on: those drawn while gradients were on, by whether it has their labels."""

    labeled: int = 0
    unlabeled: int = 0

    def add(self, images: int, unlabeled: int) -> None:
        if torch.is_grad_enabled():
            self.labeled += images - unlabeled
            self.unlabeled += unlabeled


class Unlabeled:
    """Images alone. `index` counts this site's unlabeled images from 0."""

    def __init__(self, images: Images, where: Tensor, rng: torch.Generator, tally: Tally | None = None) -> None:
        self._images, self._rng, self._tally = images, rng, tally or Tally()
        self._where = where.to(images.pixels.device)

    def __len__(self) -> int:
        return len(self._where)

    def batches(
        self,
        views: tuple[str, ...] = ("weak",),
        size: int = 64,
        subset: Tensor | None = None,
        shuffle: bool = True,
        counted: int = 1,
    ) -> Iterator[tuple[Tensor, ...]]:
        """One pass: for each batch the views asked for, in their order, and the index of its images.

        `counted` is how many of the views go through a backward pass.
        """
        chosen = torch.arange(len(self), device=self._where.device) if subset is None else subset
        for index in cut(shuffled(chosen, self._rng) if shuffle else chosen, size):
            self.count(counted * len(index))
            yield (*self._images.views(self._where[index], views, self._rng), index)

    def count(self, images: int) -> None:
        """Counts images as trained on, where `batches` cannot know."""
        self._tally.add(images, images)

    def with_labels(self, index: Tensor, y: Tensor) -> "Labeled":
        """A fixed pseudo-labeled set."""
        pseudo = torch.ones_like(index, dtype=torch.bool)
        return Labeled(self._images, self._where[index], y, self._rng, self._tally, pseudo)


class Labeled:
    """Images with their labels, some of which may be pseudo-labels."""

    def __init__(
        self,
        images: Images,
        where: Tensor,
        y: Tensor,
        rng: torch.Generator,
        tally: Tally | None = None,
        pseudo: Tensor | None = None,
    ) -> None:
        self._images, self._rng, self._tally = images, rng, tally or Tally()
        self._where, self.y = where.to(images.pixels.device), y.to(images.pixels.device)
        self._pseudo = torch.zeros_like(self._where, dtype=torch.bool) if pseudo is None else pseudo

    def __len__(self) -> int:
        return len(self._where)

    def __add__(self, other: "Labeled") -> "Labeled":
        """The images of two sets of one site."""
        where, y, pseudo = (
            torch.cat(pair) for pair in ((self._where, other._where), (self.y, other.y), (self._pseudo, other._pseudo))
        )
        return Labeled(self._images, where, y, self._rng, self._tally, pseudo)

    def batches(self, view: str = "weak", size: int = 64, shuffle: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass: images and labels."""
        chosen = torch.arange(len(self), device=self._where.device)
        for index in cut(shuffled(chosen, self._rng) if shuffle else chosen, size):
            self._tally.add(len(index), int(self._pseudo[index].sum()))
            yield self._images.view(self._where[index], view, self._rng), self.y[index]
