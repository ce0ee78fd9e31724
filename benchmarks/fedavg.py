"""FedAvg as in any paper: FewLabel beside plain loops, the machine's limit, Flower and pfl.

Fashion-MNIST, ten clients by Dirichlet(0.8), SimpleCNN, batches of 64, one epoch, no evaluation. 12,000 of the 60,000
images make rounds short enough for nine repeats of everyone in some minutes; what a client costs beside its steps
weighs five times as much as with all of them, so no ratio looks better for it.
"""

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import measure  # noqa: E402
from benchmarks.measure import Contestant, at_least, at_most, race, ratio, short, starts  # noqa: E402

CORES = os.cpu_count() or 1
SETTINGS = {"clients": 10, "per_round": 10, "batch": 64, "alpha": 0.8}


def contestants(settings: dict[str, Any], single: bool = True) -> list[Contestant]:
    """Everyone, or those alone who use several processes; rivals only where their environment is."""
    loops, rivals = "benchmarks.loops", "benchmarks.rivals"
    found = [
        Contestant("fewlabel", f"{loops}:ours", {"workers": CORES, **settings}),
        Contestant("limit", f"{loops}:limit", {"cores": CORES}),
    ]
    if single:
        found += [Contestant("bare", f"{loops}:bare"), Contestant("bare, one thread", f"{loops}:bare", {"threads": 1})]
    if measure.RIVALS.exists():
        python = str(measure.RIVALS)
        found += [Contestant("flower", f"{rivals}:flower", {"actors": CORES}, python)]
        found += [Contestant(f"pfl{n}", f"{rivals}:pfl", {"processes": n}, python) for n in ([1] * single + [CORES])]
    return found


@contextmanager
def work_folder() -> Iterator[Path]:
    """A folder for work. What is set in the environment meanwhile is forgotten with it."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        try:
            yield Path(folder)
        finally:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def laid_out(images: int, settings: dict[str, Any]) -> Iterator[None]:
    from benchmarks.workload import lay_out

    with work_folder() as folder:
        lay_out(folder, images, **settings)
        yield


def ratios(each: dict[str, list[float]]) -> dict[str, Any]:
    """How much faster we are than each: its seconds over ours. Of the limit at most 1."""
    return {
        f"of_{name}".replace(", ", "_").replace(" ", "_"): ratio(each[name], each["fewlabel"])
        for name in each
        if name != "fewlabel"
    }


def missing() -> dict[str, str]:
    return (
        {} if measure.RIVALS.exists() else {"rivals": f"left out: {measure.RIVALS} is not there; `make bench` makes it"}
    )


def main(full: bool = False) -> dict[str, Any]:
    everyone = contestants(SETTINGS)
    with laid_out(60_000 if full else 12_000, SETTINGS):
        played = race(everyone)
        begun = starts([one for one in everyone if one.name in ("fewlabel", "flower")])
    found = {"ratios": ratios(played["each"])}
    targets = {"of_limit >= 0.95": at_least(found["ratios"]["of_limit"], 0.95)}
    if "flower" in played["each"]:
        for kind in ("pss_mb", "peak_mb", "first_round"):
            found["ratios"][f"{kind}_of_flower"] = ratio(begun["each"][kind]["fewlabel"], begun["each"][kind]["flower"])
        targets["pss_mb_of_flower <= 1/3"] = at_most(found["ratios"]["pss_mb_of_flower"], 1 / 3)
        targets["first_round_of_flower <= 1/4"] = at_most(found["ratios"]["first_round_of_flower"], 1 / 4)
    return short({**found, "targets": targets, **missing(), "rounds": played, "starts": begun})


if __name__ == "__main__":
    print(json.dumps(main("--full" in sys.argv), indent=1))
