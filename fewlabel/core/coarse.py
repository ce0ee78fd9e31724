"""What a site tells of a model on its own test images: a few shares in coarse steps, so that no image can be read.

Whoever chooses a model could read single images from exact counts. So each share is told in steps that at least `least`
images stand for, and a value between two steps is rounded up or down by chance, so that it is right on average. If one
image were another, or gave another score, each share would differ with a probability of at most 1 / least. An image
counts in three shares: the accuracy, the recall of its class, and the AUC.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fewlabel.core import metrics, robust
from fewlabel.core.errors import BadInput

MOST = 10**8  # test images that a site may say it has
LEAST = 50  # test images that everything a site tells is about, at least
BINARY = ("binary_accuracy", "binary_sensitivity", "binary_specificity", "binary_f1")
UNTOLD = (*BINARY, "precision", "recall", "specificity", "f1", "auc_per_class", "confusion")  # metrics that sites keep
Chance = Callable[[str], float]  # a number in [0, 1) for each name, which whoever asks cannot know before


@dataclass(frozen=True)
class Answer:
    """All that leaves a site about a model that it measured."""

    least: int  # images that a step of a share stands for, at least
    images: int  # to test on, in whole multiples of `least`
    per_class: Tensor  # int64 [C]: those of each class, in the same way; 0 if there are fewer
    accuracy: float
    recall: Tensor  # float64 [C]; 0 where `per_class` is 0
    auc: float | None  # mean over classes; None if there are too few images


def rounded(images: int, least: int) -> int:
    """Return a number of images as it may be told."""
    return images // least * least


def answer(scores: Tensor, y: Tensor, least: int, chance: Chance) -> Answer:
    """Measure a model by its probabilities `scores` [N, C] on images of the classes `y`."""
    if len(y) < least:
        raise BadInput(f"{len(y)} images are fewer than {least}")
    classes = scores.shape[1]
    sizes, right = y.bincount(minlength=classes), scores.argmax(1) == y

    def told(name: str, share: float, steps: int) -> float:
        return min(steps, math.floor(share * steps + chance(name))) / steps

    recall = [
        told(f"recall {c}", float(right[y == c].double().mean()), size // least) if size >= least else 0.0
        for c, size in enumerate(sizes.tolist())
    ]
    compared, steps = auc_steps(sizes.tolist(), least)
    auc = told("auc", float(metrics.auc(scores, y)[compared].mean()), steps) if steps else None
    accuracy = told("accuracy", float(right.double().mean()), len(y) // least)
    per_class = torch.tensor([rounded(size, least) for size in sizes.tolist()])
    return Answer(least, rounded(len(y), least), per_class, accuracy, torch.tensor(recall, dtype=torch.float64), auc)


def auc_steps(sizes: list[int], least: int) -> tuple[list[int], int]:
    """Return the classes whose AUC is told, and the steps of their mean.

    One image moves the AUC of its own class by at most 1 / its images, and that of another by 1 / all not of it.
    """
    images = sum(sizes)
    compared = [c for c, size in enumerate(sizes) if min(size, images - size) >= least]
    if not compared:
        return [], 0
    others = sum(1 / (images - sizes[c]) for c in compared)
    own = (1 / sizes[c] - 1 / (images - sizes[c]) for c in compared)
    moved = (others + max(0.0, *own)) / len(compared)
    return compared, math.floor(1 / (least * moved) + 1e-9)


def check(found: Answer, classes: int) -> None:
    """Raise BadInput if this cannot be a site's answer."""
    shapes = (found.per_class.shape, found.recall.shape) == ((classes,), (classes,))
    kinds = (found.per_class.dtype, found.recall.dtype) == (torch.int64, torch.float64)
    if not shapes or not kinds or found.least < 1 or not found.least <= found.images <= MOST:
        raise BadInput(f"its answer is refused: it is not that of one set of images of {classes} classes")
    # Classes are rounded down, each by itself, so they are at most as many as all.
    counts = int(found.per_class.min()) >= 0 and int(found.per_class.sum()) <= found.images
    shares = [found.accuracy, *found.recall.tolist(), *([] if found.auc is None else [found.auc])]
    if not counts or not all(0 <= share <= 1 for share in shares):
        raise BadInput("its answer is refused: shares are from 0 to 1, and classes have no more images than all")


def pooled(answers: Iterable[Answer], largest_share: float | None = None) -> metrics.Metrics:
    """Return the metrics of all sites together, each by its images. What no site tells is None.

    Nobody can check how many images a site has. With a largest share, none counts for more than that.
    """
    answers = list(answers)
    claimed = torch.tensor([found.images for found in answers]).double()
    images = claimed
    if largest_share is not None:
        images = torch.tensor(robust.capped(claimed.tolist(), largest_share)).double()
    per_class = torch.stack([found.per_class for found in answers]).double() * (images / claimed)[:, None]
    recall = (per_class * torch.stack([found.recall for found in answers])).sum(0) / per_class.sum(0)  # 0/0 is NaN
    told = [(n, found.auc) for n, found in zip(images.tolist(), answers, strict=True) if found.auc is not None]
    known = [None if math.isnan(value) else value for value in recall.tolist()]
    balanced = [value for value in known if value is not None]
    return dict.fromkeys(UNTOLD) | {
        "images": int(claimed.sum()),
        "accuracy": float((images * torch.tensor([found.accuracy for found in answers]).double()).sum() / images.sum()),
        "balanced_accuracy": sum(balanced) / len(balanced) if balanced else None,
        "auc": sum(n * auc for n, auc in told) / sum(n for n, _ in told) if told else None,
        "recall_per_class": known,
        "images_per_class": torch.stack([found.per_class for found in answers]).sum(0).tolist(),
        "steps_of": max(found.least for found in answers),
    }
