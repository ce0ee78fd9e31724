"""A federation whose data lie apart: what a site makes of its own, and what it exchanges with a server.

Nothing here knows how messages travel. A site runs the tasks of methods that it has itself, on data that it names
itself; of what a server sends it trusts nothing that is not checked here. All that comes and leaves goes into its log
(`audit`), and what cannot be written there does not leave.

Beside a method's tasks it answers four orders of the framework's own: `info`, an `Introduction`; `pixels`, sums for the
mean and std of all sites; `statistics`, BatchNorm's; and `evaluate`, counts over images that it keeps to test on: those
in `test/` beside `train/` in a folder, of split `test` in a table, or `test_images` in an npz.
"""

import json
import re
import sys
import tomllib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewlabel.core import metrics, schema, wire
from fewlabel.core.described import leaves
from fewlabel.core.errors import BadInput, FewLabelError, StorageError
from fewlabel.core.federation import ClientInfo
from fewlabel.core.rng import preserved
from fewlabel.core.schema import Natural
from fewlabel.core.tasks import tasks
from fewlabel.data import datasets
from fewlabel.data.images import Images
from fewlabel.data.own.listing import guess_kind
from fewlabel.data.partition import Holding, Partition, nothing
from fewlabel.data.site_files import TERMS, Pixels, Terms
from fewlabel.deploy import site_log
from fewlabel.engine.executor import Job
from fewlabel.engine.run import versions
from fewlabel.engine.worker import Worker
from fewlabel.engine.world import World
from fewlabel.experiment import ROWS, Experiment, read, read_method

MAX_ORDER = 1 << 20
FRAMEWORK = {"pixels": "", "statistics": "", "evaluate": "test"}  # tasks that are no method's, and of what


@dataclass(frozen=True)
class Order:
    """What a server asks of a site, beside the message that its method sends."""

    run: str
    experiment: str  # as TOML
    terms: Terms
    kind: str  # info, pixels, client, statistics, evaluate
    client: int = -1
    task: str = ""
    round: int = 0
    call: int = 0
    checkpointed: int = 0


@dataclass(frozen=True)
class Introduction:
    """All that a site tells of itself."""

    info: ClientInfo
    versions: dict[str, str]
    test: int = 0  # images of its own to test on; 0 where they are too few to tell of


class Refused(FewLabelError):
    """An order that a site does not carry out; the server is told why."""


# A site


@dataclass(frozen=True)
class Place:
    """What a site says of itself in its own configuration."""

    client: Natural  # its identity in the federation
    data: str  # path
    state: str  # directory for what methods keep between rounds
    kind: str = ""  # folder, csv, npz or dicom; by default what the path looks like
    modules: str = ""  # with methods or networks of one's own that this site trusts, separated by commas
    methods: str = ""  # that it has consented to, separated by commas; by default all that it knows
    terms: str = ""  # directory with the terms that it was given; by default those of each order


