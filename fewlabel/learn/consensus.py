"""How much each model counts in an average of models: by size, by its distance from the others, by who has labels."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fewlabel.core import tree
from fewlabel.core.tree import Tree

Distance = Literal["joined", "summed"]


def distance(a: Tree, b: Tree, kind: Distance = "joined") -> float:
    """The L2 norm of the difference of all parameters as one vector; or `summed`, as RSCFed's authors have it: the
    norms of all entries, BatchNorm's statistics and counters among them, added up."""
    if kind == "joined":
        return tree.norm(tree.sub(a, b))
    tree.same_entries(a, b)
    return sum(float((value.double() - b[name].double()).norm()) for name, value in a.items())


def by_distance(sizes: Sequence[float], models: Sequence[Tree], beta: float, kind: Distance = "joined") -> Tensor:
    """RSCFed eq. 5 and 6, IsoFed eq. 2 and 3: N_i exp(-beta d_i / N_i), d_i being the distance from the mean by size.

    As logarithms, because the exponential underflows for small N_i; their softmax are the weights.
    """
    if kind == "summed":  # counters have a mean, too
        models = [{name: v if v.is_floating_point() else v.double() for name, v in model.items()} for model in models]
    average = tree.mean(zip(sizes, models, strict=True))
    logs = [math.log(n) - beta * distance(model, average, kind) / n for n, model in zip(sizes, models, strict=True)]
    return torch.tensor(logs, dtype=torch.float64)


def favour(
    logs: Tensor,
    sizes: Sequence[float],
    labeled: Sequence[bool],
    share: float | None = None,
    times: float | None = None,
) -> list[float]:
    """Weights that sum to 1, from their logarithms. Labeled clients get more: each so many times its weight, or else
    together a share of all, however small their weights.

    They divide a share by size. Where all or none have labels, nothing changes.
    """
    has = torch.tensor(labeled, dtype=torch.bool)
    if times is not None:
        return torch.where(has, logs + math.log(times), logs).softmax(0).tolist()
    weights = logs.softmax(0)
    if share is not None and has.any() and not has.all():
        by_size = torch.tensor(sizes, dtype=torch.float64).log()
        weights[has], weights[~has] = share * by_size[has].softmax(0), (1 - share) * logs[~has].softmax(0)
    return weights.tolist()


def by_kind(
    weights: Sequence[float], labeled: Sequence[bool], share: float | None = None, times: float | None = None
) -> list[float]:
    """How much the mean of labeled clients and that of the others count, for `Federation.mean`: `favour` of the two."""
    return favour(torch.tensor(weights, dtype=torch.float64).log(), weights, labeled, share, times)
