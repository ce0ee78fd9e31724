"""A partition as a picture, to be looked at before anyone trains: a stacked bar of classes for each client."""

from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from string import ascii_letters, digits
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.table import Table
from rich.text import Text

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.labels import Index, known
from fewlabel.data.partition import Partition

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIGNS = digits + ascii_letters  # one for each class, so that a bar can be read without colours
UNKNOWN = "."
COLORS = ("blue", "red", "green", "yellow", "magenta", "cyan")
MOST_CLASSES = 20  # that a legend still has room for


class Bar(NamedTuple):
    """A place, all its images and, by class, those with labels, of which some may be wrong, and those without."""

    name: str
    size: int
    labeled: np.ndarray
    unlabeled: np.ndarray
    wrong: int = 0

    @property
    def unknown(self) -> int:
        """Images whose class nobody knows."""
        return int(self.size - self.counts.sum())

    @property
    def counts(self) -> np.ndarray:
        both: np.ndarray = self.labeled + self.unlabeled
        return both


def bars(
    partition: Partition, labels: np.ndarray, classes: tuple[str, ...], holders: np.ndarray | None = None
) -> Iterator[Bar]:
    """Of each client and the server; `holders` names whose each image is, where clients are dealt out by that."""

    def wrong(index: Index) -> int:
        return int(np.isin(index, partition.noise[0]).sum())

    def count(index: Index) -> np.ndarray:
        return np.bincount(known(labels, index), minlength=len(classes))

    for client in partition.clients:
        share = partition.shares[client]
        whose = "" if holders is None else f": {holders[share.images[0]]}"
        counts = count(share.labeled), count(share.unlabeled)
        yield Bar(f"client {client}{whose}", len(share), *counts, wrong(share.labeled))
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
    """For the terminal: each place's classes as signs, the longest bar `width` of them, and how many have labels."""
    found = list(bars(partition, labels, classes, holders))
    longest, names = max(bar.size for bar in found), max(len(bar.name) for bar in found)
    width = max(8, min(width, 80 - names - len("  images  labeled  wrong  ")))  # or a narrow screen cuts the columns
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
        lengths = whole(np.append(bar.counts, bar.unknown) * (width / longest))
        pairs = zip([*styles, (UNKNOWN, "dim")], lengths, strict=True)
        signs = Text.assemble(*((sign * n, style) for (sign, style), n in pairs if n))
        wrong = [f"{bar.wrong:,}" for _ in noisy]
        table.add_row(Text(bar.name), f"{bar.size:,}", f"{bar.labeled.sum():,}", *wrong, signs)
    return table


def whole(lengths: np.ndarray) -> list[int]:
    """Whole numbers whose sum is that of the lengths, rounded: those that lose the most by being cut gain one."""
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
    """For a page: images with labels in full colour, those without pale. The path's ending says which format."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    found = list(bars(partition, labels, classes, holders))
    figure = Figure(figsize=(7.2, 1.4 + 0.28 * len(found)), layout="constrained")
    axes, names = figure.subplots(), [bar.name for bar in found]
    ends = np.zeros(len(found))
    colors = colormaps["tab10" if len(classes) <= 10 else "tab20"].colors  # type: ignore[attr-defined]
    for number, name in enumerate(classes):
        for part, alpha in (("labeled", 1.0), ("unlabeled", 0.35)):
            counts = np.array([getattr(bar, part)[number] for bar in found])
            label = name if part == "labeled" and len(classes) <= MOST_CLASSES else None
            axes.barh(names, counts, left=ends, color=colors[number % len(colors)], alpha=alpha, label=label)
            ends += counts
    if any(unknown := [bar.unknown for bar in found]):
        axes.barh(names, unknown, left=ends, color="lightgrey", label="unknown")
    for text in axes.get_yticklabels():
        text.set_parse_math(False)
    axes.invert_yaxis()
    axes.set_xlabel("images; pale: without label")
    axes.spines[["top", "right"]].set_visible(False)
    if len(classes) <= MOST_CLASSES:
        for text in figure.legend(loc="outside right upper", frameon=False).get_texts():
            text.set_parse_math(False)  # a name may hold dollars
    if path is not None:
        save(figure, Path(path))
    return figure


def save(figure: "Figure", path: Path) -> None:
    kinds = sorted(figure.canvas.get_supported_filetypes())
    if (kind := path.suffix.lstrip(".").lower()) not in kinds:
        raise BadInput(f"a plot cannot be saved as '{path.name}'; its ending must be one of {', '.join(kinds)}")
    image = BytesIO()
    figure.savefig(image, format=kind, dpi=150)
    try:
        path.write_bytes(image.getvalue())
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror}") from None
