"""The tables of docs/RESULTS.md: tunes, runs, collects and renders what `experiments/results/` describes.

    python -m experiments.study run [TABLE ...]    tunes and runs tables, by default (a), (b), (c), a run per core;
                                                   done again, it goes on
    python -m experiments.study collect            runs/results -> docs/results/: a line per run, curves
    python -m experiments.study render             docs/results/ -> the tables of docs/RESULTS.md and their plots

docs/PROTOCOL.md says why it is done so. Settings are chosen by validation alone: what chooses reads no test number.
"""

import csv
import json
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product
from pathlib import Path
from typing import Any

import tomli_w

from fewlabel.cli import interruptible
from fewlabel.errors import BadInput, FewLabelError, RunFailed
from fewlabel.experiment import Experiment, load, overlay
from fewlabel.report import COLORS, GREY, draw, empty_plot, finish_plot
from fewlabel.reproduce import PaperRow, read_table, wanted
from fewlabel.results import CEILING, FLOOR, Result
from fewlabel.runs import Interrupted, prepare
from fewlabel.sweep import run_all
from fewlabel.tables import Spread, Table

TABLES = Path(__file__).parent / "results"
DOCS = Path(__file__).parents[1] / "docs"
RUNS = Path("runs/results")
MUST = ("a-pneumonia", "b-fashion", "c-ham")
EVERY = (*MUST, "e-clients", "f-parts")  # the last two have the settings that were chosen for (b)
FIRST = ("a-pneumonia/l1u3-g08", "b-fashion/l1u9", "c-ham/l1u9")  # cells to run before all others
SEEDS = (0, 1, 2)
ALIKE = 0.01  # by how much the mean validation accuracy of a converged run's last two quarters may differ
METRICS = {"balanced_accuracy": "balanced acc.", "accuracy": "accuracy", "f1": "macro-F1", "auc": "AUC"}
TOLD_APART = {"isic2018": "MEL"}  # the class whose recall has a column


@dataclass(frozen=True)
class Trial:
    """A run of a table, or of its tuning."""

    table: str
    cell: str
    row: str
    directory: Path
    experiment: Experiment
    settings: Mapping[str, Any]  # of tuning: those tried


def trials(table: str) -> list[Trial]:
    """All runs of a table; rows that cannot run are told and left out."""
    found = []
    for row in read_table(TABLES / f"{table}.toml").rows:
        cell, _, name = row.name.rpartition("/")
        for one in possible(row, SEEDS):
            found.append(Trial(table, cell, name, RUNS / table / cell / f"{name}-seed{one.seed}", one, {}))
    return found


def tuning(table: str) -> list[Trial]:
    """The runs that tune a table: in one cell and another partition, each row with all combinations of its axes."""
    content = tomllib.loads((TABLES / f"tuning-{table[0]}.toml").read_text())
    rows = {row.name: row for row in read_table(TABLES / f"{table}.toml").rows}
    found = []
    for name, axes in content["rows"].items():
        row = rows[f"{content['cell']}/{name}"]
        for choice in product(*(enumerate(content["axes"][axis], 1) for axis in axes)):
            settings: dict[str, Any] = reduce(overlay, (values for _, values in choice), {})
            place = "-".join([name, *(f"{axis}{number}" for axis, (number, _) in zip(axes, choice, strict=True))])
            for one in possible(replace(row, settings=overlay(row.settings, settings)), [content["seed"]]):
                found.append(Trial(table, content["cell"], name, RUNS / f"tuning-{table[0]}" / place, one, settings))
    return found


def possible(row: PaperRow, seeds: Sequence[int]) -> tuple[Experiment, ...]:
    try:
        return wanted(row, seeds=seeds)
    except BadInput as error:
        print(f"left out: {error}", file=sys.stderr)
        return ()


def run(tables: Sequence[str] = MUST) -> None:
    """Tunes what is to be tuned, then runs everything, first cells first."""
    tuned = [table for table in tables if (TABLES / f"tuning-{table[0]}.toml").exists()]
    with interruptible("do the same again") as stop:
        perform([trial for table in tuned for trial in tuning(table)], stop)
        for table in tuned:
            if not (TABLES / f"tuned-{table[0]}.toml").exists():  # once, or later runs could differ from earlier ones
                choose(table)
        every = [trial for table in tables for trial in trials(table)]
        for cell in FIRST:
            perform([trial for trial in every if f"{trial.table}/{trial.cell}" == cell], stop)
            collect(tables)
        perform(every, stop)
        collect(tables)


