"""What the command's options are called, and what they mean together with a file's settings."""

import os
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fewlabel.core.errors import BadInput

RUNS = Path("runs")


class Layout(StrEnum):
    TEXT = "text"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"


class Form(StrEnum):
    TEXT = "text"
    JSON = "json"


class Kind(StrEnum):
    FOLDER = "folder"
    CSV = "csv"
    NPZ = "npz"
    DICOM = "dicom"


class Backend(StrEnum):
    SIMULATOR = "simulator"
    FLOWER_RAY = "flower-ray"


def use_data_dir(folder: Path | None) -> None:
    if folder is not None:
        os.environ["FEWLABEL_DATA"] = str(folder)  # worker processes inherit it


def check_track(names: str | None) -> str | None:
    """Before anything is run or written."""
    if names is not None:
        from fewlabel.report.trackers import checked

        checked(names)
    return names


# Arguments are hidden from the list of options, and told in the command's own words.
File = Annotated[Path | None, Argument(metavar="FILE", hidden=True)]
Method = Annotated[str | None, Option("--method", metavar="NAME", help="Method, or module:Class of your own.")]
Methods = Annotated[str | None, Option("--methods", metavar="A,B", help="Methods, as in `fewlabel list methods`.")]
Data = Annotated[str | None, Option("--data", metavar="NAME", help="Data set, or module:function of your own.")]
Changes = Annotated[
    list[str] | None, Option("--set", metavar="A.B=C", help="A setting, as clients.alpha=0.1; repeatable.")
]
Vary = Annotated[list[str] | None, Option("--vary", metavar="A.B=C,D", help="A setting and its values; repeatable.")]
Seed = Annotated[int | None, Option("--seed", metavar="N", min=0, help="All that is random follows from it.")]
Seeds = Annotated[str | None, Option("--seeds", metavar="0,1,2", help="A run for each of them.")]
Workers = Annotated[
    int | None, Option("--workers", metavar="N", min=1, help="Processes; by default one per core, two per GPU.")
]
Device = Annotated[str | None, Option("--device", metavar="NAME", help="cpu, or cuda for GPUs: as --set device=NAME.")]
Engine = Annotated[
    Backend,
    Option("--backend", metavar="NAME", help="flower-ray: by Flower's simulation on Ray (RAY_ADDRESS), same bits."),
]
Out = Annotated[Path | None, Option("--out", metavar="DIR", help="Where results go; by default below runs/.")]
Resume = Annotated[Path | None, Option("--resume", metavar="DIR", help="The run to go on with, as it is.")]
DataDir = Annotated[
    Path | None, Option(metavar="DIR", exists=True, file_okay=False, callback=use_data_dir, help="Where data are read.")
]
Track = Annotated[
    str | None,
    Option("--track", metavar="A,B", callback=check_track, help="Rounds for tensorboard, mlflow, or both, too."),
]
Format = Annotated[Form, Option("--format", help="json: exactly one JSON document on stdout.")]
Tables = Annotated[
    Layout, Option("--format", metavar="FORM", help="text, markdown, latex; csv or json with all numbers, unrounded.")
]


def table_of(file: Path | None, grid: bool = False) -> dict[str, Any]:
    """The settings in a file, not yet checked."""
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text())
    except (OSError, ValueError):
        from fewlabel.experiment import load

        load(file)  # fails as well, with the right sentence
        raise
    if "grid" in table and not grid:
        raise BadInput(f"{file} has a table [grid], which is for: fewlabel sweep {shlex.quote(str(file))}")
    from fewlabel.experiment import rooted

    return rooted(table, file.parent)


def method_of(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A method by name, with the file's settings if they are for it, or for whichever: a table without a name."""
    given = base.get("method")
    own = isinstance(given, dict) and given.get("name", name) == name == base.get("name", name)
    return {**given, "name": name} if own and given else {"name": name}


def without_method(base: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for any method; a row's name goes with the method that it named."""
    return {key: value for key, value in base.items() if key not in ("method", "name")}


def settings(data: str | None, device: str | None, changes: Sequence[str] | None) -> list[str]:
    given = {"data.name": data, "device": device}
    return [f"{key}={value}" for key, value in given.items() if value is not None] + list(changes or [])


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def seeds_axis(text: str | None) -> dict[str, list[Any]]:
    try:
        return {} if text is None else {"seed": [int(word) for word in text.split(",")]}
    except ValueError:
        raise BadInput(f"--seeds takes whole numbers such as 0,1,2, found '{text}'") from None


def axis(text: str) -> tuple[str, list[Any]]:
    """A setting and its values from `a.b=c,d`."""
    from fewlabel.core.schema import parse

    key, _, values = text.partition("=")
    if not words(values):
        raise BadInput(f"--vary takes a.b=c,d, found '{text}'")
    listed = parse(f"[{values}]")
    return key.strip(), listed if isinstance(listed, list) else [parse(word) for word in words(values)]


def axes_of(grid: Any, above: str = "grid") -> Iterator[tuple[str, list[Any]]]:
    """Dotted settings and their values from the tables of a grid."""
    if isinstance(grid, list) and grid:
        yield above.removeprefix("grid."), grid
    elif isinstance(grid, dict):
        for key, value in grid.items():
            yield from axes_of(value, f"{above}.{key}")
    else:
        raise BadInput(f"{above} must be a list of values, found {grid!r}")
