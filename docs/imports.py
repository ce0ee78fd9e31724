"""Show in architecture.md who imports whom and which files there are. `python docs/imports.py` updates both."""

import ast
import re
import sys
from collections.abc import Iterator, Set
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from pictures import PLAIN, SERVER, Picture  # noqa: E402

PACKAGE = HERE.parent / "fewlabel"
PAGE, DIAGRAM = HERE / "architecture.md", HERE / "images" / "imports.svg"
Edge = tuple[str, str]


def edges() -> set[Edge]:
    """Return which folder imports which. Files beside the folders count as folders; late imports count, too.

    `__init__.py` and `__main__.py` are left out: they only pass on what users import.
    """
    files = [path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE or not path.stem.startswith("__")]
    found = ((part(path), target) for path in files for target in imported(path))
    return {(source, target) for source, target in found if source != target}


def part(path: Path) -> str:
    """Return the folder of a file, or the name of a file that is in none."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Yield the folder of each module of ours that a file imports, wherever in the file."""
    package = ("fewlabel", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("fewlabel."))


def arrows(found: Set[Edge]) -> set[Edge]:
    """Return the edges that do not follow from others: with a -> b and b -> c, the edge a -> c is left out."""

    def below(source: str) -> set[str]:
        direct = {target for start, target in found if start == source}
        return direct.union(*map(below, direct))

    return {
        (source, target)
        for source, target in found
        if not any(target in below(other) for start, other in found if start == source)
    }


LEFT, CENTRE, RIGHT = 115, 330, 545
FOLDERS = {  # where each is drawn: its row, its column, and what it is
    "cli": (0, CENTRE, "the command"),
    "api": (1, LEFT, "the Python interface"),
    "labeling": (1, RIGHT, "labels by people"),
    "inference": (2, LEFT, "use a model"),
    "papers": (2, CENTRE, "the papers' tables"),
    "deploy": (2, RIGHT, "many machines"),
    "report": (3, CENTRE, "tables, plots, pages"),
    "engine": (4, CENTRE, "one run"),
    "experiment": (5, LEFT, "all settings"),
    "methods": (6, LEFT, "one file each"),
    "data": (6, CENTRE, "who holds which image"),
    "networks": (6, RIGHT, "networks by name"),
    "learn": (7, LEFT, "parts of methods"),
    "core": (8, CENTRE, "the contract"),
}


def diagram() -> Picture:
    """Draw who imports whom, without arrows that follow from others. An import against the order is red."""
    p = Picture(660, 590)
    found = edges()
    down = {(source, target) for source, target in found if FOLDERS[source][0] < FOLDERS[target][0]}
    for source, target in sorted(arrows(down) | (found - down)):
        (row, x, _), (to_row, to_x, _) = FOLDERS[source], FOLDERS[target]
        p.arrow(x, row * 66 + 52, to_x, to_row * 66 + 12, color="#333" if (source, target) in down else "red")
    for name, (row, x, about) in FOLDERS.items():
        p.box(x - 85, row * 66 + 12, 170, 40, name, about, fill=SERVER if name == "core" else PLAIN)
    return p


def files() -> str:
    """Return a table of the files in each folder."""
    rows = ["| folder | files |", "|---|---|"]
    for folder in sorted({path.parent for path in PACKAGE.rglob("*.py")}):
        code = [path.stem for path in sorted(folder.glob("*.py")) if path.read_text().count("\n") > 1]
        rows.append(f"| `{folder.relative_to(PACKAGE.parent)}/` | {' '.join(f'`{name}`' for name in code)} |")
    return "\n".join(rows)


def page() -> str:
    """Return the page about the architecture with the files of today."""
    return re.sub("(<!-- files -->).*?(<!-- end -->)", rf"\1\n{files()}\n\2", PAGE.read_text(), flags=re.S)


if __name__ == "__main__":
    DIAGRAM.write_text(diagram().svg())
    PAGE.write_text(page())
