"""Evidence on which of two models is better, from counts over labels that nobody trained on."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewlabel.core.images import Labeled
from fewlabel.core.tasks import Asked

WIDTH = 1.96  # standard errors on each side of a 95 % interval
MOST = 10**6  # held-out images of a class that a site may have


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
        if any((part < 0).any() or (part > MOST).any() for part in parts):
            raise ValueError("its exam has impossible counts")
        if (self.first + self.second > self.images).any():
            raise ValueError("its exam has more answers than images")


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


def gain(counts: Exam) -> Gain | None:
    """Return the gain in balanced accuracy over classes with images, or None if there are none.

    Both models see the same images, so only those count on which they differ. Of class c with n images, b that only the
    first and w that only the second gets right, the gain is (b - w) / n. Its variance is (b + w - (b - w)^2 / n) / n^2
    with half an image more in each of b and w, and two in n, so that a few images never look certain.
    """
    there = counts.images > 0
    if not there.any():
        return None
    n, b, w = (part[there].double() for part in (counts.images, counts.first, counts.second))
    value = float(((b - w) / n).mean())
    variance = (b + w + 1 - (b - w) ** 2 / (n + 2)) / (n + 2) ** 2
    error = float(variance.sum().sqrt() / len(n))
    return Gain(value, value - WIDTH * error, value + WIDTH * error, int(n.sum()))
