"""FedAvg (McMahan et al., AISTATS 2017) and FedProx (Li et al., MLSys 2020), supervised or with FixMatch or UDA.

In a federation where few have labels this is the floor of every table (`labels-only`), and with all labels its
ceiling (`all-labels`). Where the server holds labels, it trains on them first, alone if no client has any.
FedProx adds mu/2 |w - w_received|^2 to the loss; its weights in the average are equal, as in the FedMatch paper.
FixMatch (Sohn et al., NeurIPS 2020) and UDA (Xie et al., NeurIPS 2020, with annealing) add their loss on unlabeled
images, by which clients without labels can train, too: the FedMatch paper's baselines. Its Local-* rows share nothing:
each client goes on from its own model of the round before, and models are measured where they are.

What leaves a site: its weights after training. They can betray training images to a curious server; sums would do.
"""

from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fewlabel import tree
from fewlabel.federation import (
    EVERY_CLIENT,
    SERVER,
    SOME_CLIENTS,
    Federation,
    Model,
    Site,
    broadcast,
    on_client,
    on_server,
)
from fewlabel.learn.agreement import annealed, confident, fixmatch, uda
from fewlabel.learn.loop import Local, fit, optimizer, paired, steps
from fewlabel.learn.losses import proximal
from fewlabel.strict import Count, NonNegative, Share
from fewlabel.tree import Tree


@dataclass(frozen=True)
class FedAvg:
    """Supervised federated averaging among the clients that hold labels."""

    local: Local = Local(epochs=5, batch_size=10)  # E and B of the FedAvg paper
    weights: Literal["size", "uniform"] = "size"  # of a client in the average: its images, or all alike
    proximal: NonNegative = 0.0  # mu of FedProx
    unlabeled: Literal["none", "fixmatch", "uda"] = "none"  # how unlabeled images are learned from
    weight_unlabeled: NonNegative = 1.0  # lambda_u
    confidence: Share = 0.75  # FixMatch's threshold, as in the FedMatch paper
    batch_unlabeled: Count = 50
    sharing: bool = True  # else each client trains for itself

    settings = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> Tree | None:
        return state.model if self.sharing else None

    def round(self, state: Model, fed: Federation) -> Model:
        if fed.server.labeled and self.sharing:
            [trained] = fed.map(self.local_update, [state])
            state = trained or state
        present = fed.sample(among=fed.labeled if self.unlabeled == "none" else None)
        replies = fed.run(self.local_update, broadcast(present, state))
        used = ((r.client.num_labeled if self.unlabeled == "none" else r.client.size, r.upload.model) for r in replies)
        weighted = ((size if self.weights == "size" else 1, model) for size, model in used)
        return Model(tree.mean(weighted, default=state.model))

    @on_client
    @on_server
    def local_update(self, site: Site[Model], msg: Model) -> Model | None:
        unlabeled = None if self.unlabeled == "none" else site.unlabeled
        if site.labeled is None and unlabeled is None:
            return None
        model, sizes = site.load((site.state or msg).model), (self.local.batch_size, self.batch_unlabeled)
        updates, taken = optimizer(model, self.local, site.labeled is not None), count()
        each = steps(site.labeled, unlabeled, *sizes)

        def loss(batch: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, ...] | None]) -> Tensor:
            parts, step = [], next(taken)
            if batch[0]:
                x, y = batch[0]
                done = (site.round - 1 + step / (self.local.epochs * each)) / site.rounds
                parts.append(annealed(model(x), y, done) if self.unlabeled == "uda" else cross_entropy(model(x), y))
            if batch[1]:
                parts.append(self.weight_unlabeled * self.unsupervised(site, batch[1], step // each + 1))
            if self.proximal:
                parts.append(self.proximal * proximal(model, msg.model))
            return torch.stack(parts).sum()

        for _ in range(self.local.epochs):
            batches = paired(site.labeled, unlabeled, ("weak", "strong"), *sizes)
            fit(model, updates, batches, loss, self.local.clip)
        site.score(tree.of(model))
        if self.sharing:
            return Model(site.weights())
        site.state = Model(site.weights())
        return None

    def unsupervised(self, site: Site[Model], batch: tuple[Tensor, ...], epoch: int) -> Tensor:
        """FixMatch's loss, or UDA's."""
        weak, strong, index = batch
        with torch.no_grad():
            said = site.model(weak)
        if self.unlabeled == "uda":
            return uda(said, site.model(strong))
        sure, label = confident(said, self.confidence)
        site.audit(index[sure], label[sure], epoch)
        return fixmatch(site.model(strong), label, sure)
