"""A server's part in a federation whose data lie apart: its plan, who its clients are, the world as it knows it."""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewlabel.core import schema, storage, wire
from fewlabel.core.errors import BadInput, FewLabelError, RunFailed, StorageError
from fewlabel.core.federation import ClientInfo
from fewlabel.core.schema import Count, Positive
from fewlabel.data import datasets
from fewlabel.data.partition import Holding, Partition
from fewlabel.data.site_files import TERMS, Pixels, Terms
from fewlabel.deploy import site
from fewlabel.engine.executor import Outcome
from fewlabel.engine.run import refuse_used
from fewlabel.engine.world import World
from fewlabel.experiment import Experiment, dumps

SERVERS = ("server", "validation", "test")  # what of the data may lie at the server


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
    members: str | None = None  # directory of a federation whose members alone may take part, each as itself


def prepare(experiment: Experiment, directory: Path, terms: Terms, **more: Any) -> Path:
    """Lays out a run whose clients are elsewhere: its resolved experiment and its plan."""
    more.setdefault("sites", experiment.clients.count)
    plan = Plan(secrets.token_hex(16), terms, **more)
    schema.check(plan)
    refuse_used(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        storage.write(directory / "federation.json", json.dumps(jsonable(plan), indent=1).encode())
        storage.write(directory / "experiment.toml", dumps(experiment).encode())
    except OSError as error:
        raise StorageError(f"{directory} cannot be written: {error.strerror}") from None
    return directory


def jsonable(plan: Plan) -> dict[str, Any]:
    return {**vars(plan), "terms": vars(plan.terms)}


def load_plan(directory: Path) -> Plan:
    return schema.read(Plan, site.table(directory / "federation.json"))


def remember(directory: Path, infos: dict[int, ClientInfo]) -> dict[int, ClientInfo]:
    """The clients of a run: those met now, and on a resume also those that were there when it began."""
    path = directory / "clients.json"
    before = [ClientInfo(**entry) for entry in site.table(path)["clients"]] if path.exists() else []
    known = {info.id: info for info in before} | infos
    known = {client: known[client] for client in sorted(known)}
    whole = {"clients": [vars(info) for info in known.values()]}
    storage.write(path, json.dumps(whole, indent=1).encode())
    return known


def settle(
    directory: Path, plan: Plan, clients: Mapping[int, ClientInfo], sums: Mapping[int, Outcome], here: World
) -> None:
    """Fixes the mean and std of a run whose terms leave them open: those of all sites' pixels and the server's own."""
    parts = [Pixels.of(here.dataset.splits["train"].images.pixels.numpy())]
    for client, outcome in sums.items():
        try:
            if outcome.payload is None:
                raise BadInput(outcome.failure or "it sent nothing")
            parts.append(found := wire.unpack(Pixels, outcome.payload))
            found.check(plan.terms, clients[client].size)
        except FewLabelError as error:
            raise RunFailed(f"client {client} gave no sums of its pixels: {error}; start it again") from None
    storage.write(directory / TERMS, json.dumps(vars(plan.terms.settled(parts)), indent=1).encode())


def server_world(
    experiment: Experiment, plan: Plan, clients: Mapping[int, ClientInfo], tested: tuple[int, ...] = ()
) -> World:
    """The world as the server knows it: how much each client has, and what lies at the server itself."""
    here = Path(plan.data) if plan.data is not None else None
    paths = {name: path for name in SERVERS if here for path in (here / name, here / f"{name}.npz") if path.exists()}
    splits = {name: site.images(path, "", experiment, plan.terms)["train"] for name, path in paths.items()}
    if blind := [name for name, split in splits.items() if (split.labels < 0).any()]:
        raise BadInput(f"{paths[blind[0]]} has images without a label; the server can use labeled ones only")
    shape = (0, plan.terms.channels, plan.terms.image_size, plan.terms.image_size)
    empty = site.seen(torch.empty(shape, dtype=torch.uint8), experiment, plan.terms)
    splits["train"] = splits.pop("server", datasets.Split(empty, torch.empty(0, dtype=torch.int64)))
    shares = tuple(
        Holding(elsewhere(info.num_labeled), elsewhere(info.num_unlabeled))
        for info in (clients.get(client, ClientInfo(client, 0, 0)) for client in range(max(clients) + 1))
    )
    return site.world(experiment, plan.terms, splits, Partition(shares, np.arange(len(splits["train"]))), tested)


def elsewhere(images: int) -> np.ndarray:
    """So many images, none of which is here."""
    return np.broadcast_to(np.int64(-1), (images,))
