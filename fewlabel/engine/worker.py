"""Where jobs are done: all that a process needs to be any client of a run, or its server.

It needs nothing but the run's directory: it reads the experiment and the partition there, maps the data set that all
processes share, and builds one network that every client's task uses in turn.
"""

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fewlabel import networks
from fewlabel.core import metrics, tree, wire
from fewlabel.core.errors import FewLabelError, StorageError
from fewlabel.core.federation import ClientInfo, Site, batch_statistics, perform, tasks
from fewlabel.core.images import Labeled, Tally, Unlabeled
from fewlabel.core.rng import Rng, preserved
from fewlabel.core.tree import Tree
from fewlabel.data import datasets
from fewlabel.data.own.read import TABLES
from fewlabel.data.partition import Partition, Share
from fewlabel.engine import device
from fewlabel.engine.checkpoint import ClientStates
from fewlabel.experiment import Experiment, load

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
    score: bool = False  # measure local models
    evaluated: bool = False  # the round's model is measured

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


@dataclass(frozen=True)
class World:
    """A run's experiment and data, as every process that takes part reads them from the run's directory."""

    experiment: Experiment
    dataset: datasets.Dataset
    partition: Partition
    tested: tuple[int, ...] = ()  # clients elsewhere that hold images to test on

    @classmethod
    def open(cls, directory: Path) -> "World":
        experiment = load(directory / "experiment.toml")
        dataset = dataset_of(experiment)
        partition = Partition.load(directory / "partition.json")
        if partition.data != dataset.digest:
            raise StorageError(f"the data set '{dataset.name}' is not the one that {directory} began with; start anew")
        train = dataset.splits["train"]
        images = replace(train.images, weak=experiment.views.weak, strong=experiment.views.strong)
        splits = dataset.splits | {"train": replace(train, images=images)}
        return cls(experiment, replace(dataset, splits=splits), partition)

    def on(self, place: torch.device) -> "World":
        """The same with its images on a device, and so all that sites make of them."""
        splits = {
            name: replace(split, images=replace(split.images, pixels=split.images.pixels.to(place)))
            for name, split in self.dataset.splits.items()
        }
        return replace(self, dataset=replace(self.dataset, splits=splits))

    def network(self, rng: Rng, pretrained: bool = False) -> torch.nn.Module:
        net = self.experiment.model
        with rng.scope():
            return networks.build(
                net.name,
                self.dataset.channels,
                len(self.dataset.classes),
                self.dataset.image_size,
                norm=net.norm,
                dropout=net.dropout,
                pretrained=pretrained,
            )

    def share(self, client: int, round: int) -> Share:
        """A client's images in a round."""
        return self.partition.shares[client].at(round, self.experiment.stream)

    def info(self, client: int, round: int) -> ClientInfo:
        share = self.share(client, round)
        return ClientInfo(client, len(share.labeled), len(share.unlabeled))

    @cached_property
    def told(self) -> Tensor:
        """The training labels as sites have them, some of them wrong where the experiment wants it so."""
        labels = self.dataset.splits["train"].labels
        if not self.partition.noise.size:
            return labels
        images, wrong = torch.from_numpy(self.partition.noise)
        return labels.index_copy(0, images, wrong)

    def training(self, index: Any, rng: torch.Generator, tally: Tally | None = None) -> Labeled:
        where = torch.from_numpy(index)
        return Labeled(self.dataset.splits["train"].images, where, self.told[where], rng, tally)

    @property
    def measured(self) -> tuple[str, ...]:
        """The splits to measure on; where no validation is published, it is the labeled images set aside for it."""
        there = {*self.dataset.splits, *(["validation"] if len(self.partition.validation) else [])}
        return tuple(split for split in ("test", "validation") if split in there)

    def whole(self, split: str, rng: Rng) -> Labeled:
        if split in self.dataset.splits:
            data = self.dataset.splits[split]
            return Labeled(data.images, torch.arange(len(data)), data.labels, rng.torch)
        return self.training(self.partition.validation, rng.torch)

    def site(self, client: int, round: int, rng: Rng, model: torch.nn.Module, **more: Any) -> Site[Any]:
        """A client's site, or the server's."""
        if client == SERVER_ID:
            share = Share(self.partition.server, self.partition.server[:0])
            validation = self.whole("validation", rng) if "validation" in self.measured else None
        else:
            share, validation = self.share(client, round), None
        tally, images = Tally(), self.dataset.splits["train"].images
        labeled = unlabeled = None
        if len(share.labeled):
            labeled = self.training(share.labeled, rng.stream("labeled").torch, tally)
        if len(share.unlabeled):
            where = torch.from_numpy(share.unlabeled)
            unlabeled = Unlabeled(images, where, rng.stream("unlabeled").torch, tally)
        return Site(
            ClientInfo(client, len(share.labeled), len(share.unlabeled)),
            round=round,
            rounds=self.experiment.rounds,
            num_classes=len(self.dataset.classes),
            model=model,
            rng=rng,
            labeled=labeled,
            unlabeled=unlabeled,
            validation=validation,
            buffers=self.experiment.model.buffers,
            tally=tally,
            device=images.pixels.device,
            **more,
        )


