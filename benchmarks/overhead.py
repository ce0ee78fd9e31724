"""What FewLabel itself costs: the time of runs whose clients do nothing.

Run `fewlabel bench overhead`, or `python benchmarks/overhead.py`. Every run has a process tree of its own, so that none
finds the memory of another, and is looked at between rounds, when no job is under way.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median, quantiles
from timeit import repeat
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # an experiment names what is here as benchmarks.overhead:…

from benchmarks.measure import machine, short  # noqa: E402
from fewlabel.core import tree, wire  # noqa: E402
from fewlabel.core.federation import EVERY_CLIENT, ClientInfo, Federation, Model, Site, broadcast  # noqa: E402
from fewlabel.core.tasks import accept, on_client, tasks  # noqa: E402
from fewlabel.core.tree import Tree  # noqa: E402
from fewlabel.data.datasets import Raw  # noqa: E402
from fewlabel.engine import run as runs  # noqa: E402
from fewlabel.engine.pool import contents, parcel  # noqa: E402
from fewlabel.experiment import Clients, Data, Evaluate, Experiment, Labels, Net  # noqa: E402

T = TypeVar("T")

PER_ROUND, WORKERS, REPEATS = 10, 2, 3
WARM_UP, ROUNDS = 10, 310
MS_PER_CLIENT = 1.0  # the target


@dataclass(frozen=True)
class Echo:
    """FedAvg whose clients send back what they get."""

    label_places = frozenset({EVERY_CLIENT})

    def init(self, fed: Federation) -> Model:
        return Model(tree.of(fed.server.model))

    def model(self, state: Model) -> Tree:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        return Model(fed.mean(self.echo, broadcast(fed.sample(), state), state.model, weight=lambda _: 1).model)

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
    """LeNet-5 for images of any size: 61,706 parameters where they are grey and of ten classes."""
    features = nn.Conv2d(channels, 6, 5, padding=2), nn.Tanh(), nn.Conv2d(6, 16, 5, padding=2), nn.Tanh()
    head = nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, classes)
    return nn.Sequential(*features, nn.AdaptiveAvgPool2d(5), nn.Flatten(), *head)


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


def idle(method: str, clients: int, per_round: int, rounds: int) -> Experiment:
    """A run of clients that do nothing, and of which the last round alone is evaluated."""
    return Experiment(
        method=f"benchmarks.overhead:{method}",
        rounds=rounds,
        data=Data(f"benchmarks.overhead:blank_{clients}", image_size=8),
        model=Net("benchmarks.overhead:net"),
        clients=Clients(clients, "iid", per_round=per_round),
        labels=Labels("every-client"),
        evaluate=Evaluate(every=rounds),
    )


@dataclass(frozen=True)
class Seen:
    """What was seen of a run, in seconds and megabytes."""

    seconds: list[float]  # of each round after the warm-up, from one line of rounds.jsonl to the next: all it costs
    cpu: dict[str, float]  # of the parent, its workers and everyone else in these rounds
    traffic: float  # of a round, up and down
    pss: dict[int, float]  # after some of the rounds


def watch(method: str, clients: int, rounds: int, look: Collection[int] = ()) -> Seen:
    """Plays a run in this process and its workers. It has two rounds more, because the last is evaluated."""
    times, lines, used, pss = [], [], [], {}
    parent = psutil.Process()

    def after(line: dict[str, Any]) -> None:
        number = line["round"]
        if WARM_UP <= number <= rounds:
            times.append(time.perf_counter())
            lines.append(line)
        if number in look:
            pss[number] = sum(map(unshared, (parent, *parent.children(recursive=True))))
        if number in (WARM_UP, rounds):
            used.append(cpu_seconds(parent))

    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        experiment = idle(method, clients, PER_ROUND, rounds + 2)
        runs.execute(runs.prepare(experiment, Path(folder) / "run"), workers=WORKERS, watch=after)
    cpu = {who: used[1][who] - used[0][who] for who in used[0]}
    traffic = (lines[-1]["bytes_up"] + lines[-1]["bytes_down"]) / 1e6
    return Seen([late - early for early, late in pairwise(times)], cpu, traffic, pss)


def cpu_seconds(parent: psutil.Process) -> dict[str, float]:
    """Used so far, also by whatever else runs here: where that is much, the clock says little."""
    processes = {"parent": [parent], "workers": parent.children(recursive=True)}
    ours = {who: sum(p.cpu_times().user + p.cpu_times().system for p in some) for who, some in processes.items()}
    machine = psutil.cpu_times()._asdict()
    busy = sum(machine[kind] for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
    return ours | {"others": busy - sum(ours.values())}


def unshared(process: psutil.Process) -> float:
    """A process's PSS but for mapped files, in megabytes: a library counts less the more programs run here."""
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
    return (kib["Pss"] - kib["Pss_File"]) * 1024 / 1e6


def parts() -> dict[str, float]:
    """Milliseconds of what each client's model goes through, each step by itself."""
    torch.set_num_threads(1)
    model, client, task = Model(tree.of(net(1, 10, 8))), ClientInfo(0, 1, 9), tasks(Echo)["echo"]
    data, memory = wire.pack(model), parcel()
    steps: dict[str, Callable[[], object]] = {
        "unpack_message": lambda: wire.unpack(Model, data),
        "pack_upload": lambda: wire.pack(model),
        "carry_upload": lambda: contents(os.dup(parcel(data, memory=memory))),
        "accept_upload": lambda: accept(task, client, 1, data, model.model),
        "fold": lambda: tree.mean([(1, model.model)] * 11),
    }
    found = {name: 1000 * min(repeat(step, number=100)) / 100 for name, step in steps.items()}
    return found | {"fold": found["fold"] / 11}


def fresh(function: Callable[..., T], *arguments: Any) -> T:
    """The function's result in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(function, *arguments).result()


def main() -> dict[str, Any]:
    plain = [fresh(watch, "Echo", 100, ROUNDS) for _ in range(REPEATS)]
    stateful = fresh(watch, "EchoState", 100, ROUNDS)
    each = [per_client(run) for run in plain]
    rounds = [ms for run in each for ms in run]
    jobs = PER_ROUND * len(rounds)
    overhead: dict[str, Any] = {
        "ms_per_client": median(rounds),
        "p90": quantiles(rounds, n=10)[-1],
        "mean": fmean(rounds),  # with the checkpoint of every tenth round
        "rounds": len(rounds),
        "of_each_run": [median(run) for run in each],
        "with_client_state": median(per_client(stateful)),
        "cpu_ms_per_client": {who: 1000 * sum(run.cpu[who] for run in plain) / jobs for who in plain[0].cpu},
        "parts_ms": fresh(parts),
        "mb_per_round": plain[0].traffic,
    }
    targets = {f"ms_per_client < {MS_PER_CLIENT}": overhead["ms_per_client"] < MS_PER_CLIENT}
    return short({"overhead": overhead, "targets": targets, "machine": machine()})


def per_client(run: Seen) -> list[float]:
    return [1000 * second / PER_ROUND for second in run.seconds]


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
