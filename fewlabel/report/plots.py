"""The plots of a report: what rounds.jsonl and partition.json hold, drawn by matplotlib.

Curves are means over seeds with one standard deviation around them as a band; matrices are means over seeds, too.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fewlabel.core.described import plots as method_plots
from fewlabel.core.plots import ClassMatrix, PerClass, PerClient, Plot
from fewlabel.report.results import CEILING, FLOOR, METRICS, Line, Result, Row
from fewlabel.report.style import COLORS, GREY, WIDE, Drawing, draw, empty_plot, finish_plot, saved
from fewlabel.report.tables import Spread, megabytes, percent, seconds

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Array = np.ndarray[Any, np.dtype[np.float64]]

__all__ = ["course", "curves", "left_out", "plots", "saved", "test"]

DASHES = {FLOOR: (0, (2, 2)), CEILING: (0, (6, 2))}
MOST_POINTS = 120  # of a curve, which more would only make larger
MOST_NUMBERS = 12  # rows and columns of a matrix whose numbers can be read
MOST_CLIENTS = 40  # whose bars can
MOST_ROWS = 10  # that have plots of their own: a page must stay small
MOST_SETTINGS = 6
PERCENT = (0.0, 100.0)
ABOUT = {
    "Over the rounds": "On images that nobody trains on. labels-only, the floor, has no use for unlabeled images; "
    "all-labels, the ceiling, has all labels. Lines are means over seeds, bands one standard deviation.",
    "Recall by class": "Of the test images of a class, how many the model finds.",
    "Confusion": "A row for each class: what the model says of its test images. What is right is on the diagonal.",
    "Pseudo-labels": "Those that a method gives to unlabeled images itself. Precision is the share that is right, "
    "which no method is told; coverage is the share of unlabeled images that have one. Blank: none was given.",
}

Pick = Callable[[Line], float | None]


def plots(groups: Mapping[str, Sequence[Row]]) -> dict[str, list[Drawing]]:
    """The sections of a page and their plots, for rows in one setting or more; sections may be empty."""
    groups = dict(list(groups.items())[:MOST_SETTINGS])
    told = {row.results: " ".join(filter(None, (row.label, words))) for words, group in groups.items() for row in group}
    rows = [Row(label, results) for results, label in told.items()][:MOST_ROWS]
    alone = len(rows) == 1 and len(rows[0].results) == 1
    return {
        "Over the rounds": list(alone_over_rounds(rows[0].results[0]) if alone else over_rounds(groups)),
        "Recall by class": list(recalls(groups)),
        "Confusion": [drawing for row in rows if (drawing := confusion(row))],
        "Who holds what": [drawing for words, group in groups.items() if (drawing := holdings(words, group[0]))],
        "Pseudo-labels": [*pseudo_labels(groups), *(d for row in rows for d in pseudo_labels_by_class(row))],
        **of_methods(rows),
        "Costs": list(costs_by_round(rows[0]) if alone else costs(groups)),
    }


def left_out(groups: Mapping[str, Sequence[Row]]) -> str:
    """What the plots do not show, as a paragraph of the page."""
    rows = len({row.results for group in list(groups.values())[:MOST_SETTINGS] for row in group})
    told = [f"of the first {MOST_SETTINGS} of {len(groups)} settings"] if len(groups) > MOST_SETTINGS else []
    told += [f"by class and client of the first {MOST_ROWS} of {rows} rows"] if rows > MOST_ROWS else []
    return f"<p><small>Plots are {', and '.join(told)}.</small></p>\n" if told else ""


# curves


def test(metric: str) -> Pick:
    return lambda line: line.get("test", {}).get(metric)


def pseudo(key: str) -> Pick:
    return lambda line: line.get("pseudo_labels", {}).get(key)


def palette(rows: Sequence[Row]) -> dict[str, str]:
    """A colour for each row, the same in all plots of a page."""
    methods = dict.fromkeys(row.label for row in rows if row.name not in DASHES)
    return {label: COLORS[number % len(COLORS)] for number, label in enumerate(methods)}


def curves(rows: Sequence[Row], pick: Pick, ylabel: str, colors: Mapping[str, str] | None = None) -> "Figure":
    """A share by round: the mean over seeds, one standard deviation around it as a band."""
    figure, axes = empty_plot(ylabel)
    colors = colors or palette(rows)
    for row in rows:
        curve = thinned(row.curve(pick))
        bound = row.name in DASHES
        color = GREY if bound else colors[row.label]
        means = {number: 100 * spread.mean for number, spread in curve.items()}
        style = {"linestyle": DASHES[row.name], "zorder": 3} if bound else {}  # seen even where a method lies on it
        draw(axes, means, label=row.label, color=color, **style)
        band = {number: (means[number], 100 * s.std) for number, s in curve.items() if s.std is not None}
        if band:
            low, high = [mean - std for mean, std in band.values()], [mean + std for mean, std in band.values()]
            axes.fill_between(list(band), low, high, color=color, alpha=0.15, linewidth=0)
    within_percent(axes)
    return finish_plot(figure)


def within_percent(axes: "Axes") -> None:
    """No more than there can be, nor so little that a flat curve looks like much."""
    low, high = axes.get_ylim()
    more = max(0.0, 10 - (high - low)) / 2
    low, high = max(0.0, low - more), min(100.0, high + more)
    edge = 0.03 * (high - low)  # a curve at 0 or 100 is seen, too
    axes.set_ylim(low - edge, high + edge)


def thinned(curve: Mapping[int, Spread]) -> dict[int, Spread]:
    step = -(-len(curve) // MOST_POINTS)
    return {number: spread for n, (number, spread) in enumerate(curve.items()) if not (len(curve) - 1 - n) % step}


def curve_drawing(words: str, rows: Sequence[Row], pick: Pick, what: str, colors: Mapping[str, str]) -> Drawing | None:
    """A plot of curves, unless no row has anything to show."""
    ends = {row.label: list(curve.values())[-1] for row in rows if (curve := row.curve(pick))}
    if not ends:
        return None
    shown = [row for row in rows if row.label in ends]
    caption = f"{what}{', ' + words if words else ''}"
    alt = f"{caption}, in percent by round. At the end: " + "; ".join(f"{row} {end}" for row, end in ends.items())
    return Drawing(curves(shown, pick, f"{what[0].lower()}{what[1:]}, %", colors), caption, alt)


def over_rounds(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    colors = palette([row for group in groups.values() for row in group])
    for words, group in groups.items():
        for key in ("accuracy", "auc"):
            if drawing := curve_drawing(words, group, test(key), f"Test {METRICS[key]}", colors):
                yield drawing


def alone_over_rounds(result: Result) -> Iterator[Drawing]:
    last = (result.last or {}).get("test", {})
    for key, caption in {"accuracy": "Accuracy", "auc": "AUC"}.items():
        end = f"{caption} in percent by round. Test at the end: {percent(last.get(key))}"
        yield Drawing(course(result, key), caption, end)


def course(result: Result, *keys: str) -> "Figure":
    """Metrics of a run, on test and on validation, and the round that validation chose."""
    figure, axes = empty_plot("%")
    for key, color in zip(keys, COLORS, strict=False):
        for split, dashes in {"test": "-", "validation": "--"}.items():
            found = {line["round"]: line[split][key] for line in result.rounds if split in line}
            points = {number: 100 * value for number, value in found.items() if value is not None}
            draw(axes, points, label=f"{split} {METRICS[key]}", color=color, linestyle=dashes)
    if result.chosen:
        axes.axvline(result.chosen["round"], color=GREY, linewidth=0.8, label="chosen on validation")
    within_percent(axes)
    return finish_plot(figure)


def pseudo_labels(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    colors = palette([row for group in groups.values() for row in group])
    for words, group in groups.items():
        for key in ("precision", "coverage"):
            if drawing := curve_drawing(words, group, pseudo(key), f"Pseudo-label {key}", colors):
                yield drawing


# matrices


def mean(tables: Sequence[Any]) -> "Array":
    """Over seeds, leaving out what is unknown; all of one shape."""
    import warnings

    import numpy as np

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where nobody knows, the mean is unknown
        found: Array = np.nanmean(np.array(tables, dtype=float), axis=0)
    return found


def matrix(
    values: "Array",
    down: Sequence[str],
    across: Sequence[str],
    ylabel: str,
    xlabel: str,
    scale: tuple[float, float] | None = None,
    digits: int = 0,
) -> "Figure":
    """Cells of colour, with their numbers where there is room; what nobody knows is left blank."""
    import numpy as np
    from matplotlib.figure import Figure

    high, wide = values.shape
    figure = Figure(figsize=(WIDE, min(7.0, max(1.6, 0.27 * high + 1.3))), layout="constrained")
    axes = figure.subplots()
    lowest, highest = scale or (0.0, float(np.nanmax(values)) if np.isfinite(values).any() else 1.0)
    cells = axes.imshow(
        values, vmin=lowest, vmax=highest, cmap="viridis", aspect="auto", interpolation="none", resample=False
    )
    ticks(axes, "y", down)
    ticks(axes, "x", across)
    axes.set_ylabel(ylabel)
    axes.set_xlabel(xlabel)
    axes.spines[:].set_visible(False)
    if wide <= MOST_NUMBERS and high <= 2 * MOST_NUMBERS:
        for (y, x), value in np.ndenumerate(values):
            if np.isfinite(value):
                bright = value > lowest + 0.6 * (highest - lowest)
                axes.text(
                    x,
                    y,
                    f"{value:.{digits}f}",
                    ha="center",
                    va="center",
                    fontsize=9,
                    color="#101010" if bright else "#fefefe",
                )
    else:
        figure.colorbar(cells, ax=axes, pad=0.02)
    return figure


def ticks(axes: "Axes", side: str, names: Sequence[str]) -> None:
    """Names beside cells: all of them, or as many as there is room for."""
    short = [name if len(name) <= 18 else name[:17] + "…" for name in names]
    longest = max(map(len, short), default=0)
    step = -(-len(names) // (30 if side == "y" else 8 if longest == 3 else 16))  # turned, they need less room
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if longest > 3 else {}
    places = range(0, len(names), step)
    texts: Any = getattr(axes, f"set_{side}ticks")
    for tick in texts(list(places), [short[n] for n in places], **(turned if side == "x" else {})):
        for text in (tick.label1, tick.label2):
            text.set_parse_math(False)


def recalls(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    for words, group in groups.items():
        known = {row: tests for row in group if (tests := tested(row))}
        if not known:
            continue
        values = 100 * stacked([[test["recall_per_class"] for test in tests] for tests in known.values()])
        classes = next(iter(known)).results[0].classes
        caption = f"Recall by class, last round, %{', ' + words if words else ''}"
        told = "; ".join(
            f"{row.label}: " + ", ".join(f"{name} {value:.0f}" for name, value in zip(classes, line, strict=True))
            for row, line in zip(known, values, strict=True)
        )
        figure = matrix(values, [row.label for row in known], classes, "", "class", PERCENT)
        yield Drawing(figure, caption, f"{caption}. {told}" if len(classes) <= MOST_NUMBERS else caption)


def stacked(tables: Sequence[Sequence[Any]]) -> "Array":
    import numpy as np

    return np.array([mean(table) for table in tables])


def tested(row: Row) -> list[Line]:
    return [result.last["test"] for result in row.results if result.last and "test" in result.last]


def confusion(row: Row) -> Drawing | None:
    import numpy as np

    tests = tested(row)
    if not tests:
        return None
    counts = np.sum([t["confusion"] for t in tests], axis=0, dtype=float)
    with np.errstate(invalid="ignore"):
        shares = 100 * counts / counts.sum(1, keepdims=True)
    classes = row.results[0].classes
    alt = f"Confusion matrix of {row.label}: of the images of each class, the share that is said to be of another, in %"
    return Drawing(
        matrix(shares, classes, classes, "class", "class said", PERCENT),
        f"{row.label}: what is said of each class, %",
        alt,
    )


def by_round(row: Row, pick: Callable[[Line], Sequence[Any] | None]) -> tuple[list[str], "Array"] | None:
    """Rounds, and a list of numbers in each as a column, in the mean over seeds."""
    found: dict[int, list[Sequence[Any]]] = {}
    for result in row.results:
        for line in result.rounds:
            if (values := pick(line)) is not None:
                found.setdefault(line["round"], []).append(values)
    if not found:
        return None
    numbers = sorted(found)
    step = -(-len(numbers) // MOST_POINTS)
    kept = numbers[(len(numbers) - 1) % step :: step]
    return list(map(str, kept)), stacked([found[number] for number in kept]).T


def pseudo_labels_by_class(row: Row) -> Iterator[Drawing]:
    def precision(line: Line) -> Sequence[Any] | None:
        shares: Sequence[float | None] | None = line.get("pseudo_labels", {}).get("precision_per_class")
        return None if shares is None else [None if share is None else 100 * share for share in shares]

    def coverage(line: Line) -> Sequence[Any] | None:
        labels: Mapping[str, Any] = line.get("pseudo_labels", {})
        used = labels.get("used_per_class", ())
        return [100 * (labels["coverage"] or 0) * count / max(1, sum(used)) for count in used] or None

    if not any(line.get("pseudo_labels", {}).get("coverage") for result in row.results for line in result.rounds):
        return  # nobody gave any
    told = {
        f"{row.label}: precision of each pseudo-label, %": (precision, PERCENT),
        f"{row.label}: unlabeled images with each pseudo-label, %": (coverage, None),
    }
    for caption, (pick, scale) in told.items():
        if found := by_round(row, pick):
            rounds, values = found
            figure = matrix(values, row.results[0].classes, rounds, "pseudo-label", "round", scale)
            yield Drawing(figure, caption, f"{caption}, by round")


def of_methods(rows: Sequence[Row]) -> dict[str, list[Drawing]]:
    """What the rows' methods want drawn, by section."""
    found: dict[str, list[Drawing]] = {}
    for row in rows:
        for plot in method_plots(row.experiment.method):
            draw: Callable[[Row, Any], Iterator[Drawing]] = DRAWN[type(plot)]
            found.setdefault(plot.section, []).extend(draw(row, plot))
    return found


