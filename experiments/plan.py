"""What the study runs, in order: `experiments/results/*.toml` and the lines that are there already, as trials to run.

Everything follows from the lines: what is tuned next, which version of a method goes on, which rows are the best. So a
study that was stopped goes on where lines are missing. What chooses reads validation alone.
"""

import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import Any

from fewlabel.core.schema import plain
from fewlabel.experiment import Experiment, overlay, read
from fewlabel.report.runs import FLOOR

TABLES = Path(__file__).parent / "results"
MAIN = ("a-blood", "b-fashion", "c-ham", "d-pneumonia")
BOX = "o-box"
NETWORKS, DIGITS = "q-network", "r-digits"
UNTUNED = (BOX, "p-tutor", NETWORKS, DIGITS)
EVERY = (*UNTUNED, *MAIN, "h-printed", "g-parts", "i-labels", "e-sites", "f-gamma", "j-places")
SEEDS = (0, 1, 2)
TUNED_ON = 100  # the seed of all tuning, which no table has
# Keys that are no settings.
OWN_KEYS = ("title", "family", "tune", "tuned", "own", "ceiling", "only", "fewer", "as_printed")
SCORE = "last_validation_balanced_accuracy"

Line = Mapping[str, str]
Settings = tuple[str, ...]  # such as method.local.lr=0.01


@dataclass(frozen=True)
class Trial:
    """A run of a table, or of its tuning."""

    table: str
    cell: str
    row: str
    seed: int
    given: Mapping[str, Any] = field(repr=False, compare=False)  # the experiment's table
    settings: Settings = ()  # of tuning, those that are tried; of other rows, those that tuning chose
    fewer: int | None = None  # images that the labeled client keeps

    @property
    def tunes(self) -> bool:
        return self.table.startswith("tuning-")

    @property
    def key(self) -> tuple[str, ...]:
        """What its line is known by. The settings of a table follow from tuning."""
        return (self.table, self.cell, self.row, str(self.seed), " ".join(self.settings) if self.tunes else "")

    @property
    def words(self) -> str:
        said = [self.table, self.cell, self.row, f"seed {self.seed}", *(self.settings if self.tunes else ())]
        return " ".join(filter(None, said))

    def experiment(self, changes: Sequence[str] = ()) -> Experiment:
        return read(self.given, [*self.settings, f"seed={self.seed}", *changes])


def key_of(line: Line) -> tuple[str, ...]:
    tunes = line["table"].startswith("tuning-")
    return (line["table"], line["cell"], line["row"], line["seed"], line["settings"] if tunes else "")


@cache
def content(name: str) -> dict[str, Any]:
    """Read a table's file. `of` names another table that has everything this one does not say."""
    found = tomllib.loads((TABLES / f"{name}.toml").read_text())
    return {**content(found["of"]), "tuned": found["of"], **found} if "of" in found else {"tuned": name, **found}


@cache
def rows() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((TABLES / "rows.toml").read_text())["rows"]
    return found


@cache
def shares() -> tuple[float, ...]:
    return tuple(tomllib.loads((TABLES / "rows.toml").read_text())["rates"]["shares"])


def family(row: str) -> str:
    return str(rows()[row].get("family", row))


def families(own: bool = False) -> dict[str, list[str]]:
    """The versions of each method that is tuned, in the order of the rows; or of our own methods."""
    found: dict[str, list[str]] = {}
    for name, row in rows().items():
        if "tuned" not in row and bool(row.get("own")) == own:
            found.setdefault(family(name), []).append(name)
    return found


@cache
def given(table: str, row: str, cell: str = "") -> dict[str, Any]:
    """The experiment of a row, as a table for `read`."""
    about = content(table)
    if of := about.get("cells", {}).get(cell, {}).get("of"):
        more = {key: value for key, value in about["cells"][cell].items() if key not in ("of", *OWN_KEYS)}
        return dict(overlay(overlay(given(of, row), about.get("rows", {}).get(row, {})), more))
    parts = [about["experiment"], rows()[row], about.get("rows", {}).get(row, {}), about.get("cells", {}).get(cell, {})]
    if parts[-1].get("as_printed"):  # nothing of ours but the rounds
        parts[1:3] = [{}]
    whole: dict[str, Any] = reduce(overlay, parts, {"method": {"name": row}})
    return {key: value for key, value in whole.items() if key not in OWN_KEYS}


# Tuning.


