"""What plots show, as data: lines, cells of a matrix, bars, and values with their intervals.

`static` draws them for files, paper and browsers without scripts. `page.js` draws them in a browser.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.float64]]

PERCENT = (0.0, 100.0)


def rounded(value: float | None, digits: int = 2) -> float | None:
    """Return a number as a page has it: short, and None where there is none."""
    return None if value is None or not math.isfinite(value) else round(float(value), digits)


@dataclass(frozen=True)
class Line:
    """A value by round, with its standard deviation over seeds where there are several."""

    name: str
    points: Mapping[int, float]
    color: str
    dash: str = ""  # or "dot", "dash"
    spread: Mapping[int, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        spread = [rounded(self.spread.get(at), 4) for at in self.points] if self.spread else []
        found = {"name": self.name, "x": list(self.points), "y": [rounded(y, 4) for y in self.points.values()]}
        return found | {"color": self.color, "dash": self.dash, "spread": spread}


@dataclass(frozen=True)
class Lines:
    """Curves over the rounds."""

    lines: tuple[Line, ...]
    ylabel: str
    percent: bool = True  # shares, drawn between 0 and 100
    chosen: int | None = None  # the round that validation chose
    rows: bool = False  # True if each line is a row of the page, which has the same name in other plots

    def to_json(self) -> dict[str, Any]:
        lines = [line.to_json() for line in self.lines if line.points]
        found = {"kind": "lines", "lines": lines, "ylabel": self.ylabel, "percent": self.percent}
        return found | {"chosen": self.chosen, "rows": self.rows}


@dataclass(frozen=True)
class Cells:
    """A matrix of numbers. Unknown ones are NaN."""

    values: "Array"
    down: Sequence[str]
    across: Sequence[str]
    ylabel: str
    xlabel: str
    scale: tuple[float, float] | None = None  # by default from 0 to the largest value
    digits: int = 0
    diagonal: bool = False  # True if what is on the diagonal is right, and all else is wrong
    counts: "Array | None" = None  # of images; then values are their shares of each row, in percent

    @property
    def range(self) -> tuple[float, float]:
        """The values of the palest and of the strongest colour."""
        import numpy as np

        return self.scale or (0.0, float(np.nanmax(self.values)) if np.isfinite(self.values).any() else 1.0)

    def to_json(self) -> dict[str, Any]:
        digits = self.digits + 1 + (self.scale != PERCENT)
        values = [[rounded(value, digits) for value in row] for row in self.values.tolist()]
        counts = None if self.counts is None else [list(map(int, row)) for row in self.counts.tolist()]
        values = values if counts is None else []  # the page makes them from the counts
        found: dict[str, Any] = {
            "kind": "cells",
            "values": values,
            "down": list(self.down),
            "across": list(self.across),
        }
        found |= {"ylabel": self.ylabel, "xlabel": self.xlabel, "range": list(self.range), "digits": self.digits}
        return found | {"diagonal": self.diagonal, "counts": counts}


@dataclass(frozen=True)
class Part:
    """A part of each bar, such as the images of one class."""

    name: str
    values: Sequence[float]
    color: str


@dataclass(frozen=True)
class Bars:
    """A bar of stacked parts for each name."""

    names: Sequence[str]
    parts: tuple[Part, ...]
    xlabel: str
    ylabel: str = ""
    bold: Sequence[bool] = ()  # names to write in bold
    legend: bool = True

    def to_json(self) -> dict[str, Any]:
        parts = [{"name": p.name, "x": [rounded(x, 3) for x in p.values], "color": p.color} for p in self.parts]
        found = {"kind": "bars", "names": list(self.names), "parts": parts, "xlabel": self.xlabel}
        return found | {"ylabel": self.ylabel, "bold": list(self.bold), "legend": self.legend}


@dataclass(frozen=True)
class Mark:
    """A value in percent with its interval, if that is known."""

    name: str
    value: float
    interval: tuple[float, float] | None
    color: str


@dataclass(frozen=True)
class Intervals:
    """A mark for each name. The floor and the ceiling are lines across all of them."""

    marks: tuple[Mark, ...]
    xlabel: str
    lines: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        # With one digit, as in tables: rounded twice, 13.346 would be 13.4 in the browser.
        marks = [
            {"name": m.name, "value": rounded(m.value, 1), "color": m.color}
            | {"interval": m.interval and [rounded(end, 1) for end in m.interval]}
            for m in self.marks
        ]
        lines = {name: rounded(value) for name, value in self.lines.items()}
        return {"kind": "intervals", "marks": marks, "xlabel": self.xlabel, "lines": lines, "rows": True}


Chart = Lines | Cells | Bars | Intervals
