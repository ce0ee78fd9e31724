"""The study's lines as rows beside labels alone: scores, differences, and which of these are more than chance."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from experiments import lines as stored
from experiments import plan
from fewlabel.report import intervals
from fewlabel.report.groups import NARROW
from fewlabel.report.runs import CEILING, FLOOR
from fewlabel.report.tables import Spread

NAMES = {"a-blood": "blood cells", "b-fashion": "Fashion-MNIST", "c-ham": "HAM10000", "d-pneumonia": "PneumoniaMNIST"}
NONE = "–"  # a cell that has no number

Line = Mapping[str, str]
Rows = Mapping[str, Sequence[Line]]  # the lines of a cell's runs, by row, in the order of their seeds


def cells(table: str) -> dict[str, dict[str, list[Line]]]:
    """Return the lines of a table by cell and row, in the order of the study."""
    found: dict[str, dict[str, list[Line]]] = {}
    for line in sorted(stored.read_lines(table), key=lambda line: (place(line["row"]), int(line["seed"]))):
        found.setdefault(line["cell"], {}).setdefault(line["row"], []).append(line)
    return found


def box() -> dict[str, Rows]:
    """Return the lines by the recipe's settings, by data set."""
    found = cells(plan.BOX)
    return {NAMES[said["of"]]: found.get(cell, {}) for cell, said in plan.content(plan.BOX)["cells"].items()}


def digits() -> dict[str, Rows]:
    """Return the lines on digits, by where the labels are."""
    found = cells(plan.DIGITS)
    return {f"digits, {cell} of ten labeled": found.get(cell, {}) for cell in plan.content(plan.DIGITS)["cells"]}


def networks() -> dict[str, dict[str, Rows]]:
    """Return the lines of the table of networks, by network and data set."""
    found: dict[str, dict[str, Rows]] = {}
    lines = cells(plan.NETWORKS)
    for cell, said in plan.content(plan.NETWORKS)["cells"].items():
        found.setdefault(cell.split()[-1], {})[NAMES[said["of"]]] = lines.get(cell, {})
    return found


def tuned() -> dict[str, Rows]:
    """Return the lines of the main tables, by data set."""
    return {NAMES[table]: cells(table).get("", {}) for table in plan.MAIN}


def place(row: str) -> int:
    """Where a row stands: parts stand behind the whole, which has the longest name that begins theirs."""
    known = [number for number, name in enumerate(plan.rows()) if row == name or row.startswith(f"{name}-")]
    return known[-1] if known else len(plan.rows())


def wanted_rows(table: str) -> list[str]:
    left_out, only = plan.content(table).get("leave_out", ()), plan.content(table).get("only", plan.rows())
    return [name for name in only if "family" not in plan.rows()[name] and name not in left_out]


def is_method(row: str) -> bool:
    """True for what learns from unlabeled images: neither floor nor ceiling."""
    return row != FLOOR and not plan.rows().get(row, {}).get("ceiling")


def is_own(row: str) -> bool:
    return bool(plan.rows().get(row, {}).get("own"))


# Numbers of a row.


def spread(lines: Iterable[Line], key: str) -> Spread | None:
    return Spread.of(float(line[key]) if line.get(key) else None for line in lines)


def shown(lines: Iterable[Line], key: str = "last_balanced_accuracy") -> str:
    return str(spread(lines, key) or NONE)


def mean(lines: Sequence[Line], *keys: str) -> float:
    return statistics.fmean(sum(float(line.get(key) or 0) for key in keys) for line in lines)


def score(lines: Sequence[Line]) -> float:
    return 100 * mean(lines, "last_balanced_accuracy")


def first_and_last(lines: Sequence[Line], key: str) -> str:
    first, last = spread(lines, f"pseudo_label_{key}_first"), spread(lines, f"pseudo_label_{key}")
    return f"{100 * first.mean:.0f} → {100 * last.mean:.0f}" if first and last else NONE


def confusions(lines: Iterable[Line]) -> list[list[list[int]]]:
    """The counts behind recalls: how many images of each class are right, and how many are not."""
    found = []
    for line in lines:
        images = [round(float(count)) for count in line["images_per_class"].split()]
        recalls = [0.0 if recall == "-" else float(recall) for recall in line["last_recall_per_class"].split()]
        right = [round(recall * count) for recall, count in zip(recalls, images, strict=True)]
        size = len(images)
        found.append([
            [right[n] if m == n else images[n] - right[n] if m == (n + 1) % size else 0 for m in range(size)]
            for n in range(size)
        ])  # fmt: skip
    return found


def interval(lines: Sequence[Line]) -> str:
    low, high = intervals.of(confusions(lines))["balanced_accuracy"]
    return f"{100 * low:.1f} to {100 * high:.1f}"


def wanted_seeds(lines: Sequence[Line]) -> int:
    """How many seeds a row has at the end, by the table that its lines are of."""
    table = lines[0]["table"]
    return len(plan.content(table).get("seeds", plan.SEEDS) if table in plan.EVERY else plan.SEEDS)


def seeds_of(lines: Sequence[Line]) -> str:
    wanted = wanted_seeds(lines)
    return "" if len(lines) == wanted else f" ({len(lines)} of {wanted} seeds)"


# A row beside labels alone.


def above(rows_here: Rows, row: str) -> intervals.Difference | None:
    """By how much a row is above labels alone, in the seeds that both have."""
    floor = {line["seed"]: line for line in rows_here.get(FLOOR, ())}
    pairs = [(line, floor[line["seed"]]) for line in rows_here.get(row, ()) if line["seed"] in floor]
    if row == FLOOR or not pairs:
        return None
    ours, theirs = (confusions(side) for side in zip(*pairs, strict=True))
    return intervals.difference(ours, theirs, "balanced_accuracy")


def points(difference: intervals.Difference | None) -> str:
    if difference is None:
        return NONE
    low, high = difference.interval
    return f"{100 * difference.mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def is_whole(rows_here: Rows, row: str) -> bool:
    """True if a row and labels alone have all seeds. Nothing is concluded about other rows."""
    return all((lines := rows_here.get(one)) and len(lines) == wanted_seeds(lines) for one in (FLOOR, row))


def side(rows_here: Rows, row: str) -> str:
    """Whether a row is above or below labels alone: if its interval says so, and every seed that both have."""
    floor = {line["seed"]: float(line["last_balanced_accuracy"]) for line in rows_here.get(FLOOR, ())}
    both = [line for line in rows_here.get(row, ()) if line["seed"] in floor]
    seeds = [float(line["last_balanced_accuracy"]) - floor[line["seed"]] for line in both]
    found = above(rows_here, row)
    if found is None or found.chance or min(seeds) < 0 < max(seeds):
        return "level"
    return "above" if found.mean > 0 else "below"


def surely(rows_here: Rows, row: str) -> str:
    """`side` of a row that has all seeds. Of any other, `level`."""
    return side(rows_here, row) if is_whole(rows_here, row) else "level"


def closed(rows_here: Rows, row: str) -> str:
    """How much of the gap between floor and ceiling a row closes, in percent."""
    if row in (FLOOR, CEILING) or len({len(rows_here.get(one, ())) for one in (FLOOR, CEILING, row)}) > 1:
        return NONE
    gap = score(rows_here[CEILING]) - score(rows_here[FLOOR])
    return NONE if gap < 100 * NARROW else f"{100 * (score(rows_here[row]) - score(rows_here[FLOOR])) / gap:.0f}"
