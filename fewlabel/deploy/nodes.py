"""A federation by Flower, at the server: who its nodes are, and the executor that has clients' jobs done by them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fewlabel.core import tree, wire
from fewlabel.core.errors import BadInput, FewLabelError, RunFailed
from fewlabel.core.federation import ClientInfo, Model
from fewlabel.core.rng import preserved
from fewlabel.data.site_files import TERMS
from fewlabel.deploy import flower, keys
from fewlabel.deploy.server import Plan, load_plan, remember, server_world, settle
from fewlabel.deploy.site import Introduction, Order, load_terms
from fewlabel.engine import flower_messages, run
from fewlabel.engine.executor import SERVER_ID, Job, Outcome, Tickets
from fewlabel.engine.worker import Worker
from fewlabel.experiment import Experiment, dumps, load

POLL = (0.05, 1.0)  # seconds between two looks for replies: at first, and at most
LOOK = 2.0  # seconds between two looks for nodes
AGAIN = 10.0  # seconds until a node that was refused is asked anew: its site may have been mended
MAX_IMAGES = 10**8  # that a site may claim to have
Say = Callable[[str], None]  # to whoever waits


class Absent(RunFailed):
    """A client that cannot be asked now."""


class Fleet:
    """The nodes of a Flower run, by the identities that they claim.

    Node ids change whenever a node without a key starts, so who a node is it says itself, once, when it is first seen.
    `admit` may refuse a node by what Flower knows of it, such as its key.
    """

    def __init__(
        self,
        grid: Any,
        plan: Plan,
        experiment: Experiment,
        admit: Callable[[int, Introduction], None] = lambda node, introduction: None,
    ) -> None:
        self.grid, self.plan, self.admit, self.count = grid, plan, admit, experiment.clients.count
        self.order = Order(plan.run, dumps(experiment), plan.terms, "info")
        self.claims: dict[int, Introduction] = {}
        self.refused: dict[int, str] = {}
        self.clients: Mapping[int, ClientInfo] | None = None  # once the run has begun, who they are is fixed
        self._online: set[int] = set()
        self._asked: dict[str, int] = {}
        self._again: dict[int, float] = {}  # when a node that was refused is asked anew
        self._looked = 0.0

    def look(self) -> None:
        """Asks new nodes who they are, and hears those that were asked."""
        if time.monotonic() - self._looked > LOOK:
            self._looked = time.monotonic()
            self._online = set(self.grid.get_node_ids())
            for node in sorted(self._online - {*self.claims, *self._asked.values()}):
                if self._looked < self._again.get(node, 0.0):
                    continue
                order = wire.pack(self.order)
                if sent := flower_messages.send(
                    self.grid, node, self.plan.patience, "query", "", order=order, message=b""
                ):
                    self._asked[sent] = node
        for sent, reply in flower_messages.receive(self.grid, self._asked):
            node = self._asked.pop(sent)
            try:
                introduction = wire.unpack(Introduction, flower.upload_of(reply, 1 << 16) or b"")
                self._check(node, introduction)
                self.claims[node] = introduction
                self.refused.pop(node, None)
            except flower.Silent:
                continue  # it is asked again as long as it is there
            except FewLabelError as error:
                self.refused[node] = str(error)
                self._again[node] = time.monotonic() + AGAIN

    def _check(self, node: int, introduction: Introduction) -> None:
        info = introduction.info
        if not 0 <= info.id < self.count:
            raise BadInput(f"it claims to be client {info.id}, and clients are from 0 to {self.count - 1}")
        if not 0 < info.size <= MAX_IMAGES or min(info.num_labeled, info.num_unlabeled) < 0:
            raise BadInput(f"client {info.id} claims {info.num_labeled} labeled and {info.num_unlabeled} other images")
        ours, theirs = run.versions()["fewlabel"], introduction.versions.get("fewlabel")
        if theirs != ours:
            raise BadInput(
                f"client {info.id} has fewlabel {flower_messages.printable(str(theirs))}, and the server {ours}"
            )
        if self.clients is not None and self.clients.get(info.id) != info:
            raise BadInput(f"client {info.id} was not there, or had other images, when this run began")
        self.admit(node, introduction)

    def gather(self, sites: int, say: Say = lambda text: None) -> dict[int, ClientInfo]:
        """Waits until so many sites have said who they are, each once, or patience ends; says who is not there yet.

        One that has come back without a key is there twice until Flower, after a minute, no longer counts the first.
        """
        end, said = time.monotonic() + self.plan.patience, ""
        while True:
            self.look()
            here = [claim.info for node, claim in self.claims.items() if node in self._online]
            found = {info.id: info for info in here}
            absent = [str(client) for client in range(self.count) if client not in found]
            names = f"; waiting for client{'s' * (len(absent) > 1)} {', '.join(absent)}" if sites == self.count else ""
            text = f"{len(found)} of {sites} sites are there{names * (len(found) < sites)}{self.refusals}"
            if text != said:
                say(said := text)
            if sites <= len(found) == len(here) or time.monotonic() > end:
                for client in found:
                    self.node_of(client)  # or it says that there are two
                return found
            time.sleep(POLL[0])

    @property
    def refusals(self) -> str:
        return "".join(f"; node {node} is refused: {text}" for node, text in self.refused.items())

    def node_of(self, client: int) -> int:
        nodes = [n for n, introduction in self.claims.items() if introduction.info.id == client and n in self._online]
        if len(nodes) > 1:
            raise Absent(f"nodes {nodes[0]} and {nodes[1]} both say that they are client {client}; stop one of them")
        if not nodes:
            raise Absent("it is not connected")
        return nodes[0]


@dataclass
class Sent:
    """A job at a client."""

    ticket: int
    until: float


class GridExecutor:
    """Has clients' jobs done by their nodes, and the server's own here."""

    def __init__(self, fleet: Fleet, worker: Worker) -> None:
        self.fleet, self.worker, self.window = fleet, worker, 2 * max(1, worker.world.experiment.clients.count)
        model = len(wire.pack(Model(tree.of(worker.model))))
        self.max_upload = fleet.plan.max_upload or 8 * model + (1 << 20)
        self.tickets = Tickets()
        self._sent: dict[str, Sent] = {}

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        ticket = self.tickets.open(job)
        if job.client == SERVER_ID:
            with preserved():
                self.tickets.close(ticket, self.worker.attempt(job, message, statistics))
            return ticket
        plan = self.fleet.plan
        try:
            node = self.fleet.node_of(job.client)
            asked = {name: getattr(job, name) for name in ("kind", "client", "task", "round", "call", "checkpointed")}
            order = replace(self.fleet.order, **asked)
            parts = {"order": wire.pack(order), "message": message, "statistics": statistics}
            sent = flower_messages.send(self.fleet.grid, node, plan.deadline, "train", str(job.round), **parts)
            if not sent:
                raise Absent("the message to it could not be sent")
            self._sent[sent] = Sent(ticket, time.monotonic() + plan.deadline)
        except Absent as error:
            self.tickets.close(ticket, Outcome(None, {}, str(error)))
        return ticket

    def wait(self) -> None:
        pause = POLL[0]
        while not self._hear():
            time.sleep(pause)
            pause = min(1.5 * pause, POLL[1])

    def _hear(self) -> bool:
        """Whether a job has come to an end since."""
        before = len(self._sent)
        self.fleet.look()
        for sent, reply in flower_messages.receive(self.fleet.grid, self._sent):
            ticket = self._sent.pop(sent).ticket
            try:
                self.tickets.close(ticket, Outcome(flower.upload_of(reply, self.max_upload), {}))
            except FewLabelError as error:
                self.tickets.close(ticket, Outcome(None, {}, str(error)))
        for sent, job in list(self._sent.items()):
            if time.monotonic() > job.until:  # what comes later is nobody's
                del self._sent[sent]
                self.tickets.close(job.ticket, Outcome(None, {}, f"it was silent for {self.fleet.plan.deadline:g} s"))
        return len(self._sent) < before

    def discard(self) -> None:
        self._sent.clear()
        self.tickets.clear()


def agree(fleet: Fleet, directory: Path, experiment: Experiment) -> None:
    """Where the terms leave mean and std open, asks all sites for sums of their pixels, once in a run."""
    if fleet.plan.terms.mean is not None or fleet.clients is None:
        return
    if not (directory / TERMS).exists():
        world = server_world(experiment, fleet.plan, fleet.clients)
        executor = GridExecutor(fleet, Worker(directory, world))
        jobs = {client: Job(str(directory), "pixels", client=client) for client in fleet.clients}
        tickets = {client: executor.submit(job, b"", None) for client, job in jobs.items()}
        while not all(map(executor.tickets.ready, tickets.values())):
            executor.wait()
        sums = {client: executor.tickets.collect(ticket) for client, ticket in tickets.items()}
        settle(directory, fleet.plan, fleet.clients, sums, world)
    fleet.plan = replace(fleet.plan, terms=load_terms(directory))
    fleet.order = replace(fleet.order, terms=fleet.plan.terms)


def serve(grid: Any, directory: Path, watch: run.Watch | None = None, say: Say = lambda text: None) -> dict[str, Any]:
    """Runs what `plan.prepare` laid out, or the rest of it, with the sites of a grid; returns its summary."""
    experiment, plan = load(directory / "experiment.toml"), load_plan(directory)
    fleet = Fleet(grid, plan, experiment, *([keys.gate(Path(plan.members))] if plan.members else []))
    began = (directory / "clients.json").exists()
    found = fleet.gather(plan.sites, say)
    if len(found) < plan.sites and not began:
        there = f"{len(found)} of {plan.sites} sites were there after {plan.patience:g} s"
        raise RunFailed(f"{there}{fleet.refusals}; start it again")
    fleet.clients = remember(directory, found)
    agree(fleet, directory, experiment)
    tested = tuple(sorted({claim.info.id for claim in fleet.claims.values() if claim.test}))
    world = server_world(experiment, fleet.plan, fleet.clients, tested)
    executor = GridExecutor(fleet, Worker(directory, world))
    return run.execute(directory, executor=executor, remote=world, watch=watch)
