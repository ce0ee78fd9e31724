"""The tables of docs/RESULTS.md: tunes, runs, collects and renders what `experiments/results/` describes.

    python -m experiments.study run [TABLE ...]    tunes and runs tables, by default (a), (b), (c), a run per core;
                                                   done again, it goes on
    python -m experiments.study collect            runs/results -> docs/results/: a line per run, curves; lines of runs
                                                   that are not here stay
    python -m experiments.study render             docs/results/ -> the tables of docs/RESULTS.md and their plots

docs/PROTOCOL.md says why it is done so. Settings are chosen by validation alone: what chooses reads no test number.
"""

import csv
import io
import json
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from experiments.render import COMPARED, DOCS, METRICS, TABLES, read_csv, render
from fewlabel.cli.run import interruptible
from fewlabel.core.errors import BadInput, FewLabelError, RunFailed
from fewlabel.core.storage import write
from fewlabel.engine.record import chosen_on_validation
from fewlabel.engine.run import Interrupted, prepare
from fewlabel.engine.sweep import run_all
from fewlabel.experiment import Experiment, dumps, load, overlay
from fewlabel.papers.beside import metrics_of
from fewlabel.papers.reproduce import experiments_of
from fewlabel.papers.tables import PaperRow, read_table
from fewlabel.report.results import Result
from fewlabel.report.tables import Spread

RUNS = Path("runs/results")
EVERY = (*COMPARED, "d-streaming", "e-clients", "f-parts", "g-fashion", "h-resnet")
SEEDS = (0, 1, 2)
ALIKE = 0.01  # by how much the mean validation accuracy of a converged run's last two quarters may differ
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
    """All runs of a table, for a row that names a seed with that one; rows that cannot run are told and left out."""
    found = []
    for row in read_table(TABLES / f"{table}.toml").rows:
        cell, _, name = row.name.rpartition("/")
        for one in possible(row, None if "seed" in row.settings else SEEDS):
            found.append(Trial(table, cell, name, RUNS / table / cell / f"{name}-seed{one.seed}", one, {}))
    return found


def tuning(table: str) -> list[Trial]:
    """The runs that tune a table: in another partition, and in one cell if it has cells, each row with all combinations
    of its axes."""
    content = tomllib.loads((TABLES / f"tuning-{table[0]}.toml").read_text())
    rows = {row.name: row for row in read_table(TABLES / f"{table}.toml").rows}
    found = []
    for name, axes in content["rows"].items():
        row = rows["/".join(filter(None, (content.get("cell"), name)))]
        for choice in product(*(enumerate(content["axes"][axis], 1) for axis in axes)):
            settings: dict[str, Any] = reduce(overlay, (values for _, values in choice), {})
            place = "-".join(
                [name.replace("/", "-"), *(f"{axis}{number}" for axis, (number, _) in zip(axes, choice, strict=True))]
            )
            for one in possible(replace(row, settings=overlay(row.settings, settings)), [content["seed"]]):
                found.append(
                    Trial(table, row.name.rpartition("/")[0], name, RUNS / f"tuning-{table[0]}" / place, one, settings)
                )
    return found


def possible(row: PaperRow, seeds: Sequence[int] | None) -> tuple[Experiment, ...]:
    try:
        return experiments_of(row, seeds=seeds)
    except BadInput as error:
        tell(f"left out: {error}")
        return ()


@cache
def tell(words: str) -> None:
    """Once, though it may be so of many rows."""
    print(words, file=sys.stderr)


def run(tables: Sequence[str] = tuple(COMPARED)) -> None:
    """Of each table what tunes it and then its first cell; then all the rest."""
    with interruptible("do the same again") as stop:
        for table in tables:
            tuned = (TABLES / f"tuned-{table[0]}.toml").exists()  # once, or runs would differ
            if (TABLES / f"tuning-{table[0]}.toml").exists() and not tuned:
                perform(tuning(table), stop)
                choose(table)
            every = trials(table)
            perform([trial for trial in every if trial.cell == every[0].cell], stop)
            collect([table])
        for table in reversed(tables):
            perform(trials(table), stop)
            collect([table])


def perform(wanted: Sequence[Trial], stop: Callable[[], bool]) -> None:
    """Runs what is not done, in this table or in another; a run that fails is told, and the others go on."""
    done = {dumps(load(run.with_name("experiment.toml"))): run.parent for run in RUNS.glob("*/*/*/summary.json")}
    for trial in wanted:
        lay_out(trial, done)

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


