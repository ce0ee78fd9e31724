"""A federation on this machine: its clients' tasks in this process or spread over worker processes, with the same bits.

A worker needs nothing but the run's directory: it reads the experiment and the partition there, maps the data set
that all processes share, and builds one network that every client's task uses in turn.
"""

import traceback
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import functional_call

from fewlabel import evaluate, models, tree, wire
from fewlabel.checkpoint import ClientStates
from fewlabel.data import datasets
from fewlabel.data.partition import Partition
from fewlabel.data.sets import Labeled, Unlabeled
from fewlabel.errors import FewLabelError, RunFailed
from fewlabel.experiment import Experiment, load
from fewlabel.federation import (
    ClientError,
    ClientInfo,
    Reply,
    Site,
    Task,
    TooFewReplies,
    accept,
    batch_statistics,
    perform,
    task_of,
    tasks,
)
from fewlabel.rng import Rng
from fewlabel.tree import Tree

EVALUATION_BATCH = 500  # fixed: the bits of a sum depend on how images are batched
SERVER_ID = -1


@dataclass(frozen=True)
class Job:
    """One piece of work: a task at a client or the server, or one of the framework's own."""

    run: str  # directory
    kind: str  # client, server, evaluate, statistics
    task: str = ""
    client: int = SERVER_ID
    round: int = 0
    call: int = 0  # how often this client was asked in this round before
    checkpointed: int = 0  # the last round a resume may start from
    score: bool = False

    def __str__(self) -> str:
        who = "the server" if self.client == SERVER_ID else f"client {self.client}"
        return f"{who} was at '{self.task or self.kind}' of round {self.round}"


@dataclass(frozen=True)
class Outcome:
    """What came of a job: the bytes that leave the site, what was measured from outside it, or why it failed."""

    payload: bytes | None
    outside: dict[str, Any]
    failure: str = ""  # one sentence
    traceback: str = ""


@dataclass(frozen=True)
class Weights:
    """The message of the framework's own jobs."""

    model: Tree


class Executor(Protocol):
    """Runs jobs; tickets are redeemed in any order."""

    window: int  # jobs worth having under way

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int: ...

    def ready(self, ticket: int) -> bool: ...

    def wait(self) -> None:
        """Until some job is done."""

    def collect(self, ticket: int) -> Outcome:
        """The outcome of a job that is ready."""

    def discard(self) -> None:
        """Forgets all jobs under way."""


@dataclass(frozen=True)
class World:
    """A run's experiment and data, as every process that takes part reads them from the run's directory."""

    experiment: Experiment
    dataset: datasets.Dataset
    partition: Partition

    @classmethod
    def open(cls, directory: Path) -> "World":
        experiment = load(directory / "experiment.toml")
        dataset = datasets.load(experiment.data.name, image_size(experiment))
        return cls(experiment, dataset, Partition.load(directory / "partition.json"))

    def network(self, rng: Rng, pretrained: bool = False) -> torch.nn.Module:
        net = self.experiment.model
        with rng.scope():
            return models.build(
                net.name,
                self.dataset.channels,
                len(self.dataset.classes),
                self.dataset.image_size,
                norm=net.norm,
                dropout=net.dropout,
                pretrained=pretrained,
            )

    def info(self, client: int) -> ClientInfo:
        share = self.partition.shares[client]
        return ClientInfo(client, len(share.labeled), len(share.unlabeled))

    def labeled(self, index: Any, rng: Rng, split: str = "train") -> Labeled | None:
        data, where = self.dataset.splits[split], torch.from_numpy(index)
        return Labeled(data.images, where, data.labels[where], rng.stream("labeled").torch) if len(where) else None

    def whole(self, split: str, rng: Rng) -> Labeled:
        data = self.dataset.splits[split]
        return Labeled(data.images, torch.arange(len(data)), data.labels, rng.torch)

    def site(self, client: int, round: int, rng: Rng, model: torch.nn.Module, **more: Any) -> Site[Any]:
        """A client's site, or the server's."""
        if client == SERVER_ID:
            info = ClientInfo(SERVER_ID, len(self.partition.server), 0)
            labeled, unlabeled = self.labeled(self.partition.server, rng), None
            validation = self.whole("validation", rng) if "validation" in self.dataset.splits else None
        else:
            info, share, validation = self.info(client), self.partition.shares[client], None
            labeled, where = self.labeled(share.labeled, rng), torch.from_numpy(share.unlabeled)
            images = self.dataset.splits["train"].images
            unlabeled = Unlabeled(images, where, rng.stream("unlabeled").torch) if len(where) else None
        return Site(
            info,
            round=round,
            rounds=self.experiment.rounds,
            num_classes=len(self.dataset.classes),
            model=model,
            rng=rng,
            labeled=labeled,
            unlabeled=unlabeled,
            validation=validation,
            buffers=self.experiment.model.buffers,
            **more,
        )


