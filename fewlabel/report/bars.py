"""Bars: the images of each client, and what a run costs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from fewlabel.report.runs import Row
from fewlabel.report.style import COLORS, GREY, WIDE, Drawing, draw, empty_plot, finish_plot, name_ticks
from fewlabel.report.tables import megabytes, seconds

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CLIENTS = 40  # whose bars can be read
MOST_CLASSES = 20  # for which a legend has room


def client_images(label: str, row: Row) -> Drawing | None:
    """Draw the classes of each client's images, and who has labels. The clients are those of the first seed."""
    import numpy as np
    from matplotlib.figure import Figure

    run = row.results[0]
    partition, clients = run.partition, run.partition.get("clients", [])
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
    stack_classes(axes, names, run.classes, {1.0: np.array([counts for _, counts, _, _ in shown])}, totals)
    for text, (_, _, has, _) in zip(axes.get_yticklabels(), shown, strict=True):
        text.set_fontweight("bold" if has else "normal")
    axes.set_xlim(0, 1.04 * max(totals) or None)
    axes.set_xlabel("images")
    axes.set_ylabel("client")
    left = len(clients) - MOST_CLIENTS
    caption = f"Images of each client by class{', ' + label if label else ''}; ● has labels; seed {run.seed}"
    caption += f"; {left} more clients not shown" if left > 0 else ""
    in_words = "; ".join(f"{who}: {total} images, {has} labeled" for who, _, has, total in shown)
    return Drawing(finish_plot(figure), caption, f"{caption}. {in_words}")


def stack_classes(
    axes: "Axes",
    names: Sequence[str],
    classes: Sequence[str],
    counts: "Mapping[float, np.ndarray]",
    sizes: Sequence[int],
) -> None:
    """Draw a bar for each name: its images class by class, and at the end those of unknown class.

    `counts` has an array [bars, classes] for each opacity, `sizes` the number of all images.
    """
    import numpy as np
    from matplotlib import colormaps

    colors = colormaps["tab10" if len(classes) <= 10 else "tab20" if len(classes) <= MOST_CLASSES else "turbo"]
    places, ends = range(len(names)), np.zeros(len(names))
    for number, name in enumerate(classes):
        color = colors(number if len(classes) <= MOST_CLASSES else number / len(classes))
        for opacity, each in counts.items():
            label = name if opacity == 1 and len(classes) <= MOST_CLASSES else None
            axes.barh(places, each[:, number], left=ends, color=color, alpha=opacity, label=label)
            ends += each[:, number]
    if any(unknown := np.array(sizes) - ends):
        axes.barh(places, unknown, left=ends, color=GREY, label="unknown")
    for tick in axes.set_yticks(places, names):
        tick.label1.set_parse_math(False)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)


PHASES = {"seconds_train": "clients at work", "seconds_server": "server at work", "seconds_evaluate": "evaluation"}


def phases(spent: Mapping[str, float]) -> dict[str, float]:
    """Split seconds by what a run waited for. Older runs did not measure clients and server apart."""
    train = spent.get("seconds_train", 0.0)
    if not train:
        return {"clients and server": spent["seconds"]}
    found = {**spent, "seconds_server": max(0.0, spent["seconds"] - train)}
    return {name: found.get(key, 0.0) for key, name in PHASES.items()}


def costs(groups: Mapping[str, Sequence[Row]]) -> Iterator[Drawing]:
    """Draw what the rows of each group sent, and the seconds they took."""
    for label, rows in groups.items():
        end = f", {label}" if label else ""
        up, down = ([row.spent[key] for row in rows] for key in ("bytes_up", "bytes_down"))
        figure = row_bars(rows, {"up": [b / 1e6 for b in up], "down": [b / 1e6 for b in down]}, "MB")
        sent = zip(rows, up, down, strict=True)
        in_words = "; ".join(f"{row.label} {megabytes(u)} up, {megabytes(d)} down" for row, u, d in sent)
        yield Drawing(figure, f"Sent by clients (up) and to them (down), MB{end}", f"MB sent{end}: {in_words}")
        waited = [phases(row.spent) for row in rows]
        names = dict.fromkeys(name for each in waited for name in each)
        figure = row_bars(rows, {name: [each.get(name, 0.0) for each in waited] for name in names}, "seconds")
        in_words = "; ".join(f"{row.label} {phases_in_words(each)}" for row, each in zip(rows, waited, strict=True))
        caption = f"Seconds of a run by phase{end}"
        yield Drawing(figure, caption, f"{caption}: {in_words}")


def phases_in_words(waited: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds(count)}" for name, count in waited.items())


def row_bars(rows: Sequence[Row], parts: Mapping[str, Sequence[float]], xlabel: str) -> "Figure":
    """Draw a bar of stacked parts for each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDE, max(2.0, 0.3 * len(rows) + 1.2)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for (name, values), color in zip(parts.items(), COLORS, strict=False):
        axes.barh(range(len(rows)), values, left=left, color=color, label=name or None)
        left = [a + b for a, b in zip(left, values, strict=True)]
    name_ticks(axes, "y", [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(xlabel)
    axes.spines[["top", "right"]].set_visible(False)
    return finish_plot(figure)


def costs_by_round(row: Row) -> Iterator[Drawing]:
    """Draw what a single run sent, and the seconds it took, round by round."""
    lines, spent = row.results[0].rounds, row.spent
    if not lines:
        return
    figure, axes = empty_plot("MB")
    for (key, name), color in zip({"bytes_up": "up", "bytes_down": "down"}.items(), COLORS, strict=False):
        draw(axes, {line["round"]: line[key] / 1e6 for line in lines}, label=name, color=color)
    axes.set_ylim(bottom=0)
    total = f"{megabytes(spent['bytes_up'])} up and {megabytes(spent['bytes_down'])} down in all"
    yield Drawing(finish_plot(figure), "Sent by clients (up) and to them (down), MB", f"MB sent by round: {total}")
    figure, axes = empty_plot("seconds")
    waited = {line["round"]: phases(line) for line in lines}
    for name, color in zip(dict.fromkeys(name for each in waited.values() for name in each), COLORS, strict=False):
        points = {number: each[name] for number, each in waited.items() if name in each}
        draw(axes, points, label=name, color=color)
    axes.set_ylim(bottom=0)
    total = phases_in_words(phases(spent))
    yield Drawing(finish_plot(figure), "Seconds of each round by phase", f"Seconds by round and phase; in all {total}")