def perform(wanted: Sequence[Trial], stop: Callable[[], bool]) -> None:
    """Runs what is not done; a run that fails is told, and the others go on."""
    for trial in wanted:
        lay_out(trial)

    def watch(directory: Path, line: dict[str, Any]) -> None:
        if "round" not in line:  # its end; no metric is told
            done = sum((trial.directory / "summary.json").exists() for trial in wanted)
            ended = line.get("failed") or line.get("stopped") or "done"
            print(f"{time.strftime('%H:%M:%S')} {done}/{len(wanted)} {directory}: {ended}", flush=True)

    try:
        run_all([trial.directory for trial in wanted], watch=watch, stop=stop)
    except RunFailed as error:
        print(error, file=sys.stderr)
        if stop():
            raise Interrupted("stopped; do the same again to go on") from None


def lay_out(trial: Trial) -> None:
    known = trial.directory / "experiment.toml"
    if not known.exists():
        prepare(trial.experiment, trial.directory)
    elif load(known) != trial.experiment:
        raise BadInput(f"{trial.directory} was begun with other settings; remove it to run it anew")


def choose(table: str) -> None:
    """Writes down what tuning found, and the settings of the best on validation into the table's file of them."""
    found: dict[str, list[tuple[float, Trial]]] = {}
    lines = []
    for trial in tuning(table):
        score = validated(trial)
        if score is not None:
            found.setdefault(trial.row, []).append((score, trial))
        lines.append({"row": trial.row, "settings": dotted(trial.settings), "validation_balanced_accuracy": score})
    best = {row: max(scores, key=lambda pair: pair[0])[1] for row, scores in found.items()}  # of equals, the first
    for line in lines:
        line["chosen"] = line["row"] in best and dotted(best[line["row"]].settings) == line["settings"]
    write_csv(DOCS / "results" / f"tuning-{table[0]}.csv", lines)
    rows = {row: trial.settings for row, trial in best.items()}
    (TABLES / f"tuned-{table[0]}.toml").write_text(tomli_w.dumps({"rows": rows}))


def validated(trial: Trial) -> float | None:
    """Balanced accuracy on validation in the last round."""
    if not (trial.directory / "summary.json").exists():
        return None
    last = Result(trial.directory).last or {}
    score: float | None = last["validation"]["balanced_accuracy"]
    return score


def dotted(settings: Mapping[str, Any], above: str = "") -> str:
    parts = (dotted(v, f"{above}{k}.") if isinstance(v, Mapping) else f"{above}{k}={v}" for k, v in settings.items())
    return " ".join(parts)


def collect(tables: Iterable[str] = EVERY) -> None:
    """The finished runs of each table as a line each, and as curves."""
    for table in tables:
        done = [t for t in trials(table) if (t.directory / "summary.json").exists()]
        results = [(trial, Result(trial.directory)) for trial in done]
        if results:
            write_csv(DOCS / "results" / f"{table}.csv", [line_of(*pair) for pair in results])
            (DOCS / "results" / f"{table}.json").write_text(json.dumps(curves(results), separators=(",", ":")) + "\n")


def line_of(trial: Trial, result: Result) -> dict[str, Any]:
    """What a run says of itself, as one line."""
    spent, summary = result.spent(), result.summary or {}
    line: dict[str, Any] = {"table": trial.table, "cell": trial.cell, "row": trial.row, "seed": result.seed}
    line |= {"rounds": result.experiment.rounds, "measured": sum("test" in one for one in result.rounds)}
    line |= {key: round(spent[key], 3) for key in ("images_labeled", "images_unlabeled", "bytes_up", "bytes_down")}
    line |= {"bytes_of_fedavg": round(spent["bytes_of_fedavg"], 4), "seconds": round(spent["seconds"], 1)}
    apart = recall_of(result)
    for when, found in (("last", result.last), ("chosen", result.chosen)):
        test = (found or {}).get("test", {})
        line[f"{when}_round"] = (found or {}).get("round")
        line |= {f"{when}_{key}": rounded(test.get(key)) for key in METRICS}
        line |= {f"{when}_recall_apart": rounded(test["recall_per_class"][apart]) if apart is not None else None}
    for key in ("precision", "coverage"):
        told = [one["pseudo_labels"][key] for one in result.rounds if "pseudo_labels" in one]
        said = [value for value in told if value is not None]
        line[f"pseudo_label_{key}_first"], line[f"pseudo_label_{key}"] = (
            (rounded(said[0]), rounded(said[-1])) if said else (None, None)
        )
    return line | {"converged": converged(result), "partition": summary["partition"]}


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def recall_of(result: Result) -> int | None:
    """The number of the class whose recall is told apart."""
    name = TOLD_APART.get(result.experiment.data.name)
    classes = json.loads((result.directory / "partition.json").read_text())["classes"]
    found = [number for number, known in enumerate(classes) if name and known.upper().startswith(name)]
    return found[0] if found else None


