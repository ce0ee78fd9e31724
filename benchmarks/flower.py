"""A round without work over Flower: FewLabel beside Flower's own FedAvg, on real processes on this machine.

Run `fewlabel bench flower`; it takes three minutes. Each has a SuperLink and two SuperNodes with TLS and keys, and
clients that send back the LeNet-5 they get. They run in turn, five rounds each time, of which the first is the start.
Both have the one interval that Flower lets one set, between a SuperExec's looks for tasks, at a quarter of a second.
"""

import json
import os
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import at_least, machine, ratio, short  # noqa: E402

SITES, ROUNDS, REPEATS = 2, 5, 2

server_app = ServerApp()


@server_app.main()
def fedavg(grid: Grid, context: Context) -> None:
    """Run Flower's own FedAvg, and note when its rounds end."""
    from benchmarks.overhead import net

    file = Path(str(context.run_config["directory"])) / "ends"

    def note(number: int, arrays: ArrayRecord) -> None:
        with file.open("a") as ends:
            print(time.time(), file=ends)

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES)
    arrays = ArrayRecord(net(1, 10, 8).state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS, evaluate_fn=note)


def main() -> dict[str, Any]:
    from benchmarks.overhead import idle
    from fewlabel.data import partition, site_files
    from fewlabel.deploy import processes
    from fewlabel.deploy.run_plan import prepare
    from fewlabel.deploy.site import load_terms
    from fewlabel.engine.record import read_rounds
    from fewlabel.engine.world import dataset_of
    from fewlabel.experiment import Data
    from tests.flower_processes import Processes

    class Plain(Processes):
        """Flower's own nodes, without site processes, and an app that is here."""

        def site_process(self, number: int) -> None:
            pass

        def node(self, number: int) -> None:
            self.start(f"node{number}", [
                str(processes.BIN / "flower-supernode"), "--root-certificates", "ca.pem",
                "--auth-supernode-private-key", f"key{number}", "--superlink", f"127.0.0.1:{self.port}",
                "--port", str(self.ports[number]),
            ])  # fmt: skip

    whole = idle("Echo", 100, SITES, ROUNDS)
    whole = replace(whole, data=Data("digits", image_size=8), clients=replace(whole.clients, count=SITES))
    dataset, order = dataset_of(whole), random.Random(0)
    seconds: dict[str, list[float]] = {"fewlabel": [], "flower": []}
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        site_files.write(dataset, partition.of(dataset, whole), folder / "data", "npz", 0)
        sites = [
            {
                "client": client,
                "data": str(folder / "data" / f"client-{client}.npz"),
                "state": str(folder / f"state{client}"),
                "modules": "benchmarks.overhead",
            }
            for client in range(SITES)
        ]
        for site in sites:
            Path(site["state"]).mkdir()
        ours = stack.enter_context(Processes(folder / "fewlabel", sites))
        theirs = stack.enter_context(Plain(folder / "flower", sites))
        app = theirs.app / "pyproject.toml"
        pointed = app.read_text().replace("fewlabel.deploy.flower:server_app", "benchmarks.flower:server_app")
        app.write_text(pointed.replace("fewlabel.deploy.flower:client_app", "benchmarks.flower_echo:app"))
        for repeat in range(REPEATS):
            for who in order.sample(list(seconds), 2):
                run = folder / f"{who}-{repeat}"
                if who == "fewlabel":
                    prepare(whole, run, load_terms(folder / "data"), patience=60.0)
                    told = ours.run(run, timeout=120)
                    times = [line["seconds"] + line["seconds_evaluate"] for line in read_rounds(run)[1:]]
                else:
                    run.mkdir()
                    told = theirs.run(run, timeout=120)
                    ends = [float(line) for line in (run / "ends").read_text().split()][1:]
                    times = [after - before for before, after in pairwise(ends)]
                if len(times) != ROUNDS - 1:
                    raise RuntimeError(f"{who} has not played its rounds: {told[-3000:]}")
                seconds[who] += times
    found = {"times_as_fast": ratio(seconds["flower"], seconds["fewlabel"])}
    met = {"times_as_fast >= 1": at_least(found["times_as_fast"], 1)}
    medians = {who: median(times) for who, times in seconds.items()}
    return short(
        {"ratios": found, "targets": met, "seconds": medians, "each": seconds, "sites": SITES, "machine": machine()}
    )


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
