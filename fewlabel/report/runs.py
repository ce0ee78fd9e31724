"""Runs as data: what a run's directory holds, and the runs of one experiment over their seeds.

Every number comes from the last round measured, or from the round that validation chose: never from the best on test.
"""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.engine import record
from fewlabel.engine.record import Line
from fewlabel.experiment import ROWS, Experiment, load
from fewlabel.report import intervals
from fewlabel.report.findings import guesses
from fewlabel.report.tables import Spread

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

Pick = Callable[[Line], float | None]  # takes one number out of a round's line


def pick_test(key: str) -> Pick:
    """Return a function that picks a test metric from a round's line."""
    return lambda line: line.get("test", {}).get(key)


def pick_pseudo_labels(key: str) -> Pick:
    """Return a function that picks a number about pseudo-labels from a round's line."""
    return lambda line: line.get("pseudo_labels", {}).get(key)


class Run:
    """One run, finished or not, as its directory records it. Data only: `results.Result` adds tables and plots."""

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        if not record.is_run(self.directory):
            why = f"holds no run: it has no {record.EXPERIMENT}" if self.directory.exists() else "is not there"
            raise BadInput(f"{self.directory} {why}; give the directory of a run, or one with runs in it")
        self.experiment: Experiment = load(self.directory / record.EXPERIMENT).resolved
        self.name, self.seed = self.experiment.name, self.experiment.seed
        # The summary first: a run that ends meanwhile must not look finished without its last rounds.
        finished = record.is_finished(self.directory)
        self.summary: dict[str, Any] | None = record.read_summary(self.directory) if finished else None
        self.rounds: list[Line] = record.read_rounds(self.directory)

    @property
    def title(self) -> str:
        return f"{self.name} on {self.experiment.data.name}, seed {self.seed}"

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def status(self) -> str:
        """Either "finished", or how far the run is."""
        reached = self.rounds[-1]["round"] if self.rounds else 0
        return "finished" if self.finished else f"unfinished, round {reached} of {self.experiment.rounds}"

    @property
    def ended(self) -> str:
        """Why a finished run has fewer rounds than planned, as a sentence. It is empty if it has all."""
        return str((self.summary or {}).get("ended", ""))

    @cached_property
    def last(self) -> Line | None:
        """The line of the last round that was measured."""
        return record.last_measured(self.rounds)

    @cached_property
    def chosen(self) -> Line | None:
        """The line of the first round with the best balanced accuracy on validation."""
        return record.chosen_on_validation(self.rounds)

    def spent(self, until: int | None = None) -> dict[str, float]:
        """Add up what the rounds cost, by default all of them, and compare the bytes sent with FedAvg's."""
        return record.spent([line for line in self.rounds if until is None or line["round"] <= until])

    @cached_property
    def partition(self) -> dict[str, Any]:
        """Who holds which images, as in partition.json. Of a run over sites, only the classes are known."""
        of_sites = self.directory / record.FEDERATION
        path = of_sites if of_sites.exists() else self.directory / record.PARTITION
        try:
            found: dict[str, Any] = json.loads(path.read_text())
            if path == of_sites:
                found = {"classes": found["terms"]["classes"], "clients": []}
            found["classes"] = [str(name) for name in found["classes"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path} is not a partition that can be read: {error}") from None
        return found

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What to know about the run's data, as in notes.json. A run of an earlier version, or over sites, has none."""
        return record.read_notes(self.directory)

    @property
    def classes(self) -> list[str]:
        names: list[str] = self.partition["classes"]
        return names


@dataclass(frozen=True)
class Row:
    """Runs of one experiment that differ only in their seed: a row of a table, a curve of a plot."""

    label: str
    results: tuple[Run, ...]  # in the order of their seeds

    @property
    def name(self) -> str:
        return self.results[0].name

    @cached_property
    def experiment(self) -> Experiment:
        return replace(self.results[0].experiment, seed=0)

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(run.seed for run in self.results)

    @property
    def classes(self) -> list[str]:
        return self.results[0].classes

    @property
    def unfinished(self) -> dict[int, str]:
        """How far the unfinished runs are, by seed."""
        return {run.seed: run.status for run in self.results if not run.finished}

    @cached_property
    def last(self) -> dict[str, Spread | None]:
        """Test metrics of the last round measured."""
        return self._spread([run.last for run in self.results])

    @cached_property
    def guessing(self) -> tuple[int, ...]:
        """The seeds whose model guesses in the last round measured. A row that has any gets no rank."""
        return tuple(run.seed for run in self.results if guesses((run.last or {}).get("test", {})))

    @property
    def guesses(self) -> str:
        """Words for tables: empty, "guesses", or in how many of several seeds the model guesses."""
        some = f" in {len(self.guessing)} of {len(self.seeds)} seeds" if len(self.guessing) < len(self.seeds) else ""
        return f"guesses{some}" if self.guessing else ""

    @cached_property
    def chosen(self) -> dict[str, Spread | None]:
        """Test metrics of the rounds that validation chose."""
        return self._spread([run.chosen for run in self.results])

    @staticmethod
    def _spread(lines: Sequence[Line | None]) -> dict[str, Spread | None]:
        tests = [line["test"] for line in lines if line and "test" in line]
        return {key: Spread.of(test[key] for test in tests) for key in METRICS}

    @cached_property
    def spent(self) -> dict[str, float]:
        """What a run cost, on average over the seeds."""
        costs = [run.spent() for run in self.results]
        known = [key for key in costs[0] if all(key in cost for cost in costs)]
        return {key: statistics.fmean(cost[key] for cost in costs) for key in known}

    @cached_property
    def client_metrics(self) -> dict[str, Spread | None]:
        """The accuracy of the clients' own models and the quality of pseudo-labels, in the last round measured."""
        lines = [run.last or {} for run in self.results]
        pseudo = [line.get("pseudo_labels", {}) for line in lines]
        return {"local_accuracy": Spread.of(line.get("local_accuracy") for line in lines)} | {
            f"pseudo_label_{key}": Spread.of(labels.get(key) for labels in pseudo) for key in ("precision", "coverage")
        }

    def by_seed(self, metric: str = "accuracy") -> dict[int, float]:
        """Return a test metric of the last round measured, for each seed that has it."""
        found = {run.seed: (run.last or {}).get("test", {}).get(metric) for run in self.results}
        return {seed: value for seed, value in found.items() if value is not None}

    @cached_property
    def confusions(self) -> dict[int, intervals.Confusion]:
        """The counts of the last round measured, for each seed that has them. Sites keep theirs to themselves."""
        found = {run.seed: (run.last or {}).get("test", {}).get("confusion") for run in self.results}
        return {seed: counts for seed, counts in found.items() if counts and any(map(any, counts))}

    @cached_property
    def interval(self) -> dict[str, intervals.Interval]:
        """How far metrics of the last round may be off by chance, over test images and seeds."""
        return intervals.of(list(self.confusions.values())) if self.confusions else {}

    def above(self, other: "Row", metric: str = "balanced_accuracy") -> intervals.Difference | None:
        """Return how much better this row is than another in the seeds that both have, if their counts are known."""
        seeds = sorted(self.confusions.keys() & other.confusions.keys())
        if not seeds:
            return None
        ours, theirs = ([row.confusions[seed] for seed in seeds] for row in (self, other))
        return intervals.difference(ours, theirs, metric)

    @property
    def test_images(self) -> int | None:
        """How many images the last round was measured on. Sites tell a number that is rounded down."""
        found: int | None = (self.results[0].last or {}).get("test", {}).get("images")
        first = next(iter(self.confusions.values()), None)
        return sum(map(sum, first)) if first else found

    def curve(self, pick: Pick) -> dict[int, Spread]:
        """Return a number by round, over the seeds that have it in that round."""
        found: dict[int, list[float]] = {}
        for run in self.results:
            for line in run.rounds:
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
            "recipe": self.experiment.recipe_name,
            "seeds": list(self.seeds),
            "guessing_seeds": list(self.guessing),
            "unfinished": {str(seed): status for seed, status in self.unfinished.items()},
            "last": plain(self.last),
            "interval": {key: list(ends) for key, ends in self.interval.items()},
            "chosen_on_validation": plain(self.chosen),
            **plain(self.client_metrics),
            **self.spent,
            "directories": [str(run.directory) for run in self.results],
        }
