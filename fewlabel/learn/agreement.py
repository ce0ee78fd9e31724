"""FedMatch's and FixMatch's losses on unlabeled images."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div, one_hot


def confident(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Which images a network is sure of, and what it says of all."""
    confidence, label = logits.detach().softmax(1).max(1)
    return confidence >= threshold, label


def agreed(local: Tensor, helpers: list[Tensor]) -> Tensor:
    """FedMatch eq. 3: the class with most votes of the local network and its helpers; ties to the local one's."""
    votes = torch.stack([one_hot(logits.argmax(1), logits.shape[1]) for logits in (local, *helpers)]).sum(0)
    own = one_hot(local.argmax(1), local.shape[1])
    return (2 * votes + own).argmax(1)


def inter_client(local: Tensor, helpers: list[Tensor]) -> Tensor:
    """FedMatch eq. 1: how far the local network's prediction is from each helper's, in the mean over images."""
    own = local.log_softmax(1)
    parts = [kl_div(own, logits.log_softmax(1), log_target=True, reduction="batchmean") for logits in helpers]
    return torch.stack(parts).sum() if parts else own.new_zeros(())


def fixmatch(strong: Tensor, label: Tensor, sure: Tensor) -> Tensor:
    """FixMatch: cross-entropy with the pseudo-labels of those images that are sure, in the mean over all."""
    return (cross_entropy(strong, label, reduction="none") * sure).mean()


def uda(weak: Tensor, strong: Tensor) -> Tensor:
    """UDA: how far the prediction for the strong view is from that for the weak one, in the mean over images."""
    return kl_div(strong.log_softmax(1), weak.detach().log_softmax(1), log_target=True, reduction="batchmean")


def annealed(logits: Tensor, y: Tensor, done: float) -> Tensor:
    """UDA's training-signal annealing: cross-entropy of the labeled images that are not yet learned too well.

    Of the whole training, the share `done` is over; the bound of the true class's probability grows exponentially with
    it, from 1/C to 1.
    """
    classes = logits.shape[1]
    bound = torch.exp(torch.tensor(5 * (done - 1))) * (1 - 1 / classes) + 1 / classes
    open_ = logits.detach().softmax(1).gather(1, y[:, None])[:, 0] <= bound
    return (cross_entropy(logits, y, reduction="none") * open_).sum() / open_.sum().clamp(min=1)
