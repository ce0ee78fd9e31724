"""Decide which images are for training, for validation and for the test."""

import numpy as np

from fewlabel.core.errors import BadInput
from fewlabel.core.rng import Rng
from fewlabel.data.raw import Part

SIDES = ("train", "validation", "test")
UNDIVIDED = "undivided"  # a site's split: it trains on all images that it does not keep for testing

# Percentages of all images. FedMatch's are 63,000/3,500/3,500 of Fashion-MNIST and 54,000/3,000/3,000 of CIFAR-10.
SPLITS: dict[str, tuple[int, int, int]] = {"80-20": (80, 0, 20), "70-10-20": (70, 10, 20), "fedmatch": (90, 5, 5)}
DRAWN = "70-10-20"  # if none is published
# How many of the published training images are for validation, where none is published; the test stays as it is.
TAKEN = {"validation-5000": 5000}


def sides(parts: dict[str, Part], split: str, seed: int) -> dict[str, np.ndarray]:
    """Return for each image of each part its side: train, validation or test.

    `published` leaves images where they are, or draws 70-10-20 if no splits are published. Every other split is drawn
    from all images together, except `validation-5000`, which leaves the test as published. It has its own random
    stream, so no other setting changes it.
    """
    if split == UNDIVIDED:
        return {name: np.full(len(part), "test" if name == "test" else "train") for name, part in parts.items()}
    if split == "published" and "all" not in parts:
        return {name: np.full(len(part), name) for name, part in parts.items()}
    if split in TAKEN:
        return taken(parts, TAKEN[split], Rng("split", split, seed))
    split = DRAWN if split == "published" else split
    if split not in SPLITS:
        raise BadInput(f"there is no split '{split}'; there are published, {', '.join([*SPLITS, *TAKEN])}")
    label = np.concatenate([part.labels for part in parts.values()])
    drawn = unlabeled_aside(groups(parts), label >= 0, SPLITS[split], Rng("split", split, seed))
    ends = np.cumsum([len(part) for part in parts.values()])
    return dict(zip(parts, np.split(drawn, ends[:-1]), strict=True))


def taken(parts: dict[str, Part], count: int, rng: Rng) -> dict[str, np.ndarray]:
    """Take so many of the published training images for validation. All others stay where they are."""
    if set(parts) != {"train", "test"} or len(parts["train"]) <= count or parts["train"].groups is not None:
        need = f"published splits for training and test, no other, and more than {count:,} ungrouped training images"
        raise BadInput(f"data.split = 'validation-{count}' needs {need}; choose another one")
    side = {name: np.full(len(part), name, dtype="<U10") for name, part in parts.items()}
    side["train"][rng.numpy.choice(len(side["train"]), count, replace=False)] = "validation"
    return side


def groups(parts: dict[str, Part]) -> np.ndarray:
    """Return a number for each image, equal within a group. Without groups all numbers differ."""
    given = [part.groups for part in parts.values() if part.groups is not None]
    if len(given) < len(parts):
        return np.arange(sum(map(len, parts.values())))
    number: np.ndarray = np.unique(np.concatenate(given), return_inverse=True)[1]
    return number


def unlabeled_aside(group: np.ndarray, known: np.ndarray, percent: tuple[int, int, int], rng: Rng) -> np.ndarray:
    """Draw sides for images with labels. Those without are for training, or left out if their group is elsewhere."""
    if known.all():
        return draw(group, percent, rng)
    side = np.full(len(group), SIDES[0], dtype="<U10")
    side[known] = draw(np.unique(group[known], return_inverse=True)[1], percent, rng)
    elsewhere = group[known & (side != SIDES[0])]
    side[~known & np.isin(group, elsewhere)] = ""
    return side


def draw(group: np.ndarray, percent: tuple[int, int, int], rng: Rng) -> np.ndarray:
    """Fill one side after another with groups in random order. At a border a group goes where its first image falls."""
    sizes = np.bincount(group)
    order = rng.numpy.permutation(len(sizes))
    first = np.empty_like(sizes)
    first[order] = np.cumsum(sizes[order]) - sizes[order]
    borders = [len(group) * share // 100 for share in np.cumsum(percent[:2]).tolist()]
    side: np.ndarray = np.array(SIDES)[np.searchsorted(borders, first, side="right")[group]]
    return side
