"""Twin-sight: a supervised and a self-supervised model, tied by neighbourhoods (Zhang et al., ICLR 2024).

If one model learns from labels at some clients and from unlabeled images at others, the two losses pull it in different
directions. So each client trains twins. The supervised model learns from labels (`learn.losses.adjusted`). Where there
are none, it learns from the pseudo-labels that it is sure of, as in FixMatch (`learn.losses.fixmatch`). The
self-supervised twin has the same loss at all clients: it must tell images apart, whatever the view (instance
discrimination by SimCLR: `learn.contrast.nt_xent`). The neighbourhood-preserving constraint (eq. 9) ties the two: if
one of them finds two images alike, the other must, too (`learn.contrast.neighbourhood`). The server averages each of
the twins. Only the supervised model is evaluated and shipped.

Departures from the paper, and decisions where it is silent:

- Eq. 9 leaves open how neighbourhoods are measured and compared. As in the authors' code, it is by the cosines between
  the features of all images in a batch, and by their squared differences. Gradients go to both twins.
- The loss of eq. 9 is a mean over pairs of images. The authors' code divides the sum by `n ^ 2`, which in Python is not
  n squared: with 64 images it is 66. So the constraint weighs 62 times as much there (`weight_neighbours`).
- Weights and temperature are from the authors' code. There, pseudo-labels count 0.5 at clients without labels, where
  they are off by default, and 5 at clients with both kinds of images. Here `weight_unlabeled` is for all.
- Pseudo-labels have FixMatch's threshold, one of two in the authors' code. The other, its default, is FreeMatch's. The
  code starts it anew in each epoch, so that it hardly rises above 1/C. At clients without labels the code exchanges the
  weak and the strong view; here the weak one is labeled.
- The authors' self-supervised model may also be SimSiam or BYOL. Here it is SimCLR, their default.
- The authors' projection has 4096 hidden units, BatchNorm and 2048 outputs. Here it has as many hidden units as there
  are features, and SimCLR's 128 outputs. Otherwise it would be larger than many of our networks.
- Both twins start with the same weights, so that a pretrained network serves both.
- The twin is never evaluated, so the statistics of its BatchNorm are not sent.
- Clients count by their number of images, as in the authors' code. If few have labels, the others outvote them, and
  pseudo-labels can collapse into one class (`labeled_share`).
- If every client has labels, the authors' code adds FedProx's term. Here it is left out.
- A network's features are what its last linear layer gets.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fewlabel.core import tree, wire
from fewlabel.core.described import SUMS_DO
from fewlabel.core.federation import EVERY_CLIENT, SOME_CLIENTS, Federation, Site, Weights, broadcast, by_size
from fewlabel.core.schema import Count, NonNegative, Positive, Share
from fewlabel.core.tasks import on_client
from fewlabel.core.tree import Tree
from fewlabel.learn.consensus import by_kind
from fewlabel.learn.contrast import Projection, classifier, neighbourhood, nt_xent, with_features
from fewlabel.learn.loop import fit, paired_views
from fewlabel.learn.losses import adjusted, fixmatch
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.thresholds import confident

Batch = tuple[Tensor, ...]  # of labeled images: weak, strong, label; of unlabeled ones: weak, strong, index
PASSES = 3, 4  # of a labeled and an unlabeled image: both views through the twin, one or both through the model


@dataclass(frozen=True)
class Twins:
    """The server's state, its message and the clients' upload."""

    model: Weights  # the supervised model
    twin: Tree  # the self-supervised one: the network's parameters, of which the classifier is not used
    projection: Tree  # the twin's projection head

    def check(self, network: Tree) -> None:
        """Raise ValueError unless twin and projection fit the network."""
        with torch.device("meta"):  # shapes alone
            projection = tree.of(Projection(network[classifier(network)].shape[1]))
        for found, expected in ((self.twin, tree.parameters(network)), (self.projection, projection)):
            tree.same_entries(found, expected)
            wire.check_like(found, expected)


@dataclass(frozen=True)
class TwinSight:
    """A supervised model and a self-supervised twin, which must find the same images alike."""

    threshold: Share = 0.95  # tau: probability from which a pseudo-label is trained on
    weight_unlabeled: NonNegative = 0.5  # weight of the supervised model's loss on pseudo-labels; 0 leaves them out
    weight_twin: NonNegative = 0.5  # lambda_u: weight of the twin's own loss
    weight_neighbours: NonNegative = 1.0  # lambda_d: weight of the constraint that ties the twins; 0 unties them
    temperature: Positive = 0.07  # of the twin's loss; the lower, the more the nearest other images count
    local: Local = Local(epochs=1, batch_size=64, lr=0.01, weight_decay=1e-4, clip=None)
    epochs_unlabeled: Count | None = None  # epochs of a round at clients without labels; by default the same
    labeled_share: Share | None = None  # RSCFed's weight adjustment: the labeled clients' share of the model's average

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT})
    leaves = f"The weights of both models after training. {SUMS_DO}"

    def init(self, fed: Federation) -> Twins:
        start = fed.server.weights()
        with fed.rng("projection").scope():
            projection = Projection(start[classifier(start)].shape[1])
        return Twins(start, tree.parameters(start), tree.of(projection))

    def model(self, state: Twins) -> Tree:
        return state.model

    def round(self, state: Twins, fed: Federation) -> Twins:
        kinds = partial(by_kind, share=self.labeled_share)
        found = fed.mean(self.local_update, broadcast(fed.sample(), state), state.model, kinds=kinds)
        twin = found.of(lambda upload: upload.twin, state.twin, by_size)
        return Twins(found.model, twin, found.of(lambda upload: upload.projection, state.projection, by_size))

    @on_client
    def local_update(self, site: Site[None], msg: Twins) -> Twins | None:
        if not site.labeled and not site.unlabeled:
            return None
        model, local = site.load(msg.model), self.local
        twin, projection = deepcopy(model), Projection(msg.twin[classifier(msg.twin)].shape[1]).to(site.device)
        tree.load(twin, tree.of(twin) | msg.twin)
        tree.load(projection, msg.projection)

        def loss(batch: tuple[Batch | None, Batch | None]) -> Tensor:
            labeled, unlabeled = batch
            weak, strong = (torch.cat([part[view] for part in batch if part]) for view in (0, 1))
            count, first = len(weak), len(labeled[2]) if labeled else 0  # labeled images come first
            features, logits = with_features(model, torch.cat([weak, strong[first:]]))
            others, _ = with_features(twin, torch.cat([weak, strong]))
            projected = projection(others)
            parts = [
                self.weight_twin * nt_xent(projected[:count], projected[count:], self.temperature),
                self.weight_neighbours * neighbourhood(features[:count], others[:count]),
            ]
            if labeled:
                parts.append(cross_entropy(adjusted(logits[:first], site.labeled), labeled[2]))
            if unlabeled:
                sure, label = confident(logits[first:count], self.threshold)
                site.audit(unlabeled[2][sure], label[sure], epoch)
                parts.append(self.weight_unlabeled * fixmatch(logits[count:], label, sure))
            return torch.stack(parts).sum()

        both = nn.ModuleList([model, twin, projection])
        steps = optimizer(both, local, site.labeled is not None)
        epochs = local.epochs if site.labeled else self.epochs_unlabeled or local.epochs
        for epoch in range(1, epochs + 1):  # noqa: B007 (the loss reads it)
            batches = paired_views(site.labeled, site.unlabeled, ("weak", "strong"), local.batch_size, PASSES)
            fit(both, steps, batches, loss, local.clip)
        site.score(model)
        return Twins(site.weights(), tree.parameters(tree.of(twin)), tree.of(projection))
