"""Evidence on which of two models is better, from counts over labels that nobody trained on."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fewlabel.core.federation import Federation, Site, broadcast
from fewlabel.core.images import Labeled
from fewlabel.core.tasks import Asked
from fewlabel.core.tree import Tree

ENOUGH = 30  # labels, before anything is beyond doubt
FEWEST = 5  # labels of a class that counts
WIDTH = 1.96  # standard errors on each side of a 95 % interval


@dataclass(frozen=True)
class Exam:
    """How two models did on held-out images, by class. Exams of several sites add up."""

    images: Tensor  # number of images
    first: Tensor  # how many of them only the first model gets right
    second: Tensor  # how many only the second gets right

    def check_answer(self, asked: Asked) -> None:
        """Raise ValueError if these cannot be counts of a site's images."""
        parts = (self.images, self.first, self.second)
        if any(part.dtype != torch.int64 or part.shape != (asked.classes,) for part in parts):
            raise ValueError(f"its exam must have {asked.classes} whole numbers")
        # By class first: a sum of large numbers may wrap around.
        if any((part < 0).any() or (part > asked.held_out).any() for part in parts):
            raise ValueError(f"its exam has counts below 0, or beyond the {asked.held_out} labels that it holds out")
        if int(self.images.sum()) > asked.held_out:
            raise ValueError(f"its exam has {int(self.images.sum())} images, and it holds out {asked.held_out} labels")
        if (self.first + self.second > self.images).any():
            raise ValueError("its exam has more answers than images")


@dataclass(frozen=True)
class Models:
    """Two models to compare."""

    first: Tree
    second: Tree


@dataclass(frozen=True)
class Gain:
    """By how much the first model's balanced accuracy is above the second's, with its 95 % interval."""

    value: float
    low: float
    high: float
    images: int


def nothing(num_classes: int) -> Exam:
    """Return the exam of a site that holds no labels out."""
    none = torch.zeros(num_classes, dtype=torch.int64)
    return Exam(none, none, none)


def total(exams: list[Exam]) -> Exam:
    """Add up the exams of several sites."""
    images, first, second = (
        torch.stack([getattr(exam, part) for exam in exams]).sum(0) for part in ("images", "first", "second")
    )
    return Exam(images, first, second)


def bounded(one: Exam, counts: float) -> Exam:
    """Return an exam of which only a part counts."""
    return one if counts == 1 else Exam(counts * one.images, counts * one.first, counts * one.second)


@torch.no_grad()
def right(model: nn.Module, images: Labeled, size: int = 256) -> Tensor:
    """Return which images a model gets right, in order."""
    model.eval()
    return torch.cat([model(x).argmax(1) == y for x, y in images.batches("plain", size, shuffle=False)])


def exam(first: Tensor, second: Tensor, y: Tensor, num_classes: int) -> Exam:
    """Count by class which images (labels `y`) only one of two models gets right."""
    images, better, worse = (
        torch.bincount(y[which], minlength=num_classes)
        for which in (torch.ones_like(first), first & ~second, second & ~first)
    )
    return Exam(images, better, worse)


def sat(site: Site[Any], models: Models) -> Exam:
    """Let two models sit an exam on the labels that a site holds out, or on its validation images."""
    images = site.held_out or site.validation
    if not images:
        return nothing(site.num_classes)
    first, second = (right(site.load(model), images) for model in (models.first, models.second))
    return exam(first, second, images.y, site.num_classes)


def gain(counts: Exam) -> Gain | None:
    """Return the gain in balanced accuracy over classes with five images or more, or None if there are none.

    Both models see the same images, so only those count on which they differ. Of class c with n images, b that only the
    first and w that only the second gets right, the gain is (b - w) / n. Its variance is (b + w - (b - w)^2 / n) / n^2
    with half an image more in each of b and w, and two in n, so that a few images never look certain.
    """
    there = counts.images >= FEWEST
    if not there.any():
        return None
    n, b, w = (part[there].double() for part in (counts.images, counts.first, counts.second))
    value = float(((b - w) / n).mean())
    variance = (b + w + 1 - (b - w) ** 2 / (n + 2)) / (n + 2) ** 2
    error = float(variance.sum().sqrt() / len(n))
    return Gain(value, value - WIDTH * error, value + WIDTH * error, int(n.sum()))


def worse_without_any(exams: list[Exam], own: list[Exam]) -> bool:
    """Return True if the first model is worse beyond doubt, whichever exam of another site is left out.

    So no single site decides. What is left must be enough. The server's own exams are never left out, and a site that
    is alone cannot be.
    """
    some = [one for one in exams if one.images.any()]
    alone = len(some) + any(bool(one.images.any()) for one in own) < 2
    left = [some] if alone else [some, *(some[:n] + some[n + 1 :] for n in range(len(some)))]
    found = [gain(total(part + own)) for part in left if part + own]
    return bool(found) and all(one is not None and one.images >= ENOUGH and one.high < 0 for one in found)


def judged(exams: list[Exam], own: list[Exam]) -> dict[str, float]:
    """Return the gain of the first model by the exams of sites and the server's own, and whether it is to be given up.

    The names are those of a run's lines. Without enough labels of any class, there is nothing to return.
    """
    found = gain(total(exams + own)) if exams + own else None
    if found is None:
        return {}
    interval = {"gain": found.value, "gain_low": found.low, "gain_high": found.high}
    return {**interval, "gain_images": found.images, "given_up": float(worse_without_any(exams, own))}


def examined(fed: Federation, task: Any, models: Models) -> bool:
    """Let two models sit exams wherever labels are, by a task that calls `sat`. Return whether to give up the first.

    What came out is in the round's line.
    """
    exams = [bounded(one.upload, one.counts) for one in fed.run(task, broadcast(fed.labeled, models))]
    own = [*fed.map(task, [models])] if fed.server.validation or fed.server.held_out else []
    found = judged(exams, own)
    fed.log(**found)
    return bool(found.get("given_up"))


def told(lines: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Say whether unlabeled images helped, by the last exam in the lines of a run."""
    for line in [line for line in lines if "gain" in line][-1:]:
        value, low, high = (100 * line[name] for name in ("gain", "gain_low", "gain_high"))
        sure = line["gain_images"] >= ENOUGH and not low <= 0 <= high
        verdict = ("helped" if value > 0 else "made it worse") if sure else "may or may not have helped"
        yield (
            f"Unlabeled images {verdict}: {value:+.1f} points of balanced accuracy against the same training without "
            f"them, on {line['gain_images']:,.0f} held-out or validation labels in round {line['round']} (95 % "
            f"interval {low:+.1f} to {high:+.1f}).{' So labels alone are what is shipped.' if line['given_up'] else ''}"
        )
