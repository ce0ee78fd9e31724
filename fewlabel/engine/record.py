"""The record of a run: the names of the files in its directory, and how to read them. Nothing here needs PyTorch."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewlabel.core import storage
from fewlabel.core.errors import BadInput, StorageError

EXPERIMENT = "experiment.toml"  # everything that the result depends on
PARTITION = "partition.json"  # who holds which image
NOTES = "notes.json"  # what to know about the data before the first round
FEDERATION = "federation.json"  # the plan of a run over sites, which has no partition
ROUNDS = "rounds.jsonl"  # a line for each round
SUMMARY = "summary.json"  # written last: a run with one is finished
MODEL = "model.safetensors"  # the last round's
CHOSEN_MODEL = "model-validation.safetensors"  # that of the round that validation chose
CHECKPOINTS = "checkpoint"
CLIENTS = "clients"  # what each client keeps between rounds
ERROR = "error.txt"  # the traceback of a run that failed
REPORT = "report.html"
LOCK = ".lock"
FEW = 5  # labels of a class, in the notes: with fewer, it is hardly learned
GONE_AFTER = 2.0  # seconds in which the workers of a killed run have ended, and their lock with them

Line = dict[str, Any]  # of rounds.jsonl


def is_run(directory: Path) -> bool:
    """Return True if this is the directory of a run."""
    return (directory / EXPERIMENT).is_file()


def is_finished(directory: Path) -> bool:
    return (directory / SUMMARY).exists()


def runs_in(directory: Path) -> list[Path]:
    """List the runs directly below a directory."""
    return sorted(path.parent for path in directory.glob(f"*/{EXPERIMENT}"))


def check_rounds(directory: Path, begun: int, wanted: int) -> None:
    """Refuse to go on with a run as if it had another number of rounds."""
    if begun != wanted:
        raise BadInput(
            f"{directory} is a run of {begun} rounds and cannot become one of {wanted}, because training depends on "
            f"the number of rounds; for {wanted} rounds, start a new run in another directory"
        )


@contextmanager
def in_use(directory: Path) -> Iterator[None]:
    """Keep other processes out of a run's directory. The system gives up the lock when this process ends."""
    with (directory / LOCK).open("w") as file:
        deadline = time.monotonic() + GONE_AFTER
        while not storage.lock(file, wait=False):
            if time.monotonic() > deadline:
                raise StorageError(f"{directory} is in use by another process; wait for it or choose another --out")
            time.sleep(0.02)
        yield


def is_in_use(directory: Path) -> bool:
    """Return True if a process works on this run."""
    try:
        with (directory / LOCK).open() as file:
            return storage.is_locked(file)
    except FileNotFoundError:
        return False


def read_rounds(directory: Path) -> list[Line]:
    """Read the complete lines of rounds.jsonl."""
    path = directory / ROUNDS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_notes(directory: Path) -> dict[str, Any]:
    """Read what is to know about a run's data. A run of an earlier version, or over sites, has no such file."""
    try:
        found: dict[str, Any] = json.loads((directory / NOTES).read_text())
    except (OSError, ValueError):  # whoever reads it can do without
        return {}
    return found


def read_summary(directory: Path) -> dict[str, Any]:
    """Read the summary of a finished run."""
    path = directory / SUMMARY
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise BadInput(f"{directory} has no {SUMMARY}: the run is not finished; resume it first") from None
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}; delete it and resume the run") from None
    return found


def last_measured(rounds: Sequence[Line]) -> Line | None:
    """Return the line of the last round that was measured, or of the last round if none was."""
    lines = [line for line in rounds if "test" in line] or rounds
    return lines[-1] if lines else None


def validation_score(line: Line, metric: str = "balanced_accuracy") -> float | None:
    """Return the balanced accuracy on validation of a round, or another metric, if it was measured."""
    found: float | None = line.get("validation", {}).get(metric)
    return found


def chosen_on_validation(rounds: Sequence[Line], metric: str = "balanced_accuracy") -> Line | None:
    """Return the line of the first round with the best balanced accuracy, or another metric, on validation."""
    lines = [line for line in rounds if validation_score(line, metric) is not None]
    return max(lines, key=lambda line: validation_score(line, metric) or 0.0, default=None)


COSTS = ("bytes_up", "bytes_down", "model_bytes", "seconds", "seconds_train", "seconds_evaluate", "asked", "replies")


def spent(rounds: Sequence[Line]) -> dict[str, float]:
    """Add up what rounds cost, and compare the bytes with FedAvg's for as many jobs."""
    total = {key: sum(line.get(key, 0) for line in rounds) for key in COSTS}
    for key in ("images_labeled", "images_unlabeled"):  # sites on other machines do not tell
        if all(key in line for line in rounds):
            total[key] = sum(line[key] for line in rounds)
    return total | {"bytes_of_fedavg": (total["bytes_up"] + total["bytes_down"]) / max(1, total["model_bytes"])}
