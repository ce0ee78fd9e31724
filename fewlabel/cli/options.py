"""The options that commands share, and how they combine with the settings in a file."""

import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from click import Choice
from typer import Argument, Option

from fewlabel.core.errors import BadInput
from fewlabel.core.schema import flatten, parse
from fewlabel.engine import record
from fewlabel.engine.backends import BACKENDS
from fewlabel.experiment import USUAL, load, rooted
from fewlabel.report.trackers import check_trackers

RUNS = Path("runs")
SIMULATOR = next(iter(BACKENDS))


class Form(StrEnum):
    """The forms of output that every command has."""

    TEXT = "text"
    JSON = "json"


class Layout(StrEnum):
    """The forms of output of commands that show tables of results."""

    TEXT = "text"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"


class Kind(StrEnum):
    """What your own images may be."""

    FOLDER = "folder"
    CSV = "csv"
    NPZ = "npz"
    DICOM = "dicom"


def use_data_dir(folder: Path | None) -> None:
    if folder is not None:
        os.environ["FEWLABEL_DATA"] = str(folder)  # worker processes inherit it


def check_track(names: str | None) -> str | None:
    """Refuse unknown trackers before anything is run or written."""
    check_trackers(words(names or ""))
    return names


# Arguments are hidden from the list of options. The command's own text explains them.
File = Annotated[Path | None, Argument(metavar="FILE", hidden=True)]
Method = Annotated[str | None, Option("--method", metavar="NAME", help="Method, or module:Class of your own.")]
Methods = Annotated[str | None, Option("--methods", metavar="A,B", help="Methods, as in `fewlabel list methods`.")]
Data = Annotated[str | None, Option("--data", metavar="NAME", help="Data set, or module:function of your own.")]
Changes = Annotated[
    list[str] | None, Option("--set", metavar="A.B=C", help="Change a setting: clients.alpha=0.1. Repeatable.")
]
Vary = Annotated[list[str] | None, Option("--vary", metavar="A.B=C,D", help="Values of a setting. Repeatable.")]
Seed = Annotated[int | None, Option("--seed", metavar="N", min=0, help="Seed of everything random.")]
Seeds = Annotated[str | None, Option("--seeds", metavar="0,1,2", help="Seeds: one run for each.")]
Workers = Annotated[
    int | None, Option("--workers", metavar="N", min=1, help="Processes. Default: one per core, two per GPU.")
]
Device = Annotated[str | None, Option("--device", metavar="NAME", help="cpu, or cuda for GPUs: as --set device=NAME.")]
Backend = Annotated[
    str,
    Option(
        "--backend",
        metavar="NAME",
        click_type=Choice(list(BACKENDS)),
        help="flower-ray: Flower's simulation on Ray (RAY_ADDRESS), with the same results.",
    ),
]
Out = Annotated[Path | None, Option("--out", metavar="DIR", help="Where results go. Default: below runs/.")]
Resume = Annotated[Path | None, Option("--resume", metavar="DIR", help="A run to go on with, unchanged.")]
DataDir = Annotated[
    Path | None,
    Option(metavar="DIR", exists=True, file_okay=False, callback=use_data_dir, help="Folder with the data sets."),
]
Track = Annotated[
    str | None,
    Option("--track", metavar="A,B", callback=check_track, help="Log rounds to tensorboard, mlflow or both."),
]
Format = Annotated[Form, Option("--format", help="json: exactly one JSON document on stdout.")]
Tables = Annotated[
    Layout, Option("--format", metavar="FORM", help="text, markdown, latex; csv or json with all digits.")
]

Every = Annotated[bool, Option("--all", help="Show every column and note, not only the main ones.")]


def table_of(file: Path | None, grid: bool = False) -> dict[str, Any]:
    """Read the settings in a file, without checking them, with our recipe for what they do not say about training.

    A run's own experiment.toml says everything: one without a recipe trains as printed in the papers.
    """
    if file is None:
        return {"recipe": USUAL}
    try:
        table = tomllib.loads(file.read_text())
    except (OSError, ValueError):
        load(file)  # fails as well, with the right sentence
        raise
    if "grid" in table and not grid:
        raise BadInput(f"{file} has a table [grid], which is for: fewlabel sweep {shlex.quote(str(file))}")
    recorded = file.name == record.EXPERIMENT and (file.parent / record.ROUNDS).exists()
    return rooted(table if recorded else {"recipe": USUAL} | table, file.parent)


def without_method(base: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for any method. The row's name goes with its method."""
    return {key: value for key, value in base.items() if key not in ("method", "name")}


def changes_of(data: str | None, device: str | None, changes: Sequence[str] | None) -> list[str]:
    """Return what --data, --device and --set change, as `a.b=c`."""
    given = {"data.name": data, "device": device}
    return [f"{key}={value}" for key, value in given.items() if value is not None] + list(changes or [])


def words(text: str) -> list[str]:
    """Split a list such as "a, b"."""
    return [word.strip() for word in text.split(",") if word.strip()]


def seeds_axis(text: str | None) -> dict[str, list[Any]]:
    """Read --seeds as an axis of a grid."""
    try:
        return {} if text is None else {"seed": [int(word) for word in text.split(",")]}
    except ValueError:
        raise BadInput(f"--seeds takes whole numbers such as 0,1,2, found '{text}'") from None


def axis(text: str) -> tuple[str, list[Any]]:
    """Read a setting and its values from `a.b=c,d`."""
    key, _, values = text.partition("=")
    if not words(values):
        raise BadInput(f"--vary takes a.b=c,d, found '{text}'")
    listed = parse(f"[{values}]")
    return key.strip(), listed if isinstance(listed, list) else [parse(word) for word in words(values)]


def axes_of(grid: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield the settings of a table [grid], each with its values."""
    for key, values in flatten({"grid": grid}):
        if not isinstance(values, list) or not values:
            raise BadInput(f"{key} must be a list of values, found {values!r}")
        yield key.removeprefix("grid."), values
