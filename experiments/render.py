"""The pages of the results: what `docs/results/` holds, as tables, sentences and plots of docs/RESULTS.md and others.

Every sentence below a table is made from its numbers by a rule. What is missing is said to be missing.
"""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments import lines as stored
from experiments.plan import BOX, EVERY, MAIN, SCORE, SEEDS, TABLES, Tuning, content, rows
from fewlabel.papers.tables import read_table
from fewlabel.report import intervals
from fewlabel.report.groups import NARROW
from fewlabel.report.runs import CEILING, FLOOR
from fewlabel.report.style import COLORS, GREY, draw, empty_plot, finish_plot
from fewlabel.report.tables import Spread, Table

DOCS = stored.DOCS
PAGES = ("RESULTS.md", "which-method.md", "methods/*.md", "../README.md")
NOT_YET = "Not run yet."
METRICS = {"balanced_accuracy": "balanced acc.", "accuracy": "accuracy", "f1": "macro-F1", "auc": "AUC"}
NAMES = {"a-blood": "blood cells", "b-fashion": "Fashion-MNIST", "c-ham": "HAM10000", "d-pneumonia": "PneumoniaMNIST"}
PER_CLASS = {"recall": "Recall of each class, %", "auc": "AUC of each class, %"}
STREAMING = "k-streaming"
ENOUGH = 0.01  # rounds are enough if twice as many gain less
DRAWN = 3  # methods in a plot, beside floor, ceiling and our own

Line = Mapping[str, str]
Rows = Mapping[str, Sequence[Line]]  # the lines of a cell's runs, by row, in the order of their seeds


