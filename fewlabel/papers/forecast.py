"""What a reproduction will take, told before its first run: images, time here, and what counts as success."""

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from fewlabel.core import storage
from fewlabel.core.described import own_warmup
from fewlabel.core.errors import FewLabelError
from fewlabel.core.rng import Rng
from fewlabel.data import partition
from fewlabel.data.partition import Holding, Partition
from fewlabel.engine import conformance, device, record
from fewlabel.engine.executor import Job
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import threads
from fewlabel.engine.serial import Serial
from fewlabel.engine.sweep import place
from fewlabel.engine.world import World, dataset_of, image_size
from fewlabel.experiment import Experiment, Net, dumps
from fewlabel.papers.reproduce import missing_data
from fewlabel.papers.tables import METRIC_NAMES, PaperRow
from fewlabel.report.tables import Table
from fewlabel.report.terminal import span

FEW = 20  # images of each kind that a client has in the round that counts passes
STEPS = 3  # of which the fastest counts
SLOW = 0.5  # seconds: a network with slower steps is measured on a batch of two images

NO_SPREAD = (
    "Where the paper prints no spread, nobody knows how far its number would move with another seed. Run 3 seeds or "
    "more; its number is met if it is within two standard deviations of ours."
)
SPREAD = "Where the paper prints a spread, its number is met if the mean of ours is within two standard deviations."


@dataclass(frozen=True)
class Forecast:
    """What a row will take, or why it cannot run."""

    row: PaperRow
    experiments: tuple[Experiment, ...]
    left: int = 0  # runs that are not finished
    images: int = 0  # trained on in a run
    seconds: float = 0.0  # of a run, on one core
    refused: str = ""

    def to_json(self) -> dict[str, Any]:
        one = self.experiments[0]
        about = {"table": self.row.table, "row": self.row.name, "data": one.data.name, "rounds": one.rounds}
        if self.refused:
            return about | {"cannot_run": self.refused}
        within = {key: None if value.std is None else 2 * value.std for key, value in self.row.paper.items()}
        return about | {"runs": self.left, "images": self.images, "seconds": self.seconds, "tolerance": within}


def forecast(found: Sequence[tuple[PaperRow, tuple[Experiment, ...]]], root: Path) -> list[Forecast]:
    """Say what rows will take, without leaving anything on the disk but the decoded data."""
    times = dict[tuple[Any, ...], float]()  # rows of a table share networks
    return [of_row(row, experiments, root, times) for row, experiments in found]


def of_row(
    row: PaperRow, experiments: tuple[Experiment, ...], root: Path, times: dict[tuple[Any, ...], float]
) -> Forecast:
    one, left = experiments[0], sum(not record.is_finished(place(experiment, root)) for experiment in experiments)
    try:
        if refused := missing_data(one.data.name):
            return Forecast(row, experiments, left, refused=refused)
        world = World(one, dataset := dataset_of(one), partition.of(dataset, one))
        images = images_of(world)
        tested = sum(len(world.whole(split, Rng("forecast"))) for split in world.measured)
        key = one.model, dataset.channels, dataset.image_size, dataset.classes, one.device
        if key not in times:
            times[key] = seconds_per_image(world)
        seconds = times[key] * (
            images + tested * one.rounds / one.evaluate.every / 3
        )  # no backward pass in evaluations
    except FewLabelError as error:
        return Forecast(row, experiments, left, refused=str(error))
    return Forecast(row, experiments, left, round(images), seconds)


def images_of(world: World) -> float:
    """Return how many images a run trains on, at most: every unlabeled one that a method asks for may be used."""
    experiment, dealt = world.experiment, world.partition
    labeled, unlabeled = held(dealt, experiment)
    first, second = passes(world)
    warmup = own_warmup(experiment.method)
    long = warmup * getattr(experiment.method, "warmup_epochs", 1) * labeled
    return long + (experiment.rounds - warmup) * (first * labeled + second * unlabeled)


def held(dealt: Partition, experiment: Experiment) -> tuple[int, int]:
    """Return how many images with and without labels there are in the last round."""
    there = [share.at(experiment.rounds, experiment.stream) for share in dealt.shares]
    return len(dealt.server) + sum(len(one.labeled) for one in there), sum(len(one.unlabeled) for one in there)


