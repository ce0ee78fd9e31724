"""Runs watched from another process: how far they are, what they found so far, and when they will be done.

All of this is read from their directories. A run holds a lock while a process works on it.
"""

import json
import shlex
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fewlabel.core.errors import RunFailed
from fewlabel.engine import record
from fewlabel.report.runs import METRICS, Pick, Run, pick_pseudo_labels, pick_test
from fewlabel.report.tables import percent
from fewlabel.report.terminal import size, span

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 10  # rounds, from which the time of the coming ones is estimated
PAUSE = 1.0  # seconds between two readings
WIDE = 100  # columns of a terminal
PATIENCE = 4  # readings in a row without a process at work, until watching ends: runs start one after the other
SHARES: dict[str, Pick] = {METRICS[key]: pick_test(key) for key in ("accuracy", "balanced_accuracy", "auc")} | {
    f"pseudo-labels: {key}": pick_pseudo_labels(key) for key in ("precision", "coverage")
}


@dataclass(frozen=True)
class RunProgress:
    """How far one run is, at one moment."""

    run: Run
    running: bool

    @property
    def state(self) -> str:
        if self.run.finished or self.running:
            return "finished" if self.run.finished else "running"
        if (self.run.directory / record.ERROR).exists():
            return "failed"
        return "stopped" if self.run.rounds else "not started"

    @property
    def reached(self) -> int:
        return int(self.run.rounds[-1]["round"]) if self.run.rounds else 0

    @property
    def rounds(self) -> int:
        return self.run.experiment.rounds

    @cached_property
    def seconds_per_round(self) -> float | None:
        """The mean over the last rounds."""
        spent = [line["seconds"] + line.get("seconds_evaluate", 0) for line in self.run.rounds[-RECENT:]]
        return statistics.fmean(spent) if spent else None

    def values(self, pick: Pick) -> list[float]:
        """Return a number of all rounds that have it."""
        return [value for line in self.run.rounds if (value := pick(line)) is not None]

    def last(self, pick: Pick) -> float | None:
        values = self.values(pick)
        return values[-1] if values else None

    def sent(self, way: str) -> int:
        """Return the bytes sent "up" or "down"."""
        return sum(line[f"bytes_{way}"] for line in self.run.rounds)


