"""Which images should a person label next? Functions of what a model says about the images without a label.

All but `random` care for rare classes (`rarity`): few labels help little if all of them show the same frequent class.
k-center is Sener & Savarese's greedy one (ICLR 2018). `uncertain-diverse` is BADGE (Ash et al., ICLR 2020), with one
difference: the origin, the gradient of an image that the model is sure of, counts as a first centre.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fewlabel.core.errors import BadInput, unknown
from fewlabel.core.rng import Rng

STRATEGIES = ("random", "least-certain", "margin", "k-center", "uncertain-diverse")


class Seen(NamedTuple):
    """What a model says about images."""

    p: Tensor  # [N, C]: probabilities
    features: Tensor  # [N, D]: what its last layer gets


def choose(
    strategy: str,
    count: int,
    seen: Seen,
    rng: Rng,
    labels: Sequence[int] | None = None,
    centres: Tensor | None = None,
) -> list[int]:
    """Return which images to label, the most useful first: `count` of them, or all if there are fewer.

    `labels` are how many labels of each class are there already, and `centres` the features of labeled images.
    """
    if strategy not in STRATEGIES:
        raise BadInput(unknown("strategy", strategy, STRATEGIES))
    if strategy == "random":
        drawn: list[int] = rng.numpy.permutation(len(seen.p))[:count].tolist()
        return drawn
    p, features = seen.p.double(), seen.features.double()
    weight = rarity(p, labels or [0] * p.shape[1])
    if strategy == "k-center":
        return k_center(features, count, weight, centres)
    if strategy == "uncertain-diverse":
        return badge(p, features, count, weight, rng)
    score = {"least-certain": least_certain, "margin": small_margin}[strategy](p) * weight
    return score.argsort(descending=True, stable=True)[:count].tolist()


def least_certain(p: Tensor) -> Tensor:
    """Return 1 - max p of each image."""
    return 1 - p.max(1).values


def small_margin(p: Tensor) -> Tensor:
    """Return 1 - (p1 - p2) of each image, for its two most likely classes."""
    first, second = p.topk(2).values.unbind(1)
    return 1 - (first - second)


def rarity(p: Tensor, labels: Sequence[int]) -> Tensor:
    """Return how rare the classes of each image are expected to be: sum over c of p_c / sqrt(1 + m_c).

    m_c is how many images of class c there are: those with a label, and those that the model expects among the rest.
    The square root gives a rare class more than its share, but not everything: the model may only imagine it.
    """
    expected = 1 + torch.tensor(labels, dtype=p.dtype) + p.sum(0)
    return p @ expected.rsqrt()


def k_center(features: Tensor, count: int, weight: Tensor, centres: Tensor | None = None) -> list[int]:
    """Take the image that is farthest from all centres, again and again; each becomes a centre.

    Distances are multiplied by the weights. Without a centre, the first is the image nearest to the mean.
    """
    chosen: list[int] = []
    if centres is None or not len(centres):
        chosen.append(int((features - features.mean(0)).norm(dim=1).argmin()))
        centres = features[chosen]
    nearest = torch.cdist(features, centres.to(features)).min(1).values * weight
    nearest[chosen] = -1
    while len(chosen) < min(count, len(features)):
        chosen.append(best := int(nearest.argmax()))
        nearest = torch.minimum(nearest, (features - features[best]).norm(dim=1) * weight)
        nearest[chosen] = -1
    return chosen[:count]


def badge(p: Tensor, features: Tensor, count: int, weight: Tensor, rng: Rng) -> list[int]:
    """Draw images as k-means++ draws centres, from the gradients that they would give the last layer.

    The gradient of an image is (p - e_y) h^T, for its most likely class y and its features h. An image is drawn with a
    chance in proportion to its weight times the squared distance of its gradient from the nearest one drawn, or from 0.
    """
    error = p - torch.nn.functional.one_hot(p.argmax(1), p.shape[1])
    norm = error.square().sum(1) * features.square().sum(1)
    nearest, chosen = norm.clone(), list[int]()
    draws = rng.numpy
    while len(chosen) < min(count, len(p)):
        chance = nearest * weight
        ends = chance.cumsum(0)
        if not ends[-1] > 0:  # nothing is left to learn from the rest, or they are copies of what was drawn
            rest = sorted(set(range(len(p))) - set(chosen))
            return chosen + [rest[i] for i in draws.permutation(len(rest))[: count - len(chosen)]]
        drawn = int(torch.searchsorted(ends, draws.random() * float(ends[-1]), right=True).clamp(max=len(p) - 1))
        chosen.append(drawn)
        # |a h^T - b k^T|^2 = |a|^2 |h|^2 + |b|^2 |k|^2 - 2 (a.b) (h.k): no matrix of all gradients is needed.
        apart = norm + norm[drawn] - 2 * (error @ error[drawn]) * (features @ features[drawn])
        nearest = torch.minimum(nearest, apart.clamp(min=0))
        nearest[chosen] = 0
    return chosen
