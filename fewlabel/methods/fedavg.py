"""FedAvg (McMahan et al., AISTATS 2017) and FedProx (Li et al., MLSys 2020), supervised or with FixMatch or UDA.

FedAvg among the clients that have labels is the floor of every table (`labels-only`). FedAvg with all labels is the
ceiling (`all-labels`). If the server has labels, it trains on them first; if no client has any, it trains alone.
FedProx adds mu/2 |w - w_received|^2 to the loss (`learn.losses.proximal`). FixMatch (Sohn et al., NeurIPS 2020) and UDA
(Xie et al., NeurIPS 2020, with annealing) add a loss on unlabeled images (`fixmatch`, `uda` and `annealed` in
`learn.losses`), so that clients without labels can train, too. These are baselines of FedMatch's paper. Its Local-*
rows share nothing: each client goes on from its own model of the round before, and every model is measured at its
client.

Departures from the papers, and decisions where they are silent:

- In FedProx all clients count alike in the average, as in FedMatch's paper. That paper gives no mu; `fedprox` has 0.01.
- UDA's annealing counts steps over all rounds of a run.
- With `patience`, a client's learning rate is divided by three if the loss of its model on the server's validation set
  was not lower for so many rounds, as in FedMatch's paper. The server then holds all models of a round until they are
  scored. Otherwise it holds two. The server never sees the models of Local-*: there, each client scores its own, on its
  labels that are held out (`labels.held_out`).
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fewlabel.core.described import SUMS_DO
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import (
    EVERY_CLIENT,
    SERVER,
    SOME_CLIENTS,
    Federation,
    Model,
    Reply,
    Site,
    Weights,
    broadcast,
)
from fewlabel.core.schema import Count, NonNegative, Positive, Share
from fewlabel.core.tasks import on_client, on_server
from fewlabel.core.tree import Tree
from fewlabel.learn.loop import fit, paired, steps
from fewlabel.learn.losses import adjusted, annealed, fixmatch, proximal, uda
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.plateau import Rate, Score, score, score_on_validation, updated
from fewlabel.learn.thresholds import confident


@dataclass(frozen=True)
class State:
    model: Tree
    rates: dict[str, Rate] = field(default_factory=dict)  # of clients and the server, as shares of the first rate


@dataclass(frozen=True)
class Message:
    model: Weights
    rate: float = 1.0  # factor for the learning rate


@dataclass(frozen=True)
class Own:
    """What a client keeps if it shares nothing."""

    model: Tree
    rate: Rate


@dataclass(frozen=True)
class FedAvg:
    """Supervised federated averaging among the clients that have labels."""

    local: Local = Local(epochs=5, batch_size=10)  # E and B of the FedAvg paper
    weights: Literal["size", "uniform"] = "size"  # how clients count in the average: by their images, or all alike
    proximal: NonNegative = 0.0  # mu of FedProx: pull towards the received weights
    unlabeled: Literal["none", "fixmatch", "uda"] = "none"  # how to learn from unlabeled images
    weight_unlabeled: NonNegative = 1.0  # lambda_u: weight of the loss on unlabeled images
    confidence: Share = 0.75  # probability from which FixMatch uses a pseudo-label, as in FedMatch's paper
    batch_unlabeled: Count = 50  # images in an unlabeled batch
    epochs_unlabeled: Count | None = None  # epochs of a round at clients without labels; by default the same
    sharing: bool = True  # average the clients' models; if false, each client trains for itself
    patience: Count | None = None  # a learning rate falls after so many rounds without a lower validation loss
    decay: Positive = 3.0  # a learning rate that falls is divided by this

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})

    @property
    def leaves(self) -> str:
        return f"The weights after training. {SUMS_DO[:-1]}, unless `patience` is set." if self.sharing else "Nothing."

    @property
    def needs_each_model(self) -> bool:
        return self.sharing and self.patience is not None

    @property
    def per_image(self) -> bool:
        return self.sharing and self.unlabeled != "uda" and not self.proximal

    def cautions(self, experiment: Any) -> Iterable[str]:
        if self.patience and not self.sharing and not experiment.labels.held_out:
            yield f"{experiment.name}: learning rates fall by held-out labels; set labels.held_out, such as 0.1"

    def init(self, fed: Federation) -> State:
        if not self.sharing and not fed.labeled:
            raise BadInput("clients that share nothing learn from no labels but their own; let labels.at name clients")
        if self.needs_each_model and fed.server.validation is None:
            raise BadInput("learning rates fall by a validation set; set labels.validation, such as 0.1")
        return State(fed.server.weights())

    def model(self, state: State) -> Tree | None:
        return state.model if self.sharing else None

    def round(self, state: State, fed: Federation) -> State:
        if fed.server.labeled and self.sharing:
            [trained] = fed.map(self.local_update, [self.message(Message(state.model), state, "server")])
            if trained:
                state = State(trained.model, self.rates(state, fed, {"server": trained}))
        present = fed.sample(among=fed.labeled if self.unlabeled == "none" else None)
        jobs = ((c, self.message(shared, state, str(c.id))) for c, shared in broadcast(present, Message(state.model)))
        found = fed.mean(self.local_update, jobs, state.model, weight=self.weight, keep=self.needs_each_model)
        return State(found.model, self.rates(state, fed, {str(r.client.id): r.upload for r in found.replies}))

    def weight(self, reply: Reply[Model]) -> float:
        if self.weights == "uniform":
            return 1
        return reply.client.num_labeled if self.unlabeled == "none" else reply.client.size

    def message(self, shared: Message, state: State, who: str) -> Message:
        return replace(shared, rate=state.rates[who].lr) if who in state.rates else shared

    def rates(self, state: State, fed: Federation, models: dict[str, Model]) -> dict[str, Rate]:
        if self.patience is None or not self.sharing:
            return state.rates
        scores = dict(zip(models, fed.map(self.score, models.values()), strict=True))
        return updated(state.rates, scores, 1.0, self.patience, self.decay)

    @on_server
    def score(self, site: Site[None], msg: Model) -> Score:
        return score_on_validation(site, msg.model)

    @on_client
    @on_server
    def local_update(self, site: Site[Own], msg: Message) -> Model | None:
        unlabeled = None if self.unlabeled == "none" else site.unlabeled
        if site.labeled is None and unlabeled is None:
            return None
        own, sizes = site.state or Own(msg.model, Rate(msg.rate)), (self.local.batch_size, self.batch_unlabeled)
        model = site.load(own.model)
        updates, taken = optimizer(model, self.local, site.labeled is not None), count()
        updates.lr *= own.rate.lr
        each = steps(site.labeled, unlabeled, *sizes)
        epochs = self.local.epochs if site.labeled else self.epochs_unlabeled or self.local.epochs

        def loss(batch: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, ...] | None]) -> Tensor:
            parts, step = [], next(taken)
            if batch[0]:
                x, y = batch[0]
                done = (site.round - 1 + step / (epochs * each)) / site.rounds
                if self.unlabeled == "uda":
                    parts.append(annealed(model(x), y, done, site.labeled))
                else:
                    parts.append(cross_entropy(adjusted(model(x), site.labeled), y))
            if batch[1]:
                parts.append(self.weight_unlabeled * self.unsupervised(site, batch[1], step // each + 1))
            if self.proximal:
                parts.append(self.proximal * proximal(model, msg.model))
            return torch.stack(parts).sum()

        for _ in range(epochs):
            batches = paired(site.labeled, unlabeled, ("weak", "strong"), *sizes)
            fit(model, updates, batches, loss, self.local.clip)
        site.score(model)
        if site.labeled and unlabeled:  # how much of the labels it has not forgotten
            site.show(labeled_accuracy=torch.tensor(score(model.eval(), site.labeled).accuracy))
        if self.sharing:
            return Model(site.weights())
        rate = own.rate
        if self.patience and site.held_out:
            rate = rate.after(score(model.eval(), site.held_out).loss, self.patience, self.decay)
        site.state = Own(site.weights(), rate)
        return None

    def unsupervised(self, site: Site[Own], batch: tuple[Tensor, ...], epoch: int) -> Tensor:
        """Return FixMatch's loss, or UDA's."""
        weak, strong, index = batch
        with torch.no_grad():
            logits = site.model(weak)
        if self.unlabeled == "uda":
            return uda(logits, site.model(strong))
        sure, label = confident(logits, self.confidence)
        site.audit(index[sure], label[sure], epoch)
        return fixmatch(site.model(strong), label, sure)
