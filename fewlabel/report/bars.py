"""Bars: the images of each client, and what a run costs."""

from collections.abc import Iterator, Mapping, Sequence

from fewlabel.report.charts import Bars, Line, Lines, Part
from fewlabel.report.runs import Row
from fewlabel.report.static import Drawing
from fewlabel.report.style import COLORS, GREY
from fewlabel.report.tables import megabytes, seconds

MOST_CLIENTS = 40  # whose bars can be read
MOST_CLASSES = 20  # for which a legend has room


def client_images(label: str, row: Row) -> Drawing | None:
    """Draw the classes of each client's images, and who has labels. The clients are those of the first seed."""
    run = row.results[0]
    partition, clients = run.partition, run.partition.get("clients", [])
    if not clients:
        return None
    shown = [(str(c["id"]), c["classes"], len(c["labeled"]), len(c["labeled"]) + len(c["unlabeled"])) for c in clients]
    shown = shown[:MOST_CLIENTS]
    if partition["server"]["labeled"]:
        size = len(partition["server"]["labeled"])
        shown.insert(0, ("server", partition["server"]["classes"], size, size))
    names = [who if not has else f"{who} ● {'all' if has == total else has} labeled" for who, _, has, total in shown]
    parts = class_parts(run.classes, [counts for _, counts, _, _ in shown], [total for _, _, _, total in shown])
    labeled = [bool(has) for _, _, has, _ in shown]
    chart = Bars(names, parts, "images", "client", labeled, legend=len(run.classes) <= MOST_CLASSES)
    left = len(clients) - MOST_CLIENTS
    caption = f"Images of each client by class{', ' + label if label else ''}; ● has labels; seed {run.seed}"
    caption += f"; {left} more clients not shown" if left > 0 else ""
    in_words = "; ".join(f"{who}: {total} images, {has} labeled" for who, _, has, total in shown)
    return Drawing(chart, caption, f"{caption}. {in_words}")


def class_parts(
    classes: Sequence[str], counts: Sequence[Sequence[int]], sizes: Sequence[int], pale: Sequence[Sequence[int]] = ()
) -> tuple[Part, ...]:
    """Return bars of images class by class, and at the end those of unknown class.

    `counts` has the images of each class for each bar, `pale` those to draw in a pale colour, `sizes` all images.
    """
    parts, known = [], [0] * len(sizes)
    for number, (name, color) in enumerate(zip(classes, class_colors(len(classes)), strict=True)):
        for table, end in ((counts, ""), (pale, "59")):  # 0x59 of 0xff: 35 %
            values = [int(row[number]) for row in table]
            if values:
                parts.append(Part("" if end else name, values, color + end))
                known = [a + b for a, b in zip(known, values, strict=True)]
    if any(unknown := [size - found for size, found in zip(sizes, known, strict=True)]):
        parts.append(Part("unknown", unknown, GREY))
    return tuple(parts)


def class_colors(number: int) -> list[str]:
    """Return a colour for each of so many classes."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    colors = colormaps["tab10" if number <= 10 else "tab20" if number <= MOST_CLASSES else "turbo"]
    return [to_hex(colors(n if number <= MOST_CLASSES else n / number)) for n in range(number)]


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
        chart = row_bars(rows, {"up": [b / 1e6 for b in up], "down": [b / 1e6 for b in down]}, "MB")
        sent = zip(rows, up, down, strict=True)
        in_words = "; ".join(f"{row.label} {megabytes(u)} up, {megabytes(d)} down" for row, u, d in sent)
        yield Drawing(chart, f"Sent by clients (up) and to them (down), MB{end}", f"MB sent{end}: {in_words}")
        waited = [phases(row.spent) for row in rows]
        names = dict.fromkeys(name for each in waited for name in each)
        chart = row_bars(rows, {name: [each.get(name, 0.0) for each in waited] for name in names}, "seconds")
        in_words = "; ".join(f"{row.label} {phases_in_words(each)}" for row, each in zip(rows, waited, strict=True))
        caption = f"Seconds of a run by phase{end}"
        yield Drawing(chart, caption, f"{caption}: {in_words}")


def phases_in_words(waited: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds(count)}" for name, count in waited.items())


def row_bars(rows: Sequence[Row], parts: Mapping[str, Sequence[float]], xlabel: str) -> Bars:
    """Return a bar of stacked parts for each row."""
    colored = zip(parts.items(), COLORS, strict=False)
    stacked = tuple(Part(name, values, color) for (name, values), color in colored)
    return Bars([row.label for row in rows], stacked, xlabel)


def costs_by_round(row: Row) -> Iterator[Drawing]:
    """Draw what a single run sent, and the seconds it took, round by round."""
    lines, spent = row.results[0].rounds, row.spent
    if not lines:
        return
    sent = {"up": "bytes_up", "down": "bytes_down"}
    curves = {name: {line["round"]: line[key] / 1e6 for line in lines} for name, key in sent.items()}
    total = f"{megabytes(spent['bytes_up'])} up and {megabytes(spent['bytes_down'])} down in all"
    yield Drawing(cost_lines(curves, "MB"), "Sent by clients (up) and to them (down), MB", f"MB sent by round: {total}")
    waited = {line["round"]: phases(line) for line in lines}
    names = dict.fromkeys(name for each in waited.values() for name in each)
    curves = {name: {number: each[name] for number, each in waited.items() if name in each} for name in names}
    total = phases_in_words(phases(spent))
    caption = "Seconds of each round by phase"
    yield Drawing(cost_lines(curves, "seconds"), caption, f"Seconds by round and phase; in all {total}")


def cost_lines(curves: Mapping[str, Mapping[int, float]], ylabel: str) -> Lines:
    colored = zip(curves.items(), COLORS, strict=False)
    return Lines(tuple(Line(name, points, color) for (name, points), color in colored), ylabel, percent=False)
