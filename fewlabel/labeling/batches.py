"""Batches: which images people label together. They are kept beside the answers, so that a batch outlives a program.

A person goes on with the first batch of a model that they have not finished. So two people label the same images, one
after the other or at the same time, whoever began.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fewlabel.core import schema, storage
from fewlabel.core.errors import BadInput, StorageError


@dataclass(frozen=True)
class Batch:
    """Images to label, the most useful first."""

    model: str  # what chose them: a hash of the model, or nothing
    strategy: str
    classes: tuple[str, ...]
    images: tuple[str, ...]  # their names: paths, or names in an npz
    p: tuple[tuple[float, ...], ...]  # what the model says about each


def file_of(answers: Path) -> Path:
    return answers.with_name(f"{answers.stem}.batches.json")


def load(answers: Path) -> list[Batch]:
    """Read the batches beside a table of answers."""
    path = file_of(answers)
    try:
        found: list[dict[str, Any]] = json.loads(path.read_text())["batches"]
        return [schema.read(Batch, entry) for entry in found]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, KeyError, TypeError, BadInput) as error:
        raise StorageError(f"{path} cannot be read: {error}; move it away, and images are chosen anew") from None


def add(answers: Path, batch: Batch) -> None:
    """Keep a new batch. Two programs that choose at the same time both keep theirs."""
    with storage.locked(file_of(answers).with_suffix(".lock")):
        whole = {"batches": [asdict(one) for one in (*load(answers), batch)]}
        storage.write(file_of(answers), json.dumps(whole, indent=1).encode())


def to_go_on(batches: list[Batch], model: str, strategy: str, seen: Callable[[str], bool]) -> Batch | None:
    """Return the first batch of a model and a strategy with images that a person has not seen."""
    ours = (batch for batch in batches if (batch.model, batch.strategy) == (model, strategy))
    return next((batch for batch in ours if not all(map(seen, batch.images))), None)
