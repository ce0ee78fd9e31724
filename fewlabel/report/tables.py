"""Tables for a terminal, a page, a README or a paper, and numbers as people read them.

The best cells are bold and the second best underlined. Plain text has no such letters, so ¹ and ² mark them there.
"""

import html
import io
import re
import shutil
import statistics
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table as RichTable

LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "±": r"$\pm$",
        "–": "--",
        "→": r"$\to$",
    }
)

MARKS = {  # around the best, around the second
    "html": (("<b>", "</b>"), ("<u>", "</u>")),
    "markdown": (("**", "**"), ("<u>", "</u>")),
    "latex": (("\\textbf{", "}"), ("\\underline{", "}")),
    "text": (("", "¹"), ("", "²")),
}

NARROWEST = 16  # letters of a first column whose words are broken
LATEX_WIDE = 70  # letters in a line of \small: the 345 points of a page of one column


@dataclass(frozen=True)
class Table:
    """A table with words in the first column and numbers in the others."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the cells to mark
    second: frozenset[tuple[int, int]] = frozenset()
    headings: tuple[tuple[int, str], ...] = ()  # between rows: the row that follows, and the text

    def rich(self, width: int, styled: bool = True) -> "Group":
        """Return the table for a terminal. Columns that do not fit stand below, with the first column repeated."""
        from rich.console import Group
        from rich.text import Text

        parts: list[RichTable | Text] = [Text(self.title, "bold")]
        for block in self._blocks(width):
            parts += [self._block(block, styled), Text()]
        notes = [Text(note, "dim") for note in self._notes("styled" if styled else "text")]
        return Group(*(parts if notes else parts[:-1]), *notes)

    def _blocks(self, width: int) -> list[list[int]]:
        """Split the columns into as few parts as fit. Parts are about equally wide, so that no column stands alone."""
        blocks = list(self._filled(width))
        while width > 0 and len(narrower := list(self._filled(width - 1))) == len(blocks):
            blocks, width = narrower, width - 1
        return blocks

    def _filled(self, width: int) -> Iterator[list[int]]:
        first = self._first(width)
        if self._others + min(first, NARROWEST) <= width:  # breaking more names is better than a second part
            first = min(first, width - self._others)
        block, used = list[int](), first
        for number in range(1, len(self.columns)):
            wide = 2 + self._width(number)
            if block and used + wide > width:
                yield block
                block, used = [], first
            block.append(number)
            used += wide
        yield block

    def _first(self, width: int) -> int:
        """Return the width of the first column. Its words may be broken."""
        return min(max((len(row[0]) for row in self.rows), default=0), width // 3)

    @property
    def _others(self) -> int:
        return sum(2 + self._width(number) for number in range(1, len(self.columns)))

    def _width(self, number: int) -> int:
        """Return the width of a column. Its numbers stay whole; its heading is broken between words."""
        cells = [len(row[number]) + (number in self._with_marks) for row in self.rows]
        return max(cells + [len(word) for word in self.columns[number].split()])

    @property
    def _with_marks(self) -> set[int]:
        return {column for _, column in self.best | self.second}

    def _heading(self, number: int) -> list[str]:
        return textwrap.wrap(self.columns[number], self._width(number), break_on_hyphens=False) or [""]

    def _block(self, numbers: list[int], styled: bool) -> "RichTable":
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True)
        table.add_column(Text(self.columns[0]), overflow="fold")
        for number in numbers:  # rich would break numbers before headings, and drop a space at the end of a cell
            head = "\n".join(part.rjust(self._width(number)) for part in self._heading(number))
            table.add_column(Text(head), no_wrap=True, min_width=self._width(number))
        headings = dict(self.headings)
        for r, row in enumerate(self.rows):
            if r in headings:
                table.add_section()
                table.add_row(Text(headings[r], "italic"))
            if styled:
                blank = {c: " " * (self._width(c) - len(row[c])) for c in numbers}
                table.add_row(Text(row[0]), *(Text(blank[c]).append(row[c], self._style(r, c)) for c in numbers))
            else:
                cells = {c: self._marked(r, c, row[c], "text").rjust(self._width(c)) for c in numbers}
                table.add_row(Text(row[0]), *map(Text, cells.values()))
        return table

    def _notes(self, form: str) -> list[str]:
        best, second = ("¹", "²") if form == "text" else ("Bold", "underlined")
        each = " in each group" if self.headings else ""
        legend = f"{best}: best method{each}{f'; {second}: second best' if self.second else ''}."
        if not self.second and not (self.best and form == "text"):  # bold explains itself
            return list(self.notes)
        return [" ".join([*self.notes[:1], legend]), *self.notes[1:]]

    def _marked(self, r: int, c: int, cell: str, form: str) -> str:
        best, second = MARKS[form]
        none = "", " " * (form == "text" and c in self._with_marks)  # so that numbers stand below each other
        begin, end = best if (r, c) in self.best else second if (r, c) in self.second else none
        return f"{begin}{cell}{end}"

    def _style(self, r: int, c: int) -> str:
        return "bold" if (r, c) in self.best else "underline" if (r, c) in self.second else ""

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size((80, 24)).columns
        # Without force_jupyter=False, rich in a notebook would show the table instead of writing it into the file.
        console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
        console.print(self.rich(width, styled=False))
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]

    def html(self, folded: bool = False) -> str:
        """Return the table as part of a page, with all names escaped. With `folded`, its notes wait behind a click."""
        head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in self.columns)
        headings, body = dict(self.headings), ""
        for r, row in enumerate(self.rows):
            if r in headings:
                words = html.escape(headings[r])
                body += f'<tr><th scope="rowgroup" colspan="{len(self.columns)}"><i>{words}</i></th></tr>\n'
            cells = [self._marked(r, c, html.escape(cell), "html") for c, cell in enumerate(row)]
            numbers = "".join(f"<td>{cell}</td>" for cell in cells[1:])
            body += f'<tr><th scope="row">{cells[0]}</th>{numbers}</tr>\n'
        notes = "".join(f"<p><small>{html.escape(note)}</small></p>\n" for note in self._notes("html"))
        if folded and notes:
            notes = f'<details class="notes"><summary>Notes on this table</summary>\n{notes}</details>\n'
        top = f"<caption>{html.escape(self.title)}</caption>\n<thead><tr>{head}</tr></thead>"
        scrolled = f'<div class="wide" role="region" tabindex="0" aria-label="{html.escape(self.title)}">\n'
        return f"{scrolled}<table>\n{top}\n<tbody>\n{body}</tbody></table>\n</div>\n{notes}"

    def _repr_html_(self) -> str:
        return self.html()

    def markdown(self) -> str:
        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        headings, rows = dict(self.headings), []
        for r, row in enumerate(self.rows):
            if r in headings:
                rows.append(line([f"*{headings[r]}*", *[""] * (len(row) - 1)]))
            rows.append(line(self._marked(r, c, cell, "markdown") for c, cell in enumerate(row)))
        ruler = line(["---", *["---:"] * (len(self.columns) - 1)])
        table = "\n".join([line(self.columns), ruler, *rows])
        return "\n\n".join([f"**{self.title}**", table, *self._notes("markdown")]) + "\n"

    def latex(self) -> str:
        """Return one floating table with the lines of booktabs. One that is wider than a column of text is shrunk."""

        def line(cells: Iterable[str]) -> str:
            return " & ".join(cells) + r" \\"

        def cell(r: int, c: int) -> str:
            text = self.rows[r][c].translate(LATEX)
            return self._marked(r, c, re.sub(r"^-(?=\d)", "$-$", text), "latex")

        headings, rows, block = dict(self.headings), [], range(1, len(self.columns))
        long = max((len(row[0]) for row in self.rows), default=0) > LATEX_WIDE // 3
        for r in range(len(self.rows)):
            if r in headings:
                rows += [r"\midrule"] if r else []
                rows.append(rf"\multicolumn{{{len(block) + 1}}}{{l}}{{\emph{{{headings[r].translate(LATEX)}}}}} \\")
            rows.append(line([long * r"\raggedright " + cell(r, 0), *(cell(r, c) for c in block)]))
        heads = [[part.translate(LATEX) for part in self._heading(c)] for c in block]
        tops = [r"\shortstack[r]{" + r"\\".join(parts) + "}" if len(parts) > 1 else parts[0] for parts in heads]
        wide = self._first(LATEX_WIDE) + self._others > LATEX_WIDE
        notes = [note.translate(LATEX) for note in self._notes("latex")]
        small = [r"\par\smallskip\footnotesize\raggedright", *notes] if notes else []
        return "\n".join(
            [
                r"\begin{table}  % \usepackage{booktabs" + ",graphicx" * wide + "}",
                r"\centering\small\setlength{\tabcolsep}{4pt}",
                rf"\caption{{{self.title.translate(LATEX)}}}",
                *[r"\resizebox{\linewidth}{!}{%"] * wide,
                r"\begin{tabular}{" + (r"p{0.32\linewidth}" if long else "l") + "r" * len(block) + "}",
                r"\toprule",
                line([self.columns[0].translate(LATEX), *tops]),
                r"\midrule",
                *rows,
                r"\bottomrule",
                r"\end{tabular}" + "}" * wide,
                *small,
                r"\end{table}",
                "",
            ]
        )


@dataclass(frozen=True)
class Spread:
    """The mean and standard deviation of a number over seeds."""

    mean: float
    std: float | None  # of the sample; None for a single seed

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        """Return the spread of the known values, or None if there are none."""
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def __str__(self) -> str:
        if self.std is None:
            return percent(self.mean)
        spread = 100 * self.std
        return f"{percent(self.mean)} ± {spread:.0f}" if spread >= 9.95 else f"{percent(self.mean)} ± {spread:.1f}"


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count >= 99.95e6 else f"{count / 1e6:.3g}"


def seconds(count: float) -> str:
    return f"{count:,.0f}" if count >= 99.95 else f"{count:.1f}"
