"""The images of a site, as a method sees them: with labels, or without any label that it could misuse."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fewlabel.core import sampling, schedule
from fewlabel.core.mixing import draw_share, mix


class Source(Protocol):
    """A store of images. `views` returns one normalised batch, on `device`, for each named view."""

    @property
    def device(self) -> torch.device: ...

    def views(self, index: Tensor, names: tuple[str, ...], rng: torch.Generator) -> list[Tensor]: ...


def cut(order: Tensor, size: int) -> list[Tensor]:
    """Cut an order of images into batches. A single image left over joins the batch before: BatchNorm needs two."""
    batches = list(torch.split(order, size)) if len(order) else []
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches[-2:] = [torch.cat(batches[-2:])]
    return batches


def shuffled(images: Tensor, rng: torch.Generator) -> Tensor:
    """Return the images in random order. A single image comes twice, each time in a new view: BatchNorm needs two."""
    order = images[torch.randperm(len(images), generator=rng)]
    return order.repeat(2) if len(order) == 1 else order


def drawn(images: Tensor, size: int, rng: torch.Generator) -> Iterable[Tensor]:
    """Return the batches of a pass in training: in random order, unless a sampler draws them otherwise."""
    sampler = sampling.sampler()
    if sampler is None:
        return cut(shuffled(images, rng), size)
    return (images[places.to(images.device)] for places in sampler(len(images), size))


@dataclass
class Tally:
    """How many labeled and unlabeled images a site trained on: those of each batch, whenever a step is made with it.

    A loop that makes its steps without `learn.loop.fit` is not seen. If a site has only such loops, the images that it
    drew while gradients were on count instead.
    """

    stepped: list[int] = field(default_factory=lambda: [0, 0])  # labeled, unlabeled
    drawn: list[int] = field(default_factory=lambda: [0, 0])
    steps: int = 0  # that were seen
    begun: list[int] = field(default_factory=lambda: [0, 0])  # passes over labeled and unlabeled images, to train

    @property
    def passes(self) -> int:
        """Passes over a site's images. If it has both kinds, the one with fewer images may be passed more often."""
        return min((number for number in self.begun if number), default=0)

    def begin(self, labeled: bool, unlabeled: bool) -> None:
        """Count a pass that begins, unless nothing is trained. Raise an error if it is one too many."""
        self.add(self.begun, labeled, unlabeled)
        schedule.check_passes(self.passes)

    @property
    def trained(self) -> list[int]:
        return self.stepped if self.steps else self.drawn

    def draw(self, batch: tuple[Tensor, ...], images: int, unlabeled: int) -> None:
        """Count a batch as drawn. Each of its tensors will know how many images a step with it trains on."""
        counts = Counts(self, images - unlabeled, unlabeled)
        for part in batch:
            part.counts = counts  # type: ignore[attr-defined]
        self.add(self.drawn, counts.labeled, counts.unlabeled)

    @staticmethod
    def add(where: list[int], labeled: int, unlabeled: int) -> None:
        if torch.is_grad_enabled():
            where[0] += labeled
            where[1] += unlabeled


@dataclass(frozen=True, eq=False)
class Counts:
    """What a step with a batch adds to a site's tally."""

    tally: Tally
    labeled: int
    unlabeled: int


def count_step(batch: object) -> None:
    """Count the images of a batch as trained on. It holds tensors of one or more batches that a site drew."""
    found = set(counts_in(batch))  # once, however many tensors of a batch it holds
    for tally in {id(counts.tally): counts.tally for counts in found}.values():
        tally.steps += 1
    for counts in found:
        counts.tally.add(counts.tally.stepped, counts.labeled, counts.unlabeled)


def counts_in(batch: object) -> Iterator[Counts]:
    if isinstance(batch, tuple | list):
        for part in batch:
            yield from counts_in(part)
    elif isinstance(found := getattr(batch, "counts", None), Counts):
        yield found


@dataclass(frozen=True)
class Mixup:
    """How a site blends the labeled images of a batch with each other."""

    alpha: float
    num_classes: int

    def blend(self, views: list[Tensor], y: Tensor, rng: torch.Generator) -> tuple[Tensor, ...]:
        """Return a batch mixed with itself in random order, by one share for all its images and views."""
        share, order = draw_share(self.alpha, rng), torch.randperm(len(y), generator=rng).to(y.device)
        pairs = [mix((x, y), (x[order], y[order]), share, self.num_classes) for x in views]
        return (*(x for x, _ in pairs), pairs[0][1])