def render() -> None:
    """Fill pages between their marks, `<!-- NAME -->` and `<!-- end -->`, from docs/results/ alone."""

    def filled(mark: re.Match[str]) -> str:
        return f"<!-- {mark[1]} -->\n{section(mark[1])}\n<!-- end -->"

    for page in (page for pattern in PAGES for page in DOCS.glob(pattern)):
        page.write_text(re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", filled, page.read_text(), flags=re.DOTALL))


def section(name: str) -> str:
    """What stands between the marks of this name."""
    sections: dict[str, Callable[[], str]] = {
        "overall": lambda: overall({NAMES[table]: cells(table).get("", {}) for table in MAIN}),
        "why": why,
        "choice": choice,
        "overall-o": lambda: overall({NAMES[table]: rows_here for table, rows_here in box().items()}),
        "rounds": rounds_enough,
        "h-printed": printed,
        "g-parts": parts,
        STREAMING: streaming,
        **{f"numbers-{method}": lambda method=method: numbers(method) for method in rows()},
        **{f"tuning-{table[0]}": lambda table=table: tuning(table) for table in MAIN},
        **{table: lambda table=table: main_table(table) for table in MAIN},
        **{f"o-{cell}": lambda cell=cell: main_table(BOX, cell) for cell in content(BOX)["cells"]},
    }
    return sections[name]() if name in sections else by_cell(name)


def cells(table: str) -> dict[str, dict[str, list[Line]]]:
    """The lines of a table by cell and row, in the order of the study."""
    found: dict[str, dict[str, list[Line]]] = {}
    for line in sorted(stored.read_lines(table), key=lambda line: (place(line["row"]), int(line["seed"]))):
        found.setdefault(line["cell"], {}).setdefault(line["row"], []).append(line)
    return found


def place(row: str) -> int:
    """Where a row stands: parts stand behind the whole, which has the longest name that begins theirs."""
    known = [number for number, name in enumerate(rows()) if row == name or row.startswith(f"{name}-")]
    return known[-1] if known else len(rows())


def spread(lines: Iterable[Line], key: str) -> Spread | None:
    return Spread.of(float(line[key]) if line.get(key) else None for line in lines)


def shown(lines: Iterable[Line], key: str) -> str:
    return str(spread(lines, key) or "–")


def mean(lines: Sequence[Line], *keys: str) -> float:
    return statistics.fmean(sum(float(line[key] or 0) for key in keys) for line in lines)


def score(lines: Sequence[Line]) -> float:
    return 100 * mean(lines, "last_balanced_accuracy")


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


def above(rows: Rows, row: str) -> intervals.Difference | None:
    """By how much a row is above labels alone, in the seeds that both have."""
    floor = {line["seed"]: line for line in rows.get(FLOOR, ())}
    pairs = [(line, floor[line["seed"]]) for line in rows.get(row, ()) if line["seed"] in floor]
    if row == FLOOR or not pairs:
        return None
    ours, theirs = (confusions(side) for side in zip(*pairs, strict=True))
    return intervals.difference(ours, theirs, "balanced_accuracy")


def points(difference: intervals.Difference | None) -> str:
    if difference is None:
        return "–"
    low, high = difference.interval
    return f"{100 * difference.mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"


def seeds_of(lines: Sequence[Line], wanted: int = len(SEEDS)) -> str:
    return "" if len(lines) == wanted else f" ({len(lines)} of {wanted} seeds)"


def closed(rows: Rows, row: str) -> str:
    """How much of the gap between floor and ceiling a row closes, in percent."""
    if row in (FLOOR, CEILING) or len({len(rows.get(one, ())) for one in (FLOOR, CEILING, row)}) > 1:
        return "–"
    gap = score(rows[CEILING]) - score(rows[FLOOR])
    return "–" if gap < 100 * NARROW else f"{100 * (score(rows[row]) - score(rows[FLOOR])) / gap:.0f}"


def wanted_rows(table: str) -> list[str]:
    left_out, only = content(table).get("leave_out", ()), content(table).get("only", rows())
    return [name for name in only if "family" not in rows()[name] and name not in left_out]


def box() -> dict[str, Rows]:
    """The lines by the recipe's settings, by the main table of the same data."""
    found = cells(BOX)
    return {said["of"]: found.get(cell, {}) for cell, said in content(BOX)["cells"].items()}


# Main tables.


def main_table(table: str, cell: str = "") -> str:
    """One main table: scores and costs, what they say, recall and AUC of each class, and a plot."""
    found, title = cells(table).get(cell, {}), content(table)["title"]
    if cell:
        title = f"{content(content(table)['cells'][cell]['of'])['title'].split(' ', 1)[1]}: nothing tuned"
    if not found:
        return NOT_YET
    body = []
    for row in wanted_rows(table):
        if not (lines := found.get(row)):
            body.append((row, "not run yet", *["–"] * 14))
            continue
        low, high = intervals.of(confusions(lines))["balanced_accuracy"]
        version = "" if lines[0]["method"] in (row, CEILING) else f", as {lines[0]['method']}"
        body.append((
            f"{row}{version}{seeds_of(lines)}",
            shown(lines, "last_balanced_accuracy"),
            f"{100 * low:.1f} to {100 * high:.1f}",
            points(above(found, row)),
            closed(found, row),
            shown(lines, "chosen_balanced_accuracy"),
            *(shown(lines, f"last_{key}") for key in ("accuracy", "f1", "auc")),
            pair(lines, "precision"),
            pair(lines, "coverage"),
            lines[0]["rounds"],
            f"{mean(lines, 'images_labeled') / 1e3:,.0f} + {mean(lines, 'images_unlabeled') / 1e3:,.0f}",
            f"{mean(lines, 'bytes_up') / 1e6:,.0f}",
            f"{mean(lines, 'bytes_down') / 1e6:,.0f}",
            f"{mean(lines, 'seconds'):,.0f}",
        ))  # fmt: skip
    columns = (
        "row",
        "balanced acc.",
        "95 % interval",
        f"above {FLOOR}",
        "gap closed, %",
        "chosen round: balanced acc.",
    )
    columns += ("accuracy", "macro-F1", "AUC", "pseudo-labels right, first → last, %", "coverage, %", "rounds")
    columns += ("images, thousands (labeled + not)", "MB up", "MB down", "seconds")
    whole = Table(title, columns, tuple(body))
    inside = [per_class(found, what) for what in PER_CLASS]
    folded = "\n".join(["<details><summary>Recall and AUC of each class</summary>\n", *inside, "</details>\n"])
    parts = [whole.markdown(), verdict(found), folded]
    picture = f"results/{table}{cell and '-'}{cell}.png"
    if plot(stored.read_curves(table).get(cell, {}), found, DOCS / picture):
        parts.append(f"![{title}: balanced accuracy on test by round]({picture})\n")
    return "\n".join(parts)


def verdict(rows_here: Rows) -> str:
    """What a main table says of the rows that have all seeds."""
    if FLOOR not in rows_here:
        return f"{FLOOR} has no run yet, so nothing can be compared.\n"
    kinds: dict[str, dict[str, float]] = {"above": {}, "level": {}, "below": {}}
    few = [row for row, lines in rows_here.items() if len(lines) < len(SEEDS)]  # of which nothing is said yet
    for row in rows_here:
        if not {FLOOR, row} & set(few) and row != FLOOR and not rows().get(row, {}).get("ceiling"):
            kinds[side(rows_here, row)][row] = 100 * above(rows_here, row).mean
    words = [f"Labels alone have {shown(rows_here[FLOOR], 'last_balanced_accuracy')}."]
    judged = sum(map(len, kinds.values()))
    for kind in ("above", "below") if judged else ():
        order = sorted(kinds[kind], key=lambda row: -abs(kinds[kind][row]))
        named = ", ".join(f"{row} ({kinds[kind][row]:+.1f})" for row in order)
        said = (
            f"{len(order) or 'None'} of {judged} methods {'are' if order[1:] else 'is'} {kind} them by more than chance"
        )
        words.append(f"{said}: {named}." if named else f"{said}.")
    if not judged:
        words.append("No method has all seeds yet.")
    if level := kinds["level"]:
        named = ", ".join(f"{row} ({level[row]:+.1f})" for row in sorted(level, key=lambda row: -level[row]))
        words.append(f"May be chance: {named}.")
    if CEILING in rows_here:
        words.append(f"All labels have {shown(rows_here[CEILING], 'last_balanced_accuracy')}.")
    words += [f"Not all seeds are there yet: {', '.join(few)}."] if few else []
    return "**" + " ".join(words[:2]) + "** " + " ".join(words[2:]) + "\n"


def side(rows_here: Rows, row: str) -> str:
    """Whether a row is above or below labels alone: if its interval says so, and every seed that both have."""
    floor = {line["seed"]: float(line["last_balanced_accuracy"]) for line in rows_here[FLOOR]}
    both = [line for line in rows_here[row] if line["seed"] in floor]
    seeds = [float(line["last_balanced_accuracy"]) - floor[line["seed"]] for line in both]
    found = above(rows_here, row)
    if found is None or found.chance or min(seeds) < 0 < max(seeds):
        return "level"
    return "above" if found.mean > 0 else "below"


def pair(lines: Sequence[Line], key: str) -> str:
    first, last = spread(lines, f"pseudo_label_{key}_first"), spread(lines, f"pseudo_label_{key}")
    return f"{100 * first.mean:.0f} → {100 * last.mean:.0f}" if first and last else "–"


def per_class(rows_here: Rows, what: str) -> str:
    """Recall or AUC of each class, the mean over seeds."""
    key, body = f"last_{what}_per_class", []
    for row, lines in rows_here.items():
        columns = zip(*(line[key].split() for line in lines), strict=True)
        means = (Spread.of(None if value == "-" else float(value) for value in column) for column in columns)
        body.append((row, *("–" if one is None else f"{100 * one.mean:.0f}" for one in means)))
    wide = max(map(len, body))
    return Table(PER_CLASS[what], ("row", *(f"class {n}" for n in range(wide - 1))), tuple(body)).markdown()


def plot(curves: Mapping[str, Any], rows_here: Rows, path: Path) -> bool:
    """Draw bounds, our own and the best other methods by round. Return False if there are no curves."""
    others = [row for row in rows_here if row in curves and row not in (FLOOR, CEILING)]
    own = [row for row in others if rows().get(row, {}).get("own")]
    others = [row for row in others if row not in own and not rows().get(row, {}).get("ceiling")]
    best = sorted(others, key=lambda row: -score(rows_here[row]))[:DRAWN]
    figure, axes = empty_plot("balanced accuracy on test, %")
    styles = {FLOOR: {"color": GREY, "linestyle": ":"}, CEILING: {"color": GREY, "linestyle": "--"}}
    styles |= {row: {"color": color} for row, color in zip([*own, *best], COLORS, strict=False)}
    drawn = [row for row in styles if row in curves]
    for row in drawn:
        seeds = list(curves[row].values())
        known = zip(seeds[0]["round"], *(seed["test"] for seed in seeds), strict=False)
        draw(axes, {number: 100 * statistics.fmean(values) for number, *values in known}, label=row, **styles[row])
    if drawn:
        finish_plot(figure, path)
    return bool(drawn)


def overall(found: Mapping[str, Rows]) -> str:
    """What becomes of each row on all data sets."""
    there = {name: rows_here for name, rows_here in found.items() if FLOOR in rows_here}
    if not there:
        return NOT_YET
    names = [
        row for row in wanted_rows(MAIN[0]) if row != FLOOR and any(row in rows_here for rows_here in there.values())
    ]
    body, typical = [], {}
    for row in names:
        gains = {table: above(rows_here, row) for table, rows_here in there.items()}
        known = [100 * gain.mean for gain in gains.values() if gain]
        typical[row] = statistics.fmean(known) if known else float("-inf")
        cells_here = []
        for table, gain in gains.items():
            marks = "" if gain is None or gain.chance else " *"
            cells_here.append("–" if gain is None else f"{100 * gain.mean:+.1f}{marks}{seeds_of(there[table][row])}")
        whole = [table for table in there if all(len(there[table].get(one, ())) == len(SEEDS) for one in (FLOOR, row))]
        sides = [side(there[table], row) for table in whole]
        counts = (f"{sides.count(kind)} of {len(sides)}" for kind in ("above", "below"))
        body.append((row, *cells_here, f"{typical[row]:+.1f}", *counts))
    body.sort(key=lambda line: -typical[line[0]])
    floors = ", ".join(
        f"{name} {shown(rows_here[FLOOR], 'last_balanced_accuracy')}" for name, rows_here in there.items()
    )
    columns = ("row", *there, "mean", "above by more than chance", "below")
    notes = (
        f"Balanced accuracy on test after the last round; labels alone have: {floors}.",
        "A star: the 95 % interval over seeds and test images does not hold zero. Above or below by more than chance: "
        "it has a star, and every seed says the same.",
    )
    return Table(f"Points above {FLOOR}, for equal rounds and one recipe", columns, tuple(body), notes).markdown()


def whole_gains() -> dict[str, dict[str, float]]:
    """By how many points rows are above labels alone out of the box, by row and data set; only rows with all seeds."""
    found: dict[str, dict[str, float]] = {}
    for table, rows_here in box().items():
        for row, lines in rows_here.items():
            if row != FLOOR and len(lines) == len(rows_here.get(FLOOR, ())) == len(SEEDS):
                gain = above(rows_here, row)
                assert gain is not None
                found.setdefault(row, {})[NAMES[table]] = 100 * gain.mean
    return found


def compared() -> tuple[str, dict[str, float], dict[str, float], list[str]]:
    """Our own method, its gain on each data set, the mean gains of the others there, best first, and who else gains."""
    gains = whole_gains()
    own = next(row for row in rows() if rows()[row].get("own"))
    here = gains.get(own, {})
    others = {
        row: statistics.fmean(gain[name] for name in here)
        for row, gain in gains.items()
        if row != own and not rows()[row].get("ceiling") and here and set(here) <= set(gain)
    }
    tables = {NAMES[table]: rows_here for table, rows_here in box().items()}
    surely = [row for row in (own, *others) if any(side(tables[name], row) == "above" for name in here)]
    return own, here, dict(sorted(others.items(), key=lambda one: -one[1])), surely


def why() -> str:
    """What our own method brings, in two sentences."""
    own, here, others, surely = compared()
    if not here or not others:
        return NOT_YET
    each = ", ".join(f"{name} {gain:+.1f}" for name, gain in here.items())
    best, gain = next(iter(others.items()))
    alone = "" if own in surely else ", though on no single one by more than chance"
    published = sum(row != own for row in surely)
    gaining = (
        f"{published} gain by more than chance on some data set" if published else "none gains by more than chance"
    )
    return (
        f"**What unlabeled images bring.** Our own method, [{own}](docs/methods/{own}.md), is "
        f"{statistics.fmean(here.values()):+.1f} points above labels alone in the mean over "
        f"{len(here)} data set{'s' * (len(here) > 1)}, with one labeled site ({each}; balanced accuracy, three seeds, "
        f"nothing tuned){alone}. Of "
        f"{len(others)} published methods, trained in the same way, the best is {best} with {gain:+.1f}; {gaining} "
        f"([all results](docs/RESULTS.md)). The design of {own} was chosen on validation images of "
        "these data sets."
    )


def choice() -> str:
    """Which method to try, by data set."""
    _, _, others, _ = compared()
    gains = whole_gains()
    if not others:
        return NOT_YET
    tables = {NAMES[table]: rows_here for table, rows_here in box().items()}
    body = []
    for name, rows_here in tables.items():
        here = {row: gain[name] for row, gain in gains.items() if name in gain and not rows()[row].get("ceiling")}
        order = sorted(here, key=lambda row: -here[row])
        if not order:
            continue
        said = [f"{row} {here[row]:+.1f}{' *' if side(rows_here, row) == 'above' else ''}" for row in order[:3]]
        last = order[-1]
        body.append((
            name,
            shown(rows_here[FLOOR], "last_balanced_accuracy"),
            ", ".join(said),
            f"{sum(gain < 0 for gain in here.values())} of {len(here)}",
            f"{last} {here[last]:+.1f}",
        ))  # fmt: skip
    star = " A star: in every seed, and by more than chance." if any("*" in line[2] for line in body) else ""
    notes = (f"Points above labels alone, out of the box. Differences may be chance.{star}",)
    columns = ("data", "labels alone", "best three", "below labels alone", "worst")
    return Table("Which method gains", columns, tuple(body), notes).markdown() + gains_plot(gains)


def gains_plot(gains: Mapping[str, Mapping[str, float]]) -> str:
    """Draw what each row gains on each data set, best mean first, and return the picture's place in a page."""
    from matplotlib.figure import Figure

    methods = [row for row in gains if not rows()[row].get("ceiling")]
    order = sorted(methods, key=lambda row: statistics.fmean(gains[row].values()))
    figure = Figure(figsize=(7, 0.32 * len(order) + 1.4), layout="constrained")
    axes = figure.subplots()
    for number, name in enumerate(NAMES.values()):
        here = [(gains[row][name], place) for place, row in enumerate(order) if name in gains[row]]
        if here:
            axes.scatter(*zip(*here, strict=True), color=COLORS[number], label=name, zorder=3)
    means = [statistics.fmean(gains[row].values()) for row in order]
    axes.barh(range(len(order)), means, color=GREY, alpha=0.35, height=0.6)
    axes.axvline(0, color=GREY, linewidth=1)
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel(f"points of balanced accuracy above {FLOOR}: dots are data sets, bars are means")
    finish_plot(figure, DOCS / "results" / "gains.png")
    return "\n![What each method gains over labels alone on each data set](results/gains.png)\n"


def numbers(method: str) -> str:
    """A method between floor and ceiling in each main table, for its own page."""
    body = []
    for settings, tables in (("recipe's", box()), ("tuned", {table: cells(table).get("", {}) for table in MAIN})):
        for table, found in tables.items():
            if method in found and FLOOR in found:
                three = (shown(found.get(row, ()), "last_balanced_accuracy") for row in (FLOOR, method, CEILING))
                version = found[method][0]["method"]
                body.append((NAMES[table], settings, *three, points(above(found, method)), version))
    if not body:
        return NOT_YET
    columns = ("data", "settings", FLOOR, method, CEILING, f"above {FLOOR}", "version")
    return Table("Balanced accuracy on test in the last round, in percent", columns, tuple(body)).markdown()


# Tuning.


def tuning(table: str) -> str:
    """What was tried on validation, and what was chosen."""
    lines = [line for line in stored.read_lines(f"tuning-{table[0]}") if not line["cell"]]
    if not lines:
        return NOT_YET
    found, body = Tuning(table, lines), []
    for row in rows():
        own = [line for line in lines if line["row"] == row]
        if not own:
            continue
        chosen = found.chosen(row)
        mark = " ".join(chosen[1]) if chosen and chosen[0] == row else None
        tried = ", ".join(
            f"**{said}**" if line["settings"] == mark else said
            for line in own
            for said in [f"{brief(line['settings'])}: {100 * float(line[SCORE]):.1f}"]
        )
        other = "–" if chosen is None else "yes" if mark else f"no, {chosen[0]}"
        body.append((row, tried, other, rows()[row].get("tune", {}).get("why", "")))
    columns = ("row", "tried: balanced acc. on validation", "in the tables", "why this setting")
    return Table(f"Tuned on {NAMES[table]}, seed 100", columns, tuple(body)).markdown()


def brief(settings: str) -> str:
    """Settings as people write them; the rate of unlabeled images follows from the other."""
    words = (word.removeprefix("method.").removeprefix("local.") for word in settings.split())
    return " ".join(word for word in words if not word.startswith("lr_unlabeled"))


def rounds_enough() -> str:
    """Whether twice the rounds gain a point or more on validation."""
    body, said = [], []
    for table in MAIN:
        every = stored.read_lines(f"tuning-{table[0]}")
        once = {(line["row"], line["settings"]): line for line in every if not line["cell"]}
        for line in (line for line in every if line["cell"]):
            settings = re.sub(r" ?rounds=\d+", "", line["settings"])
            before = float(once[line["row"], settings][SCORE])
            gain = float(line[SCORE]) - before
            scores = f"{100 * before:.1f}", f"{100 * (gain + before):.1f}", f"{100 * gain:+.1f}"
            body.append((f"{NAMES[table]}, {line['row']}", *scores))
            said += [f"{line['row']} on {NAMES[table]}"] if gain >= ENOUGH else []
    if not body:
        return NOT_YET
    words = "Rounds are enough: twice as many gain nobody a point."
    if said:
        words = f"Not enough for {', '.join(said)}: twice the rounds gain a point or more."
    columns = ("row", "as in the tables", "twice the rounds", "gain")
    return Table("Balanced accuracy on validation, seed 100", columns, tuple(body), (words,)).markdown()


# The other tables.


def printed() -> str:
    """Each version as printed and by the recipe."""
    found = cells("h-printed")
    recipe, paper = found.get("fewlabel", {}), found.get("printed", {})
    if not paper:
        return NOT_YET
    body, gains = [], {}
    for row in content("h-printed")["only"]:
        mine, theirs = recipe.get(row, ()), paper.get(row, ())
        if mine and theirs:
            gains[row] = score(mine) - score(theirs)
        costs = [
            f"{mean(lines, 'images_labeled', 'images_unlabeled') / 1e3:,.0f}" if lines else "–"
            for lines in (theirs, mine)
        ]
        body.append((
            row,
            f"{shown(theirs, 'last_balanced_accuracy')}{seeds_of(theirs)}",
            f"{shown(mine, 'last_balanced_accuracy')}{seeds_of(mine)}",
            f"{gains[row]:+.1f}" if row in gains else "–",
            *costs,
        ))  # fmt: skip
    columns = ("row", "printed", "fewlabel", "gain", "printed: images, thousands", "fewlabel: images, thousands")
    words = []
    if gains:
        least, most = min(gains, key=lambda row: gains[row]), max(gains, key=lambda row: gains[row])
        words = [f"The recipe brings between {gains[least]:+.1f} ({least}) and {gains[most]:+.1f} points ({most})."]
    return Table(content("h-printed")["title"], columns, tuple(body), tuple(words)).markdown()


def parts() -> str:
    """Each method beside itself without a part."""
    found = cells("g-parts").get("", {})
    if not found:
        return NOT_YET
    body, without, largest = [], {}, {}
    for name, changes in {FLOOR: {}, **content("g-parts")["parts"]}.items():
        if name not in found:
            continue
        body.append((name, shown(found[name], "last_balanced_accuracy"), ""))
        for part in changes:
            row = f"{name}-{part}"
            if row in found:
                change = score(found[row]) - score(found[name])
                body.append((f"– {part}", shown(found[row], "last_balanced_accuracy"), f"{change:+.1f}"))
                (without if part == "on-labels" else largest)[row] = change
    words = []
    if largest:
        worst = min(largest, key=lambda row: largest[row])
        words.append(f"The part that brings most: without it, {worst} changes by {largest[worst]:+.1f} points.")
    if without:
        better = [row.removesuffix("-on-labels") for row, change in without.items() if change > 0]
        named = f": {', '.join(better)}." if better else "."
        words.append(f"{len(better)} of {len(without)} methods are better without any unlabeled image{named}")
    words.append("One seed: differences of a point or two may be chance.")
    return Table(content("g-parts")["title"], ("row", "balanced acc.", "change"), tuple(body), tuple(words)).markdown()


def by_cell(table: str) -> str:
    """The rows of a table beside each other in its cells, with those of the table that it builds on."""
    if table not in EVERY or not (found := cells(table)):
        return NOT_YET
    names = sorted({row for rows_here in found.values() for row in rows_here}, key=place)
    base = cells(content(table)["of"]).get("", {}) if "best" in content(table) else {}
    shown_cells = {**found, **({"as in (a)": base} if base else {})}

    def cell_of(row: str, rows_here: Rows) -> str:
        lines = rows_here.get(row, ())
        wanted = len(content(table).get("seeds", SEEDS))
        return f"{shown(lines, 'last_balanced_accuracy')}{seeds_of(lines, wanted) if lines else ''}"

    body = tuple((row, *(cell_of(row, rows_here) for rows_here in shown_cells.values())) for row in names)
    words = []
    for cell, rows_here in found.items():
        gains = {row: gain for row in rows_here if (gain := above(rows_here, row))}
        if gains:
            best = max(gains, key=lambda row: gains[row].mean)
            chance = ", which may be chance" if gains[best].chance else ""
            words.append(f"{cell}: {best} is highest, {points(gains[best])} above {FLOOR}{chance}.")
    return Table(content(table)["title"], ("row", *shown_cells), body, tuple(words)).markdown()


def streaming() -> str:
    """FedMatch's streaming scenarios, beside the numbers of its paper. Its lines are of an earlier study."""
    paper = {row.name: row.paper for row in read_table(TABLES / f"{STREAMING}.toml").rows}
    grouped: dict[str, dict[str, list[Line]]] = {}
    for line in stored.read_lines(STREAMING):
        grouped.setdefault(line["cell"], {}).setdefault(line["row"], []).append(line)
    keys = {"accuracy": "accuracy", "local_accuracy": "local accuracy", "sent": "numbers sent"}
    columns = ("row", *(name for word in keys.values() for name in (word, f"paper: {word}")))
    tables = []
    for cell, rows_here in grouped.items():
        body = []
        for row, lines in rows_here.items():
            own = [shown(lines, key if key == "sent" else f"last_{key}") for key in keys]
            theirs = [str(paper.get(f"{cell}/{row}", {}).get(key, "–")) for key in keys]
            body.append((row, *(cell for both in zip(own, theirs, strict=True) for cell in both)))
        tables.append(Table(f"(k) Fashion-MNIST as a stream, {cell}", columns, tuple(body)).markdown())
    return "\n".join(tables) or NOT_YET
