"""CBAFed: class-balanced adaptive pseudo-labels (Li et al., CVPR 2023).

First the labeled clients train alone (eq. 2). Then an unlabeled client labels its images once a round, with the model
that it receives (eq. 4, 5, 14: `learn.thresholds.select`). The server sets a threshold for each class. Classes that
were rarely trained on get a lower one (eq. 6 to 13: `learn.thresholds.class_shares`, `learn.thresholds.thresholds`). An
image below the threshold of its most likely class gets its second class, if that class is rare (eq. 15 to 17: also
`select`). The client trains on these labels (eq. 18), and sends how many images of each class it used (eq. 19). The
server averages models by the number of images used (eq. 20). Every s epochs at labeled clients, and every s rounds at
the server, weights are blended with earlier ones (eq. 1, 3, 21: `learn.residual`).

Departures from the paper, and decisions where it is silent:

- Eq. 16: a class is rare if it has less than beta / C of all images, as in the authors' code. The shares of eq. 13 are
  scaled by C / 10, so this code compares them with beta / 10. The paper prints beta / C for the scaled shares; that is
  the option `tail_scaled`. Both are the same for 10 classes. For CIFAR-100 our bound is ten times the printed one. With
  few classes the printed one makes most of them rare.
- Eq. 12 bounds the thresholds. It does not hold after the limit of eq. 11 or the scaling of eq. 13, and is not used.
- Eq. 21: rounds are counted from the end of the warm-up, and the first blend is with the model of the warm-up, as in
  the authors' code. By the paper's count, the first blend would be with the untrained model.
- Eq. 1: a labeled client first blends with the weights that it received, as printed. The authors' code blends with the
  weights after the first epoch (`blend_from_first`).
- The paper leaves most numbers to its supplement: learning rates, batch size, epochs of the warm-up, tau, beta, s,
  alpha_1 and alpha_2. The defaults are those of the authors' code for SVHN.
- Images are labeled by their plain view: the paper speaks of the original data. The authors' code labels a random crop
  (`label_view`).
- Tau_h is 0.95, as in the paper's text. The authors' code has 0.9 for SVHN and ISIC (`highest`), and for ISIC it counts
  labeled clients ten times (`labeled_times`).
- Momentum starts anew in each round. The authors' code keeps it (`persistent_optimizer`).
- A client with labeled and unlabeled images trains as a labeled client, on both.
- A client that selects no image sends nothing. If no client answers in a round of the warm-up, the warm-up takes one
  round more.
- As long as no class has been counted, all classes count as equally frequent.
- `cbafed-authors` sets what the authors' code does on SVHN, with two exceptions: it does not train on the very crops
  that were labeled, and it does not skip a last batch of one image.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fewlabel.core.described import SUMS_DO, all_warmup
from fewlabel.core.federation import EVERY_CLIENT, SOME_CLIENTS, Federation, Site, Weights, broadcast
from fewlabel.core.images import Labeled, Unlabeled
from fewlabel.core.plots import PerClass
from fewlabel.core.schema import Count, Natural, NonNegative, Positive, Share
from fewlabel.core.tasks import Asked, on_client
from fewlabel.core.tree import Tree
from fewlabel.learn import residual
from fewlabel.learn.consensus import by_kind
from fewlabel.learn.loop import fit, paired
from fewlabel.learn.losses import supervised
from fewlabel.learn.optim import Local, Optimizer, memory_of, optimizer
from fewlabel.learn.teacher import Memory
from fewlabel.learn.thresholds import class_shares, predict, select, thresholds

SURE = "How sure the model must be of an image for its pseudo-label to count."
COUNTS = "The weights after training and the number of images trained on, in `cbafed` and `cbafed-authors` by class: "
HISTOGRAM = "the class histogram of a labeled site, and nearly that of an unlabeled one. "


@dataclass(frozen=True)
class State:
    """The server's state."""

    model: Tree
    before: Tree  # the model to blend with
    counts: Tensor  # sigma: images of each class in the last round; zeros if nothing needs them
    lost: int = 0  # rounds of the warm-up in which nobody answered; it takes so many rounds longer


