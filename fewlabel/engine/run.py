"""One run: from an experiment to a directory with its results, resumable at any moment."""

import json
import multiprocessing
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fewlabel.core import schema, storage, wire
from fewlabel.core.errors import BadInput, FewLabelError, RunFailed, StorageError
from fewlabel.core.federation import ClientError, Model, train
from fewlabel.core.rng import Rng
from fewlabel.core.tasks import state_kind
from fewlabel.data import partition
from fewlabel.data.datasets import Dataset
from fewlabel.engine import attack, backends, device, record, sums
from fewlabel.engine.checkpoint import Best, Checkpoints, Saved
from fewlabel.engine.conduct import PrivacySpent
from fewlabel.engine.executor import Executor
from fewlabel.engine.notes import notes_of
from fewlabel.engine.rounds import Server
from fewlabel.engine.shipping import model_file
from fewlabel.engine.world import World, dataset_of
from fewlabel.experiment import Experiment, dumps, load
from fewlabel.learn import private

SCHEMA = 1  # version of summary.json
Watch = Callable[[dict[str, Any]], None]  # called with each line of rounds.jsonl when it is written


class Interrupted(FewLabelError):
    """Someone asked the run to stop, and it did, after a whole round."""

    exit_code = 130


def prepare(experiment: Experiment, directory: Path) -> Path:
    """Lay out a run: write its resolved experiment and who holds which image."""
    device.of(experiment.device)  # raises an error if it is missing
    try:
        refuse_used(directory, experiment)
        dataset = dataset_of(experiment, fresh=True)
        dealt = partition.of(dataset, experiment)
        sums.check_kinds(experiment, dealt)
        world = World(experiment, dataset, dealt)
        attack.check_labels(experiment.clients.attack, {c for c in dealt.clients if len(dealt.shares[c].labeled)})
        check_batches(experiment, world.network(Rng("trial"), experiment.model.pretrained), dataset)
        directory.mkdir(parents=True, exist_ok=True)
        with record.in_use(directory):
            refuse_used(directory, experiment)
            dealt.save(directory / record.PARTITION, dataset.splits["train"].labels.numpy(), dataset.classes)
            storage.write(directory / record.NOTES, json.dumps(notes_of(world), indent=1).encode())
            storage.write(directory / record.EXPERIMENT, dumps(experiment).encode())
    except OSError as error:
        raise StorageError(f"{directory} cannot be written: {error.strerror}") from None
    return directory


@contextmanager
def laid_out(experiment: Experiment, directory: Path) -> Iterator[Path]:
    """Lay out a new run, and remove it again if its method refuses the experiment before the first round."""
    prepare(experiment, directory)
    try:
        yield directory
    except BadInput:
        if not (directory / record.ROUNDS).exists():
            for name in (record.PARTITION, record.NOTES, record.EXPERIMENT, record.LOCK):
                (directory / name).unlink(missing_ok=True)
            with suppress(OSError):  # other files there are not ours
                directory.rmdir()
        raise


def check_batches(experiment: Experiment, network: torch.nn.Module, dataset: Dataset) -> None:
    """Refuse batches of a single image if the network's norm needs more."""
    for name in single_batches(schema.plain(experiment.method)):
        try:
            with torch.no_grad(), Rng("trial").scope():
                network.train()(torch.zeros(1, dataset.channels, dataset.image_size, dataset.image_size))
        except ValueError as error:
            raise BadInput(f"method.{name} = 1 is too few for {experiment.model.name}: {error}; raise it") from None


