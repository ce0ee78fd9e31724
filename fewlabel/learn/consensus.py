"""How much each model counts in an average: by size, by distance from the other models, by who has labels."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fewlabel.core import tree
from fewlabel.core.tree import Tree

Distance = Literal["joined", "summed"]


def distance(a: Tree, b: Tree, kind: Distance = "joined") -> float:
    """Return the L2 norm of the difference of all parameters as one vector.

    `summed` is the version of RSCFed's authors. It adds up the norms of all entries, and these include BatchNorm's
    statistics and counters.
    """
    if kind == "joined":
        return tree.norm(tree.sub(a, b))
    tree.same_entries(a, b)
    return sum(float((value.double() - b[name].double()).norm()) for name, value in a.items())


def by_distance(sizes: Sequence[float], models: Sequence[Tree], beta: float, kind: Distance = "joined") -> Tensor:
    """Return the logarithms of N_i exp(-beta d_i / N_i): RSCFed eq. 5 and 6, IsoFed eq. 2 and 3.

    d_i is the distance of model i from the mean by size. The softmax of the logarithms gives the weights. The
    exponential itself would underflow for small N_i.
    """
    if kind == "summed":  # then counters need a mean, too
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
    """Return weights that sum to 1, from their logarithms, with more weight for labeled clients.

    `times` multiplies the weight of each labeled client. Without it, the labeled clients get `share` together, however
    small their weights are, and divide it by size. If all clients have labels, or none, nothing changes.
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
    """Return how much the labeled clients' mean and the others' mean count: `favour`, as `Federation.mean` needs it."""
    return favour(torch.tensor(weights, dtype=torch.float64).log(), weights, labeled, share, times)
