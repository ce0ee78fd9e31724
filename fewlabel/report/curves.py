"""Curves over the rounds: means over seeds, with one standard deviation as a band."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fewlabel.report.runs import CEILING, FLOOR, METRICS, Pick, Row, Run, pick_pseudo_labels, pick_test
from fewlabel.report.style import COLORS, GREY, Drawing, draw, empty_plot, finish_plot
from fewlabel.report.tables import Spread, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES = {FLOOR: (0, (2, 2)), CEILING: (0, (6, 2))}
MOST_POINTS = 120  # of a curve; more would only make the file larger


def colors_of(rows: Sequence[Row]) -> dict[str, str]:
    """Give each row a colour, the same in all plots of a page."""
    methods = dict.fromkeys(row.label for row in rows if row.name not in DASHES)
    return {label: COLORS[number % len(COLORS)] for number, label in enumerate(methods)}


def curves(rows: Sequence[Row], pick: Pick, ylabel: str, colors: Mapping[str, str] | None = None) -> "Figure":
    """Draw a share by round, a curve for each row."""
    figure, axes = empty_plot(ylabel)
    colors = colors or colors_of(rows)
    for row in rows:
        curve = thinned(row.curve(pick))
        bound = row.name in DASHES
        color = GREY if bound else colors[row.label]
        means = {number: 100 * spread.mean for number, spread in curve.items()}
        style = {"linestyle": DASHES[row.name], "zorder": 3} if bound else {}  # in front of a method on the same line
        draw(axes, means, label=row.label, color=color, **style)
        band = {number: (means[number], 100 * s.std) for number, s in curve.items() if s.std is not None}
        if band:
            low, high = [mean - std for mean, std in band.values()], [mean + std for mean, std in band.values()]
            axes.fill_between(list(band), low, high, color=color, alpha=0.15, linewidth=0)
    limit_to_percent(axes)
    return finish_plot(figure)


def limit_to_percent(axes: "Axes") -> None:
    """Keep the y axis within 0 and 100, and at least 10 high, so that flat curves look flat."""
    low, high = axes.get_ylim()
    more = max(0.0, 10 - (high - low)) / 2
    low, high = max(0.0, low - more), min(100.0, high + more)
    edge = 0.03 * (high - low)  # so that a curve at 0 or 100 is visible
    axes.set_ylim(low - edge, high + edge)


def thinned(curve: Mapping[int, Spread]) -> dict[int, Spread]:
    step = -(-len(curve) // MOST_POINTS)
    return {number: spread for n, (number, spread) in enumerate(curve.items()) if not (len(curve) - 1 - n) % step}


def curve_drawing(label: str, rows: Sequence[Row], pick: Pick, what: str, colors: Mapping[str, str]) -> Drawing | None:
    """Draw the rows that have something to show, or return None if there are none."""
    ends = {row.label: list(curve.values())[-1] for row in rows if (curve := row.curve(pick))}
    if not ends:
        return None
    shown = [row for row in rows if row.label in ends]
    caption = f"{what}{', ' + label if label else ''}"
    alt = f"{caption}, in percent by round. At the end: " + "; ".join(f"{row} {end}" for row, end in ends.items())
    return Drawing(curves(shown, pick, f"{what[0].lower()}{what[1:]}, %", colors), caption, alt)


def drawings(groups: Mapping[str, Sequence[Row]], picks: Mapping[str, Pick]) -> Iterator[Drawing]:
    """Draw each of the named numbers for each group."""
    colors = colors_of([row for group in groups.values() for row in group])
    for label, group in groups.items():
        for what, pick in picks.items():
            if drawing := curve_drawing(label, group, pick, what, colors):
                yield drawing


def curves_on_test(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    return drawings(groups, {f"Test {METRICS[key]}": pick_test(key) for key in ("accuracy", "auc")})


def pseudo_label_curves(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    return drawings(groups, {f"Pseudo-label {key}": pick_pseudo_labels(key) for key in ("precision", "coverage")})


def run_curves(run: Run) -> Iterator[Drawing]:
    """Draw accuracy and AUC of a single run, a plot for each."""
    last = (run.last or {}).get("test", {})
    for key, caption in {"accuracy": "Accuracy", "auc": "AUC"}.items():
        alt = f"{caption} in percent by round. Test at the end: {percent(last.get(key))}"
        yield Drawing(metric_curves(run, key), caption, alt)


def metric_curves(run: Run, *keys: str) -> "Figure":
    """Draw metrics of a run on test and on validation, and the round that validation chose."""
    figure, axes = empty_plot("%")
    for key, color in zip(keys, COLORS, strict=False):
        for split, dashes in {"test": "-", "validation": "--"}.items():
            found = {line["round"]: line[split][key] for line in run.rounds if split in line}
            points = {number: 100 * value for number, value in found.items() if value is not None}
            draw(axes, points, label=f"{split} {METRICS[key]}", color=color, linestyle=dashes)
    if run.chosen:
        axes.axvline(run.chosen["round"], color=GREY, linewidth=0.8, label="chosen on validation")
    limit_to_percent(axes)
    return finish_plot(figure)
