"""The plots of a page, section by section: curves, matrices, bars, and what methods ask to have drawn."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fewlabel.core.described import plots as method_plots
from fewlabel.core.plots import ClassMatrix, PerClass, PerClient, Plot
from fewlabel.report.bars import client_images, costs, costs_by_round
from fewlabel.report.curves import curves_on_test, pseudo_label_curves, run_curves
from fewlabel.report.matrices import class_matrix, confusion, per_class, per_client, pseudo_labels_by_class, recalls
from fewlabel.report.runs import CEILING, FLOOR, Row
from fewlabel.report.static import Drawing

FIRST = "Over the rounds"
MOST_ROWS = 10  # that have plots of their own: a page must stay small
MOST_GROUPS = 6
ABOUT = {
    FIRST: f"Metrics on test images, which nobody trains on. {FLOOR}, the floor, ignores unlabeled images; "
    f"{CEILING}, the ceiling, has all labels.",
    "Recall by class": "The share of a class's test images that the model recognizes.",
    "Confusion": "A row for each class: what the model predicts for its test images. Right predictions are on the "
    "diagonal.",
    "Pseudo-labels": "Labels that a method gives to unlabeled images. Precision is the share that is right, which no "
    "method is told; coverage is the share of unlabeled images that have one. Blank: none was given.",
}
SEVERAL_SEEDS = " Lines are means over seeds, bands are one standard deviation."
DRAWN: dict[type[Plot], Callable[[Row, Any], Iterator[Drawing]]] = {
    PerClass: per_class,
    PerClient: per_client,
    ClassMatrix: class_matrix,
}


def sections(groups: Mapping[str, Sequence[Row]]) -> dict[str, list[Drawing]]:
    """Draw the plots of each section, for one group of rows or more. A section may be empty."""
    groups = dict(list(groups.items())[:MOST_GROUPS])
    labels = {row.results: " ".join(filter(None, (row.label, name))) for name, rows in groups.items() for row in rows}
    rows = [Row(label, results) for results, label in labels.items()][:MOST_ROWS]
    alone = len(rows) == 1 and len(rows[0].results) == 1
    return {
        FIRST: list(run_curves(rows[0].results[0]) if alone else curves_on_test(groups)),
        "Recall by class": list(recalls(groups)),
        "Confusion": [drawing for row in rows if (drawing := confusion(row))],
        "Who holds what": [drawing for name, group in groups.items() if (drawing := client_images(name, group[0]))],
        "Pseudo-labels": [*pseudo_label_curves(groups), *(d for row in rows for d in pseudo_labels_by_class(row))],
        **method_sections(rows),
        "Costs": list(costs_by_round(rows[0]) if alone else costs(groups)),
    }


def method_sections(rows: Iterable[Row]) -> dict[str, list[Drawing]]:
    """Draw what the rows' methods ask for, by section."""
    found: dict[str, list[Drawing]] = {}
    for row in rows:
        for plot in method_plots(row.experiment.method):
            found.setdefault(plot.section, []).extend(DRAWN[type(plot)](row, plot))
    return found


def about_sections(rows: Sequence[Row]) -> dict[str, str]:
    """Return a sentence or two about each section."""
    found = ABOUT | {plot.section: plot.about for row in rows for plot in method_plots(row.experiment.method)}
    return found | {FIRST: ABOUT[FIRST] + SEVERAL_SEEDS * any(len(row.results) > 1 for row in rows)}


def left_out(groups: Mapping[str, Sequence[Row]]) -> str:
    """Say what the plots do not show. Return an empty text if they show everything."""
    rows = len({row.results for group in list(groups.values())[:MOST_GROUPS] for row in group})
    parts = [f"the first {MOST_GROUPS} of {len(groups)} groups"] if len(groups) > MOST_GROUPS else []
    parts += [f"by class and client, the first {MOST_ROWS} of {rows} rows"] if rows > MOST_ROWS else []
    return f"Plots show {'; '.join(parts)}." if parts else ""
