"""A round with masked sums beside a plain one, on real processes on this machine: seconds and bytes.

Run `fewlabel bench masked`; it takes up to half an hour, and 6 GB of memory for ten sites. There is a SuperLink with
TLS, and a node and a process for each site, with keys. All train FedAvg on digits for one epoch, with `simple-cnn`.
Runs are plain, in whole numbers, masked, and masked with sites that drop out after they have dealt their shares: two of
ten, and one of three, where no sum is left. The first round of a run is its start, and does not count.
"""

import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import machine, short  # noqa: E402

SITES, ROUNDS = (3, 10), 5
CHANGES = (
    *("method=fedavg", "data=digits", "data.image_size=16", "model=simple-cnn", f"rounds={ROUNDS}", "evaluate.every=5"),
    *("labels.at=every-client", "labels.fraction=1.0", "method.local.epochs=1", "method.local.batch_size=32"),
)
# A site whose process says that it fails when its weights are to be masked, if a file says so.
SITE = """
import json, sys
from functools import partial
from pathlib import Path
from fewlabel.core import wire
from fewlabel.deploy import site, site_process
from fewlabel.deploy.messages import Order
def reply(config, parts):
    if Path(config["state"], "drop").exists() and wire.unpack(Order, parts["order"]).job.kind == "masked":
        return {"failed": "it dropped out"}
    return site.reply(config, parts)
site_process.serve(partial(reply, json.loads(sys.argv[1])), Path(sys.argv[2]))
"""


def main(counts: tuple[int, ...] = SITES) -> dict[str, Any]:
    os.chdir(ROOT)
    return short({"sites": {str(count): measured(count) for count in counts}, "machine": machine()})


def measured(count: int) -> dict[str, Any]:
    """Return the seconds and bytes of a round with so many sites, for each kind of run."""
    from fewlabel.data import partition, site_files
    from fewlabel.deploy import peers
    from fewlabel.deploy.run_plan import prepare
    from fewlabel.deploy.site import load_terms
    from fewlabel.engine.record import read_rounds
    from fewlabel.engine.world import dataset_of
    from fewlabel.experiment import read
    from tests.flower_processes import Members

    plain = read({}, [*CHANGES, f"clients.count={count}"])
    dataset, found = dataset_of(plain), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        folder, keys = Path(name), Path(name) / "federation"
        site_files.write(dataset, partition.of(dataset, plain), folder / "data", "npz", 0)
        states = [folder / f"state{client}" for client in range(count)]
        sites = [
            {"client": client, "data": str(folder / "data" / f"client-{client}.npz"), "state": str(states[client])}
            | {"key": str(keys / f"key{client}"), "peers": str(keys / peers.FILE)}
            for client in range(count)
        ]
        for state in states:
            state.mkdir()
        with Members(keys, sites, SITE) as federation:
            for kind in ("float", "fixed", "masked", "masked, with dropouts"):
                for state in states[: (2 if count > 3 else 1)] if "dropouts" in kind else ():
                    (state / "drop").touch()
                whole = replace(plain, clients=replace(plain.clients, sums=kind.partition(",")[0]))
                run = prepare(
                    whole, folder / kind, load_terms(folder / "data"), patience=300.0, members=str(federation.folder)
                )
                told = federation.run(run, timeout=3600)
                lines = read_rounds(run)
                if len(lines) != ROUNDS:
                    raise RuntimeError(f"{kind} has not played its rounds: {told[-3000:]}")
                parts = {
                    part: median(line[part] for line in lines[1:]) for part in ("seconds", "bytes_up", "bytes_down")
                }
                sums = sum(all(one["client"] >= 0 for one in line.get("failures", ())) for line in lines)
                found[kind] = parts | {"rounds_with_a_mean": sums}
    return found


if __name__ == "__main__":
    print(json.dumps(main(tuple(map(int, sys.argv[1:])) or SITES), indent=1))
