"""The smaller studies: what an attacker does, what privacy costs, what more labels bring. Their lines and tables.

    fewlabel sweep experiments/trust/labeled.toml --out runs/attacks
    python -m experiments.sides attacks runs/attacks
    fewlabel sweep experiments/private/pbc.toml --out runs/privacy
    python -m experiments.sides privacy runs/privacy
    python -m experiments.labels.study pbc --out runs/labels
    python -m experiments.sides labels runs/labels/pbc

`experiments.sides` adds a line to `docs/results/STUDY.csv` for each finished run of a folder. `make results` makes the
tables of docs/trust.md, docs/privacy.md and docs/label.md from these lines.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments import lines as stored
from experiments.beside import Line, box, score, seeds_of, shown
from experiments.plan import SEEDS
from fewlabel.engine import record
from fewlabel.experiment import Experiment
from fewlabel.report.results import Result
from fewlabel.report.runs import CEILING, FLOOR
from fewlabel.report.tables import Table

Place = tuple[str, str, str]  # table, row and column

SCORE = "last_balanced_accuracy"
OWN = "tutor"
DEFENCES = ("clip_median", "outlier", "largest_share")  # settings of `clients`, each a defence by itself
SUGGESTED = "these three together"
ATTACKS = ("none", "scale", "sign-flip", "label-flip", "noise", "false-counts", "huge")
EPSILONS = ("none", "8", "3", "1")
STRATEGIES = ("random", "least-certain", "uncertain-diverse")
TITLES = {
    "labeled": "One of four labeled sites attacks; labels alone: balanced accuracy on test, %",
    "unlabeled": "One of nine unlabeled sites attacks; SemiFL, one labeled site: balanced accuracy on test, %",
    "pbc": "Blood cells",
    "ham": "Skin lesions (HAM10000)",
}


# Lines.


def attack_place(experiment: Experiment, directory: Path) -> Place:
    clients, kind = experiment.clients, "labeled" if experiment.labels.clients != 1 else "unlabeled"
    found = [f"{name} = {getattr(clients, name):g}" for name in DEFENCES if getattr(clients, name)]
    if clients.aggregate != "mean":
        found = [clients.aggregate]
    defence = SUGGESTED if len(found) == len(DEFENCES) else ", ".join(found) or "none"
    return kind, defence, clients.attack.kind if clients.attack else "none"


def privacy_place(experiment: Experiment, directory: Path) -> Place:
    return "", "", f"{experiment.privacy.epsilon:g}" if experiment.privacy else "none"


def labels_place(experiment: Experiment, directory: Path) -> Place:
    """Read a run's place from its folder, as `experiments.labels.study` names it: tutor-least-certain-400-seed1."""
    *strategy, count = directory.name.removeprefix(f"{experiment.name}-").rsplit("-seed", 1)[0].split("-")
    return directory.parent.name, experiment.name, f"{'-'.join(strategy)} {count}"


PLACES: dict[str, Callable[[Experiment, Path], Place]] = {
    "attacks": attack_place,
    "privacy": privacy_place,
    "labels": labels_place,
}


def keep(study: str, directory: Path) -> int:
    """Add a line for each finished run in a folder, in the place of an earlier one. Return how many there are."""
    runs = [run for run in record.runs_in(directory) if record.is_finished(run)]
    for run in runs:
        stored.add(line_of(study, Result(run)))
    return len(runs)


def line_of(study: str, result: Result) -> dict[str, Any]:
    experiment, test = result.experiment, (result.last or {}).get("test", {})
    table, row, column = PLACES[study](experiment, result.directory)
    attackers = experiment.clients.attack.ids if experiment.clients.attack else ()
    named = [
        line["round"] for line in result.rounds if any(one["client"] in attackers for one in line.get("suspects", ()))
    ]
    return {
        "table": study,
        "cell": table,
        "row": f"{row}|{column}",
        "seed": experiment.seed,
        "settings": "",
        "rounds": experiment.rounds,
        **{f"last_{key}": stored.rounded(test.get(key)) for key in stored.METRICS},
        "attacker_named_in_round": named[0] if named else None,
        "experiment": stored.hash_of(experiment),
        "commit": stored.commit(),
    }


# Tables.