@dataclass(frozen=True)
class Progress:
    """How far a run is, or all runs of a directory, at one moment."""

    directory: Path
    runs: tuple[RunProgress, ...]

    @property
    def alone(self) -> bool:
        return self.runs[0].run.directory == self.directory

    @property
    def count(self) -> str:
        return f"{len(self.runs)} run{'s' * (len(self.runs) != 1)}"

    @property
    def finished(self) -> bool:
        return all(one.run.finished for one in self.runs)

    @property
    def running(self) -> bool:
        return any(one.running for one in self.runs)

    @property
    def state(self) -> str:
        if self.alone:
            return self.runs[0].state
        return "finished" if self.finished else "running" if self.running else "stopped"

    @property
    def seconds_left(self) -> float | None:
        """An estimate: as many runs as now go on at their speed, until all are done."""
        known = [one.seconds_per_round for one in self.runs if one.seconds_per_round is not None]
        todo = [one for one in self.runs if not one.run.finished]
        if not known or not self.running:
            return None
        whole = sum((one.seconds_per_round or statistics.fmean(known)) * (one.rounds - one.reached) for one in todo)
        return whole / sum(one.running for one in self.runs)

    def sentence(self) -> str:
        """Say how far the runs are, and how to go on if no process works on them."""
        show = f"fewlabel show {shlex.quote(str(self.directory))}"
        if self.alone:
            return f"{self.directory} is finished: {show}" if self.finished else f"{self.directory} {self._how_far()}"
        done = f"{self.directory}: {sum(one.run.finished for one in self.runs)} of {self.count} finished"
        if self.finished or self.running:
            return f"{done}: {show}" if self.finished else done
        return f"{done}, and no process works on the others{self._tracebacks()}; to go on: do the same again"

    def _how_far(self) -> str:
        """Say how far a single run is, and how to go on."""
        reached, rounds = self.runs[0].reached, self.runs[0].rounds
        if self.running:
            return f"is at round {reached} of {rounds}"
        state = f"stopped after round {reached} of {rounds}" if reached else "was not started"
        resume = f"{self._command()} --resume {shlex.quote(str(self.directory))}"
        return f"{state}, and no process works on it{self._tracebacks()}; to go on: {resume}"

    def _command(self) -> str:
        """Return the command that a single run is started by."""
        try:
            plan = json.loads((self.directory / record.FEDERATION).read_text())
        except FileNotFoundError:
            return "fewlabel run"
        folder = plan.get("federation") or plan.get("members")
        return f"fewlabel federation run {shlex.quote(folder) if folder else 'DIR'}"

    def _tracebacks(self) -> str:
        files = [str(one.run.directory / record.ERROR) for one in self.runs if one.state == "failed"]
        return f"; failed, traceback in {', '.join(files)}" if files else ""

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "running": self.running,
            "finished": self.finished,
            "seconds_left": self.seconds_left,
            "runs": [
                {
                    "directory": str(one.run.directory),
                    "name": one.run.name,
                    "seed": one.run.seed,
                    "standing": one.state,
                    "round": one.reached,
                    "rounds": one.rounds,
                    "bytes_up": one.sent("up"),
                    "bytes_down": one.sent("down"),
                    "last": one.run.last,
                }
                for one in self.runs
            ],
        }

    def rendered(self, width: int) -> RenderableType:
        """Return what a terminal shows."""
        done, whole = sum(one.reached for one in self.runs), sum(one.rounds for one in self.runs)
        title = self.runs[0].run.title if self.alone else f"{self.count} in {self.directory}"
        counted = f"round {done} of {whole}" if self.alone else f"{done} of {whole} rounds"
        state = f", {span(self.seconds_left)} left" if self.seconds_left is not None else f", {self.state}"
        head = Table.grid(padding=(0, 2))
        head.add_row(ProgressBar(whole, done, width=min(30, width // 3)), Text(counted + state))
        body = table_of_one(self.runs[0], width) if self.alone else table_of_many(self.runs, width)
        note = [] if self.alone else [Text("In percent. Precision and coverage are of pseudo-labels.", "dim")]
        return Group(Text(title, "bold"), head, Text(), body, *note)


def table_of_one(one: RunProgress, width: int) -> Table:
    """Show a line for each number, with its curve."""
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, pick in SHARES.items():
        if values := one.values(pick):
            low, high = min(values), max(values)
            table.add_row(
                f"{name}, %", percent(values[-1]), f"{spark(values, width - 50)}  {percent(low)} to {percent(high)}"
            )
    table.add_row("sent by clients", size(one.sent("up")))
    table.add_row("sent to clients", size(one.sent("down")))
    if one.seconds_per_round is not None:
        seconds = [line["seconds"] for line in one.run.rounds]
        table.add_row("a round", span(one.seconds_per_round), spark(seconds, width - 50))
    return table


def table_of_many(runs: Sequence[RunProgress], width: int) -> Table:
    """Show a line for each run, with AUC and a curve if there is room."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="ellipsis", no_wrap=True)
    shares = {"accuracy": pick_test("accuracy")} | ({"AUC": pick_test("auc")} if width >= WIDE else {})
    shares |= {key: pick_pseudo_labels(key) for key in ("precision", "coverage")}
    columns = {"seed": 4, "round": 7, **{name: max(5, len(name)) for name in shares}, "sent": 8}
    for heading, least in columns.items():
        table.add_column(heading, justify="right", no_wrap=True, min_width=least)
    names = names_of(runs)
    used = sum(columns.values()) + 2 * len(columns) + max(map(len, names.values()))
    short = {"finished": "done", "not started": "waiting", "failed": "failed"}
    table.add_column("accuracy by round" if width - used > 20 else "", no_wrap=True)
    for one in sorted(runs, key=lambda one: not one.running):  # a screen may end before the list does
        table.add_row(
            names[one],
            str(one.run.seed),
            short.get(one.state, f"{one.reached}/{one.rounds}"),
            *(percent(one.last(pick)) for pick in shares.values()),
            size(one.sent("up") + one.sent("down")),
            spark(one.values(shares["accuracy"]), min(30, width - used - 2)),
        )
    return table


def names_of(runs: Sequence[RunProgress]) -> dict[RunProgress, str]:
    """Name each run. Runs that share their name and seed get the names of their directories."""
    alike = Counter((one.run.name, one.run.seed) for one in runs)
    return {one: one.run.name if alike[one.run.name, one.run.seed] == 1 else one.run.directory.name for one in runs}


def spark(values: Sequence[float], width: int) -> str:
    """Draw a curve as a line of blocks. It ends with the last value."""
    count = max(1, min(width, len(values)))
    shown = [values[(n + 1) * len(values) // count - 1] for n in range(count)] if values else []
    low, high = min(shown, default=0), max(shown, default=0)
    return "".join(BLOCKS[round((value - low) / (high - low) * 7) if high > low else 3] for value in shown)


class Watcher:
    """Reads runs again and again, but only those that changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Path, tuple[Any, Run]] = {}

    def read(self) -> Progress:
        """Return how far the runs are now."""
        found = record.runs_in(self._directory) or [self._directory]
        return Progress(self._directory, tuple(map(self._read_run, found)))

    def _read_run(self, directory: Path) -> RunProgress:
        running = record.is_in_use(directory)  # first: a run that ends meanwhile then shows as finished
        files = [directory / name for name in (record.ROUNDS, record.SUMMARY)]
        stamp = [(s.st_ino, s.st_size, s.st_mtime_ns) for file in files if file.exists() for s in [file.stat()]]
        if self._known.get(directory, (None,))[0] != stamp:
            self._known[directory] = stamp, Run(directory)
        return RunProgress(self._known[directory][1], running)

    def readings(self) -> Iterator[Progress]:
        """Yield the progress until all runs are finished, or no process works on them any more."""
        idle = 0
        while True:
            yield (progress := self.read())
            idle = 0 if progress.running else idle + 1
            if progress.finished or idle >= PATIENCE:
                return
            time.sleep(PAUSE)


def watch_runs(directory: Path, once: bool, form: str) -> None:
    """Show runs on a terminal until they end. In a pipe, or with `once`, show them as they are now."""
    console, watcher = Console(highlight=False, markup=False, emoji=False), Watcher(directory)
    progress = watcher.read()
    if form == "json":
        return print(json.dumps(progress.to_json(), indent=1))
    if once or not console.is_terminal:
        console.print(progress.rendered(console.width))
    else:
        with Live(console=console, auto_refresh=False) as live:
            for progress in watcher.readings():
                live.update(progress.rendered(console.width), refresh=True)
    if not progress.finished and not progress.running:
        raise RunFailed(progress.sentence())
    return console.print(progress.sentence(), soft_wrap=True)
