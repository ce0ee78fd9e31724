"""Rows of the papers as runs here: which experiments, where they are laid out, and why a row cannot run."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fewlabel.core.errors import BadInput, FewLabelError
from fewlabel.engine.record import is_finished
from fewlabel.experiment import Experiment, dumps
from fewlabel.papers.tables import METRIC_NAMES, PaperRow, matching_tables, tables


def experiments_of(
    row: PaperRow, changes: Sequence[str] = (), rounds: int | None = None, seeds: Sequence[int] | None = None
) -> tuple[Experiment, ...]:
    """Return a row's experiment for each seed, by default its own."""
    given = {change.partition("=")[0].strip() for change in changes}
    for key, option in (("rounds", rounds), ("seed", seeds)):
        if key in given and option is not None:
            raise BadInput(f"{key} is given twice, by --set and by an option of its own; give one of them")
    one = row.experiment([*changes, *([] if rounds is None else [f"rounds={rounds}"])])
    return tuple(replace(one, seed=seed) for seed in dict.fromkeys(seeds or [one.seed]))


def as_file(row: PaperRow, experiment: Experiment) -> str:
    """Write a row as a file for `fewlabel run`."""
    table = tables()[row.table]
    numbers = ", ".join(f"{METRIC_NAMES[key]} {value}" for key, value in row.paper.items())
    printed = [f"In the paper: {numbers}."] if numbers else []
    comments = [row.id, f"{table.paper}, {table.title}", *printed, *row.notes]
    return "".join(f"# {comment}\n" for comment in comments) + dumps(experiment)


@dataclass(frozen=True)
class Attempt:
    """A row to run here, once per seed, or the sentence that says why it cannot run."""

    row: PaperRow
    experiments: tuple[Experiment, ...]
    directories: tuple[Path, ...]
    refused: str = ""


def plan(
    rows: Iterable[PaperRow],
    root: Path,
    changes: Sequence[str] = (),
    rounds: int | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Attempt]:
    """Lay out the runs of these rows below `root`. Equal experiments of several tables are one run."""
    from fewlabel.engine.sweep import place

    every = [(row, experiments_of(row, changes, rounds, seeds)) for row in rows]  # read all before laying out one
    return [
        Attempt(row, experiments, tuple(place(e, root) for e in experiments), lay_out_row(row, experiments, root))
        for row, experiments in every
    ]


def lay_out_row(row: PaperRow, experiments: Sequence[Experiment], root: Path) -> str:
    """Lay out the runs of a row, or return the sentence that says why it cannot run."""
    from fewlabel.engine.sweep import lay_out, place

    one = experiments[0]
    if (warmup := getattr(one.method, "warmup", 0)) >= one.rounds:
        return f"{row.id} needs more rounds than {one.rounds}, because its warm-up alone takes {warmup}"
    todo = [experiment for experiment in experiments if not is_finished(place(experiment, root))]
    try:
        if todo and (missing := missing_data(one.data.name)):
            return missing
        lay_out(todo, root)
    except FewLabelError as error:  # the other rows go on
        return str(error)
    return ""


def missing_data(name: str) -> str:
    """Say how to get a data set. Return an empty text if it is on this machine."""
    from fewlabel.data import datasets
    from fewlabel.data.published import files

    source = datasets.source_of(name)
    try:
        if source.editions:  # else they are your own images, and the run will look for them
            files.find(name, source)
    except BadInput as error:
        return str(error)
    return ""


def list_tables(name: str = "*") -> list[dict[str, Any]]:
    """List the tables and figures that a name matches, and whether their data are on this machine."""
    return [
        {
            "name": table.name,
            "paper": table.paper,
            "title": table.title,
            "rows": [row.name for row in table.rows],
            "data": {data: not missing_data(data) for data in table.data},
        }
        for table in matching_tables(name)
    ]
