"""The pages of the results: what `docs/results/` holds, as tables and plots of docs/RESULTS.md and other pages."""

import csv
import json
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fewlabel.papers.tables import Printed, read_table
from fewlabel.report.findings import GUESSING, is_guess
from fewlabel.report.groups import NARROW
from fewlabel.report.runs import CEILING, FLOOR
from fewlabel.report.style import COLORS, GREY, draw, empty_plot, finish_plot
from fewlabel.report.tables import Spread, Table

DOCS = Path(__file__).parents[1] / "docs"
TABLES = Path(__file__).parent / "results"
PAGES = ("RESULTS.md", "methods/*.md")
COMPARED = {"a-pneumonia": "PneumoniaMNIST", "b-fashion": "Fashion-MNIST", "c-ham": "HAM10000"}
STYLES = ("-", "--", "-.", ":")
BOUNDS = "bounds"  # the family of floor and ceiling
NEAR = 0.9  # of the floor's last balanced accuracy: how soon that is reached is a cost
METRICS = {"balanced_accuracy": "balanced acc.", "accuracy": "accuracy", "f1": "macro-F1", "auc": "AUC"}
AT_TIMES = {"recall_apart": "recall of melanoma", "local_accuracy": "local accuracy"}  # where they are measured
CEILINGS = (CEILING, "fedavg-sl")  # the second is the first as FedMatch's Table 1 calls it
METHODS = ("rscfed", "fedirm", "cbafed", "isofed", "fedmatch")  # with pages that have their numbers

