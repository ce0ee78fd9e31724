"""The papers' tables and figures as data: every row is an experiment, with the numbers that the paper prints.

`papers/NAME.toml` is one table or figure. `experiment` holds what all of its experiments share, `groups` what some of
them share, and `rows` the rows. A row names the groups that it `use`s, in their order. Its own settings win. `paper`
holds the printed numbers in percent, with the standard deviation if there is one, by the names of
`fewlabel.core.metrics`. A `note` of the table, a group or a row says what is not the paper's.

A table's `tuned` names a file beside the table's, whose `rows` have the settings that validation chose; a row's own
`tuned` names the one it takes.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, reduce
from pathlib import Path
from typing import Any

from fewlabel.core.errors import BadInput, unknown
from fewlabel.experiment import Experiment, overlay, read
from fewlabel.report.runs import METRICS

FOLDER = Path(__file__).parent  # inside the package, so that a clone and a wheel both have it
METRIC_NAMES = {
    **METRICS,
    "binary_accuracy": "accuracy, binary",
    "binary_sensitivity": "sensitivity, binary",
    "binary_specificity": "specificity, binary",
    "binary_f1": "F1, binary",
    "local_accuracy": "local accuracy",
    "labeled_accuracy": "accuracy on own labels",
    "sent": "numbers sent",
    "bytes_sent": "bytes sent",
}


@dataclass(frozen=True)
class Printed:
    """A number as the paper prints it, in percent."""

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:g}" if self.std is None else f"{self.mean:g} ± {self.std:g}"


@dataclass(frozen=True)
class PaperRow:
    """A row of a table, or a curve or point of a figure."""

    table: str
    name: str
    settings: dict[str, Any]  # of the whole experiment
    paper: dict[str, Printed]
    notes: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.table}/{self.name}"

    @property
    def rounds(self) -> int:
        return int(self.settings.get("rounds", Experiment.rounds))

    def experiment(self, changes: Sequence[str] = ()) -> Experiment:
        """Read the row's experiment, with changes such as `clients.alpha=0.1`."""
        try:
            return read(self.settings, changes)
        except BadInput as error:
            raise BadInput(f"{self.id}: {error}") from None


@dataclass(frozen=True)
class PaperTable:
    """A table or figure of a paper."""

    name: str
    paper: str
    title: str
    rows: tuple[PaperRow, ...]

    @property
    def data(self) -> list[str]:
        """The names of its data sets."""
        return list(dict.fromkeys(row.settings["data"]["name"] for row in self.rows))


@cache
def tables() -> dict[str, PaperTable]:
    """Return all tables and figures by name."""
    return {path.stem: read_table(path) for path in sorted(FOLDER.glob("*.toml"))}


def own_table(path: Path) -> PaperTable:
    """Read a table of your own from a file of the same form, and add it to the others."""
    try:
        table = read_table(path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} cannot be read as a table of experiments: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{path} is no table of experiments, which has paper, title, experiment and rows: {error}"
        ) from None
    tables()[table.name] = table
    return table


def read_table(path: Path) -> PaperTable:
    content = tomllib.loads(path.read_text())
    chosen, note = read_tuned(path.parent / content["tuned"]) if "tuned" in content else ({}, "")
    shared = {**content["experiment"], "note": " ".join(filter(None, (content.get("note"), note)))}

    def row(name: str, own: dict[str, Any]) -> PaperRow:
        groups = (content["groups"][group] for group in own.get("use", ()))
        return read_row(path.stem, name, [shared, *groups, own, chosen.get(own.get("tuned", name), {})])

    every = tuple(row(name, own) for name, own in content["rows"].items())
    return PaperTable(path.stem, content["paper"], content["title"], every)


def read_tuned(path: Path) -> tuple[dict[str, Any], str]:
    """Read the settings that validation chose, by row. If there are none yet, return a note."""
    if not path.exists():
        return {}, "Not tuned yet."
    rows: dict[str, Any] = tomllib.loads(path.read_text())["rows"]
    return rows, ""


def read_row(table: str, name: str, parts: Sequence[dict[str, Any]]) -> PaperRow:
    """Make a row from its parts. Later ones win."""
    for key in (key for part in parts for key in part.get("paper", {})):
        if key not in METRIC_NAMES:
            raise BadInput(f"{table}/{name}: {unknown('metric', key, METRIC_NAMES)}")
    notes = tuple(part["note"] for part in parts if part.get("note"))
    settings: dict[str, Any] = reduce(overlay, parts, {})
    paper = settings.pop("paper", {})
    printed = {key: Printed(*(value if isinstance(value, list) else [value])) for key, value in paper.items()}
    for key in ("use", "note", "tuned"):  # which are no settings
        settings.pop(key, None)
    return PaperRow(table, name, settings, printed, notes)


def select(name: str) -> list[PaperRow]:
    """Return the rows that NAME or NAME/ROW matches. Both may hold * and ?. A NAME that ends in .toml is a file."""
    return [row for table in matching_tables(name) for row in table.rows]


def matching_tables(name: str) -> list[PaperTable]:
    """Return the tables that a name matches, with only those of their rows that it matches."""
    file, ending, row = name.rpartition(".toml")
    if ending:
        table, found, row = name, [own_table(Path(file + ending))], row.removeprefix("/")
    else:
        table, _, row = name.partition("/")
        found = [known for known in tables().values() if fnmatchcase(known.name, table)]
    if not found:
        raise BadInput(unknown("table or figure", table, tables()))
    parts = [(known, tuple(one for one in known.rows if fnmatchcase(one.name, row or "*"))) for known in found]
    if not any(rows for _, rows in parts):
        raise BadInput(unknown(f"row in {table} named", row, [one.name for known in found for one in known.rows]))
    return [replace(known, rows=rows) for known, rows in parts if rows]