def converged(result: Result) -> bool:
    """Whether validation accuracy had the same mean in the last quarter of the measurements and in the one before."""
    seen = [line["validation"]["accuracy"] for line in result.rounds if "validation" in line]
    quarter = len(seen) // 4
    if not quarter:
        return False
    last, before = statistics.fmean(seen[-quarter:]), statistics.fmean(seen[-2 * quarter : -quarter])
    return abs(last - before) <= ALIKE


def curves(results: Sequence[tuple[Trial, Result]]) -> dict[str, Any]:
    """Of each cell and row, by measurement and in the mean over seeds: images so far, metrics, pseudo-labels."""
    found: dict[str, dict[str, list[list[dict[str, Any]]]]] = {}
    for trial, result in results:
        found.setdefault(trial.cell, {}).setdefault(trial.row, []).append(list(points(result)))
    return {cell: {row: averaged(seeds) for row, seeds in rows.items()} for cell, rows in found.items()}


def points(result: Result) -> Iterator[dict[str, Any]]:
    images = 0
    for line in result.rounds:
        images += line["images_labeled"] + line["images_unlabeled"]
        if "test" in line:
            said = line.get("pseudo_labels", {})
            yield {
                "images": images,
                "balanced_accuracy": line["test"]["balanced_accuracy"],
                "accuracy": line["test"]["accuracy"],
                "precision": said.get("precision"),
                "coverage": said.get("coverage"),
            }


def averaged(seeds: Sequence[Sequence[dict[str, Any]]]) -> dict[str, list[float | None]]:
    def mean(values: Iterable[float | None]) -> float | None:
        spread = Spread.of(values)
        return round(spread.mean, 4) if spread else None

    return {key: [mean(p[key] for p in at) for at in zip(*seeds, strict=False)] for key in seeds[0][0]}


def write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def render() -> None:
    """Fills RESULTS.md between its marks, `<!-- NAME -->` and `<!-- end -->`, from docs/results/ alone."""
    page = DOCS / "RESULTS.md"

    def filled(mark: re.Match[str]) -> str:
        return f"<!-- {mark[1]} -->\n{section(mark[1])}\n<!-- end -->"

    page.write_text(re.sub(r"<!-- ([\w-]+) -->\n.*?<!-- end -->", filled, page.read_text(), flags=re.DOTALL))


def section(name: str) -> str:
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
    by_cell: dict[str, dict[str, list[Mapping[str, str]]]] = {}
    for line in lines:
        by_cell.setdefault(line["cell"], {}).setdefault(line["row"], []).append(line)
    if len(by_cell) > 2:
        yield overview(by_cell).markdown()
    for cell, rows in by_cell.items():
        yield cell_table(name, cell, rows).markdown()
        plot(drawn[cell], DOCS / "results" / f"{name}-{cell}.png")
        yield f"![Balanced accuracy on test by images trained on](results/{name}-{cell}.png)\n"


def spread(lines: Iterable[Mapping[str, str]], key: str) -> Spread | None:
    return Spread.of(float(line[key]) if line[key] else None for line in lines)


def mean(lines: Sequence[Mapping[str, str]], *keys: str) -> float:
    return statistics.fmean(sum(float(line[key]) for key in keys) for line in lines)


def overview(by_cell: Mapping[str, Mapping[str, Sequence[Mapping[str, str]]]]) -> Table:
    rows = dict.fromkeys(row for cell in by_cell.values() for row in cell)
    lines = [
        (row, *(str(spread(cell.get(row, ()), "last_balanced_accuracy") or "–") for cell in by_cell.values()))
        for row in rows
    ]
    return Table("Balanced accuracy on test, last round, in percent", ("row", *by_cell), tuple(lines))


