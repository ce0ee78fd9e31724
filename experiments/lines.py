"""The lines of the study: what a finished run says of itself, kept in `docs/results/` as soon as it is known."""

import csv
import hashlib
import io
import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import tomli_w

from experiments.plan import Trial, key_of
from fewlabel.core.schema import plain
from fewlabel.core.storage import locked, write
from fewlabel.experiment import PATHS, Experiment
from fewlabel.report.results import Result

DOCS = Path(__file__).parent.parent / "docs"
METRICS = ("balanced_accuracy", "accuracy", "f1", "auc")  # of validation, the first two
PER_CLASS = ("recall_per_class", "auc_per_class")

Line = dict[str, str]


def read_lines(table: str) -> list[Line]:
    path = DOCS / "results" / f"{table}.csv"
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add(line: Mapping[str, Any]) -> None:
    """Add a line to its table's file, in the place of an earlier one of the same run."""
    new = {key: "" if value is None else str(value) for key, value in line.items()}
    with alone():
        kept = [one for one in read_lines(new["table"]) if key_of(one) != key_of(new)]
        write_csv(DOCS / "results" / f"{new['table']}.csv", [*kept, new])


def alone() -> AbstractContextManager[None]:
    """Let one process at a time change what is in docs/results/, or a study beside this one would lose lines."""
    return locked(Path(tempfile.gettempdir()) / f"fewlabel-{hashlib.sha256(str(DOCS).encode()).hexdigest()[:16]}.lock")


def write_csv(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = dict.fromkeys(key for line in lines for key in line)  # older lines may lack some
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write(path, text.getvalue().encode())  # whole or not at all: what it replaces may be of runs that are gone


def read_curves(table: str) -> dict[str, Any]:
    path = DOCS / "results" / f"{table}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def add_curves(table: str, cell: str, row: str, seed: str, curves: Any) -> None:
    with alone():
        found = read_curves(table)
        found.setdefault(cell, {}).setdefault(row, {})[seed] = curves
        (DOCS / "results").mkdir(parents=True, exist_ok=True)
        write(DOCS / "results" / f"{table}.json", json.dumps(found, separators=(",", ":")).encode() + b"\n")


def hash_of(experiment: Experiment) -> str:
    """A name for everything that a result depends on. Where files lie is not part of it."""
    table = plain(experiment.resolved)
    for part, key in PATHS:
        if key in table[part]:
            table[part][key] = Path(table[part][key]).name
    return hashlib.sha256(tomli_w.dumps(table).encode()).hexdigest()[:16]


@cache
def commit() -> str:
    """The commit of FewLabel that runs here, with a + if its code is changed."""

    def git(*words: str) -> str:
        found = subprocess.run(["git", *words], cwd=Path(__file__).parent.parent, capture_output=True, text=True)
        return found.stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain", "fewlabel") else "")


def line_of(trial: Trial, result: Result) -> dict[str, Any]:
    """What a run says of itself. Of tuning, nothing that the test set says."""
    line: dict[str, Any] = {"table": trial.table, "cell": trial.cell, "row": trial.row, "seed": trial.seed}
    line |= {"method": result.name, "settings": " ".join(trial.settings), "recipe": result.experiment.recipe_name}
    line |= {"rounds": result.experiment.rounds}
    spent = result.spent()
    for when, found in (("last", result.last), ("chosen", result.chosen)):
        said = found or {}
        line[f"{when}_round"] = said.get("round")
        line |= {f"{when}_validation_{key}": rounded(said.get("validation", {}).get(key)) for key in METRICS[:2]}
        if not trial.tunes:
            test = said.get("test", {})
            line |= {f"{when}_{key}": rounded(test.get(key)) for key in METRICS}
            line |= {f"{when}_{key}": listed(test.get(key)) for key in PER_CLASS}
    if not trial.tunes:
        confusion = ((result.last or {}).get("test") or {}).get("confusion") or ()
        line |= {"classes": len(result.classes), "images_per_class": listed([sum(true) for true in confusion])}
        for key in ("precision", "coverage"):
            told = [one["pseudo_labels"][key] for one in result.rounds if "pseudo_labels" in one]
            said = [value for value in told if value is not None]
            line[f"pseudo_label_{key}_first"], line[f"pseudo_label_{key}"] = (
                (rounded(said[0]), rounded(said[-1])) if said else (None, None)
            )
        line |= {key: round(spent[key]) for key in ("images_labeled", "images_unlabeled", "bytes_up", "bytes_down")}
        line |= {"bytes_of_fedavg": round(spent["bytes_of_fedavg"], 4)}
        line |= {"partition": (result.summary or {})["partition"]}
    line |= {"seconds": round(spent["seconds"], 1), "experiment": hash_of(result.experiment), "commit": commit()}
    return line


def curves_of(result: Result) -> dict[str, list[Any]]:
    """Balanced accuracy by round."""
    measured = [line for line in result.rounds if "test" in line]
    found: dict[str, list[Any]] = {"round": [line["round"] for line in measured]}
    for split in ("validation", "test"):
        found[split] = [rounded(line.get(split, {}).get("balanced_accuracy"), 4) for line in measured]
    return found


def rounded(value: float | None, digits: int = 5) -> float | None:
    return None if value is None else round(value, digits)


def listed(values: Sequence[float | None] | None) -> str:
    return " ".join("-" if value is None else f"{round(value, 4):g}" for value in values or ())
