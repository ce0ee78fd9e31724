"""Results: what a run says of itself, and runs of one experiment over their seeds.

Every number is read from a run's directory, at the last round measured or at the one that validation chose: never at
the best on test.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.experiment import ROWS, Experiment, load
from fewlabel.report.tables import Spread, Table, megabytes, percent, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Line = dict[str, Any]  # of rounds.jsonl
FLOOR, CEILING, *_ = ROWS
METRICS = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "auc": "AUC",
    "precision": "precision",
    "recall": "recall",
    "specificity": "specificity",
    "f1": "F1",
}
MOST_CLASSES = 12  # whose recalls still make a table one can read


class Result:
    """One run, finished or not, as its directory tells it."""

    def __init__(self, directory: Path | str) -> None:
        from fewlabel.engine.record import read_rounds, read_summary

        self.directory = Path(directory)
        if not (self.directory / "experiment.toml").is_file():
            why = "holds no run: it has no experiment.toml" if self.directory.exists() else "is not there"
            raise BadInput(f"{self.directory} {why}; give the directory of a run, or one with runs in it")
        self.experiment: Experiment = load(self.directory / "experiment.toml")
        self.name, self.seed = self.experiment.name, self.experiment.seed
        # In this order, so that a run that ends meanwhile is not taken for finished without its last rounds.
        finished = (self.directory / "summary.json").exists()
        self.summary: dict[str, Any] | None = read_summary(self.directory) if finished else None
        self.rounds: list[dict[str, Any]] = read_rounds(self.directory)

    @property
    def title(self) -> str:
        return f"{self.name} on {self.experiment.data.name}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def standing(self) -> str:
        reached = self.rounds[-1]["round"] if self.rounds else 0
        return "finished" if self.finished else f"unfinished, round {reached} of {self.experiment.rounds}"

    @cached_property
    def last(self) -> dict[str, Any] | None:
        from fewlabel.engine.record import last_measured

        return last_measured(self.rounds)

    @cached_property
    def chosen(self) -> dict[str, Any] | None:
        from fewlabel.engine.record import chosen_on_validation

        return chosen_on_validation(self.rounds)

    def spent(self, until: int | None = None) -> dict[str, float]:
        """What the rounds cost, up to and including one of them, and how that compares with FedAvg's bytes."""
        from fewlabel.engine.record import spent

        return spent([line for line in self.rounds if until is None or line["round"] <= until])

    def table(self) -> Table:
        lines, columns = [], []
        if self.last:
            lines.append(self.last)
            columns.append(f"last round ({self.last['round']})")
        if self.chosen:
            lines.append(self.chosen)
            columns.append(f"chosen on validation ({self.chosen['round']})")
        rows = [(words, *(percent(line.get("test", {}).get(key)) for line in lines)) for key, words in METRICS.items()]
        rows += [
            (f"recall of {name}", *(percent(line["test"]["recall_per_class"][n]) for line in lines))
            for n, name in enumerate(self.classes if len(self.classes) <= MOST_CLASSES else [])
            if self.last and "test" in self.last
        ]
        rows.append(("clients' own models: accuracy", *(percent(line.get("local_accuracy")) for line in lines)))
        for key in ("coverage", "precision"):
            rows.append((f"pseudo-labels: {key}", *(percent(line.get("pseudo_labels", {}).get(key)) for line in lines)))
        rows = [row for row in rows if set(row[1:]) - {percent(None)}]
        spent = [self.spent(line["round"]) for line in lines]
        if spent:
            rows += [
                ("sent by clients, MB", *(megabytes(s["bytes_up"]) for s in spent)),
                ("sent to clients, MB", *(megabytes(s["bytes_down"]) for s in spent)),
                ("both, % of FedAvg in as many jobs", *(f"{100 * s['bytes_of_fedavg']:.0f}" for s in spent)),
                ("replies", *(f"{s['replies']} of {s['asked']}" for s in spent)),
                *(
                    (f"images trained on, {which}", *(f"{s[f'images_{which}']:,}" for s in spent))
                    for which in ("labeled", "unlabeled")
                    if all(f"images_{which}" in s for s in spent)
                ),
                ("seconds", *(seconds(s["seconds"]) for s in spent)),
            ]
        notes = ["Metrics on the test set in percent; costs from the first round up to the column's."]
        if not self.finished:
            notes.append(f"{self.standing}.".capitalize())
        return Table(self.title, ("", *columns), tuple(rows), tuple(notes))

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Who holds what, as partition.json has it; where clients are elsewhere, only the classes are known."""
        elsewhere = self.directory / "federation.json"
        path = elsewhere if elsewhere.exists() else self.directory / "partition.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            if path == elsewhere:
                found = {"classes": found["terms"]["classes"], "clients": []}
            found["classes"] = [str(name) for name in found["classes"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path} is not a partition that can be read: {error}") from None
        return found

    @property
    def classes(self) -> list[str]:
        names: list[str] = self.partition["classes"]
        return names

    def plot(self, path: Path | str | None = None) -> "Figure":
        """Accuracy and AUC over the rounds, on test and on validation, and the round that validation chose."""
        from fewlabel.report import plots as figures

        return figures.saved(figures.course(self, "accuracy", "auc"), path)

    def report(self, path: Path | str | None = None) -> Path:
        """One self-contained page about this run; by default report.html in its directory."""
        from fewlabel.report.page import page_of_run

        return page_of_run(self, Path(path or self.directory / "report.html"))

    def __repr__(self) -> str:
        return f"Result({str(self.directory)!r}: {self.name}, seed {self.seed}, {self.standing})"

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


@dataclass(frozen=True)
class Row:
    """Runs of one experiment that differ in their seed alone."""

    label: str
    results: tuple[Result, ...]  # by seed

    @property
    def name(self) -> str:
        return self.results[0].name

    @cached_property
    def experiment(self) -> Experiment:
        return replace(self.results[0].experiment, seed=0)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(result.seed for result in self.results)

    @property
    def unfinished(self) -> dict[int, str]:
        """By seed, how far those runs are that are not at their end."""
        return {result.seed: result.standing for result in self.results if not result.finished}

    @cached_property
    def last(self) -> dict[str, Spread | None]:
        return self._spread([result.last for result in self.results])

    @cached_property
    def chosen(self) -> dict[str, Spread | None]:
        return self._spread([result.chosen for result in self.results])

    @staticmethod
    def _spread(lines: Sequence[dict[str, Any] | None]) -> dict[str, Spread | None]:
        tests = [line["test"] for line in lines if line and "test" in line]
        return {key: Spread.of(test[key] for test in tests) for key in METRICS}

    @cached_property
    def spent(self) -> dict[str, float]:
        """What a run cost, on average."""
        costs = [result.spent() for result in self.results]
        known = [key for key in costs[0] if all(key in cost for cost in costs)]
        return {key: statistics.fmean(cost[key] for cost in costs) for key in known}

    @cached_property
    def outside(self) -> dict[str, Spread | None]:
        """What is seen from outside in the last round measured: the clients' own models, and their pseudo-labels."""
        lines = [result.last or {} for result in self.results]
        pseudo = [line.get("pseudo_labels", {}) for line in lines]
        return {"local_accuracy": Spread.of(line.get("local_accuracy") for line in lines)} | {
            f"pseudo_label_{key}": Spread.of(labels.get(key) for labels in pseudo) for key in ("precision", "coverage")
        }

    def by_seed(self, metric: str = "accuracy") -> dict[int, float]:
        """A test metric in the last round measured, where it is known."""
        found = {result.seed: (result.last or {}).get("test", {}).get(metric) for result in self.results}
        return {seed: value for seed, value in found.items() if value is not None}

    def curve(self, pick: Callable[[Line], float | None]) -> dict[int, Spread]:
        """A number by round, over the seeds that have it in that round."""
        found: dict[int, list[float]] = {}
        for result in self.results:
            for line in result.rounds:
                if (value := pick(line)) is not None:
                    found.setdefault(line["round"], []).append(value)
        return {number: spread for number in sorted(found) if (spread := Spread.of(found[number]))}

    def to_json(self) -> dict[str, Any]:
        def plain(metrics: Mapping[str, Spread | None]) -> dict[str, Any]:
            return {key: asdict(spread) if spread else None for key, spread in metrics.items()}

        return {
            "name": self.name,
            "label": self.label,
            "data": self.experiment.data.name,
            "rounds": self.experiment.rounds,
            "seeds": list(self.seeds),
            "unfinished": {str(seed): standing for seed, standing in self.unfinished.items()},
            "last": plain(self.last),
            "chosen_on_validation": plain(self.chosen),
            **plain(self.outside),
            **self.spent,
            "directories": [str(result.directory) for result in self.results],
        }
