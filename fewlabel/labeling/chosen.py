"""Choose the images that a person labels next, by what a run's model says about those without a label."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fewlabel.core.errors import BadInput
from fewlabel.core.federation import batch_statistics
from fewlabel.core.rng import Rng
from fewlabel.data.datasets import recolour, resize
from fewlabel.data.own.listing import Item, Listing
from fewlabel.data.own.reader import images_of_npz
from fewlabel.data.pictures import Unreadable
from fewlabel.inference.predict import BATCH, Reader, StoredModel
from fewlabel.learn.acquisition import Seen, choose
from fewlabel.learn.calibration import calibrated
from fewlabel.learn.contrast import with_features

Progress = Callable[[int, int], None]  # images read, and all of them


def seen_by(model: StoredModel, batches: Iterable[Tensor]) -> Seen:
    """Return what a model says about images: calibrated probabilities, and features."""
    shift = None if model.card.shift is None else torch.tensor(model.card.shift)
    parts, model_features = [], []
    with torch.inference_mode():
        for x in batches:
            features, logits = with_features(model.network, x)
            model_features.append(features.flatten(1).float())
            parts.append(calibrated(logits.float(), model.card.temperature, shift).softmax(1))
    found = Seen(torch.cat(parts), torch.cat(model_features))
    if not found.p.isfinite().all():
        raise BadInput("the model has diverged: its probabilities are no numbers; give another --run")
    return found


@dataclass(frozen=True)
class Choice:
    """Images to label, the most useful first, and what the model says about each."""

    items: tuple[Item, ...]
    p: tuple[tuple[float, ...], ...]  # a probability for each class, or nothing without a model
    unreadable: dict[str, str]  # images that could not be read, with the reason


def name_of(listing: Listing, item: Item) -> str:
    """Return what decoded data call an image: its path, or its name in an npz."""
    return item.name if listing.kind == "npz" else os.path.abspath(item.file)


def unlabeled(listing: Listing) -> list[Item]:
    """Return the images without a label that a run trains on. Of copies under one name, the first counts."""
    free = [item for item in listing.items if not item.label and item.split in ("", "train")]
    return list({name_of(listing, item): item for item in reversed(free)}.values())[::-1]


def choose_images(
    listing: Listing,
    answered: set[str],
    count: int,
    strategy: str,
    rng: Rng,
    model: StoredModel | None = None,
    classes: Sequence[str] = (),
    labels: Sequence[int] = (),
    progress: Progress = lambda done, total: None,
) -> Choice:
    """Choose among the images that have no label, neither in the data nor among the answers (by name).

    `labels` are how many labels of each class people gave. Those of the data are counted here.
    """
    free = [item for item in unlabeled(listing) if name_of(listing, item) not in answered]
    if not free:
        raise BadInput(f"every image in {listing.path} has a label or an answer: there is nothing left to label")
    if model is None or strategy == "random":  # no model decides, so it need not see more than what is chosen
        nothing = Seen(torch.zeros(len(free), 1), torch.zeros(len(free), 1))
        free = [free[row] for row in choose("random", count, nothing, rng)]
        if model is None:
            return Choice(tuple(free), ((),) * len(free), {})
        kept, found, unreadable = look_at(model, listing, free, progress)
        return Choice(tuple(kept), rows(found.p), unreadable)
    known = [item for item in listing.items if item.label in classes and item.split in ("", "train")]
    there = np.bincount([classes.index(item.label) for item in known], minlength=len(classes))
    kept, found, unreadable = look_at(model, listing, free, progress)
    centres = look_at(model, listing, known, progress)[1].features if strategy == "k-center" and known else None
    order = choose(strategy, count, found, rng, (there + np.array(labels or [0] * len(classes))).tolist(), centres)
    return Choice(tuple(kept[row] for row in order), rows(found.p[order]), unreadable)


def rows(p: Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(round(value, 4) for value in row) for row in p.tolist())


def look_at(
    model: StoredModel, listing: Listing, items: Sequence[Item], progress: Progress
) -> tuple[list[Item], Seen, dict[str, str]]:
    """Show images to a model, as its card says. Return those that can be read, what it says, and why others cannot."""
    reader, unreadable = Reader(model.card, ()), dict[str, str]()
    kept: list[Item] = []

    def pixels() -> Iterator[np.ndarray]:
        kept.clear()
        for number, (item, read) in enumerate(images_of(reader, listing, items), 1):
            try:
                image = recolour(resize(read()[None], model.card.image_size), model.card.channels)[0]
            except Unreadable as error:
                unreadable[item.name] = str(error)
            else:
                kept.append(item)
                yield image
            progress(number, len(items))

    def batches() -> Iterator[Tensor]:
        some: list[np.ndarray] = []
        for image in pixels():
            some.append(image)
            if len(some) >= BATCH + 2:  # so that no batch has a single image, which BatchNorm could not measure
                yield reader.normalised(some[:BATCH])
                del some[:BATCH]
        if some:
            yield reader.normalised(some)

    if not model.complete:
        batch_statistics(model.network, batches())
    several = batches()
    if (first := next(several, None)) is None:
        name, why = next(iter(unreadable.items()))
        raise BadInput(f"none of {len(items)} images can be read; {name}: {why}")
    return kept, seen_by(model, chain([first], several)), unreadable


def images_of(
    reader: Reader, listing: Listing, items: Sequence[Item]
) -> Iterator[tuple[Item, Callable[[], np.ndarray]]]:
    """Yield images with what reads each of them as uint8 [C, H, W]."""
    if listing.kind != "npz":
        for item in items:
            yield item, lambda file=item.file: reader.picture(file)  # type: ignore[misc]
        return
    wanted = {item.name for item in items}
    for item, image in zip(listing.items, images_of_npz(listing), strict=True):
        if item.name in wanted:
            yield item, lambda image=image: image  # type: ignore[misc]


def classes_for(listing: Listing, model: StoredModel | None, run: Path | None) -> tuple[str, ...]:
    """Return the classes that people choose from: the model's, or without one those of the data."""
    if model is None:
        if len(listing.classes) < 2:
            raise BadInput(
                f"{listing.path} names {len(listing.classes)} classes, and two or more are needed; list them in a "
                "classes.txt beside the images, or give a --run, whose model knows them"
            )
        return listing.classes
    if unknown := [label for label in listing.classes if label not in model.card.classes]:
        there = ", ".join(model.card.classes)
        raise BadInput(f"{listing.path} has the class '{unknown[0]}', and the model in {run} knows only {there}")
    return tuple(model.card.classes)