class Unlabeled:
    """Images without labels. An `index` refers to this site's unlabeled images, counted from 0."""

    def __init__(
        self,
        images: Source,
        where: Tensor,
        rng: torch.Generator,
        tally: Tally | None = None,
        balanced: int | None = None,
        least: int = 1,
        mixup: Mixup | None = None,
    ) -> None:
        self._images, self._rng, self._tally, self._balanced = images, rng, tally or Tally(), balanced
        self._where, self._least, self._mixup = where.to(images.device), least, mixup

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
        """Pass once over the images. For each batch, yield the requested views in order, and the index of its images.

        `counted` is the number of views that go through a backward pass in each step.
        """
        chosen = torch.arange(len(self), device=self._where.device) if subset is None else subset
        if shuffle:
            self._tally.begin(False, True)
        for index in drawn(chosen, size, self._rng) if shuffle else cut(chosen, size):
            batch = (*self._images.views(self._where[index], views, self._rng), index)
            self._tally.draw(batch, counted * len(index), counted * len(index))
            yield batch

    def count(self, images: int) -> None:
        """Count images as trained on when `batches` cannot know it."""
        for where in (self._tally.stepped, self._tally.drawn):
            self._tally.add(where, 0, images)

    def with_labels(self, index: Tensor, y: Tensor) -> "Labeled":
        """Return the images at `index` with fixed pseudo-labels: a class for each, or soft ones, [images, classes]."""
        pseudo = torch.ones_like(index, dtype=torch.bool)
        rest = self._rng, self._tally, pseudo, self._balanced, self._least, self._mixup
        return Labeled(self._images, self._where[index], y, *rest)


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Join the labels of two sets. If only one of them has soft labels, those of the other become one-hot."""
    if first.ndim == second.ndim:
        return torch.cat([first, second])
    soft = first if first.ndim > 1 else second
    return torch.cat([y if y.ndim > 1 else one_hot(y, soft.shape[1]).to(soft.dtype) for y in (first, second)])


class Labeled:
    """Images with labels `y`. Some may be pseudo-labels, and these may be soft: a probability for each class."""

    def __init__(
        self,
        images: Source,
        where: Tensor,
        y: Tensor,
        rng: torch.Generator,
        tally: Tally | None = None,
        pseudo: Tensor | None = None,
        balanced: int | None = None,
        least: int = 1,
        mixup: Mixup | None = None,
    ) -> None:
        self._images, self._rng, self._tally, self._balanced = images, rng, tally or Tally(), balanced
        self._where, self.y, self._least = where.to(images.device), y.to(images.device), least
        self._mixup = mixup
        self._pseudo = torch.zeros_like(self._where, dtype=torch.bool) if pseudo is None else pseudo

    def __len__(self) -> int:
        return len(self._where)

    def __add__(self, other: "Labeled") -> "Labeled":
        """Join two sets of images of one site."""
        where, pseudo = (torch.cat(pair) for pair in ((self._where, other._where), (self._pseudo, other._pseudo)))
        rest = self._rng, self._tally, pseudo, self._balanced, self._least, self._mixup
        return Labeled(self._images, where, joined(self.y, other.y), *rest)

    def at(self, index: Tensor) -> "Labeled":
        """Return only the images at `index`, with their labels."""
        rest = self._rng, self._tally, self._pseudo[index], self._balanced, self._least, self._mixup
        return Labeled(self._images, self._where[index], self.y[index], *rest)

    def without_labels(self) -> Unlabeled:
        """Return these images without their labels. Training on them counts as training on unlabeled images."""
        rest = self._rng, self._tally, self._balanced, self._least, self._mixup
        return Unlabeled(self._images, self._where, *rest)

    @cached_property
    def log_prior(self) -> Tensor | None:
        """The logarithm of each class's share of these labels, one image more of each; None unless they are balanced.

        A loss that adds it to the logits treats all classes alike, however rare they are here.
        """
        if self._balanced is None:
            return None
        counts = self.y.sum(0) if self.y.ndim > 1 else torch.bincount(self.y, minlength=self._balanced)
        return ((counts + 1) / (len(self) + self._balanced)).log()

    def batch_size(self, size: int) -> int:
        """Return the size of batches, smaller than the one asked for if there would be too few to learn in a pass."""
        return size if self._least == 1 else max(2, min(size, len(self) // self._least))

    def batches(self, view: str = "weak", size: int = 64, shuffle: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        """Pass once over the images. Yield each batch with its labels. They are soft if the recipe mixes images."""
        return ((x, y) for x, y in self.views((view,), size, shuffle))

    def views(
        self, names: tuple[str, ...], size: int = 64, shuffle: bool = True, counted: int = 1
    ) -> Iterator[tuple[Tensor, ...]]:
        """Pass once over the images. For each batch, yield the requested views in order, and the labels.

        If the recipe mixes images and the order is random, as in training, each image is blended with another one of
        its batch, and so are their labels. `counted` is the number of views that go through a backward pass.
        """
        chosen = torch.arange(len(self), device=self._where.device)
        if shuffle:
            pseudo = int(self._pseudo.sum())
            self._tally.begin(pseudo < len(self), pseudo > 0)
        for index in drawn(chosen, self.batch_size(size), self._rng) if shuffle else cut(chosen, size):
            views, y = self._images.views(self._where[index], names, self._rng), self.y[index]
            batch = self._mixup.blend(views, y, self._rng) if self._mixup and shuffle else (*views, y)
            self._tally.draw(batch, counted * len(index), counted * int(self._pseudo[index].sum()))
            yield batch