def about_sections(rows: Iterable[Row]) -> dict[str, str]:
    """What each section shows."""
    return ABOUT | {plot.section: plot.about for row in rows for plot in method_plots(row.experiment.method)}


def per_class(row: Row, plot: PerClass) -> Iterator[Drawing]:
    """A value of each class over the rounds."""
    import numpy as np

    if found := by_round(row, lambda line: line.get(plot.key)):
        rounds, values = found
        scale = float(np.nanmin(values)), float(np.nanmax(values))
        figure = matrix(values, row.results[0].classes, rounds, "class", "round", scale, digits=2)
        yield Drawing(figure, f"{row.label}: {plot.title}", f"{plot.title.capitalize()} by round, {row.label}")


def per_client(row: Row, plot: PerClient) -> Iterator[Drawing]:
    """A share of each client over the rounds, such as its weight in the server's average."""
    import numpy as np

    named = re.compile(rf"{plot.prefix}_(\d+)")
    keys = {key for result in row.results for line in result.rounds for key in line}
    known = {int(match[1]): match[0] for match in filter(None, map(named.fullmatch, keys))}
    each = ({c["id"] for c in result.partition.get("clients", ()) if c["labeled"]} for result in row.results)
    labeled, clients = set.intersection(*each), sorted(known)  # labeled whatever the seed

    def pick(line: Line) -> list[Any] | None:
        return [line.get(known[c], 0.0) for c in clients] if line.keys() & known.values() else None

    if found := by_round(row, pick):
        rounds, values = found
        values[values == 0] = np.nan  # left out by all seeds
        names = [f"{client} (labels)" if client in labeled else str(client) for client in clients]
        figure = matrix(100 * values, names, rounds, "client", "round")
        caption = f"{row.label}: {plot.title}, %"
        yield Drawing(figure, caption, f"{caption}, by round; clients {sorted(labeled)} have labels")


