"""An attack on training: weights of simple-cnn that are made so that what is trained from them shows single images.

The two convolutions leave 25 values of an image, as in `evaluation_attack`: how bright its blocks are. Each unit of the
next layer adds them up in the same way, and has another threshold, so that it learns only from images beyond it. Two
neighbours differ by the images between their thresholds. If that is one image, the changes of the weights by the change
of the bias are its blocks, whatever the learning rate. Where the thresholds should be, the attacker knows from images
of the same kind. All weights are small, so no bound on their size helps (Boenisch et al. 2023, Fowl et al. 2022).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewlabel.core import tree
from fewlabel.core.tree import Tree
from tests.deploy.evaluation_attack import BLOCKS, CLASSES, blocks_alone

UNITS = 120


@dataclass(frozen=True)
class Trap:
    """Crafted weights, and the direction and thresholds by which they tell images apart."""

    weights: Tree
    thresholds: Tensor


def trap(direction: Tensor, similar: Tensor) -> Trap:
    """Craft weights. `similar` are the blocks of images of the same kind, [N, 25]."""
    shares = torch.linspace(0, 1, UNITS + 2)[1:-1]
    thresholds = torch.quantile(similar @ direction, shares)
    network, wide, narrow = blocks_alone()
    with torch.no_grad():
        wide.weight[:, :BLOCKS] = direction
        wide.bias[:] = -thresholds
        narrow.weight[0] = 1 / UNITS
        narrow.bias[0] = 1.0
        projection, classifier = network.head.projection, network.head.classifier
        projection[0].weight[0, 0] = projection[2].weight[0, 0] = 1.0
        classifier.weight[:, 0] = torch.linspace(-1, 1, CLASSES)  # so that every label has another gradient
    return Trap(tree.of(network), thresholds)


def read(sent: Trap, trained: Tree) -> Tensor:
    """Return the blocks between each two thresholds, as the update shows them, [119, 25]. NaN: nothing was learned."""
    change = {name: trained[name].double() - sent.weights[name].double() for name in trained}
    steps = change["backbone.7.weight"][:, :BLOCKS].diff(dim=0), change["backbone.7.bias"].diff()
    return torch.where(steps[1].abs()[:, None] > 0, steps[0] / steps[1][:, None], torch.nan)


def matches(found: Tensor, blocks: Tensor, mean: Tensor) -> Tensor:
    """Return how well each reading fits the image that it fits best: correlations, without what all images share."""
    whole = found[found.isfinite().all(1)] - mean
    images = blocks.double() - mean
    both = [rows - rows.mean(1, keepdim=True) for rows in (whole, images)]
    both = [rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12) for rows in both]
    return (both[0] @ both[1].T).max(1).values if len(whole) else torch.zeros(0)
