"""Runs side by side: methods in one or more settings, between their floor and their ceiling.

A setting is all of an experiment but its method, seed, name and rounds, as equal work may take one method more rounds
than another. Methods are compared within one: the best and the
second, how much of the gap between floor and ceiling each closes, and which differences are more than chance.
"""

import csv
import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core import schema
from fewlabel.core.errors import BadInput
from fewlabel.experiment import ROWS, Experiment, dumps
from fewlabel.report.results import CEILING, FLOOR, Result, Row
from fewlabel.report.tables import Spread, Table, megabytes, percent, seconds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EVERY_LABEL = {name for name, (_, every, _) in ROWS.items() if every}
# What a row with every label changes in its experiment; it is the ceiling of all settings that differ in this alone.
LABELS = {"labels.at", "labels.fraction", "labels.per_class", "labels.server_per_class", "stream.data"}
NO_SETTING = ("name", "rounds", "method.", "evaluate.", "checkpoint.", "threads", "device")
SEEDS = 5  # with fewer, a test of differences says little
LEVEL = 0.05
NARROW = 0.01  # a gap between floor and ceiling of which no share is told
UNEQUAL = 0.5  # by how much of the floor's work a row may differ from it untold
KINDS = ("labeled", "unlabeled")


def found_in(directory: Path) -> "Result | Comparison":
    """The run in a directory, or all runs below it side by side."""
    runs = runs_in(directory)
    return Comparison([Result(run) for run in runs]) if runs else Result(directory)


def runs_in(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob("*/experiment.toml"))