def image_size(experiment: Experiment) -> int:
    return experiment.data.image_size or models.image_size(experiment.model.name)


@cache
def stored_kind(state: Any) -> Any:
    """What a client keeps between rounds: the method's state, and its BatchNorm statistics where they stay local."""
    return make_dataclass("Stored", [("state", state | None), ("statistics", Tree | None)], frozen=True)


class Worker:
    """Does the jobs of one run, in whichever process it lives."""

    def __init__(self, directory: Path) -> None:
        self.world = World.open(directory)
        self.method = self.world.experiment.method
        self.model = self.world.network(Rng("scratch"))
        self.modules, self.parameters = tuple(self.model.modules()), tuple(self.model.parameters())
        self.states = ClientStates(directory / "clients")

    def attempt(self, job: Job, message: bytes, statistics: bytes | None) -> Outcome:
        """Does a job; what a task raises becomes part of the outcome, the same from any process."""
        try:
            return self.do(job, message, statistics)
        except FewLabelError as error:
            return Outcome(None, {}, str(error), traceback.format_exc())
        except Exception as error:
            return Outcome(None, {}, f"{type(error).__name__}: {error}", traceback.format_exc())

    def do(self, job: Job, message: bytes, statistics: bytes | None) -> Outcome:
        if not all(module.training for module in self.modules):  # to look is ten times faster than to set
            self.model.train()
        if not all(parameter.requires_grad for parameter in self.parameters):
            self.model.requires_grad_(True)
        rng = Rng(self.world.experiment.seed, "task", job.round, job.client, job.task or job.kind, job.call)
        pooled = None if statistics is None else wire.unpack(Weights, statistics).model
        if job.kind == "evaluate":
            return self.evaluate(job, wire.unpack(Weights, message).model, rng)
        if job.kind == "statistics":
            return self.statistics(job, wire.unpack(Weights, message).model, rng)
        return self.task(job, message, pooled, rng)

    def task(self, job: Job, message: bytes, pooled: Tree | None, rng: Rng) -> Outcome:
        method: Any = type(self.method)
        task, local = tasks(method)[job.task], self.world.experiment.model.buffers == "local"
        keeps = job.client != SERVER_ID and (local or task.state is not type(None))
        stored = self.states.load(job.client, job.round, job.call, stored_kind(task.state)) if keeps else None
        outside: dict[str, Any] = {}
        site = self.world.site(
            job.client,
            job.round,
            rng,
            self.model,
            state=stored.state if stored else None,
            statistics=stored.statistics if local and stored else pooled,
            audit=self.auditor(job.client, outside) if job.client != SERVER_ID else None,
            score=self.scorer(outside) if job.score else None,
        )
        payload = perform(self.method, task, site, message)
        if keeps:
            kind = stored_kind(task.state)
            value = kind(site.state, site.statistics if local else None)
            self.states.save(job.client, job.round, job.call, value, kind, job.checkpointed)
        return Outcome(payload, outside)

    def auditor(self, client: int, outside: dict[str, Any]) -> Callable[[Tensor, Tensor, int], None]:
        """Scores pseudo-labels with the labels that the site does not have."""
        where = torch.from_numpy(self.world.partition.shares[client].unlabeled)
        classes = len(self.world.dataset.classes)

        def audit(index: Tensor, pseudo_label: Tensor, epoch: int) -> None:
            right = pseudo_label == self.world.dataset.splits["train"].labels[where[index]]
            used = torch.bincount(pseudo_label, minlength=classes)
            correct = torch.bincount(pseudo_label[right], minlength=classes)
            found = evaluate.Audit(len(where), used, correct)
            epochs = outside.setdefault("audit", {})
            if (before := epochs.get(str(epoch))) is not None:
                before = evaluate.Audit.from_json(before)
                found = evaluate.Audit(len(where), before.used + used, before.correct + correct)
            epochs[str(epoch)] = found.to_json()

        return audit

    def scorer(self, outside: dict[str, Any]) -> Callable[[Tree], None]:
        def score(weights: Tree) -> None:
            training = self.model.training
            self.model.eval()
            test, right = self.world.whole("test", Rng("evaluate")), 0
            with torch.inference_mode():
                for x, y in test.batches("plain", EVALUATION_BATCH, shuffle=False):
                    right += int((functional_call(self.model, weights, x).argmax(1) == y).sum())
            self.model.train(training)
            outside["local_accuracy"] = right / len(test)

        return score

    def evaluate(self, job: Job, weights: Tree, rng: Rng) -> Outcome:
        """Metrics of a model. One without statistics, which stay at the clients, takes those of the images it sees."""
        images = self.world.whole(job.task, rng)

        def batches() -> Iterator[Tensor]:
            return (x for x, _ in images.batches("plain", EVALUATION_BATCH, shuffle=False))

        self.model.load_state_dict(tree.of(self.model) | weights)
        if tree.statistics(tree.of(self.model)).keys() - weights.keys():
            batch_statistics(self.model, batches())
        return Outcome(None, evaluate.measure(evaluate.predict(self.model, batches()), images.y))

    def statistics(self, job: Job, weights: Tree, rng: Rng) -> Outcome:
        """A client's own BatchNorm statistics under these weights, over all of its images."""
        self.model.load_state_dict(tree.of(self.model) | weights)
        share = self.world.partition.shares[job.client]
        where = torch.cat([torch.from_numpy(part) for part in (share.labeled, share.unlabeled)])
        images = Unlabeled(self.world.dataset.splits["train"].images, where, rng.torch)
        batches = images.batches(("plain",), EVALUATION_BATCH, shuffle=False)
        found = batch_statistics(self.model, (x for x, _ in batches))
        return Outcome(wire.pack(Weights(found)), {})