def dataset_of(experiment: Experiment, fresh: bool = False) -> datasets.Dataset:
    """The data set as an experiment wants it read."""
    wanted = {f.name: getattr(experiment.data, f.name) for f in fields(experiment.data)}
    if experiment.clients.column and experiment.data.name in TABLES:  # it may be any of the table's own
        wanted["columns"] = {**experiment.data.columns, "client": experiment.clients.column}
    return datasets.load(**wanted | {"image_size": image_size(experiment), "fresh": fresh})


def image_size(experiment: Experiment) -> int:
    return experiment.data.image_size or networks.image_size(experiment.model.name)


@cache
def stored_kind(state: Any) -> Any:
    """What a client keeps between rounds: the method's state, and its BatchNorm statistics where they stay local."""
    return make_dataclass("Stored", [("state", state | None), ("statistics", Tree | None)], frozen=True)


class Worker:
    """Does the jobs of one run, in whichever process it lives; of a `remote` world those of one place.

    Its number among the workers says on which device.
    """

    def __init__(self, directory: Path, remote: World | None = None, number: int = 0) -> None:
        world, self.watched = remote or World.open(directory), remote is None
        self.device = device.of(world.experiment.device, number)
        self.world, self.method = world.on(self.device), world.experiment.method
        self.model = world.network(Rng("scratch")).to(self.device)
        # By their dictionaries, as a module looks long at each attribute that is set.
        self.modules = tuple((vars(module), module.training) for module in self.model.modules())
        self.parameters = tuple((parameter, parameter.requires_grad) for parameter in self.model.parameters())
        self.states = ClientStates(directory / "clients", durable=not self.watched)

    def attempt(self, job: Job, message: bytes, statistics: bytes | None) -> Outcome:
        """Does a job; what a task raises becomes part of the outcome, the same from any process."""
        try:
            return self.do(job, message, statistics)
        except FewLabelError as error:
            return Outcome(None, {}, str(error), traceback.format_exc())
        except Exception as error:
            return Outcome(None, {}, f"{type(error).__name__}: {error}", traceback.format_exc())

    def do(self, job: Job, message: bytes, statistics: bytes | None) -> Outcome:
        for module, training in self.modules:  # as the network was built, whatever the last task made of it
            module["training"] = training
        for parameter, trained in self.parameters:
            parameter.grad = None
            if parameter.requires_grad is not trained:  # to look is faster than to set
                parameter.requires_grad = trained
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
        kind = stored_kind(task.state)
        stored = self.states.load(job.client, job.round, job.call, kind, self.device) if keeps else None
        site = self.world.site(
            job.client,
            job.round,
            rng,
            self.model,
            state=stored.state if stored else None,
            statistics=stored.statistics if local and stored else pooled,
            watched=self.watched and job.client != SERVER_ID,
        )
        if not job.score:
            site.scored = None  # no copy of a model that nobody looks at
        payload = perform(self.method, task, site, message)
        outside = self.seen(job, site)
        kept = site.state, site.statistics if local else None
        if keeps and (stored or kept != (None, None)):  # a client that never kept anything needs no file that says so
            self.states.save(job.client, job.round, job.call, kind(*kept), kind, job.checkpointed)
        return Outcome(payload, outside)

    def seen(self, job: Job, site: Site[Any]) -> dict[str, Any]:
        """What is measured from outside when a task is done: here alone do hidden labels meet what a method did."""
        outside: dict[str, Any] = {"images": [site.tally.labeled, site.tally.unlabeled]}
        where = torch.from_numpy(self.world.share(job.client, job.round).unlabeled) if site.audited else torch.empty(0)
        labels: dict[int, Tensor] = {}
        for index, pseudo_label, epoch in site.audited or ():
            given = labels.setdefault(epoch, torch.full((len(where),), -1))
            given[index.cpu()] = pseudo_label.cpu()  # the last one counts, where images came up again
        for epoch, given in labels.items():
            index = (given >= 0).nonzero().flatten()
            outside.setdefault("audit", {})[str(epoch)] = self.audit(where, index, given[index]).to_json()
        if job.evaluated and site.shown:
            outside["shown"] = {name: value.tolist() for name, value in site.shown.items()}
        if job.score and site.scored:
            outside["local_accuracy"] = self.accuracy(site.scored[0])
        return outside

    def audit(self, where: Tensor, index: Tensor, pseudo_label: Tensor) -> metrics.Audit:
        """Pseudo-labels against the labels that the site does not have."""
        truth, classes = self.world.dataset.splits["train"].labels[where], len(self.world.dataset.classes)
        known, right = truth[index] >= 0, truth[index] == pseudo_label
        used, judged, correct = (
            torch.bincount(some, minlength=classes) for some in (pseudo_label, pseudo_label[known], pseudo_label[right])
        )
        return metrics.Audit(len(where), used, judged, correct)

    def accuracy(self, weights: Tree) -> float:
        """Of a local model on the test set."""
        test, right = self.world.whole("test", Rng("evaluate")), 0
        self.model.eval()
        with torch.inference_mode():
            for x, y in test.batches("plain", EVALUATION_BATCH, shuffle=False):
                right += int((functional_call(self.model, weights, x).argmax(1) == y).sum())
        return right / len(test)

    def evaluate(self, job: Job, weights: Tree, rng: Rng) -> Outcome:
        """Metrics of a model. One without statistics, which stay at the clients, takes those of the images it sees."""
        images = self.world.whole(job.task, rng)

        def batches() -> Iterator[Tensor]:
            return (x for x, _ in images.batches("plain", EVALUATION_BATCH, shuffle=False))

        self.model.load_state_dict(tree.untrained(self.model) | weights)
        if tree.statistics(tree.of(self.model)).keys() - weights.keys():
            batch_statistics(self.model, batches())
        scores = metrics.predict(self.model, batches())
        if job.client != SERVER_ID:  # a site's own test images, of which counts alone may leave it
            return Outcome(wire.pack(metrics.shared(scores, images.y)), {})
        return Outcome(None, metrics.measure(scores, images.y))

    def statistics(self, job: Job, weights: Tree, rng: Rng) -> Outcome:
        """A client's own BatchNorm statistics under these weights, over all of its images."""
        self.model.load_state_dict(tree.untrained(self.model) | weights)
        where = torch.from_numpy(self.world.share(job.client, job.round).images)
        images = Unlabeled(self.world.dataset.splits["train"].images, where, rng.torch)
        batches = images.batches(("plain",), EVALUATION_BATCH, shuffle=False)
        found = batch_statistics(self.model, (x for x, _ in batches))
        return Outcome(wire.pack(Weights(found)), {})


class Serial:
    """Does each job at once, in this process."""

    window = 1

    def __init__(self) -> None:
        self._worker: tuple[str, Worker] | None = None
        self._outcomes: dict[int, Outcome] = {}
        self._tickets = 0

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        if self._worker is None or self._worker[0] != job.run:
            self._worker = job.run, Worker(Path(job.run))
        self._tickets += 1
        with preserved():
            self._outcomes[self._tickets] = self._worker[1].attempt(job, message, statistics)
        return self._tickets

    def ready(self, ticket: int) -> bool:
        return ticket in self._outcomes

    def wait(self) -> None:
        raise RuntimeError("a job of this process is ready as soon as it is submitted")

    def collect(self, ticket: int) -> Outcome:
        return self._outcomes.pop(ticket)

    def discard(self) -> None:
        self._outcomes.clear()
        self._worker = None
