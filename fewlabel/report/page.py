"""The page of a report: one self-contained HTML file with tables, plots, and how to repeat the runs.

`page.html.jinja` has its form; here is what goes into it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core import storage
from fewlabel.engine.record import EXPERIMENT
from fewlabel.experiment import dumps
from fewlabel.report.groups import Group
from fewlabel.report.plots import about_sections, left_out, sections
from fewlabel.report.result_tables import comparison_tables, distinct_rows, run_table
from fewlabel.report.runs import Row, Run
from fewlabel.report.style import Drawing, svg
from fewlabel.report.tables import Table

if TYPE_CHECKING:
    from jinja2 import Template


def page_of_run(run: Run, path: Path) -> Path:
    """Write the page about one run."""
    about = {"Over the rounds": "Metrics on images that nobody trains on. Validation images choose a round."}
    row, table = Row(run.name, (run,)), run_table(run)
    return write_page(path, table.title, [table], {"": [row]}, [row], about)


def page_of_groups(groups: Sequence[Group], path: Path) -> Path:
    """Write the page about runs side by side."""
    rows = distinct_rows(groups)
    data = ", ".join(dict.fromkeys(row.experiment.data.name for row in rows))
    title = f"{len({row.name for row in rows})} methods on {data}"
    return write_page(path, title, comparison_tables(groups), {group.label: group.relabeled for group in groups}, rows)


def write_page(
    path: Path,
    title: str,
    tables: Sequence[Table],
    groups: Mapping[str, Sequence[Row]],
    rows: Sequence[Row],
    about: Mapping[str, str] | None = None,
) -> Path:
    """Write a page with these tables, the plots of each group, and the experiments of all rows.

    `about` replaces the sentences about some sections.
    """
    from markupsafe import Markup

    about = about_sections(rows) | dict(about or {})
    page = template().render(
        title=title,
        tables=[Markup(table.html()) for table in tables],  # which escapes names itself
        left_out=left_out(groups),
        sections=[
            {"title": name, "about": about.get(name), "plots": list(map(plot_of, drawings))}
            for name, drawings in sections(groups).items()
            if drawings
        ],
        experiments=list(map(experiment_of, rows)),
        versions=versions_of(rows),
    )
    storage.make_folder(path.parent)
    storage.write(path, page.encode())
    return path


@cache
def template() -> "Template":
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("fewlabel.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["anchor"] = lambda title: re.sub(r"\W+", "-", title.lower()).strip("-")
    return environment.get_template("page.html.jinja")


def plot_of(drawing: Drawing) -> dict[str, Any]:
    """Return a drawing as the template needs it. The template opens the svg tag to add the words."""
    from markupsafe import Markup

    return {"caption": drawing.caption, "alt": drawing.alt, "svg": Markup(svg(drawing.figure).removeprefix("<svg "))}


def experiment_of(row: Row) -> dict[str, str]:
    """Return a row's experiment in full, and the command that repeats its runs."""
    seeds = ",".join(map(str, row.seeds))
    command = f"fewlabel run {EXPERIMENT} --seed{'s' if len(row.seeds) > 1 else ''} {seeds}"
    toml = dumps(replace(row.experiment, seed=0))
    return {"label": row.label, "file": EXPERIMENT, "toml": toml, "command": command}


def versions_of(rows: Sequence[Row]) -> list[str]:
    """List the versions of the programs that finished runs were made with."""
    finished = [run.summary["versions"] for row in rows for run in row.results if run.summary]
    return list(dict.fromkeys(", ".join(f"{key} {value}" for key, value in found.items()) for found in finished))
