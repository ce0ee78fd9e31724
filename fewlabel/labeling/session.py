"""One person labels one batch: what is shown next, what an answer writes, where people disagree. No HTTP here."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from fewlabel.core.errors import BadInput
from fewlabel.data import pictures
from fewlabel.data.own.listing import Listing
from fewlabel.data.pictures import Values
from fewlabel.labeling.answers import (
    CANNOT_TELL,
    LABELED,
    SKIPPED,
    UNDONE,
    Answer,
    Answers,
    disagreements,
    now,
    standing,
)
from fewlabel.labeling.batches import Batch

KEYS = "1234567890abdefghjklnpqrtvwxy"  # of classes, in their order; c, m, s, u and z are other commands
LONGEST = 36_000.0  # seconds
FEW = 5  # labels, which may be of one class by chance


def keys_of(classes: Sequence[str]) -> list[str]:
    """Return a key for each class: its own name if that is one of the keys, or else the next that is free."""
    named = [name if name and name in tuple(KEYS) else "" for name in classes]
    free = iter([key for key in KEYS if key not in named])
    return [key or next(free, "") for key in named]


def advice(counts: Mapping[str, int], classes: int) -> str:
    """Say so if all labels of a batch are of one class, because that is a wrong key or leaves other classes out."""
    if len(counts) != 1 or classes == 1 or (many := sum(counts.values())) < FEW:
        return ""
    return (
        f"All {many} labels are '{next(iter(counts))}'. If that is right, label another batch: the other classes "
        "need labels, too."
    )


@dataclass
class Session:
    """A person, a batch, and the answers so far."""

    listing: Listing
    batch: Batch
    answers: Answers
    who: str

    def __post_init__(self) -> None:
        self.paths = [self.answers.path_of(name) for name in self.batch.images]
        self.values = lru_cache(maxsize=4)(self._values)  # a change of contrast asks for the same image again

    def state(self) -> dict[str, Any]:
        """Describe where this person stands, for the page."""
        found = standing(self.answers.read())
        own = [found.get(path, {}).get(self.who) for path in self.paths]
        rows = {path: row for row, path in enumerate(self.paths)}
        unseen = [row for row, one in enumerate(own) if one is None]
        counts = Counter(one.label for one in own if one and one.label)
        return {
            "who": self.who,
            "file": str(self.answers.file),
            "classes": [
                {"name": name, "key": key, "count": counts[name]}
                for name, key in zip(self.batch.classes, keys_of(self.batch.classes), strict=True)
            ],
            "total": len(own),
            "done": len(own) - len(unseen),
            "current": unseen[0] if unseen else None,
            "skipped": [row for row, one in enumerate(own) if one and one.note == SKIPPED],
            "advice": advice(counts, len(self.batch.classes)),
            "cannot_tell": sum(one is not None and one.note == CANNOT_TELL for one in own),
            "undo": any(own),
            "opinion": any(map(len, self.batch.p)),
            "people": sorted({who for path in self.paths for who in found.get(path, {})}),
            "disagreements": [
                {"image": rows[path], "path": path, "labels": labels}
                for path, labels in disagreements({path: found.get(path, {}) for path in self.paths}).items()
            ],
        }

    def answer(self, image: int, note: str, label: str, seconds: float) -> None:
        """Write an answer. When this returns, it is on disk."""
        if note not in (LABELED, CANNOT_TELL, SKIPPED) or bool(label) == bool(note):
            raise BadInput("an answer is a class, 'cannot tell' or 'skipped'")
        if label and label not in self.batch.classes:
            raise BadInput(f"'{label}' is no class; there are {', '.join(self.batch.classes)}")
        taken = f"{min(max(seconds, 0.0), LONGEST):.1f}"
        self.answers.append(Answer(self.paths[self.checked(image)], label, self.who, now(), taken, note))

    def undo(self) -> int:
        """Take this person's last answer in the batch back, and return its image."""
        rows = self.answers.read()
        found = standing(rows)
        for last in reversed(rows):
            if last.who == self.who and last.path in self.paths and found[last.path].get(self.who) is last:
                self.answers.append(Answer(last.path, "", self.who, now(), "", UNDONE))
                return self.paths.index(last.path)
        raise BadInput("there is nothing to take back")

    def opinion(self, image: int) -> list[dict[str, Any]]:
        """Return what the model says about an image, the most likely class first."""
        pairs = zip(self.batch.classes, self.batch.p[self.checked(image)], strict=True)
        return [{"name": name, "p": p} for name, p in sorted(pairs, key=lambda pair: -pair[1])]

    def about(self, image: int) -> dict[str, Any]:
        """Return what the page must know to show an image: its size, and the contrast that it begins with."""
        found = self.values(self.checked(image))
        low, high = float(found.values.min()), float(found.values.max())
        deep = found.values.dtype != np.uint8
        return {
            "path": self.paths[image],
            "height": found.values.shape[0],
            "width": found.values.shape[1],
            "low": found.low,
            "high": found.high,
            "least": min(low, found.low) if deep else 0.0,
            "most": max(high, found.high) if deep else 255.0,
            "deep": deep,
        }

    def checked(self, image: int) -> int:
        if not 0 <= image < len(self.paths):
            raise BadInput(f"there is no image {image} in this batch of {len(self.paths)}")
        return image

    def _values(self, image: int) -> Values:
        name = self.batch.images[image]
        if self.listing.kind != "npz":
            return pictures.look(Path(name))
        key, _, row = name.removesuffix("]").partition("[")
        with np.load(self.listing.path, allow_pickle=False) as arrays:
            return Values(np.asarray(arrays[key][int(row)], np.uint8))