def found(study: str) -> dict[Place, list[Line]]:
    """The lines of a study by place, in the order of their seeds."""
    places: dict[Place, list[Line]] = {}
    for line in sorted(stored.read_lines(study), key=lambda line: int(line["seed"])):
        row, _, column = line["row"].partition("|")
        places.setdefault((line["cell"], row, column), []).append(line)
    return places


def seeds(lines: Iterable[Line]) -> str:
    known = sorted({int(line["seed"]) for line in lines})
    return f"{'Seed' if len(known) == 1 else 'Seeds'} {', '.join(map(str, known))}"


def attacks(kind: str) -> str:
    """What each attack does to each defence, and who is named."""
    here = {(row, column): lines for (cell, row, column), lines in found("attacks").items() if cell == kind}
    if not here:
        return ""
    columns = [name for name in ATTACKS if any(column == name for _, column in here)]
    defences = dict.fromkeys(row for row, _ in here)
    order = sorted(defences, key=lambda row: (row != "none", not row.startswith(DEFENCES), row != SUGGESTED, row))
    body = tuple((row, *(shown(here.get((row, column), ()), SCORE) for column in columns)) for row in order)
    every = [line for lines in here.values() for line in lines]
    attacked = [
        (column, line) for (row, column), lines in here.items() if row == "none" and column != "none" for line in lines
    ]
    unnamed = sorted({column for column, line in attacked if not line["attacker_named_in_round"]})
    words = [
        f"{seeds(every)}, {every[0]['rounds']} rounds. A difference of two or three points may be chance.",
        f"Without any defence the attacker is named in {len({column for column, _ in attacked} - {*unnamed})} of "
        f"{len({column for column, _ in attacked})} attacks"
        + (f", and not in: {', '.join(unnamed)}." if unnamed else "."),
    ]
    if survived := survivors(here, columns):
        words.append(survived)
    return Table(TITLES[kind], ("defence", *columns), body, tuple(words)).markdown()


def survivors(here: Mapping[tuple[str, str], Sequence[Line]], columns: Sequence[str]) -> str:
    """Say which defence loses least under its worst attack."""
    worst = {}
    for row in dict.fromkeys(row for row, _ in here):
        if all((row, column) in here for column in columns):
            worst[row] = min((score(here[row, column]), column) for column in columns)
    if len(worst) < 2:
        return ""
    best = max(worst, key=lambda row: worst[row][0])
    plain = f"; without a defence it is {worst['none'][0]:.0f} ({worst['none'][1]})" if "none" in worst else ""
    return f"The best worst case is that of `{best}`: {worst[best][0]:.0f} ({worst[best][1]}){plain}."


def privacy() -> str:
    """What each epsilon costs."""
    here = {column: lines for (_, _, column), lines in found("privacy").items()}
    if not here:
        return ""
    columns = ("epsilon", "balanced accuracy, %", "accuracy, %", "AUC, %")
    keys = ("last_balanced_accuracy", "last_accuracy", "last_auc")
    body = tuple(
        (f"{name}{seeds_of(here[name])}", *(shown(here[name], key) for key in keys))
        for name in EPSILONS
        if name in here
    )
    every = [line for lines in here.values() for line in lines]
    words = (
        f"{seeds(every)}, {every[0]['rounds']} rounds. `none` is the same training without noise. It shortens the "
        "gradient of a batch, and not that of each image.",
    )
    title = "Blood cells, ten sites with all labels: what differential privacy costs"
    return "\n\n".join(filter(None, (price(here), Table(title, columns, body, words).markdown())))


def price(here: Mapping[str, Sequence[Line]]) -> str:
    """Say what each epsilon costs in the seeds that it shares with `none`, and what training without it can reach."""
    free = {line["seed"]: line for line in here.get("none", ())}
    costs = []
    for name in EPSILONS[1:]:
        if both := [line for line in here.get(name, ()) if line["seed"] in free]:
            costs.append((name, score([free[line["seed"]] for line in both]) - score(both)))
    if not costs:
        return ""
    (first, cost), *others = costs
    said = [f"Epsilon {first} costs {cost:.1f} points of balanced accuracy"]
    said += [f"epsilon {name} {cost:.1f}" for name, cost in others]
    words = f"**{' and '.join(filter(None, (', '.join(said[:-1]), said[-1])))}**, against the same training without it."
    if ceiling := box().get("blood cells", {}).get(CEILING):
        more = score(ceiling) - score(here["none"])
        words += (
            " All rows train briefly, with a small network, and without the parts of FewLabel's recipe that privacy "
            f"refuses. `{CEILING}`, with the recipe and without privacy, [reaches {score(ceiling):.1f} %](RESULTS.md): "
            f"against that, each epsilon costs {more:.1f} points more."
        )
    return words


