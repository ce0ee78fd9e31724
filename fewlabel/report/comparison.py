"""Results side by side, as users have them: methods between their floor and their ceiling."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.schema import flatten
from fewlabel.engine.record import runs_in
from fewlabel.report import static
from fewlabel.report.curves import curves
from fewlabel.report.groups import groups_of, rows_of
from fewlabel.report.page import page_of_groups
from fewlabel.report.result_tables import comparison_tables, distinct_rows, overview, results_table
from fewlabel.report.results import Result
from fewlabel.report.runs import pick_test
from fewlabel.report.style import save_plot
from fewlabel.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def open_results(directory: Path) -> "Result | Comparison":
    """Open the run in a directory, or compare all runs below it."""
    runs = runs_in(directory)
    return Comparison([Result(run) for run in runs]) if runs else Result(directory)


class Comparison:
    """Runs side by side: a row for each experiment, over its seeds, in groups that share their other settings."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.groups = groups_of(rows_of(results))
        self.rows = distinct_rows(self.groups)

    def tables(self, every: bool = False) -> list[Table]:
        """Return the table of the main numbers, or of every one. With several groups, the overview comes before it."""
        return comparison_tables(self.groups, every)

    def table(self) -> Table:
        """Return the table of all numbers."""
        return results_table(self.groups)

    def overview(self) -> Table:
        """Return the accuracy of each method in each group."""
        return overview(self.groups)

    def to_json(self) -> list[dict[str, Any]]:
        """Return the raw numbers of each row in each group. Metrics are fractions."""
        return [
            row.to_json()
            | {
                "setting": group.label,
                "gap_closed": group.gap_closed(row),
                "p_to_floor": group.p_to_floor.get(row),
                "p_to_best": group.p_to_best.get(row),
            }
            for group in self.groups
            for row in group.rows
        ]

    def csv(self) -> str:
        """Return the raw numbers as CSV, a line for each row in each group."""
        lines = [{key: value for key, value in flatten(row, "_") if value is not None} for row in self.to_json()]
        file = io.StringIO()
        writer = csv.DictWriter(file, dict.fromkeys(key for line in lines for key in line), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in line.items()}
            for line in lines
        )
        return file.getvalue()

    def plot(self, path: Path | str | None = None) -> "Figure":
        """Draw test accuracy over the rounds: the mean over seeds, with one standard deviation as a band."""
        return save_plot(static.lines(curves(self.rows, pick_test("accuracy"), "test accuracy, %")), path)

    def report(self, path: Path | str) -> Path:
        """Write one self-contained page: tables, plots, and how to repeat the runs."""
        return page_of_groups(self.groups, Path(path))

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self.tables())
