"""Agree: an unlabeled image is trained on where the model is sure of it, and says the same of a strong view.

What leaves a site: its weights, which can betray training images, and how many it trained on; sums alone would do."""

from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from fewlabel import SOME_CLIENTS, Federation, Site, broadcast, on_client, tree
from fewlabel.core.federation import Model
from fewlabel.learn.loop import Local, fit, optimizer
from fewlabel.learn.thresholds import predict


@dataclass(frozen=True)
class Update:  # what leaves a site
    model: tree.Tree
    used: int  # images trained on


@dataclass(frozen=True)
class Agree:
    confidence: float = 0.8
    local: Local = Local(epochs=5, batch_size=10)
    settings = frozenset({SOME_CLIENTS})

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> tree.Tree:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        replies = fed.run(self.local_update, broadcast(fed.sample(), state))
        return Model(tree.mean(((r.upload.used, r.upload.model) for r in replies), default=state.model))

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
