"""FedMatch as its authors' code has it, for the later version of the paper (Jeong et al., ICLR 2021), on ResNet-9.

What differs from the first version, in `methods.fedmatch`:

- Models count alike in the average.
- Each client has helpers of its own: those whose models say nearly the same of one image of noise, by the distance of
  their softmax vectors. It has them in every tenth round alone, and none before it was first seen. The server keeps the
  last psi of every client for that.
- Of unlabeled images only the sure ones count: the losses are means over them, and the helpers' is divided by their
  number. Both have a weight of their own; without helpers a pseudo-label is the local network's.
- The distance from sigma weighs a thousand times more, there is no momentum, and what hardly moved is not sent.
- A client with labels goes through its unlabeled images in as many steps as through its labeled ones.

The defaults are those for labels at clients; `fedmatch-iclr-server` has those for labels at the server. The code shows
labeled images as they are (`views.weak = "none"`). It reads (round + 1) mod 10 with rounds from 0, which is the tenth,
the twentieth, … The noise is fixed for good, and seen in 0..1 whatever the data's normalisation. Differences from the
code: of ties among votes the local label wins, not the first class, and entries of psi near zero leave as zeros, where
the code only counts them so.
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
    says: Tensor  # softmax of noise


@dataclass(frozen=True)
class FedMatchICLR(FedMatch):
    """FedMatch with helpers that are alike, in every tenth round, and clients that count alike."""

    leaves = LEAVES + "a client's psi is sent to those whom it helps. The server shows noise to each model by itself."

    helpers_every: Count = 10  # rounds from one in which helpers help to the next
    weight_unlabeled: NonNegative = 0.01  # of pseudo-labels
    weight_helpers: NonNegative = 0.01  # of inter-client consistency
    weight_l2: NonNegative = 10.0  # of psi's squared distance from sigma
    weight_l1: NonNegative = 1e-4  # of psi's absolute values
    zero_below: NonNegative = 5e-6
    keep_below: NonNegative = 5e-5
    batch_unlabeled: Count = 100  # images of a batch at clients without labels
    patience: Count = 5
    local: Local = Local(epochs=1, batch_size=10, lr=1e-3, momentum=0.0, weight_decay=0.0, clip=None)

    def weights(self, scores: list[Score]) -> list[float]:
        return [1.0 for _ in scores]

    @on_server
    def score(self, site: Site[None], msg: Model) -> Embedded:
        found = super().score(site, msg)
        assert site.validation is not None  # of whose images the noise has the shape
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
        [strong] = net.logits(weights, x_strong)  # all of them, as a norm may need more than one
        apart = inter_client(local, others) / max(1, len(others))
        return self.weight_unlabeled * cross_entropy(strong[sure], label) + self.weight_helpers * apart


def noise(shape: torch.Size) -> Tensor:
    """One image of pixels from a normal distribution (mean 125, std 125), cut to 0..255 and scaled to 0..1."""
    pixels = torch.empty(1, *shape)
    nn.init.trunc_normal_(pixels, 125, 125, 0, 255, generator=Rng("fedmatch", "noise").torch)
    return pixels / 255
