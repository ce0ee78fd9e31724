"""The pages of the results: what `docs/results/` holds, as tables, sentences and plots of docs/RESULTS.md and others.

Every sentence beside a table is made from its numbers by a rule. A page asks for a part between two marks,
`<!-- NAME -->` and `<!-- end -->`. The first mark may hold a heading and words, in further lines: they appear with the
part. Of a part without lines nothing appears, and `coming` says that it is still to come.
"""

import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from experiments import lines as stored
from experiments import plan, plots, sides
from experiments.beside import (
    NAMES,
    NONE,
    Line,
    Rows,
    above,
    box,
    cells,
    closed,
    digits,
    first_and_last,
    interval,
    is_method,
    is_whole,
    mean,
    place,
    points,
    score,
    seeds_of,
    shown,
    side,
    surely,
    tuned,
    wanted_rows,
    wanted_seeds,
)
from experiments.findings import choice, conclusion, digits_too, network, why
from experiments.plan import BOX, DIGITS, EVERY, MAIN, SCORE, Tuning, content, rows
from fewlabel.papers.tables import read_table
from fewlabel.report.runs import CEILING, FLOOR
from fewlabel.report.tables import Spread, Table

PAGES = ("RESULTS.md", "which-method.md", "methods/*.md", "../README.md", "trust.md", "privacy.md", "label.md")
MARK = re.compile(r"(<!-- ([\w-]+)(?: |\n((?:(?!-->).)*))-->\n).*?<!-- end -->", re.DOTALL)
OF_PAGE = ("contents", "coming")  # parts that follow from the page's other parts
PER_CLASS = {"recall": "Recall of each class, %", "auc": "AUC of each class, %"}
STREAMING = "k-streaming"
ENOUGH = 0.01  # rounds are enough if twice as many gain less


def render() -> None:
    """Fill pages between their marks, from docs/results/ alone."""
    for page in (page for pattern in PAGES for page in stored.DOCS.glob(pattern)):
        page.write_text(filled(page.read_text()))


def filled(page: str) -> str:
    """Return a page with all parts as the lines have them today."""
    page = MARK.sub(lambda mark: mark[0] if mark[2] in OF_PAGE else part(mark, section(mark[2])), page)
    of_page = {"contents": contents(page), "coming": coming(page)}
    return MARK.sub(lambda mark: part(mark, of_page[mark[2]]) if mark[2] in OF_PAGE else mark[0], page)


def part(mark: re.Match[str], told: str) -> str:
    """Return a part with its marks: the heading and the words of the first mark, then what there is to tell."""
    told = f"{mark[3] or ''}\n{told}".strip("\n") if told else ""
    return f"{mark[1]}{told}{told and chr(10)}{chr(10) if told.endswith('|') else ''}<!-- end -->"


def section(name: str) -> str:
    """Return what stands between the marks of this name, or nothing if it has no lines."""
    sections: dict[str, Callable[[], str]] = {
        "conclusion": lambda: conclusion(box()),
        "why": why,
        "choice": choice,
        "network": network,
        "digits": digits_too,
        "gains": plots.gains,
        "overall-o": lambda: overall(box()),
        "overall": lambda: "\n".join(filter(None, [conclusion(tuned()), overall(tuned())])),
        "rounds": rounds_enough,
        "h-printed": printed,
        "g-parts": parts,
        STREAMING: streaming,
        **sides.SECTIONS,
        "tuning": lambda: "\n".join(filter(None, map(tuning, MAIN))),
        **{f"numbers-{method}": lambda method=method: numbers(method) for method in rows()},
        **{table: lambda table=table: main_table(table) for table in MAIN},
        **{
            f"{table[0]}-{cell}": lambda table=table, cell=cell: main_table(table, cell)
            for table in (BOX, DIGITS)
            for cell in content(table)["cells"]
        },
    }
    return sections[name]() if name in sections else by_cell(name)


# What follows from the page.


