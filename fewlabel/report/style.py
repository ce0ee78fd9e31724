"""How results look: plots by matplotlib, and one self-contained page with them.

Plots are as wide as half a page, so that their letters have the page's size there and can be read on a telephone.
"""

import html
import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.errors import BadInput, StorageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = ("#2a7de1", "#e07b00", "#12a150", "#c2418f", "#8a63d2", "#d13b3b", "#00a3a3", "#8c6d46")  # on black and white
GREY = "#8a8a8a"
WIDE, HIGH = 5.2, 3.4  # inches


@dataclass(frozen=True)
class Drawing:
    """A figure, what it shows, and the same for those who cannot see it."""

    figure: "Figure"
    caption: str
    alt: str


def empty_plot(ylabel: str) -> tuple["Figure", "Axes"]:
    """A figure of its own, beside whatever pyplot is at in the same process."""
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
    if points:
        axes.plot(list(points), list(points.values()), marker="o" if len(points) == 1 else "", **style)


def finish_plot(figure: "Figure", path: Path | str | None = None) -> "Figure":
    """Adds the legend, below and as wide as there is room, and saves the plot if it is to be a file."""
    if names := figure.axes[0].get_legend_handles_labels()[1]:
        columns = int(figure.get_figwidth() * 72 / (6 * max(map(len, names)) + 56))  # a letter has some 6 points
        legend = figure.legend(loc="outside lower center", ncols=max(1, min(columns, len(names))), frameon=False)
        for text in legend.get_texts():
            text.set_parse_math(False)  # a name may hold dollars
    return saved(figure, path)


def saved(figure: "Figure", path: Path | str | None) -> "Figure":
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
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fewlabel"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # letters that matplotlib's font lacks are the browser's to draw
        figure.savefig(image, format="svg", transparent=True, metadata={"Date": None})
    text = image.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r' id="(?!C\d)[\w.]+_\d+"', "", text)  # of groups, the same in every figure, and used by nothing
    return text.replace("xlink:href", "href").replace("#000000", "currentColor")


STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d5d8dc; --soft: #f4f5f7; --link: #0b57d0 }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --paper: #16181c; --line: #3a3e45; --soft: #22252b; --link: #8ab4f8 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 72rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: break-word }
h1 { font-size: 1.5rem; line-height: 1.25 } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem }
nav { display: flex; flex-wrap: wrap; gap: .2rem 1rem } a { color: var(--link) }
.wide, pre { overflow-x: auto }
.wide { margin: 1rem 0; background:
  linear-gradient(to left, var(--paper) 1rem, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, var(--line), transparent) right / 1rem 100% no-repeat scroll } /* there is more */
.wide th:first-child { position: sticky; left: 0; background: var(--paper) }
:focus-visible { outline: 2px solid var(--link); outline-offset: 2px }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem }
caption { text-align: left; padding-bottom: .5rem }
th, td { padding: .3rem .5rem; text-align: right; border-bottom: 1px solid var(--line); vertical-align: bottom }
th:first-child { text-align: left } tbody th { font-weight: normal }
tbody th, tbody td { white-space: nowrap } tbody td u { text-underline-offset: .2em }
@media (max-width: 40rem) { tbody th { white-space: normal; min-width: 7rem } }
p { margin: .3rem 0 }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 28rem), 1fr)); gap: 1.5rem }
section > p { max-width: 60rem } section > p + div { margin-top: 1rem }
figure { margin: 0; min-width: 0 } figcaption { font-size: .9rem }
svg { display: block; width: 100%; height: auto; max-width: 40rem } svg text { fill: currentColor }
pre { background: var(--soft); padding: .8rem; font-size: .85rem } summary { cursor: pointer }
@media print {
  :root { --ink: #000; --paper: #fff; --line: #bbb; --soft: #fff; --link: #000 }
  html { font-size: 11px } body { max-width: none; margin: 0; padding: 0; font-size: 1rem } nav { display: none }
  .plots { grid-template-columns: 1fr 1fr } figure, tr { break-inside: avoid } h2, h2 + p { break-after: avoid }
  .wide, pre { overflow: visible } .wide { background: none }
  pre { white-space: pre-wrap; font-size: .8rem; columns: 3; padding: 0 }
  details { break-inside: avoid }
  table { font-size: .75rem } th, td { padding: .15rem .3rem }
  details::details-content { content-visibility: visible; height: auto } }
"""


def write_page(
    path: Path,
    title: str,
    tables: str,
    plots: Mapping[str, Sequence[Drawing]],
    details: Sequence[str],
    versions: Sequence[str],
    about: Mapping[str, str],
) -> None:
    """Sections, each with what it is `about` where that is said, and links to them."""
    made = "".join(f"<p>{html.escape(line)}</p>\n" for line in versions) or "<p>No run is finished yet.</p>\n"
    sections = {"Results": tables} | {
        heading: (f"<p>{html.escape(about[heading])}</p>\n" if heading in about else "") + drawn(drawings)
        for heading, drawings in plots.items()
        if drawings
    }
    sections |= {"To do it again": "".join(details), "Made with": made}
    links = "".join(f'<a href="#{anchor(heading)}">{html.escape(heading)}</a>\n' for heading in sections)
    body = "".join(
        f'<section id="{anchor(heading)}">\n<h2>{html.escape(heading)}</h2>\n{content}</section>\n'
        for heading, content in sections.items()
    )
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
<nav aria-label="Sections">
{links}</nav>
<main>
{body}</main>
</body>
</html>
"""
    save(path, page.encode())


def anchor(heading: str) -> str:
    return re.sub(r"\W+", "-", heading.lower()).strip("-")


def drawn(drawings: Sequence[Drawing]) -> str:
    return f'<div class="plots">\n{"".join(map(figure_of, drawings))}</div>\n'


def figure_of(drawing: Drawing) -> str:
    seen = svg(drawing.figure).replace("<svg ", f'<svg role="img" aria-label="{html.escape(drawing.alt)}" ', 1)
    return f"<figure>\n<figcaption>{html.escape(drawing.caption)}</figcaption>\n{seen}</figure>\n"


def save(path: Path, data: bytes) -> None:
    from fewlabel.core.storage import write

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path.parent} cannot be made: {error.strerror}; choose another directory") from None
    write(path, data)
