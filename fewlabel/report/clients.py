"""Bars of clients: how many images of each class each client holds, in the terminal and on a page."""

from collections.abc import Iterator
from pathlib import Path
from string import ascii_letters, digits
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from fewlabel.data.added import overlaid
from fewlabel.data.labels import Index, known
from fewlabel.data.partition import Partition
from fewlabel.report.bars import MOST_CLASSES, class_parts
from fewlabel.report.charts import Bars
from fewlabel.report.static import stack
from fewlabel.report.style import save_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNS = digits + ascii_letters  # one for each class, so that bars can be read without colours
UNKNOWN = "."
COLORS = ("blue", "red", "green", "yellow", "magenta", "cyan")


class Bar(NamedTuple):
    """The images of a client or the server."""

    name: str
    size: int  # all images
    labeled: np.ndarray  # images with a label, by class
    unlabeled: np.ndarray  # those without, by their class if it is known
    wrong: int = 0  # labels

    @property
    def unknown(self) -> int:
        """How many images have no known class."""
        return int(self.size - self.counts.sum())

    @property
    def counts(self) -> np.ndarray:
        both: np.ndarray = self.labeled + self.unlabeled
        return both


def bars(
    partition: Partition, labels: np.ndarray, classes: tuple[str, ...], holders: np.ndarray | None = None
) -> Iterator[Bar]:
    """Count the images of each client and the server. `holders` names who holds each image, for clients with names."""

    def wrong(index: Index) -> int:
        return int(np.isin(index, partition.noise[0]).sum())

    def count(index: Index) -> np.ndarray:
        return np.bincount(known(labels, index), minlength=len(classes))

    labels = overlaid(labels, partition.added)
    for client in partition.clients:
        holding = partition.shares[client]
        holder = "" if holders is None else f": {holders[holding.images[0]]}"
        counts = count(holding.labeled), count(holding.unlabeled)
        yield Bar(f"client {client}{holder}", len(holding), *counts, wrong(holding.labeled))
    for name, index in (("server", partition.server), ("validation", partition.validation)):
        if len(index):
            yield Bar(name, len(index), count(index), count(index[:0]), wrong(index))


def draw(
    partition: Partition,
    labels: np.ndarray,
    classes: tuple[str, ...],
    width: int = 48,
    holders: np.ndarray | None = None,
) -> Table:
    """Draw a partition for the terminal: classes as signs, and the longest bar `width` signs long."""
    found = list(bars(partition, labels, classes, holders))
    longest, names = max(bar.size for bar in found), max(len(bar.name) for bar in found)
    width = max(8, min(width, 80 - names - len("  images  labeled  wrong  ")))  # or a narrow screen would cut columns
    styles = [(SIGNS[c % len(SIGNS)], f"black on {COLORS[c % len(COLORS)]}") for c in range(len(classes))]
    legend = ", ".join(f"{sign} {name}" for (sign, _), name in zip(styles[:MOST_CLASSES], classes, strict=False))
    more = f" and {len(classes) - MOST_CLASSES} more" if len(classes) > MOST_CLASSES else ""
    unknown = f", {UNKNOWN} unknown" if any(bar.unknown for bar in found) else ""
    table = Table(box=None, pad_edge=False, caption=Text(legend + more + unknown), caption_justify="left")
    noisy = ["wrong"] if any(bar.wrong for bar in found) else []
    for column in ("", "images", "labeled", *noisy):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_column("classes", no_wrap=True)
    for bar in found:
        lengths = rounded(np.append(bar.counts, bar.unknown) * (width / longest))
        pairs = zip([*styles, (UNKNOWN, "dim")], lengths, strict=True)
        signs = Text.assemble(*((sign * n, style) for (sign, style), n in pairs if n))
        wrong = [f"{bar.wrong:,}" for _ in noisy]
        table.add_row(Text(bar.name), f"{bar.size:,}", f"{bar.labeled.sum():,}", *wrong, signs)
    return table


def rounded(lengths: np.ndarray) -> list[int]:
    """Round lengths to whole numbers, but keep their sum: those that lose most by being cut gain one."""
    cut = np.floor(lengths)
    most = np.argsort(cut - lengths, kind="stable")[: round(float(lengths.sum() - cut.sum()))]
    cut[most] += 1
    return [int(n) for n in cut]


def plot(
    partition: Partition,
    labels: np.ndarray,
    classes: tuple[str, ...],
    path: Path | str | None = None,
    holders: np.ndarray | None = None,
) -> "Figure":
    """Draw a partition for a page: images with labels in full colour, others pale. The path's suffix is the format."""
    from matplotlib.figure import Figure

    found = list(bars(partition, labels, classes, holders))
    figure = Figure(figsize=(7.2, 1.4 + 0.28 * len(found)), layout="constrained")
    axes = figure.subplots()
    sizes = [bar.size for bar in found]
    parts = class_parts(classes, [b.labeled.tolist() for b in found], sizes, [b.unlabeled.tolist() for b in found])
    stack(axes, Bars([bar.name for bar in found], parts, "", legend=len(classes) <= MOST_CLASSES))
    axes.set_xlabel("images; pale: without label")
    if len(classes) <= MOST_CLASSES:
        for text in figure.legend(loc="outside right upper", frameon=False).get_texts():
            text.set_parse_math(False)  # a name may hold dollars
    return save_plot(figure, path)
