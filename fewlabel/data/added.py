"""Labels that people added to those of a data set or a site: a table of their answers, and which label counts.

The table has a column for the image and one for the label. If it says who answered, the last row of a person about an
image is that person's answer. An empty label is none: the person could not tell, skipped the image, or took the answer
back. If people gave different labels, none of them counts until they agree.
"""

import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.own.layouts import column, file_of, rows_of
from fewlabel.data.own.listing import UNLABELED, counted, last_answers

if TYPE_CHECKING:
    from fewlabel.data.datasets import Split
    from fewlabel.data.partition import Holding

NUMBERED = "train[{}]"  # the name of a training image that no file names


@dataclass(frozen=True)
class Added:
    """Labels to add: places in the training split, and their classes. The notes say what does not count, and why."""

    images: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    labels: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    notes: tuple[str, ...] = ()


def sha256(file: Path | str) -> str:
    """Return the hash of a table of labels, as `sha256sum` prints it."""
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except FileNotFoundError:
        raise BadInput(f"there is no {file}; labels.file is a table of labels, as `fewlabel label` writes it") from None
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror or error}") from None


def check_unchanged(file: str | None, expected: str | None) -> str | None:
    """Return the same file, or refuse a table that is no longer what an experiment was written with."""
    if file is not None and expected is not None and (found := sha256(file)) != expected:
        raise BadInput(
            f"{file} has changed: labels.sha256 is {expected[:12]}… in the experiment, and the file has {found[:12]}…; "
            "restore it, or take it as it is now by labels.sha256 = 'none'"
        )
    return file


def read_answers(file: Path) -> dict[str, list[str]]:
    """Return for each image in a table the different labels that people gave it, in the order of the images."""
    (_, head), *rows = rows_of(file) or [(1, [])]
    names = [name.strip() for name in head]
    image, label = (column(file, role, names, None, "the column of the ") for role in ("image", "label"))
    who = names.index("who") if "who" in names else None
    given = []
    for line, row in rows:
        if len(row) < len(names):
            raise BadInput(f"line {line} of {file} has {len(row)} fields for {len(names)} columns; complete it")
        assert image is not None
        assert label is not None
        text = row[label].strip()
        person = str(line) if who is None else row[who].strip()
        given.append((row[image].strip(), person, "" if text.lower() in UNLABELED else text))
    return last_answers(given)


def matched(
    file: Path | str,
    train: "Split",
    classes: Sequence[str],
    data: Path | str | None,
    sure: Iterable[int] = (),
    folder: Path | None = None,
) -> Added:
    """Find the images of a training split that a table of labels names, by their paths from the table or the data.

    Images in `sure` keep the label that they have. `folder` is where the table belongs, if the file is a copy of it.
    """
    file, roots = Path(file), [folder or Path(file).parent]
    if data is not None:
        roots.append(Path(data) if Path(data).is_dir() else Path(data).parent)
    place = {str(name): row for row, name in enumerate(train.names)} if train.names is not None else None
    number, known = {name: row for row, name in enumerate(classes)}, set(sure)
    found, disagreed, elsewhere, again = dict[int, int](), list[str](), list[str](), 0
    answers = read_answers(file)
    for name, given in answers.items():
        if wrong := [label for label in given if label not in number]:
            there = ", ".join(classes)
            raise BadInput(f"{file} says that {name} is '{wrong[0]}', which is no class; there are {there}")
        at = numbered(name, len(train)) if place is None else find(name, place, roots)
        if at is None:
            elsewhere.append(name)
        elif len(given) > 1:
            disagreed.append(name)
        elif given and at in known:
            again += 1
        elif given:
            found[at] = number[given[0]]
    if answers and len(elsewhere) == len(answers):
        raise BadInput(
            f"{file} names no image that this experiment trains on, such as {elsewhere[0]}; paths are relative to it"
        )
    images = np.array(sorted(found), np.int64)
    notes = []
    if disagreed:
        what = counted(len(disagreed), "image")
        notes.append(
            f"people disagree about {what} in {file}, such as {disagreed[0]}: no label counts until they agree"
        )
    if elsewhere:
        what = counted(len(elsewhere), "image")
        notes.append(f"{file} names {what} that nobody here trains on, such as {elsewhere[0]}")
    if again:
        notes.append(f"{counted(again, 'image')} in {file} had a label before, which stays")
    return Added(images, np.array([found[at] for at in images.tolist()], np.int64), tuple(notes))


def numbered(name: str, images: int) -> int | None:
    """Return the place of a training image that has no file, from a name such as train[12]."""
    written = re.fullmatch(r"train\[(\d{1,12})\]", name)
    return int(written[1]) if written and int(written[1]) < images else None


def find(name: str, place: Mapping[str, int], roots: Iterable[Path]) -> int | None:
    """Return the place of an image by its name in an npz, or by its path from one of these folders."""
    whole = (os.path.abspath(file_of(folder, name, "csv")) for folder in roots)
    return next((place[one] for one in (name, *whole) if one in place), None)


def name_of(train: "Split", image: int, file: Path) -> str:
    """Return what a table of labels in `file` calls a training image."""
    if train.names is None:
        return NUMBERED.format(image)
    return path_from(file, str(train.names[image]))


def path_from(file: Path, name: str) -> str:
    """Return an image's path as a table writes it: from the table's folder if it lies below, or else from the root."""
    folder = os.path.abspath(file.parent)
    inside = os.path.isabs(name) and os.path.commonpath([folder, name]) == folder
    return os.path.relpath(name, folder) if inside else name


def overlaid(labels: np.ndarray, *changes: np.ndarray) -> np.ndarray:
    """Return labels with some changed: each change has a row of images and a row of their labels."""
    labels = labels.copy()
    for images, new in changes:
        labels[images] = new
    return labels


def with_labels(holding: "Holding", images: np.ndarray) -> "Holding":
    """Return a client's images after labels were added to some. Their order does not depend on the table's."""
    new = np.isin(holding.unlabeled, images)
    return type(holding)(np.concatenate([holding.labeled, holding.unlabeled[new]]), holding.unlabeled[~new])
