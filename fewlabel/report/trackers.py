"""Trackers: rounds for TensorBoard and MLflow, with the numbers and names of rounds.jsonl, nested ones as a/b.

A tracker gets each line of a run after rounds.jsonl has it. When a run is resumed, its tracker starts over from
rounds.jsonl, so no round is written twice. If a tracker fails, you are told once, and the run goes on without it. No
tracker may use threads: worker processes are forked meanwhile, and a fork copies a thread's locks as they stand.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from fewlabel.core.errors import BadInput, install
from fewlabel.core.schema import flatten, plain
from fewlabel.engine import record
from fewlabel.experiment import load
from fewlabel.report.terminal import tell

MOST_METRICS, MOST_PARAMETERS = 1000, 100  # that MLflow takes in one batch


class Tracker(Protocol):
    """What a tracker must offer."""

    def has(self, directory: Path) -> bool:
        """Return True if the tracker has this run already."""

    def begin(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Start a run over, without what an earlier attempt wrote."""

    def write(self, directory: Path, step: int, values: Mapping[str, float]) -> None:
        """Write the numbers of one round."""

    def end(self, directory: Path, status: str) -> None:
        """Close a run. The status is FINISHED, KILLED or FAILED."""


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that do not exist or whose packages are not installed."""
    for name in names:
        if name not in TRACKERS:
            raise BadInput(f"--track knows {' and '.join(TRACKERS)}, found '{name}'")
        if missing := [package for package in TRACKERS[name].needs if find_spec(package) is None]:
            raise BadInput(f"--track {name} needs {', '.join(missing)}: {install('track')}")


class Trackers:
    """The trackers of one run, or of many below one directory."""

    def __init__(self, names: Iterable[str], root: Path) -> None:
        self._trackers = {name: TRACKERS[name].make(root) for name in names}
        self._begun = set[Path]()

    @contextmanager
    def following(self, directory: Path) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Yield a function that takes the run's lines. How the block is left says how the run ended."""
        end: dict[str, Any] = {"done": False}
        try:
            yield partial(self.watch, directory)
            end = {"done": True}
        except Exception as error:
            if getattr(error, "exit_code", None) != 130:
                end = {"failed": str(error)}
            raise
        finally:
            self.watch(directory, end)

    def watch(self, directory: Path, line: Mapping[str, Any]) -> None:
        """Pass on a line of a run's rounds.jsonl, or at its end how it ended, as `sweep` reports it."""
        for name, tracker in list(self._trackers.items()):
            self._try(name, partial(self._pass_on, tracker, directory, line))
        self._begun.add(directory)

    def complete(self, directory: Path) -> None:
        """Write a finished run to the trackers that do not have it."""
        for name, tracker in list(self._trackers.items()):
            self._try(name, partial(self._write_whole, tracker, directory))

    def _try(self, name: str, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # no error of a tracker is worth losing a run
            del self._trackers[name]
            tell(f"{name} gets no more rounds: {type(error).__name__}: {error}; everything else goes on without it")

    def _pass_on(self, tracker: Tracker, directory: Path, line: Mapping[str, Any]) -> None:
        if "round" not in line:
            if directory in self._begun:
                tracker.end(directory, "FAILED" if "failed" in line else "FINISHED" if line["done"] else "KILLED")
        elif directory in self._begun:
            tracker.write(directory, line["round"], dict(numbers(line)))
        else:
            self._begin(tracker, directory, line["round"])

    def _write_whole(self, tracker: Tracker, directory: Path) -> None:
        if not tracker.has(directory):
            self._begin(tracker, directory)
            tracker.end(directory, "FINISHED")

    def _begin(self, tracker: Tracker, directory: Path, until: int | None = None) -> None:
        """Write a run from its first round on. Lines after `until`, from another process, are still to come."""
        tracker.begin(directory, dict(flatten(plain(load(directory / record.EXPERIMENT)))))
        for line in record.read_rounds(directory):
            if until is None or line["round"] <= until:
                tracker.write(directory, line["round"], dict(numbers(line)))


def numbers(line: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a round and of its lists, each with its name. Matrices are left out."""
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}/{key}", number) for key, number in numbers(value))
        elif isinstance(value, list):
            yield from numbers({f"{name}/{n}": part for n, part in enumerate(value) if not isinstance(part, list)})
        elif isinstance(value, int | float) and name != "round":
            yield name, float(value)


class TensorBoard:
    """An event file in each run's directory, for `tensorboard --logdir`."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def has(self, directory: Path) -> bool:
        return any((directory / "tensorboard").glob("events.*"))

    def begin(self, directory: Path, settings: Mapping[str, Any]) -> None:
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = directory / "tensorboard"
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.*"):
            old.unlink()
        self._files[directory] = RecordWriter((folder / f"events.out.tfevents.{time.time():.0f}.fewlabel").open("wb"))
        known = {
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in settings.items()
        }
        self._event(directory, file_version="brain.Event:2")
        self._event(directory, summary=hparams_pb(known))

    def write(self, directory: Path, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._event(directory, step=step, summary=Summary(value=scalars))

    def _event(self, directory: Path, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._files[directory].write(Event(wall_time=time.time(), **content).SerializeToString())
        self._files[directory].flush()

    def end(self, directory: Path, status: str) -> None:
        self._files.pop(directory).close()


class MLflow:
    """One store for all runs of a directory, for `mlflow ui --backend-store-uri sqlite:///…/mlruns/mlflow.db`."""

    def __init__(self, root: Path) -> None:
        self._folder = root / "mlruns"
        self._client: Any = None
        self._runs: dict[Path, str] = {}

    def _open(self) -> Any:
        if self._client is None:
            os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # nothing is sent anywhere
            logging.getLogger("mlflow").setLevel(logging.ERROR)
            from mlflow import MlflowClient

            self._folder.mkdir(parents=True, exist_ok=True)
            self._client = MlflowClient(f"sqlite:///{self._folder.resolve()}/mlflow.db")
            name, files = self._folder.resolve().parent.name, (self._folder / "artifacts").resolve().as_uri()
            found = self._client.get_experiment_by_name(name)
            self._experiment = found.experiment_id if found else self._client.create_experiment(name, files)
        return self._client

    def _known(self, directory: Path) -> list[str]:
        runs = self._open().search_runs([self._experiment], max_results=50_000)
        return [run.info.run_id for run in runs if run.info.run_name == directory.name]

    def has(self, directory: Path) -> bool:
        return bool(self._known(directory))

    def begin(self, directory: Path, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        for old in self._known(directory):
            self._client.delete_run(old)
        run: str = self._client.create_run(self._experiment, run_name=directory.name).info.run_id
        self._runs[directory] = run
        params = [Param(key, str(value)) for key, value in settings.items()]
        for start in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(run, params=params[start : start + MOST_PARAMETERS])
        self._client.log_artifact(run, str(directory / record.EXPERIMENT))

    def write(self, directory: Path, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._runs[directory], metrics=metrics[start : start + MOST_METRICS])

    def end(self, directory: Path, status: str) -> None:
        self._client.set_terminated(self._runs.pop(directory), status)


class Entry(NamedTuple):
    make: Callable[[Path], Tracker]  # from the directory that holds the run, or many
    needs: tuple[str, ...]  # packages


TRACKERS = {
    "tensorboard": Entry(lambda root: TensorBoard(), ("tensorboard",)),
    "mlflow": Entry(MLflow, ("mlflow", "sqlalchemy", "alembic")),
}