def matrix_line(result: Result, key: str) -> Line | None:
    """The last round's line that has a matrix of labeled and one of unlabeled clients."""
    found = [line for line in result.rounds if key in line and key in line.get("shown", {})]
    return found[-1] if found else None


def class_matrix(row: Row, plot: ClassMatrix) -> Iterator[Drawing]:
    """A matrix of classes at labeled and at unlabeled clients, and how far they differ."""
    import numpy as np

    lines = [line for result in row.results if (line := matrix_line(result, plot.key))]
    if not lines:
        return
    first, second = mean([line[plot.key] for line in lines]), mean([line["shown"][plot.key] for line in lines])
    classes = row.results[0].classes
    for name, values in {
        "at labeled clients": first,
        "at unlabeled clients": second,
        "absolute difference": np.abs(first - second),
    }.items():
        if not np.isfinite(values).any():  # no client was sure of any image
            continue
        scale = (0.0, float(np.nanmax([first, second])))
        caption = f"{row.label}, round {lines[0]['round']}: {name}"
        figure = matrix(values, classes, classes, "class", "class said", scale, digits=2)
        yield Drawing(figure, caption, f"{plot.section}, {caption}")


# bars


DRAWN: dict[type[Plot], Callable[[Row, Any], Iterator[Drawing]]] = {
    PerClass: per_class,
    PerClient: per_client,
    ClassMatrix: class_matrix,
}


