"""A federation whose data lie apart: what a site makes of its own, what a server knows of sites, what they exchange.

Nothing here knows how messages travel. A site runs the tasks of methods that it has itself, on data that it names
itself; of what a server sends it trusts nothing that is not checked here.
"""

import json
import re
import secrets
import sys
import tomllib
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewlabel import checkpoint, strict, wire
from fewlabel.data import datasets
from fewlabel.data.own import guess
from fewlabel.data.partition import Partition, Share, nothing
from fewlabel.data.sets import Images
from fewlabel.data.sites import TERMS, Terms
from fewlabel.errors import BadInput, FewLabelError, StorageError
from fewlabel.experiment import Experiment, dumps, read
from fewlabel.federation import ClientInfo, tasks
from fewlabel.rng import preserved
from fewlabel.runs import refuse_used, versions
from fewlabel.strict import Count, Natural, Positive
from fewlabel.worker import Job, Worker, World

MAX_ORDER = 1 << 20
SERVERS = ("server", "validation", "test")  # what of the data may lie at the server


@dataclass(frozen=True)
class Order:
    """What a server asks of a site, beside the message that its method sends."""

    run: str
    experiment: str  # as TOML
    terms: Terms
    kind: str  # info, client, statistics
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


def reply(config: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """A site's reply to the parts of a message: an upload, nothing, or why there is none; it never raises."""
    try:
        order, message, statistics = parts.get("order"), parts.get("message"), parts.get("statistics")
        if not isinstance(order, bytes) or not isinstance(message, bytes) or not isinstance(statistics, bytes | None):
            raise Refused("the message lacks an order, or is not bytes")
        upload = answer(strict.read(Place, config), order, message, statistics)
    except Refused as error:
        return {"refused": str(error)}
    except Exception as error:  # what it says may show data or paths of the site, so it stays in the site's own log
        if isinstance(error, FewLabelError):
            print(f"fewlabel: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exc(file=sys.stderr)
        return {"failed": f"{type(error).__name__}, about which the site's own log says more"}
    return {} if upload is None else {"upload": upload}


def answer(place: Place, order: bytes, message: bytes, statistics: bytes | None) -> bytes | None:
    """Carries out an order at a site: the bytes that leave it, or None where a task has nothing to send."""
    wanted, experiment = understood(place, order)
    world = site_world(place, experiment, wanted.terms)
    if wanted.kind == "info":
        share = world.partition.shares[place.client]
        return wire.pack(Introduction(ClientInfo(place.client, len(share.labeled), len(share.unlabeled)), versions()))
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
        experiment = trusted(order.experiment, [name.strip() for name in place.modules.split(",")])
    except (wire.WireError, BadInput) as error:
        raise Refused(str(error)) from None
    if not re.fullmatch(r"[0-9a-f]{32}", order.run):  # it names a directory
        raise Refused("the run has no proper name")
    if place.client >= experiment.clients.count:
        raise Refused(f"this is client {place.client}, and clients.count = {experiment.clients.count}")
    if order.kind == "info":
        return order, experiment
    if order.client != place.client:
        raise Refused(f"this is client {place.client}, not client {order.client}")
    if order.kind not in ("client", "statistics"):
        raise Refused(f"a client does no '{order.kind}'")
    known = [name for name, task in tasks(type(experiment.method)).items() if "client" in task.places]
    if order.kind == "client" and order.task not in known:
        raise Refused(f"{experiment.name} has no task '{order.task}' for clients; it has {', '.join(known)}")
    if not 0 <= order.round <= experiment.rounds or order.call < 0 or order.checkpointed < 0:
        raise Refused(f"there is no call {order.call} in round {order.round} of {experiment.rounds}")
    return order, experiment


def trusted(text: str, modules: list[str]) -> Experiment:
    """An experiment that names no code but FewLabel's own and that of modules which this site trusts."""
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise BadInput(f"the experiment is not TOML: {error}") from None
    for part in ("method", "model", "data"):
        given = table.get(part)
        name = given.get("name") if isinstance(given, Mapping) else given
        if isinstance(name, str) and ":" in name and name.partition(":")[0] not in modules:
            raise BadInput(f"{part} '{name}' is not FewLabel's, and this site trusts no module of that name")
    return read(table)


def site_world(place: Place, experiment: Experiment, terms: Terms) -> World:
    """The world as a site knows it: its own images, and nobody else's."""
    train = images(Path(place.data), place.kind, experiment, terms)
    labels = train.labels.numpy()
    own = Share(np.flatnonzero(labels >= 0), np.flatnonzero(labels < 0))
    others = (Share(nothing(), nothing()),) * place.client
    return world(experiment, terms, {"train": train}, Partition((*others, own), nothing()))


def images(path: Path, kind: str, experiment: Experiment, terms: Terms) -> datasets.Split:
    """Images that lie here, read as the federation's terms say."""
    kind = kind or guess(path)
    found = datasets.load(kind, terms.image_size, channels=terms.channels, path=str(path), classes=terms.classes)
    train = found.splits["train"]
    weak, strong = experiment.views.weak, experiment.views.strong
    return replace(train, images=Images(train.images.pixels, terms.mean, terms.std, weak, strong))


def world(experiment: Experiment, terms: Terms, splits: dict[str, datasets.Split], partition: Partition) -> World:
    dataset = datasets.Dataset("", "", terms.classes, terms.channels, terms.image_size, splits)
    return World(experiment, dataset, partition)


# The server


@dataclass(frozen=True)
class Plan:
    """What a server knows of a federation before it has met a site."""

    run: str  # names the run at sites
    terms: Terms
    sites: Count  # that must be there before the first round
    data: str | None = None  # where `server`, `validation` and `test` lie, as far as the server has them
    patience: Positive = 600.0  # seconds to wait for sites
    deadline: Positive = 3600.0  # seconds that a site has for a task
    max_upload: Count | None = None  # bytes; by default eight models and 1 MiB


def prepare(experiment: Experiment, directory: Path, terms: Terms, **more: Any) -> Path:
    """Lays out a run whose clients are elsewhere: its resolved experiment and its plan."""
    more.setdefault("sites", experiment.clients.count)
    plan = Plan(secrets.token_hex(16), terms, **more)
    strict.check(plan)
    refuse_used(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        checkpoint.write(directory / "federation.json", json.dumps(jsonable(plan), indent=1).encode())
        checkpoint.write(directory / "experiment.toml", dumps(experiment).encode())
    except OSError as error:
        raise StorageError(f"{directory} cannot be written: {error.strerror}") from None
    return directory


def jsonable(plan: Plan) -> dict[str, Any]:
    return {**vars(plan), "terms": vars(plan.terms)}


def load_plan(directory: Path) -> Plan:
    return strict.read(Plan, table(directory / "federation.json"))


def load_terms(path: Path) -> Terms:
    """From what `fewlabel data split` wrote."""
    return strict.read(Terms, table(path / TERMS))


def table(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from None
    return found


def remember(directory: Path, infos: dict[int, ClientInfo]) -> dict[int, ClientInfo]:
    """The clients of a run: those met now, and on a resume also those that were there when it began."""
    path = directory / "clients.json"
    before = [ClientInfo(**entry) for entry in table(path)["clients"]] if path.exists() else []
    known = {info.id: info for info in before} | infos
    known = {client: known[client] for client in sorted(known)}
    whole = {"clients": [vars(info) for info in known.values()]}
    checkpoint.write(path, json.dumps(whole, indent=1).encode())
    return known


def server_world(experiment: Experiment, plan: Plan, clients: Mapping[int, ClientInfo]) -> World:
    """The world as the server knows it: how much each client has, and what lies at the server itself."""
    here = Path(plan.data) if plan.data is not None else None
    paths = {name: path for name in SERVERS if here for path in (here / name, here / f"{name}.npz") if path.exists()}
    splits = {name: images(path, "", experiment, plan.terms) for name, path in paths.items()}
    if blind := [name for name, split in splits.items() if (split.labels < 0).any()]:
        raise BadInput(f"{paths[blind[0]]} has images without a label; the server can use labeled ones only")
    size = plan.terms.image_size
    empty = Images(
        torch.empty((0, plan.terms.channels, size, size), dtype=torch.uint8), plan.terms.mean, plan.terms.std
    )
    splits["train"] = splits.pop("server", datasets.Split(empty, torch.empty(0, dtype=torch.int64)))
    shares = tuple(
        Share(elsewhere(info.num_labeled), elsewhere(info.num_unlabeled))
        for info in (clients.get(client, ClientInfo(client, 0, 0)) for client in range(max(clients) + 1))
    )
    return world(experiment, plan.terms, splits, Partition(shares, np.arange(len(splits["train"]))))


def elsewhere(images: int) -> np.ndarray:
    """So many images, none of which is here."""
    return np.broadcast_to(np.int64(-1), (images,))