def cell_table(name: str, cell: str, rows: Mapping[str, Sequence[Mapping[str, str]]]) -> Table:
    apart = any(line["last_recall_apart"] for lines in rows.values() for line in lines)
    metrics = METRICS | ({"recall_apart": "recall of melanoma"} if apart else {})
    columns = ["row", "rounds", *metrics.values(), "chosen round: balanced acc.", "accuracy", "gap closed, %"]
    columns += ["pseudo-labels: precision, first and last", "coverage", "images, thousands", "MB", "of FedAvg, %", "s"]
    table = []
    for row, lines in rows.items():
        short = "" if all(line["converged"] == "True" for line in lines) else " (short)"
        told = [str(spread(lines, f"last_{key}") or "–") for key in metrics]
        told += [str(spread(lines, f"chosen_{key}") or "–") for key in ("balanced_accuracy", "accuracy")]
        said = [pair(lines, f"pseudo_label_{key}") for key in ("precision", "coverage")]
        costs = [f"{mean(lines, 'images_labeled', 'images_unlabeled') / 1e3:,.0f}"]
        costs += [f"{mean(lines, 'bytes_up', 'bytes_down') / 1e6:,.0f}", f"{100 * mean(lines, 'bytes_of_fedavg'):.0f}"]
        costs.append(f"{mean(lines, 'seconds'):,.0f}")
        table.append((row, rounds(lines) + short, *told, closed(rows, row), *said, *costs))
    seeds = sorted({line["seed"] for lines in rows.values() for line in lines})
    notes = [f"Test set, in percent: mean ± standard deviation of seeds {', '.join(seeds)}; costs are means."]
    few = [f"{row} {len(lines)}" for row, lines in rows.items() if len(lines) < len(seeds)]
    notes += [f"Not every row has every seed yet: {', '.join(few)}."] if few else []
    notes += [f"Not within 10 % of equal work: {', '.join(far)}."] if (far := unequal(rows)) else []
    return Table(f"{name}, {cell}", tuple(columns), tuple(table), tuple(notes))


def rounds(lines: Sequence[Mapping[str, str]]) -> str:
    numbers = sorted({int(line["rounds"]) for line in lines})
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def unequal(rows: Mapping[str, Sequence[Mapping[str, str]]]) -> list[str]:
    """Rows that trained on more or fewer images than the floor, by more than a tenth."""
    images = {row: mean(lines, "images_labeled", "images_unlabeled") for row, lines in rows.items()}
    return [row for row, count in images.items() if FLOOR in images and abs(count / images[FLOOR] - 1) > 0.1]


def pair(lines: Sequence[Mapping[str, str]], key: str) -> str:
    first, last = spread(lines, f"{key}_first"), spread(lines, key)
    return f"{100 * first.mean:.0f} → {100 * last.mean:.0f}" if first and last else "–"


def closed(rows: Mapping[str, Sequence[Mapping[str, str]]], row: str) -> str:
    """How much of the gap between floor and ceiling a row closes, by the means of balanced accuracy."""
    found = {name: spread(rows.get(name, ()), "last_balanced_accuracy") for name in (FLOOR, row, CEILING)}
    floor, own, ceiling = found[FLOOR], found[row], found[CEILING]
    if row in (FLOOR, CEILING) or not (floor and own and ceiling) or ceiling.mean - floor.mean < 0.01:
        return "–"
    return f"{100 * (own.mean - floor.mean) / (ceiling.mean - floor.mean):.0f}"


def plot(rows: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    figure, axes = empty_plot("balanced accuracy on test, %")
    axes.set_xlabel("images trained on, thousands")
    colors: dict[str, str] = {}
    for row, curve in rows.items():
        family = row.partition("-")[0] if row not in (FLOOR, CEILING, "fed-consist") else row
        bound = row in (FLOOR, CEILING)
        color = GREY if bound else colors.setdefault(family, COLORS[len(colors) % len(COLORS)])
        style = ":" if row == FLOOR else "--" if bound or row != family else "-"
        known = {round(x / 1e3): 100 * y for x, y in zip(curve["images"], curve["balanced_accuracy"], strict=True)}
        draw(axes, known, label=row, color=color, linestyle=style)
    finish_plot(figure, path)


def main(command: str = "", *tables: str) -> None:
    if command == "run" and set(tables) <= set(EVERY):
        run(tables or MUST)
    elif command in ("collect", "render") and not tables:
        collect() if command == "collect" else render()
    else:
        sys.exit(f"{__doc__}\nTables: {', '.join(EVERY)}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except FewLabelError as error:
        sys.exit(str(error))
