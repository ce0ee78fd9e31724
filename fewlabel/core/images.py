"""What a site shows a method: images with labels, and images without, which have no label to misuse."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor


class Source(Protocol):
    """Where images come from: `views` makes normalised batches of them, on `device`, by the names of the views."""

    @property
    def device(self) -> torch.device: ...

    def views(self, index: Tensor, names: tuple[str, ...], rng: torch.Generator) -> list[Tensor]: ...


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

    def __init__(
        self,
        images: Source,
        where: Tensor,
        rng: torch.Generator,
        tally: Tally | None = None,
        balanced: int | None = None,
    ) -> None:
        self._images, self._rng, self._tally, self._balanced = images, rng, tally or Tally(), balanced
        self._where = where.to(images.device)

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
        return Labeled(self._images, self._where[index], y, self._rng, self._tally, pseudo, self._balanced)


class Labeled:
    """Images with their labels, some of which may be pseudo-labels."""

    def __init__(
        self,
        images: Source,
        where: Tensor,
        y: Tensor,
        rng: torch.Generator,
        tally: Tally | None = None,
        pseudo: Tensor | None = None,
        balanced: int | None = None,
    ) -> None:
        self._images, self._rng, self._tally, self._balanced = images, rng, tally or Tally(), balanced
        self._where, self.y = where.to(images.device), y.to(images.device)
        self._pseudo = torch.zeros_like(self._where, dtype=torch.bool) if pseudo is None else pseudo

    def __len__(self) -> int:
        return len(self._where)

    def __add__(self, other: "Labeled") -> "Labeled":
        """The images of two sets of one site."""
        where, y, pseudo = (
            torch.cat(pair) for pair in ((self._where, other._where), (self.y, other.y), (self._pseudo, other._pseudo))
        )
        return Labeled(self._images, where, y, self._rng, self._tally, pseudo, self._balanced)

    @cached_property
    def log_prior(self) -> Tensor | None:
        """The logarithm of each class's share of these labels, one image more of each; None unless they are balanced.

        A loss that adds it to the logits treats all classes alike, however rare they are here.
        """
        if self._balanced is None:
            return None
        counts = torch.bincount(self.y, minlength=self._balanced)
        return ((counts + 1) / (len(self) + self._balanced)).log()

    def batches(self, view: str = "weak", size: int = 64, shuffle: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """One pass: images and labels."""
        chosen = torch.arange(len(self), device=self._where.device)
        for index in cut(shuffled(chosen, self._rng) if shuffle else chosen, size):
            self._tally.add(len(index), int(self._pseudo[index].sum()))
            yield self._images.views(self._where[index], (view,), self._rng)[0], self.y[index]