def headings(page: str) -> Iterator[tuple[int, str]]:
    """Yield the headings of a page that readers see: those in marks and in blocks of code are none."""
    seen = re.sub(r"<!--.*?-->|^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    for found in re.finditer(r"^(#+) (.*)$", seen, re.MULTILINE):
        yield len(found[1]), found[2]


def anchor(heading: str) -> str:
    """Return what GitHub calls a heading in a link."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def contents(page: str) -> str:
    """Return the page's headings as a list of links, those of the third level behind those of the second."""
    chapters: list[list[str]] = []
    for level, heading in headings(page):
        if level == 2:
            chapters.append([])
        if level in (2, 3):
            chapters[-1].append(f"[{heading}](#{anchor(heading)})")
    return "\n".join(f"- {': '.join(filter(None, [links[0], ', '.join(links[1:])]))}" for links in chapters)


def coming(page: str) -> str:
    """Return which tables of the protocol have no line yet: those with a letter, in marks that are empty."""
    empty = [mark[3] for mark in MARK.finditer(page) if mark[3] and mark[0] == f"{mark[1]}<!-- end -->"]
    names = [heading for held in empty for heading in re.findall(r"^#+ (\(\w\) .*)$", held, re.MULTILINE)]
    if not names:
        return ""
    return f"Still to come, by [the protocol](PROTOCOL.md#tables): {'; '.join(names)}."


def with_seeds(lines: Sequence[Line]) -> str:
    """A score, with how many seeds it has if not all."""
    return f"{shown(lines)}{seeds_of(lines)}" if lines else NONE


def table_of(title: str, columns: Sequence[str], body: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
    """Return a table in Markdown. A column without any number is left out."""
    kept = [n for n in range(len(columns)) if n == 0 or any(row[n] not in (NONE, "") for row in body)]
    rows_kept = tuple(tuple(row[n] for n in kept) for row in body)
    return Table(title, tuple(columns[n] for n in kept), rows_kept, tuple(notes)).markdown()


def folded(summary: str, *inside: str) -> str:
    return "\n".join([f"<details><summary>{summary}</summary>\n", *inside, "</details>\n"])


def still_to_run(found: Rows, wanted: Sequence[str]) -> str:
    """Name the rows of a table that have no line, or not all seeds."""
    names = [row for row in wanted if not found.get(row)]
    for row, lines in found.items():
        if missing := wanted_seeds(lines) - len(lines):
            names.append(f"{missing} seed{'s' * (missing > 1)} of {row}")
    return f"Still to run: {', '.join(names)}.\n" if names else ""


# Main tables.


def main_table(table: str, cell: str = "") -> str:
    """One main table: what it says, what one needs to decide, what is still to run, a plot, and the rest."""
    found, title = cells(table).get(cell, {}), content(table)["title"]
    if cell:
        said = content(table)["cells"][cell]
        title = f"{said.get('title') or content(said['of'])['title'].split(' ', 1)[1]}: nothing tuned"
    if not found:
        return ""
    wanted = wanted_rows(table)
    parts = [verdict(found), first_table(title, found), still_to_run(found, wanted)]
    picture = f"results/{table}{cell and '-'}{cell}.png"
    if plots.by_round(stored.read_curves(table).get(cell, {}), found, stored.DOCS / picture):
        parts.append(f"![{title}: balanced accuracy on test by round]({picture})\n")
    parts.append(folded("More scores, and what it costs", more_scores(found), costs(found)))
    parts.append(folded("Recall and AUC of each class", *(per_class(found, what) for what in PER_CLASS)))
    return "\n".join(filter(None, parts))


def name_of(found: Rows, row: str) -> str:
    """A row's name, with its version if it is not the paper's, and how many seeds it has if not all."""
    lines = found[row]
    version = "" if lines[0]["method"] in (row, CEILING) else f", as {lines[0]['method']}"
    return f"{row}{version}{seeds_of(lines)}"


def first_table(title: str, found: Rows) -> str:
    """What one needs to decide."""
    body = [
        (
            name_of(found, row),
            shown(lines),
            points(above(found, row)),
            closed(found, row),
            shown(lines, "last_auc"),
            f"{mean(lines, 'bytes_up', 'bytes_down') / 1e6:,.0f}",
            f"{mean(lines, 'images_labeled', 'images_unlabeled') / 1e3:,.0f}",
        )
        for row, lines in found.items()
    ]
    columns = ("row", "balanced accuracy, %", f"above {FLOOR} (95 % interval)", "gap closed, %", "AUC, %")
    return table_of(title, (*columns, "MB sent", "images, thousands"), body)


def more_scores(found: Rows) -> str:
    body = [
        (
            name_of(found, row),
            interval(lines),
            shown(lines, "chosen_balanced_accuracy"),
            shown(lines, "last_accuracy"),
            shown(lines, "last_f1"),
            first_and_last(lines, "precision"),
            first_and_last(lines, "coverage"),
        )
        for row, lines in found.items()
    ]
    columns = ("row", "balanced accuracy: 95 % interval", "chosen round: balanced accuracy", "accuracy", "macro-F1")
    columns += ("pseudo-labels right, first → last, %", "their coverage, first → last, %")
    return table_of("More scores, %", columns, body)


def costs(found: Rows) -> str:
    body = [
        (
            name_of(found, row),
            lines[0]["rounds"],
            *(f"{mean(lines, f'images_{kind}') / 1e3:,.0f}" for kind in ("labeled", "unlabeled")),
            *(f"{mean(lines, f'bytes_{way}') / 1e6:,.0f}" for way in ("up", "down")),
            f"{mean(lines, 'seconds'):,.0f}",
        )
        for row, lines in found.items()
    ]
    columns = (
        "row",
        "rounds",
        "labeled images, thousands",
        "unlabeled, thousands",
        "MB up",
        "MB down",
        "seconds",
    )
    return table_of("What it costs", columns, body)


def verdict(rows_here: Rows) -> str:
    """What a main table says of the rows that have all seeds."""
    if FLOOR not in rows_here:
        return f"{FLOOR} has no run yet, so nothing can be compared.\n"
    kinds: dict[str, dict[str, float]] = {"above": {}, "level": {}, "below": {}}
    for row in rows_here:
        gain = above(rows_here, row) if is_method(row) and is_whole(rows_here, row) else None
        if gain is not None:
            kinds[side(rows_here, row)][row] = 100 * gain.mean
    words = [f"Labels alone have {shown(rows_here[FLOOR])} %."]
    judged = sum(map(len, kinds.values()))
    for kind in ("above", "below") if judged else ():
        order = sorted(kinds[kind], key=lambda row: -abs(kinds[kind][row]))
        named = ", ".join(f"{row} ({kinds[kind][row]:+.1f})" for row in order)
        verb = "are" if order[1:] else "is"
        said = f"{len(order) or 'None'} of {judged} methods {verb} {kind} them by more than chance"
        words.append(f"{said}: {named}." if named else f"{said}.")
    if not judged:
        words.append("No method has all seeds yet.")
    if level := kinds["level"]:
        named = ", ".join(f"{row} ({level[row]:+.1f})" for row in sorted(level, key=lambda row: -level[row]))
        words.append(f"May be chance: {named}.")
    if CEILING in rows_here:
        words.append(f"All labels have {shown(rows_here[CEILING])} %{seeds_of(rows_here[CEILING])}.")
    return "**" + " ".join(words[:2]) + "** " + " ".join(words[2:]) + "\n"


def per_class(rows_here: Rows, what: str) -> str:
    """Recall or AUC of each class, the mean over seeds."""
    key, body = f"last_{what}_per_class", []
    for row, lines in rows_here.items():
        columns = zip(*(line[key].split() for line in lines), strict=True)
        means = (Spread.of(None if value == "-" else float(value) for value in column) for column in columns)
        body.append((row, *(NONE if one is None else f"{100 * one.mean:.0f}" for one in means)))
    wide = max(map(len, body))
    return Table(PER_CLASS[what], ("row", *(f"class {n}" for n in range(wide - 1))), tuple(body)).markdown()


def overall(found: Mapping[str, Rows]) -> str:
    """What becomes of each row on all data sets: methods first, best mean first, then ceilings."""
    there = {name: rows_here for name, rows_here in found.items() if rows_here.get(FLOOR)}
    names = [row for row in rows() if row != FLOOR and any(above(one, row) for one in there.values())]
    if not names:
        return ""
    body, typical = [], {}
    for row in names:
        told = {name: above(rows_here, row) for name, rows_here in there.items()}
        known = [100 * gain.mean for gain in told.values() if gain]
        whole = all(is_whole(rows_here, row) for rows_here in there.values())
        typical[row] = (not is_method(row), not whole, -statistics.fmean(known))
        gained = (
            f"{100 * gain.mean:+.1f}{marked(there[name], row)}{seeds_of(there[name][row])}" if gain else NONE
            for name, gain in told.items()
        )
        body.append((row, *gained, f"{statistics.fmean(known):+.1f}" if whole else NONE))
    body.sort(key=lambda line: typical[line[0]])
    floor = (f"{FLOOR} itself, %", *(shown(rows_here[FLOOR]) for rows_here in there.values()), NONE)
    notes = (
        "A star: above or below by more than chance, that is, the 95 % interval of the difference leaves out zero, and "
        "every seed says the same. Without a star, a difference may be chance.",
    )
    title = f"Points of balanced accuracy above {FLOOR}, on test, after the last round"
    return table_of(title, ("row", *there, "mean"), [floor, *body], notes)


def marked(rows_here: Rows, row: str) -> str:
    return "" if surely(rows_here, row) == "level" else " *"


def numbers(method: str) -> str:
    """A method between floor and ceiling in each main table, for its own page."""
    body = []
    for settings, tables in (("recipe's", {**box(), **digits()}), ("tuned", tuned())):
        for name, found in tables.items():
            if found.get(method) and found.get(FLOOR):
                version = "" if found[method][0]["method"] == method else found[method][0]["method"]
                three = (with_seeds(found.get(row, ())) for row in (FLOOR, method, CEILING))
                body.append((name, settings, *three, points(above(found, method)), version))
    if not body:
        return ""
    columns = ("data", "settings", FLOOR, method, CEILING, f"above {FLOOR} (95 % interval)", "version")
    return table_of("Balanced accuracy on test after the last round, %", columns, body)


# Tuning.


def tuning(table: str) -> str:
    """What was tried on validation, and what was chosen."""
    lines = [line for line in stored.read_lines(f"tuning-{table[0]}") if not line["cell"]]
    if not lines:
        return ""
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
        other = NONE if chosen is None else "yes" if mark else f"no, {chosen[0]}"
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
        return ""
    words = "Rounds are enough for these rows: twice as many gain none of them a point."
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
        return ""
    body, gains, missing = [], {}, []
    for row in content("h-printed")["only"]:
        mine, theirs = recipe.get(row, ()), paper.get(row, ())
        lacks = [how for how, there in (("as printed", theirs), ("by the recipe", mine)) if not there]
        missing += [f"{row} {how}" for how in lacks] if len(lacks) < 2 else [row]
        if not (mine or theirs):
            continue
        if len(mine) == len(theirs) == len(plan.SEEDS):  # means of other seeds are no gain
            gains[row] = score(mine) - score(theirs)
        costs = [
            f"{mean(lines, 'images_labeled', 'images_unlabeled') / 1e3:,.0f}" if lines else NONE
            for lines in (theirs, mine)
        ]
        body.append((
            row,
            *map(with_seeds, (theirs, mine)),
            f"{gains[row]:+.1f}" if row in gains else NONE,
            *costs,
        ))  # fmt: skip
    columns = ("row", "printed", "fewlabel", "gain", "printed: images, thousands", "fewlabel: images, thousands")
    words = []
    if gains:
        least, most = min(gains, key=lambda row: gains[row]), max(gains, key=lambda row: gains[row])
        words = [f"The recipe brings between {gains[least]:+.1f} ({least}) and {gains[most]:+.1f} points ({most})."]
        words = words if gains.keys() - {least} else [f"The recipe brings {least} {gains[least]:+.1f} points."]
    words += [f"Still to run: {', '.join(missing)}."] if missing else []
    return table_of(content("h-printed")["title"], columns, body, words)


def parts() -> str:
    """Each method beside itself without a part."""
    found = cells("g-parts").get("", {})
    if not found:
        return ""
    body, without, largest, missing = [], {}, {}, []
    for name, changes in {FLOOR: {}, **content("g-parts")["parts"]}.items():
        if name not in found:
            missing.append(name)
            continue
        body.append((name, shown(found[name]), ""))
        missing += [f"{name}-{part}" for part in changes if f"{name}-{part}" not in found]
        for part in changes:
            row = f"{name}-{part}"
            if row in found:
                change = score(found[row]) - score(found[name])
                body.append((f"– {part}", shown(found[row]), f"{change:+.1f}"))
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
    words += [f"Still to run: {', '.join(missing)}."] if missing else []
    return Table(content("g-parts")["title"], ("row", "balanced acc.", "change"), tuple(body), tuple(words)).markdown()


def by_cell(table: str) -> str:
    """The rows of a table beside each other in its cells, with those of the table that it builds on."""
    if table not in EVERY or not (found := cells(table)):
        return ""
    names = sorted(dict.fromkeys(row for rows_here in found.values() for row in rows_here), key=place)
    base = cells(content(table)["of"]).get("", {}) if "best" in content(table) else {}
    shown_cells = {**found, **({"as in (a)": base} if base else {})}

    body = tuple((row, *(with_seeds(rows_here.get(row, ())) for rows_here in shown_cells.values())) for row in names)
    words, missing = [], []
    for cell, said in content(table).get("cells", {"": {}}).items():
        if not (rows_here := found.get(cell)):
            missing.append(cell)
            continue
        lacks = [row for row in wanted_in(table, said) if row not in rows_here]
        missing += [f"of {cell} {', '.join(lacks)}"] if lacks else []
        gains = {row: gain for row in rows_here if is_method(row) and (gain := above(rows_here, row))}
        if gains:
            best = max(gains, key=lambda row: gains[row].mean)
            chance = ", which may be chance" if side(rows_here, best) == "level" else ""
            first = f"{best} is highest" if gains[best].mean > 0 else f"no method is above {FLOOR}; {best} is nearest"
            words.append(f"{cell}: {first}, {points(gains[best])} beside {FLOOR}{chance}.")
    words += [f"Still to run: {'; '.join(missing)}."] if missing else []
    return Table(content(table)["title"], ("row", *shown_cells), body, tuple(words)).markdown()


def wanted_in(table: str, cell: Mapping[str, Any]) -> list[str]:
    """The rows of a cell that are known before it runs. Which ones are the best is not."""
    about = {**content(table), **cell}
    parts = [f"{name}-{part}" for name, changes in about.get("parts", {}).items() for part in ("", *changes)]
    return [*about.get("only", ()), *(name.rstrip("-") for name in [f"{FLOOR}-", *parts] if parts)]


def streaming() -> str:
    """FedMatch's streaming scenarios, beside the numbers of its paper. Its lines are of an earlier study."""
    paper = {row.name: row.paper for row in read_table(plan.TABLES / f"{STREAMING}.toml").rows}
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
            theirs = [str(paper.get(f"{cell}/{row}", {}).get(key, NONE)) for key in keys]
            body.append((row, *(cell for both in zip(own, theirs, strict=True) for cell in both)))
        tables.append(Table(f"(k) Fashion-MNIST as a stream, {cell}", columns, tuple(body)).markdown())
    return "\n".join(tables)
