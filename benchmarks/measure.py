"""The harness of the measurements: alternatives play round by round in turn, so that what else happens falls on all.

A contestant is a function `play(turn, **options)` in a module of its own process. It gets ready, and plays a round
whenever `turn()` is true:

    def play(turn, images):
        data = load(images)
        while turn():
            one_round(data)

A framework that has its own loop calls `turn` where a round ends. Whatever a contestant prints is kept for the case
that it fails. Nothing here imports PyTorch or FewLabel, so rivals may live in environments of their own.
"""

import ctypes
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parents[1]
RIVALS = ROOT / ".venv-bench" / "bin" / "python"  # `make bench` makes it
REPEATS, WARM_UP, SITTINGS = 9, 2, 3
SLACK = 0.05  # a target counts as met if the interval's near end misses it by less
PACKAGES = ("torch", "numpy", "flwr", "ray", "pfl")
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
QUIET |= {"RAY_DEDUP_LOGS": "0", "PYTHONWARNINGS": "ignore"}
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")

Turn = Callable[[], bool]


@dataclass(frozen=True)
class Contestant:
    """Who plays: a function, as module:function, its options, and the Python that has what it imports."""

    name: str
    function: str
    options: dict[str, Any] = field(default_factory=dict)
    python: str = sys.executable


# The parent


