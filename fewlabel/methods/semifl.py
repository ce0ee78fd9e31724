"""SemiFL: alternate training (Diao, Ding and Tarokh, NeurIPS 2022).

A round has two phases. First, each client labels its images once, with the global model that it receives, and keeps the
labels that the model is sure of (the paper's "fix" set). A client without any skips the round. It then trains
for several epochs on these fixed labels. The loss of the fix set is FixMatch's: the strong view must get the label of
the weak one (`learn.losses.supervised`). To it comes a loss on mixed images: as many images as in the fix set are drawn
with replacement from all images, sure or not (the "mix" set), and mixup blends the two sets and their labels
(`learn.mixup.mixup`). The server averages the models, with momentum over rounds. Second, whoever has labels fine-tunes
the average on them (`learn.alternate` has the round). So pseudo-labels always come from a model that was just trained
on true labels.

Departures from the paper, and decisions where it is silent:

- The paper has labels at the server only. Where clients have labels, they take the server's part: they fine-tune the
  average, and their models are averaged by the number of labels. If the server has labels, too, it comes last. A client
  with labeled and unlabeled images takes part in both phases, each with its own images.
- Clients count by their number of images. In the authors' code all count alike.
- Static BatchNorm, the paper's statistics over all images under the new model, is `model.buffers = "recomputed"`. It
  leaves out the server's own images. By default statistics are averaged like weights.
- The authors' learning rate falls like a cosine over the rounds. That is `train.schedule = "cosine"`, part of the
  recipe `fewlabel`; without it the rate is constant. Their SGD is Nesterov's; ours is not.
- The authors' batches have 10 images for 100 clients and 100 for 10 clients, and 250 for more than 250 labels at the
  server. `local.batch_size` is for all.
- The mix set is drawn once in a round. The authors' code draws anew for each batch. With a logit-adjusted loss, the
  prior of a mixed image is that of both sets together.
- The momentum is 0.5, as in most of the authors' runs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fewlabel.core.described import SUMS_DO
from fewlabel.core.federation import EVERY_CLIENT, SERVER, SOME_CLIENTS, Federation, Model, Site
from fewlabel.core.images import Unlabeled
from fewlabel.core.schema import Count, NonNegative, Positive, Share
from fewlabel.core.tasks import on_client, on_server
from fewlabel.core.tree import Tree
from fewlabel.learn.alternate import State, alternate, fine_tuned, start
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import supervised
from fewlabel.learn.mixup import mixup
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.thresholds import predict

Pair = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]  # of the fix set: weak, strong, index; of the mix set: weak, index


@dataclass(frozen=True)
class SemiFL:
    """Unlabeled clients train on pseudo-labels fixed for a round, with mixup; then labels fine-tune the average."""

    threshold: Share = 0.95  # tau: probability from which a pseudo-label is trained on
    alpha: Positive = 0.75  # a: the share of an image in a mixed one is drawn by Beta(a, a)
    weight_mix: NonNegative = 1.0  # lambda: weight of the loss on mixed images; 0 leaves it out
    global_momentum: Share = 0.5  # beta_g: how much of the last round's change is added to the average
    epochs_unlabeled: Count | None = None  # epochs of a round on unlabeled images; by default as on labels
    local: Local = Local(epochs=5, batch_size=10, lr=0.03, clip=1.0)

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})
    takes_turns = True
    leaves = f"The weights after training. {SUMS_DO}"

    def most_passes(self, rounds: int) -> int:
        return 2 * (self.epochs_unlabeled or self.local.epochs) + self.local.epochs  # fix set and mix set, then labels

    def init(self, fed: Federation) -> State:
        return start(fed.server.weights())

    def model(self, state: State) -> Tree:
        return state.model

    def round(self, state: State, fed: Federation) -> State:
        return alternate(fed, state, self.local_update, self.fine_tune, self.global_momentum)

    @on_client
    @on_server
    def fine_tune(self, site: Site[None], msg: Model) -> Model | None:
        return fine_tuned(site, msg, self.local)

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        """Label the site's images once, and train on the labels that the received model is sure of."""
        if not site.unlabeled:
            return None
        model, local = site.load(msg.model), self.local
        confidence, label = predict(model, site.unlabeled, "weak").max(1)
        sure = (confidence >= self.threshold).nonzero().flatten()
        if not len(sure):
            return None
        site.audit(sure, label[sure])
        shares, draw = site.rng.stream("mixup"), site.rng.stream("mix set").torch
        drawn = torch.randint(len(label), (len(sure),), generator=draw).to(sure.device)
        fixed, mix = (site.unlabeled.with_labels(index, label[index]) for index in (sure, drawn))
        both = fixed + mix

        def loss(batch: Pair) -> Tensor:
            (weak, strong, index), (other, chosen) = batch
            parts = [supervised(model, fixed, (strong, label[index]))]
            if self.weight_mix:
                mixed = mixup((weak, label[index]), shares, self.alpha, site.num_classes, (other, label[chosen]))
                parts.append(self.weight_mix * supervised(model, both, mixed))
            return torch.stack(parts).sum()

        fit(model, optimizer(model, local, labels=False), self.batches(site.unlabeled, sure, drawn), loss, local.clip)
        site.score(model)
        return Model(site.weights())

    def batches(self, images: Unlabeled, sure: Tensor, drawn: Tensor) -> Iterator[Pair]:
        """Pass over the fix set and the mix set, which are equally large, for all epochs."""
        size, mixed = self.local.batch_size, int(self.weight_mix > 0)
        for _ in range(self.epochs_unlabeled or self.local.epochs):
            first = images.batches(("weak", "strong"), size, sure)
            yield from zip(first, images.batches(("weak",), size, drawn, counted=mixed), strict=True)