def labels(data: str) -> str:
    """What more labels bring, by strategy and number."""
    here = {(row, column): lines for (cell, row, column), lines in found("labels").items() if cell == data}
    if not here:
        return ""
    counts = sorted({int(column.rsplit(" ", 1)[1]) for _, column in here})
    body = []
    for method in (FLOOR, OWN):
        for strategy in STRATEGIES:
            columns = [f"{strategy} {count}" if count else "none 0" for count in counts]
            if any((method, column) in here for column in columns[1:]):
                body.append((method, strategy, *(cell(here.get((method, column), ())) for column in columns)))
    every = [line for lines in here.values() for line in lines]
    words = [f"Balanced accuracy on test, %. {seeds(every)}, {every[0]['rounds']} rounds."]
    words += [worth(here, counts), *best_strategy(here, counts[-1])]
    table = ("method", "strategy", *(f"{count} labels more" if count else "no more labels" for count in counts))
    return Table(TITLES[data], table, tuple(body), tuple(filter(None, words))).markdown()


def cell(lines: Sequence[Line]) -> str:
    return f"{shown(lines, SCORE)}{seeds_of(lines) if lines else ''}"


def best_strategy(here: Mapping[tuple[str, str], Sequence[Line]], count: int) -> list[str]:
    """Say how strategies differ at the largest number of labels, seed by seed."""
    words = []
    for method in (FLOOR, OWN):
        whole = [one for one in STRATEGIES if len(here.get((method, f"{one} {count}"), ())) == len(SEEDS)]
        means = {one: score(here[method, f"{one} {count}"]) for one in whole}
        if len(means) > 1 and "random" in means:
            best = max(means, key=lambda one: means[one])
            pairs = zip(here[method, f"{best} {count}"], here[method, f"random {count}"], strict=False)
            wins = [float(one[SCORE]) > float(two[SCORE]) for one, two in pairs]
            gain = (
                f"{means[best] - means['random']:+.1f} points against random, ahead in {sum(wins)} of {len(wins)} seeds"
            )
            words.append(f"{method}, {count} labels: {best} is best" + (f", {gain}." if best != "random" else "."))
    return words


def worth(here: Mapping[tuple[str, str], Sequence[Line]], counts: Sequence[int]) -> str:
    """Say how many labels buy what unlabeled images bring, on a straight line between the numbers that were tried."""
    if (FLOOR, "none 0") not in here or (OWN, "none 0") not in here:
        return ""
    if len(here[FLOOR, "none 0"]) != len(here[OWN, "none 0"]):
        return ""
    target, start = score(here[OWN, "none 0"]), score(here[FLOOR, "none 0"])
    gain = f"Without more labels, unlabeled images bring {target - start:+.1f} points ({OWN})"
    if target <= start:
        return f"{gain}."
    bought = {}
    for strategy in STRATEGIES:
        columns = [f"{strategy} {count}" if count else "none 0" for count in counts]
        if all((FLOOR, column) in here for column in columns):
            points = [(count, score(here[FLOOR, column])) for count, column in zip(counts, columns, strict=True)]
            bought[strategy] = reached(points, target)
    said = [
        f"{count:.0f} ({name})" if count is not None else f"more than {counts[-1]} ({name})"
        for name, count in bought.items()
    ]
    return f"{gain}; as many labels more do that for labels alone: {', '.join(said)}."


def reached(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return where a line through these points first reaches a value, or None if it never does."""
    for (low, before), (high, after) in pairwise(curve):
        if before < target <= after:
            return low + (high - low) * (target - before) / (after - before)
    return None


SECTIONS: dict[str, Callable[[], str]] = {
    "attacks-labeled": lambda: attacks("labeled"),
    "attacks-unlabeled": lambda: attacks("unlabeled"),
    "privacy-pbc": privacy,
    "labels-pbc": lambda: labels("pbc"),
    "labels-ham": lambda: labels("ham"),
}


if __name__ == "__main__":
    study, *folders = sys.argv[1:]
    if study not in PLACES:
        sys.exit(f"there is no study '{study}'; there are {', '.join(PLACES)}")
    for folder in folders:
        print(f"{folder}: {keep(study, Path(folder))} finished runs")
