"""FedIRM: inter-client relation matching (Liu et al., MICCAI 2021).

Unlabeled clients train for equal predictions on two views of an image (eq. 1: `learn.losses.consistency`). A labeled
client trains on its labels, and summarises in a relation matrix how its model confuses classes (eq. 2, 3:
`learn.relation.class_sums`, `learn.relation.relation`). The server averages these matrices. In the next round, an
unlabeled client builds its own matrix from pseudo-labels that are certain under dropout (eq. 4, 5:
`learn.relation.with_dropout`, `learn.relation.entropy`). It pulls this matrix towards the average (eq. 6:
`learn.losses.matching`). The weight of its losses grows over the first rounds (eq. 7: `learn.relation.ramp`).

Departures from the paper, and decisions where it is silent:

- Eq. 1 is a mean over images here. The paper prints a sum.
- Eq. 5 averages probabilities. Once softened, these can never be as sharp as the rows of labeled clients. Here both
  sides average logits, the outputs before the softmax. The option `eq5_as_printed` averages probabilities.
- Eq. 7: the weight stops growing at 1. As printed, it would reach 120,000 in round 100.
- A pseudo-label is certain if its entropy is below ln 2, as printed. The authors' code has 2.0, which excludes nothing
  with up to seven classes, and leaves out probabilities below 0.3 (`uncertainty`, `confidence`).
- A class without images at a client is left out of the average and of eq. 6. There is no relation loss before the first
  labeled relation exists.
- A labeled client's relation is that of its model after training, over all of its images.
- The paper does not mention a warm-up. In the authors' code unlabeled clients join after round 20 (`warmup`).
- The memory of Adam starts anew in each round. The authors' code keeps it (`persistent_optimizer`).
- The dropout passes share the features of one pass if all dropout is in the network's head.
- The paper gives no learning rate and no weight decay. They are from the authors' code.
- `fedirm-authors` sets what the authors' code does, with four exceptions: no cross-entropy summed over two views, no
  learning rate that rises when unlabeled clients join, no teacher that runs with dropout and the statistics of a batch,
  and no dropout passes that move BatchNorm's statistics.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fewlabel.core import tree
from fewlabel.core.described import SUMS_DO, all_warmup
from fewlabel.core.federation import SOME_CLIENTS, Federation, Site, Weights, broadcast, by_size
from fewlabel.core.images import Labeled, Unlabeled
from fewlabel.core.plots import ClassMatrix
from fewlabel.core.schema import Count, Natural, NonNegative, Positive, Share
from fewlabel.core.tasks import Asked, on_client
from fewlabel.core.tree import Tree
from fewlabel.learn.consensus import by_kind
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import adjusted, consistency, matching
from fewlabel.learn.optim import Local, Optimizer, memory_of, optimizer
from fewlabel.learn.relation import Relation, class_sums, entropy, ramp, relation, with_dropout
from fewlabel.learn.teacher import MeanTeacher, Memory, Teacher

RELATIONS = """Labeled sites also send their relation matrix, unless its weight is 0: the mean output for each class,
which tells what classes a site has and how its model confuses them."""
MATCHED = """What the model says of images of each class, softened and on average. Unlabeled clients, by their
pseudo-labels, should agree with labeled ones. Blank: a client is sure of no image of that class."""


@dataclass(frozen=True)
class State:
    """The server's state, its message and the clients' upload. Only labeled clients upload a relation."""

    model: Weights
    relation: Relation | None = None

    def check_answer(self, asked: Asked) -> None:
        if self.relation:
            self.relation.check(asked)


@dataclass(frozen=True)
class FedIRM:
    """Consistency at unlabeled clients; their relations among classes are matched with those of labeled clients."""

    temperature: Positive = 2.0  # tau: how much the relations among classes are softened
    passes: Count = 8  # T: predictions of an image with dropout; if the network has no dropout, they are all the same
    uncertainty: Positive = math.log(2)  # h: pseudo-labels with a higher entropy are left out
    ramp: Count = 30  # Omega: rounds until the loss at unlabeled clients has its full weight
    local: Local = Local(epochs=1, batch_size=48, lr=2e-4, optimizer="adam", second_momentum=0.99, clip=None)
    relation_weight: NonNegative = 1.0  # weight of eq. 6 (eq. 1 has weight 1); 0 is the paper's Fed-Consistency
    eq5_as_printed: bool = False  # average probabilities, not logits
    epochs_unlabeled: Count | None = None  # epochs of a round at clients without labels; by default the same
    labeled_share: Share | None = None  # RSCFed's weight adjustment: the labeled clients' share of the average
    # What the authors' code does beyond the paper.
    warmup: Natural = 0  # rounds at the start in which only labeled clients train
    scale: NonNegative = 1.0  # factor for the loss at unlabeled clients
    squared_ramp: bool = False  # exp(-5 (1 - t / Omega)^2) in place of exp(-5 (1 - t / Omega))
    confidence: Share = 0.0  # pseudo-labels with a lower probability are left out
    mean_logits: bool = False  # average the dropout passes before the softmax
    per_batch: bool = False  # labeled clients average relations over batches; a class without images has a uniform row
    label_smoothing: Share = 0.0  # label smoothing of the loss on labels
    teacher_decay: Share | None = None  # decay of a mean teacher, ramped, that makes one of the two predictions
    weights: Literal["size", "uniform"] = "size"  # how clients count in the average: by their images, or all alike
    persistent_optimizer: bool = False  # each client keeps its optimizer's memory between rounds

    label_places = frozenset({SOME_CLIENTS})
    leaves = f"The weights after training. {RELATIONS} {SUMS_DO}"
    plots = (ClassMatrix("Relations among classes", MATCHED, "relation"),)
    cautions = all_warmup

    def init(self, fed: Federation) -> State:
        return State(fed.server.weights())

    def model(self, state: State) -> Tree:
        return state.model

    def round(self, state: State, fed: Federation) -> State:
        jobs = broadcast(fed.sample(among=fed.labeled if fed.round <= self.warmup else None), state)
        weight = by_size if self.weights == "size" else lambda reply: 1.0
        kinds = partial(by_kind, share=self.labeled_share)
        found = fed.mean(self.local_update, jobs, state.model, weight=weight, kinds=kinds)
        relations = [reply.upload.relation for reply in found.replies if reply.upload.relation]
        return State(found.model, self.together(relations, fed) if relations else state.relation)

    def together(self, relations: list[Relation], fed: Federation) -> Relation:
        """Average each row over the clients that have images of its class."""
        clients = torch.stack([one.known for one in relations]).sum(0)
        rows = torch.stack([one.rows * one.known[:, None] for one in relations]).sum(0)
        found = Relation(rows / clients.clamp(min=1)[:, None], clients > 0)
        fed.log(relation=found.rows.where(found.known[:, None], torch.nan))
        return found

    @on_client
    def local_update(self, site: Site[Memory], msg: State) -> State:
        model, memory = site.load(msg.model), site.state or Memory()
        steps = optimizer(model, self.local, site.labeled is not None, memory.optimizer)
        found, kept = None, Memory()
        if site.labeled:
            found = self.supervised(site, site.labeled, steps)
            if found and not self.relation_weight:  # for the report alone
                site.show(labeled_relation=found.rows.where(found.known[:, None], torch.nan))
                found = None
        elif site.unlabeled:
            teacher = None
            if self.teacher_decay is not None:
                kind = MeanTeacher(self.teacher_decay, temperature=1.0, ramp=True)
                teacher = Teacher(model, kind, memory.teacher, memory.step)
            self.unsupervised(site, site.unlabeled, steps, msg.relation, teacher)
            kept = Memory(teacher=teacher.weights, step=teacher.step) if teacher else kept
        site.state = replace(kept, optimizer=memory_of(steps)) if self.persistent_optimizer else kept
        site.score(tree.of(model))
        return State(site.weights(), found)

    def supervised(self, site: Site[Memory], labeled: Labeled, steps: Optimizer) -> Relation | None:
        """Train on labels. Return the relation (eq. 2, 3) of all images, or the mean over batches; None if unused."""
        model, seen = site.model, list[Tensor]()

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            logits = model(x)
            if self.per_batch:
                seen.append(relation(*class_sums(logits.detach(), y, site.num_classes), self.temperature))
            return cross_entropy(adjusted(logits, labeled), y, label_smoothing=self.label_smoothing)

        for _ in range(self.local.epochs):
            fit(model, steps, labeled.batches("weak", self.local.batch_size), loss, self.local.clip)
        if not self.relation_weight and site.shown is None:
            return None
        if self.per_batch:
            return Relation(torch.stack(seen).mean(0), torch.ones(site.num_classes, dtype=torch.bool))
        model.eval()
        with torch.no_grad():
            images = labeled.batches("plain", self.local.batch_size, shuffle=False)
            parts = [class_sums(model(x), y, site.num_classes) for x, y in images]
        sums, counts = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
        return Relation(relation(sums, counts, self.temperature), counts > 0)

    def unsupervised(
        self,
        site: Site[Memory],
        unlabeled: Unlabeled,
        steps: Optimizer,
        theirs: Relation | None,
        teacher: Teacher | None,
    ) -> None:
        """Train for consistency (eq. 1), and towards the labeled clients' relation (eq. 4 to 6) if there is one."""
        model, classes = site.model, site.num_classes
        weight = self.scale * ramp(site.round - site.warmup, self.ramp, self.squared_ramp)  # eq. 7

        def loss(batch: tuple[Tensor, ...]) -> Tensor:
            x, x_other, index = batch
            logits, again = with_dropout(model, x, self.passes)
            p = logits.softmax(1)
            target = teacher(x_other) if teacher else model(x_other).softmax(1)
            mean = again.mean(0).softmax(1) if self.mean_logits else again.softmax(2).mean(0)
            confidence, label = p.max(1)
            sure = (entropy(mean) < self.uncertainty) & (confidence >= self.confidence)
            site.audit(index[sure], label[sure], epoch)
            sums, counts = class_sums((p if self.eq5_as_printed else logits)[sure], label[sure], classes)
            seen.append((sums.detach(), counts))
            value = consistency(target, p)
            if theirs and self.relation_weight:
                ours = relation(sums, counts, self.temperature)
                known = theirs.known & (counts > 0)  # a row without images is uniform, and nothing moves it
                value = value + self.relation_weight * matching(theirs.rows, ours, known)
            return weight * value

        after = teacher.follow if teacher else lambda: None
        for epoch in range(1, (self.epochs_unlabeled or self.local.epochs) + 1):  # noqa: B007 (the loss reads it)
            seen: list[tuple[Tensor, Tensor]] = []
            batches = unlabeled.batches(("weak", "weak"), self.local.batch_size, counted=1 if teacher else 2)
            fit(model, steps, batches, loss, self.local.clip, after)
        sums, counts = (torch.stack(part).sum(0) for part in zip(*seen, strict=True))
        found = relation(sums, counts, self.temperature)
        site.show(relation=found.where(counts[:, None] > 0, torch.nan))
