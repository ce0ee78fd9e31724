"""FedMatch as its authors' code has it, for the later version of the paper (Jeong et al., ICLR 2021), on ResNet-9.

What differs from the first version, in `methods.fedmatch`:

- All models count alike in the average.
- Each client has its own helpers: the clients whose predictions for one image of noise are nearest to its own, by the
  distance of the softmax vectors. It has helpers only in every tenth round, and none before the server has seen it. For
  this the server keeps the last psi of every client.
- Only unlabeled images that the network is sure of count. The losses are means over these images, and the helpers' loss
  is divided by the number of helpers. Each of the two losses has its own weight. Without helpers, a pseudo-label is the
  local network's.
- The distance from sigma weighs a thousand times more, there is no momentum, and entries that hardly moved are not
  sent.
- A client with labels goes through its unlabeled images in as many steps as through its labeled ones.

The defaults are those for labels at clients; `fedmatch-iclr-server` has those for labels at the server. The authors'
code does not augment labeled images; set `views.weak = "none"` for that. Its helpers help if (round + 1) mod 10 is 0,
and it counts rounds from 0. These are the tenth round, the twentieth, and so on. The image of noise is always the same.
Its pixels are in 0..1, whatever the normalisation of the data.

Differences from the authors' code: if votes are tied, the local label wins, not the first class. Entries of psi near
zero are sent as zeros; the code only counts them as zeros.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fewlabel.core.federation import Model, Site
from fewlabel.core.rng import Rng
from fewlabel.core.schema import Count, NonNegative
from fewlabel.core.tasks import on_server
from fewlabel.learn.decomposed import LEAVES, Decomposed, frozen, summed
from fewlabel.learn.loop import steps
from fewlabel.learn.losses import inter_client
from fewlabel.learn.optim import Local
from fewlabel.learn.plateau import Score
from fewlabel.learn.sparse import Packed, pack, unpack
from fewlabel.learn.thresholds import agreed, confident
from fewlabel.methods.fedmatch import Batch, FedMatch, Helper, State, Trees


@dataclass(frozen=True)
class Embedded(Score):
    says: Tensor  # probabilities of the classes for the image of noise


@dataclass(frozen=True)
class FedMatchICLR(FedMatch):
    """FedMatch with helpers that predict alike, in every tenth round; all clients count alike."""

    leaves = LEAVES + "a client's psi is sent to those whom it helps. The server shows noise to each model by itself."

    helpers_every: Count = 10  # helpers help once in so many rounds
    weight_unlabeled: NonNegative = 0.01  # weight of the loss on pseudo-labels
    weight_helpers: NonNegative = 0.01  # weight of the consistency with helpers
    weight_l2: NonNegative = 10.0  # lambda_L2: weight of psi's squared distance from sigma
    weight_l1: NonNegative = 1e-4  # lambda_L1: weight of psi's absolute values
    zero_below: NonNegative = 5e-6
    keep_below: NonNegative = 5e-5
    batch_unlabeled: Count = 100  # images in a batch at clients without labels
    patience: Count = 5
    local: Local = Local(epochs=1, batch_size=10, lr=1e-3, momentum=0.0, weight_decay=0.0, clip=None)

    def weights(self, scores: list[Score]) -> list[float]:
        return [1.0 for _ in scores]

    @on_server
    def score(self, site: Site[None], msg: Model) -> Embedded:
        found = super().score(site, msg)
        assert site.validation is not None  # the noise has the shape of its images
        x, _ = next(site.validation.batches("plain", 500, shuffle=False))
        with torch.no_grad():
            logits: Tensor = site.model(noise(x.shape[1:]).to(x.device))
        return Embedded(found.accuracy, found.loss, logits[0].softmax(0))

    def choose(self, state: State, psis: dict[str, Packed], scores: dict[str, Score]) -> tuple[Helper, ...]:
        known = {helper.client: helper for helper in state.helpers}
        for who, psi in psis.items():
            found = scores[who]
            assert isinstance(found, Embedded)
            known[who] = Helper(who, pack(unpack(psi, state.psi)), found.says)
        return tuple(known.values())

    def lent(self, state: State, who: str, round: int) -> list[Helper]:
        says = {helper.client: helper.says for helper in state.helpers if helper.says is not None}
        if who not in says or round % self.helpers_every:
            return []
        others = [helper for helper in state.helpers if helper.client != who]
        return sorted(others, key=lambda other: float((says[other.client] - says[who]).norm()))[: self.helpers]

    def sizes(self, site: Site[None]) -> tuple[int, int]:
        size = self.local.batch_size
        if site.labeled is None or site.unlabeled is None or not self.use_sigma:
            return size, self.batch_unlabeled
        each = math.ceil(len(site.unlabeled) / steps(site.labeled, None, size, size))
        return size, max(2, each)  # BatchNorm needs two

    def consistency(self, net: Decomposed, helpers: Trees, site: Site[None], epoch: int, batch: Batch) -> Tensor:
        x, x_strong, index = batch
        weights = summed(frozen(net.sigma), net.psi)
        [local] = net.logits(weights, x)
        sure, label = confident(local, self.confidence)
        if not sure.any():
            site.audit(index[sure], label[sure], epoch)
            return local.new_zeros(())
        local, others = local[sure], net.with_others(x[sure], helpers)
        label = agreed(local, others)
        site.audit(index[sure], label, epoch)
        [strong] = net.logits(weights, x_strong)  # of all images, because a norm may need more than one
        apart = inter_client(local, others) / max(1, len(others))
        return self.weight_unlabeled * cross_entropy(strong[sure], label) + self.weight_helpers * apart


def noise(shape: torch.Size) -> Tensor:
    """Return one image with pixels from a normal distribution (mean 125, std 125), cut to 0..255, scaled to 0..1."""
    pixels = torch.empty(1, *shape)
    nn.init.trunc_normal_(pixels, 125, 125, 0, 255, generator=Rng("fedmatch", "noise").torch)
    return pixels / 255
