"""Pack a tree as the numbers that differ from another tree: exact to the bit, and small if few of them differ."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fewlabel.core.tree import Tree


@dataclass(frozen=True)
class Packed:
    """A tree's numbers in the order of its names. With a bitmap, only the numbers that it marks."""

    values: Tensor
    marked: Tensor | None = None  # the bitmap as uint8, eight numbers in each, the first in the lowest bit


def pack(new: Tree, old: Tree | None = None) -> Packed:
    """Pack the numbers that differ from `old`, or from zero, and a bitmap of their places. Pack all if that is less."""
    values = _flat(new)
    before = torch.zeros_like(values) if old is None else _flat(old)
    differs = values.view(torch.int32) != before.view(torch.int32)  # -0.0 is not 0.0
    if 4 * int(differs.sum()) + -(-len(values) // 8) >= 4 * len(values):
        return Packed(values)
    return Packed(values[differs], _to_bytes(differs))


def trimmed(new: Tree, old: Tree, zero_below: float, keep_below: float) -> Tree:
    """Set numbers near zero to zero, and numbers that hardly changed to the old ones, so that less is sent.

    NaN is near nothing.
    """
    near = {name: value.masked_fill(value.abs() < zero_below, 0.0) for name, value in new.items()}
    return {name: old[name].where((value - old[name]).abs() < keep_below, value) for name, value in near.items()}


def unpack(packed: Packed, old: Tree) -> Tree:
    """Return the tree. `old` is the tree that it was packed against, or zeros of its shapes."""
    values = _flat(old)
    values[placed(packed, old)] = packed.values
    parts = torch.split(values, [old[name].numel() for name in sorted(old)])
    return {name: part.view(old[name].shape) for name, part in zip(sorted(old), parts, strict=True)}


def placed(packed: Packed, old: Tree) -> Tensor:
    """Return a mask of the tree's numbers that are packed. Raise ValueError if the numbers do not fit the tree."""
    count = sum(value.numel() for value in old.values())
    if packed.values.dtype != torch.float32 or packed.values.ndim != 1:
        raise ValueError(f"packed numbers must be a vector of torch.float32, found {_looks(packed.values)}")
    marked = _marked(packed, count)
    if (expected := int(marked.sum())) != len(packed.values):
        raise ValueError(f"{len(packed.values)} packed numbers do not fit where {expected} are expected")
    return marked


def _marked(packed: Packed, count: int) -> Tensor:
    if packed.marked is None:
        return packed.values.new_ones(count, dtype=torch.bool)
    size = -(-count // 8)
    if packed.marked.dtype != torch.uint8 or packed.marked.shape != (size,):
        raise ValueError(f"the bitmap of {count} numbers must be torch.uint8 [{size}], found {_looks(packed.marked)}")
    bits = _to_bits(packed.marked)
    if bits[count:].any():
        raise ValueError(f"the bitmap marks more than the {count} numbers that there are")
    return bits[:count]


def _looks(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _flat(tree: Tree) -> Tensor:
    return torch.cat([tree[name].detach().flatten() for name in sorted(tree)])


def _to_bytes(bits: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(1, dtype=torch.uint8)


def _to_bits(data: Tensor) -> Tensor:
    return (data[:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1).bool().flatten()