def reply(config: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """A site's reply to the parts of a message: an upload, nothing, or why there is none; it never raises."""
    try:
        place = schema.read(Place, config)
        given = [part for name in ("order", "message", "statistics") if isinstance(part := parts.get(name), bytes)]
        about = subject(given[0] if given else b"")
        site_log.note(Path(place.state), "in", given, *about)
        made = attempt(place, parts)
        left = [part if isinstance(part, bytes) else part.encode() for part in made.values()]
        site_log.note(Path(place.state), "out", left, *about)
        return made
    except Exception as error:
        return failed(error)


def subject(order: bytes) -> tuple[str, int, str]:
    """The run, the round and the task of an order, for the log, whether or not it is carried out."""
    try:
        wanted = wire.unpack(Order, order, max_bytes=MAX_ORDER)
    except wire.WireError:
        return "", 0, "unreadable"
    return wanted.run, wanted.round, wanted.task if wanted.kind == "client" else wanted.kind


def attempt(place: Place, parts: Mapping[str, Any]) -> dict[str, Any]:
    try:
        order, message, statistics = parts.get("order"), parts.get("message"), parts.get("statistics")
        if not isinstance(order, bytes) or not isinstance(message, bytes) or not isinstance(statistics, bytes | None):
            raise Refused("the message lacks an order, or is not bytes")
        upload = answer(place, order, message, statistics)
    except Refused as error:
        return {"refused": str(error)}
    except Exception as error:
        return failed(error)
    return {} if upload is None else {"upload": upload}


def failed(error: Exception) -> dict[str, Any]:
    """What is told of an error: what it says may show data or paths of the site, so that stays in its own log."""
    if isinstance(error, FewLabelError):
        print(f"fewlabel: {error}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error, file=sys.stderr)
    return {"failed": f"{type(error).__name__}, about which the site's own log says more"}


def answer(place: Place, order: bytes, message: bytes, statistics: bytes | None) -> bytes | None:
    """Carries out an order at a site: the bytes that leave it, or None where a task has nothing to send."""
    wanted, experiment = understood(place, order)
    world = site_world(place, experiment, wanted.terms)
    test = testable(world)
    if wanted.kind == "info":
        share = world.partition.shares[place.client]
        info = ClientInfo(place.client, len(share.labeled), len(share.unlabeled))
        return wire.pack(Introduction(info, versions(), test))
    if wanted.kind == "pixels":
        return wire.pack(Pixels.of(world.dataset.splits["train"].images.pixels.numpy()))
    if wanted.kind == "evaluate" and not test:
        raise Refused(f"this site has fewer than {metrics.MINIMUM} images to test on")
    directory = Path(place.state) / wanted.run
    directory.mkdir(parents=True, exist_ok=True)
    job = Job(str(directory), wanted.kind, wanted.task, place.client, wanted.round, wanted.call, wanted.checkpointed)
    threads = torch.get_num_threads()
    try:
        with preserved():
            torch.set_num_threads(experiment.threads)
            return Worker(directory, world).do(job, message, statistics).payload
    except wire.WireError as error:
        raise Refused(str(error)) from None
    finally:
        torch.set_num_threads(threads)


def understood(place: Place, data: bytes) -> tuple[Order, Experiment]:
    """An order that this site may carry out, and its experiment."""
    try:
        order = wire.unpack(Order, data, max_bytes=MAX_ORDER)
        experiment = trusted(order.experiment, [name.strip() for name in place.modules.split(",") if name.strip()])
    except (wire.WireError, BadInput) as error:
        raise Refused(str(error)) from None
    if not re.fullmatch(r"[0-9a-f]{32}", order.run):  # it names a directory
        raise Refused("the run has no proper name")
    if not agreed(place.methods, experiment):
        raise Refused(f"this site takes part in {place.methods}, and {experiment.name} sends something else")
    check_terms(place, order.terms)
    if place.client >= experiment.clients.count:
        raise Refused(f"this is client {place.client}, and clients.count = {experiment.clients.count}")
    if order.kind == "info":
        return order, experiment
    if order.client != place.client:
        raise Refused(f"this is client {place.client}, not client {order.client}")
    if order.kind not in ("client", *FRAMEWORK):
        raise Refused(f"a client does no '{order.kind}'")
    if order.kind in FRAMEWORK and order.task != FRAMEWORK[order.kind]:
        raise Refused(f"a client does no '{order.kind}' of '{order.task}'")
    if (order.kind == "pixels") != (order.terms.mean is None):
        raise Refused("the terms have no mean and no std yet" if order.terms.mean is None else "mean and std are known")
    if order.kind == "statistics" and (experiment.stream is not None or experiment.model.buffers != "recomputed"):
        raise Refused("statistics are those of all images at once, where model.buffers = recomputed")
    known = [name for name, task in tasks(type(experiment.method)).items() if "client" in task.places]
    if order.kind == "client" and order.task not in known:
        raise Refused(f"{experiment.name} has no task '{order.task}' for clients; it has {', '.join(known)}")
    if not 0 <= order.round <= experiment.rounds or order.call < 0 or order.checkpointed < 0:
        raise Refused(f"there is no call {order.call} in round {order.round} of {experiment.rounds}")
    return order, experiment


def check_terms(place: Place, asked: Terms) -> None:
    """Refuses to read images in another way than agreed: who chose how, again and again, would see what they show."""
    own = load_terms(Path(place.terms)) if place.terms else asked
    if asked != (own if own.mean is not None else replace(own, mean=asked.mean, std=asked.std)):
        raise Refused("its terms are not those that this site was given")


def trusted(text: str, modules: list[str]) -> Experiment:
    """An experiment that names no code but FewLabel's own and that of modules which this site trusts."""
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise BadInput(f"the experiment is not TOML: {error}") from None
    for part in ("method", "model", "data"):
        given = table.get(part)
        name = given.get("name") if isinstance(given, Mapping) else given
        if not isinstance(name, str | None):
            raise BadInput(f"the name of the {part} is no text")
        if name and ":" in name and name.partition(":")[0] not in modules:
            raise BadInput(f"{part} '{name}' is not FewLabel's, and this site trusts no module of that name")
    return read(table)


def agreed(methods: str, experiment: Experiment) -> bool:
    """Return True if an experiment's method is one of these, in whatever settings: it sends what was consented to."""

    def sends(method: Any) -> tuple[type, str]:
        return type(method), leaves(method)

    names = [name.strip() for name in methods.split(",") if name.strip()]
    known = {sends(read_method(ROWS[name][0] if name in ROWS else name)) for name in names}
    return not names or sends(experiment.method) in known


def site_world(place: Place, experiment: Experiment, terms: Terms) -> World:
    """The world as a site knows it: its own images, and nobody else's."""
    splits = images(Path(place.data), place.kind, experiment, terms)
    labels = splits["train"].labels.numpy()
    own = Holding(np.flatnonzero(labels >= 0), np.flatnonzero(labels < 0))
    others = (Holding(nothing(), nothing()),) * place.client
    return world(experiment, terms, splits, Partition((*others, own), nothing()))


def testable(world: World) -> int:
    """How many images a site has to test on, if they are enough that their counts tell nothing of a single one."""
    split = world.dataset.splits.get("test")
    count = 0 if split is None else int(metrics.common(split.labels, len(world.dataset.classes)).sum())
    return count if count >= metrics.MINIMUM else 0


def images(path: Path, kind: str, experiment: Experiment, terms: Terms) -> dict[str, datasets.Split]:
    """Images that lie here, to train and perhaps to test on, read as the federation's terms say."""
    found = datasets.load(
        kind or guess_kind(path),
        terms.image_size,
        channels=terms.channels,
        path=str(path),
        classes=terms.classes,
        scale=terms.scale,
    )
    return {
        name: replace(split, images=seen(split.images.pixels, experiment, terms))
        for name, split in found.splits.items()
    }


def seen(pixels: torch.Tensor, experiment: Experiment, terms: Terms) -> Images:
    """Images as all sites see them; where mean and std are not known yet, nobody looks at them."""
    return Images(pixels, terms.mean or (), terms.std or (), experiment.views.weak, experiment.views.strong)


def world(
    experiment: Experiment,
    terms: Terms,
    splits: dict[str, datasets.Split],
    partition: Partition,
    tested: tuple[int, ...] = (),
) -> World:
    dataset = datasets.Dataset("", "", terms.classes, terms.channels, terms.image_size, splits, terms.scale)
    return World(experiment, dataset, partition, tested)


def load_terms(path: Path) -> Terms:
    """From what `fewlabel data split` wrote, or somebody by hand."""
    return schema.read(Terms, table(path / TERMS))


def table(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from None
    return found
