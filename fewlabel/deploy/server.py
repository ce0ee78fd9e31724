"""The server of a run with sites on other machines: it gathers them, agrees on terms, and plays the rounds."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewlabel.core import storage, wire
from fewlabel.core.errors import BadInput, FewLabelError, RunFailed
from fewlabel.core.federation import ClientInfo
from fewlabel.data import datasets
from fewlabel.data.partition import Holding, Partition
from fewlabel.data.site_files import TERMS, Pixels
from fewlabel.deploy import members, site, waiting, wishes
from fewlabel.deploy.log_heads import Heads
from fewlabel.deploy.nodes import NodeExecutor, Nodes
from fewlabel.deploy.run_plan import RunPlan, load_plan
from fewlabel.engine import record, run, sums
from fewlabel.engine.executor import Job, Outcome
from fewlabel.engine.worker import Worker
from fewlabel.engine.world import World
from fewlabel.experiment import Experiment, load

CLIENTS = "clients.json"
SPLITS = ("server", "validation", "test")  # that may lie at the server


def serve(
    grid: Any, directory: Path, watch: run.Watch | None = None, say: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Play the rounds of a run that `run_plan.prepare` has laid out, or those that are left. Return its summary.

    `say` is told which sites are there.
    """
    experiment, plan = load(directory / record.EXPERIMENT), load_plan(directory)
    nodes = Nodes(grid, plan, experiment, **known_by(Path(plan.members)) if plan.members else {})
    nodes.heads = Heads(Path(plan.members), say) if plan.members else None
    resumed = (directory / CLIENTS).exists()
    with record.in_use(directory):  # so that whoever watches the run sees that it goes on
        try:
            found = nodes.gather(plan.sites, say, partial(waiting.write, directory))
        finally:
            waiting.write(directory, [])
    if len(found) < plan.sites and not resumed:
        there = f"{len(found)} of {plan.sites} sites were there after {plan.patience:g} s"
        raise RunFailed(f"{there}{nodes.refusals}; start it again")
    nodes.clients = remember_clients(directory, found)
    agree_on_terms(nodes, directory, experiment)
    tested = tuple(sorted({claim.info.id for claim in nodes.claims.values() if claim.test}))
    world = server_world(experiment, nodes.plan, nodes.clients, tested)
    sums.check_kinds(experiment, world.partition)
    if plan.members:
        labels = {client: info.num_labeled for client, info in found.items()}
        for sentence in wishes.first_labels(Path(plan.members), labels):
            say(sentence)
        wishes.change(Path(plan.members), reported=labels)
        for sentence in members.grown(Path(plan.members), {client: info.size for client, info in found.items()}):
            say(f"{sentence}; if that is wrong, clients.largest_share bounds what it gains")
    executor = NodeExecutor(nodes, Worker(directory, world), directory)
    return run.execute(directory, executor=executor, remote=world, watch=watch)


def known_by(folder: Path) -> dict[str, Any]:
    """Return how nodes are known in a federation: by their keys, and to people by the names of its members."""
    return {
        "admit": partial(members.check_client, folder),
        "names": members.names(folder),
        "client_of": lambda node: members.clients_by_node(folder).get(node),
        "wanted": {int(client): number for client, number in wishes.read(folder).wanted.items()},
    }


def remember_clients(directory: Path, found: dict[int, ClientInfo]) -> dict[int, ClientInfo]:
    """Return the clients of a run: those that are there now, and on a resume also those that were there before."""
    path = directory / CLIENTS
    before = [ClientInfo(**entry) for entry in site.read_json(path)["clients"]] if path.exists() else []
    known = {info.id: info for info in before} | found
    known = {client: known[client] for client in sorted(known)}
    whole = {"clients": [vars(info) for info in known.values()]}
    storage.write(path, json.dumps(whole, indent=1).encode())
    return known


def agree_on_terms(nodes: Nodes, directory: Path, experiment: Experiment) -> None:
    """Where the terms leave mean and std open, ask all sites for sums of their pixels, once in a federation."""
    if nodes.plan.terms.mean is not None or nodes.clients is None:
        return
    if not (directory / TERMS).exists():
        world = server_world(experiment, nodes.plan, nodes.clients)
        executor = NodeExecutor(nodes, Worker(directory, world), directory)
        jobs = {client: Job(str(directory), "pixels", client=client) for client in nodes.clients}
        tickets = {client: executor.submit(job, b"", None) for client, job in jobs.items()}
        while not all(map(executor.tickets.ready, tickets.values())):
            executor.wait()
        outcomes = {client: executor.tickets.collect(ticket) for client, ticket in tickets.items()}
        write_terms(directory, nodes.plan, nodes.clients, outcomes, world)
        if nodes.plan.settled is not None:
            storage.write(Path(nodes.plan.settled), (directory / TERMS).read_bytes())
    nodes.plan = replace(nodes.plan, terms=site.load_terms(directory))


def write_terms(
    directory: Path, plan: RunPlan, clients: Mapping[int, ClientInfo], outcomes: Mapping[int, Outcome], here: World
) -> None:
    """Fix the mean and std of a run: those of all sites' pixels and the server's own together."""
    parts = [Pixels.of(here.dataset.splits["train"].images.pixels.numpy())]
    for client, outcome in outcomes.items():
        try:
            if outcome.payload is None:
                raise BadInput(outcome.failure or "it sent nothing")
            parts.append(found := wire.unpack(Pixels, outcome.payload))
            found.check(plan.terms, clients[client].size)
        except FewLabelError as error:
            who = members.called(here.names, client)
            raise RunFailed(f"{who} gave no sums of its pixels: {error}; start it again") from None
    storage.write(directory / TERMS, json.dumps(vars(plan.terms.settled(parts)), indent=1).encode())


def server_world(
    experiment: Experiment, plan: RunPlan, clients: Mapping[int, ClientInfo], tested: tuple[int, ...] = ()
) -> World:
    """Return the world as the server knows it: how many images each client has, and the images at the server itself."""
    here = Path(plan.data) if plan.data is not None else None
    paths = {name: path for name in SPLITS if here for path in (here / name, here / f"{name}.npz") if path.exists()}
    splits = {name: site.images(path, "", experiment, plan.terms)[0]["train"] for name, path in paths.items()}
    if unlabeled := [name for name, split in splits.items() if (split.labels < 0).any()]:
        raise BadInput(f"{paths[unlabeled[0]]} has images without a label; the server can use labeled ones only")
    shape = (0, plan.terms.channels, plan.terms.image_size, plan.terms.image_size)
    empty = site.viewed(torch.empty(shape, dtype=torch.uint8), experiment, plan.terms)
    splits["train"] = splits.pop("server", datasets.Split(empty, torch.empty(0, dtype=torch.int64)))
    shares = tuple(
        Holding(not_here(info.num_labeled), not_here(info.num_unlabeled))
        for info in (clients.get(client, ClientInfo(client, 0, 0)) for client in range(max(clients) + 1))
    )
    partition = Partition(shares, np.arange(len(splits["train"])))
    names = members.names(Path(plan.members)) if plan.members else {}
    return replace(site.world(experiment, plan.terms, splits, partition, tested), names=names)


def not_here(images: int) -> np.ndarray:
    """Return an index of so many images, none of which is on this machine."""
    return np.broadcast_to(np.int64(-1), (images,))