Rows = Mapping[str, Sequence[Mapping[str, str]]]  # the lines of a cell's runs, by row
Curve = Mapping[str, Sequence[float]]  # of a row, in the mean over seeds
Situations = Sequence[tuple[str, Rows, Mapping[str, Curve]]]  # cells by data set and name in words


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def render() -> None:
    """Fills pages between their marks, `<!-- NAME -->` and `<!-- end -->`, from docs/results/ alone."""

    def filled(mark: re.Match[str]) -> str:
        return f"<!-- {mark[1]} -->\n{section(mark[1])}\n<!-- end -->"

    for page in (page for pattern in PAGES for page in DOCS.glob(pattern)):
        page.write_text(re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", filled, page.read_text(), flags=re.DOTALL))


def section(name: str) -> str:
    tables: dict[str, Callable[[Situations], Table]] = {"overall": overall, "which": which}
    tables |= {f"numbers-{method}": partial(numbers, method) for method in METHODS}
    if name in tables:
        found = list(situations())
        return tables[name](found).markdown() if found else "Not run yet."
    path = DOCS / "results" / f"{name}.csv"
    if not path.exists():
        return "Not run yet."
    if name.startswith("tuning-"):
        return tuning_table(read_csv(path)).markdown()
    return "\n".join(cells(name, read_csv(path), json.loads(path.with_suffix(".json").read_text())))


def tuning_table(lines: Sequence[Mapping[str, str]]) -> Table:
    rows = tuple((one["row"], one["settings"], shown(one["validation_balanced_accuracy"])) for one in lines)
    best = frozenset((n, 2) for n, one in enumerate(lines) if one["chosen"] == "True")
    return Table("Tuned on validation", ("row", "settings", "balanced acc. on validation"), rows, best=best)


def shown(value: str) -> str:
    return f"{100 * float(value):.1f}" if value else "–"


def cells(name: str, lines: Sequence[Mapping[str, str]], drawn: Mapping[str, Any]) -> Iterator[str]:
    """A table and a plot for each cell."""
    known = {row.name: row for row in read_table(TABLES / f"{name}.toml").rows}
    by_cell = grouped(line for line in lines if f"{line['cell']}/{line['row']}" in known)
    if len(by_cell) > 2:
        yield overview(by_cell).markdown()
        yield from trends(name, by_cell)
    for cell, rows in by_cell.items():
        listed = {row: known[f"{cell}/{row}"] for row in rows}
        table = cell_table(name, cell, rows, {row: one.paper for row, one in listed.items()}, drawn.get(cell, {}))
        far = [row for row in unequal(rows) if listed[row].work]
        notes = (f"Not within 10 % of equal work: {', '.join(far)}.",) if far else ()
        notes += next(iter(listed.values())).notes
        yield replace(table, notes=table.notes + notes).markdown()
        title = titled(name, cell)
        for family, together in pictures(drawn.get(cell, {})).items():
            file = f"results/{name}-{cell}{family}.png"
            plot({row: drawn[cell][row] for row in together}, DOCS / file, title)
            yield f"![{title}: balanced accuracy on test by images trained on]({file})\n"


def grouped(lines: Iterable[Mapping[str, str]]) -> dict[str, dict[str, list[Mapping[str, str]]]]:
    """Lines by cell and row."""
    found: dict[str, dict[str, list[Mapping[str, str]]]] = {}
    for line in lines:
        found.setdefault(line["cell"], {}).setdefault(line["row"], []).append(line)
    return found


def spread(lines: Iterable[Mapping[str, str]], key: str) -> Spread | None:
    return Spread.of(float(line[key]) if line[key] else None for line in lines)


def mean(lines: Sequence[Mapping[str, str]], *keys: str) -> float:
    return statistics.fmean(sum(float(line[key]) for key in keys) for line in lines)


def overview(by_cell: Mapping[str, Rows]) -> Table:
    rows = dict.fromkeys(row for cell in by_cell.values() for row in cell if any(map(seen, cell[row])))
    lines = [
        (row, *(str(spread(cell.get(row, ()), "last_balanced_accuracy") or "–") for cell in by_cell.values()))
        for row in rows
    ]
    return Table("Balanced accuracy on test, last round, in percent", ("row", *by_cell), tuple(lines))


def cell_table(
    name: str, cell: str, rows: Rows, printed: Mapping[str, Mapping[str, Printed]], drawn: Mapping[str, Any]
) -> Table:
    every = [line for lines in rows.values() for line in lines]
    metrics = METRICS | {key: words for key, words in AT_TIMES.items() if any(line[f"last_{key}"] for line in every)}
    papers = [key for key in (*metrics, "sent") if any(key in one for one in printed.values())]
    sent = "sent" in papers
    columns = [
        "row",
        "rounds",
        *metrics.values(),
        "of its last four measurements",
        f"{FLOOR} after as many labeled images",
    ]
    columns += ["chosen round: balanced acc.", "chosen round: accuracy", "gap closed, %"]
    columns += ["numbers sent, %"] if sent else []
    columns += [f"paper: {metrics.get(key, 'numbers sent')}" for key in papers]
    columns += ["pseudo-labels: precision, first and last", "coverage"]
    columns += ["images, thousands", f"until {100 * NEAR:.0f} % of the floor", "MB", "of FedAvg, %", "seconds"]
    table = []
    for row, lines in rows.items():
        short = " (short)" if any(line["converged"] != "True" or guesses(line) for line in lines if seen(line)) else ""
        scores = [str(spread(lines, f"last_{key}") or "–") for key in metrics]
        scores += [settled(drawn.get(row)), beside_floor(lines, drawn.get(FLOOR))]
        scores += [str(spread(lines, f"chosen_{key}") or "–") for key in ("balanced_accuracy", "accuracy")]
        beside = [str(spread(lines, "sent") or "–")] if sent else []
        beside += [str(printed[row].get(key, "–")) for key in papers]
        said = [pair(lines, f"pseudo_label_{key}") for key in ("precision", "coverage")]
        costs = [f"{mean(lines, 'images_labeled', 'images_unlabeled') / 1e3:,.0f}", until(rows, drawn.get(row))]
        costs += [f"{mean(lines, 'bytes_up', 'bytes_down') / 1e6:,.0f}", f"{100 * mean(lines, 'bytes_of_fedavg'):.0f}"]
        costs.append(f"{mean(lines, 'seconds'):,.0f}")
        table.append((row, rounds(lines) + short, *scores, closed(rows, row), *beside, *said, *costs))
    seeds = sorted({line["seed"] for line in every})
    whose = (
        f"mean ± standard deviation of seeds {', '.join(seeds)}; costs are means" if seeds[1:] else f"seed {seeds[0]}"
    )
    notes = [f"Test set, in percent: {whose}."]
    few = [f"{row} {len(lines)}" for row, lines in rows.items() if len(lines) < len(seeds)]
    notes += [f"Not every row has every seed yet: {', '.join(few)}."] if few else []
    return Table(titled(name, cell), tuple(columns), tuple(table), tuple(notes))


def settled(curve: Curve | None) -> str:
    """The mean balanced accuracy of the last four measurements, over all seeds."""
    return f"{100 * statistics.fmean(curve['balanced_accuracy'][-4:]):.1f}" if curve else "–"


def like_floor(lines: Sequence[Mapping[str, str]], floor: Curve) -> float:
    """Balanced accuracy of the floor after as many labeled images as a row trains on."""
    return 100 * float(np.interp(mean(lines, "images_labeled"), floor["images"], floor["balanced_accuracy"]))


def beside_floor(lines: Sequence[Mapping[str, str]], floor: Curve | None) -> str:
    """That, or a bound where the floor was not measured so soon; nothing where it never had as many."""
    images = mean(lines, "images_labeled")
    if not floor or lines[0]["row"] in (FLOOR, *CEILINGS) or not seen(lines[0]) or images > 1.1 * floor["images"][-1]:
        return "–"
    early = images < floor["images"][0]
    return f"{'up to ' if early else ''}{like_floor(lines, floor):.1f}"


def until(rows: Rows, curve: Curve | None) -> str:
    """After how many thousand images a row, in the mean of its seeds, first came near to where the floor ends."""
    floor = spread(rows.get(FLOOR, ()), "last_balanced_accuracy")
    if not (floor and curve):
        return "–"
    measured = zip(curve["images"], curve["balanced_accuracy"], strict=True)
    return next((f"{images / 1e3:,.0f}" for images, score in measured if score >= NEAR * floor.mean), "–")


def situations() -> Iterator[tuple[str, Rows, Mapping[str, Curve]]]:
    """The cells of the tables that are compared, with a floor and a ceiling: their lines and curves by row."""
    for table, data in COMPARED.items():
        path = DOCS / "results" / f"{table}.csv"
        cells = grouped(read_csv(path) if path.exists() else ())
        curves = json.loads(path.with_suffix(".json").read_text()) if cells else {}
        for cell, rows in cells.items():
            if {FLOOR, CEILING} <= set(rows):
                yield f"{data}, {told(cell)}", rows, curves[cell]


def told(cell: str) -> str:
    """A cell's name in words: `l1u3-g08` is one labeled client beside three others, gamma 0.8."""
    found = re.fullmatch(r"(?:(?:l(\d+))?u(\d+))?-?(?:g(\d+))?", cell)
    if not found:
        return cell
    clients = f"{found[1] or 1} labeled + {found[2]} not" if found[2] else ""
    return ", ".join(filter(None, (clients, f"gamma {int(found[3]) / 10:g}" if found[3] else "")))


def titled(name: str, cell: str) -> str:
    return f"{name}, {cell}" + (f": {told(cell)}" if told(cell) != cell else "")


def gains(rows: Rows, row: str, metric: str = "balanced_accuracy") -> list[float]:
    """By how many points a row is above the floor in the last round, seed by seed."""
    floor = {line["seed"]: float(line[f"last_{metric}"]) for line in rows[FLOOR]}
    pairs = [(float(line[f"last_{metric}"]), floor.get(line["seed"])) for line in rows.get(row, ())]
    return [100 * (own - below) for own, below in pairs if below is not None]


def typical(gains: Iterable[Sequence[float]]) -> str:
    found = [statistics.fmean(gain) for gain in gains]
    return f"{statistics.fmean(found):+.1f}" if found else "–"


def overall(found: Situations) -> Table:
    """What becomes of each row, by data set and over all cells."""
    names = dict.fromkeys(row for _, rows, _ in found for row in rows if row != FLOOR)
    data = Counter(situation.partition(",")[0] for situation, *_ in found)
    lines = []
    for name in names:
        by_cell = {situation: gain for situation, rows, _ in found if (gain := gains(rows, name))}
        runs = [line for _, rows, _ in found for line in rows.get(name, ())]
        cells = (
            *(
                typical(gain for situation, gain in by_cell.items() if situation.partition(",")[0] == one)
                for one in data
            ),
            typical(gain for _, rows, _ in found if (gain := gains(rows, name, "auc"))),
            typical(ahead(rows[name], curves) for _, rows, curves in found if name in rows and name != CEILING),
            f"{sum(min(gain) > 0 for gain in by_cell.values())} of {len(by_cell)}",
            f"{sum(max(gain) < 0 for gain in by_cell.values())} of {len(by_cell)}",
            f"{sum(map(guesses, runs))} of {len(runs)}",
            pair(runs, "pseudo_label_precision"),
            pair(runs, "pseudo_label_coverage"),
        )
        lines.append((name, *cells))
    lines.sort(key=lambda line: -sum(float(gain) for gain in line[1 : 1 + len(data)] if gain != "–"))
    columns = (
        "row",
        *(f"{one}, {count} cells" for one, count in data.items()),
        "AUC, all cells",
        "all cells, for equal training on labels",
    )
    columns += ("cells above in every seed", "below in every seed", "runs that ended guessing")
    columns += ("pseudo-labels: precision, first and last, %", "coverage, %")
    notes = (
        "Points are differences in balanced accuracy (in one column, in AUC) on test images after the last round, "
        "averaged over cells. A cell is one data set with one way to place images and labels. Rows are sorted by their "
        "average over data sets. isofed-without-pt is isofed without its pretraining.",
        f"Equal training on labels: the row is compared with {FLOOR} at the moment when {FLOOR} had trained on as many "
        f"labeled images. If {FLOOR} was not yet measured then, its first measurement is used. This puts fedirm and "
        "fedmatch too low in some cells.",
        f"Guessing: less than {100 * GUESSING:.0f} points better than a model that gives every image the same class.",
    )
    return Table(f"Points above {FLOOR}, the floor, for equal work", columns, tuple(lines), notes)


def ahead(lines: Sequence[Mapping[str, str]], curves: Mapping[str, Curve]) -> list[float]:
    """By how many points a row is above the floor after as many labeled images."""
    return [100 * mean(lines, "last_balanced_accuracy") - like_floor(lines, curves[FLOOR])]


def which(found: Situations) -> Table:
    """The best row of each cell, and whether it is better than labels alone in every seed."""
    lines = []
    for situation, rows, _ in found:
        scores = {row: spread(lines, "last_balanced_accuracy") for row, lines in rows.items()}
        known = {row: one for row, one in scores.items() if one}
        order = sorted((row for row in known if row not in (FLOOR, CEILING)), key=lambda row: -known[row].mean)
        first = [f"{row} {known[row]}" for row in order[:2]] + ["–"] * (2 - len(order))
        gain = gains(rows, order[0]) if order else []
        better = f"{sum(one > 0 for one in gain)} of {len(gain)}"
        share = closed(rows, order[0]) if order else "–"
        lines.append((situation, *first, str(known[FLOOR]), str(known[CEILING]), share, better))
    columns = ("situation", "best", "second", FLOOR, CEILING, "gap closed by the best, %", "seeds above the floor")
    title = "The best in each cell, by balanced accuracy on test in the last round"
    note = "Best and second are picked by these very numbers, which flatters them; three seeds are few."
    return Table(title, columns, tuple(lines), (note,))


def numbers(method: str, found: Situations) -> Table:
    """The rows of one method in each cell, between floor and ceiling."""
    own = dict.fromkeys(row for _, rows, _ in found for row in rows if row == method or row.startswith(f"{method}-"))
    shown = (FLOOR, *own, CEILING)
    lines = [
        (situation, *(str(spread(rows.get(row, ()), "last_balanced_accuracy") or "–") for row in shown))
        for situation, rows, _ in found
    ]
    return Table("Balanced accuracy on test in the last round, in percent", ("situation", *shown), tuple(lines))


def seen(line: Mapping[str, str]) -> bool:
    """Whether a run has a model that the server sees; clients by themselves have none."""
    return bool(line["last_balanced_accuracy"])


def guesses(line: Mapping[str, str]) -> bool:
    """Whether a run ended near the balanced accuracy of one class for all images."""
    return seen(line) and is_guess(float(line["last_balanced_accuracy"]), int(line["classes"]))


def rounds(lines: Sequence[Mapping[str, str]]) -> str:
    numbers = sorted({int(line["rounds"]) for line in lines})
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def unequal(rows: Rows) -> list[str]:
    """Rows that trained on more or fewer images than the floor, by more than a tenth."""
    images = {row: mean(lines, "images_labeled", "images_unlabeled") for row, lines in rows.items()}
    return [row for row, count in images.items() if FLOOR in images and abs(count / images[FLOOR] - 1) > 0.1]


def pair(lines: Sequence[Mapping[str, str]], key: str) -> str:
    first, last = spread(lines, f"{key}_first"), spread(lines, key)
    return f"{100 * first.mean:.0f} → {100 * last.mean:.0f}" if first and last else "–"


def closed(rows: Rows, row: str) -> str:
    """How much of the gap between floor and ceiling a row closes, by the means of balanced accuracy."""
    top = next((name for name in CEILINGS if name in rows), CEILING)
    floor, own, ceiling = (spread(rows.get(name, ()), "last_balanced_accuracy") for name in (FLOOR, row, top))
    if row in (FLOOR, top) or not (floor and own and ceiling) or ceiling.mean - floor.mean < NARROW:
        return "–"
    return f"{100 * (own.mean - floor.mean) / (ceiling.mean - floor.mean):.0f}"


def pictures(rows: Iterable[str]) -> dict[str, list[str]]:
    """Which rows are drawn together: all, or each family by itself if one has more rows than there are styles."""
    families: dict[str, list[str]] = {}
    for row in rows:
        families.setdefault(family_of(row), []).append(row)
    bounds = families.pop(BOUNDS, [])
    if not families:
        return {}
    if all(len(family) <= len(STYLES) for family in families.values()):
        return {"": list(rows)}
    return {f"-{name}": bounds + family for name, family in families.items()}


def plot(rows: Mapping[str, Curve], path: Path, title: str) -> None:
    figure, axes = empty_plot("balanced accuracy on test, %")
    figure.set_size_inches(9, 6)  # room for curves above a legend of thirteen rows
    axes.set_title(title)
    axes.set_xlabel("images trained on, thousands")
    for row, style in styles(rows):
        curve = rows[row]
        known = {round(x / 1e3): 100 * y for x, y in zip(curve["images"], curve["balanced_accuracy"], strict=True)}
        draw(axes, known, **style)
    finish_plot(figure, path)


def family_of(row: str) -> str:
    return BOUNDS if row in (FLOOR, CEILING) else row if row == "fed-consist" else row.partition("-")[0]


def styles(rows: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A color for each family, of one family for each row; a style for each row of a color; bounds are grey."""
    alone = len({family_of(row) for row in rows} - {BOUNDS}) == 1
    colors: dict[str, list[str]] = {}
    for row in rows:
        bound = family_of(row) == BOUNDS
        own = colors.setdefault(row if alone and not bound else family_of(row), [])
        own.append(row)
        color = GREY if bound else COLORS[[*colors.values()].index(own) % len(COLORS)]
        style = {FLOOR: ":", CEILING: "--"}.get(row) or STYLES[(len(own) - 1) % len(STYLES)]
        yield row, {"label": row, "color": color, "linestyle": style}


def trends(name: str, by_cell: Mapping[str, Rows]) -> Iterator[str]:
    """The last round by what cells differ in: `u4` has four unlabeled clients, `g05` a gamma of 0.5."""
    clients = {float(cell[1:]): cell for cell in by_cell if re.fullmatch(r"u\d+", cell)}
    gammas = {int(cell[1:]) / 10: cell for cell in by_cell if re.fullmatch(r"g\d+", cell)}
    gammas |= {0.8: clients[9.0]} if 9.0 in clients else {}
    for words, points in (("unlabeled clients", clients), ("gamma", gammas)):
        if len(points) < 2:
            continue
        figure, axes = empty_plot("balanced accuracy on test, %")
        axes.set_xlabel(words)
        axes.set_xscale("log")
        axes.set_xticks(sorted(points), [f"{point:g}" for point in sorted(points)], minor=False)
        axes.minorticks_off()
        for row, style in styles(dict.fromkeys(row for cell in points.values() for row in by_cell[cell])):
            scores = {x: spread(by_cell[points[x]].get(row, ()), "last_balanced_accuracy") for x in sorted(points)}
            known = {x: 100 * score.mean for x, score in scores.items() if score}
            axes.plot(list(known), list(known.values()), marker="o", **style)
        path = DOCS / "results" / f"{name}-by-{words.split()[0]}.png"
        finish_plot(figure, path)
        yield f"![Balanced accuracy on test in the last round by {words}](results/{path.name})\n"