def holdings(words: str, row: Row) -> Drawing | None:
    """The classes of each client's images, and who has labels."""
    import numpy as np
    from matplotlib.figure import Figure

    from fewlabel.report.clients import stack

    result = row.results[0]
    partition, classes = result.partition, result.classes
    clients = partition.get("clients", [])
    if not clients:
        return None
    shown = [(str(c["id"]), c["classes"], len(c["labeled"]), len(c["labeled"]) + len(c["unlabeled"])) for c in clients]
    shown = shown[:MOST_CLIENTS]
    if partition["server"]["labeled"]:
        size = len(partition["server"]["labeled"])
        shown.insert(0, ("server", partition["server"]["classes"], size, size))
    figure = Figure(figsize=(WIDE, max(2.4, 0.24 * len(shown) + 1.6)), layout="constrained")
    axes = figure.subplots()
    names = [who if not has else f"{who} ● {'all' if has == total else has} labeled" for who, _, has, total in shown]
    totals = [total for _, _, _, total in shown]
    stack(axes, names, classes, {1.0: np.array([histogram for _, histogram, _, _ in shown])}, totals)
    for text, (_, _, has, _) in zip(axes.get_yticklabels(), shown, strict=True):
        text.set_fontweight("bold" if has else "normal")
    axes.set_xlim(0, 1.04 * max(totals) or None)
    axes.set_xlabel("images")
    axes.set_ylabel("client")
    left = len(clients) - MOST_CLIENTS
    caption = f"Images of each client by class{', ' + words if words else ''}; ● has labels; seed {result.seed}"
    caption += f"; {left} more clients not shown" if left > 0 else ""
    told = "; ".join(f"{who}: {total} images, {has} labeled" for who, _, has, total in shown)
    return Drawing(finish_plot(figure), caption, f"{caption}. {told}")


