"""An attack on `evaluate`: weights of simple-cnn that are made to read one test image, block by block.

Its two convolutions leave 25 values of an image: how bright its blocks are. The attacker picks a direction in this
space and looks for a threshold that a single image exceeds. Then a gate lets this image through and no other, and each
further model shows the brightness of one of its blocks in the score of class 0. The label is the row of the confusion
matrix in which the one image is. That worked as long as sites told exact counts.

`patient` is the best that we know against coarse answers, for an attacker who already knows how to single out an image
and its label: all other images are wrong, so that the accuracy is above 0 now and then if a block is bright.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fewlabel.core import tree
from fewlabel.core.metrics import count
from fewlabel.core.tree import Tree
from fewlabel.networks import build
from fewlabel.networks.parts import Network

SIZE, CLASSES, BLOCKS = 32, 10, 25
SHIFT, SPAN = 3.0, 6.0  # make normalised brightness positive; no block is brighter than the span
STEEP = 1e4  # of the gate
EDGES = 64  # intervals of a score that the attacker tells apart


@dataclass(frozen=True)
class Exact:
    """What sites told before: a confusion matrix, and how many scores of each class are in each interval."""

    confusion: Tensor
    histogram: Tensor


Observe = Callable[[Tree], Exact | None]  # what a site tells of a model, or None if it refuses


def exact(scores: Tensor, y: Tensor) -> Exact:
    """Return the counts that leave a site which does not coarsen them."""
    bins = (scores * EDGES).long().clamp(0, EDGES - 1)
    return Exact(count(scores, y).confusion, torch.stack([column.bincount(minlength=EDGES) for column in bins.T]))


def blocks_alone() -> tuple[Network, nn.Linear, nn.Linear]:
    """Return a network whose convolutions show how bright blocks are, and whose other weights are 0, and two layers."""
    network = build("simple-cnn", 1, CLASSES, SIZE)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
        first, second, wide, narrow = (network.backbone[n] for n in (0, 3, 7, 9))
        first.weight[0] = 1 / 25
        first.bias[0] = SHIFT
        second.weight[0, 0, 2, 2] = 1.0
    return network, wide, narrow


def crafted(direction: Tensor, threshold: float, block: int | None) -> Tree:
    """Return weights whose score of class 0 is high for images beyond the threshold; or, of these, shows a block."""
    network, wide, narrow = blocks_alone()
    with torch.no_grad():
        # Hidden units: a gate in two halves, whose difference is 0 or 1, and the block.
        wide.weight[0, :BLOCKS] = wide.weight[1, :BLOCKS] = STEEP * direction
        wide.bias[0] = -STEEP * threshold
        wide.bias[1] = -STEEP * threshold - 1
        if block is not None:
            wide.weight[2, block] = 1.0
        # The block if the gate is open; without a block, the gate itself.
        narrow.weight[0, :3] = torch.tensor([SPAN, -SPAN, 1.0])
        narrow.bias[0] = -SPAN if block is not None else 0.0
        projection = network.head.projection
        projection[0].weight[0, 0] = projection[2].weight[0, 0] = 1.0
        classifier = network.head.classifier
        # Scores from 0.02 for a closed gate to 0.98 for the brightest block.
        classifier.weight[0, 0] = 8 / SPAN
        classifier.bias[0] = -4.0
        classifier.bias[2:] = -50.0
    return tree.of(network)


def switch(direction: Tensor, threshold: float, block: int, level: float, label: int, empty: int) -> Tree:
    """Return weights that give the label to images beyond the threshold whose block is above the level.

    All other images get a class of which the site has none.
    """
    network = build("simple-cnn", 1, CLASSES, SIZE)
    network.load_state_dict(crafted(direction, threshold, block))
    with torch.no_grad():
        wide, narrow, classifier = network.backbone[7], network.backbone[9], network.head.classifier
        wide.weight[2:4] = 0.0
        wide.weight[2:4, block] = STEEP
        wide.bias[2], wide.bias[3] = -STEEP * level, -STEEP * level - 1
        narrow.weight[0, :4] = torch.tensor([1.0, -1.0, 1.0, -1.0])
        narrow.bias[0] = -1.0  # both gates
        classifier.weight.zero_()
        classifier.bias.fill_(-50.0)
        classifier.weight[label, 0], classifier.bias[label], classifier.bias[empty] = 40.0, -20.0, 0.0
    return tree.of(network)


def patient(
    accuracy: Callable[[Tree], float | None], direction: Tensor, threshold: float, label: int, empty: int, each: int
) -> list[float]:
    """Read an image whose label is known, by `each` answers for a block: how often the accuracy was above 0."""
    levels = [SPAN * (n + 0.5) / each for n in range(each)]
    return [
        float(sum((accuracy(switch(direction, threshold, block, level, label, empty)) or 0) > 0 for level in levels))
        for block in range(BLOCKS)
    ]


def features(images: Tensor) -> Tensor:
    """Return the 25 values of normalised images [N, 1, 32, 32] that the attack is after."""
    network = build("simple-cnn", 1, CLASSES, SIZE)
    network.load_state_dict(crafted(torch.zeros(BLOCKS), 0.0, 0))
    with torch.no_grad():
        return network.backbone[:7](images)[:, :BLOCKS]


@dataclass
class Found:
    """What the attacker has: the label and the blocks of an image, and how many answers it took."""

    label: int | None = None
    blocks: list[float] = field(default_factory=list)
    orders: int = 0


def attack(observe: Observe, direction: Tensor, most: int = 8) -> Found:
    """Read an image. `most` bounds the search for a threshold that one image exceeds."""
    found, (low, high) = Found(), (0.0, float(direction.clamp(min=0).sum()) * SPAN)
    threshold = high / 2

    def ask(block: int | None) -> Exact | None:
        found.orders += 1
        return observe(crafted(direction, threshold, block))

    for _ in range(most):
        counts = ask(None)
        beyond = 0 if counts is None else int(counts.confusion[:, 0].sum())
        if counts is not None and beyond == 1:
            found.label = int(counts.confusion[:, 0].argmax())
            break
        low, high = (threshold, high) if beyond else (low, threshold)
        threshold = (low + high) / 2
    for block in range(BLOCKS):
        counts = ask(block)
        seen = None if counts is None else counts.histogram[0]
        scores = (torch.arange(EDGES) + 0.5) / EDGES
        open_ = torch.zeros(0) if seen is None else scores[(seen > 0) & (scores > 0.03)]
        score = float(open_.max()) if len(open_) else 0.5
        found.blocks.append((torch.logit(torch.tensor(score)).item() + 4) * SPAN / 8)
    return found


def correlation(found: list[float], true: Tensor) -> float:
    """Return the correlation of what was read with an image's blocks, 0 if nothing varies."""
    pairs = torch.stack([torch.tensor(found), true.float()])
    return float(torch.corrcoef(pairs).nan_to_num(0.0)[0, 1])
