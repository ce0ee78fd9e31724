"""The commands that show what there is: `fewlabel list`, `fewlabel show`, `fewlabel watch` and `fewlabel bench`."""

import json
import sys
from contextlib import redirect_stdout
from enum import StrEnum
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fewlabel.cli.options import Form, Format, Layout, Tables
from fewlabel.core.errors import BadInput


class Known(StrEnum):
    METHODS = "methods"
    DATASETS = "datasets"
    MODELS = "models"
    PARTITIONS = "partitions"
    VIEWS = "views"
    SETTINGS = "settings"


def list_(
    what: Annotated[Known, Argument(metavar="WHAT", hidden=True)],
    method: Annotated[str, Argument(metavar="[METHOD]", hidden=True)] = "",
    form: Format = Form.TEXT,
) -> None:
    """List what there is to choose from.

    WHAT is methods, datasets, models, partitions, views, or settings with their defaults (those of METHOD).

    Examples:
      fewlabel list methods
      fewlabel list settings rscfed
      fewlabel list models --format json
    """
    from fewlabel.report import terminal as display

    if method and what != Known.SETTINGS:
        raise BadInput(f"only settings are listed for a method, as in `fewlabel list settings {method}`")
    display.show_list(display.known(what, method), form)


def show(
    directory: Annotated[Path, Argument(metavar="RUN", hidden=True)],
    report: Annotated[Path | None, Option("--report", metavar="FILE", help="Write the page with the plots.")] = None,
    form: Tables = Layout.TEXT,
) -> None:
    """Show the result of a run, or of many side by side.

    RUN is its directory, or one that holds those of many; they may be unfinished.

    Examples:
      fewlabel show runs/fedprox-digits-seed0
      fewlabel show runs/compare --format latex
      fewlabel show runs/compare --report report.html
    """
    from fewlabel.report import terminal as display
    from fewlabel.report.comparison import found_in

    found = found_in(directory)
    display.show_result(found, form, found.report(report) if report else None)


def watch(
    directory: Annotated[Path, Argument(metavar="RUN", hidden=True)],
    once: Annotated[bool, Option("--once", help="Print how it stands now; as through a pipe.")] = False,
    form: Format = Form.TEXT,
) -> None:
    """Watch a run, or many, from another terminal.

    RUN is its directory, or one that holds those of many. It ends when they do; Ctrl-C leaves them alone.

    Examples:
      fewlabel watch runs/fedprox-digits-seed0
      fewlabel watch runs/compare --once
    """
    from fewlabel.report.watch import watch

    watch(directory, once, form)


def bench(
    name: Annotated[str, Argument(metavar="[NAME]", hidden=True)] = "",
    full: Annotated[bool, Option("--full", help="All the data where a part is the default: fedavg.")] = False,
    form: Format = Form.TEXT,
) -> None:
    """Measure speed.

    NAME is a file in benchmarks/ of the source tree, and what it finds is JSON; without NAME, they are listed.

    Examples:
      fewlabel bench overhead
      fewlabel bench fedavg --full
    """
    from fewlabel.report import terminal as display

    folder = Path(__file__).parents[2] / "benchmarks"
    files = {path.stem: path for path in sorted(folder.glob("*.py")) if "\ndef main(" in path.read_text()}
    if not files:
        raise BadInput(f"there are no measurements in {folder}: they come with the source tree alone")
    if not name:
        return display.show_list(display.scripts(files), form)
    if name not in files:
        from fewlabel.core.errors import unknown

        raise BadInput(unknown("measurement", name, files))
    sys.path.insert(0, str(folder.parent))  # its worker processes import it by this name
    with redirect_stdout(sys.stderr):
        measure = import_module(f"benchmarks.{name}").main
        if full and "full" not in signature(measure).parameters:
            raise BadInput(f"'{name}' has no part that is left out; --full is for fedavg")
        found = measure(full=True) if full else measure()
    return print(json.dumps(found, indent=1))
