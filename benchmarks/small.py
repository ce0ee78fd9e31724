"""Small clients, where all that is not training shows: FewLabel beside the machine's limit, Flower and pfl.

Fashion-MNIST and SimpleCNN as in `fedavg`: 100 clients of 64 images, one step each, all in a round; and 100 clients of
100 images in batches of 10, of which 10 take part in a round.
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.fedavg import CORES, contestants, laid_out, missing, ratios  # noqa: E402
from benchmarks.measure import at_least, race, short  # noqa: E402

CASES = {  # images, rounds in a repeat, settings
    "100 of 64, all": (6_400, 2, {"clients": 100, "per_round": 100, "batch": 64, "alpha": None}),
    "100 of 100, 10 a round": (10_000, 5, {"clients": 100, "per_round": 10, "batch": 10, "alpha": None}),
}
REPEATS = 21  # rounds this short differ much from one to the next
TARGETS = {"of_limit": 0.9, f"of_pfl{CORES}": 1.0, "of_flower": 2.5}


def main() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (images, rounds, settings) in CASES.items():
        with laid_out(images, settings):
            played = race(contestants(settings, single=False), repeats=REPEATS, rounds=rounds)
        faster = ratios(played["each"])
        met = {f"{kind} >= {least}": at_least(faster[kind], least) for kind, least in TARGETS.items() if kind in faster}
        found[name] = {"ratios": faster, "targets": met, "rounds": played}
    return {**short(found), **missing()}


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
