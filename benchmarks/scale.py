"""Whether size costs anything: memory over rounds and clients, and time with 10,000 clients beside 100.

The clients do nothing, as in `overhead`, so that nothing hides what the federation itself needs.
"""

import json
import os
import sys
import tempfile
from itertools import count
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import overhead  # noqa: E402
from benchmarks.measure import Contestant, Turn, at_most, race, ratio, short  # noqa: E402
from fewlabel.engine import run  # noqa: E402

EARLY, MIDDLE, LATE = 10, 100, 500  # the run with 10,000 clients ends at MIDDLE: its states would fill a disk
RATIO, DEARER = 1.05, 1.1  # the targets
FEW, MANY = (100, 10), (10_000, 100)  # clients, and those of a round
JOBS = 1_000  # of a repeat, in as many rounds as it takes


def idle(turn: Turn, clients: int, per_round: int) -> None:
    done = count(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        directory = run.prepare(overhead.idle("Echo", clients, per_round, 1_000_000), Path(folder) / "run")
        if turn():
            try:
                run.execute(
                    directory,
                    workers=overhead.WORKERS,
                    stop=lambda: next(done) % (JOBS // per_round) == 0 and not turn(),
                )
            except run.Interrupted:
                return


def main() -> dict[str, Any]:
    stateful = overhead.fresh(overhead.watch, "EchoState", 100, LATE, (EARLY, MIDDLE, LATE))
    crowd = overhead.fresh(overhead.watch, "EchoState", 10_000, MIDDLE, (MIDDLE,))
    players = [
        Contestant(str(clients), "benchmarks.scale:idle", {"clients": clients, "per_round": per_round})
        for clients, per_round in (FEW, MANY)
    ]
    played = race(players)
    dearer = ratio(played["each"][str(MANY[0])], played["each"][str(FEW[0])])
    memory = {
        f"round_{EARLY}_mb": stateful.pss[EARLY],
        f"round_{LATE}_mb": stateful.pss[LATE],
        "100_clients_mb": stateful.pss[MIDDLE],
        "10000_clients_mb": crowd.pss[MIDDLE],
        "ratio_rounds": stateful.pss[LATE] / stateful.pss[EARLY],
        "ratio_clients": crowd.pss[MIDDLE] / stateful.pss[MIDDLE],
    }
    targets = {f"{kind} < {RATIO}": memory[kind] < RATIO for kind in ("ratio_rounds", "ratio_clients")}
    targets[f"10000_clients_of_100 <= {DEARER}"] = at_most(dearer, DEARER)
    ms = {clients: 1000 * seconds / JOBS for clients, seconds in played["seconds"].items()}
    found = {"ratios": {"10000_clients_of_100": dearer}, "ms_per_client": ms, "memory": memory, "targets": targets}
    return {**short(found), "rounds": short(played)}


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
