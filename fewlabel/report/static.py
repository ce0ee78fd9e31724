"""Charts as matplotlib draws them: for files, for paper, and for browsers without scripts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from fewlabel.report.charts import Bars, Cells, Chart, Intervals, Lines
from fewlabel.report.style import (
    GREY,
    INKS,
    RIGHT,
    WIDE,
    WRONG,
    contrast,
    draw,
    empty_plot,
    finish_plot,
    name_ticks,
    written,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

DASHES = {"": "-", "dot": (0, (2, 2)), "dash": (0, (6, 2))}
MOST_NUMBERS = 12  # rows and columns of a matrix whose numbers can be read
MOST_PARTS = 50  # of bars that are drawn one by one; more are one image, which is smaller


@dataclass(frozen=True)
class Drawing:
    """A chart with its caption, and its content in words for those who cannot see it."""

    chart: Chart
    caption: str
    alt: str

    @cached_property
    def figure(self) -> "Figure":
        """The chart as matplotlib draws it."""
        return figure_of(self.chart)


def figure_of(chart: Chart) -> "Figure":
    """Draw a chart."""
    if isinstance(chart, Lines):
        return lines(chart)
    if isinstance(chart, Cells):
        return cells(chart)
    return bars(chart) if isinstance(chart, Bars) else intervals(chart)


def lines(chart: Lines) -> "Figure":
    """Draw curves over the rounds. Bands are one standard deviation."""
    figure, axes = empty_plot(chart.ylabel)
    for line in chart.lines:
        style = {"linestyle": DASHES[line.dash]} | ({"zorder": 3} if line.dash else {})  # in front of an equal curve
        draw(axes, line.points, label=line.name, color=line.color, **style)
        if line.spread:
            band = {at: (line.points[at], std) for at, std in line.spread.items()}
            low, high = [mean - std for mean, std in band.values()], [mean + std for mean, std in band.values()]
            axes.fill_between(list(band), low, high, color=line.color, alpha=0.15, linewidth=0)
    if chart.chosen is not None:
        axes.axvline(chart.chosen, color=GREY, linewidth=0.8, label="chosen on validation")
    if chart.percent:
        limit_to_percent(axes)
    else:
        axes.set_ylim(bottom=0)
    return finish_plot(figure)


def limit_to_percent(axes: "Axes") -> None:
    """Keep the y axis within 0 and 100, and at least 10 high, so that flat curves look flat."""
    low, high = axes.get_ylim()
    more = max(0.0, 10 - (high - low)) / 2
    low, high = max(0.0, low - more), min(100.0, high + more)
    edge = 0.03 * (high - low)  # so that a curve at 0 or 100 is visible
    axes.set_ylim(low - edge, high + edge)


def shades(color: str) -> "Colormap":
    """Return the shades of a colour, from none at all, so that zeros are as the paper is."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgb

    return LinearSegmentedColormap.from_list(color, [(*to_rgb(color), 0.0), (*to_rgb(color), 1.0)])


def ink(color: str, share: float) -> str:
    """Return what a number is written in on a share of a colour on white: black or white, with the larger contrast."""
    from matplotlib.colors import to_rgb

    shade = [1 + share * (part - 1) for part in to_rgb(color)]
    return max(INKS, key=lambda ink: contrast(to_rgb(ink), shade))


def row(height: float, names: Sequence[str]) -> float:
    """Return the height of a row in inches: more if a name needs several lines."""
    return max(height, 0.17 * max((text.count("\n") + 1 for text in written(names)), default=1))


