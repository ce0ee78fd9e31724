"""How soon a good model is there: the recipe `fewlabel`, the recipe `printed`, and Flower's own FedAvg on Ray.

Run `python benchmarks/good_model.py --data pbc32.npz`; it takes some ten minutes on two cores. All train SimpleCNN by
labels alone on the same blood cells (PBC): ten clients by Dirichlet(0.8), of which one has labels. Flower's FedAvg has
the initial weights and views of `printed`. It plays twice: with the epochs, batches and rate of `printed`, and with
those that the recipe `fewlabel` gives to sites, but nothing else of it. All play their rounds in turn. After each round
the model is measured on the validation images, and the seconds that this takes do not count.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.fedavg import work_folder  # noqa: E402
from benchmarks.measure import Contestant, race, short  # noqa: E402

ROUNDS, TARGETS = 60, (0.75, 0.8)
OURS, PRINTED = "fewlabel", "printed"
FLOWERS = {"flower": PRINTED, "flower-sites": OURS}  # whose epochs, batches and rate its clients have
NAMES = {
    OURS: "FewLabel, recipe fewlabel",
    PRINTED: "FewLabel, recipe printed",
    "flower": "Flower on Ray, as printed",
    "flower-sites": "Flower on Ray, sites as ours",
}


def experiment(data: Path, recipe: str, rounds: int) -> Any:
    """Labels alone, as in experiments/recipe/pbc.toml, with seed 0."""
    from fewlabel.experiment import RECIPES, Clients, Data, Experiment, Labels, Net, Views

    return Experiment(
        method="labels-only",
        train=RECIPES[recipe],
        rounds=rounds,
        data=Data("npz", path=str(data)),
        model=Net("simple-cnn"),
        clients=Clients(10, alpha=0.8),
        labels=Labels(clients=1, which="rule"),
        views=Views(weak="flip-shift"),
    )


def lay_out(folder: Path, data: Path, rounds: int) -> list[Contestant]:
    """Prepares everyone in a directory of its name, where it leaves the lines of its rounds."""
    from benchmarks.workload import lay_out_experiment
    from fewlabel.engine import run

    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    found = []
    for recipe in (OURS, PRINTED):
        directory = run.prepare(experiment(data, recipe, rounds), folder / recipe)
        found.append(Contestant(recipe, "benchmarks.loops:prepared", {"directory": str(directory), "workers": 1}))
    for name, recipe in FLOWERS.items() if find_spec("flwr") and find_spec("ray") else ():
        (folder / name).mkdir()
        lay_out_experiment(folder / name, experiment(data, recipe, rounds))
        options = {"actors": 1, "measured_in": str(folder / name)}
        found.append(Contestant(name, "benchmarks.rivals:flower", options))
    return found


def until(scores: Sequence[float], seconds: Sequence[float], target: float) -> dict[str, float] | None:
    """The first round whose model reaches the target, and the seconds up to its end."""
    for number, score in enumerate(scores, 1):
        if score >= target:
            return {"round": number, "seconds": sum(seconds[:number])}
    return None


def main(data: Path | None = None, rounds: int = ROUNDS) -> dict[str, Any]:
    from fewlabel.core.errors import install
    from fewlabel.data.published.files import roots
    from fewlabel.engine.record import read_rounds, validation_score

    places = [data] if data else [root / "pbc" / "pbc32.npz" for root in roots()]
    there = next((place for place in places if place.is_file()), None)
    if there is None:
        return {"left out": f"{places[0]} is not there; name the npz file of the blood cells by --data"}
    found: dict[str, Any] = {}
    with work_folder() as folder:
        played = race(lay_out(folder, there.resolve(), rounds), repeats=rounds, warm_up=0, sittings=1)
        for name, wall in played["each"].items():
            lines = read_rounds(folder / name)[:rounds]
            scores = [validation_score(line) or 0.0 for line in lines]
            seconds = [whole - line["seconds_evaluate"] for whole, line in zip(wall, lines, strict=True)]
            found[name] = {
                "until": {str(target): until(scores, seconds, target) for target in TARGETS},
                "best": max(scores),
                "last": scores[-1],
                "seconds": sum(seconds),
                "seconds_a_round": median(seconds),
                "started": played["started"][name],
                "scores": scores,
            }
    about = {key: played[key] for key in ("others", "versions", "machine")}
    left_out = {} if "flower" in found else {"left out": f"Flower, because it needs {install('flower')}"}
    return short({"contestants": found, "rounds": rounds, **left_out, **about})


def table(found: dict[str, Any]) -> str:
    """What was found, for people."""
    if "contestants" not in found:
        return f"Not measured: {found['left out']}."
    lines = [f"{'target':8}{'':30}{'rounds':>8}{'seconds':>10}{'times as long':>16}"]
    for target in map(str, TARGETS):
        ours = found["contestants"][OURS]["until"][target]
        for name, one in found["contestants"].items():
            if reached := one["until"][target]:
                times = f"{reached['seconds'] / ours['seconds']:.1f}" if ours else "–"
                told = f"{reached['round']:>8}{reached['seconds']:>10.1f}{times:>16}"
            else:
                told = f"  not reached (best {100 * one['best']:.1f}) in {one['seconds']:.0f} s"
            lines.append(f"{100 * float(target):<3.0f}{'%':5}{NAMES[name]:30}{told}")
    lines += ["", f"{'':38}{'best %':>8}{'last %':>10}{'s a round':>12}{'s to start':>12}"]
    for name, one in found["contestants"].items():
        told = (
            f"{100 * one['best']:>8.1f}{100 * one['last']:>10.1f}{one['seconds_a_round']:>12.2f}{one['started']:>12.1f}"
        )
        lines.append(f"{'':8}{NAMES[name]:30}{told}")
    same = len({versions["torch"] for versions in found["versions"].values()}) == 1
    torch = f"torch {found['machine']['torch']} for all" if same else f"versions differ: {found['versions']}"
    lines += ["", f"{found['rounds']} rounds; {torch}; other programs used {found['others']:.1f} cores meanwhile"]
    if "left out" in found:
        lines.append(f"Left out: {found['left out']}.")
    return "\n".join(lines)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--data", type=Path, help="the npz file of the blood cells")
    options.add_argument("--rounds", type=int, default=ROUNDS)
    given = options.parse_args()
    print(table(main(given.data, given.rounds)))
