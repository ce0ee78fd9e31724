"""The server's side of a run: sends clients their tasks, takes replies in order, keeps the account of each round."""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fewlabel.core import coarse, schedule, tree, wire
from fewlabel.core import metrics as evaluate
from fewlabel.core.averaging import Kinds, average
from fewlabel.core.errors import FewLabelError, RunFailed
from fewlabel.core.federation import ClientError, ClientInfo, Mean, Model, Reply, Site, TooFewReplies, by_size
from fewlabel.core.rng import Rng
from fewlabel.core.tasks import Task, accept, task_of
from fewlabel.core.tree import Tree
from fewlabel.engine import sums
from fewlabel.engine.account import RESERVED, Failure, Round, answer_of, plain, statistics_of
from fewlabel.engine.checkpoint import Saved
from fewlabel.engine.conduct import Conduct, Judge, Lost, asked_of
from fewlabel.engine.executor import SERVER_ID, Executor, Job, Outcome
from fewlabel.engine.serial import Serial
from fewlabel.engine.world import World

NOTHING = object()


@dataclass
class Entry:
    """A job of an open run."""

    number: int
    client: ClientInfo | None
    job: Job
    message: bytes
    sent: Any = None  # the message before it was packed
    ticket: int | None = None


class Server:
    """The server of a federation: has clients' tasks done by an executor, and keeps the account of each round.

    In a simulation a task that raises is a bug and ends the run. A `remote` client that fails, or whose upload is
    refused, counts as one that did not reply. So does one whose upload is refused in a simulation with attackers.
    """

    def __init__(
        self,
        directory: Path,
        executor: Executor | None = None,
        absent: Collection[int] = (),
        world: World | None = None,
        remote: bool = False,
    ) -> None:
        self.directory, self.absent = directory, frozenset(absent)
        self.executor: Executor = executor or Serial()
        self.world, self.remote = world or World.open(directory), remote
        self.experiment, self.method = self.world.experiment, self.world.experiment.method
        self.rounds, self.num_classes = self.experiment.rounds, len(self.world.dataset.classes)
        self.schedule: str = self.experiment.recipe.schedule
        self.held_out = self.experiment.labels.held_out > 0 or "validation" in self.world.measured
        self._placed, self._open, self._asked_bytes = False, False, 0
        self.judge, self._lost = Judge(self.experiment.clients, self.world.names), Lost()
        self.round, self.checkpointed = 0, 0
        model = self.world.network(Rng(self.experiment.seed, "network"), self.experiment.model.pretrained)
        self._model, self.initial = model, tree.of(model)
        self.statistics: Tree | None = None  # pooled over clients, where the experiment recomputes them
        self.shipped: Tree | None = None
        self._shipped_statistics: Tree | None = None  # those under the shipped model
        self.seen = Round()
        self._calls: dict[int, int] = {}
        self._packed: tuple[Any, bytes] = (NOTHING, b"")

    @property
    def round(self) -> int:
        return self._round

    @round.setter
    def round(self, number: int) -> None:
        """Go on to a round, in which clients may have other images than before."""
        self._round = self.judge.round = number
        self._server: Site[None] | None = None
        warmup = self.experiment.warmup_rounds
        if number and self.experiment.stream is None and number not in (1, warmup + 1) and self._placed:
            return
        self._placed = number > 0  # a resume starts anywhere
        self._asked = {client: asked_of(self.world, client, number) for client in self.world.partition.clients}
        everyone = self.judge.sizes([asked.client for asked in self._asked.values()], number in (1, warmup + 1))
        self._infos = {info.id: info for info in everyone}
        self.clients: Sequence[ClientInfo] = [one for one in everyone if one.size or not 0 < number <= warmup]
        self.labeled = [client for client in self.clients if client.num_labeled]
        self.unlabeled = [client for client in self.clients if client.num_unlabeled]

    @property
    def rate(self) -> float:
        return schedule.factor(self.schedule, self.round, self.rounds)

    def drawn(self, number: int) -> Tree:
        network = self.world.network(Rng(self.experiment.seed, "network", number), self.experiment.model.pretrained)
        return {name: value for name, value in tree.of(network).items() if name in self._leaving}

    @property
    def server(self) -> Site[None]:
        """The server's own data and scratch network. The network starts each round untrained."""
        if self._server is None:
            self._model.load_state_dict(self.initial)
            self._server = self.world.site(SERVER_ID, self.round, self.rng("site"), self._model)
        return self._server

    def rng(self, *names: int | str) -> Rng:
        return Rng(self.experiment.seed, "server", self.round, *names)

    def sample(
        self, k: int | None = None, among: Sequence[ClientInfo] | None = None, *, name: str = ""
    ) -> list[ClientInfo]:
        clients = list(self.clients if among is None else among)
        if k is None:
            k = self.experiment.clients.per_round or len(clients)
        return clients if k >= len(clients) else self.rng("sample", name).sample(clients, k)

    def log(self, **values: float | Tensor) -> None:
        if taken := values.keys() & RESERVED:
            raise ValueError(f"'{min(taken)}' is a name of rounds.jsonl itself; log it under another")
        self.seen.values |= {name: plain(torch.as_tensor(v, dtype=torch.float64)) for name, v in values.items()}

    def run(self, task: Callable[[Any, Any], Any], jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        known = task_of(self.method, task, "client")
        sums.refuse_single(self.experiment, known)
        return self.replies(known, jobs)

    def replies(self, known: Task, jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        """Open a run of a task."""
        self._check_closed()
        self._open = True
        return self._replies(known, jobs)

    def mean(
        self,
        task: Callable[[Any, Any], Any],
        jobs: Iterable[tuple[ClientInfo, Any]],
        old: Tree,
        *,
        weight: Callable[[Reply[Any]], float] = by_size,
        kinds: Kinds | None = None,
        keep: bool = False,
    ) -> Mean[Any]:
        known = task_of(self.method, task, "client")
        if self.experiment.clients.sums == "masked":
            return sums.masked_mean(self, known, jobs, old, weight, kinds, keep)
        found = average(self.replies(known, jobs), old, weight, kinds, keep, self.judge.rule)
        for client, times in found.far.items():
            why = f"its model is {times:.3g} times as far from the others' as is usual among them"
            self.judge.name(client, getattr(task, "__name__", ""), why, "named")
        return found

    def map(self, task: Callable[[Any, Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        self._check_closed()
        self._open = True
        return self._results(task_of(self.method, task, "server"), items)

    def _results(self, known: Task, items: Iterable[Any]) -> Iterator[Any]:
        entries = (
            Entry(n, None, self._job("server", known.name, call=self._call(SERVER_ID)), self._pack(item, known))
            for n, item in enumerate(items)
        )
        for _, outcome in self._stream(entries):
            if outcome.payload is None:
                yield None
            else:
                yield wire.unpack(known.upload, outcome.payload)
        self._close()

    def finish_round(self, weights: Tree | None) -> None:
        """Close a round: raise an error if a run is still open, and recompute statistics if they are to be."""
        self._check_closed()
        self._lost.check(self.round, self.clients, self.judge)
        recomputed = self.experiment.model.buffers == "recomputed" and weights is not None
        if recomputed:
            self.statistics = self._recompute(weights or {})
        self.ship(weights)
        if recomputed and self.experiment.recipe.average and self.evaluated(self.round):
            self._shipped_statistics = self._recompute(self.shipped or {})
        self._calls.clear()

    def ship(self, weights: Tree | None) -> None:
        """Fold the model after a round into the mean over rounds that is measured and shipped."""
        decay, old = min(self.experiment.recipe.average, 1 - 1 / max(1, self.round)), self.shipped
        if weights is None or not self.experiment.recipe.average:
            self.shipped = weights
        elif old is None or not decay:
            self.shipped = {name: value.clone() for name, value in weights.items()}  # a method may change its own
        else:
            self.shipped = tree.mean([(decay, old), (1 - decay, weights)])
        self._shipped_statistics = self.statistics

    def restore(self, saved: Saved[Any], model: Tree | None) -> None:
        """Go on after a checkpoint, whose state has this model."""
        self.checkpointed, self.statistics = saved.round, saved.statistics
        self.judge.conduct = saved.conduct or Conduct()
        self.shipped, self._shipped_statistics = model, saved.statistics
        if saved.shipped:
            apart = self.experiment.model.buffers == "recomputed"
            self.shipped = tree.parameters(saved.shipped) if apart else saved.shipped
            self._shipped_statistics = tree.statistics(saved.shipped) if apart else None

    def complete(self) -> Tree:
        """The shipped model with the statistics that belong to it."""
        return (self.shipped or {}) | (self._shipped_statistics or {})

    def take_round(self) -> dict[str, Any]:
        """Return what the round cost and showed, for its line, and start to count again."""
        seen, self.seen = self.seen, Round()
        seen.suspects = self.judge.take_suspects()
        hidden = ("images_labeled", "images_unlabeled") if self.remote else ()  # sites elsewhere do not tell
        return {name: value for name, value in seen.line().items() if name not in hidden}

    def evaluate(self, data: bytes) -> dict[str, int]:
        """Have a packed model measured while rounds go on. Return a ticket for each split and each testing site."""
        self._asked_bytes = len(data)
        jobs = {split: self._job("evaluate", split) for split in self.world.measured}
        jobs |= {f"client {client}": self._job("evaluate", "test", client) for client in self.world.tested}
        return {name: self.executor.submit(job, data, None) for name, job in jobs.items()}

    def collect(self, tickets: dict[str, int]) -> dict[str, Any]:
        """Return the metrics behind `evaluate`'s tickets. Those of all sites together are under `sites`."""
        found: dict[str, Any] = {}
        clients = {f"client {client}": client for client in self.world.tested}
        answers, failures, up = list[coarse.Answer](), list[Failure](), 0
        for name, ticket in tickets.items():
            while not self.executor.tickets.ready(ticket):
                self.executor.wait()
            outcome = self.executor.tickets.collect(ticket)
            if name in clients:
                up += len(outcome.payload or b"")
                try:
                    answers.append(answer_of(outcome, self.num_classes))
                except FewLabelError as error:
                    failures.append({"client": clients[name], "task": "evaluate", "why": str(error)})
            elif outcome.failure:
                raise RunFailed(f"the model cannot be evaluated: {outcome.failure}")
            else:
                found[name] = outcome.outside
        if asked := len(answers) + len(failures):
            spent = {"asked": asked, "bytes_up": up, "bytes_down": asked * self._asked_bytes, "failures": failures}
            metrics = coarse.pooled(answers, self.experiment.clients.largest_share) if answers else {}
            found["sites"] = metrics | spent
            if metrics:
                found.setdefault("test", metrics)  # where the server has nothing to test on
        return found

    def _job(self, kind: str, task: str = "", client: int = SERVER_ID, call: int = 0) -> Job:
        evaluated = self.evaluated(self.round)
        score = self.experiment.evaluate.local and evaluated
        return Job(str(self.directory), kind, task, client, self.round, call, self.checkpointed, score, evaluated)

    def latest_job(self, kind: str, task: str, client: int) -> Job:
        """Return the job that a client was asked to do last in this round."""
        return self._job(kind, task, client, self._calls[client])

    def _call(self, client: int) -> int:
        """Return how often this client, or the server, was asked in this round before."""
        self._calls[client] = self._calls.get(client, -1) + 1
        return self._calls[client]

    def evaluated(self, round: int) -> bool:
        return round % self.experiment.evaluate.every == 0 or round == self.rounds

    def _pack(self, message: Any, task: Task) -> bytes:
        """Pack a message. A broadcast is packed once."""
        if self._packed[0] is not message:
            try:
                self._packed = message, wire.pack(message, task.message)
            except wire.WireError as error:
                raise RunFailed(f"'{task.name}' is sent a message that is not of its annotation: {error}") from None
        return self._packed[1]

    def _replies(self, task: Task, jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        counts = {"asked": 0, "replies": 0}

        def entries() -> Iterator[Entry]:
            for number, (client, message) in enumerate(jobs):
                call = self._call(client.id)
                if self.judge.excludes(client.id):
                    continue
                data = self._pack(message, task)
                counts["asked"] += 1
                self.seen.down += len(data) + self._statistics_bytes
                self.seen.model_bytes += 2 * self._model_bytes
                if not self._silent(client.id, call):
                    job = self._job(sums.kind(self, task), task.name, client.id, call)
                    yield Entry(number, client, job, data, message)

        for reply in self.judge.judged(task.name, self._accepted(task, entries())):
            counts["replies"] += 1
            yield reply
        self.seen.asked += counts["asked"]
        self.seen.replies += counts["replies"]
        self._close()
        self._lost.check_spent(self.clients)
        if counts["replies"] < (needed := min(self.experiment.clients.min_replies, counts["asked"])):
            raise TooFewReplies(
                f"round {self.round} had {counts['replies']} replies to '{task.name}' and needs {needed} "
                "(clients.min_replies)"
            )

    def _accepted(self, task: Task, entries: Iterator[Entry]) -> Iterator[tuple[Reply[Any], Any]]:
        """Yield the replies that can be used, in job order, each with the message that it answers."""
        for entry, outcome in self._timed(self._stream(entries)):
            assert entry.client is not None
            client = self._infos[entry.client.id]  # the one asked may be of an earlier round
            if outcome.failure or outcome.payload is None:
                self._lost.heard(client, outcome.failure or None, "spent" in outcome.outside)
                continue
            self.seen.up += len(outcome.payload)
            try:
                asked = self._asked[client.id]
                fits = {} if entry.job.kind == sums.HIDDEN else self._leaving
                upload = accept(task, client, self.round, outcome.payload, fits, asked)
            except ClientError as error:
                self._note_failure(error, refused=True)
                self._lost.heard(client, error.why)
                continue
            self._lost.heard(client)
            yield Reply(entry.number, client, upload, client.size / max(1, asked.client.size)), entry.sent

    def _stream(self, entries: Iterator[Entry]) -> Iterator[tuple[Entry, Outcome]]:
        """Yield outcomes in job order. A few jobs are under way at a time, and one job of each client."""
        pooled = None if self.statistics is None else self._pooled()
        under_way: deque[Entry] = deque()
        more = True
        while True:
            while more and len(under_way) < self.executor.window:
                entry = next(entries, None)
                more = entry is not None
                if entry is not None:
                    under_way.append(entry)
            if not under_way:
                return
            busy: set[int] = set()
            for entry in under_way:
                if entry.ticket is None and (entry.client is None or entry.client.id not in busy):
                    entry.ticket = self.executor.submit(entry.job, entry.message, pooled)
                if entry.client is not None and (entry.ticket is None or not self.executor.tickets.ready(entry.ticket)):
                    busy.add(entry.client.id)
            first = under_way[0]
            assert first.ticket is not None  # nothing before it keeps its client busy
            if not self.executor.tickets.ready(first.ticket):
                self.executor.wait()
                continue
            under_way.popleft()
            outcome = self.executor.tickets.collect(first.ticket)
            if outcome.failure:
                error = ClientError(first.job.client, first.job.task or first.job.kind, self.round, outcome.failure)
                error.__cause__ = RuntimeError(outcome.traceback)
                self._note_failure(error, spent="spent" in outcome.outside)
            self._observe(outcome.outside)
            yield first, outcome

    def _timed(self, stream: Iterator[tuple[Entry, Outcome]]) -> Iterator[tuple[Entry, Outcome]]:
        """Count the seconds spent waiting for outcomes, without those in which the server works on one."""
        began = time.monotonic()
        for found in stream:
            self.seen.waited += time.monotonic() - began
            yield found
            began = time.monotonic()

    def _note_failure(self, error: ClientError, refused: bool = False, spent: bool = False) -> None:
        """Write down what a remote client did wrong, that an attacker's upload is refused, or that privacy is spent.

        Otherwise in a simulation, and at the server, raise the error.
        """
        attack = refused and self.experiment.clients.attack is not None
        if not (self.remote or attack or spent) or error.client == SERVER_ID:
            raise error
        self.seen.failures.append({"client": error.client, "task": error.task, "why": error.why})
        if refused:
            self.judge.name(error.client, error.task, error.why, "left out")

    def _observe(self, outside: dict[str, Any]) -> None:
        self.seen.images = [a + b for a, b in zip(self.seen.images, outside.get("images", (0, 0)), strict=True)]
        for name, value in outside.get("shown", {}).items():
            self.seen.shown.setdefault(name, []).append(torch.tensor(value, dtype=torch.float64))
        if "epsilon" in outside:
            self.seen.values["epsilon"] = max(outside["epsilon"], self.seen.values.get("epsilon", 0.0))
        if "local_accuracy" in outside:
            self.seen.local_accuracy.append(outside["local_accuracy"])
        for epoch, audit in outside.get("audit", {}).items():
            self.seen.audits.setdefault(epoch, []).append(evaluate.Audit.from_json(audit))

    def _recompute(self, weights: Tree) -> Tree | None:
        """Pool BatchNorm statistics over clients."""
        data = wire.pack(Model(weights))
        asked = [
            client
            for client in self.sample(name="statistics")
            if not self._silent(client.id, -1) and not self.judge.excludes(client.id)
        ]
        jobs = (Entry(n, c, self._job("statistics", client=c.id), data) for n, c in enumerate(asked))
        replies = []

        def found() -> Iterator[tuple[int, Tree]]:
            for entry, outcome in self._stream(jobs):
                assert entry.client is not None
                self.seen.down += len(data)
                if outcome.payload is None:
                    continue
                self.seen.up += len(outcome.payload)
                try:
                    statistics = statistics_of(entry.client, self.round, outcome.payload, self.initial)
                except ClientError as error:
                    self._note_failure(error, refused=True)
                    continue
                replies.append(entry.client)
                yield entry.client.size, statistics

        pooled = tree.pool(found())
        return pooled if replies else self.statistics

    def _silent(self, client: int, call: int) -> bool:
        chance = self.experiment.clients.dropout
        return client in self.absent or (chance > 0 and self.rng("dropout", client, call).numpy.random() < chance)

    @cached_property
    def _leaving(self) -> Tree:
        """The part of the network that may leave a site by the policy for statistics."""
        return self.initial if self.experiment.model.buffers == "global" else tree.parameters(self.initial)

    @cached_property
    def _model_bytes(self) -> int:
        return len(wire.pack(Model(self.initial)))

    @property
    def _statistics_bytes(self) -> int:
        return 0 if self.statistics is None else len(self._pooled())

    def _pooled(self) -> bytes:
        return wire.pack(Model(self.statistics or {}))

    def _close(self) -> None:
        """Close a run. The next one packs its message again, because it may have changed."""
        self._open, self._packed = False, (NOTHING, b"")

    def _check_closed(self) -> None:
        if self._open:
            raise RuntimeError("the replies of a run must be consumed to their end before the next step")