PHASES = {"seconds_train": "clients at work", "seconds_server": "server at work", "seconds_evaluate": "evaluation"}


def phases(spent: Mapping[str, float]) -> dict[str, float]:
    """Seconds by what a run waited for; older runs did not tell clients and server apart."""
    train = spent.get("seconds_train", 0.0)
    if not train:
        return {"clients and server": spent["seconds"]}
    found = {**spent, "seconds_server": max(0.0, spent["seconds"] - train)}
    return {name: found.get(key, 0.0) for key, name in PHASES.items()}


def costs(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    for words, group in groups.items():
        end = f", {words}" if words else ""
        up, down = ([row.spent[key] for row in group] for key in ("bytes_up", "bytes_down"))
        sent = zip(group, up, down, strict=True)
        told = "; ".join(f"{row.label} {megabytes(u)} up, {megabytes(d)} down" for row, u, d in sent)
        figure = bars(group, {"up": [b / 1e6 for b in up], "down": [b / 1e6 for b in down]}, "MB")
        yield Drawing(figure, f"Sent by clients (up) and to them (down), MB{end}", f"MB sent{end}: {told}")
        waited = [phases(row.spent) for row in group]
        kinds = dict.fromkeys(name for each in waited for name in each)
        figure = bars(group, {name: [each.get(name, 0.0) for each in waited] for name in kinds}, "seconds")
        told = "; ".join(f"{row.label} {by_phase(each)}" for row, each in zip(group, waited, strict=True))
        caption = f"Seconds of a run by phase{end}"
        yield Drawing(figure, caption, f"{caption}: {told}")


def by_phase(waited: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds(count)}" for name, count in waited.items())


def bars(rows: Sequence[Row], parts: Mapping[str, Sequence[float]], xlabel: str) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE, max(2.0, 0.3 * len(rows) + 1.2)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for (name, values), color in zip(parts.items(), COLORS, strict=False):
        axes.barh(range(len(rows)), values, left=left, color=color, label=name or None)
        left = [a + b for a, b in zip(left, values, strict=True)]
    ticks(axes, "y", [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    return finish_plot(figure)


def costs_by_round(row: Row) -> Iterator[Drawing]:
    """Of a single run."""
    lines, spent = row.results[0].rounds, row.spent
    if not lines:
        return
    figure, axes = empty_plot("MB")
    for (key, name), color in zip({"bytes_up": "up", "bytes_down": "down"}.items(), COLORS, strict=False):
        draw(axes, {line["round"]: line[key] / 1e6 for line in lines}, label=name, color=color)
    axes.set_ylim(bottom=0)
    told = f"{megabytes(spent['bytes_up'])} up and {megabytes(spent['bytes_down'])} down in all"
    yield Drawing(finish_plot(figure), "Sent by clients (up) and to them (down), MB", f"MB sent by round: {told}")
    figure, axes = empty_plot("seconds")
    waited = {line["round"]: phases(line) for line in lines}
    for name, color in zip(dict.fromkeys(name for each in waited.values() for name in each), COLORS, strict=False):
        points = {number: each[name] for number, each in waited.items() if name in each}
        draw(axes, points, label=name, color=color)
    axes.set_ylim(bottom=0)
    told = by_phase(phases(spent))
    yield Drawing(finish_plot(figure), "Seconds of each round by phase", f"Seconds by round and phase; in all {told}")
