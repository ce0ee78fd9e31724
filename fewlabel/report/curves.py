"""Curves over the rounds: means over seeds, with one standard deviation as a band."""

from collections.abc import Iterator, Mapping, Sequence

from fewlabel.report.charts import Intervals, Line, Lines, Mark
from fewlabel.report.runs import CEILING, FLOOR, METRICS, Pick, Row, Run, pick_pseudo_labels, pick_test
from fewlabel.report.static import Drawing
from fewlabel.report.style import COLORS, GREY
from fewlabel.report.tables import Spread, percent

DASHES = {FLOOR: "dot", CEILING: "dash"}
MAIN = "balanced_accuracy"
SHOWN = (MAIN, "accuracy", "auc")
MOST_POINTS = 120  # of a curve; more would only make the file larger


def colors_of(rows: Sequence[Row]) -> dict[str, str]:
    """Give each row a colour, the same in all plots of a page."""
    methods = dict.fromkeys(row.label for row in rows if row.name not in DASHES)
    return {label: COLORS[number % len(COLORS)] for number, label in enumerate(methods)}


def curves(rows: Sequence[Row], pick: Pick, ylabel: str, colors: Mapping[str, str] | None = None) -> Lines:
    """Return a share by round, a curve for each row."""
    colors, lines = colors or colors_of(rows), []
    for row in rows:
        curve, bound = thinned(row.curve(pick)), row.name in DASHES
        means = {number: 100 * spread.mean for number, spread in curve.items()}
        spread = {number: 100 * one.std for number, one in curve.items() if one.std is not None}
        lines.append(
            Line(row.label, means, GREY if bound else colors[row.label], DASHES[row.name] if bound else "", spread)
        )
    return Lines(tuple(lines), ylabel, rows=True)


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
    return drawings(
        groups, {f"Test {METRICS[key]}": pick_test(key) for key in ("balanced_accuracy", "accuracy", "auc")}
    )


def pseudo_label_curves(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    return drawings(groups, {f"Pseudo-label {key}": pick_pseudo_labels(key) for key in ("precision", "coverage")})


def run_curves(run: Run) -> Iterator[Drawing]:
    """Draw accuracy and AUC of a single run, a plot for each."""
    last = (run.last or {}).get("test", {})
    for key in SHOWN:
        caption = f"{METRICS[key][0].upper()}{METRICS[key][1:]}"
        alt = f"{caption} in percent by round. Test at the end: {percent(last.get(key))}"
        yield Drawing(metric_curves(run, key), caption, alt)


def metric_curves(run: Run, *keys: str) -> Lines:
    """Return metrics of a run on test and on validation, and the round that validation chose."""
    lines = []
    for key, color in zip(keys, COLORS, strict=False):
        for split, dash in {"test": "", "validation": "dash"}.items():
            found = {line["round"]: line[split][key] for line in run.rounds if split in line}
            points = {number: 100 * value for number, value in found.items() if value is not None}
            lines.append(Line(f"{split} {METRICS[key]}", points, color, dash))
    return Lines(tuple(lines), "%", chosen=run.chosen["round"] if run.chosen else None)


def measured_marks(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    """Draw the balanced accuracy of each row with its interval. Floor and ceiling are also lines across all rows."""
    colors = colors_of([row for group in groups.values() for row in group])
    for label, group in groups.items():
        marks, lines = list[Mark](), dict[str, float]()
        for row in group:
            if spread := row.last[MAIN]:
                ends = row.interval.get(MAIN)
                interval = None if ends is None else (100 * ends[0], 100 * ends[1])
                marks.append(Mark(row.label, 100 * spread.mean, interval, colors.get(row.label, GREY)))
                lines |= {row.label: 100 * spread.mean} if row.name in DASHES else {}
        if marks:
            caption = f"Test {METRICS[MAIN]}, %, with 95 % intervals{', ' + label if label else ''}"
            in_words = "; ".join(f"{mark.name} {mark.value:.1f}" for mark in marks)
            yield Drawing(Intervals(tuple(marks), METRICS[MAIN] + ", %", lines), caption, f"{caption}: {in_words}")
