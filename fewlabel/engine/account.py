"""The account of a round: what it cost and what was seen of it, for its line in rounds.jsonl."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fewlabel.core import coarse, metrics, tree, wire
from fewlabel.core.errors import RunFailed
from fewlabel.core.federation import ClientError, ClientInfo, Model
from fewlabel.core.tree import Tree
from fewlabel.core.updates import check_size
from fewlabel.engine.executor import Outcome

Failure = dict[str, Any]  # of a client in rounds.jsonl: `client`, its number; `task`; `why`, in words
# A client whose update was odd: as in a failure, its `name` if it is known, and what was done: named, clipped, left out
# or excluded.
Suspect = dict[str, Any]
RESERVED = {"round", "seconds", "bytes_up", "bytes_down", "model_bytes", "asked", "replies", "local_accuracy"}
RESERVED |= {"epsilon", "test", "validation", "sites", "pseudo_labels", "pseudo_labels_per_epoch"}
RESERVED |= {"images_labeled", "images_unlabeled", "shown", "failures", "suspects", "seconds_train", "seconds_evaluate"}


def plain(value: Tensor) -> Any:
    """A tensor as numbers that JSON knows, or lists of them."""
    if value.ndim:
        return [plain(part) for part in value]
    return float(value) if math.isfinite(value) else None


@dataclass
class Round:
    """What one round cost and what was seen of it, apart from its metrics."""

    up: int = 0
    down: int = 0
    asked: int = 0
    replies: int = 0
    waited: float = 0.0  # seconds, for clients
    model_bytes: int = 0  # what FedAvg would have sent and received in as many jobs
    images: list[int] = field(default_factory=lambda: [0, 0])  # trained on: labeled, unlabeled
    values: dict[str, Any] = field(default_factory=dict)
    shown: dict[str, list[Tensor]] = field(default_factory=dict)
    audits: dict[str, list[metrics.Audit]] = field(default_factory=dict)
    local_accuracy: list[float] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)  # of clients that gave no reply that can be used
    suspects: list[Suspect] = field(default_factory=list)

    def line(self) -> dict[str, Any]:
        line: dict[str, Any] = {"bytes_up": self.up, "bytes_down": self.down, "model_bytes": self.model_bytes}
        line |= {"asked": self.asked, "replies": self.replies, "seconds_train": self.waited}
        line |= {"images_labeled": self.images[0], "images_unlabeled": self.images[1], **self.values}
        if self.failures:
            line["failures"] = self.failures
        if self.suspects:
            line["suspects"] = self.suspects
        if self.shown:
            line["shown"] = {name: plain(torch.stack(parts).nanmean(0)) for name, parts in self.shown.items()}
        if self.local_accuracy:
            line["local_accuracy"] = sum(self.local_accuracy) / len(self.local_accuracy)
        if self.audits:
            epochs = {
                epoch: metrics.merge_audits(parts)
                for epoch, parts in sorted(self.audits.items(), key=lambda e: int(e[0]))
            }
            scored = {epoch: metrics.audit_metrics(audit) for epoch, audit in epochs.items()}
            line["pseudo_labels"] = list(scored.values())[-1]
            if len(scored) > 1:
                line["pseudo_labels_per_epoch"] = scored
        return line


def answer_of(outcome: Outcome, classes: int) -> coarse.Answer:
    """Unpack and check what a site tells of a model on its test images."""
    if outcome.failure or outcome.payload is None:
        raise RunFailed(outcome.failure or "it sent nothing")
    answer = wire.unpack(coarse.Answer, outcome.payload, finite=True)
    coarse.check(answer, classes)
    return answer


def statistics_of(client: ClientInfo, round: int, data: bytes, network: Tree) -> Tree:
    """Unpack a client's BatchNorm statistics, and check that they fit the network."""
    try:
        found, wanted = wire.unpack(Model, data, finite=True).model, tree.statistics(network)
        wire.check_like(found, wanted)
        tree.same_entries(found, wanted)
        check_size(found)
    except (wire.WireError, ValueError) as error:
        raise ClientError(client.id, "statistics", round, f"its upload is refused: {error}") from None
    return found