@dataclass(frozen=True)
class Message:
    model: Weights
    thresholds: Tensor
    tail: Tensor  # bool: classes rarely trained on
    warm: bool  # still in the warm-up


@dataclass(frozen=True)
class Update:
    model: Weights
    used: int  # images trained on
    counts: Tensor | None = None  # images of each class

    def check_answer(self, asked: Asked) -> None:
        asked.check_images(self.used, self.counts)


@dataclass(frozen=True)
class CBAFed:
    """Pseudo-labels fixed for a round; a threshold for each class; second guesses for rare ones; residual weights."""

    warmup: Natural = 1  # P: rounds at the start in which only labeled clients train
    warmup_epochs: Count = 501  # J: epochs at a labeled client in a round of the warm-up
    threshold: Share = 0.84  # tau: the threshold above which a pseudo-label counts, before it is adapted to each class
    highest: Share = 0.95  # tau_h: the highest threshold that a class can have
    beta: NonNegative = 0.3  # a class is rare if its share of all images is below beta / C
    skip: Count = 5  # s: weights are blended every s epochs at labeled clients, and every s rounds at the server
    blend_epochs: Share = 0.8  # alpha_1: share of the earlier weights in a blend at clients and in the warm-up
    blend_rounds: Share = 0.5  # alpha_2: share of the earlier weights in a blend at the server after the warm-up
    epochs_unlabeled: Count = 1  # epochs of a round at clients without labels
    local: Local = Local(epochs=11, batch_size=64, lr=0.03, lr_unlabeled=0.02)
    # The paper's ablations and its strategies of labeling.
    labeling: Literal["fixed", "refreshed", "batch", "none"] = "fixed"  # when to make pseudo-labels: once a round,
    #   once an epoch, for each batch, or never
    adaptive: bool = True  # a threshold for each class; if false, one for all
    tail: bool = True  # second guesses for rare classes
    residual: bool = True  # blend weights with earlier ones
    tail_scaled: bool = False  # eq. 16 as printed, with the scaled shares of eq. 13; of two classes, both may be rare
    labeled_share: Share | None = None  # RSCFed's weight adjustment: the labeled clients' share of the average
    # What the authors' code does beyond the paper.
    labeled_times: Positive | None = None  # factor for the weight of each labeled client; 10 for ISIC
    blend_from_first: bool = False  # blend with the weights after the first epoch, not with the received ones
    label_view: Literal["plain", "weak"] = "plain"  # the view of an image by which it gets its label
    persistent_optimizer: bool = False  # each client keeps its momentum between rounds

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT})
    leaves = COUNTS + HISTOGRAM + SUMS_DO
    plots = (PerClass("Thresholds", SURE, "thresholds", "threshold of each class"),)
    cautions = all_warmup

    @property
    def balanced(self) -> bool:
        """True if classes must be counted."""
        return self.labeling != "none" and (self.adaptive or self.tail)

    def init(self, fed: Federation) -> State:
        start = fed.server.weights()
        return State(start, start, torch.zeros(fed.num_classes, dtype=torch.int64))

    def model(self, state: State) -> Tree:
        return state.model

    def round(self, state: State, fed: Federation) -> State:
        number = fed.round - state.lost
        warm, alone = number <= self.warmup, number <= self.warmup or self.labeling == "none"
        shares = class_shares(state.counts if state.counts.any() else torch.ones(fed.num_classes))  # eq. 8, 13
        bounds = thresholds(shares, self.threshold, self.highest) if self.adaptive else self.threshold + 0 * shares
        rare = self.beta / (fed.num_classes if self.tail_scaled else 10)  # for shares that eq. 13 scales by C / 10
        message = Message(state.model, bounds, (shares < rare) & self.tail, warm)
        jobs = broadcast(fed.sample(among=fed.labeled if alone else None), message)
        kinds = partial(by_kind, share=self.labeled_share, times=self.labeled_times)
        found = fed.mean(self.local_update, jobs, state.model, weight=lambda r: r.upload.used, kinds=kinds)  # eq. 20
        counts, model = torch.zeros_like(state.counts), found.model
        for reply in found.replies:
            counts.add_(0 if reply.upload.counts is None else reply.part_of(reply.upload.counts))  # eq. 7
        lost = state.lost + int(warm and not any(reply.upload.used for reply in found.replies))
        before, turn = state.before, number if warm else number - self.warmup
        if self.residual and turn % self.skip == 0:
            share = self.blend_epochs if alone else self.blend_rounds
            before = model = residual.blend(before, model, share)  # eq. 3, 21
        elif number == self.warmup:
            before = model
        if self.balanced:
            fed.log(thresholds=bounds, class_counts=counts)
        return State(model, before, counts if counts.any() else state.counts, lost)

    @on_client
    def local_update(self, site: Site[Memory], msg: Message) -> Update | None:
        model, labels = site.load(msg.model), site.labeled is not None
        steps = optimizer(model, self.local, labels, (site.state or Memory()).optimizer)
        unlabeled = None if msg.warm or self.labeling == "none" else site.unlabeled
        number = self.warmup_epochs if msg.warm else self.local.epochs if labels else self.epochs_unlabeled
        share = self.blend_epochs if labels and self.residual else 0.0
        images, trained = site.labeled, torch.zeros(0, dtype=torch.int64)
        for epoch in residual.epochs(model, number, share, self.skip, int(self.blend_from_first)):  # eq. 1
            if unlabeled and self.labeling == "batch":
                images = self.batchwise(site, unlabeled, msg, steps, epoch)
            elif unlabeled and (epoch == 1 or self.labeling == "refreshed"):
                found = select(predict(model, unlabeled, self.label_view), msg.thresholds, msg.tail)
                images = self.labeled(site, unlabeled, *found, epoch)
            if not images:
                continue
            if not (unlabeled and self.labeling == "batch"):
                batches = images.batches("weak", self.local.batch_size)
                fit(model, steps, batches, partial(supervised, model, images), self.local.clip)  # eq. 2, 18
            trained = images.y
        if not len(trained):
            return None
        if self.persistent_optimizer:
            site.state = Memory(memory_of(steps))
        site.score(model)
        counts = torch.bincount(trained, minlength=site.num_classes) if self.balanced else None  # eq. 6, 19
        return Update(site.weights(), len(trained), counts)

    def labeled(self, site: Site[Memory], unlabeled: Unlabeled, index: Tensor, y: Tensor, epoch: int) -> Labeled:
        """Return a site's labeled images, if any, together with those that got a pseudo-label."""
        site.audit(index, y, epoch)
        pseudo = unlabeled.with_labels(index, y)
        return site.labeled + pseudo if site.labeled else pseudo

    def batchwise(
        self, site: Site[Memory], unlabeled: Unlabeled, msg: Message, steps: Optimizer, epoch: int
    ) -> Labeled:
        """Train for one epoch in which the network labels each batch just before it learns from it.

        Return the images that were used.
        """
        model, labels = site.model, torch.full((len(unlabeled),), -1, device=site.device)

        def loss(batch: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, ...] | None]) -> Tensor | None:
            parts = [supervised(model, site.labeled, batch[0])] if batch[0] else []
            if batch[1]:
                x, x_train, index = batch[1]
                with torch.no_grad():
                    p = model.eval()(x).softmax(1)
                model.train()
                chosen, y = select(p, msg.thresholds, msg.tail)
                if len(chosen) > 1:  # BatchNorm needs two
                    unlabeled.count(len(chosen))
                    parts.append(supervised(model, None, (x_train[chosen], y)))
                    labels[index[chosen]] = y
            return torch.stack(parts).sum() if parts else None

        batches = paired(site.labeled, unlabeled, (self.label_view, "weak"), self.local.batch_size, counted=0)
        fit(model, steps, batches, loss, self.local.clip)
        index = (labels >= 0).nonzero().flatten()
        return self.labeled(site, unlabeled, index, labels[index], epoch)
