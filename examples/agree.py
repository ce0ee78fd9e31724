"""Agree: train on an unlabeled image if the model is sure of it, and says the same of a strong view."""

from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from fewlabel import SOME_CLIENTS, Federation, Model, Site, Weights, broadcast, on_client
from fewlabel.learn.loop import fit
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.thresholds import predict


@dataclass(frozen=True)
class Update:  # what leaves a site
    model: Weights  # what `fed.mean` averages
    used: int  # images trained on


@dataclass(frozen=True)
class Agree:
    confidence: float = 0.8
    local: Local = Local(epochs=5, batch_size=10)
    label_places = frozenset({SOME_CLIENTS})
    leaves = "The weights after training and how many images were trained on. The server needs only sums over sites."

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> Weights:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        jobs = broadcast(fed.sample(), state)
        return Model(fed.mean(self.local_update, jobs, state.model, weight=lambda reply: reply.upload.used).model)

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Update | None:
        model, images = site.load(msg.model), site.labeled
        if site.unlabeled:
            plain, strong = (predict(model, site.unlabeled, view) for view in ("plain", "strong"))
            confidence, label = plain.max(1)
            index = ((confidence > self.confidence) & (label == strong.argmax(1))).nonzero().flatten()
            site.audit(index, label[index])  # the report tells how many were right
            images = site.unlabeled.with_labels(index, label[index])
        if not images:
            return None
        batches = (b for _ in range(self.local.epochs) for b in images.batches("weak", self.local.batch_size))
        fit(model, optimizer(model, self.local), batches, lambda b: cross_entropy(model(b[0]), b[1]), self.local.clip)
        return Update(site.weights(), len(images))