def single_batches(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """List the settings of a method that make batches of one image: `batch_size` and the like, at any depth."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from single_batches(value, f"{above}{name}.")
        elif name.startswith("batch_") and type(value) is int and value == 1:
            yield above + name


def refuse_used(directory: Path, experiment: Experiment) -> None:
    if record.is_run(directory):
        stored = load(directory / record.EXPERIMENT).resolved
        if replace(stored, rounds=experiment.rounds) == experiment.resolved:
            record.check_rounds(directory, stored.rounds, experiment.rounds)
    there = [path.name for path in directory.iterdir()] if directory.exists() else []
    left = (record.PARTITION, record.NOTES)  # by a kill
    if any(name not in left and not name.startswith(".") for name in there):
        raise BadInput(f"{directory} is not empty; continue it with --resume {directory} or choose another --out")


def execute(
    directory: Path,
    *,
    executor: Executor | None = None,
    workers: int | None = None,
    watch: Watch | None = None,
    stop: Callable[[], bool] = lambda: False,
    remote: World | None = None,
    backend: str = "simulator",
) -> dict[str, Any]:
    """Run what `prepare` laid out, or the rest of it, and return its summary. The backend changes no bit of the result.

    A `remote` world is all that a server knows about clients on other machines. Then the `executor` must reach them.
    """
    if not record.is_run(directory):
        raise BadInput(f"{directory} holds no run: it has no {record.EXPERIMENT}")
    if record.is_finished(directory):
        summary = record.read_summary(directory)
        record.check_rounds(directory, summary["rounds"], load(directory / record.EXPERIMENT).rounds)
        return summary
    with_executor = backends.load(backend)
    with record.in_use(directory):
        world = remote or World.open(directory)
        device.of(world.experiment.device)
        with threads(world.experiment.threads):  # initial weights may depend on them
            run = Run(directory.resolve(), watch or (lambda line: None), world, remote=remote is not None)
        if executor is not None:
            run.attempt(executor, stop)
        else:  # only now, so that forked workers share what was imported and read so far
            with_executor(world.experiment, workers, lambda found: run.attempt(found, stop))
    return record.read_summary(directory)


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let PyTorch use this number of threads meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass
class Pending:
    """A complete round whose evaluation may still be under way."""

    round: int
    state: bytes  # packed
    line: dict[str, Any]
    tickets: dict[str, int]
    model: bytes  # packed, that the tickets measure; the next round may be under way, and changes it


class Run:
    """One run under way."""

    def __init__(self, directory: Path, watch: Watch, world: World, remote: bool) -> None:
        self.directory, self.watch = directory, watch
        self.fed = Server(directory, world=world, remote=remote)
        self.experiment, self.method = self.fed.experiment, self.fed.method
        if self.experiment.privacy is not None:
            private.check_network(world.network(Rng("scratch")))
        self.checkpoints = Checkpoints(
            directory / record.CHECKPOINTS,
            state_kind(type(self.method)),
            version("fewlabel"),
            self.experiment.rounds,
        )
        self.log = directory / record.ROUNDS
        self.pending: Pending | None = None
        self.best: Best | None = None
        self.last_checkpoint = time.monotonic()
        self.masked = remote and self.experiment.clients.sums == "masked"

    def attempt(self, executor: Executor, stop: Callable[[], bool]) -> None:
        """Play the rounds that are left. If that fails, keep what is complete and say why."""
        self.fed.executor = executor
        with threads(self.experiment.threads):  # of this thread, which may not be the main one
            try:
                self.go(stop)
            except PrivacySpent as error:
                self.end_early(error)
            except Exception as error:
                self.rescue()
                if (clear := self.explained(error)) is not error:
                    raise clear from error
                raise

    def go(self, stop: Callable[[], bool]) -> None:
        saved = self.checkpoints.load()
        if saved is None:
            with self.fed.rng("global").scope():
                saved = Saved(0, self.method.init(self.fed), None, None)
        if saved.round:
            self.fed.restore(saved, self.method.model(saved.state))
        self.best = self.checkpoints.load_best(self.keep_lines(saved.round))
        state, began = saved.state, time.monotonic()
        for number, state in train(self.method, self.fed, saved.state, saved.round + 1):
            line = {"round": number, "seconds": time.monotonic() - began, **self.fed.take_round()}
            began = time.monotonic()
            measured = self.fed.shipped is not None and self.fed.evaluated(number)
            model = wire.pack(Model(self.fed.complete())) if measured else b""
            tickets = self.fed.evaluate(model) if measured else {}
            line["seconds_evaluate"] = time.monotonic() - began
            self.settle()
            averaged = self.experiment.recipe.average and self.fed.shipped is not None  # or it is the state's own
            shipped = self.fed.complete() if averaged else None
            packed = self.checkpoints.pack(Saved(number, state, self.fed.statistics, shipped, self.fed.judge.conduct))
            self.pending = Pending(number, packed, line, tickets, model)
            # If there is nothing to wait for, a kill from now on costs no part of this round. A masked sum is worth
            # waiting: if it were repeated after a kill, sites would demand the same survivors.
            if self.due(number) and (self.masked or all(map(self.fed.executor.tickets.ready, tickets.values()))):
                self.settle()
            began = time.monotonic()
            if stop() and number < self.experiment.rounds:
                self.settle(keep=True)
                raise Interrupted(f"stopped after round {number} of {self.experiment.rounds}")
        self.settle(keep=True)
        self.finish()

    def end_early(self, error: PrivacySpent) -> None:
        """Finish with the last complete round if nobody may train any more: a resume could never go further."""
        self.settle(keep=True)
        self.fed.executor.discard()
        done = self.fed.checkpointed
        if not done:
            raise error
        self.finish(done, f"It ended after round {done} of {self.experiment.rounds}: {error}.")

    def settle(self, keep: bool = False) -> None:
        """Write the line of the last complete round, and a checkpoint of it if one is due."""
        if self.pending is None:
            return
        pending, self.pending, began = self.pending, None, time.monotonic()
        line = pending.line | self.measured(pending)
        line["seconds_evaluate"] += time.monotonic() - began
        number, score = pending.round, record.validation_score(line)
        if score is not None and (self.best is None or score > self.best.score):
            self.best = Best(number, score, pending.model)
        kept = keep or self.due(number)
        with self.log.open("a") as file:
            file.write(json.dumps(line) + "\n")
            if kept:  # a checkpoint must not outlive the lines of its rounds
                file.flush()
                os.fsync(file.fileno())
        self.watch(line)
        if kept:
            self.checkpoints.save(number, pending.state, self.best)
            self.fed.checkpointed, self.last_checkpoint = number, time.monotonic()

    def measured(self, pending: Pending) -> dict[str, Any]:
        """Return the metrics of a round. If the model cannot be measured, name those whose updates were odd."""
        try:
            return self.fed.collect(pending.tickets)
        except RunFailed as error:
            suspects = {one["client"]: one["why"] for one in pending.line.get("suspects", ()) if one["did"] == "named"}
            if not suspects:
                raise
            who = "; ".join(
                f"{self.fed.world.names.get(client, f'client {client}')}: {why}" for client, why in suspects.items()
            )
            raise RunFailed(
                f"{error} In round {pending.round} these updates were odd: {who}; clients.outlier, in a new run, "
                "leaves such updates out"
            ) from None

    def due(self, number: int) -> bool:
        """Return True if this round needs a checkpoint."""
        most = self.experiment.checkpoint
        if self.masked or self.experiment.privacy is not None:  # what is repeated is not the same
            return True
        return number - self.fed.checkpointed >= most.rounds or self.since_checkpoint() >= most.seconds

    def since_checkpoint(self) -> float:
        return time.monotonic() - self.last_checkpoint

    def explained(self, error: Exception) -> Exception:
        """Turn an error of a user's own method into one sentence. Its traceback goes to a file."""
        trace = self.directory / record.ERROR
        if isinstance(error, ClientError) and error.__cause__:
            with suppress(OSError):
                trace.write_text(str(error.__cause__))
                error.add_note(f"traceback in {trace}")
        elif not isinstance(error, FewLabelError | OSError) and not type(self.method).__module__.startswith(
            "fewlabel."
        ):
            with suppress(OSError):
                trace.write_text("".join(traceback.format_exception(error)))
            what = f"{type(self.method).__name__} failed at the server in round {self.fed.round}"
            return RunFailed(f"{what}: {type(error).__name__}: {error}; traceback in {trace}")
        return error

    def rescue(self) -> None:
        """Keep what is complete when a run cannot go on. Errors here are not shown, because the first one is."""
        for step in (partial(self.settle, keep=True), self.fed.executor.discard):
            with suppress(FewLabelError, OSError):
                step()

    def keep_lines(self, rounds: int) -> list[record.Line]:
        """Drop the lines of rounds that will be played again. Return the others."""
        kept = [line for line in record.read_rounds(self.directory) if line["round"] <= rounds]
        if [line["round"] for line in kept] != list(range(1, rounds + 1)):
            raise StorageError(f"{self.log} lacks lines of rounds before the checkpoint of round {rounds}; start anew")
        storage.write(self.log, "".join(json.dumps(line) + "\n" for line in kept).encode())
        return kept

    def finish(self, done: int | None = None, ended: str = "") -> None:
        """Write the models and the summary. A run that `ended` after fewer rounds says why."""
        rounds = record.read_rounds(self.directory)
        file = partial(model_file, self.fed.world, self.fed.initial)
        if self.best is not None and self.best.model is not None:
            data = file(wire.unpack(Model, self.best.model).model, "validation", self.best.round)
            storage.write(self.directory / record.CHOSEN_MODEL, data)
        if self.fed.shipped is not None:
            storage.write(
                self.directory / record.MODEL, file(self.fed.complete(), "last", done or self.experiment.rounds)
            )
        whole = {
            "schema_version": SCHEMA,
            "name": self.experiment.name,
            "data": self.experiment.data.name,
            "seed": self.experiment.seed,
            "rounds": self.experiment.rounds,
            "last": record.last_measured(rounds),
            "chosen_on_validation": record.chosen_on_validation(rounds),
            **({"ended": ended} if ended else {}),
            **record.spent(rounds),
            "peak_memory_bytes": peak_memory(),
            "labels_per_class": self.fed.world.labels_per_class,
            "partition": self.fed.world.partition.checksum,
            "versions": versions(),
        }
        storage.write(self.directory / record.SUMMARY, json.dumps(whole, indent=1).encode())


def peak_memory() -> int:
    """Add up the peak memory of this process and its workers, in bytes. Pages that they share count for each."""
    peak = 0
    for process in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
        with suppress(OSError):
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
            peak += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return peak


def versions() -> dict[str, str]:
    packages = {name: version(name) for name in ("fewlabel", "torch", "numpy")}
    return {"python": platform.python_version(), **packages, "cpu": torch.backends.cpu.get_cpu_capability()}
