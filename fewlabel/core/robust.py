"""Means of models that one client cannot decide: bounded shares, trimmed means and medians.

Trimmed mean and median are Yin et al. (ICML 2018), the geometric median is Pillutla et al. (IEEE TSP 2022). In all
three, every client counts alike, because the size of a client is only what the client says.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal

import torch

from fewlabel.core import tree
from fewlabel.core.tree import Tree

Aggregate = Literal["mean", "trimmed-mean", "median", "geometric-median"]
TINY = 1e-30  # a distance that is not zero, to divide by
STEPS = 200  # of the search for a geometric median; each step divides the weight of a far model by two or more


def capped(weights: Sequence[float], share: float) -> list[float]:
    """Lower the largest weights until none is more than this share of their sum.

    Of n weights, one cannot be less than 1/n of the sum. If that is more than `share`, all become equal.
    """
    positive = sorted((weight for weight in weights if weight > 0), reverse=True)
    if not positive:
        return list(weights)
    share = max(share, 1 / len(positive))
    most = positive[-1]  # if all become equal
    for number in range(len(positive)):
        # With the first `number` weights at `most`, most = share * (number * most + rest).
        left = 1 - number * share
        if left <= 1e-12:
            break
        if (found := share * math.fsum(positive[number:]) / left) >= positive[number]:
            most = found
            break
    return [min(weight, most) for weight in weights]


def trimmed(models: Sequence[Tree], cut: int) -> Tree:
    """Return the mean of each number over models, without its `cut` largest and smallest values.

    A counter of the result is the middle one.
    """
    for model in models[1:]:
        tree.same_entries(models[0], model)
    ordered = {name: torch.stack([model[name] for model in models]).sort(0).values for name in models[0]}
    kept = range(cut, len(models) - cut)
    found = tree.mean((1.0, {name: values[place] for name, values in ordered.items()}) for place in kept)
    middle = (len(models) - 1) // 2
    return {n: value if value.is_floating_point() else ordered[n][middle] for n, value in found.items()}


def cut_of(clients: int, trim: float) -> int:
    """Return how many values a trimmed mean leaves out at each end: at least one if there are three clients or more."""
    return min(max(1, int(trim * clients)), (clients - 1) // 2)


def geometric_median(models: Sequence[Tree]) -> Tree:
    """Return the point with the least sum of distances to all models: a mean in which far models count less."""
    return tree.mean(zip(geometric_weights(models), models, strict=True))


def geometric_weights(models: Sequence[Tree]) -> list[float]:
    """Return the models' weights in their geometric median, by Weiszfeld's steps on their parameters.

    The steps need only the inner products of the models, so each model is read once for each other model.
    """
    origin = tree.parameters(trimmed(models, (len(models) - 1) // 2))  # near most models, so that little cancels
    products = torch.zeros(len(models), len(models), dtype=torch.float64)
    for name, start in origin.items():
        rows = torch.stack([model[name].flatten() for model in models]).double() - start.flatten().double()
        products += rows @ rows.T
    weights = torch.full((len(models),), 1 / len(models), dtype=torch.float64)
    for _ in range(STEPS):
        weights = 1 / distances(products, weights).clamp(min=TINY)
        weights /= weights.sum()
    return weights.tolist()


def distances(products: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return each model's distance from the weighted mean of all, from their inner products."""
    along = products @ weights
    return (products.diagonal() - 2 * along + weights @ along).clamp(min=0).sqrt()


def aggregated(models: Sequence[Tree], how: Aggregate, trim: float) -> Tree:
    """Return what stands for these models, in which all count alike."""
    if how == "geometric-median":
        return geometric_median(models)
    return trimmed(models, (len(models) - 1) // 2 if how == "median" else cut_of(len(models), trim))


def total(weights: Sequence[float]) -> float:
    """Return how much some clients count together. A single false size changes it little."""
    return len(weights) * statistics.median(weights)
