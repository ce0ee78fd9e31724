"""Sharpness: the weights nearby where a loss is highest (Foret et al., ICLR 2021; Kwon et al., ICML 2021)."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fewlabel.core.tree import Tree

ETA = 0.01  # ASAM's eta: a weight of zero may move, too


def uphill(weights: Mapping[str, Tensor], gradients: Sequence[Tensor], radius: float) -> Tree:
    """Return w + e with ASAM's step e = radius * T^2 g / norm(T g), which goes up a loss with these gradients g.

    T is abs(w) + eta for weights, so that large ones move further, and 1 for biases. The step counts as a constant, so
    the gradient of a loss of w + e reaches w as it is.
    """
    with torch.no_grad():
        scales = [value.abs() + ETA if "weight" in name else torch.ones_like(value) for name, value in weights.items()]
        scaled = torch._foreach_mul(list(gradients), scales)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(scaled)))
        steps = torch._foreach_mul(torch._foreach_mul(scaled, scales), radius / norm.clamp(min=1e-16))
    return {name: value + step for (name, value), step in zip(weights.items(), steps, strict=True)}
