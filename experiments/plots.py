"""The pictures of the results: what each method gains, and balanced accuracy by round."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments import lines as stored
from experiments.beside import NAMES, Rows, box, is_method, is_own, score
from experiments.findings import Findings, findings
from fewlabel.report.runs import CEILING, FLOOR
from fewlabel.report.style import COLORS, GREY, draw, empty_plot, finish_plot, save_plot

DRAWN = 3  # methods in a plot by round, beside floor, ceiling and our own
MARKERS = "os^D"
STEP = 0.13  # between the marks of a row; rows are 1 apart
ALT = "What each method gains or loses beside labels alone, on each data set and in the mean"


def gains() -> str:
    """Draw what each method gains, and return the picture's place in a page."""
    found = findings(box())
    if found is None:
        return ""
    draw_gains(found, stored.DOCS / "results" / "gains.png")
    return f"![{ALT}](results/gains.png)\n"


def draw_gains(found: Findings, path: Path) -> None:
    """A row for each method, best mean first: a bar for the mean, and a mark for each data set.

    A mark is filled if the difference is more than chance.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    means = found.means
    order = list(reversed(means))
    figure = Figure(figsize=(7.4, 0.42 * len(order) + 2.1), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(len(order)), [means[row] for row in order], color=GREY, alpha=0.35, height=0.62)
    for number, name in enumerate(NAMES.values()):
        style = {"marker": MARKERS[number], "edgecolor": COLORS[number], "linewidth": 1.4, "s": 42}
        for place, row in enumerate(order):
            lower = place + (1.5 - number) * STEP  # or marks would hide each other
            if name in found.gains[row]:
                sure = name in found.better.get(row, ()) or name in found.worse.get(row, ())
                face = COLORS[number] if sure else "white"
                axes.scatter(found.gains[row][name], lower, facecolor=face, zorder=3, **style)
        if name in found.names:  # the legend
            axes.scatter([], [], facecolor=COLORS[number], label=name, **style)
    axes.axvline(0, color="black", linewidth=1)
    axes.set_yticks(range(len(order)), [f"{row} (our own)" if is_own(row) else row for row in order])
    axes.tick_params(axis="y", length=0)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(order)), [f"{means[row]:+.1f}" for row in order])
    right.tick_params(axis="y", length=0)
    right.spines["right"].set_visible(False)
    axes.text(1.01, 1.02, "mean", transform=axes.transAxes, ha="left", va="bottom")
    axes.text(0, 1.02, "← worse than labels alone", transform=axes.transAxes, ha="left", va="bottom")
    axes.text(0.99, 1.02, "better →", transform=axes.transAxes, ha="right", va="bottom")
    axes.grid(axis="x", color=GREY, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("points of balanced accuracy on test, beside training on labels alone")
    figure.suptitle("What unlabeled images bring, with labels at one site", fontsize=12)
    handles, labels = axes.get_legend_handles_labels()
    chance = [
        Line2D([], [], marker="o", linestyle="", markeredgecolor="black", markerfacecolor=face, markersize=6)
        for face in ("white", "black")
    ]
    figure.legend(
        [*handles, *chance],
        [*labels, "may be chance", "more than chance"],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.get_layout_engine().set(h_pad=0.06)
    save_plot(figure, path)


def by_round(curves: Mapping[str, Any], rows_here: Rows, path: Path) -> bool:
    """Draw bounds, our own and the best other methods by round. Return False if there are no curves."""
    methods = [row for row in rows_here if row in curves and is_method(row)]
    own = [row for row in methods if is_own(row)]
    best = sorted((row for row in methods if row not in own), key=lambda row: -score(rows_here[row]))[:DRAWN]
    figure, axes = empty_plot("balanced accuracy on test, %")
    styles = {FLOOR: {"color": GREY, "linestyle": ":"}, CEILING: {"color": GREY, "linestyle": "--"}}
    styles |= {row: {"color": color} for row, color in zip([*own, *best], COLORS, strict=False)}
    drawn = [row for row in styles if row in curves]
    for row in drawn:
        seeds = list(curves[row].values())
        known = zip(seeds[0]["round"], *(seed["test"] for seed in seeds), strict=False)
        draw(axes, {number: 100 * statistics.fmean(values) for number, *values in known}, label=row, **styles[row])
    if drawn:
        finish_plot(figure, path)
    return bool(drawn)
