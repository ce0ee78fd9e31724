"""The average behind `fed.mean`, the one way to average what clients upload.

Methods that need each model by itself (`needs_each_model`) take uploads one by one from `fed.run` and weigh them as
their papers say. Every upload, theirs too, has passed `tasks.accept` before.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import is_dataclass, replace
from typing import Any, TypeVar, cast

from fewlabel.core import tree
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import Mean, Reply, weights_field
from fewlabel.core.tree import Tree

U = TypeVar("U")


def average(
    replies: Iterable[Reply[U]],
    old: Tree,
    weight: Callable[[Reply[U]], float],
    kinds: "Kinds | None" = None,
    keep: bool = False,
) -> Mean[U]:
    """Return the weighted mean of the models in a stream of replies. `Federation.mean` explains the arguments."""
    seen: list[Reply[U]] = []

    def models() -> Iterator[tuple[float, bool, Tree]]:
        for reply in replies:
            field = weights_field(cast(type, type(reply.upload))) if is_dataclass(reply.upload) else None
            if field is None:
                raise BadInput(f"{type(reply.upload).__name__} has no field of type Weights, so it has no mean")
            upload: Any = reply.upload
            seen.append(reply if keep else replace(reply, upload=replace(upload, **{field: {}})))
            yield weight(reply), reply.client.num_labeled > 0, getattr(upload, field)

    if kinds is None:
        return Mean(tree.mean(((share, model) for share, _, model in models()), default=old), seen)
    return Mean(by_kind(models(), kinds, old), seen)


# Takes the total weight of each kind of client, and whether that kind has labels. Returns how much its mean counts.
Kinds = Callable[[Sequence[float], Sequence[bool]], Sequence[float]]


def by_kind(stream: Iterable[tuple[float, bool, Tree]], kinds: Kinds, default: Tree) -> Tree:
    """Average a stream of (weight, has labels, model): first within each kind of client, then the two means."""
    weights, means = {True: 0.0, False: 0.0}, {True: default, False: default}
    for weight, kind, model in stream:
        means[kind] = tree.mean([(weights[kind], means[kind]), (weight, model)], default=default)
        weights[kind] += weight
    which = [kind for kind in (True, False) if weights[kind]]
    counted = kinds([weights[kind] for kind in which], which)
    return tree.mean(((weight, means[kind]) for weight, kind in zip(counted, which, strict=True)), default=default)
