"""What FewLabel itself costs: the time and memory of runs whose clients do nothing.

`python benchmarks/overhead.py`, or `fewlabel bench overhead`. Every run has a process tree of its own, so that none
finds the memory of another, and is looked at between rounds, when no job is under way.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # what an experiment names as benchmarks.overhead:… is imported by that name

from fewlabel import runs, tree  # noqa: E402
from fewlabel.data.datasets import Raw  # noqa: E402
from fewlabel.experiment import Checkpoint, Clients, Data, Evaluate, Experiment, Labels, Net  # noqa: E402
from fewlabel.federation import EVERY_CLIENT, Federation, Site, broadcast, on_client  # noqa: E402
from fewlabel.tree import Tree  # noqa: E402

PER_ROUND, WORKERS, REPEATS = 10, 2, 3
ROUNDS, WARM_UP, MANY_ROUNDS = 310, 10, 100  # MANY: of the run with 10,000 clients, whose states would fill a disk
EARLY, LATE = 10, 500
MS_PER_CLIENT, GROWTH = 1.0, 1.05  # the targets


@dataclass(frozen=True)
class Model:
    model: Tree


@dataclass(frozen=True)
class Echo:
    """FedAvg whose clients send back what they get."""

    settings = frozenset({EVERY_CLIENT})

    def init(self, fed: Federation) -> Model:
        return Model(tree.of(fed.server.model))

    def model(self, state: Model) -> Tree:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        replies = fed.run(self.echo, broadcast(fed.sample(), state))
        return Model(tree.mean(((1, reply.upload.model) for reply in replies), default=state.model))

    @on_client
    def echo(self, site: Site[None], msg: Model) -> Model:
        return msg


@dataclass(frozen=True)
class EchoState(Echo):
    """The same, and each client keeps what it sent."""

    @on_client
    def echo(self, site: Site[Model], msg: Model) -> Model:  # type: ignore[override]
        site.state = msg
        return msg


def net(channels: int, classes: int, image_size: int) -> nn.Module:
    """LeNet-5, 61,706 parameters for grey images of any size and ten classes."""
    return nn.Sequential(
        *(nn.Conv2d(channels, 6, 5, padding=2), nn.Tanh(), nn.Conv2d(6, 16, 5, padding=2), nn.Tanh()),
        *(nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(400, 120), nn.Tanh()),
        *(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)),
    )


def blank(images: int) -> Raw:
    def split(size: int) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros((size, 1, 8, 8), np.uint8), np.arange(size) % 10

    return Raw(tuple("0123456789"), {"train": split(images), "test": split(10)})


def blank_100() -> Raw:
    """Ten images for each of 100 clients."""
    return blank(1_000)


def blank_10000() -> Raw:
    """Ten images for each of 10,000 clients."""
    return blank(100_000)


@dataclass(frozen=True)
class Seen:
    """What was seen of a run, in seconds and bytes."""

    seconds: list[float]  # of each round, from line to line of rounds.jsonl: whatever a round costs is in it
    bytes: int  # up and down, of the last round
    cpu: dict[str, float]  # seconds of parent and workers after the warm-up
    pss: dict[int, int]  # after some rounds


def watch(method: str, clients: int, rounds: int, look: Collection[int] = ()) -> Seen:
    """Plays a run in this process and its workers."""
    times, lines, pss, cpu = [], [], {}, []
    parent = psutil.Process()

    def line(written: dict[str, Any]) -> None:
        times.append(time.perf_counter())
        lines.append(written)
        number = written["round"]
        if number in look:
            pss[number] = sum(p.memory_full_info().pss for p in (parent, *parent.children(recursive=True)))
        if number in (WARM_UP, rounds):
            processes = {"parent": [parent], "workers": parent.children(recursive=True)}
            cpu.append({who: sum(sum(p.cpu_times()[:2]) for p in some) for who, some in processes.items()})

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        experiment = Experiment(
            method=f"benchmarks.overhead:{method}",
            rounds=rounds,
            data=Data(f"benchmarks.overhead:blank_{clients}", image_size=8),
            model=Net("benchmarks.overhead:net"),
            clients=Clients(clients, "iid", per_round=PER_ROUND),
            labels=Labels("every-client"),
            evaluate=Evaluate(every=rounds),
            checkpoint=Checkpoint(),
        )
        runs.execute(runs.prepare(experiment, Path(folder) / "run"), workers=WORKERS, watch=line)
    seconds = [after - before for before, after in zip(times, times[1:], strict=False)]
    spent = {who: cpu[1][who] - cpu[0][who] for who in cpu[0]}
    return Seen(seconds, lines[-1]["bytes_up"] + lines[-1]["bytes_down"], spent, pss)


def main() -> dict[str, Any]:
    def fresh(*run: Any) -> Seen:
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            return process.submit(watch, *run).result()

    plain = [fresh("Echo", 100, ROUNDS) for _ in range(REPEATS)]
    long = fresh("EchoState", 100, LATE, (EARLY, MANY_ROUNDS, LATE))
    many = fresh("EchoState", 10_000, MANY_ROUNDS, (MANY_ROUNDS,))
    rounds = [1000 * second / PER_ROUND for run in plain for second in run.seconds[WARM_UP:]]
    done = REPEATS * (ROUNDS - WARM_UP) * PER_ROUND
    overhead = {
        "ms_per_client": statistics.median(rounds),
        "mean": statistics.fmean(rounds),
        "p90": statistics.quantiles(rounds, n=10)[-1],
        "runs": [statistics.median(run.seconds[WARM_UP:]) * 1000 / PER_ROUND for run in plain],
        "stateful": statistics.median(long.seconds[WARM_UP:]) * 1000 / PER_ROUND,
        "cpu_ms_per_client": {who: 1000 * sum(run.cpu[who] for run in plain) / done for who in plain[0].cpu},
        "rounds": len(rounds),
        "bytes_per_round": plain[0].bytes,
    }
    memory = {
        f"pss_round_{EARLY}_mb": long.pss[EARLY] / 1e6,
        f"pss_round_{LATE}_mb": long.pss[LATE] / 1e6,
        "pss_100_clients_mb": long.pss[MANY_ROUNDS] / 1e6,
        "pss_10000_clients_mb": many.pss[MANY_ROUNDS] / 1e6,
        "ratio_rounds": long.pss[LATE] / long.pss[EARLY],
        "ratio_clients": many.pss[MANY_ROUNDS] / long.pss[MANY_ROUNDS],
    }
    targets = {
        f"ms_per_client < {MS_PER_CLIENT}": overhead["ms_per_client"] < MS_PER_CLIENT,
        f"ratio_rounds < {GROWTH}": memory["ratio_rounds"] < GROWTH,
        f"ratio_clients < {GROWTH}": memory["ratio_clients"] < GROWTH,
    }
    return {"overhead": overhead, "memory": memory, "targets": targets, "machine": machine()}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.processor())
    memory = round(psutil.virtual_memory().total / 2**30)
    versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": memory, "load": os.getloadavg()[0], **versions}


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
