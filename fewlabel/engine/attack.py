"""Attacks of clients in simulations (`clients.attack`): what an attacker sends in place of an honest upload."""

import math
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fewlabel.core import tree, updates, wire
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import ClientInfo
from fewlabel.core.rng import Rng
from fewlabel.core.tasks import Task
from fewlabel.core.tree import Tree
from fewlabel.data.settings import Attack

HUGE = 3e38  # finite, but twice as much is not


def attacked(attack: Attack, task: Task, message: bytes, payload: bytes, rng: Rng) -> bytes:
    """Return the bytes that an attacker sends in place of its honest upload."""
    upload, sent = wire.unpack(task.upload, payload), wire.unpack(task.message, message)
    if attack.kind == "false-counts":
        return wire.pack(with_false_counts(upload, attack.strength), task.upload)
    trees = updates.moved(upload, sent)
    if attack.kind == "scale":
        upload = updates.scaled(upload, sent, {"parameter": attack.strength})
    elif attack.kind == "sign-flip":
        upload = updates.scaled(upload, sent, {"parameter": -attack.strength})
    elif attack.kind == "noise":
        upload = with_noise(upload, sent, attack.strength, rng)
    elif attack.kind in ("not-a-number", "huge"):
        number = math.nan if attack.kind == "not-a-number" else HUGE
        upload = changed(upload, sent, trees, lambda name, old, value: torch.full_like(value, number))
    return wire.pack(upload, task.upload)


def changed(upload: Any, sent: Any, trees: updates.Trees, change: Callable[[str, Tree, Tensor], Tensor]) -> Any:
    """Return an upload with other parameters."""
    found = {
        field: {n: change(n, old, v) if tree.kind(n, v) == "parameter" else v for n, v in new.items()}
        for field, (old, new) in trees.items()
    }
    return updates.with_trees(upload, sent, found)


def with_noise(upload: Any, sent: Any, strength: float, rng: Rng) -> Any:
    """Return an upload with noise in place of its update. Its norm is a multiple of the update's."""
    trees = updates.moved(upload, sent)
    drawn = changed(upload, sent, trees, lambda name, old, value: torch.randn(value.shape, generator=rng.torch))
    noise = updates.moved(drawn, sent)
    whole = math.sqrt(sum(tree.norm(new) ** 2 for _, new in noise.values()))
    factor = strength * updates.norms(trees).get("parameter", 0.0) / (whole or 1.0)
    added = {
        field: {n: old[n] + factor * v if tree.kind(n, v) == "parameter" else v for n, v in new.items()}
        for field, (old, new) in noise.items()
    }
    return updates.with_trees(upload, sent, added)


def with_false_counts(upload: Any, strength: float) -> Any:
    """Return an upload whose whole numbers, which count images, are multiplied."""
    if not is_dataclass(upload) or isinstance(upload, type):
        return upload
    false: dict[str, Any] = {}
    for field in fields(upload):
        value = getattr(upload, field.name)
        if type(value) is int:
            false[field.name] = int(value * strength)
        elif isinstance(value, Tensor) and value.dtype == torch.int64:
            false[field.name] = (value * strength).to(value.dtype)
    return replace(upload, **false)


def claimed(attack: Attack | None, info: ClientInfo) -> ClientInfo:
    """Return how many images a client says that it has."""
    if attack is None or not attack.by(info.id, "false-counts"):
        return info
    return ClientInfo(info.id, int(info.num_labeled * attack.strength), int(info.num_unlabeled * attack.strength))


def check_labels(attack: Attack | None, labeled: set[int]) -> None:
    """Refuse clients that are to flip labels and have none."""
    if attack and attack.kind == "label-flip" and (without := sorted(set(attack.ids) - labeled)):
        raise BadInput(
            f"clients.attack.kind = 'label-flip' needs labels, and client {without[0]} has none; choose other "
            f"clients.attack.ids, such as {sorted(labeled)[:1]}"
        )