class Asking(Serial):
    """Remembers which clients were asked to train."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[int] = set()

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        if job.kind == "client":
            self.asked.add(job.client)
        return super().submit(job, message, statistics)


def passes(world: World) -> tuple[float, float]:
    """Return how often a round after the warm-up passes over labeled and over unlabeled images.

    The method plays one round with a small network, in which each client has few images.
    """
    experiment, dealt, dataset = world.experiment, world.partition, world.dataset
    few = Partition(
        [Holding(share.labeled[:FEW], share.unlabeled[:FEW]) for share in dealt.shares],
        dealt.server[:FEW],
        dealt.data,
        dealt.validation[:FEW],
        dealt.noise,
    )
    small = replace(
        experiment,
        data=replace(experiment.data, image_size=image_size(experiment)),
        model=Net(f"{conformance.__name__}:{conformance.small_network.__name__}"),
        stream=None,
        device="cpu",
    )
    with tempfile.TemporaryDirectory(prefix="fewlabel-forecast-") as folder, threads(1):
        few.save(Path(folder) / record.PARTITION, dataset.splits["train"].labels.numpy(), dataset.classes)
        storage.write(Path(folder) / record.EXPERIMENT, dumps(small).encode())
        fed = Server(Path(folder), executor := Asking())
        state = fed.method.init(fed)
        fed.round = fed.rounds
        with fed.rng("global").scope():
            fed.method.round(state, fed)
        line = fed.take_round()
    labeled, unlabeled = held(few, small)
    without = sum(len(few.shares[client].unlabeled) for client in executor.asked)  # an untrained model uses none
    first = line.get("images_labeled", 0) / max(1, labeled)
    second = max(line.get("images_unlabeled", 0), without if uses_unlabeled(few, executor.asked) else 0)
    return first, second / max(1, unlabeled)


def uses_unlabeled(dealt: Partition, asked: set[int]) -> bool:
    """Return True if clients without a label were asked to train."""
    return any(not len(dealt.shares[client].labeled) for client in asked)


def seconds_per_image(world: World) -> float:
    """Measure a training step of a world's network on this machine, for each image."""
    experiment, dataset = world.experiment, world.dataset
    batch = getattr(getattr(experiment.method, "local", None), "batch_size", 64)
    where, shape = device.of(experiment.device), (dataset.channels, dataset.image_size, dataset.image_size)
    model = (
        world.network(Rng("forecast"), experiment.model.pretrained).to(where).train()
    )  # raises if weights are missing

    def step(images: int) -> float:
        x, y = torch.zeros(images, *shape, device=where), torch.zeros(images, dtype=torch.long, device=where)
        began = time.perf_counter()
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        next(model.parameters()).sum().item()  # waits for a GPU
        return (time.perf_counter() - began) / images

    with threads(experiment.threads), Rng("forecast").scope():
        step(2)  # the first one is slow
        number = 2 if 2 * step(2) > SLOW else max(2, batch)
        return min(step(number) for _ in range(STEPS))


def table(found: Sequence[Forecast], workers: int | None) -> Table:
    """Return what will run as a table, with what it takes in all and what counts as success."""
    able = [one for one in found if not one.refused]
    one_table = len({one.row.table for one in able}) == 1
    rows = tuple(
        (
            one.row.name if one_table else one.row.id,
            str(one.left),
            f"{one.experiments[0].rounds:,}",
            f"{one.images / 1e6:,.1f}",
            span(one.seconds),
            expected(one.row),
        )
        for one in able
    )
    columns = ("row", "runs", "rounds", "million images", "time of a run", "paper")
    title = f"What will run of {able[0].row.table}" if one_table else "What will run"
    return Table(title, columns, rows, tuple(notes(found, able, workers)))


def expected(row: PaperRow) -> str:
    key = next(iter(row.paper), None)
    return "no number" if key is None else f"{METRIC_NAMES[key]} {row.paper[key]}"


def notes(found: Sequence[Forecast], able: Sequence[Forecast], workers: int | None) -> Iterator[str]:
    cores = workers or os.cpu_count() or 1
    # Equal experiments of several rows are one run.
    runs = {dumps(experiment): one.seconds for one in able if one.left for experiment in one.experiments}
    longest = max(sum(runs.values()) / cores, *runs.values(), 0)
    if runs:
        yield (
            f"About {span(longest)} in all with {cores} worker{'s' * (cores > 1)}, by a few training steps of each "
            "network on this machine. Teachers, helpers and repeated predictions come on top, perhaps half as much "
            "again."
        )
    spreads = {value.std is not None for one in able for value in one.row.paper.values()}
    yield from ([SPREAD] if True in spreads else []) + ([NO_SPREAD] if False in spreads else [])
    if able:
        names = sorted({one.experiments[0].data.name for one in able})
        weights = " The pretrained weights are here." if any(o.experiments[0].model.pretrained for o in able) else ""
        yield f"The data are on this machine: {', '.join(names)}.{weights}"
    for reason in dict.fromkeys(one.refused.rstrip(".") for one in found if one.refused):
        names = [one.row.name for one in found if one.refused.rstrip(".") == reason]
        yield f"Cannot run: {', '.join(names)}: {reason}."
