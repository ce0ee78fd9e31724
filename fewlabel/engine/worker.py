"""The worker: it does the jobs of a run in any process, as any client or as the server.

It needs only the run's directory. There it reads the experiment and the partition. It maps the data set that all
processes share, and builds one network, which every client's task uses in turn.
"""

import secrets
import traceback
from collections.abc import Iterator
from dataclasses import make_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fewlabel.core import metrics, schedule, tree, wire
from fewlabel.core.errors import FewLabelError, Spent
from fewlabel.core.federation import Model, Site, batch_statistics
from fewlabel.core.images import Unlabeled
from fewlabel.core.rng import Rng
from fewlabel.core.tasks import perform, tasks
from fewlabel.core.tree import Tree
from fewlabel.engine import device, record
from fewlabel.engine.attack import attacked
from fewlabel.engine.checkpoint import ClientStates
from fewlabel.engine.executor import SERVER_ID, Job, Outcome
from fewlabel.engine.ledger import Ledger
from fewlabel.engine.world import World
from fewlabel.learn import private

EVALUATION_BATCH = 500  # fixed: the bits of a sum depend on how images are batched


@cache
def stored_kind(state: Any) -> Any:
    """Return the type of what a client keeps: the method's state, and BatchNorm statistics if they stay local."""
    return make_dataclass("Stored", [("state", state | None), ("statistics", Tree | None)], frozen=True)


