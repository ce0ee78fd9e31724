"""SAGE: local and global pseudo-labels, blended by their confidence gap (Liu et al., CVPR 2025).

A client trains on its labels, and on its unlabeled images as in FixMatch: the strong view must get the pseudo-label of
the weak one. Two models label each weak view: the local model as it trains, and the global model as the client received
it. If the local model is sure, the target blends both labels (`target`). Their weights depend on the gap between the
two confidences: the local label counts exp(-kappa * gap), the global label the rest. If only the global model is sure,
its label is the target. If neither is sure, the image is left out (`learn.losses.fixmatch`).

Departures from the paper, and decisions where it is silent:

- The paper has labels at every client. With labels at some clients, the others train on pseudo-labels alone.
- The paper's loss is the divergence of the prediction from the soft target. Ours is their cross-entropy. The two
  differ by the entropy of the target, which no weight can change.
- kappa is such that the local label counts half at a gap of 0.05, as in the authors' code.
- In the authors' code, labeled images are also among the unlabeled ones, and a client passes twice over its unlabeled
  images in an epoch. Here it passes once, over those without a label.
- The authors pass labeled images and both views through the network at once. Here these are three passes, so BatchNorm
  sees them apart. The global model labels in evaluation mode, as in their code.
- One momentum is shared by all clients in the authors' code. Here each client starts without momentum in each round.
- Clients count by their number of images.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fewlabel.core import tree
from fewlabel.core.described import SUMS_DO, for_every_client
from fewlabel.core.federation import EVERY_CLIENT, SOME_CLIENTS, Federation, Model, Site, broadcast
from fewlabel.core.schema import Count, NonNegative, Share
from fewlabel.core.tasks import on_client
from fewlabel.core.tree import Tree
from fewlabel.learn.functional import Borrowed
from fewlabel.learn.loop import fit, paired
from fewlabel.learn.losses import fixmatch, supervised
from fewlabel.learn.optim import Local, optimizer


@dataclass(frozen=True)
class SAGE:
    """FixMatch at every client, with soft labels that blend the local and the global model's."""

    threshold: Share = 0.95  # tau: probability from which a model is sure
    kappa: NonNegative = math.log(2) / 0.05  # how fast the local label's share falls with the gap of confidences
    weight_unlabeled: NonNegative = 1.0  # lambda_u: weight of the loss on unlabeled images
    batch_unlabeled: Count = 256  # images in an unlabeled batch
    epochs_unlabeled: Count | None = None  # epochs of a round at clients without labels; by default the same
    local: Local = Local(epochs=5, batch_size=128, lr=0.1, weight_decay=1e-4, clip=None)

    label_places = frozenset({EVERY_CLIENT, SOME_CLIENTS})
    leaves = f"The weights after training. {SUMS_DO}"
    cautions = for_every_client

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> Tree:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        return Model(fed.mean(self.local_update, broadcast(fed.sample(), state), state.model).model)

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        if not site.labeled and not site.unlabeled:
            return None
        model, local = site.load(msg.model), self.local
        received, borrowed = tree.of(model), Borrowed(model)

        def loss(batch: tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, ...] | None]) -> Tensor:
            parts = [supervised(model, site.labeled, batch[0])] if batch[0] else []
            if batch[1]:
                weak, strong, index = batch[1]
                with torch.no_grad():
                    blend, sure = self.target(model(weak).softmax(1), borrowed.judge(received, weak).softmax(1))
                site.audit(index[sure], blend[sure], epoch)
                parts.append(self.weight_unlabeled * fixmatch(model(strong), blend, sure))
            return torch.stack(parts).sum()

        steps = optimizer(model, local, site.labeled is not None)
        epochs = local.epochs if site.labeled else self.epochs_unlabeled or local.epochs
        for epoch in range(1, epochs + 1):  # noqa: B007 (the loss reads it)
            batches = paired(site.labeled, site.unlabeled, ("weak", "strong"), local.batch_size, self.batch_unlabeled)
            fit(model, steps, batches, loss, local.clip)
        site.score(model)
        return Model(site.weights())

    def target(self, local: Tensor, received: Tensor) -> tuple[Tensor, Tensor]:
        """Return the soft target of each image from both models' probabilities, and a mask of those to train on."""
        (sure, label), (sure_global, label_global) = local.max(1), received.max(1)
        share = torch.exp(-self.kappa * (sure - sure_global).abs())  # the local label's, by the confidence gap
        share = torch.where(sure >= self.threshold, share, 0.0)[:, None]
        blend = share * one_hot(label, local.shape[1]) + (1 - share) * one_hot(label_global, local.shape[1])
        return blend, (sure >= self.threshold) | (sure_global >= self.threshold)
