"""What a site can tell of weights that it is sent: whether they are numbers, and far larger than those before.

It cannot tell whether they were trained or made up: weights as large as honest ones can be made to show single images
in what is trained from them. So a site refuses what is no number, and only says so if weights are far larger than
before. To refuse these, too, would stop no careful coordinator, but let one member end any run by a huge update. The
hash of what was sent is kept (`workload`): in an honest run it is the same at every site.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from fewlabel.core import tree, wire
from fewlabel.core.federation import Model
from fewlabel.core.tree import Tree
from fewlabel.core.updates import check_size, is_tree
from fewlabel.deploy.messages import Refused

FACTOR = 10.0  # times the norm before that is worth a line
LEAST = 1.0  # norm that weights may always have: some networks begin with zeros


@dataclass(frozen=True)
class Received:
    """The weights in a message."""

    norm: float  # of the parameters, in the largest model
    sha256: str  # of all models, the same for the same numbers; empty if there is none


def received(kind: Any, message: bytes, statistics: bytes | None = None) -> Received:
    """Return what is to know about the weights of a message, and about BatchNorm's statistics that came with it.

    Refuse numbers that no training gives.
    """
    try:
        found = wire.unpack(kind, message, finite=True)
        if statistics is not None:
            found = (found, wire.unpack(Model, statistics, finite=True))
        check_size(found)
    except (wire.WireError, ValueError) as error:
        raise Refused(f"these weights are not trained here: {error}") from None
    models = list(models_of(found))
    digest = hashlib.sha256()
    for model in models:  # with BatchNorm's statistics, which change what a model says as much as its weights do
        for name in sorted(model):
            digest.update(name.encode() + model[name].cpu().contiguous().numpy().tobytes())
    norms = (tree.norm(tree.parameters(model)) for model in models)
    return Received(max(norms, default=0.0), digest.hexdigest() if models else "")


def oddity(new: Received, before: float) -> str:
    """Say that weights are far larger than those before. The text is empty if they are not."""
    if new.norm <= FACTOR * max(LEAST, before):
        return ""
    times = f"the weights have norm {new.norm:.3g}, and those before had {before:.3g}"
    return f"{times}; a member may have spoilt the average, or the coordinator may have made them up"


def models_of(message: Any) -> Iterator[Tree]:
    """Yield the tensors by name in a message, at any depth."""
    if is_tree(message) and message:
        yield message
    elif is_dataclass(message):
        for field in fields(message):
            yield from models_of(getattr(message, field.name))
    elif isinstance(message, tuple):
        for part in message:
            yield from models_of(part)
