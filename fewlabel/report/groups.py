"""Groups of rows that can be compared: who is best, and which differences are more than chance.

The rows of a group share all settings except their method, name, seed and rounds: for equal work, one method may need
more rounds than another.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from fewlabel.core import schema
from fewlabel.core.errors import BadInput
from fewlabel.experiment import ROWS, Experiment, dumps
from fewlabel.report.intervals import ENOUGH
from fewlabel.report.runs import CEILING, FLOOR, Row, Run
from fewlabel.report.tables import Spread

EVERY_LABEL = {name for name, (_, every, _) in ROWS.items() if every}
# The settings that a row with every label changes. It is the ceiling of all groups that differ only in these.
LABELS = {"labels.at", "labels.fraction", "labels.per_class", "labels.server_per_class", "stream.data"}
WITHIN = ("name", "rounds", "method.", "evaluate.", "checkpoint.", "threads", "device")  # may differ within a group
SEEDS = ENOUGH  # a test of differences needs at least so many
NARROW = 0.05  # a smaller gap between floor and ceiling is no measure: shares of it are mostly chance
RANKED = ("accuracy", "balanced_accuracy", "auc")  # metrics of the last round whose best numbers are marked
KINDS = ("labeled", "unlabeled")


@dataclass(frozen=True)
class Group:
    """Rows that can be compared, the floor first and the ceiling last."""

    label: str  # the settings in which it differs from other groups
    rows: tuple[Row, ...]

    @cached_property
    def row_labels(self) -> list[str]:
        """The shortest labels that are clear within this group."""
        return short_labels([row.experiment for row in self.rows], only=("method.", "rounds"))

    @property
    def relabeled(self) -> list[Row]:
        """The rows, with the labels that are clear within this group."""
        return [replace(row, label=label) for row, label in zip(self.rows, self.row_labels, strict=True)]

    @property
    def candidates(self) -> list[Row]:
        """The rows that are ranked: all except the floor and those with every label."""
        return [row for row in self.rows if row.name != FLOOR and row.name not in EVERY_LABEL]

    def row_named(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    @cached_property
    def gap(self) -> tuple[float, float] | None:
        """The accuracy of the floor and of the ceiling, if the group has both."""
        found = [row and row.last["accuracy"] for row in (self.row_named(FLOOR), self.row_named(CEILING))]
        floor, ceiling = (spread.mean if spread else None for spread in found)
        return None if floor is None or ceiling is None else (floor, ceiling)

    @property
    def narrow(self) -> bool:
        """True if the gap between floor and ceiling is too small to measure rows by it."""
        return self.gap is not None and round(self.gap[1] - self.gap[0], 9) < NARROW

    def gap_closed(self, row: Row) -> float | None:
        """Return the share of the gap in accuracy between floor and ceiling that a candidate closes."""
        own = row.last["accuracy"]
        if row not in self.candidates or own is None or self.gap is None or self.narrow:
            return None
        floor, ceiling = self.gap
        return (own.mean - floor) / (ceiling - floor)

    @property
    def without_gap(self) -> bool:
        """True if floor and ceiling trained on as many labels, with the same result."""
        floor, ceiling = self.row_named(FLOOR), self.row_named(CEILING)
        if not floor or not ceiling or "images_labeled" not in floor.spent:
            return False
        alike = floor.spent["images_labeled"] == ceiling.spent.get("images_labeled")
        return alike and floor.by_seed() == ceiling.by_seed()

    def work(self, row: Row) -> float:
        """Return how many times as many images as the floor a candidate has trained on, or 1 if that is unknown."""
        floor = self.row_named(FLOOR)
        if not floor or row not in self.candidates:
            return 1.0
        own, least = (sum(one.spent.get(f"images_{kind}", 0.0) for kind in KINDS) for one in (row, floor))
        return own / least if own and least else 1.0

    def ranked(self, value: Callable[[Row], Spread | None]) -> tuple[set[Row], set[Row]]:
        """Return the best and the second best candidates. Of fewer than two candidates, none is best.

        A candidate that guesses is neither, and so is one below the floor, even if no other is better.
        """
        if len(self.candidates) < 2:
            return set(), set()
        floor = self.row_named(FLOOR)
        least = value(floor) if floor else None
        means = {row: mean for row, mean in self.means(value).items() if least is None or mean >= least.mean}
        order = sorted(set(means.values()), reverse=True)
        first = {row for row, mean in means.items() if order[:1] == [mean]}
        second = {row for row, mean in means.items() if order[1:2] == [mean]} if len(first) == 1 else set()
        return first, second

    def means(self, value: Callable[[Row], Spread | None]) -> dict[Row, float]:
        """Return the mean of each candidate that does not guess."""
        return {row: spread.mean for row in self.candidates if not row.guessing and (spread := value(row))}

    @property
    def below_floor(self) -> bool:
        """True if there is a choice of candidates, and some metric of one is below the floor's."""
        floor = self.row_named(FLOOR)
        if floor is None or len(self.candidates) < 2:
            return False
        pairs = [(floor.last[key], row.last[key]) for row in self.candidates for key in RANKED]
        return any(least and own and own.mean < least.mean for least, own in pairs)

    def p_values(self, other: Row | None) -> dict[Row, float]:
        """Test whether the accuracy of each candidate differs from another row's.

        A paired t-test over common seeds, two-sided, corrected by Holm for the number of candidates.
        """
        pairs = {row: paired(row.by_seed(), other.by_seed()) for row in self.candidates if other and row != other}
        return holm({row: p for row, p in pairs.items() if p is not None})

    @cached_property
    def p_to_floor(self) -> dict[Row, float]:
        return self.p_values(self.row_named(FLOOR))

    @cached_property
    def p_to_best(self) -> dict[Row, float]:
        means = self.means(lambda row: row.last["accuracy"]) if len(self.candidates) > 1 else {}
        best = [row for row, mean in means.items() if mean == max(means.values())]
        return self.p_values(best[0]) if len(best) == 1 else {}

    def other_differences(self) -> list[str]:
        """List the settings in which rows differ beside their method. The ceiling's labels do not count."""
        tables = [settings_of(row.experiment) for row in self.rows if row.name not in EVERY_LABEL]
        expected = ("name", "rounds", "method.", "checkpoint.")
        return [key for key in differing(tables) if not key.startswith(expected)]


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Return the p-value of a paired t-test over the seeds that both have, or None if they are too few."""
    from scipy.stats import ttest_rel

    seeds = sorted(one.keys() & other.keys())
    if len(seeds) < SEEDS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about differences that are all equal
        p = float(ttest_rel([one[seed] for seed in seeds], [other[seed] for seed in seeds]).pvalue)
    return 1.0 if p != p else p  # NaN: no difference at all


def holm(p_values: Mapping[Row, float]) -> dict[Row, float]:
    """Correct n p-values: multiply the smallest by n, the next by n - 1, and so on; none gets below one before it."""
    found, highest = {}, 0.0
    for position, (row, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, p * (len(p_values) - position)))
        found[row] = highest
    return found


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Make a row of all runs that differ only in their seed."""
    if not runs:
        raise BadInput("there is nothing to compare: no directory holds a run")
    by_experiment: dict[str, dict[int, Run]] = {}
    for run in runs:
        seeds = by_experiment.setdefault(dumps(replace(run.experiment, seed=0)), {})
        # A run made twice gave the same bits twice. Counted twice, it would make the spread look smaller.
        if run.seed not in seeds or len(run.rounds) > len(seeds[run.seed].rounds):
            seeds[run.seed] = run
    sorted_runs = [tuple(seeds[seed] for seed in sorted(seeds)) for seeds in join_rounds(by_experiment.values())]
    labels = short_labels([runs[0].experiment for runs in sorted_runs])
    return [Row(label, runs) for label, runs in zip(labels, sorted_runs, strict=True)]