@dataclass(frozen=True)
class Group:
    """Rows that can be compared, the floor first and the ceiling last."""

    words: str  # that tell it from other settings
    rows: tuple[Row, ...]

    @cached_property
    def names(self) -> list[str]:
        return labels([row.experiment for row in self.rows], only=("method.", "rounds"))

    @property
    def candidates(self) -> list[Row]:
        return [row for row in self.rows if row.name != FLOOR and row.name not in EVERY_LABEL]

    def bound(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    def gap_closed(self, row: Row) -> float | None:
        """The share of the gap in accuracy between floor and ceiling."""
        found = [each and each.last["accuracy"] for each in (self.bound(FLOOR), row, self.bound(CEILING))]
        floor, own, ceiling = (spread.mean if spread else None for spread in found)
        if row not in self.candidates or floor is None or own is None or ceiling is None or ceiling - floor < NARROW:
            return None
        return (own - floor) / (ceiling - floor)

    @property
    def gapless(self) -> bool:
        """Whether floor and ceiling trained on as many labels, and so on the same, to the same end."""
        floor, ceiling = self.bound(FLOOR), self.bound(CEILING)
        if not floor or not ceiling or "images_labeled" not in floor.spent:
            return False
        alike = floor.spent["images_labeled"] == ceiling.spent.get("images_labeled")
        return alike and floor.by_seed() == ceiling.by_seed()

    def work(self, row: Row) -> float:
        """How many times as many images as the floor a candidate has trained on; 1 where that is not known."""
        floor = self.bound(FLOOR)
        if not floor or row not in self.candidates:
            return 1.0
        own, least = (sum(one.spent.get(f"images_{kind}", 0.0) for kind in KINDS) for one in (row, floor))
        return own / least if own and least else 1.0

    def ranked(self, value: Callable[[Row], Spread | None]) -> tuple[set[Row], set[Row]]:
        """The best and the second of the candidates; none where there is no choice."""
        means = {row: spread.mean for row in self.candidates if (spread := value(row))}
        if len(self.candidates) < 2:
            return set(), set()
        order = sorted(set(means.values()), reverse=True)
        first = {row for row, mean in means.items() if order[:1] == [mean]}
        second = {row for row, mean in means.items() if order[1:2] == [mean]} if len(first) == 1 else set()
        return first, second

    def chances(self, other: Row | None) -> dict[Row, float]:
        """By candidate, the chance of a difference in accuracy to another row as large as this, if there were none.

        A paired t-test over common seeds, two-sided, corrected by Holm for as many candidates.
        """
        pairs = {row: paired(row.by_seed(), other.by_seed()) for row in self.candidates if other and row != other}
        return holm({row: chance for row, chance in pairs.items() if chance is not None})

    @cached_property
    def to_floor(self) -> dict[Row, float]:
        return self.chances(self.bound(FLOOR))

    @cached_property
    def to_best(self) -> dict[Row, float]:
        best, _ = self.ranked(lambda row: row.last["accuracy"])
        return self.chances(next(iter(best))) if len(best) == 1 else {}


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The p-value of a paired t-test over the seeds that both have; none of fewer than five."""
    from scipy.stats import ttest_rel

    seeds = sorted(one.keys() & other.keys())
    if len(seeds) < SEEDS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of differences that are all alike
        chance = float(ttest_rel([one[seed] for seed in seeds], [other[seed] for seed in seeds]).pvalue)
    return 1.0 if chance != chance else chance  # NaN: no difference at all


def holm(chances: Mapping[Row, float]) -> dict[Row, float]:
    """Corrected for their number: the smallest counts n-fold, the next (n - 1)-fold, none less than one before it."""
    found, highest = {}, 0.0
    for position, (row, chance) in enumerate(sorted(chances.items(), key=lambda item: item[1])):
        highest = max(highest, min(1.0, chance * (len(chances) - position)))
        found[row] = highest
    return found


@dataclass(frozen=True)
class Column:
    """A column of the table: its cells, and where they can be compared, their numbers."""

    heading: str
    cell: Callable[[Group, Row], str]
    number: Callable[[Row], Spread | None] | None = None


def metric(heading: str, pick: Callable[[Row], Spread | None], ranked: bool = True) -> Column:
    return Column(heading, lambda _, row: str(pick(row) or percent(None)), pick if ranked else None)


def chance(p: float | None) -> str:
    return "–" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


COLUMNS = (
    metric("accuracy", lambda row: row.last["accuracy"]),
    Column("gap closed, %", lambda setting, row: "–" if (g := setting.gap_closed(row)) is None else f"{100 * g:.0f}"),
    Column("p, to floor", lambda setting, row: chance(setting.to_floor.get(row))),
    Column("p, to best", lambda setting, row: chance(setting.to_best.get(row))),
    metric("balanced acc.", lambda row: row.last["balanced_accuracy"]),
    metric("AUC", lambda row: row.last["auc"]),
    metric("chosen round: accuracy", lambda row: row.chosen["accuracy"]),
    metric("clients' own models: accuracy", lambda row: row.outside["local_accuracy"], ranked=False),
    metric("pseudo-labels: precision", lambda row: row.outside["pseudo_label_precision"], ranked=False),
    metric("pseudo-labels: coverage", lambda row: row.outside["pseudo_label_coverage"], ranked=False),
    Column("images, thousands", lambda _, row: trained(row)),
    Column("sent, MB (of FedAvg)", lambda _, row: sent(row)),
    Column("sec.", lambda _, row: seconds(row.spent["seconds"])),
)
ALWAYS = ("accuracy", "balanced acc.", "AUC", "chosen round: accuracy")


def one_for_all(result: Result) -> bool:
    """Whether the model says one class of all test images."""
    recalls = (result.last or {}).get("test", {}).get("recall_per_class", [])
    return sorted(recall or 0.0 for recall in recalls)[-2:] == [0.0, 1.0]


def trained(row: Row) -> str:
    """Labeled and unlabeled images, unless their sites are elsewhere and do not tell."""
    counts = [row.spent[f"images_{kind}"] for kind in KINDS if f"images_{kind}" in row.spent]
    return " + ".join(f"{count / 1e3:,.0f}" for count in counts) or "–"


def sent(row: Row) -> str:
    both = row.spent["bytes_up"] + row.spent["bytes_down"]
    return f"{megabytes(both)} ({100 * row.spent['bytes_of_fedavg']:.0f}%)"


class Comparison:
    """Runs side by side: a row for each experiment, over its seeds, by setting."""

    def __init__(self, results: Sequence[Result]) -> None:
        if not results:
            raise BadInput("there is nothing to compare: no directory holds a run")
        groups: dict[str, dict[int, Result]] = {}
        for result in results:
            group = groups.setdefault(dumps(replace(result.experiment, seed=0)), {})
            # A run made twice gave the same bits twice; counted twice it would only seem to lower the spread.
            if result.seed not in group or len(result.rounds) > len(group[result.seed].rounds):
                group[result.seed] = result
        seeded = [tuple(group[seed] for seed in sorted(group)) for group in joined(groups.values())]
        names = labels([group[0].experiment for group in seeded])
        rows = [Row(label, group) for label, group in zip(names, seeded, strict=True)]
        self.settings = settings_of(rows)
        self.rows = list(dict.fromkeys(row for setting in self.settings for row in setting.rows))

    def tables(self) -> list[Table]:
        """All numbers; and before them, where there are several settings, methods by settings."""
        return [self.table()] if len(self.settings) == 1 else [self.overview(), self.table()]

    def table(self) -> Table:
        lines = [(setting, row) for setting in self.settings for row in setting.rows]
        cells = {column: [column.cell(setting, row) for setting, row in lines] for column in self._columns()}
        names = [name + self._star(row) for s in self.settings for name, row in zip(s.names, s.rows, strict=True)]
        best, second = set[tuple[int, int]](), set[tuple[int, int]]()
        for number, column in enumerate(cells, 1):
            for setting in self.settings:
                first, next_ = setting.ranked(column.number) if column.number else (set(), set())
                here = [(n, row) for n, (its, row) in enumerate(lines) if its is setting]
                best |= {(n, number) for n, row in here if row in first}
                second |= {(n, number) for n, row in here if row in next_}
        several = len(self.settings) > 1
        return Table(
            f"Test results on {self._said(lambda e: e.data.name)}, in percent",
            ("method", *(column.heading for column in cells)),
            tuple(zip(names, *cells.values(), strict=True)),
            tuple(self._notes()),
            frozenset(best),
            frozenset(second),
            tuple((n, s.words) for n, (s, row) in enumerate(lines) if several and row is s.rows[0]),
        )

    def _columns(self) -> list[Column]:
        """The columns that say something, and those that one would miss."""
        shown = []
        for column in COLUMNS:
            if column.heading.startswith("clients' own") and all(row.last["accuracy"] for row in self.rows):
                continue  # where all share a model, that is what counts
            found = {column.cell(setting, row) for setting in self.settings for row in setting.rows}
            if column.heading in ALWAYS or found != {"–"}:
                shown.append(column)
        return shown

    def _star(self, row: Row) -> str:
        return "*" if row.unfinished else ""

    def overview(self) -> Table:
        """Accuracy, methods by settings."""
        names = list(dict.fromkeys(name for setting in self.settings for name in setting.names))
        names.sort(key=lambda name: name in EVERY_LABEL)  # below, in whichever setting they are
        rows = [[name] for name in names]
        best, second = set[tuple[int, int]](), set[tuple[int, int]]()
        for number, setting in enumerate(self.settings, 1):
            here = dict(zip(setting.names, setting.rows, strict=True))
            first, next_ = setting.ranked(lambda row: row.last["accuracy"])
            for n, name in enumerate(names):
                rows[n].append(str((here[name].last["accuracy"] if name in here else None) or "–"))
                best |= {(n, number)} if here.get(name) in first else set()
                second |= {(n, number)} if here.get(name) in next_ else set()
        title = f"Test accuracy on {self._said(lambda e: e.data.name)}, in percent"
        columns = ("method", *(setting.words for setting in self.settings))
        return Table(title, columns, tuple(map(tuple, rows)), (), frozenset(best), frozenset(second))

    def _notes(self) -> Iterator[str]:
        seeds = sorted({seed for row in self.rows for seed in row.seeds})
        each = {len(row.seeds) for row in self.rows}
        counted = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
        spread = ", mean ± standard deviation" if max(each) > 1 else ""
        rounds = self._said(lambda e: e.rounds)
        rounds += " round" if rounds == "1" else " rounds"
        yield f"{rounds}; {counted}{spread}. Last round; never the best on test."
        if len(self.rows) > 1:
            yield self._tested()
        yield "The chosen round is the one with the best accuracy on validation."
        if any(setting.gap_closed(row) is not None for setting in self.settings for row in setting.rows):
            yield f"Gap closed: how far a method comes from the floor, {FLOOR}, to the ceiling, {CEILING}."
        if gapless := [setting.words for setting in self.settings if setting.gapless]:
            where = f" in {'; '.join(gapless)}" if len(self.settings) > 1 else ""
            yield f"No gap to close{where}: {CEILING} has no label that {FLOOR} lacks."
        if any(row.outside["pseudo_label_coverage"] for row in self.rows):
            yield "Of pseudo-labels, precision is the share that is right, coverage that of unlabeled images with one."
        images = "Images are those trained on, labeled + unlabeled. "
        yield (
            f"{images if any(trained(row) != '–' for row in self.rows) else ''}Sent counts both directions, and as a "
            "share of what FedAvg sends in as many jobs: a client that trains twice in a round is two jobs."
        )
        works = {row: ratio for s in self.settings for row in s.rows if abs((ratio := s.work(row)) - 1) > UNEQUAL}
        if works:
            told = ", ".join(f"{row.label} {ratio:.1f}" for row, ratio in works.items())
            yield f"Not equal work. Images trained on, in those of {FLOOR}: {told}."
        if guessing := [row.label for row in self.rows if any(map(one_for_all, row.results))]:
            yield f"One class is said of everything, in the last round of some seed: {', '.join(guessing)}."
        if len(each) > 1:
            yield (
                "Not every row has every seed: " + ", ".join(f"{row.label} {len(row.seeds)}" for row in self.rows) + "."
            )
        if unlike := list(dict.fromkeys(key for setting in self.settings for key in self._unlike(setting))):
            yield f"Not like with like: the rows also differ in {', '.join(unlike)}."
        for row in self.rows:
            for seed, standing in row.unfinished.items():
                yield f"* {row.label}, seed {seed}: {standing}."

    def _tested(self) -> str:
        if not any(setting.to_floor or setting.to_best for setting in self.settings):
            return f"Too few seeds to tell differences in accuracy from chance: that takes {SEEDS} or more."
        return (
            f"p: paired t-test of accuracy over common seeds ({SEEDS} or more, else –), two-sided, corrected by Holm "
            f"for the methods of a setting; below {LEVEL} a difference means something."
        )

    def _unlike(self, setting: Group) -> list[str]:
        """In what rows of a setting differ beside their method."""
        tables = [flat(row.experiment) for row in setting.rows if row.name not in EVERY_LABEL]
        return [key for key in differing(tables) if not key.startswith(("name", "rounds", "method.", "checkpoint."))]

    def _said(self, what: Callable[[Experiment], object]) -> str:
        return ", ".join(dict.fromkeys(str(what(row.experiment)) for row in self.rows))

    def to_json(self) -> list[dict[str, Any]]:
        """The raw numbers of each row in each setting, metrics as fractions."""
        return [
            row.to_json()
            | {
                "setting": setting.words,
                "gap_closed": setting.gap_closed(row),
                "p_to_floor": setting.to_floor.get(row),
                "p_to_best": setting.to_best.get(row),
            }
            for setting in self.settings
            for row in setting.rows
        ]

    def csv(self) -> str:
        """The same as a line for each row."""
        lines = [{key: value for key, value in walk(row, "_") if value is not None} for row in self.to_json()]
        file = io.StringIO()
        writer = csv.DictWriter(file, dict.fromkeys(key for line in lines for key in line), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {key: " ".join(map(str, value)) if isinstance(value, list) else value for key, value in line.items()}
            for line in lines
        )
        return file.getvalue()

    def plot(self, path: Path | str | None = None) -> "Figure":
        """Accuracy on test over the rounds: the mean over seeds, one standard deviation around it as a band."""
        from fewlabel.report import plots

        return plots.saved(plots.curves(self.rows, plots.test("accuracy"), "test accuracy, %"), path)

    def report(self, path: Path | str) -> Path:
        """One self-contained page: tables, plots, and what it takes to do it all again."""
        from fewlabel.report.page import page_of_many

        return page_of_many(self, Path(path))

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))

    def _repr_html_(self) -> str:
        return "".join(table.html() for table in self.tables())


def joined(groups: Iterable[dict[int, Result]]) -> list[dict[int, Result]]:
    """Those of other seeds that differ in rounds alone, as runs of equal work do, are one."""
    found: dict[str, list[dict[int, Result]]] = {}
    for group in groups:
        one = next(iter(group.values())).experiment
        alike = found.setdefault(dumps(replace(one, seed=0, rounds=1, evaluate=replace(one.evaluate, every=1))), [])
        if other := next((known for known in alike if not known.keys() & group.keys()), None):
            other |= group
        else:
            alike.append(group)
    return [group for alike in found.values() for group in alike]


def settings_of(rows: Sequence[Row]) -> list[Group]:
    """Rows by setting; one with every label is in all that differ from its own in their labels alone."""

    def key(row: Row, without: set[str]) -> str:
        table = flat(row.experiment)
        return repr({k: v for k, v in table.items() if not k.startswith(NO_SETTING) and k not in without})

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
    words = labels([group[0].experiment for group in groups.values()], apart=NO_SETTING)
    return [Group(text, tuple(group)) for text, group in zip(words, groups.values(), strict=True)]


def walk(table: Mapping[str, Any], join: str = ".", above: str = "") -> Iterator[tuple[str, Any]]:
    """What is in tables in tables, by joined names."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from walk(value, join, f"{above}{key}{join}")
        else:
            yield above + key, value


def flat(experiment: Experiment) -> dict[str, Any]:
    """All settings by their dotted names, without the seed."""
    return {key: value for key, value in walk(schema.plain(experiment)) if key != "seed"}


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all of them."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]


def labels(experiments: Sequence[Experiment], only: tuple[str, ...] = ("",), apart: tuple[str, ...] = ()) -> list[str]:
    """A row's name, and the settings in which rows of that name differ, as short as they are clear.

    With `only`, just the settings that begin so; with `apart`, no name, and none of the settings that begin so.
    """
    found = []
    tables = [flat(experiment) for experiment in experiments]
    for experiment, table in zip(experiments, tables, strict=True):
        named = [] if apart else [experiment.name]
        keys = differing([other for other in tables if apart or other["name"] == experiment.name])
        keys = [key for key in keys if key.startswith(only) and not key.startswith(apart)]
        words = [key.rpartition(".")[2] for key in keys]
        short = {key: word if words.count(word) == 1 else key for key, word in zip(keys, words, strict=True)}
        values = {key: table.get(key, "none") for key in keys}
        told = (str(v) if key.endswith(".name") else f"{short[key]}={v}" for key, v in values.items())
        found.append(" ".join([*named, *told]))
    return found
