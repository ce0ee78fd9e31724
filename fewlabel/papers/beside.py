"""Our results beside those of the papers: a table, a JSON document and a page."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fewlabel.papers.reproduce import Attempt
from fewlabel.papers.tables import METRIC_NAMES, PaperRow, PaperTable, Printed, tables
from fewlabel.report.page import Content, render, write
from fewlabel.report.runs import Row, Run
from fewlabel.report.tables import Spread, Table

USUAL = ("accuracy", "auc")  # shown for rows without printed numbers


def metrics_of(run: Run) -> dict[str, float | None]:
    """Return a run's metrics in the last round measured, and what a client sent on average, in whole models.

    `bytes_sent` compares bytes. `sent` compares numbers, if the method counts them.
    """
    last, spent = run.last or {}, run.spent()
    found = {**last.get("test", {}), "local_accuracy": last.get("local_accuracy")}
    if "labeled_accuracy" in (shown := last.get("shown", {})):
        found["labeled_accuracy"] = shown["labeled_accuracy"]
    if spent["replies"]:
        one = spent["model_bytes"] / (2 * spent["asked"])
        found["bytes_sent"] = spent["bytes_up"] / (one * spent["replies"])
        counted = Spread.of(line.get("sent") for line in run.rounds)
        found["sent"] = counted.mean if counted else found["bytes_sent"]
    return found


class Reproduction:
    """What came out here, beside what the papers print."""

    def __init__(self, attempts: Sequence[Attempt], changes: Sequence[str] = ()) -> None:
        self.attempts, self.changes = attempts, changes
        self.ran = [attempt for attempt in attempts if not attempt.refused]
        self.runs = {attempt.row.id: [Run(directory) for directory in attempt.directories] for attempt in self.ran}

    @property
    def tables(self) -> list[PaperTable]:
        return [tables()[name] for name in dict.fromkeys(attempt.row.table for attempt in self.attempts)]

    @property
    def title(self) -> str:
        one, *others = self.tables
        return "Ours beside the papers'" if others else f"{one.paper}, {one.title}"

    def label(self, row: PaperRow) -> str:
        return row.name if len(self.tables) == 1 else row.id

    def ours(self, row: PaperRow) -> dict[str, Spread | None]:
        """Return the row's metrics over its seeds: those that the paper prints, or else the usual ones."""
        found = [metrics_of(run) for run in self.runs[row.id]]
        shown = [] if row.paper or "labeled_accuracy" not in found[0] else ["labeled_accuracy"]
        keys = [*(row.paper or USUAL), *shown, *(["bytes_sent"] if "sent" in row.paper else [])]
        return {key: Spread.of(one.get(key) for one in found) for key in keys}

    def table(self) -> Table:
        lines = []
        for attempt in self.ran:
            row = attempt.row
            first = self.label(row) + ("*" if self.unfinished(row) else ""), rounds_of(attempt)
            for key, spread in self.ours(row).items():
                lines.append((*first, METRIC_NAMES[key], *cells(spread, row.paper.get(key))))
                first = "", ""
        columns = ("row", "rounds", "metric", "ours", "paper", "difference")
        return Table(f"{self.title}, in percent", columns, tuple(lines), tuple(self.notes()))

    def unfinished(self, row: PaperRow) -> dict[int, str]:
        """Return how far the unfinished runs are, by seed."""
        return {run.seed: run.status for run in self.runs[row.id] if not run.finished}

    def notes(self) -> Iterator[str]:
        seeds = sorted({experiment.seed for attempt in self.ran for experiment in attempt.experiments})
        counted = f"Seed {seeds[0]}" if len(seeds) == 1 else f"Seeds {', '.join(map(str, seeds))}, mean ± std"
        yield f"{counted}. Ours are of the last round, never of the best one on test."
        if any(is_short(attempt) for attempt in self.ran):
            yield "SHORT: these runs have fewer rounds than the paper's, so they reproduce nothing yet."
        if self.changes:
            yield f"CHANGED: this is not the paper's experiment, but one with {', '.join(self.changes)}."
        for attempt in self.ran:
            for seed, status in self.unfinished(attempt.row).items():
                yield f"* {attempt.row.name}, seed {seed}: {status}."
        yield from dict.fromkeys(note for attempt in self.ran for note in attempt.row.notes)
        for sentence, names in self.refused().items():
            yield f"Not run: {', '.join(names)}: {sentence}."

    def refused(self) -> dict[str, list[str]]:
        """Return the reasons why rows did not run, each with its rows."""
        found: dict[str, list[str]] = {}
        for attempt in self.attempts:
            if attempt.refused:
                found.setdefault(attempt.refused.rstrip("."), []).append(attempt.row.name)
        return found

    def to_json(self) -> dict[str, Any]:
        return {"changes": list(self.changes), "rows": [self.row_to_json(attempt) for attempt in self.attempts]}

    def row_to_json(self, attempt: Attempt) -> dict[str, Any]:
        row, one = attempt.row, attempt.experiments[0]
        about: dict[str, Any] = {
            "table": row.table,
            "row": row.name,
            "data": one.data.name,
            "rounds": one.rounds,
            "rounds_of_paper": row.rounds,
            "short": is_short(attempt),
            "seeds": [experiment.seed for experiment in attempt.experiments],
            "paper": {key: {"mean": value.mean, "std": value.std} for key, value in row.paper.items()},
            "notes": list(row.notes),
        }
        if attempt.refused:
            return about | {"not_run": attempt.refused}
        ours = {
            key: spread and {"mean": 100 * spread.mean, "std": None if spread.std is None else 100 * spread.std}
            for key, spread in self.ours(row).items()
        }
        unfinished = {str(seed): status for seed, status in self.unfinished(row).items()}
        return about | {"ours": ours, "unfinished": unfinished, "directories": [str(d) for d in attempt.directories]}

    def report(self, root: Path) -> Path:
        """Write one self-contained page with the table and the curves, below `root`."""
        path = root / f"{'-'.join(table.name for table in self.tables)}.html"
        rows = [Row(self.label(attempt.row), tuple(self.runs[attempt.row.id])) for attempt in self.ran]
        return write(path, render(Content(self.title, [self.table()], {"": rows}, rows)))

    def __str__(self) -> str:
        return str(self.table())


def is_short(attempt: Attempt) -> bool:
    return attempt.experiments[0].rounds < attempt.row.rounds


def rounds_of(attempt: Attempt) -> str:
    rounds = attempt.experiments[0].rounds
    return f"{rounds} of {attempt.row.rounds}" if is_short(attempt) else str(rounds)


def cells(ours: Spread | None, paper: Printed | None) -> tuple[str, str, str]:
    """Return our number, the paper's, and the difference."""
    difference = f"{100 * ours.mean - paper.mean:+.1f}" if ours and paper else "–"
    return str(ours or "–"), str(paper or "–"), difference
