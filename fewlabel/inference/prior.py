"""Priors: how often a model should expect each class, and what that adds to its logits."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fewlabel.core.errors import BadInput
from fewlabel.engine import record
from fewlabel.engine.card import Card
from fewlabel.learn.calibration import shares

Prior = str | Mapping[str, float]  # equal, labels, a file or CLASS=SHARE,…; or shares by class


def with_prior(card: Card, given: Prior | None, run: Path) -> Card:
    """Return the card of a model that expects these classes. Without a prior, it is as it was trained."""
    if given is None:
        return card
    wanted = expected(card, given, run)
    now = card.prior or expected(card, "equal" if card.balanced else "labels", run)
    before = card.shift or [0.0] * len(wanted)
    shift = [old + math.log(b) - math.log(a) for old, a, b in zip(before, now, wanted, strict=True)]
    return replace(card, prior=tuple(wanted), shift=tuple(shift))


def expected(card: Card, given: Prior, run: Path) -> list[float]:
    """Return the share of each class."""
    if given == "equal":
        return [1 / len(card.classes)] * len(card.classes)
    if given == "labels":
        counts = record.read_summary(run).get("labels_per_class") if record.is_run(run) else None
        if counts is None:
            raise BadInput(
                f"{run} does not say how many labels of each class there were (sites keep that to themselves, and so "
                "do models' files and runs of FewLabel 0.1); give the shares yourself, as in --prior cat=0.9,dog=0.1"
            )
        found: list[float] = shares(torch.tensor(counts)).tolist()
        return found
    return by_class(given if isinstance(given, Mapping) else pairs(given), card.classes)


def pairs(text: str) -> dict[str, float]:
    """Read CLASS=SHARE pairs, from a file with a pair in each line or from a text with commas."""
    path = Path(text).expanduser()
    if path.is_file():
        parts = path.read_text().splitlines()
    elif "=" in text:
        parts = text.split(",")
    else:
        raise BadInput(f"--prior is equal, labels, a file, or shares such as cat=0.9,dog=0.1; found '{text}'")
    found = {}
    for part in filter(None, map(str.strip, parts)):
        name, _, share = part.rpartition("=")
        try:
            found[name.strip()] = float(share)
        except ValueError:
            raise BadInput(f"a prior has a number for each class, as in cat=0.9, found '{part}'") from None
    return found


def by_class(given: Mapping[str, float], classes: tuple[str, ...]) -> list[float]:
    """Return the shares in the order of the classes, with a sum of 1."""
    if set(given) != set(classes):
        missing = [f"lacks {name}" for name in classes if name not in given]
        other = [f"has {name}" for name in given if name not in classes]
        raise BadInput(f"the prior {(missing + other)[0]}; it must have the classes {', '.join(classes)}")
    values = [float(given[name]) for name in classes]
    if not all(0 < value < math.inf for value in values):
        raise BadInput(f"the shares of a prior must be numbers above 0, found {', '.join(map(str, values))}")
    return [value / sum(values) for value in values]
