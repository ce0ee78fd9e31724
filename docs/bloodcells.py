"""What labels alone and the systems reach on blood cells, as printed and by the recipe, for the picture and the README.

By the recipe, it is table (o) of the study, `docs/results/o-box.csv`. As printed, `docs/results/blood-cells.csv` has a
line for each run of `experiments/recipe/pbc.toml`. Balanced accuracy on test in the last round, in percent. With new
lines, `make docs` brings the picture and the README up to date.
"""

import csv
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

RESULTS = Path(__file__).parent / "results"
NAMES = {
    ("labels-only", "printed"): "labels alone, as printed",
    ("labels-only", "fewlabel"): "labels alone",
    ("fedirm", "fewlabel"): "FedIRM",
    ("fedmatch", "fewlabel"): "FedMatch",
    ("cbafed", "fewlabel"): "CBAFed",
    ("isofed", "fewlabel"): "IsoFed",
    ("rscfed", "fewlabel"): "RSCFed",
    ("semifl", "fewlabel"): "SemiFL",
    ("sage", "fewlabel"): "SAGE",
    ("tutor", "fewlabel"): "Tutor (our own)",
    ("all-labels", "fewlabel"): "all labels",
}


@dataclass(frozen=True)
class Bar:
    """A row: a method by a recipe, and its seeds."""

    method: str
    recipe: str
    values: tuple[float, ...]

    @property
    def name(self) -> str:
        return NAMES[self.method, self.recipe]

    @property
    def mean(self) -> float:
        return fmean(self.values)


def read(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return sorted(csv.DictReader(file), key=lambda line: int(line["seed"]))


def bars() -> list[Bar]:
    """Return the rows: labels alone as printed and by the recipe first, then the systems, best first."""
    values: dict[tuple[str, str], list[float]] = {}
    for line in read("blood-cells.csv"):
        values.setdefault((line["method"], "printed"), []).append(float(line["balanced_accuracy"]))
    for line in read("o-box.csv"):
        if line["cell"] == "blood":
            values.setdefault((line["row"], "fewlabel"), []).append(100 * float(line["last_balanced_accuracy"]))
    found = [Bar(*kind, tuple(values[kind])) for kind in values if kind in NAMES]
    most = max(len(bar.values) for bar in found)

    def place(bar: Bar) -> tuple[bool, bool, bool, bool, float]:
        """Fewer seeds come later: the mean of an easy seed is no rank."""
        labels = bar.method != "labels-only", bar.recipe != "printed", bar.method == "all-labels"
        return *labels, len(bar.values) < most, -bar.mean

    return sorted(found, key=place)


def bar_of(method: str, recipe: str = "fewlabel") -> Bar:
    return next(bar for bar in bars() if (bar.method, bar.recipe) == (method, recipe))


def seeds(bar: Bar) -> str:
    return "one seed" if len(bar.values) == 1 else f"{len(bar.values)} seeds"


def reason() -> str:
    """Return why one would use FewLabel, by what the picture shows."""
    printed, recipe = bar_of("labels-only", "printed"), bar_of("labels-only")
    return (
        "**Why use it.** How a model is trained can matter more than which method trains it. "
        "On blood cells with labels at one site of ten, the same labeled images give "
        f"{printed.mean:.1f} % balanced accuracy by the training that papers print, and {recipe.mean:.1f} % by "
        f"FewLabel's [recipe](docs/recipe.md) (means of {seeds(recipe)}). FewLabel trains every method by this recipe."
    )