class Player:
    """A contestant under way, in a process tree of its own that waits between rounds."""

    def __init__(self, contestant: Contestant) -> None:
        self.name = contestant.name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        began = time.perf_counter()
        environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")} | QUIET
        environment["PYTHONPATH"] = str(ROOT)
        self._process = subprocess.Popen(
            [
                contestant.python,
                "-m",
                "benchmarks.measure",
                contestant.function,
                json.dumps(contestant.options),
                str(began),
            ],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self._root = psutil.Process(self._process.pid)
        self.ready = self._heard()
        self.started = time.perf_counter() - began  # imports in it
        self.first: float | None = None

    def round(self) -> float:
        """Plays a round, and says how many seconds it took."""
        began = time.perf_counter()
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            print("round", file=self._process.stdin, flush=True)
        self._heard()
        seconds = time.perf_counter() - began
        if self.first is None:
            self.first = seconds
        return seconds

    def _heard(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise RuntimeError(
                f"{self.name} ended with exit code {self._process.returncode}:\n{self._log.read()[-4000:]}"
            )
        heard: dict[str, Any] = json.loads(line)
        return heard

    def tree(self) -> list[psutil.Process]:
        return [self._root, *self._root.children(recursive=True)]

    def cpu(self) -> float:
        """Seconds of processor used so far by the whole tree, also by those of it that are gone."""
        used = 0.0
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                used += sum(process.cpu_times()[:4])  # the last two are of children that ended
        return used

    def pss(self) -> float:
        """Megabytes of the tree: pages that processes share are divided among them."""
        total = 0.0
        for process in self.tree():
            with suppress(OSError, psutil.NoSuchProcess):
                lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
                total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6
        return total

    def close(self) -> None:
        tree = self.tree() if self._process.poll() is None else []
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        for process in psutil.wait_procs(tree, 1)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()


@contextmanager
def playing(contestant: Contestant) -> Iterator[Player]:
    player = Player(contestant)
    try:
        yield player
    finally:
        player.close()


def race(
    contestants: Sequence[Contestant],
    repeats: int = REPEATS,
    warm_up: int = WARM_UP,
    rounds: int = 1,
    seed: int = 0,
    sittings: int = SITTINGS,
) -> dict[str, Any]:
    """Every contestant plays `rounds` rounds in each repeat, in an order that is drawn anew each time.

    Each sitting begins with new processes: one may be faster than its twin by a tenth, for all of its life. Seconds are
    those of one round. `started` is how long the last process took to get ready. `idle` is the share of a core that a
    contestant uses while others play, and `others` that of programs that are none of ours: unless it is near zero,
    measure again.
    """
    order = random.Random(seed)
    wall: dict[str, list[float]] = {c.name: [] for c in contestants}
    cpu: dict[str, list[float]] = {c.name: [] for c in contestants}
    used = dict.fromkeys(wall, 0.0)
    lasted = foreign = 0.0
    for sitting in range(sittings):
        with ExitStack() as stack:
            players = [stack.enter_context(playing(contestant)) for contestant in contestants]
            ready = {player.name: player.ready for player in players}
            started = {player.name: player.started for player in players}
            for player in players:
                for _ in range(warm_up * rounds):
                    player.round()
            before, began, machine_before = {p.name: p.cpu() for p in players}, time.perf_counter(), busy()
            for _ in range(repeats // sittings + (sitting < repeats % sittings)):
                for player in order.sample(players, len(players)):
                    then = player.cpu()
                    wall[player.name].append(sum(player.round() for _ in range(rounds)) / rounds)
                    cpu[player.name].append((player.cpu() - then) / rounds)
            spent = {player.name: player.cpu() - before[player.name] for player in players}
            lasted += time.perf_counter() - began
            foreign += busy() - machine_before - sum(spent.values())
            used = {name: seconds + spent[name] for name, seconds in used.items()}
    waiting = {n: (used[n] - rounds * sum(cpu[n])) / max(1e-9, lasted - rounds * sum(wall[n])) for n in wall}
    return {
        "seconds": {name: float(np.median(times)) for name, times in wall.items()},
        "cpu_seconds": {name: float(np.median(times)) for name, times in cpu.items()},
        "each": wall,
        "started": started,
        "idle": waiting,
        "others": foreign / lasted,
        "sittings": sittings,
        "repeats": repeats,
        "rounds_per_repeat": rounds,
        "versions": {name: told["versions"] for name, told in ready.items()},
        "machine": machine(),
    }


def starts(contestants: Sequence[Contestant], repeats: int = REPEATS, more: int = 1) -> dict[str, Any]:
    """Every contestant alone, from its start to its first round and `more` after it, again and again in turn.

    `first_round` begins when its own imports are done; `pss_mb` is the memory after the last round, `peak_mb` the
    most seen during the rounds after the first.
    """
    found: dict[str, list[dict[str, float]]] = {c.name: [] for c in contestants}
    for _ in range(repeats):
        for contestant in contestants:
            with playing(contestant) as player:
                player.round()
                seen = Seen(player)
                for _ in range(more):
                    player.round()
                peak, steady = seen.end(), player.pss()
                imports = player.ready["imports"]
                assert player.first is not None
                first = player.started - imports + player.first
                found[player.name].append({"imports": imports, "first_round": first, "pss_mb": steady, "peak_mb": peak})
    kinds = ("imports", "first_round", "pss_mb", "peak_mb")
    each = {kind: {name: [one[kind] for one in times] for name, times in found.items()} for kind in kinds}
    return {kind: {n: float(np.median(v)) for n, v in each[kind].items()} for kind in kinds} | {"each": each}


class Seen:
    """The memory of a tree, looked at twenty times a second: not for rounds that are timed."""

    def __init__(self, player: Player) -> None:
        self._peak, self._over, self._player = 0.0, threading.Event(), player
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(0.05):
            self._peak = max(self._peak, self._player.pss())

    def end(self) -> float:
        self._over.set()
        self._thread.join()
        return self._peak


def ratio(above: Sequence[float], below: Sequence[float]) -> dict[str, Any]:
    """The median over repeats of above/below, and where it would be had other repeats been played."""
    each = np.asarray(above, float) / np.asarray(below, float)
    drawn = np.random.default_rng(0).integers(0, len(each), (10_000, len(each)))
    low, high = np.quantile(np.median(each[drawn], axis=1), [0.025, 0.975])
    return {"ratio": float(np.median(each)), "interval_95": [float(low), float(high)]}


def at_least(found: dict[str, Any], target: float) -> bool:
    return bool(found["interval_95"][0] > target - SLACK)


def at_most(found: dict[str, Any], target: float) -> bool:
    return bool(found["interval_95"][1] < target + SLACK)


def short(found: Any) -> Any:
    """The same with three digits behind the point."""
    return json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 3))


def busy() -> float:
    """Seconds of processor that the whole machine has used."""
    times = psutil.cpu_times()._asdict()
    return float(sum(times[kind] for kind in BUSY))


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    memory, load = round(psutil.virtual_memory().total / 2**30), os.getloadavg()[0]  # the benchmark's own load is in it
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": memory, "load": load, **versions()}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


# The contestant's process


def serve(function: str, options: dict[str, Any], began: float) -> None:
    """Plays rounds as they are asked for on stdin, until it ends."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: daemons stay in this tree, and are counted
    tell = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anyone prints is no answer
    hear = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    module, _, name = function.partition(":")
    play = getattr(import_module(module), name)
    imports = time.perf_counter() - began  # on Linux this clock is the same for all processes
    asked = 0

    def turn() -> bool:
        nonlocal asked
        answer = {"round": asked} if asked else {"ready": True, "imports": imports, "versions": versions()}
        print(json.dumps(answer), file=tell, flush=True)
        asked += 1
        return hear.readline() == "round\n"

    play(turn, **options)
    os._exit(0)  # whatever a framework left running, nobody needs any more


if __name__ == "__main__":
    serve(sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]))
