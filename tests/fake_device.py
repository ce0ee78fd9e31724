"""A device for machines without one: its tensors say that they are on `meta`, and hold their numbers on the CPU.

What would fail on a GPU fails here: an operation on tensors of both places, other than a copy, an index on the CPU or
a single number from there; a generator of the CPU; and what PyTorch has for the CPU alone. All else gives the CPU's
bits.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

ELSEWHERE = torch.device("meta")
aten = torch.ops.aten
COPIES = (aten.copy_, aten._to_copy, aten._foreach_copy_)
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
BY_NUMBER = (aten._foreach_mul_, aten.masked_fill, aten.masked_fill_)


class Far(Tensor):
    """A tensor elsewhere."""

    near: Tensor
    is_meta = False  # it does have numbers

    @staticmethod
    def __new__(cls, near: Tensor) -> "Far":
        far: Far = Tensor._make_wrapper_subclass(
            cls,
            near.shape,
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            device=ELSEWHERE,
        )
        far.near = near
        return far

    __torch_function__ = torch._C._disabled_torch_function_impl

    def tolist(self) -> Any:
        return self.near.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"Far({self.near!r})"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return act(operation, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """While it is on, tensors can be made and put there."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return act(operation, args, kwargs or {})


def leaves(values: Iterable[Any]) -> Iterator[Any]:
    """What is in lists and tuples; PyTorch's `tree_leaves` knows of more, and takes longer than the operations."""
    for one in values:
        if isinstance(one, list | tuple):
            yield from leaves(one)
        else:
            yield one


def mapped(change: Callable[[Any], Any], kind: type, value: Any) -> Any:
    """Change what is of a kind, in lists and tuples, too."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([mapped(change, kind, one) for one in value])
    return value


def act(operation: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    there = any(isinstance(one, Far) for one in leaves((*args, *kwargs.values())))
    if there:
        refuse(operation, args, kwargs)
    wanted = kwargs.get("device")
    to = there if wanted is None else torch.device(wanted) == ELSEWHERE
    if not there and not to:
        return operation(*args, **kwargs)
    near_args = mapped(lambda far: far.near, Far, args)
    near_kwargs = {name: mapped(lambda far: far.near, Far, value) for name, value in kwargs.items()}
    if wanted is not None:
        near_kwargs["device"] = torch.device("cpu")
    result = operation(*near_args, **near_kwargs)
    if operation.overloadpacket is aten._to_copy and to != there:
        result = result.clone() if to else result  # a copy, although on the CPU it is none
    if to:
        result = mapped(lambda near: near if isinstance(near, Far) else Far(near), Tensor, result)
    return return_and_correct_aliasing(operation, args, kwargs, result) if there and to else result


def refuse(operation: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Raises where a GPU would."""
    packet = operation.overloadpacket
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{operation} elsewhere with a generator of the CPU")
    if packet in (aten._upsample_bilinear2d_aa,) and args[0].dtype == torch.uint8:
        raise NotImplementedError(f"{operation} of uint8 is for the CPU alone")
    if packet in COPIES:
        return
    indexed = packet in INDEXED and isinstance(args[0], Far)
    looked_at = (args[0], *args[2:]) if indexed else (*args, *kwargs.values())
    numbers = torch.Tag.pointwise in operation.tags or packet in (*INDEXED, *BY_NUMBER)
    for one in leaves(looked_at):
        if isinstance(one, Tensor) and not isinstance(one, Far) and (one.ndim or not numbers):
            raise RuntimeError(f"{operation} on tensors here and elsewhere, the one here of {list(one.shape)}")
