"""CBAFed's residual weight connection: now and then, weights are blended with those of some epochs or rounds ago."""

from collections.abc import Iterator

from torch import nn

from fewlabel.core import tree
from fewlabel.core.tree import Tree


def blend(old: Tree, new: Tree, share: float) -> Tree:
    """CBAFed eq. 1, 3 and 21: share * old + (1 - share) * new."""
    return tree.mean([(share, old), (1 - share, new)])


def epochs(model: nn.Module, number: int, share: float, skip: int, first: int = 0) -> Iterator[int]:
    """CBAFed eq. 1: counts epochs 1, 2, …, and after every skip-th blends the network with itself `skip` epochs ago.

    Epochs are counted from the received weights, or (`first` = 1, as the authors do) from those after the first epoch.
    """
    before = tree.of(model) if share else {}
    for epoch in range(1, number + 1):
        yield epoch
        if share and epoch == first:
            before = tree.of(model)
        elif share and (epoch - first) % skip == 0:
            before = blend(before, tree.of(model), share)
            model.load_state_dict(before)
