"""Pseudo-labels: which unlabeled images a network is sure of, and which class they get."""

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fewlabel.core.images import Unlabeled


@torch.no_grad()
def predict(model: nn.Module, images: Unlabeled, view: str = "plain", size: int = 256) -> Tensor:
    """Return the network's probabilities for all of a site's unlabeled images, in order."""
    model.eval()
    return torch.cat([model(x).softmax(1) for x, _ in images.batches((view,), size, shuffle=False)])


def class_shares(counts: Tensor) -> Tensor:
    """Return each class's share of all images, times C/10: CBAFed eq. 8 and 13."""
    return counts.double() / counts.sum() * len(counts) / 10


def thresholds(shares: Tensor, base: float, highest: float) -> Tensor:
    """Return a threshold for each class, CBAFed eq. 9 to 11. Classes that were trained on less have a lower one."""
    return (shares + base - shares.std()).clamp(max=highest)


def select(p: Tensor, thresholds: Tensor, tail: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the index of the images that get a pseudo-label, and their labels: CBAFed eq. 4 and 14 to 17.

    An image gets its most likely class if the probability is above the threshold of that class. Otherwise it gets the
    second most likely class, if this is one of the `tail` classes (a mask).
    """
    confidence, classes = p.topk(2)
    label, second = classes.unbind(1)
    sure = confidence[:, 0] > thresholds[label]
    label = torch.where(sure, label, second)
    used = sure if tail is None else sure | tail[second]
    index = used.nonzero().flatten()
    return index, label[index]


def confident(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return a mask of the images that a network is sure of, and its label for every image."""
    confidence, label = logits.detach().softmax(1).max(1)
    return confidence >= threshold, label


def agreed(local: Tensor, helpers: list[Tensor]) -> Tensor:
    """Return the class with most votes of the local network and its helpers: FedMatch eq. 3.

    If the local network's own class is among tied ones, it wins.
    """
    votes = torch.stack([one_hot(logits.argmax(1), logits.shape[1]) for logits in (local, *helpers)]).sum(0)
    own = one_hot(local.argmax(1), local.shape[1])
    return (2 * votes + own).argmax(1)
