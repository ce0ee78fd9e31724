"""Pseudo-labels: which unlabeled images a network is sure of, and which class they get."""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fewlabel.core.images import Unlabeled


@torch.no_grad()
def predict(model: nn.Module, images: Unlabeled, view: str = "plain", size: int = 256) -> Tensor:
    """The network's probabilities for all of a site's unlabeled images, in their order."""
    model.eval()
    return torch.cat([model(x).softmax(1) for x, _ in images.batches((view,), size, shuffle=False)])


def class_shares(counts: Tensor) -> Tensor:
    """CBAFed eq. 8 and 13: the classes' shares of all images, times C/10."""
    return counts.double() / counts.sum() * len(counts) / 10


def thresholds(shares: Tensor, base: float, highest: float) -> Tensor:
    """CBAFed eq. 9 to 11: the rarer a class among what was trained on, the lower its threshold."""
    return (shares + base - shares.std()).clamp(max=highest)


def select(p: Tensor, thresholds: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """CBAFed eq. 4, 14 and 15 to 17: which images get a pseudo-label, and which.

    The most likely class where its probability is above the class's threshold; elsewhere the second, if it is one of
    the `tail` classes (a mask).
    """
    confidence, classes = p.topk(2)
    label, second = classes.unbind(1)
    sure = confidence[:, 0] > thresholds[label]
    label = torch.where(sure, label, second)
    used = sure if tail is None else sure | tail[second]
    index = used.nonzero().flatten()
    return index, label[index]


def confident(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Which images a network is sure of, and what it says of all."""
    confidence, label = logits.detach().softmax(1).max(1)
    return confidence >= threshold, label


def agreed(local: Tensor, helpers: list[Tensor]) -> Tensor:
    """FedMatch eq. 3: the class with most votes of the local network and its helpers; ties to the local one's."""
    votes = torch.stack([one_hot(logits.argmax(1), logits.shape[1]) for logits in (local, *helpers)]).sum(0)
    own = one_hot(local.argmax(1), local.shape[1])
    return (2 * votes + own).argmax(1)