def lay_out(trial: Trial, done: Mapping[str, Path]) -> None:
    known = trial.directory / "experiment.toml"
    if trial.directory.is_symlink() and not known.exists():  # the other table's run was removed
        trial.directory.unlink()
    if not known.exists() and (same := done.get(dumps(trial.experiment))):
        trial.directory.parent.mkdir(parents=True, exist_ok=True)
        trial.directory.symlink_to(same.resolve(), target_is_directory=True)
    elif not known.exists():
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
    """The finished runs of each table as a line each, and as curves; what is written down of others stays."""
    for table in tables:
        every = {(t.cell, t.row, str(t.experiment.seed)): t for t in trials(table)}
        here = {key: (t, Result(t.directory)) for key, t in every.items() if (t.directory / "summary.json").exists()}
        if not here:
            continue
        path = DOCS / "results" / f"{table}.csv"
        lines: dict[tuple[str, ...], Mapping[str, Any]] = {}
        if path.exists():
            lines |= {(line["cell"], line["row"], line["seed"]): line for line in read_csv(path)}
        lines |= {key: line_of(*pair) for key, pair in here.items()}
        write_csv(path, [lines[key] for key in every if key in lines])
        drawn = path.with_suffix(".json")
        old, new = json.loads(drawn.read_text()) if drawn.exists() else {}, curves(list(here.values()))
        kept: dict[str, Any] = {}
        for cell, row in dict.fromkeys(key[:2] for key in every):
            seeds = [key for key in every if key[:2] == (cell, row) and key in lines]
            whole = all(key in here for key in seeds)  # else a mean would lack some
            known = [
                source[cell][row] for source in ((new, old) if whole else (old, new)) if row in source.get(cell, ())
            ]
            if known:
                kept.setdefault(cell, {})[row] = known[0]
        write(drawn, json.dumps(kept, separators=(",", ":")).encode() + b"\n")


def line_of(trial: Trial, result: Result) -> dict[str, Any]:
    """What a run says of itself, as one line."""
    spent, summary = result.spent(), result.summary or {}
    line: dict[str, Any] = {"table": trial.table, "cell": trial.cell, "row": trial.row, "seed": result.seed}
    line |= {"classes": len(result.classes), "rounds": result.experiment.rounds}
    line |= {"measured": sum("test" in one for one in result.rounds)}
    line |= {key: round(spent[key], 3) for key in ("images_labeled", "images_unlabeled", "bytes_up", "bytes_down")}
    line |= {"bytes_of_fedavg": round(spent["bytes_of_fedavg"], 4), "sent": rounded(metrics_of(result).get("sent"))}
    line |= {"seconds": round(spent["seconds"], 1)}
    apart = recall_of(result)
    chosen = chosen_on_validation(result.rounds, "accuracy")  # as PROTOCOL.md says
    for when, found in (("last", result.last), ("chosen", chosen)):
        test = (found or {}).get("test", {})
        line[f"{when}_round"] = (found or {}).get("round")
        line |= {f"{when}_{key}": rounded(test.get(key)) for key in METRICS}
        line |= {f"{when}_recall_apart": rounded(test["recall_per_class"][apart]) if apart is not None else None}
        line |= {f"{when}_local_accuracy": rounded((found or {}).get("local_accuracy"))}
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
    found = [number for number, known in enumerate(result.classes) if name and known.upper().startswith(name)]
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
        if seen := list(points(result)):  # else clients train by themselves, and no model is the server's
            found.setdefault(trial.cell, {}).setdefault(trial.row, []).append(seen)
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
    """The mean over seeds at equal shares of their work, which are those at which the seed with fewest measurements has
    them: of the others on a straight line between theirs, and at the end, as tables have it, the mean of their ends."""
    fewest = min(seeds, key=len)
    shares = [point["images"] / fewest[-1]["images"] for point in fewest]

    def mean(key: str, share: float) -> float | None:
        spread = Spread.of(at(points, share * points[-1]["images"], key) for points in seeds)
        return round(spread.mean, 4) if spread else None

    return {key: [mean(key, share) for share in shares] for key in fewest[0]}


def at(points: Sequence[dict[str, Any]], images: float, key: str) -> float | None:
    if min(points, key=lambda point: abs(point["images"] - images))[key] is None:
        return None
    known = [point for point in points if point[key] is not None]
    return float(np.interp(images, [point["images"] for point in known], [point[key] for point in known]))


def write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(key for line in lines for key in line)  # older lines may lack some
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write(path, text.getvalue().encode())  # whole or not at all: what it replaces may be of runs that are gone


def main(command: str = "", *tables: str) -> None:
    if command == "run" and set(tables) <= set(EVERY):
        run(tables or COMPARED)
    elif command in ("collect", "render") and not tables:
        collect() if command == "collect" else render()
    else:
        sys.exit(f"{__doc__}\nTables: {', '.join(EVERY)}")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except FewLabelError as error:
        sys.exit(str(error))
