"""How plots look: their colours, sizes, axes and legends, and how they are saved or put into a page.

Plots are half as wide as a page, so that their letters are as large as the page's and readable on a telephone.
"""

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core import storage
from fewlabel.core.errors import BadInput

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2a7de1", "#e07b00", "#12a150", "#c2418f", "#8a63d2", "#d13b3b", "#00a3a3", "#8c6d46")  # on black and white
GREY = "#8a8a8a"
RIGHT, WRONG = "#1b62c4", "#e07b00"  # of cells; others have the first, too
INKS = "#000000", "#fefefe"  # of numbers in cells; a page shows black as its own ink
WIDE, HIGH = 5.2, 3.4  # inches
BREAKS = re.compile(r"(?<=[\s,_-])|(?<=\.)(?=[A-Za-z])")  # of a name, but not of a number
LONGEST, MOST_LINES = 18, 3  # letters in a line of a name beside a plot, and its lines; as in page.js
MOST_BROKEN = 12  # names with room for several lines


def contrast(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the contrast of two colours in red, green and blue from 0 to 1, as WCAG 2 defines it: from 1 to 21."""

    def luminance(color: Sequence[float]) -> float:
        light = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color]
        return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]

    dark, bright = sorted((luminance(first), luminance(second)))
    return (bright + 0.05) / (dark + 0.05)


def empty_plot(ylabel: str) -> tuple["Figure", "Axes"]:
    """Return an empty plot over rounds. It does not disturb what pyplot draws in the same process."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(WIDE, HIGH), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("round")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw(axes: "Axes", points: Mapping[int, float], **style: Any) -> None:
    """Draw a line through points, or a mark if there is only one point."""
    if points:
        axes.plot(list(points), list(points.values()), marker="o" if len(points) == 1 else "", **style)


def short(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


def in_lines(name: str) -> list[str]:
    """Break a long name into lines, so that names that begin alike can be told apart. Cut only what is left then."""
    lines = [""]
    for word in BREAKS.split(name):
        if lines[-1] and len(f"{lines[-1]}{word}".rstrip()) > LONGEST:
            lines.append("")
        lines[-1] += word
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = ["".join(lines[MOST_LINES - 1 :])]
    return [short(line.strip()) for line in lines]


def written(names: Sequence[str]) -> list[str]:
    """Return names as they stand beside the rows of a plot. Many names have no room for several lines each."""
    return ["\n".join(in_lines(name)) if len(names) <= MOST_BROKEN else short(name) for name in names]


def name_ticks(axes: "Axes", side: str, names: Sequence[str]) -> None:
    """Write names beside cells or bars: all of them, or as many as there is room for."""
    texts = written(names) if side == "y" else [short(name) for name in names]
    longest = max(map(len, texts), default=0)
    step = -(-len(names) // (30 if side == "y" else 8 if longest == 3 else 16))  # turned, they need less room
    turned = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if longest > 3 else {}
    places = range(0, len(names), step)
    set_ticks: Any = getattr(axes, f"set_{side}ticks")
    for tick in set_ticks(list(places), [texts[n] for n in places], **(turned if side == "x" else {})):
        for text in (tick.label1, tick.label2):
            text.set_parse_math(False)


def finish_plot(figure: "Figure", path: Path | str | None = None) -> "Figure":
    """Add the legend below the plot. With `path`, save the plot there."""
    if names := figure.axes[0].get_legend_handles_labels()[1]:
        columns = int(figure.get_figwidth() * 72 / (6 * max(map(len, names)) + 56))  # a letter has some 6 points
        legend = figure.legend(loc="outside lower center", ncols=max(1, min(columns, len(names))), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a name may hold dollars
    return save_plot(figure, path)


def save_plot(figure: "Figure", path: Path | str | None) -> "Figure":
    """Save a plot, unless `path` is None, in the format that the path's ending names. Return the plot."""
    if path is not None:
        path = Path(path)
        formats = sorted(figure.canvas.get_supported_filetypes())
        if (ending := path.suffix.lstrip(".").lower()) not in formats:
            raise BadInput(f"a plot cannot be saved as '{path.name}'; its ending must be one of {', '.join(formats)}")
        image = io.BytesIO()
        figure.savefig(image, format=ending, dpi=150)
        storage.make_folder(path.parent)
        storage.write(path, image.getvalue())
    return figure


def svg(figure: "Figure") -> str:
    """Return a figure as part of a page: black becomes the page's ink, and nothing is loaded from outside."""
    import matplotlib

    image = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fewlabel"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # letters that matplotlib's font lacks are the browser's to draw
        figure.savefig(image, format="svg", transparent=True, metadata={"Date": None})
    text = image.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' id="(?!C\d)[\w.]+_\d+"', "", text)  # of groups, the same in every figure, and used by nothing
    text = re.sub(
        r"; font-family: [^;\"]*|<!--.*?-->", "", text
    )  # the page's own, and in so many words, again and again
    text = re.sub(r' transform="rotate\(-0 [^"]*"', "", text)
    text = re.sub(r"(\d\.\d\d)\d+", r"\1", re.sub(r"\n\s*", "\n", text))
    return text.replace("xlink:href", "href").replace("#000000", "currentColor")