def cells(chart: Cells) -> "Figure":
    """Draw cells of colour, with their numbers if there is room. Unknown values stay blank."""
    import numpy as np
    from matplotlib.figure import Figure

    high, wide = chart.values.shape
    figure = Figure(figsize=(WIDE, min(7.0, max(1.6, row(0.27, chart.down) * high + 1.3))), layout="constrained")
    axes = figure.subplots()
    lowest, highest = chart.range
    values, right = np.ma.masked_invalid(chart.values), np.eye(high, wide, dtype=bool)
    common: dict[str, Any] = {"vmin": lowest, "aspect": "auto", "interpolation": "none", "resample": False}
    shown = np.ma.masked_where(~right, values) if chart.diagonal else values
    image = axes.imshow(shown, vmax=highest, cmap=shades(RIGHT), **common)
    if chart.diagonal:
        mistakes = np.ma.masked_where(right, values)
        axes.imshow(mistakes, vmax=highest / 2, cmap=shades(WRONG), **common)  # half of a class is bad enough
    name_ticks(axes, "y", chart.down)
    name_ticks(axes, "x", chart.across)
    axes.set_ylabel(chart.ylabel)
    axes.set_xlabel(chart.xlabel)
    for spine in axes.spines.values():
        spine.set(color=GREY, linewidth=0.5)
    if wide <= MOST_NUMBERS and high <= 2 * MOST_NUMBERS:
        for (y, x), value in np.ndenumerate(chart.values):
            if np.isfinite(value) and not (chart.diagonal and y != x and not round(value)):
                color, top = (WRONG, highest / 2) if chart.diagonal and y != x else (RIGHT, highest)
                share = min(1.0, max(0.0, (value - lowest) / (top - lowest))) if top > lowest else 0.0
                style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 9, "color": ink(color, share)}
                axes.text(x, y, f"{value:.{chart.digits}f}", **style)
    else:
        figure.colorbar(image, ax=axes, pad=0.02)
    return figure


def bars(chart: Bars) -> "Figure":
    """Draw a bar of stacked parts for each name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE, max(2.0, row(0.27, chart.names) * len(chart.names) + 1.4)), layout="constrained")
    axes = figure.subplots()
    stack(axes, chart)
    for text, bold in zip(axes.get_yticklabels(), chart.bold, strict=False):
        text.set_fontweight("bold" if bold else "normal")
    axes.set_xlabel(chart.xlabel)
    axes.set_ylabel(chart.ylabel)
    return finish_plot(figure)


def stack(axes: "Axes", chart: Bars) -> None:
    """Draw the bars of a chart, with their names beside them. A part without a name is not in the legend."""
    left, many = [0.0] * len(chart.names), len(chart.parts) > MOST_PARTS
    for part in chart.parts:
        label = part.name if chart.legend and part.name else None
        axes.barh(range(len(left)), part.values, left=left, color=part.color, label=label, rasterized=many)
        left = [a + b for a, b in zip(left, part.values, strict=True)]
    for tick in axes.set_yticks(range(len(left)), written(chart.names)):
        tick.label1.set_parse_math(False)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.04 * max(left, default=0) or None)
    axes.spines[["top", "right"]].set_visible(False)


def intervals(chart: Intervals) -> "Figure":
    """Draw each value as a dot, and its interval as a line through it."""
    from matplotlib.figure import Figure

    names = [mark.name for mark in chart.marks]
    figure = Figure(figsize=(WIDE, max(1.8, row(0.32, names) * len(names) + 1.3)), layout="constrained")
    axes = figure.subplots()
    for (name, value), dash in zip(chart.lines.items(), (DASHES["dot"], DASHES["dash"]), strict=False):
        axes.axvline(value, color=GREY, linestyle=dash, linewidth=1, label=name)
    for place, mark in enumerate(chart.marks):
        if mark.interval:
            axes.plot(mark.interval, [place, place], color=mark.color, linewidth=2)
        axes.plot([mark.value], [place], marker="o", color=mark.color)
        axes.annotate(
            f"{mark.value:.1f}", (mark.value, place), (0, 6), textcoords="offset points", ha="center", fontsize=9
        )
    name_ticks(axes, "y", names)
    axes.set_ylim(len(chart.marks) - 0.5, -0.7)
    axes.set_xlabel(chart.xlabel)
    axes.grid(axis="x", color=GREY, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return finish_plot(figure)
