"""Means of models in whole numbers: sums that do not depend on their order, and that masks can hide.

Each number of a model, times the client's share of all weights, becomes a whole number of steps of 2^-24. The sum of
these fits into 64 bits, so that it is exact, also modulo 2^64. Of K clients, the mean x of numbers up to m differs from
the exact weighted mean by at most K 2^-24 + K m 2^-27 + |x| 2^-23: by the rounding of numbers, of shares, and to
float32. A number is weighed before it is rounded. The other way round, shares with a common factor would leave a
pattern in the sum, from which one could read the number of the one client whose share does not have that factor.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fewlabel.core.robust import capped
from fewlabel.core.tree import Tree

STEPS = 1 << 24  # that a number of 1 has
LARGEST = 1024.0  # of a number in a model
WHOLE = 1 << 28  # the shares of all clients together

# Takes the total weight of each kind of client, and whether that kind has labels. Returns how much its mean counts.
Kinds = Callable[[Sequence[float], Sequence[bool]], Sequence[float]]
KINDS = (True, False)  # with labels, and without


def shares(
    weights: Sequence[float], labeled: Sequence[bool], kinds: Kinds | None = None, largest: float | None = None
) -> list[int]:
    """Return how much each client counts, in whole numbers that add up to WHOLE, but for their rounding.

    With `kinds`, clients with labels and those without count together as it says. Within each kind, nobody has more
    than the `largest` share. If no client has a weight, none counts.
    """
    if not all(0 <= weight < math.inf for weight in weights):
        raise ValueError(f"a weight must be finite and not negative, found {list(weights)}")
    counted = [float(weight) for weight in weights]
    for kind in (True, False):
        places = [place for place, has in enumerate(labeled) if has == kind]
        for place, weight in zip(places, capped([counted[p] for p in places], largest or 1.0), strict=True):
            counted[place] = weight
    if kinds is not None:
        totals = {kind: math.fsum(c for c, has in zip(counted, labeled, strict=True) if has == kind) for kind in KINDS}
        which = [kind for kind in KINDS if totals[kind]]
        factors = {
            kind: of_kind / totals[kind]
            for kind, of_kind in zip(which, kinds([totals[kind] for kind in which], which), strict=True)
        }
        counted = [weight * factors.get(has, 0.0) for weight, has in zip(counted, labeled, strict=True)]
    total = math.fsum(counted)
    return [round(WHOLE * weight / total) for weight in counted] if total else [0] * len(counted)


def check(model: Tree) -> None:
    """Raise ValueError if a number of a model is too large for sums."""
    for name in names(model):
        value = model[name]
        if not torch.isfinite(value).all() or (value.numel() and float(value.abs().max()) > LARGEST):
            raise ValueError(f"sums in whole numbers hold numbers up to {LARGEST:g}, and a weight is beyond")


def units(model: Tree, share: int) -> Tensor:
    """Return all numbers of a model times a client's share in whole steps, int64, in the order of their names.

    Counters are left out.
    """
    check(model)
    floats = [model[name].double().flatten() for name in names(model)]
    flat = torch.cat(floats) if floats else torch.empty(0, dtype=torch.float64)
    return (flat * (STEPS * share / WHOLE)).round().long()  # a half goes to the even number


def total(parts: Iterable[tuple[int, Tree]]) -> tuple[int, Tensor]:
    """Return the sum of all shares, and that of all models in whole steps."""
    whole, found = 0, torch.zeros(0, dtype=torch.int64)
    for share, model in parts:
        if share:
            steps = units(model, share)
            if whole and steps.shape != found.shape:
                raise ValueError("the models of one mean have different numbers of weights")
            whole, found = whole + share, found.add_(steps) if whole else steps
    return whole, found


def mean_of(whole: int, found: Tensor, old: Tree) -> Tree:
    """Return the mean from the sum of shares and the sum of models. Its counters are those of the `old` model."""
    if not whole:
        return old
    places = names(old)
    sizes = [old[name].numel() for name in places]
    if sum(sizes) != len(found):
        raise ValueError(f"a sum of {len(found)} numbers is not that of models with {sum(sizes)}")
    parts = dict(zip(places, torch.split(found.double() / (STEPS * whole / WHOLE), sizes), strict=True))
    return {n: parts[n].reshape(v.shape).to(v.dtype) if n in parts else v for n, v in old.items()}


def names(model: Tree) -> list[str]:
    """Return the entries of a model that are summed, in the order in which they are."""
    return sorted(name for name, value in model.items() if value.is_floating_point())