def search(
    count: int, score: Callable[[int], float | None], over: Callable[[int], bool] = lambda place: False
) -> tuple[list[int], int | None]:
    """Try the middle three of ordered values, and the next one as long as the best is at the edge.

    Return the places still to try, and the place of the best if none is left. `score` is None for what has no line yet;
    if it is `over`, it failed and will have none. Of equals, the one nearer to the middle is best.
    """
    middle = count // 2
    tried = [place for place in (middle, middle - 1, middle + 1) if 0 <= place < count]
    while True:
        if missing := [place for place in tried if score(place) is None and not over(place)]:
            return missing, None
        known = [place for place in tried if score(place) is not None]
        if not known:
            return [], None
        best = max(known, key=lambda place: (score(place), -abs(place - middle)))
        beyond = best - 1 if best == min(tried) else best + 1 if best == max(tried) else -1
        if not 0 <= beyond < count or beyond in tried:
            return [], best
        tried.append(beyond)


class Tuning:
    """What lines say about the tuning of one table, and what is left to try."""

    def __init__(
        self,
        table: str,
        lines: Iterable[Line],
        failed: Iterable[tuple[str, ...]] = (),
        without: Sequence[str] = (),
    ) -> None:
        self.table, self.name = table, f"tuning-{table[0]}"
        self.scores = {key_of(line): float(line[SCORE]) for line in lines if line["table"] == self.name}
        self.failed, self.without = set(failed), without

    def trial(self, row: str, settings: Settings, cell: str = "") -> Trial:
        return Trial(self.name, cell, row, TUNED_ON, given(self.table, row), settings)

    def score(self, trial: Trial) -> float | None:
        return self.scores.get(trial.key)

    def search(self, trials: Sequence[Trial]) -> tuple[list[Trial], Trial | None]:
        missing, best = search(
            len(trials), lambda place: self.score(trials[place]), lambda place: trials[place].key in self.failed
        )
        return [trials[place] for place in missing], None if best is None else trials[best]

    def version(self, name: str) -> tuple[list[Trial], str | None]:
        """The version of a method that is the best at its usual rate."""
        tried = [self.trial(row, rates(self.table, row)[len(shares()) // 2]) for row in versions(name)]
        if len(tried) == 1:
            return [], name
        missing = [trial for trial in tried if self.score(trial) is None and trial.key not in self.failed]
        known = [trial for trial in tried if self.score(trial) is not None]
        if missing or not known:
            return missing, None
        return [], max(known, key=lambda trial: self.score(trial) or 0.0).row

    def rates(self, name: str) -> tuple[list[Trial], Trial | None]:
        """The trials of the rate of this version."""
        missing, row = self.version(name)
        return self.search([self.trial(row, rate) for rate in rates(self.table, row)]) if row else (missing, None)

    def values(self, name: str) -> tuple[list[Trial], Trial | None]:
        """The trials of the setting that matters most, at the best rate; the usual value has been tried with it."""
        missing, at = self.rates(name)
        if not at:
            return missing, None
        if not (tune := rows()[at.row].get("tune")):
            return [], at
        middle = len(tune["values"]) // 2
        found = [self.trial(at.row, (*at.settings, f"{tune['setting']}={value}")) for value in tune["values"]]
        return self.search([*found[:middle], at, *found[middle + 1 :]])

    def todo(self, own: bool) -> Iterator[Trial]:
        for name in families(own):
            yield from self.values(name)[0]

    def best(self, name: str) -> Trial | None:
        """What validation chose for a method, once its tuning is done."""
        missing, best = self.values(name)
        return None if missing else best

    def chosen(self, row: str, versions: bool = False) -> tuple[str, Settings] | None:
        """The version and the settings of a row. With `versions`, this very version, with as much of the usual rate."""
        row = rows()[row].get("tuned", row)
        best = self.best(family(row))
        if versions and best and best.row != row:
            same = zip(rates(self.table, best.row), rates(self.table, row), strict=True)
            return row, next(its for tuned, its in same if best.settings[: len(tuned)] == tuned)
        return (best.row, best.settings) if best else None

    def twice(self, own: bool) -> Iterator[Trial]:
        """Floor, best other and our own with twice the rounds: whether rounds are enough."""
        best = {name: self.best(name) for name in families(own) if name not in self.without}
        known = {name: trial for name, trial in best.items() if trial}
        if len(known) < len(best):
            return
        others = sorted((name for name in known if name != FLOOR), key=lambda name: -(self.score(known[name]) or 0.0))
        for name in [*([FLOOR] if FLOOR in known else []), *others[:1]]:
            rounds = 2 * content(self.table)["experiment"]["rounds"]
            yield self.trial(known[name].row, (*known[name].settings, f"rounds={rounds}"), "twice the rounds")


def versions(name: str) -> list[str]:
    return families()[name] if name in families() else families(own=True)[name]


@cache
def rates(table: str, row: str) -> tuple[Settings, ...]:
    """The rates to try, each with that of unlabeled images in its proportion."""
    local = plain(read(given(table, row)).method)["local"]
    usual = {key: local[key] for key in ("lr", "lr_unlabeled") if local.get(key) is not None}
    return tuple(
        tuple(f"method.local.{key}={float(f'{rate * share:.2g}'):g}" for key, rate in usual.items())
        for share in shares()
    )


# Tables.


def trials(
    table: str, tunings: Mapping[str, Tuning], lines: Iterable[Line], wanted: Callable[[str], bool]
) -> Iterator[Trial]:
    """The runs of the wanted rows of a table that tuning allows by now."""
    about, tuning = content(table), tunings.get(content(table)["tuned"])
    own_versions = about.get("versions", False)
    for cell, said in about.get("cells", {"": {}}).items():
        lost = {key[2] for key in tuning.failed if key[0] == about["tuned"]} if tuning else set()
        for name in names(table, said, lines, lost):
            if not wanted(name):
                continue
            found = (name, ()) if said.get("as_printed") or not tuning else tuning.chosen(name, own_versions)
            if found is None:
                continue
            version, settings = (name, found[1]) if "tuned" in rows()[name] else found
            base = given(table, version, cell)
            for row, changes in parts(about, name):
                for seed in about.get("seeds", SEEDS):
                    yield Trial(table, cell, row, seed, base, (*settings, *changes), said.get("fewer"))


def names(table: str, cell: Mapping[str, Any], lines: Iterable[Line], lost: Collection[str]) -> list[str]:
    """The rows of a cell: those that the table names, its best, or one for each method and the ceilings."""
    about = {**content(table), **cell}
    if only := about.get("only"):
        return list(only)
    usual = [name for name in rows() if family(name) == name]
    if "best" in about:
        return best_rows(usual, lines, lost, about["tuned"], about["best"])
    if "parts" in about:
        return [FLOOR, *about["parts"]]
    return [name for name in usual if name not in about.get("leave_out", ())]


def best_rows(usual: Sequence[str], lines: Iterable[Line], lost: Collection[str], table: str, count: int) -> list[str]:
    """Labels alone, and the rows with the best mean validation over all seeds, when all but the lost ones are done."""
    found: dict[str, list[float]] = {}
    for line in lines:
        if line["table"] == table:
            found.setdefault(line["row"], []).append(float(line[SCORE]))
    others = [name for name in usual if name != FLOOR and not rows()[name].get("ceiling")]
    whole = [name for name in others if len(found.get(name, ())) == len(SEEDS)]
    if [name for name in others if name not in whole and name not in lost and not rows()[name].get("own")]:
        return []
    return [FLOOR, *sorted(whole, key=lambda name: -sum(found[name]))[:count]]


def parts(about: Mapping[str, Any], name: str) -> Iterator[tuple[str, Settings]]:
    yield name, ()
    for part, changes in about.get("parts", {}).get(name, {}).items():
        yield f"{name}-{part}", tuple(changes)


def plan(
    tables: Sequence[str],
    lines: Sequence[Line],
    failed: Iterable[tuple[str, ...]] = (),
    without: Sequence[str] = (),
    later: Iterable[tuple[str, ...]] = (),
) -> Iterator[Trial]:
    """All trials that can be run by now, the first first. Of each stage, our own method comes last.

    Tuning goes on without what `failed`. What is for `later` is not tried now, and what depends on it waits.
    """
    failed = set(failed)
    lost = failed | {(table, "", row, "", "") for table in MAIN for row in without}
    tunings = {name: Tuning(name, lines, lost, without) for name in MAIN if content(name)["tuned"] == name}
    tuned = [name for name in dict.fromkeys(content(name)["tuned"] for name in tables) if name in tunings]

    def row_of(kind: str) -> Callable[[str], bool]:
        return lambda name: kind == next((key for key in ("own", "ceiling") if rows()[name].get(key)), "")

    def every() -> Iterator[Trial]:
        for name in (name for name in tables if name in UNTUNED):
            for kind in ("", "own", "ceiling"):
                yield from trials(name, tunings, lines, row_of(kind))
        for name in tuned:
            for own in (False, True):
                yield from tunings[name].todo(own)
        main = [name for name in tables if name in MAIN]
        for kind in ("", "own", "ceiling"):
            for name in main:
                yield from trials(name, tunings, lines, row_of(kind))
            if kind == "own":
                for name in tuned:
                    yield from (trial for own in (False, True) for trial in tunings[name].twice(own))
        for name in (name for name in tables if name not in (*UNTUNED, *MAIN)):
            for kind in ("", "own", "ceiling"):
                yield from trials(name, tunings, lines, row_of(kind))

    done = {key_of(line) for line in lines} | failed | set(later)
    for trial in every():
        if trial.key not in done and not any(trial.row == row or trial.row.startswith(f"{row}-") for row in without):
            yield trial
