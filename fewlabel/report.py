"""How results look: curves by matplotlib, and one self-contained page with them."""

import html
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.errors import BadInput, StorageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2a7de1", "#e07b00", "#12a150", "#c2418f", "#8a63d2", "#d13b3b", "#00a3a3", "#8c6d46")  # on black and white
GREY = "#8a8a8a"


def empty_plot(ylabel: str) -> tuple["Figure", "Axes"]:
    """A figure of its own, beside whatever pyplot is at in the same process."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("round")
    axes.set_ylabel(ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color=GREY, alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def draw(axes: "Axes", points: Mapping[int, float], **style: Any) -> None:
    if points:
        axes.plot(list(points), list(points.values()), marker="o" if len(points) == 1 else "", **style)


def matrices(pair: Mapping[str, Any], when: str, path: Path | str | None) -> "Figure":
    """Two matrices and their absolute difference, as in FedIRM's Fig. 2a; what nobody knows is left blank."""
    import numpy as np
    from matplotlib.figure import Figure

    found = {name: np.array(rows, dtype=float) for name, rows in pair.items()}
    first, second = found.values()
    figure = Figure(figsize=(9.6, 3.4), layout="constrained")
    for axes, (name, values) in zip(
        figure.subplots(1, 3), [*found.items(), ("difference", np.abs(first - second))], strict=True
    ):
        image = axes.imshow(values, vmin=0, vmax=float(np.nanmax([first, second])), cmap="viridis")
        axes.set_title(f"{name}, {when}", fontsize=10)
        axes.set_xlabel("class said")
        axes.set_ylabel("class")
    figure.colorbar(image, ax=figure.axes, shrink=0.8)
    return finish_plot(figure, path)


def finish_plot(figure: "Figure", path: Path | str | None) -> "Figure":
    if handles := figure.axes[0].get_legend_handles_labels()[0]:
        legend = figure.legend(loc="outside lower center", ncols=min(4, len(handles)), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a name may hold dollars
    if path is not None:
        path = Path(path)
        kinds = sorted(figure.canvas.get_supported_filetypes())
        if (kind := path.suffix.lstrip(".").lower()) not in kinds:
            raise BadInput(f"a plot cannot be saved as '{path.name}'; its ending must be one of {', '.join(kinds)}")
        image = io.BytesIO()
        figure.savefig(image, format=kind, dpi=150)
        save(path, image.getvalue())
    return figure


def svg(figure: "Figure") -> str:
    """A figure as part of a page: black is the page's ink, text its letters, and nothing points outside."""
    import matplotlib

    image = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fewlabel"}):
        figure.savefig(image, format="svg", transparent=True, metadata={"Date": None})
    text = image.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    return text.replace("#000000", "currentColor")


STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d5d8dc; --soft: #f4f5f7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e9; --paper: #16181c; --line: #3a3e45; --soft: #22252b } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 58rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.wide, pre { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
caption { text-align: left; padding-bottom: .5rem }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: bottom }
th:first-child { text-align: left } tbody th { font-weight: normal }
tbody th, tbody td { white-space: nowrap }
p { margin: .3rem 0 }
figure { margin: 1rem 0 } svg { width: 100%; height: auto; max-width: 46rem } svg text { fill: currentColor }
pre { background: var(--soft); padding: .8rem; font-size: .85rem }
"""


def write_page(
    path: Path, title: str, table: str, figures: Mapping[str, "Figure"], details: Sequence[str], versions: Sequence[str]
) -> None:
    made = "".join(f"<p>{html.escape(line)}</p>\n" for line in versions) or "<p>No run is finished yet.</p>\n"
    drawn = "".join(f"<h2>{name}</h2>\n<figure>{svg(figure)}</figure>\n" for name, figure in figures.items())
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<div class="wide">
{table}</div>
{drawn}<h2>To do it again</h2>
{"".join(details)}
<h2>Made with</h2>
{made}</body>
</html>
"""
    save(path, page.encode())


def save(path: Path, data: bytes) -> None:
    from fewlabel.checkpoint import write

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path.parent} cannot be made: {error.strerror}; choose another directory") from None
    write(path, data)