def join_rounds(rows: Iterable[dict[int, Run]]) -> list[dict[int, Run]]:
    """Join rows of different seeds that differ only in rounds, as runs of equal work do."""
    found: dict[str, list[dict[int, Run]]] = {}
    for row in rows:
        one = next(iter(row.values())).experiment
        alike = found.setdefault(dumps(replace(one, seed=0, rounds=1, evaluate=replace(one.evaluate, every=1))), [])
        if other := next((known for known in alike if not known.keys() & row.keys()), None):
            other |= row
        else:
            alike.append(row)
    return [row for alike in found.values() for row in alike]


def groups_of(rows: Sequence[Row]) -> list[Group]:
    """Group rows that share their settings. A row with every label joins all groups that differ only in labels."""

    def key(row: Row, ignored: set[str]) -> str:
        table = settings_of(row.experiment)
        return repr({k: v for k, v in table.items() if not k.startswith(WITHIN) and k not in ignored})

    full = [row for row in rows if row.name in EVERY_LABEL]
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row not in full:
            groups.setdefault(key(row, set()), []).append(row)
    for row in full:
        own = [group for group in groups.values() if key(group[0], LABELS) == key(row, LABELS)]
        for group in own or [groups.setdefault(key(row, set()), [])]:
            group.append(row)
    for group in groups.values():
        group.sort(key=lambda row: 0 if row.name == FLOOR else 2 if row.name in EVERY_LABEL else 1)
    labels = short_labels([group[0].experiment for group in groups.values()], without=WITHIN)
    return [Group(label, tuple(group)) for label, group in zip(labels, groups.values(), strict=True)]


def settings_of(experiment: Experiment) -> dict[str, Any]:
    """Return all settings by their dotted names, except the seed. A recipe stands for its settings."""
    named = {} if experiment.recipe_name == "own" else {"recipe": experiment.recipe_name}
    flat = schema.flatten(schema.plain(experiment.resolved))
    return named | {key: value for key, value in flat if key != "seed" and not (named and key.startswith("train."))}


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """List the settings that are not the same in all tables."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]


def short_labels(
    experiments: Sequence[Experiment], only: tuple[str, ...] = ("",), without: tuple[str, ...] = ()
) -> list[str]:
    """Label each experiment by its name and the settings in which experiments of that name differ.

    With `only`, labels hold only settings that begin so. With `without`, they hold neither names nor settings that
    begin so.
    """
    labels = []
    tables = [settings_of(experiment) for experiment in experiments]
    for experiment, table in zip(experiments, tables, strict=True):
        names = [] if without else [experiment.name]
        keys = differing([other for other in tables if without or other["name"] == experiment.name])
        keys = [key for key in keys if key.startswith(only) and not key.startswith(without)]
        last = [key.rpartition(".")[2] for key in keys]
        short = {key: word if last.count(word) == 1 else key for key, word in zip(keys, last, strict=True)}
        values = {key: table.get(key, "none") for key in keys}
        parts = (str(v) if key.endswith(".name") else f"{short[key]}={v}" for key, v in values.items())
        labels.append(" ".join([*names, *parts]))
    return labels
