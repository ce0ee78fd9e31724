"""Runs seen from another process: how far they are, what they found so far, and when they will be done.

All of it is read from their directories; whether anyone works on a run, from the lock that it holds meanwhile.
"""

import fcntl
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
from fewlabel.engine.record import runs_in
from fewlabel.report.plots import Pick, pseudo, test
from fewlabel.report.results import METRICS, Result
from fewlabel.report.tables import percent
from fewlabel.report.terminal import size, span

BLOCKS = "▁▂▃▄▅▆▇█"
RECENT = 10  # rounds, by which the time of those to come is judged
PAUSE = 1.0  # seconds between looks
WIDE = 100  # columns of a terminal
LOOKS = 4  # in a row without anyone at work, until there is nothing to wait for: runs start one after the other
SHARES: dict[str, Pick] = {METRICS[key]: test(key) for key in ("accuracy", "balanced_accuracy", "auc")} | {
    f"pseudo-labels: {key}": pseudo(key) for key in ("precision", "coverage")
}


@dataclass(frozen=True)
class Seen:
    """A run at one moment."""

    result: Result
    running: bool

    @property
    def standing(self) -> str:
        if self.result.finished or self.running:
            return "finished" if self.result.finished else "running"
        if (self.result.directory / "error.txt").exists():
            return "failed"
        return "stopped" if self.result.rounds else "not started"

    @property
    def reached(self) -> int:
        return int(self.result.rounds[-1]["round"]) if self.result.rounds else 0

    @property
    def rounds(self) -> int:
        return self.result.experiment.rounds

    @cached_property
    def pace(self) -> float | None:
        """Seconds of a round, of late."""
        spent = [line["seconds"] + line.get("seconds_evaluate", 0) for line in self.result.rounds[-RECENT:]]
        return statistics.fmean(spent) if spent else None

    def course(self, pick: Pick) -> list[float]:
        return [value for line in self.result.rounds if (value := pick(line)) is not None]

    def last(self, pick: Pick) -> float | None:
        course = self.course(pick)
        return course[-1] if course else None

    def sent(self, way: str) -> int:
        return sum(line[f"bytes_{way}"] for line in self.result.rounds)


