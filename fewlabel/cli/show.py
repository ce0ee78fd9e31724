"""The commands that show what there is: `fewlabel list`, `fewlabel show`, `fewlabel watch` and `fewlabel bench`."""

import json
import sys
from contextlib import redirect_stdout
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fewlabel.cli.options import Every, Form, Format, Layout, Tables
from fewlabel.core.errors import BadInput, unknown
from fewlabel.report import terminal
from fewlabel.report.comparison import open_results
from fewlabel.report.live import SiteState, serve_page
from fewlabel.report.watch import watch_runs


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
    """List the names that you can choose from.

    WHAT is methods, datasets, models, partitions, views or settings. With
    METHOD, list the settings of that method.

    Examples:
      fewlabel list methods
      fewlabel list settings rscfed
      fewlabel list models --format json
    """
    if method and what != Known.SETTINGS:
        raise BadInput(f"only settings are listed for a method, as in `fewlabel list settings {method}`")
    terminal.show_list(terminal.known(what, method), form)


def show(
    directory: Annotated[Path, Argument(metavar="RUN", hidden=True)],
    report: Annotated[Path | None, Option("--report", metavar="FILE", help="Write a page with the plots.")] = None,
    form: Tables = Layout.TEXT,
    every: Every = False,
) -> None:
    """Show the result of a run, or compare many runs.

    RUN is a run's directory, or one that holds many runs. Unfinished runs show
    what they have so far.

    Examples:
      fewlabel show runs/fedprox-digits-seed0
      fewlabel show runs/compare --format latex
      fewlabel show runs/compare --report report.html
    """
    found = open_results(directory)
    terminal.show_result(found, form, found.report(report) if report else None, every)


def watch(
    directory: Annotated[Path, Argument(metavar="RUN", hidden=True)],
    once: Annotated[bool, Option("--once", help="Print the progress once and exit.")] = False,
    web: Annotated[bool, Option("--web", help="Show it as a page in a browser on this machine.")] = False,
    form: Format = Form.TEXT,
) -> None:
    """Watch a run, or many, from another terminal or in a browser.

    RUN is a run's directory, or one that holds many runs. Watching ends when
    the runs end. Ctrl-C ends watching and leaves the runs alone.

    With --web, the command prints a secret address and serves a page there
    until Ctrl-C: rounds, curves, sites, and who is waited for. Other machines
    cannot reach it, and it changes nothing.

    Examples:
      fewlabel watch runs/fedprox-digits-seed0
      fewlabel watch runs/compare --once
      fewlabel watch runs/compare --web
    """
    if not web:
        return watch_runs(directory, once, form)
    if once or form != Form.TEXT:
        raise BadInput("--web serves a page, so it goes with neither --once nor --format; leave those out")
    return serve_page(directory, sites_of)


def sites_of(run: Path) -> list[SiteState]:
    """Return the sites of a run over sites."""
    from fewlabel.deploy.site_states import site_states

    return site_states(run)


def bench(
    name: Annotated[str, Argument(metavar="[NAME]", hidden=True)] = "",
    form: Format = Form.TEXT,
) -> None:
    """Measure speed.

    NAME is a file in benchmarks/ of the source tree. Its result is JSON.
    Without NAME, list the files.

    Examples:
      fewlabel bench
      fewlabel bench overhead
    """
    folder = Path(__file__).parents[2] / "benchmarks"
    files = {path.stem: path for path in sorted(folder.glob("*.py")) if "\ndef main(" in path.read_text()}
    if not files:
        raise BadInput(f"there are no measurements in {folder}; they come only with the source tree")
    if not name:
        return terminal.show_list(terminal.scripts(files), form)
    if name not in files:
        raise BadInput(unknown("measurement", name, files))
    sys.path.insert(0, str(folder.parent))  # its worker processes import it by this name
    with redirect_stdout(sys.stderr):
        found = import_module(f"benchmarks.{name}").main()
    return print(json.dumps(found, indent=1))
