"""Losses: pure functions of a network's outputs and their targets."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from fewlabel.core.images import Labeled
from fewlabel.core.mixing import soft
from fewlabel.core.tree import Tree


def adjusted(logits: Tensor, images: Labeled | None) -> Tensor:
    """Return logits for the cross-entropy on these labels: with the logarithm of the classes' shares, if balanced.

    Logit adjustment (Menon et al., ICLR 2021). All methods pass the logits of labels and fixed pseudo-labels through
    it. Consistency losses, thresholds and predictions take the logits as they are.
    """
    prior = None if images is None else images.log_prior
    return logits if prior is None else logits + prior


def supervised(model: nn.Module, images: Labeled | None, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the cross-entropy of a batch of these images, labels or fixed pseudo-labels, hard or soft."""
    x, y = batch
    return cross_entropy(adjusted(model(x), images), y)


def proximal(model: nn.Module, anchor: Tree) -> Tensor:
    """Return FedProx's loss: half the squared distance of a network's parameters from those it started with."""
    parts = [(value - anchor[name]).square().sum() for name, value in model.named_parameters()]
    return sum(parts[1:], start=parts[0]) / 2


def information(p: Tensor) -> Tensor:
    """Return IsoFed eq. 4, which is low if each prediction is sure and their mean is diverse. Log p stays finite."""
    mean, floor = p.mean(0), 1e-12
    diversity = (mean * mean.clamp(min=floor).log()).sum()
    return diversity - (p * p.clamp(min=floor).log()).sum(1).mean()


def fixmatch(strong: Tensor, label: Tensor, sure: Tensor) -> Tensor:
    """Return FixMatch's loss: cross-entropy with the pseudo-labels of sure images, divided by the number of all.

    Pseudo-labels may be soft.
    """
    return (cross_entropy(strong, label, reduction="none") * sure).mean()


def uda(weak: Tensor, strong: Tensor) -> Tensor:
    """Return UDA's loss: how far the strong view's prediction is from the weak view's, as a mean over images."""
    return kl_div(strong.log_softmax(1), weak.detach().log_softmax(1), log_target=True, reduction="batchmean")


def annealed(logits: Tensor, y: Tensor, done: float, images: Labeled | None = None) -> Tensor:
    """Return UDA's annealed loss: cross-entropy of the labeled images that the network is not yet too sure of.

    `done` is the share of the training that is over. An image counts while the probability of its true class is at most
    a bound. With `done`, the bound grows exponentially from 1/C to 1. If labels are soft, the mean over their classes
    counts.
    """
    classes = logits.shape[1]
    bound = torch.exp(torch.tensor(5 * (done - 1))) * (1 - 1 / classes) + 1 / classes
    open_ = (logits.detach().softmax(1) * soft(y, classes)).sum(1) <= bound
    losses = cross_entropy(adjusted(logits, images), y, reduction="none")
    return (losses * open_).sum() / open_.sum().clamp(min=1)


def inter_client(local: Tensor, helpers: list[Tensor]) -> Tensor:
    """Return FedMatch eq. 1: how far the local prediction is from the helpers', summed; as a mean over images."""
    own = local.log_softmax(1)
    parts = [kl_div(own, logits.log_softmax(1), log_target=True, reduction="batchmean") for logits in helpers]
    return torch.stack(parts).sum() if parts else own.new_zeros(())


def consistency(target: Tensor, p: Tensor) -> Tensor:
    """Return the squared distance of two predictions, as a mean over images: RSCFed eq. 3, FedIRM eq. 1."""
    return (target - p).square().sum(1).mean()


def matching(theirs: Tensor, ours: Tensor, known: Tensor) -> Tensor:
    """Return FedIRM eq. 6: the divergence of the rows in both directions, for classes known on both sides."""
    theirs, ours = theirs[known], ours[known]
    difference = (theirs - ours) * (theirs.clamp(min=1e-12).log() - ours.clamp(min=1e-12).log())
    return difference.sum() / len(known)
