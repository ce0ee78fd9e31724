"""A round without work over Flower: FewLabel beside Flower's own FedAvg, on real processes on this machine.

Run `fewlabel bench flower`; it takes three minutes. Each has a SuperLink and four SuperNodes with TLS and keys, and a
client app that sends back the LeNet-5 it gets. They run in turn, a few rounds each time, of which the first is the
start. Both look for tasks four times a second, which is the one interval that Flower lets one set.
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

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import at_least, machine, ratio, short  # noqa: E402

SITES, ROUNDS, REPEATS = 4, 5, 3

# Flower's own


server_app, client_app = ServerApp(), ClientApp()


@server_app.main()
def fedavg(grid: Grid, context: Context) -> None:
    from benchmarks.overhead import net

    file = Path(str(context.run_config["directory"])) / "ends"

    def note(number: int, arrays: ArrayRecord) -> None:
        with file.open("a") as ends:
            print(time.time(), file=ends)

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=SITES, min_available_nodes=SITES)
    arrays = ArrayRecord(net(1, 10, 8).state_dict())
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=ROUNDS, evaluate_fn=note)


@client_app.train()
def echo(message: Message, context: Context) -> Message:
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


# Both


def main() -> dict[str, Any]:
    from benchmarks.overhead import idle
    from fewlabel import apart, flower, programs
    from fewlabel.data import partition, sites
    from fewlabel.runs import read_rounds
    from fewlabel.worker import dataset_of
    from tests.flower_processes import Processes

    class Plain(Processes):
        """Flower's own nodes, without residents, and an app that is here."""

        def resident(self, number: int) -> None:
            pass

        def node(self, number: int) -> None:
            self.start(f"node{number}", [
                str(programs.BIN / "flower-supernode"), "--root-certificates", "ca.pem",
                "--auth-supernode-private-key", f"key{number}", "--superlink", f"127.0.0.1:{self.port}",
                "--port", str(self.ports[number]),
            ])  # fmt: skip

    whole = idle("Echo", 100, SITES, ROUNDS)
    whole = replace(whole, clients=replace(whole.clients, count=SITES))
    dataset, seconds = dataset_of(whole), dict[str, list[float]](fewlabel=[], flower=[])
    order = random.Random(0)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        sites.write(dataset, partition.of(dataset, whole), folder / "data", "npz", 0)
        places = [
            {"client": n, "data": str(folder / "data" / f"client-{n}.npz"), "state": str(folder / f"state{n}")}
            for n in range(SITES)
        ]
        more = {"modules": "benchmarks.overhead"}
        ours = stack.enter_context(Processes(folder / "fewlabel", [place | more for place in places]))
        theirs = stack.enter_context(Plain(folder / "flower", places))
        app = theirs.app / "pyproject.toml"
        app.write_text(app.read_text().replace("fewlabel.flower:", "benchmarks.flower:"))
        for repeat in range(REPEATS):
            for who in order.sample(list(seconds), 2):
                run = folder / f"{who}-{repeat}"
                if who == "fewlabel":
                    apart.prepare(whole, run, apart.load_terms(folder / "data"), patience=60.0)
                    told = ours.run(run)
                    times = [line["seconds"] + line["seconds_evaluate"] for line in read_rounds(run)[1:]]
                else:
                    run.mkdir()
                    told = theirs.run(run)
                    ends = [float(line) for line in (run / "ends").read_text().split()][1:]
                    times = [after - before for before, after in pairwise(ends)]
                if len(times) != ROUNDS - 1:
                    raise RuntimeError(f"{who} has not played its rounds: {told[-3000:]}")
                seconds[who] += times
    medians = {who: median(times) for who, times in seconds.items()}
    found = {"times_as_fast": ratio(seconds["flower"], seconds["fewlabel"])}
    met = {"times_as_fast >= 1": at_least(found["times_as_fast"], 1)}
    about = {"sites": SITES, "flower": flower.FITTED, "machine": machine()}
    return short({"ratios": found, "targets": met, "seconds": medians, "each": seconds, **about})


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
