"""Pseudo-labels: which unlabeled images a network is sure of, and which class they get."""

from dataclasses import dataclass

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


def flexible(p: Tensor, threshold: float) -> Tensor:
    """Return a threshold for each class by FlexMatch (Zhang et al., NeurIPS 2021), from predictions for all images.

    A class's learning effect is the number of images that are above `threshold` and get this class. It is divided by
    the largest one, or by the number of images below `threshold` as long as those are more (the paper's warm-up). The
    threshold of the class is M(share) * `threshold` with M(x) = x / (2 - x), the paper's choice.
    """
    confidence, label = p.max(1)
    learned = torch.bincount(label[confidence > threshold], minlength=p.shape[1])
    share = learned / max(int(learned.max()), len(p) - int(learned.sum()), 1)
    return share / (2 - share) * threshold


@dataclass(frozen=True)
class SelfAdaptive:
    """FreeMatch's thresholds (Wang et al., ICLR 2023), which follow a network's confidence. A site may keep them."""

    confidence: float  # tau_t, eq. 5: moving mean of the largest probability
    shares: Tensor  # p_t, eq. 6: moving mean of each class's probability

    @classmethod
    def start(cls, num_classes: int) -> "SelfAdaptive":
        """Return the first ones: 1/C everywhere."""
        return cls(1 / num_classes, torch.full((num_classes,), 1 / num_classes))

    def after(self, p: Tensor, decay: float = 0.999) -> "SelfAdaptive":
        """Return them after more predictions, eq. 5 and 6. `decay` is the paper's lambda."""
        confidence = decay * self.confidence + (1 - decay) * float(p.max(1).values.mean())
        return SelfAdaptive(confidence, decay * self.shares.to(p.device) + (1 - decay) * p.mean(0))

    @property
    def thresholds(self) -> Tensor:
        """The threshold of each class, eq. 7: lower for classes that are predicted less."""
        return self.shares / self.shares.max() * self.confidence


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
