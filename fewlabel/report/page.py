"""The page of a report: one self-contained HTML file. What came out comes first, then the picture, then the numbers.

`page.html.jinja` has its form, `page.js` draws its plots in the browser; here is what goes into it. `render_run` and
`render_groups` return a page as text, of unfinished runs, too.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core import storage
from fewlabel.engine.record import EXPERIMENT
from fewlabel.experiment import dumps
from fewlabel.report.curves import measured_marks
from fewlabel.report.examples import Examples, examples_of
from fewlabel.report.groups import Group
from fewlabel.report.page_tables import page_table
from fewlabel.report.plots import FIRST, about_sections, left_out, sections
from fewlabel.report.result_tables import distinct_rows, overview, results_table, run_table
from fewlabel.report.runs import Row, Run
from fewlabel.report.static import Drawing
from fewlabel.report.story import Story, best_of, story_of_groups, story_of_run
from fewlabel.report.style import svg
from fewlabel.report.tables import Table

if TYPE_CHECKING:
    from jinja2 import Template

PLOTLY = "vendor/plotly-cartesian.min.js"


@dataclass(frozen=True)
class Content:
    """What a page shows."""

    title: str  # what was run
    tables: Sequence[Table]
    groups: Mapping[str, Sequence[Row]]  # whose plots are drawn
    rows: Sequence[Row]  # whose experiments are told
    story: Story | None = None
    picture: Sequence[Drawing] = ()
    more: Sequence[Table] = ()  # behind a click
    about: Mapping[str, str] = field(default_factory=dict)  # replaces the sentences about some sections
    examples: Examples | None = None


def page_of_run(run: Run, path: Path) -> Path:
    """Write the page about one run."""
    return write(path, render_run(run))


def page_of_groups(groups: Sequence[Group], path: Path) -> Path:
    """Write the page about runs side by side."""
    return write(path, render_groups(groups))


def render_run(run: Run, static: bool = True) -> str:
    """Return the page about one run, as far as it has got. For `static` see `render`."""
    row = Row(run.name, (run,))
    about = {FIRST: "Metrics on images that nobody trains on. Validation images choose a round."}
    examples = examples_of(run, run.name) if run.finished else None
    table = run_table(run, brackets=True)
    content = Content(run.title, [table], {"": [row]}, [row], story_of_run(run), about=about, examples=examples)
    return render(content, static)


def render_groups(groups: Sequence[Group], static: bool = True) -> str:
    """Return the page about runs side by side, as far as they have got. For `static` see `render`."""
    rows = distinct_rows(groups)
    data = ", ".join(dict.fromkeys(row.experiment.data.name for row in rows))
    drawn = {group.label: group.relabeled for group in groups}
    best = next(filter(None, map(best_of, groups)), None)
    run = next((run for run in best.results if run.finished), None) if best else None
    content = Content(
        f"{len({row.name for row in rows})} methods on {data}",
        [*([overview(groups)] if len(groups) > 1 else []), page_table(groups)],
        drawn,
        rows,
        story_of_groups(groups),
        list(measured_marks(drawn)),
        [results_table(groups)],
        examples=examples_of(run, run.title) if run else None,
    )
    return render(content, static)


def render(content: Content, static: bool = True) -> str:
    """Return a page with this content.

    With `static`, plots are in it twice: for paper and browsers without scripts, matplotlib draws them. That takes
    a second for every five plots, so a page that is made anew every few seconds can do without.
    """
    from markupsafe import Markup

    about = about_sections(content.rows) | dict(content.about)
    drawn = sections(content.groups)
    picture = content.picture or drawn[FIRST][:1]
    if not content.picture:
        drawn[FIRST] = drawn[FIRST][1:]
    return template().render(
        title=content.title,
        story=content.story,
        picture=[plot_of(drawing, static) for drawing in picture],
        tables=[Markup(table.html(folded=True)) for table in content.tables],  # which escapes names itself
        more=[Markup(table.html()) for table in content.more],
        left_out=left_out(content.groups),
        sections=[
            {"title": name, "about": about.get(name), "plots": [plot_of(drawing, static) for drawing in drawings]}
            for name, drawings in drawn.items()
            if drawings
        ],
        examples=content.examples,
        experiments=list(map(experiment_of, content.rows)),
        versions=versions_of(content.rows),
        plotly=Markup(script(PLOTLY)),
        script=Markup(script("page.js")),
    )


def write(path: Path, page: str) -> Path:
    storage.make_folder(path.parent)
    storage.write(path, page.encode())
    return path


@cache
def script(name: str) -> str:
    """Read a program that is part of each page."""
    return files("fewlabel.report").joinpath(name).read_text(encoding="utf-8")


@cache
def template() -> "Template":
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("fewlabel.report", "."), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["anchor"] = lambda title: re.sub(r"\W+", "-", title.lower()).strip("-")
    return environment.get_template("page.html.jinja")


def plot_of(drawing: Drawing, static: bool) -> dict[str, Any]:
    """Return a drawing as the template needs it. The template opens the svg tag to add the words."""
    from markupsafe import Markup

    chart = json.dumps(drawing.chart.to_json(), separators=(",", ":"), ensure_ascii=False)
    return {
        "caption": drawing.caption,
        "alt": drawing.alt,
        "svg": Markup(svg(drawing.figure).removeprefix("<svg ")) if static else None,
        "chart": Markup(chart.replace("<", "\\u003c")),  # so that no name can end the script
    }


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
