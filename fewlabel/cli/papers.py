"""The command `fewlabel reproduce`: rows of the papers' tables, ours beside theirs."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from fewlabel.cli.options import RUNS, Changes, DataDir, Device, Form, Format, Out, Seeds, Workers, seeds_axis, settings
from fewlabel.cli.run import run_all
from fewlabel.core.errors import BadInput

if TYPE_CHECKING:
    from fewlabel.experiment import Experiment
    from fewlabel.papers.reproduce import PaperRow


def reproduce(
    name: Annotated[str, Argument(metavar="NAME[/ROW]", hidden=True)] = "",
    listing: Annotated[bool, Option("--list", help="Which tables there are, or rows of NAME; their data.")] = False,
    printing: Annotated[bool, Option("--print", help="Print a row as a file for `fewlabel run` instead.")] = False,
    rounds: Annotated[int | None, Option("--rounds", metavar="N", min=1, help="Fewer than the paper's, say.")] = None,
    seeds: Seeds = None,
    changes: Changes = None,
    workers: Workers = None,
    device: Device = None,
    out: Out = None,
    data_dir: DataDir = None,
    form: Format = Form.TEXT,
) -> None:
    """Run rows of the papers' tables; show ours beside theirs.

    NAME is a table or figure, ROW one of its rows; both may hold * and ?.
    Rows whose data are not here are left out.
    Repeated, it skips what is done and resumes what was interrupted.

    Examples:
      fewlabel reproduce --list
      fewlabel reproduce 'rscfed-table1/svhn-*' --rounds 50 --seeds 0,1,2
      fewlabel reproduce isofed-table2/pneumonia-isofed-l1u3-g08 --print
    """
    from fewlabel.papers import reproduce as papers

    if listing or not name:
        return show_papers(name, form)
    rows, changed, numbers = papers.select(name), settings(None, device, changes), seeds_axis(seeds).get("seed")
    if printing:
        return print_row([(row, e) for row in rows for e in papers.wanted(row, changed, rounds, numbers)], form)
    root = out or RUNS / "reproduce"
    attempts = papers.plan(rows, root, changed, rounds, numbers)
    if not [attempt for attempt in attempts if not attempt.refused]:
        raise BadInput("; ".join(papers.Reproduction(attempts).refused()))
    able = [experiment for attempt in attempts if not attempt.refused for experiment in attempt.experiments]
    failure = run_all(able, root, workers)
    found = papers.Reproduction(attempts, changed)
    page = str(found.report(root))
    print(json.dumps(found.to_json() | {"report": page}, indent=1) if form == "json" else f"{found}\n{page}")
    if failure is not None:
        raise failure
    return None


def print_row(found: "Sequence[tuple[PaperRow, Experiment]]", form: Form) -> None:
    """An experiment of the papers as a file, or for programs to read."""
    from fewlabel.core.schema import plain
    from fewlabel.papers.reproduce import as_file

    if len(found) > 1:
        raise BadInput(f"--print prints one row with one seed, and these are {len(found)}, such as {found[0][0].id}")
    row, experiment = found[0]
    print(json.dumps(plain(experiment), indent=1) + "\n" if form == "json" else as_file(row, experiment), end="")


def show_papers(name: str, form: Form) -> None:
    """What there is, and of what a name stands for also the rows."""
    from rich.console import Console

    from fewlabel.papers.reproduce import listed, overview

    found = listed(name or "*")
    if form == "json":
        return print(json.dumps(found, indent=1))
    Console(highlight=False, markup=False, emoji=False).print(overview(found))
    if name:
        print("\n".join(f"{table['name']}/{row}" for table in found for row in table["rows"]))
    else:
        print("`fewlabel reproduce NAME --list` names a table's rows.")
    return None
