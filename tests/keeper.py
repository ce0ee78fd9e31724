"""Keeper: a small method whose clients remember, for the tests and as the example of a method with client state.

Each round draws two overlapping groups of clients, as RSCFed does, so some clients work twice. Whoever has labels
trains on them. Whoever has unlabeled images keeps a mean teacher, which labels those it is sure of; the student trains
on them, and the teacher follows the student.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy

from fewlabel.core import tree
from fewlabel.core.federation import EVERY_CLIENT, SOME_CLIENTS, Federation, Model, Site, Weights
from fewlabel.core.schema import Share
from fewlabel.core.tasks import on_client
from fewlabel.core.tree import Tree
from fewlabel.learn.loop import fit
from fewlabel.learn.optim import SGD, Local
from fewlabel.learn.plateau import score
from tests.toys import Still


@dataclass(frozen=True)
class Memory:
    teacher: Tree
    age: int  # steps that it followed a student


@dataclass(frozen=True)
class Update:
    model: Weights
    age: int
    right: int = 0  # of the labels that the site holds out


@dataclass(frozen=True)
class Keeper(Still):
    """A mean teacher at every client that has unlabeled images."""

    confidence: Share = 0.11  # what a pseudo-label must exceed; low, because tests train for a few rounds only
    decay: Share = 0.5  # of the teacher
    local: Local = Local(epochs=1, batch_size=32, lr=0.1)

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT})
    leaves = "The student's weights, the age of its teacher, and how many labels that it holds out are right."

    def round(self, state: Model, fed: Federation) -> Model:
        half = len(fed.clients) // 2 + 1
        jobs = [(client, state) for group in ("first", "second") for client in fed.sample(half, name=group)]
        found = fed.mean(self.local_update, jobs, state.model)
        ages = sum(reply.upload.age for reply in found.replies)
        right = sum(reply.upload.right for reply in found.replies)
        fed.log(age=ages, right=right, moved=tree.norm(tree.sub(found.model, state.model)))
        return Model(found.model)

    @on_client
    def local_update(self, site: Site[Memory], msg: Model) -> Update:
        memory, model, size = site.state or Memory(msg.model, 0), site.load(msg.model), self.local.batch_size
        optimizer, clip = SGD(model.parameters(), self.local), self.local.clip
        if site.labeled:
            fit(model, optimizer, site.labeled.batches("weak", size), lambda b: cross_entropy(model(b[0]), b[1]), clip)
        if site.unlabeled:
            x, index = next(site.unlabeled.batches(("plain",), len(site.unlabeled), shuffle=False))
            with torch.no_grad():
                share, label = torch.func.functional_call(model.eval(), memory.teacher, x).softmax(1).max(1)
            sure = index[share > self.confidence]
            site.audit(sure, label[sure])
            batches = site.unlabeled.batches(("weak",), size, subset=sure) if len(sure) else iter(())
            fit(model, optimizer, batches, lambda b: share[b[1]].mean() * cross_entropy(model(b[0]), label[b[1]]), clip)
            teacher = tree.mean([(self.decay, memory.teacher), (1 - self.decay, site.weights())])
            site.state = memory = Memory(teacher, memory.age + 1)
        right = round(score(model.eval(), site.held_out).accuracy * len(site.held_out)) if site.held_out else 0
        return Update(site.weights(), memory.age, right)
