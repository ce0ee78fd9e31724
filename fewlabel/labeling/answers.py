"""The table of people's answers: each is on disk before the next image is shown, and no row is ever changed.

`fewlabel.data.added` says which answer counts. This module writes the table, and tells where a person stands.
"""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.added import path_from

LABELED, CANNOT_TELL, SKIPPED, UNDONE = "", "cannot tell", "skipped", "undone"  # the notes beside answers
DONE = (LABELED, CANNOT_TELL)


@dataclass(frozen=True)
class Answer:
    """A row of the table."""

    path: str  # of the image, from the table's folder if it lies below
    label: str  # empty if the note says why
    who: str
    when: str = ""  # UTC
    seconds: str = ""  # from showing the image to the answer
    note: str = LABELED


COLUMNS = tuple(field.name for field in fields(Answer))


class Answers:
    """The answers in a file. Several programs may append to it at the same time."""

    def __init__(self, file: Path) -> None:
        self.file = file.absolute()
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a+b") as opened:
                storage.lock(opened)
                self._begin(opened)
                opened.flush()
                os.fsync(opened.fileno())
        except OSError as error:
            raise StorageError(f"{file} cannot be written: {error.strerror or error}; choose another --out") from None

    def _begin(self, opened: io.BufferedRandom) -> None:
        """Write the head of a new table. Cut off a row that a power cut or a full disk left unfinished.

        Nobody relies on such a row, and the next one would be lost with it. Another file than a table stays as it is.
        """
        opened.seek(0)
        content, head = opened.read(), as_line(COLUMNS)
        first = content.decode("utf-8-sig", "replace").partition("\n")[0].strip()
        if not head.startswith(content) and tuple(first.split(",")) != COLUMNS:
            raise BadInput(f"{self.file} is not a table of answers: its first line is not {','.join(COLUMNS)}")
        if not content.endswith(b"\n"):
            opened.truncate(content.rfind(b"\n") + 1)
        if b"\n" not in content:
            opened.write(head)

    def append(self, answer: Answer) -> None:
        """Write an answer, and return when it would survive a power cut."""
        try:
            with self.file.open("a+b") as opened:
                storage.lock(opened)
                self._begin(opened)
                opened.write(as_line(astuple(answer)))
                opened.flush()
                os.fsync(opened.fileno())
        except OSError as error:
            raise StorageError(f"{self.file} cannot be written: {error.strerror or error}; make room") from None

    def read(self) -> list[Answer]:
        """Return all rows, the first first."""
        try:
            text = self.file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StorageError(f"{self.file} cannot be read: {error}") from None
        _, *rows = csv.reader(io.StringIO(text, newline=""))
        return [Answer(*row) for row in rows if len(row) == len(COLUMNS)]

    def path_of(self, name: str) -> str:
        """Return how the table writes an image."""
        return path_from(self.file, name)


def as_line(values: Sequence[str]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(values)
    return text.getvalue().encode()


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def standing(answers: Sequence[Answer]) -> dict[str, dict[str, Answer]]:
    """Return each person's last answer about each image, without those that were taken back: image -> person."""
    found: dict[str, dict[str, Answer]] = {}
    for answer in answers:
        about = found.setdefault(answer.path, {})
        about.pop(answer.who, None)
        if answer.note != UNDONE:
            about[answer.who] = answer
    return found


def disagreements(found: Mapping[str, Mapping[str, Answer]]) -> dict[str, dict[str, str]]:
    """Return the images to which people gave different labels, with the label of each person."""
    labels = {image: {who: one.label for who, one in each.items() if one.label} for image, each in found.items()}
    return {image: each for image, each in labels.items() if len(set(each.values())) > 1}


def agreed(found: Mapping[str, Mapping[str, Answer]]) -> dict[str, str]:
    """Return the images with a label that nobody contradicts."""
    labels = {image: {one.label for one in each.values() if one.label} for image, each in found.items()}
    return {image: min(each) for image, each in labels.items() if len(each) == 1}
