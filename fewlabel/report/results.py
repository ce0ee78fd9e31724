"""The result of one run, as users have it: its numbers, its table, its plot and its page."""

from pathlib import Path
from typing import TYPE_CHECKING

from fewlabel.engine.record import REPORT
from fewlabel.report import static
from fewlabel.report.curves import metric_curves
from fewlabel.report.page import page_of_run
from fewlabel.report.result_tables import run_table
from fewlabel.report.runs import Run
from fewlabel.report.style import save_plot
from fewlabel.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Result(Run):
    """One run, finished or not, as its directory records it."""

    def table(self) -> Table:
        """Return the metrics and costs of the last round, and of the round that validation chose."""
        return run_table(self)

    def plot(self, path: Path | str | None = None) -> "Figure":
        """Draw accuracy and AUC over the rounds, on test and on validation. With `path`, save the plot there."""
        return save_plot(static.lines(metric_curves(self, "accuracy", "auc")), path)

    def report(self, path: Path | str | None = None) -> Path:
        """Write one self-contained page about this run, by default report.html in its directory."""
        return page_of_run(self, Path(path or self.directory / REPORT))

    def __repr__(self) -> str:
        return f"Result({str(self.directory)!r}: {self.name}, seed {self.seed}, {self.status})"

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()
