"""(FL)2: adaptive thresholds and flat minima for few labels (Lee et al., NeurIPS 2024).

A round is SemiFL's: unlabeled clients train first, then whoever has labels fine-tunes their average
(`learn.alternate`). A client labels its images once, with the global model that it receives. Three things are new.
First, the threshold is the client's own: the mean confidence of that model on the client's images, and lower for
classes that it predicts less (`learn.thresholds.SelfAdaptive`, as in FreeMatch). So a client whose images are hard for
the model still trains on many of them. Second, the weights nearby where the loss is highest (`learn.sharpness.uphill`)
must predict what the client's weights predict (`learn.losses.uda`). Only images with a high fixed confidence take part
in this, because flat minima of wrong labels do harm. Third, a client whose threshold is low still has much to learn, so
it counts more in the average: 1 - threshold (`weight`).

Departures from the paper, and decisions where it is silent:

- The paper has labels at the server only. Where clients have labels, they take the server's part, as in our SemiFL.
- The step to the weights nearby, its radius, and the momentum of the average are those of the authors' code: ASAM's
  step with a radius of 0.1, and 0.5. There, too, a client trains only on images that are above its threshold.
- Both losses come from one pass through the client's weights. The authors' code makes two more with the same result,
  unless the network has dropout. The pass through the weights nearby leaves BatchNorm's statistics alone.
- The authors train on the server's labels before the first round. That is `train.warmup`, part of the recipe
  `fewlabel`; without it there is no warm-up.
- The authors' learning rate falls like a cosine over the rounds. That is `train.schedule = "cosine"`, part of the
  recipe, too. Their SGD is Nesterov's; ours is not. Each client keeps its momentum between rounds there, but not here.
- Static BatchNorm, statistics over all images under the new model, is `model.buffers = "recomputed"`.
- A threshold of 1 would give a client no weight at all. It keeps a millionth.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fewlabel.core import tree
from fewlabel.core.described import SUMS_DO
from fewlabel.core.federation import EVERY_CLIENT, SERVER, SOME_CLIENTS, Federation, Model, Reply, Site, Weights
from fewlabel.core.schema import Count, NonNegative, Share
from fewlabel.core.tasks import on_client, on_server
from fewlabel.core.tree import Tree
from fewlabel.learn.alternate import State, alternate, fine_tuned, most_passes, start
from fewlabel.learn.functional import Borrowed
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import adjusted, uda
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.sharpness import uphill
from fewlabel.learn.thresholds import SelfAdaptive, predict


@dataclass(frozen=True)
class Update:
    model: Weights
    threshold: float  # the client's own

    def check(self, network: Tree) -> None:
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"a threshold must be between 0 and 1, found {self.threshold}")


@dataclass(frozen=True)
class FL2:
    """SemiFL's rounds, with thresholds for each client, flat minima, and more weight for clients that are less sure."""

    adaptive: bool = True  # each client has its own threshold; if false, `threshold` is for all
    threshold: Share = 0.95  # probability from which an image takes part in the search for flat minima
    radius: NonNegative = 0.1  # rho: how far away the weights nearby are; 0 leaves them out
    by_status: bool = True  # clients count by 1 - threshold; if false, by their images
    global_momentum: Share = 0.5  # how much of the last round's change is added to the average
    batch_unlabeled: Count = 32  # images in an unlabeled batch
    epochs_unlabeled: Count | None = None  # epochs of a round on unlabeled images; by default as on labels
    local: Local = Local(epochs=5, batch_size=10, lr=0.03, clip=1.0)

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})
    takes_turns = True
    most_passes = most_passes
    leaves = f"The weights after training. How sure the received model is of a site's images, as one mean. {SUMS_DO}"

    def init(self, fed: Federation) -> State:
        return start(fed.server.weights())

    def model(self, state: State) -> Tree:
        return state.model

    def round(self, state: State, fed: Federation) -> State:
        return alternate(fed, state, self.local_update, self.fine_tune, self.global_momentum, self.weight)

    def weight(self, reply: Reply[Update]) -> float:
        """Learning status-aware aggregation: clients that are less sure count more."""
        return max(1 - reply.upload.threshold, 1e-6) if self.by_status else reply.client.size

    @on_client
    @on_server
    def fine_tune(self, site: Site[None], msg: Model) -> Model | None:
        return fine_tuned(site, msg, self.local)

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Update | None:
        """Label the site's images once, and train on those above the site's threshold, towards a flat minimum."""
        if not site.unlabeled:
            return None
        model, local = site.load(msg.model), self.local
        p = predict(model, site.unlabeled, "weak")
        confidence, label = p.max(1)
        status = SelfAdaptive.start(site.num_classes).after(p, decay=0)  # of this model alone
        high = confidence >= self.threshold
        used = (confidence >= status.thresholds[label] if self.adaptive else high).nonzero().flatten()
        if not len(used):
            return None
        site.audit(used, label[used])
        images, fixed = site.unlabeled, site.unlabeled.with_labels(used, label[used])
        borrowed, trained = Borrowed(model), {n: w for n, w in model.named_parameters() if w.requires_grad}

        def loss(batch: tuple[Tensor, ...]) -> Tensor:
            strong, index = batch
            logits, chosen = model(strong), high[index]
            losses = cross_entropy(adjusted(logits, fixed), label[index], reduction="none")
            if not self.radius or not chosen.any():
                return losses.mean()
            images.count(len(index))
            parts = list(trained.values())
            slope = torch.autograd.grad(losses[chosen].mean(), parts, retain_graph=True, materialize_grads=True)
            kept = {name: value.clone() for name, value in tree.statistics(tree.state(model)).items()}
            nearby = borrowed(uphill(trained, slope, self.radius) | kept, strong)
            return losses.mean() + chosen.float().mean() * uda(logits[chosen], nearby[chosen])

        steps = optimizer(model, local, labels=False)
        for _ in range(self.epochs_unlabeled or local.epochs):
            fit(model, steps, images.batches(("strong",), self.batch_unlabeled, used), loss, local.clip)
        site.score(model)
        return Update(site.weights(), min(status.confidence, 1.0))
