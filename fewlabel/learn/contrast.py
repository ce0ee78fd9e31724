"""Self-supervised learning: what a network learns from unlabeled images when it compares them with each other."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize

from fewlabel.core.errors import BadInput
from fewlabel.core.tree import Tree

PROJECTED = 128  # outputs of the projection, as in SimCLR


def classifier(weights: Tree) -> str:
    """Return the name of a network's last matrix, [classes, features]: the weight of its classifier."""
    matrices = [name for name, value in weights.items() if value.ndim == 2]
    if not matrices:
        raise BadInput("features are what a network's last linear layer gets, but this one has none; set model.name")
    return matrices[-1]


def with_features(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the features of images, which are what the network's last linear layer gets, and the logits."""
    seen: list[Tensor] = []
    layer = model.get_submodule(classifier(dict(model.named_parameters())).rpartition(".")[0])
    hook = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        logits: Tensor = model(x)
    finally:
        hook.remove()
    return seen[-1], logits


class Projection(nn.Module):
    """SimCLR's projection head, g(h) = W2 relu(W1 h), for networks with so many features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        # No network has such names, so nobody takes these weights for some of the network's own.
        self.projection_hidden = nn.Linear(features, features)
        self.projection_output = nn.Linear(features, PROJECTED)

    def forward(self, features: Tensor) -> Tensor:
        projected: Tensor = self.projection_output(self.projection_hidden(features).relu())
        return projected


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """Return SimCLR's loss NT-Xent (Chen et al., ICML 2020) of two views of the same images, as a mean over all views.

    It is a cross-entropy: among all other views in the batch, a view must find the other view of its own image, by the
    cosine of their angle.
    """
    z, count = normalize(torch.cat([first, second])), len(first)
    likeness = (z @ z.T / temperature).fill_diagonal_(-torch.inf)
    return cross_entropy(likeness, torch.arange(2 * count, device=z.device).roll(count))


def neighbourhood(first: Tensor, second: Tensor) -> Tensor:
    """Return how differently two networks arrange the same images, from their features.

    The arrangement is the cosine of each pair of images, and the loss is the squared difference, as a mean over pairs.
    """
    ours, theirs = (z @ z.T for z in (normalize(first), normalize(second)))
    return (ours - theirs).square().mean()
