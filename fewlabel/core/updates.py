"""How far an upload moves what was sent: the size of an update, and the bounds on it.

An update is the difference between the trees of an upload and the trees of the message that it answers. Its parameters
and its BatchNorm statistics are measured apart, because they have no common unit.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, Protocol, Self, TypeGuard, TypeVar, cast, runtime_checkable

import torch
from torch import Tensor

from fewlabel.core import tree
from fewlabel.core.federation import weights_field
from fewlabel.core.tree import Tree

U = TypeVar("U")
Part = Literal["parameter", "statistic"]
PARTS: tuple[Part, ...] = ("parameter", "statistic")
LARGEST = 1e18  # of a number in an upload: the squares of larger ones overflow float32, and with them a network
Trees = dict[str, tuple[Tree, Tree]]  # by name: as a tree was sent, and as it came back


@runtime_checkable
class Moves(Protocol):
    """An upload that does not hold its trees as they are, and so says itself what it moved."""

    def trees(self, sent: Any) -> Trees:
        """Return each tree as it was sent and as it came back."""

    def with_trees(self, sent: Any, trees: Mapping[str, Tree]) -> Self:
        """Return the upload with other trees in place of those that came back."""


def moved(upload: Any, sent: Any) -> Trees:
    """Return the trees of an upload that were sent, too: fields of the same name, and the fields of type Weights."""
    if isinstance(upload, Moves):
        return upload.trees(sent)
    if not is_dataclass(upload) or not is_dataclass(sent):
        return {}
    found: Trees = {}
    whole, from_whole = (weights_field(cast(type, type(value))) for value in (upload, sent))
    for field in fields(upload):
        new, old = getattr(upload, field.name), getattr(sent, field.name, None)
        if old is None and field.name == whole and from_whole:
            old = getattr(sent, from_whole)
        if is_tree(new) and is_tree(old):
            found[field.name] = old, new
    return found


def is_tree(value: object) -> TypeGuard[Tree]:
    return isinstance(value, dict) and all(isinstance(part, Tensor) for part in value.values())


def norms(trees: Trees) -> dict[Part, float]:
    """Return the L2 norms of an update in double precision: of all its parameters, and of all its statistics.

    Of a variance, its square root counts, the standard deviation. Variances of different layers would drown each other.
    """
    squares: dict[Part, float] = {}
    for old, new in trees.values():
        for name, value in new.items():
            kind = tree.kind(name, value)
            if kind != "counter" and name in old and old[name].shape == value.shape:
                change = rooted(name, value) - rooted(name, old[name])
                norm = float(torch.linalg.vector_norm(change, dtype=torch.float64))
                squares[kind] = squares.get(kind, 0.0) + norm**2
    return {part: math.sqrt(square) for part, square in squares.items()}


def scaled(upload: U, sent: Any, factors: Mapping[Part, float]) -> U:
    """Return an upload whose update is multiplied: its parameters and its statistics each by their own factor."""

    def change(name: str, old: Tree, value: Tensor) -> Tensor:
        kind = tree.kind(name, value)
        factor = 1.0 if kind == "counter" or name not in old else factors.get(kind, 1.0)
        if factor == 1.0:
            return value
        before = rooted(name, old[name])
        found = torch.add(before, rooted(name, value) - before, alpha=factor)
        return found.square() if is_variance(name) else found

    trees = moved(upload, sent)
    changed = {
        field: {name: change(name, old, value) for name, value in new.items()} for field, (old, new) in trees.items()
    }
    return with_trees(upload, sent, changed)


def is_variance(name: str) -> bool:
    return name.endswith("running_var")


def rooted(name: str, value: Tensor) -> Tensor:
    """Return an entry of a tree; of variances, their square roots."""
    return value.clamp(min=0).sqrt() if is_variance(name) else value


def with_trees(upload: U, sent: Any, trees: Mapping[str, Tree]) -> U:
    """Return an upload with other trees in place of those that came back."""
    if isinstance(upload, Moves):
        return upload.with_trees(sent, trees)
    return replace(upload, **trees) if trees else upload  # type: ignore[type-var]


def check_size(upload: Any, most: float = LARGEST) -> None:
    """Raise ValueError if a number of an upload is so large that networks and averages overflow."""
    tensors = [value for value in tensors_of(upload) if value.is_floating_point() and value.numel()]
    if not tensors or max(map(float, torch._foreach_norm(tensors))) <= most:
        return  # no number is larger than the norm, which is quicker to compute
    largest = max(map(float, torch._foreach_norm(tensors, math.inf)))
    if largest > most:
        raise ValueError(f"it holds {largest:.3g}, and numbers beyond {most:g} make the average overflow")


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield all tensors of an upload, at any depth."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, dict | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(part)