class Worker:
    """A worker that does the jobs of one run. In a `remote` world it does those of one place.

    `number` is its number among the workers, and decides its device.
    """

    def __init__(self, directory: Path, remote: World | None = None, number: int = 0) -> None:
        world, self.watched = remote or World.open(directory), remote is None
        self.device = device.of(world.experiment.device, number)
        self.world, self.method = world.on(self.device), world.experiment.method
        self.model = world.network(Rng("scratch")).to(self.device)
        # Their dictionaries, because it is slow to set an attribute of a module.
        self.modules = tuple((vars(module), module.training) for module in self.model.modules())
        self.parameters = tuple((parameter, parameter.requires_grad) for parameter in self.model.parameters())
        self.ledger = Ledger(directory)
        self.states = ClientStates(directory / record.CLIENTS, durable=not self.watched)

    def attempt(self, job: Job, message: bytes, statistics: bytes | None) -> Outcome:
        """Do a job. An error in its task becomes part of the outcome, the same from any process."""
        try:
            return self.do(job, message, statistics)
        except Spent as error:
            return Outcome(None, {"spent": True}, str(error), traceback.format_exc())
        except FewLabelError as error:
            return Outcome(None, {}, str(error), traceback.format_exc())
        except Exception as error:
            return Outcome(None, {}, f"{type(error).__name__}: {error}", traceback.format_exc())

    def do(self, job: Job, message: bytes, statistics: bytes | None) -> Outcome:
        for module, training in self.modules:  # as the network was built, whatever the last task did to it
            module["training"] = training
        for parameter, trained in self.parameters:
            parameter.grad = None
            if parameter.requires_grad is not trained:  # a look is faster than setting it
                parameter.requires_grad = trained
        rng = Rng(self.world.experiment.seed, "task", job.round, job.client, job.task or job.kind, job.call)
        pooled = None if statistics is None else wire.unpack(Model, statistics).model
        if job.kind == "evaluate":
            return self.evaluate(job, wire.unpack(Model, message).model, rng)
        if job.kind == "statistics":
            return self.statistics(job, wire.unpack(Model, message).model, rng)
        return self.task(job, message, pooled, rng)

    def task(self, job: Job, message: bytes, pooled: Tree | None, rng: Rng) -> Outcome:
        method: Any = type(self.method)
        task, local = tasks(method)[job.task], self.world.experiment.model.buffers == "local"
        keeps = job.client != SERVER_ID and (local or task.state is not type(None))
        if self.world.experiment.privacy is not None and job.client != SERVER_ID:
            # Views and dropout are drawn by an image's place in its batch, so one image more changes those of others.
            # Only if nobody can repeat these draws does that tell nothing.
            rng = Rng(secrets.token_hex(32))
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
        if not job.evaluated:
            site.shown = None
        experiment = self.world.experiment
        guard = self.ledger.guard(experiment, job.client, site.labeled is not None)
        if guard is not None and (before := self.ledger.reply(job, message)) is not None:
            return before
        rate = schedule.factor(experiment.recipe.schedule, job.round, experiment.rounds)
        with schedule.during(rate), private.during(guard):
            payload = perform(self.method, task, site, message)
        attack = experiment.clients.attack
        if payload is not None and attack is not None and self.watched and job.client in attack.ids:
            payload = attacked(attack, task, message, payload, rng.stream("attack"))
        outside = self.seen(job, site)
        if guard is not None and guard.history:
            outside["epsilon"] = self.ledger.save(job.client, guard)  # before anything leaves
        kept = site.state, site.statistics if local else None
        if keeps and (stored or kept != (None, None)):  # a client that never kept anything needs no file that says so
            self.states.save(job.client, job.round, job.call, kind(*kept), kind, job.checkpointed)
        elif guard is not None and payload is not None:  # else the reply would have to come with its state
            self.ledger.keep(job, message, Outcome(payload, outside))
        return Outcome(payload, outside)

    def seen(self, job: Job, site: Site[Any]) -> dict[str, Any]:
        """Return what is measured from outside when a task is done.

        This is the only place where hidden labels are compared with pseudo-labels.
        """
        outside: dict[str, Any] = {"images": list(site.tally.trained), "steps": site.tally.steps}
        outside["passes"] = site.tally.passes
        where = torch.from_numpy(self.world.share(job.client, job.round).unlabeled) if site.audited else torch.empty(0)
        labels: dict[int, Tensor] = {}
        for index, pseudo_label, epoch in site.audited or ():
            given = labels.setdefault(epoch, torch.full((len(where),), -1))
            given[index.cpu()] = pseudo_label.cpu()  # the last one counts, if an image came up again
        for epoch, given in labels.items():
            index = (given >= 0).nonzero().flatten()
            outside.setdefault("audit", {})[str(epoch)] = self.audit(where, index, given[index]).to_json()
        if site.shown:
            outside["shown"] = {name: value.tolist() for name, value in site.shown.items()}
        if job.score and site.scored:
            outside["local_accuracy"] = self.accuracy(site.scored[0])
        return outside

    def audit(self, where: Tensor, index: Tensor, pseudo_label: Tensor) -> metrics.Audit:
        """Compare pseudo-labels with the true labels, which the site does not have."""
        truth, classes = self.world.dataset.splits["train"].labels[where], len(self.world.dataset.classes)
        known, right = truth[index] >= 0, truth[index] == pseudo_label
        used, judged, correct = (
            torch.bincount(some, minlength=classes) for some in (pseudo_label, pseudo_label[known], pseudo_label[right])
        )
        return metrics.Audit(len(where), used, judged, correct)

    def accuracy(self, weights: Tree) -> float:
        """Return the accuracy of a local model on the test set."""
        test, right = self.world.whole("test", Rng("evaluate")), 0
        self.model.eval()
        with torch.inference_mode():
            for x, y in test.batches(self.world.view("test"), EVALUATION_BATCH, shuffle=False):
                right += int((functional_call(self.model, weights, x).argmax(1) == y).sum())
        return right / len(test)

    def evaluate(self, job: Job, weights: Tree, rng: Rng) -> Outcome:
        """Measure a model on images of the server's."""
        return Outcome(None, metrics.measure(*self.scores(job, weights, rng)))

    def scores(self, job: Job, weights: Tree, rng: Rng) -> tuple[Tensor, Tensor]:
        """Return a model's probabilities for the images of a split, and their labels.

        If its statistics stay at the clients, take those of the images that it is measured on.
        """
        images = self.world.whole(job.task, rng)
        view = self.world.view(job.task) if job.client == SERVER_ID else "plain"

        def batches() -> Iterator[Tensor]:
            return (x for x, _ in images.batches(view, EVALUATION_BATCH, shuffle=False))

        self.model.load_state_dict(tree.untrained(self.model) | weights)
        if tree.statistics(tree.of(self.model)).keys() - weights.keys():
            batch_statistics(self.model, batches())
        return metrics.predict(self.model, batches()), images.y

    def statistics(self, job: Job, weights: Tree, rng: Rng) -> Outcome:
        """Return a client's own BatchNorm statistics under these weights, over all of its images."""
        self.model.load_state_dict(tree.untrained(self.model) | weights)
        where = torch.from_numpy(self.world.share(job.client, job.round).images)
        images = Unlabeled(self.world.dataset.splits["train"].images, where, rng.torch)
        batches = images.batches(("plain",), EVALUATION_BATCH, shuffle=False)
        found = batch_statistics(self.model, (x for x, _ in batches))
        return Outcome(wire.pack(Model(found)), {})
