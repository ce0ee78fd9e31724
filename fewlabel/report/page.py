"""The page about one run, or about many side by side: tables, plots, and what it takes to do it all again."""

import html
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fewlabel.experiment import dumps
from fewlabel.report import plots
from fewlabel.report.results import Result, Row
from fewlabel.report.style import write_page

if TYPE_CHECKING:
    from fewlabel.report.comparison import Comparison


def page_of_run(result: Result, path: Path) -> Path:
    row, table = Row(result.name, (result,)), result.table()
    about = plots.about_sections([row]) | {
        "Over the rounds": "On images that nobody trains on; those to validate choose a round."
    }
    write_page(path, table.title, table.html(), plots.plots({"": [row]}), again([row]), versions([row]), about)
    return path


def page_of_many(comparison: "Comparison", path: Path) -> Path:
    rows, settings = comparison.rows, comparison.settings
    data = ", ".join(dict.fromkeys(row.experiment.data.name for row in rows))
    groups = {
        setting.words: [replace(r, label=n) for r, n in zip(setting.rows, setting.names, strict=True)]
        for setting in settings
    }
    title = f"{len({row.name for row in rows})} methods on {data}"
    tables = "".join(table.html() for table in comparison.tables())
    drawn = plots.plots(groups)
    write_page(
        path, title, tables + plots.left_out(groups), drawn, again(rows), versions(rows), plots.about_sections(rows)
    )
    return path


def again(rows: Sequence[Row]) -> list[str]:
    """Of each row its experiment in full, and the command that repeats its runs."""
    return [settings(row) for row in rows]


def settings(row: Row) -> str:
    experiment = dumps(replace(row.experiment, seed=0))
    seeds = ",".join(map(str, row.seeds))
    command = f"fewlabel run experiment.toml --seed{'s' if len(row.seeds) > 1 else ''} {seeds}"
    return (
        f"<details><summary>{html.escape(row.label)}</summary>\n<p>Save this as experiment.toml:</p>\n"
        f'<pre tabindex="0">{html.escape(experiment)}</pre>\n<p>and run</p>\n'
        f'<pre tabindex="0">{html.escape(command)}</pre></details>\n'
    )


def versions(rows: Sequence[Row]) -> list[str]:
    """What finished runs were made with."""
    finished = [result.summary["versions"] for row in rows for result in row.results if result.summary]
    return list(dict.fromkeys(", ".join(f"{key} {value}" for key, value in found.items()) for found in finished))