@dataclass(frozen=True)
class View:
    """A run, or those of a directory, at one moment."""

    directory: Path
    runs: tuple[Seen, ...]

    @property
    def alone(self) -> bool:
        return self.runs[0].result.directory == self.directory

    @property
    def finished(self) -> bool:
        return all(run.result.finished for run in self.runs)

    @property
    def running(self) -> bool:
        return any(run.running for run in self.runs)

    @property
    def left(self) -> float | None:
        """Seconds, if those at work go on as they do and take on what is not started."""
        paces = [run.pace for run in self.runs if run.pace is not None]
        todo = [run for run in self.runs if not run.result.finished]
        if not paces or not self.running:
            return None
        whole = sum((run.pace or statistics.fmean(paces)) * (run.rounds - run.reached) for run in todo)
        return whole / sum(run.running for run in self.runs)

    def sentence(self) -> str:
        """How it stands, and what can be done about it where nobody works on it."""
        many = f"{sum(run.result.finished for run in self.runs)} of {len(self.runs)} runs are finished"
        where = f"{self.directory}: {many}" if not self.alone else str(self.directory)
        if self.finished:
            return (
                f"{where} is finished: fewlabel show {self.quoted}"
                if self.alone
                else f"{where}: fewlabel show {self.quoted}"
            )
        if self.running:
            return where if not self.alone else f"{where} is at round {self.runs[0].reached} of {self.runs[0].rounds}"
        failed = [run.result.directory / "error.txt" for run in self.runs if run.standing == "failed"]
        why = f"; failed, traceback in {', '.join(map(str, failed))}" if failed else ""
        if not self.alone:
            return f"{where}, and nobody works on the others{why}; to go on: do the same again"
        run = self.runs[0]
        how = "was not started" if not run.reached else f"stopped after round {run.reached} of {run.rounds}"
        far = (run.result.directory / "federation.json").exists()
        command = (
            f"fewlabel federation run DIR --resume {self.quoted}" if far else f"fewlabel run --resume {self.quoted}"
        )
        return f"{where} {how}, and nobody works on it{why}; to go on: {command}"

    @property
    def quoted(self) -> str:
        return shlex.quote(str(self.directory))

    def to_json(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "running": self.running,
            "finished": self.finished,
            "seconds_left": self.left,
            "runs": [
                {
                    "directory": str(run.result.directory),
                    "name": run.result.name,
                    "seed": run.result.seed,
                    "standing": run.standing,
                    "round": run.reached,
                    "rounds": run.rounds,
                    "bytes_up": run.sent("up"),
                    "bytes_down": run.sent("down"),
                    "last": run.result.last,
                }
                for run in self.runs
            ],
        }

    def drawn(self, width: int) -> RenderableType:
        done, whole = sum(run.reached for run in self.runs), sum(run.rounds for run in self.runs)
        title = self.runs[0].result.title if self.alone else f"{len(self.runs)} runs in {self.directory}"
        told = f"round {done} of {whole}" if self.alone else f"{done} of {whole} rounds"
        state = f", {span(self.left)} left" if self.left is not None else f", {self.standing}"
        head = Table.grid(padding=(0, 2))
        head.add_row(ProgressBar(whole, done, width=min(30, width // 3)), Text(told + state))
        body = table_of_one(self.runs[0], width) if self.alone else table_of_many(self.runs, width)
        note = [] if self.alone else [Text("In percent; precision and coverage are those of pseudo-labels.", "dim")]
        return Group(Text(title, "bold"), head, Text(), body, *note)

    @property
    def standing(self) -> str:
        if self.alone:
            return self.runs[0].standing
        return "finished" if self.finished else "running" if self.running else "stopped"


def table_of_one(run: Seen, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for name, pick in SHARES.items():
        if course := run.course(pick):
            low, high = min(course), max(course)
            table.add_row(
                f"{name}, %", percent(course[-1]), f"{spark(course, width - 50)}  {percent(low)} to {percent(high)}"
            )
    table.add_row("sent by clients", size(run.sent("up")))
    table.add_row("sent to clients", size(run.sent("down")))
    if run.pace is not None:
        table.add_row("a round", span(run.pace), spark([line["seconds"] for line in run.result.rounds], width - 50))
    return table


def table_of_many(runs: Sequence[Seen], width: int) -> Table:
    """A line for each run; AUC where there is room, and a curve in what is left."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("run", overflow="ellipsis", no_wrap=True)
    shares = {"accuracy": test("accuracy")} | ({"AUC": test("auc")} if width >= WIDE else {})
    shares |= {key: pseudo(key) for key in ("precision", "coverage")}
    columns = {"seed": 4, "round": 7, **{name: max(5, len(name)) for name in shares}, "sent": 8}
    for heading, least in columns.items():
        table.add_column(heading, justify="right", no_wrap=True, min_width=least)
    alike = Counter((run.result.name, run.result.seed) for run in runs)
    names = {  # those of their directories where that is what tells runs apart
        run: result.name if alike[result.name, result.seed] == 1 else result.directory.name
        for run in runs
        for result in [run.result]
    }
    used = sum(columns.values()) + 2 * len(columns) + max(map(len, names.values()))
    short = {"finished": "done", "not started": "waiting"}
    table.add_column("accuracy by round" if width - used > 20 else "", no_wrap=True)
    for run in sorted(runs, key=lambda run: not run.running):  # a screen may end before the list does
        table.add_row(
            names[run],
            str(run.result.seed),
            short.get(run.standing, run.standing if run.standing == "failed" else f"{run.reached}/{run.rounds}"),
            *(percent(run.last(pick)) for pick in shares.values()),
            size(run.sent("up") + run.sent("down")),
            spark(run.course(shares["accuracy"]), min(30, width - used - 2)),
        )
    return table


def spark(values: Sequence[float], width: int) -> str:
    """A line of blocks from the lowest to the highest, the last value at its end."""
    count = max(1, min(width, len(values)))
    shown = [values[(n + 1) * len(values) // count - 1] for n in range(count)] if values else []
    low, high = min(shown, default=0), max(shown, default=0)
    return "".join(BLOCKS[round((value - low) / (high - low) * 7) if high > low else 3] for value in shown)


def locked(directory: Path) -> bool:
    """Whether a process works on a run; asked for no longer than it takes."""
    try:
        with (directory / ".lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


class Watcher:
    """Looks at runs again and again, and reads those that changed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[Path, tuple[Any, Result]] = {}

    def look(self) -> View:
        found = runs_in(self._directory) or [self._directory]
        return View(self._directory, tuple(map(self._seen, found)))

    def _seen(self, directory: Path) -> Seen:
        running = locked(directory)  # first: one that ends meanwhile is then seen as finished
        files = [directory / name for name in ("rounds.jsonl", "summary.json")]
        stamp = [(s.st_ino, s.st_size, s.st_mtime_ns) for file in files if file.exists() for s in [file.stat()]]
        if self._known.get(directory, (None,))[0] != stamp:
            self._known[directory] = stamp, Result(directory)
        return Seen(self._known[directory][1], running)

    def views(self) -> Iterator[View]:
        """Until all is finished, or nobody works on it any more."""
        idle = 0
        while True:
            yield (view := self.look())
            idle = 0 if view.running else idle + 1
            if view.finished or idle >= LOOKS:
                return
            time.sleep(PAUSE)


def watch(directory: Path, once: bool, form: str) -> None:
    """Shows runs on a terminal until they end; elsewhere, or if asked for, as they are now."""
    console, watcher = Console(highlight=False, markup=False, emoji=False), Watcher(directory)
    view = watcher.look()
    if form == "json":
        return print(json.dumps(view.to_json(), indent=1))
    if once or not console.is_terminal:
        console.print(view.drawn(console.width))
    else:
        with Live(console=console, auto_refresh=False) as live:
            for view in watcher.views():
                live.update(view.drawn(console.width), refresh=True)
    if not view.finished and not view.running:
        raise RunFailed(view.sentence())
    return console.print(view.sentence(), soft_wrap=True)
