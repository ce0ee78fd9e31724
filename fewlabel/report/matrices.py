"""Matrices of colour: classes, clients or rows against classes or rounds, in the mean over seeds."""

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fewlabel.core.plots import ClassMatrix, PerClass, PerClient
from fewlabel.engine.record import Line
from fewlabel.report.charts import PERCENT, Cells
from fewlabel.report.curves import MOST_POINTS
from fewlabel.report.runs import Row, Run
from fewlabel.report.static import Drawing

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

MOST_NAMED = 12  # classes that a description in words names one by one


def mean(tables: Sequence[Any]) -> "Array":
    """Average tables of one shape, leaving out unknown values."""
    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where all values are unknown, so is the mean
        found: Array = np.nanmean(np.array(tables, dtype=float), axis=0)
    return found


def recalls(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    """Draw the recall of each class in the last round, a row for each method."""
    for label, group in groups.items():
        known = {row: tests for row in group if (tests := tested(row))}
        if not known:
            continue
        values = 100 * stacked([[test["recall_per_class"] for test in tests] for tests in known.values()])
        classes = next(iter(known)).classes
        caption = f"Recall by class, last round, %{', ' + label if label else ''}"
        in_words = "; ".join(
            f"{row.label}: " + ", ".join(f"{name} {value:.0f}" for name, value in zip(classes, line, strict=True))
            for row, line in zip(known, values, strict=True)
        )
        chart = Cells(values, [row.label for row in known], classes, "", "class", PERCENT)
        yield Drawing(chart, caption, f"{caption}. {in_words}" if len(classes) <= MOST_NAMED else caption)


def stacked(tables: Sequence[Sequence[Any]]) -> "Array":
    """Return the means of several lists of tables."""
    import numpy as np

    return np.array([mean(table) for table in tables])


def tested(row: Row) -> list[Line]:
    """List the test metrics of the last round measured, for each seed that has some."""
    return [run.last["test"] for run in row.results if run.last and "test" in run.last]


def confusion(row: Row) -> Drawing | None:
    """Draw which classes the last model predicts for the images of each class."""
    import numpy as np

    tests = [test["confusion"] for test in tested(row) if test.get("confusion")]  # sites do not tell theirs
    if not tests:
        return None
    counts = np.sum(tests, axis=0, dtype=float)
    with np.errstate(invalid="ignore"):
        shares = 100 * counts / counts.sum(1, keepdims=True)
    chart = Cells(shares, row.classes, row.classes, "class", "predicted class", PERCENT, diagonal=True, counts=counts)
    alt = f"Confusion matrix of {row.label}: the share of each class's images that is predicted as each class, in %"
    return Drawing(chart, f"{row.label}: predictions for each class, %", alt)


def by_round(row: Row, pick: Callable[[Line], Sequence[Any] | None]) -> tuple[list[str], "Array"] | None:
    """Return the names of rounds, and a matrix with a column of numbers for each, as means over seeds."""
    found: dict[int, list[Sequence[Any]]] = {}
    for run in row.results:
        for line in run.rounds:
            if (values := pick(line)) is not None:
                found.setdefault(line["round"], []).append(values)
    if not found:
        return None
    numbers = sorted(found)
    step = -(-len(numbers) // MOST_POINTS)
    kept = numbers[(len(numbers) - 1) % step :: step]
    return list(map(str, kept)), stacked([found[number] for number in kept]).T


def pseudo_labels_by_class(row: Row) -> Iterator[Drawing]:
    """Draw precision and coverage of pseudo-labels over the rounds, for each class."""

    def precision(line: Line) -> Sequence[Any] | None:
        shares: Sequence[float | None] | None = line.get("pseudo_labels", {}).get("precision_per_class")
        return None if shares is None else [None if share is None else 100 * share for share in shares]

    def coverage(line: Line) -> Sequence[Any] | None:
        labels: Mapping[str, Any] = line.get("pseudo_labels", {})
        used = labels.get("used_per_class", ())
        return [100 * (labels["coverage"] or 0) * count / max(1, sum(used)) for count in used] or None

    if not any(line.get("pseudo_labels", {}).get("coverage") for run in row.results for line in run.rounds):
        return  # no method gave any
    captions = {
        f"{row.label}: precision of each pseudo-label, %": (precision, PERCENT),
        f"{row.label}: unlabeled images with each pseudo-label, %": (coverage, None),
    }
    for caption, (pick, scale) in captions.items():
        if found := by_round(row, pick):
            rounds, values = found
            chart = Cells(values, row.classes, rounds, "pseudo-label", "round", scale)
            yield Drawing(chart, caption, f"{caption}, by round")


def per_class(row: Row, plot: PerClass) -> Iterator[Drawing]:
    """Draw a value of each class over the rounds."""
    import numpy as np

    if found := by_round(row, lambda line: line.get(plot.key)):
        rounds, values = found
        scale = float(np.nanmin(values)), float(np.nanmax(values))
        chart = Cells(values, row.classes, rounds, "class", "round", scale, digits=2)
        yield Drawing(chart, f"{row.label}: {plot.title}", f"{plot.title.capitalize()} by round, {row.label}")


def per_client(row: Row, plot: PerClient) -> Iterator[Drawing]:
    """Draw a share of each client over the rounds, such as its weight in the server's average."""
    import numpy as np

    named = re.compile(rf"{plot.prefix}_(\d+)")
    keys = {key for run in row.results for line in run.rounds for key in line}
    known = {int(match[1]): match[0] for match in filter(None, map(named.fullmatch, keys))}
    each = ({c["id"] for c in run.partition.get("clients", ()) if c["labeled"]} for run in row.results)
    labeled, clients = set.intersection(*each), sorted(known)  # labeled in every seed

    def pick(line: Line) -> list[Any] | None:
        return [line.get(known[c], 0.0) for c in clients] if line.keys() & known.values() else None

    if found := by_round(row, pick):
        rounds, values = found
        values[values == 0] = np.nan  # left out in all seeds
        names = [f"{client} (labels)" if client in labeled else str(client) for client in clients]
        chart = Cells(100 * values, names, rounds, "client", "round")
        caption = f"{row.label}: {plot.title}, %"
        yield Drawing(chart, caption, f"{caption}, by round; clients {sorted(labeled)} have labels")


def matrices_of(run: Run, key: str) -> dict[int, tuple[Any, Any]]:
    """Return by round a matrix of labeled clients and one of unlabeled clients, where there are both."""
    found = {}
    for line in run.rounds:
        shown = line.get("shown", {})
        labeled = line.get(key, shown.get(f"labeled_{key}"))
        if labeled is not None and key in shown:
            found[line["round"]] = labeled, shown[key]
    return found


def class_matrix(row: Row, plot: ClassMatrix) -> Iterator[Drawing]:
    """Draw a matrix of classes at labeled clients, at unlabeled clients, and the difference: at first, midway, last."""
    import numpy as np

    each = [found for run in row.results if (found := matrices_of(run, plot.key))]
    rounds = sorted(set.intersection(*map(set, each))) if each else []
    for number in dict.fromkeys(rounds[i] for i in (0, len(rounds) // 2, -1) if rounds):
        first, second = (mean([found[number][side] for found in each]) for side in (0, 1))
        for name, values in {
            "at labeled clients": first,
            "at unlabeled clients": second,
            "absolute difference": np.abs(first - second),
        }.items():
            if not np.isfinite(values).any():  # no client was sure of any image
                continue
            scale = (0.0, float(np.nanmax([first, second])))
            caption = f"{row.label}, round {number}: {name}"
            chart = Cells(values, row.classes, row.classes, "class", "predicted class", scale, digits=2)
            yield Drawing(chart, caption, f"{plot.section}, {caption}")