@dataclass
class Round:
    """What one round cost and what was seen of it, apart from its metrics."""

    up: int = 0
    down: int = 0
    asked: int = 0
    replies: int = 0
    model_bytes: int = 0  # what FedAvg would have sent and received in as many jobs
    scalars: dict[str, float] = field(default_factory=dict)
    audits: dict[str, list[evaluate.Audit]] = field(default_factory=dict)
    local_accuracy: list[float] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        line: dict[str, Any] = {"bytes_up": self.up, "bytes_down": self.down, "model_bytes": self.model_bytes}
        line |= {"asked": self.asked, "replies": self.replies, **self.scalars}
        if self.local_accuracy:
            line["local_accuracy"] = sum(self.local_accuracy) / len(self.local_accuracy)
        if self.audits:
            epochs = {epoch: evaluate.merge_audits(parts) for epoch, parts in sorted(self.audits.items())}
            scored = {epoch: evaluate.audit_metrics(audit) for epoch, audit in epochs.items()}
            line["pseudo_labels"] = list(scored.values())[-1]
            if len(scored) > 1:
                line["pseudo_labels_per_epoch"] = scored
        return line


@dataclass
class Entry:
    """A job of an open run."""

    number: int
    client: ClientInfo | None
    job: Job
    message: bytes
    ticket: int | None = None


