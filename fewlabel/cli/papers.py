"""The command `fewlabel reproduce`: rows of the papers' tables, ours beside theirs."""

import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from fewlabel.cli.options import (
    RUNS,
    Changes,
    DataDir,
    Device,
    Form,
    Format,
    Out,
    Seeds,
    Workers,
    changes_of,
    seeds_axis,
)
from fewlabel.cli.run import run_all
from fewlabel.core.errors import BadInput
from fewlabel.core.schema import plain
from fewlabel.engine.record import is_finished
from fewlabel.experiment import Experiment
from fewlabel.papers.beside import Reproduction
from fewlabel.papers.reproduce import as_file, experiments_of, list_tables, plan
from fewlabel.papers.tables import PaperRow, select


def reproduce(
    name: Annotated[str, Argument(metavar="NAME[/ROW]", hidden=True)] = "",
    listing: Annotated[bool, Option("--list", help="List the tables, or the rows of NAME, and their data.")] = False,
    printing: Annotated[bool, Option("--print", help="Print a row as a file for `fewlabel run` instead.")] = False,
    dry: Annotated[bool, Option("--dry-run", help="Tell what would run and how long it takes, and stop.")] = False,
    rounds: Annotated[int | None, Option("--rounds", metavar="N", min=1, help="Instead of the paper's rounds.")] = None,
    seeds: Seeds = None,
    changes: Changes = None,
    workers: Workers = None,
    device: Device = None,
    out: Out = None,
    data_dir: DataDir = None,
    form: Format = Form.TEXT,
) -> None:
    """Run rows of the papers' tables; show ours beside theirs.

    NAME is a table or figure, ROW one of its rows. Both may hold * and ?.
    Rows whose data are not on this machine are left out. First you are told
    what will run, about how long it takes, and how near to the paper's number
    ours should come. Run the same command again to go on: finished runs are
    kept, others are resumed.

    Examples:
      fewlabel reproduce --list
      fewlabel reproduce 'rscfed-table1/svhn-*' --dry-run
      fewlabel reproduce 'rscfed-table1/svhn-*' --rounds 50 --seeds 0,1,2
      fewlabel reproduce isofed-table2/pneumonia-isofed-l1u3-g08 --print
    """
    if listing or not name:
        return show_tables(name, form)
    rows, changed, numbers = select(name), changes_of(None, device, changes), seeds_axis(seeds).get("seed")
    if printing:
        return print_row([(row, e) for row in rows for e in experiments_of(row, changed, rounds, numbers)], form)
    root = out or RUNS / "reproduce"
    if dry:
        return show_forecast(
            [(row, experiments_of(row, changed, rounds, numbers)) for row in rows], root, workers, form
        )
    attempts = plan(rows, root, changed, rounds, numbers)
    able = [experiment for attempt in attempts if not attempt.refused for experiment in attempt.experiments]
    if not able:
        raise BadInput("; ".join(Reproduction(attempts).refused()))
    if not all(is_finished(place) for attempt in attempts if not attempt.refused for place in attempt.directories):
        with redirect_stdout(sys.stderr):
            ran = [(attempt.row, attempt.experiments) for attempt in attempts if not attempt.refused]
            show_forecast(ran, root, workers, Form.TEXT)
    failure = run_all(able, root, workers)
    found = Reproduction(attempts, changed)
    page = str(found.report(root))
    print(json.dumps(found.to_json() | {"report": page}, indent=1) if form == "json" else f"{found}\n{page}")
    if failure is not None:
        raise failure
    return None


def show_forecast(
    found: Sequence[tuple[PaperRow, tuple[Experiment, ...]]], root: Path, workers: int | None, form: Form
) -> None:
    """Print what rows will take, and what counts as success."""
    from fewlabel.papers.forecast import forecast, table

    rows = forecast(found, root)
    print(json.dumps({"rows": [row.to_json() for row in rows]}, indent=1) if form == "json" else table(rows, workers))


def print_row(found: Sequence[tuple[PaperRow, Experiment]], form: Form) -> None:
    """Print an experiment of the papers as a file, or as JSON."""
    if len(found) > 1:
        raise BadInput(f"--print prints one row with one seed, and these are {len(found)}, such as {found[0][0].id}")
    row, experiment = found[0]
    print(json.dumps(plain(experiment), indent=1) + "\n" if form == "json" else as_file(row, experiment), end="")


def show_tables(name: str, form: Form) -> None:
    """Print the tables that there are. With a name, print also the rows that it matches."""
    found = list_tables(name or "*")
    if form == "json":
        return print(json.dumps(found, indent=1))
    Console(highlight=False, markup=False, emoji=False).print(overview(found))
    if name:
        print("\n".join(f"{table['name']}/{row}" for table in found for row in table["rows"]))
    else:
        print("`fewlabel reproduce NAME --list` lists a table's rows.")
    return None


def overview(found: Sequence[dict[str, Any]]) -> Table:
    caption = "* not on this machine: `fewlabel data get NAME` gets it, or says how"
    table = Table("name", "what", "rows", "data", box=None, pad_edge=False, caption=caption, caption_justify="left")
    table.columns[0].no_wrap = True
    for one in found:
        data = [name if here else f"{name}*" for name, here in one["data"].items()]
        table.add_row(one["name"], one["title"], str(len(one["rows"])), ", ".join(data))
    return table
