"""The average behind `fed.mean`, the one way to average what clients upload.

Methods that need each model by itself (`needs_each_model`) take uploads one by one from `fed.run` and weigh them as
their papers say. Every upload, theirs too, has passed `tasks.accept` before.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

from fewlabel.core import fixed, robust, tree
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import Mean, Reply, weights_field
from fewlabel.core.fixed import Kinds as Kinds
from fewlabel.core.tree import Tree

U = TypeVar("U")
FAR = 3.0  # a model is far from the others if its distance from their middle is so many times the median distance


@dataclass(frozen=True)
class Rule:
    """How the models of one kind of client, labeled or unlabeled, become one."""

    aggregate: robust.Aggregate = "mean"
    trim: float = 0.2  # trimmed-mean: share of values that is left out at each end
    share: float | None = None  # largest share of one client in a mean
    fixed: bool = False  # sums in whole numbers


PLAIN = Rule()


def average(
    replies: Iterable[Reply[U]],
    old: Tree,
    weight: Callable[[Reply[U]], float],
    kinds: Kinds | None = None,
    keep: bool = False,
    rule: Rule = PLAIN,
) -> Mean[U]:
    """Return the weighted mean of the models in a stream of replies. `Federation.mean` explains the arguments.

    `rule` may put something in place of the mean, which is then taken of each kind of client by itself.
    """
    seen: list[Reply[U]] = []
    groups = {True: Group(rule), False: Group(rule)}

    def models() -> Iterator[tuple[float, bool, Tree]]:
        for reply in replies:
            field = weights_field(cast(type, type(reply.upload))) if is_dataclass(reply.upload) else None
            if field is None:
                raise BadInput(f"{type(reply.upload).__name__} has no field of type Weights, so it has no mean")
            upload: Any = reply.upload
            seen.append(reply if keep else replace(reply, upload=replace(upload, **{field: {}})))
            yield weight(reply), reply.client.num_labeled > 0, getattr(upload, field)

    if rule.fixed:
        model = fixed_mean(models(), kinds, old, rule)
    elif rule.aggregate == "mean" and rule.share is None:
        if kinds is None:
            model = tree.mean(((share, model) for share, _, model in models()), default=old)
        else:
            model = by_kind(models(), kinds, old)
    else:
        for share, labeled, found in models():
            groups[labeled].add(share, found, seen[-1].client.id)
        model = joined(groups, kinds, old)
    far = {client: times for group in groups.values() for client, times in group.far.items()}
    return Mean(model, seen, far, partial(average_of_others, seen, rule))


def average_of_others(
    replies: Sequence[Reply[U]],
    rule: Rule,
    pick: Callable[[U], Tree],
    old: Tree,
    weight: Callable[[Reply[U]], float],
) -> Tree:
    """Return the mean of another tree of the uploads, by the rule of the mean of their models."""
    if rule.fixed:
        parts = ((weight(reply), reply.client.num_labeled > 0, pick(reply.upload)) for reply in replies)
        return fixed_mean(parts, None, old, rule)
    if rule.aggregate == "mean" and rule.share is None:
        return tree.mean(((weight(reply), pick(reply.upload)) for reply in replies), default=old)
    groups = {True: Group(rule), False: Group(rule)}
    for reply in replies:
        groups[reply.client.num_labeled > 0].add(weight(reply), pick(reply.upload), reply.client.id)
    return joined(groups, None, old)


def fixed_mean(stream: Iterable[tuple[float, bool, Tree]], kinds: Kinds | None, old: Tree, rule: Rule) -> Tree:
    """Average a stream of (weight, has labels, model) in whole numbers. It holds all models until weights are known."""
    weights, labeled, models = list[float](), list[bool](), list[Tree]()
    for weight, has_labels, model in stream:
        weights.append(weight)
        labeled.append(has_labels)
        models.append(model)
    shares = fixed.shares(weights, labeled, kinds, rule.share)
    return fixed.mean_of(*fixed.total(zip(shares, models, strict=True)), old)


def by_kind(stream: Iterable[tuple[float, bool, Tree]], kinds: Kinds, default: Tree) -> Tree:
    """Average a stream of (weight, has labels, model): first within each kind of client, then the two means."""
    weights, means = {True: 0.0, False: 0.0}, {True: default, False: default}
    for weight, kind, model in stream:
        means[kind] = tree.mean([(weights[kind], means[kind]), (weight, model)], default=default)
        weights[kind] += weight
    which = [kind for kind in (True, False) if weights[kind]]
    counted = kinds([weights[kind] for kind in which], which)
    return tree.mean(((weight, means[kind]) for weight, kind in zip(counted, which, strict=True)), default=default)


@dataclass
class Group:
    """The models of one kind of client, on their way to become one.

    A mean with bounded shares holds the models with the largest weights until all weights are known: as many as can
    have the largest share. It folds the others. Every other rule holds all models.
    """

    rule: Rule
    held: list[tuple[float, int, Tree]] = field(default_factory=list)  # weight, client, model
    folded: Tree = field(default_factory=dict)
    weights: list[float] = field(default_factory=list)  # of what is folded
    far: dict[int, float] = field(default_factory=dict)  # clients far from the others, and how many times the median

    def add(self, weight: float, model: Tree, client: int) -> None:
        """Take a model. One without weight does not count."""
        if not weight:
            return
        self.held.append((weight, client, model))
        if self.rule.aggregate == "mean" and self.rule.share and len(self.held) > int(1 / self.rule.share):
            lightest = min(range(len(self.held)), key=lambda place: self.held[place][0])
            weight, _, model = self.held.pop(lightest)
            self.folded = tree.mean([(sum(self.weights), self.folded), (weight, model)])
            self.weights.append(weight)

    def joined(self) -> tuple[float, Tree]:
        """Return how much these clients count together, and their model."""
        weights, models = [weight for weight, *_ in self.held], [model for *_, model in self.held]
        if self.rule.aggregate == "mean":
            whole = robust.capped([*weights, *self.weights], self.rule.share or 1.0)
            parts = [*zip(whole, models, strict=False), (sum(self.weights), self.folded)]
            return sum(whole), tree.mean(parts)
        middle = robust.aggregated(models, self.rule.aggregate, self.rule.trim)
        apart = [tree.norm(tree.sub(model, middle)) for model in models]
        usual = statistics.median(apart)
        if len(models) > 2 and usual:
            ratios = {client: far / usual for (_, client, _), far in zip(self.held, apart, strict=True)}
            self.far = {client: ratio for client, ratio in ratios.items() if ratio > FAR}
        return robust.total(weights), middle


def joined(groups: dict[bool, Group], kinds: Kinds | None, default: Tree) -> Tree:
    """Return the mean of the labeled clients' model and the others' model."""
    which = [labeled for labeled, group in groups.items() if group.held]
    found = [groups[labeled].joined() for labeled in which]
    weights = [weight for weight, _ in found]
    counted = kinds(weights, which) if kinds else weights
    return tree.mean(zip(counted, (model for _, model in found), strict=True), default=default)
