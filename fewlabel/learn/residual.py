"""CBAFed's residual weight connection: every few epochs or rounds, weights are blended with earlier ones."""

from collections.abc import Iterator

from torch import nn

from fewlabel.core import tree
from fewlabel.core.tree import Tree


def blend(old: Tree, new: Tree, share: float) -> Tree:
    """Return share * old + (1 - share) * new: CBAFed eq. 1, 3 and 21."""
    return tree.mean([(share, old), (1 - share, new)])


def epochs(model: nn.Module, number: int, share: float, skip: int, first: int = 0) -> Iterator[int]:
    """Yield epochs 1, 2, … and every `skip` epochs blend the network with its weights `skip` epochs ago: CBAFed eq. 1.

    `skip` is counted from the received weights, or from those after the first epoch: `first` = 1, the authors' version.
    """
    before = tree.of(model) if share else {}
    for epoch in range(1, number + 1):
        yield epoch
        if share and epoch == first:
            before = tree.of(model)
        elif share and (epoch - first) % skip == 0:
            before = blend(before, tree.of(model), share)
            model.load_state_dict(before)
