"""Let hidden labels answer in the place of people, to measure what labels bring before anyone labels.

As in a federation, each client chooses among its own images by the run's model, and knows only its own labels.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from fewlabel.core import storage
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import batch_statistics
from fewlabel.core.rng import Rng
from fewlabel.data.added import name_of
from fewlabel.engine import record
from fewlabel.engine.worker import EVALUATION_BATCH
from fewlabel.engine.world import World
from fewlabel.inference.predict import StoredModel
from fewlabel.labeling.answers import COLUMNS, as_line
from fewlabel.labeling.chosen import seen_by
from fewlabel.learn.acquisition import choose

WHO = "simulated"


class Simulated(NamedTuple):
    """What was written: how many labels for each client and class, and how many were there before."""

    file: Path
    clients: dict[int, int]
    classes: dict[str, int]
    before: int


def simulate(run: Path, strategy: str, count: int, out: Path) -> Simulated:
    """Write a table of labels for `labels.file`: those that the run had, and `count` more, spread over its clients."""
    if not (run / record.PARTITION).is_file():
        raise BadInput(f"{run} is no simulation: hidden labels can answer only where all data are on this machine")
    world, model = World.open(run), StoredModel.open(run)
    train, classes = world.dataset.splits["train"], world.dataset.classes
    y, images = train.labels.numpy(), train.images
    held = {client: world.partition.shares[client] for client in world.partition.clients}
    free = {client: share.unlabeled[y[share.unlabeled] >= 0] for client, share in held.items()}
    free = {client: np.sort(some) for client, some in free.items() if len(some)}
    wanted = spread(count, [len(some) for some in free.values()])
    if not sum(wanted):
        raise BadInput(f"{run} has no unlabeled image whose label is known: there is nothing to answer")
    chosen: dict[int, list[int]] = {}
    for (client, some), number in zip(free.items(), wanted, strict=True):
        rng = Rng(world.experiment.seed, "label", strategy, client)

        def batches(index: np.ndarray, rng: Rng = rng) -> list[torch.Tensor]:
            parts = np.array_split(index, math.ceil(len(index) / EVALUATION_BATCH))
            return [images.view(torch.from_numpy(part), "plain", rng.torch) for part in parts]

        if not model.complete:
            batch_statistics(model.network, batches(some))
        own = held[client].labeled
        labels = np.bincount(world.known_labels.numpy()[own], minlength=len(classes)).tolist()
        centres = seen_by(model, batches(own)).features if len(own) and strategy == "k-center" else None
        picked = choose(strategy, number, seen_by(model, batches(some)), rng.stream("choice"), labels, centres)
        chosen[client] = some[picked].tolist()
    rows, earlier = [as_line(COLUMNS)], world.partition.added.T.tolist()
    rows += [line(name_of(train, image, out), classes[label]) for image, label in earlier]
    rows += [line(name_of(train, image, out), classes[y[image]]) for some in chosen.values() for image in some]
    storage.make_folder(out.absolute().parent)
    storage.write(out, b"".join(rows))
    counts = np.bincount([y[image] for some in chosen.values() for image in some], minlength=len(classes))
    by_class = dict(zip(classes, counts.tolist(), strict=True))
    return Simulated(out, {client: len(some) for client, some in chosen.items()}, by_class, len(earlier))


def line(path: str, label: str) -> bytes:
    """Return a row without a time, so that the same simulation writes the same bytes."""
    return as_line((path, label, WHO, "", "", ""))


def spread(count: int, sizes: Sequence[int]) -> list[int]:
    """Return how many of `count` labels each of these sites gives: all alike, unless some have fewer images."""
    given = [0] * len(sizes)
    while (left := count - sum(given)) > 0 and (open_ := [i for i, size in enumerate(sizes) if given[i] < size]):
        each, more = divmod(left, len(open_))
        for place, site in enumerate(open_):
            given[site] = min(sizes[site], given[site] + each + (place < more))
    return given
