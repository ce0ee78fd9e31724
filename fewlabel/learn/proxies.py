"""Class proxies: the rows of a classifier's weights, each of which stands for a class (ProxyFL, CVPR 2026)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, one_hot

from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree


def classifier(network: Tree) -> str:
    """Return the name of a network's class proxies: the last matrix among its weights."""
    names = [name for name, value in network.items() if value.ndim == 2]
    if not names:
        raise ValueError("a network without a matrix of weights has no class proxies")
    return names[-1]


@contextmanager
def features(model: nn.Module, classifier: str) -> Iterator[Callable[[], Tensor]]:
    """Watch a network: what this yields returns the features that its classifier got in the last pass."""
    last: list[Tensor] = []
    layer = model.get_submodule(classifier.rpartition(".")[0])
    hook = layer.register_forward_pre_hook(lambda _, inputs: last.__setitem__(slice(None), inputs[:1]))
    try:
        yield lambda: last[0]
    finally:
        hook.remove()


def projections(size: int, rng: Rng) -> Tree:
    """Return the first weights of two linear layers, drawn as PyTorch does: one for features, one for proxies."""
    shapes = {"project_features": (size, size), "project_shift": (size,), "project_proxies": (size, size)}
    return {n: (2 * torch.rand(shape, generator=rng.torch) - 1) / size**0.5 for n, shape in shapes.items()}


def contrast(features: Tensor, proxies: Tensor, p: Tensor, sure: Tensor, prior: Tensor) -> Tensor:
    """Return how hard it is to tell the proxies that an image belongs to from images that it does not belong to.

    An image with the probabilities `p` belongs to its most likely class if it is `sure`, and otherwise to each class
    that is more likely than its `prior`. Its positive similarity is that to the class's proxy; for several classes it
    is their sum, weighted by p. Its negatives are the images that share no class with it and point in a similar
    direction. Similarities are cosines.
    """
    features, proxies = normalize(features), normalize(proxies)
    top = one_hot(p.argmax(1), p.shape[1]).bool()
    classes = torch.where(sure[:, None], top, p > prior)
    shares = torch.where(sure[:, None], top.to(p.dtype), p * classes)
    positive = (shares * (features @ proxies.T)).sum(1, keepdim=True)
    similar = features @ features.T
    common = (classes.to(p.dtype) @ classes.to(p.dtype).T > 0).fill_diagonal_(True)
    negative = similar.masked_fill(common | (similar < 1e-6), -torch.inf)
    return torch.cat([positive, negative], 1).logsumexp(1) - positive[:, 0]


@torch.enable_grad()
def tuned(mean: Tensor, clients: Sequence[Tensor], epochs: int, size: int, lr: float, rng: Rng) -> Tensor:
    """Return global proxies that start at the clients' mean and move until they tell the clients' proxies apart.

    The loss is the cross-entropy of the negative distances between a client's proxy and all global ones. The distance
    to its own class gets a margin: the largest distance of a mean proxy from the one nearest to it.
    """
    rows, number = torch.cat(list(clients)), len(mean)
    y = torch.arange(number, device=mean.device).repeat(len(clients))
    margin = (distance(mean, mean) + torch.diag(mean.new_full((number,), torch.inf))).amin(1).amax()
    proxies = mean.clone().requires_grad_()
    for _ in range(epochs):
        for batch in torch.split(torch.randperm(len(y), generator=rng.torch).to(y.device), size):
            away = distance(rows[batch], proxies) + margin * one_hot(y[batch], number)
            [slope] = torch.autograd.grad(cross_entropy(-away, y[batch]), proxies)
            with torch.no_grad():
                proxies -= lr * slope
    return proxies.detach()


def distance(some: Tensor, others: Tensor) -> Tensor:
    """Return the distance of each row from each other one. Matrix products, the default, would lose small ones."""
    return torch.cdist(some, others, compute_mode="donot_use_mm_for_euclid_dist")