class Simulation:
    """The Federation on this machine."""

    def __init__(self, directory: Path, executor: Executor, absent: Collection[int] = ()) -> None:
        self.directory, self.executor, self.absent = directory, executor, frozenset(absent)
        self.world = World.open(directory)
        self.experiment, self.method = self.world.experiment, self.world.experiment.method
        self.rounds, self.num_classes = self.experiment.rounds, len(self.world.dataset.classes)
        self.round, self.checkpointed = 0, 0
        self.clients: Sequence[ClientInfo] = [self.world.info(c) for c in range(len(self.world.partition.shares))]
        model = self.world.network(Rng(self.experiment.seed, "network"), self.experiment.model.pretrained)
        self.server: Site[None] = self.world.site(SERVER_ID, 0, Rng(self.experiment.seed, "server"), model)
        self.initial = tree.of(model)
        self.statistics: Tree | None = None  # pooled over clients, where the experiment recomputes them
        self.seen = Round()
        self._calls: dict[int, int] = {}
        self._open = False
        self._packed: tuple[Any, bytes] = (None, b"")

    @property
    def labeled(self) -> Sequence[ClientInfo]:
        return [client for client in self.clients if client.num_labeled]

    @property
    def unlabeled(self) -> Sequence[ClientInfo]:
        return [client for client in self.clients if client.num_unlabeled]

    def rng(self, *names: int | str) -> Rng:
        return Rng(self.experiment.seed, "server", self.round, *names)

    def sample(
        self, k: int | None = None, among: Sequence[ClientInfo] | None = None, *, name: str = ""
    ) -> list[ClientInfo]:
        clients = list(self.clients if among is None else among)
        k = k or self.experiment.clients.per_round or len(clients)
        return clients if k >= len(clients) else self.rng("sample", name).sample(clients, k)

    def log(self, **scalars: float) -> None:
        self.seen.scalars |= {name: float(value) for name, value in scalars.items()}

    def run(self, task: Callable[[Any, Any], Any], jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        self._check_closed()
        self._open = True
        return self._replies(task_of(self.method, task, "client"), jobs)

    def map(self, task: Callable[[Any, Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        known = task_of(self.method, task, "server")
        entries = (
            Entry(n, None, self._job("server", known.name, call=n), self._pack(item, known.message))
            for n, item in enumerate(items)
        )
        for _, outcome in self._stream(entries):
            if outcome.payload is None:
                raise RunFailed(f"'{known.name}' at the server returned nothing in round {self.round}")
            yield wire.unpack(known.upload, outcome.payload)

    def finish_round(self, weights: Tree | None) -> None:
        """Closes a round: nothing may be left open, and statistics that are to be recomputed are."""
        self._check_closed()
        if self.experiment.model.buffers == "recomputed" and weights is not None:
            self.statistics = self._recompute(weights)
        self._calls.clear()

    def take_round(self) -> dict[str, Any]:
        """What the round cost and showed, for its line; counting starts anew."""
        seen, self.seen = self.seen, Round()
        return seen.line()

    def evaluate(self, weights: Tree) -> dict[str, int]:
        """Has a model measured beside whatever comes next: a ticket for each split."""
        data = wire.pack(Weights(weights | (self.statistics or {})))
        splits = [split for split in ("test", "validation") if split in self.world.dataset.splits]
        return {s: self.executor.submit(self._job("evaluate", s), data, None) for s in splits}

    def collect(self, tickets: dict[str, int]) -> dict[str, Any]:
        """The metrics behind `evaluate`'s tickets."""
        found = {}
        for split, ticket in tickets.items():
            while not self.executor.ready(ticket):
                self.executor.wait()
            outcome = self.executor.collect(ticket)
            if outcome.failure:
                raise RunFailed(f"the model cannot be evaluated: {outcome.failure}")
            found[split] = outcome.outside
        return found

    def _job(self, kind: str, task: str = "", client: int = SERVER_ID, call: int = 0) -> Job:
        score = self.experiment.evaluate.local and self.evaluated(self.round)
        return Job(str(self.directory), kind, task, client, self.round, call, self.checkpointed, score)

    def evaluated(self, round: int) -> bool:
        return round % self.experiment.evaluate.every == 0 or round == self.rounds

    def _pack(self, message: Any, kind: Any) -> bytes:
        """The bytes of a message; a broadcast is packed once."""
        if self._packed[0] is not message:
            self._packed = message, wire.pack(message, kind)
        return self._packed[1]

    def _replies(self, task: Task, jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        counts = {"asked": 0, "replies": 0}

        def entries() -> Iterator[Entry]:
            for number, (client, message) in enumerate(jobs):
                call = self._calls[client.id] = self._calls.get(client.id, -1) + 1
                data = self._pack(message, task.message)
                counts["asked"] += 1
                self.seen.down += len(data)
                self.seen.model_bytes += 2 * self._model_bytes
                if not self._silent(client.id, call):
                    yield Entry(number, client, self._job("client", task.name, client.id, call), data)

        for entry, outcome in self._stream(entries()):
            if outcome.payload is None or entry.client is None:
                continue
            self.seen.up += len(outcome.payload)
            counts["replies"] += 1
            yield Reply(
                entry.number,
                entry.client,
                accept(task, entry.client, self.round, outcome.payload, self.initial),
            )
        self.seen.asked += counts["asked"]
        self.seen.replies += counts["replies"]
        self._open = False
        if counts["replies"] < (needed := min(self.experiment.clients.min_replies, counts["asked"])):
            raise TooFewReplies(
                f"round {self.round} had {counts['replies']} replies to '{task.name}' and needs {needed} "
                "(clients.min_replies)"
            )

    def _stream(self, entries: Iterator[Entry]) -> Iterator[tuple[Entry, Outcome]]:
        """Outcomes in job order, a small window of jobs under way, and one job at a time for each client."""
        pooled = None if self.statistics is None else wire.pack(Weights(self.statistics))
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
                if entry.client is not None and (entry.ticket is None or not self.executor.ready(entry.ticket)):
                    busy.add(entry.client.id)
            first = under_way[0]
            assert first.ticket is not None  # nothing before it keeps its client busy
            if not self.executor.ready(first.ticket):
                self.executor.wait()
                continue
            under_way.popleft()
            outcome = self.executor.collect(first.ticket)
            if outcome.failure:
                failed = ClientError(first.job.client, first.job.task or first.job.kind, self.round, outcome.failure)
                raise failed from RuntimeError(outcome.traceback)
            self._observe(outcome.outside)
            yield first, outcome

    def _observe(self, outside: dict[str, Any]) -> None:
        if "local_accuracy" in outside:
            self.seen.local_accuracy.append(outside["local_accuracy"])
        for epoch, audit in outside.get("audit", {}).items():
            self.seen.audits.setdefault(epoch, []).append(evaluate.Audit.from_json(audit))

    def _recompute(self, weights: Tree) -> Tree:
        """BatchNorm statistics pooled over clients."""
        data = wire.pack(Weights(weights))
        asked = self.sample(name="statistics")
        jobs = (Entry(n, c, self._job("statistics", client=c.id), data) for n, c in enumerate(asked))

        def found() -> Iterator[tuple[int, Tree]]:
            for entry, outcome in self._stream(jobs):
                assert entry.client is not None
                assert outcome.payload is not None
                self.seen.down, self.seen.up = self.seen.down + len(data), self.seen.up + len(outcome.payload)
                yield entry.client.size, wire.unpack(Weights, outcome.payload, finite=True).model

        return tree.pool(found())

    def _silent(self, client: int, call: int) -> bool:
        chance = self.experiment.clients.dropout
        return client in self.absent or (chance > 0 and self.rng("dropout", client, call).numpy.random() < chance)

    @cached_property
    def _model_bytes(self) -> int:
        return len(wire.pack(Weights(self.initial)))

    def _check_closed(self) -> None:
        if self._open:
            raise RuntimeError("the replies of a run must be consumed to their end before the next step")
