"""The tables of results: of one run, and of rows side by side between their floor and their ceiling."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fewlabel.core.described import conclusions
from fewlabel.experiment import USUAL, Experiment
from fewlabel.report import intervals
from fewlabel.report.findings import GUESSING, guesses, odd_updates, predicts_one_class
from fewlabel.report.groups import EVERY_LABEL, KINDS, NARROW, SEEDS, Group
from fewlabel.report.runs import CEILING, FLOOR, METRICS, Row, Run
from fewlabel.report.tables import Spread, Table, megabytes, percent, seconds

MOST_CLASSES = 12  # with more, a table of recalls is too long to read
LEVEL = 0.05  # of significance
GUESS = (
    f"balanced accuracy is less than {100 * GUESSING:.0f} points above that of a model that gives every image the same "
    "class"
)
FEW_TO_CHOOSE = 100  # validation images below which the round that they choose gets a note
MOST_SETTINGS = 3  # to name for a row
UNEQUAL = 0.5  # a row whose work differs from the floor's by more than this share gets a note


def run_table(run: Run, brackets: bool = False) -> Table:
    """Show the metrics and costs of a run, at its last round and at the one that validation chose.

    With `brackets`, 95 % intervals follow metrics, and recalls show how many images they stand for.
    """
    lines, columns = [], []
    if run.last:
        lines.append(run.last)
        columns.append(f"last round ({run.last['round']})")
    if run.chosen:
        lines.append(run.chosen)
        columns.append(f"chosen on validation ({run.chosen['round']})")
    counts = [line.get("test", {}).get("confusion") if brackets else None for line in lines]
    both = list(zip(lines, counts, strict=True))
    rows = [
        (words, *(percent(line.get("test", {}).get(key)) + intervals.bracket(key, c) for line, c in both))
        for key, words in METRICS.items()
    ]
    rows += [
        (
            f"recall of {name}",
            *(
                percent(line["test"]["recall_per_class"][n]) + (f" ({c[n][n]} of {sum(c[n])})" if c else "")
                for line, c in both
            ),
        )
        for n, name in enumerate(run.classes if len(run.classes) <= MOST_CLASSES else [])
        if run.last and "test" in run.last
    ]
    rows.append(("clients' own models: accuracy", *(percent(line.get("local_accuracy")) for line in lines)))
    for key in ("coverage", "precision"):
        rows.append((f"pseudo-labels: {key}", *(percent(line.get("pseudo_labels", {}).get(key)) for line in lines)))
    rows = [row for row in rows if set(row[1:]) - {percent(None)}]
    spent = [run.spent(line["round"]) for line in lines]
    if spent:
        rows += [
            ("sent by clients, MB", *(megabytes(s["bytes_up"]) for s in spent)),
            ("sent to clients, MB", *(megabytes(s["bytes_down"]) for s in spent)),
            ("a reply, % of FedAvg's", *(f"{100 * s['bytes_of_fedavg']:.0f}" for s in spent)),
            ("replies", *(f"{s['replies']} of {s['asked']}" for s in spent)),
            *(
                (f"images trained on, {kind}", *(f"{s[f'images_{kind}']:,}" for s in spent))
                for kind in KINDS
                if all(f"images_{kind}" in s for s in spent)
            ),
            ("seconds", *(seconds(s["seconds"]) for s in spent)),
        ]
    notes = conclusions(run.experiment.method, run.rounds)
    notes += ["Metrics are on the test set, in percent. Costs add up from round 1 to the column's round."]
    if epsilon := max((line.get("epsilon", 0) for line in run.rounds), default=0):
        notes.append(f"Differential privacy of each image: a site spent epsilon {epsilon:.3g} at most.")
    if any(counts):
        notes.append(intervals.about(1))
    if run.chosen and run.chosen != run.last and 0 < (few := run.chosen["validation"].get("images", 0)) < FEW_TO_CHOOSE:
        notes.append(f"Only {few} images chose the round on validation, so luck has a say: trust the last round more.")
    if run.last and predicts_one_class(run.last):
        notes.append("The model predicts the same class for every image.")
    elif run.last and guesses(run.last.get("test", {})):
        notes.append(f"The model guesses: {GUESS}.")
    notes.append(about_recipes([run.experiment]))
    if odd := odd_updates(run.rounds):
        notes.append(f"Odd updates: {odd}. The field `suspects` of rounds.jsonl says why.")
    if not run.finished:
        notes.append(f"{run.status}.".capitalize())
    if run.ended:
        notes.append(run.ended)
    images = Row(run.name, (run,)).test_images if brackets else None
    title = f"{run.title}: {images:,} test images" if images else run.title
    return Table(title, ("", *columns), tuple(rows), tuple(notes))


@dataclass(frozen=True)
class Column:
    """A column of the table of rows: how to write its cells, and the numbers to rank them by, if they are ranked."""

    heading: str
    cell: Callable[[Group, Row], str]
    number: Callable[[Row], Spread | None] | None = None


def metric(heading: str, pick: Callable[[Row], Spread | None], ranked: bool = True) -> Column:
    return Column(heading, lambda _, row: str(pick(row) or percent(None)), pick if ranked else None)


def measured(heading: str, key: str) -> Column:
    """Return a column of a metric with its spread over seeds or, if no row has several, its interval over images."""

    def cell(group: Group, row: Row) -> str:
        spread, ends = row.last[key], row.interval.get(key)
        if not spread or not ends or any(len(other.seeds) > 1 for other in group.rows):
            return str(spread or percent(None))
        return str(Spread(spread.mean, (ends[1] - ends[0]) / 2))

    return Column(heading, cell, lambda row: row.last[key])


def p_value(p: float | None) -> str:
    return "–" if p is None else "<0.001" if p < 0.001 else f"{p:.3f}"


def gap_closed(group: Group, row: Row) -> str:
    share = group.gap_closed(row)
    return "–" if share is None else f"{100 * share:.0f}"


def above_floor(group: Group, row: Row) -> str:
    floor, own = group.row_named(FLOOR), row.last["accuracy"]
    least = floor.last["accuracy"] if floor and floor is not row else None
    return "–" if own is None or least is None else f"{100 * (own.mean - least.mean):+.1f}"


def thousands(count: float) -> str:
    """Write a number of images in thousands. Few images are not nothing."""
    if 0 < count < 50:
        return "<0.1"
    return f"{count / 1e3:,.1f}" if 0 < count < 9_950 else f"{count / 1e3:,.0f}"


def trained(row: Row) -> str:
    """Thousands of labeled and unlabeled images. Sites on other machines do not count them."""
    counts = [row.spent[f"images_{kind}"] for kind in KINDS if f"images_{kind}" in row.spent]
    return " + ".join(map(thousands, counts)) or "–"


def sent(row: Row) -> str:
    both = row.spent["bytes_up"] + row.spent["bytes_down"]
    return f"{megabytes(both)} ({100 * row.spent['bytes_of_fedavg']:.0f}%)"


OWN_MODELS = "clients' own models: accuracy"
COLUMNS = (
    measured("accuracy", "accuracy"),
    Column("above floor", above_floor),
    Column("gap closed, %", gap_closed),
    Column("p, to floor", lambda group, row: p_value(group.p_to_floor.get(row))),
    Column("p, to best", lambda group, row: p_value(group.p_to_best.get(row))),
    measured("balanced acc.", "balanced_accuracy"),
    metric("AUC", lambda row: row.last["auc"]),
    metric("chosen round: accuracy", lambda row: row.chosen["accuracy"]),
    metric(OWN_MODELS, lambda row: row.client_metrics["local_accuracy"], ranked=False),
    metric("pseudo-labels: precision", lambda row: row.client_metrics["pseudo_label_precision"], ranked=False),
    metric("pseudo-labels: coverage", lambda row: row.client_metrics["pseudo_label_coverage"], ranked=False),
    Column("images, thousands", lambda _, row: trained(row)),
    Column("sent, MB (of FedAvg)", lambda _, row: sent(row)),
    Column("sec.", lambda _, row: seconds(row.spent["seconds"])),
)
ALWAYS = ("accuracy", "balanced acc.", "AUC", "chosen round: accuracy")
MAIN = ("accuracy", "gap closed, %", "balanced acc.", "AUC", OWN_MODELS, "images, thousands")


def columns_of(groups: Sequence[Group], every: bool = True) -> list[Column]:
    """Return the columns that have something to show, and those that are always shown; or only the main ones."""
    shown = []
    for column in COLUMNS:
        if column.heading == OWN_MODELS and all(row.last["accuracy"] for group in groups for row in group.rows):
            continue  # all rows share a model, and that one counts
        cells = {column.cell(group, row) for group in groups for row in group.rows}
        if column.heading in ALWAYS or cells != {"–"}:
            shown.append(column)
    if every:
        return shown
    names = [column.heading for column in shown]
    main = MAIN if "gap closed, %" in names else (*MAIN, "above floor")  # one of the two will do
    return [column for column in shown if column.heading in main]


def distinct_rows(groups: Sequence[Group]) -> list[Row]:
    """List the rows of all groups. A row with every label may be in several groups, and is listed once."""
    return list(dict.fromkeys(row for group in groups for row in group.rows))


def values_of(groups: Sequence[Group], pick: Callable[[Experiment], object]) -> str:
    """Name the different values that experiments have, such as those of `rounds`."""
    return ", ".join(dict.fromkeys(str(pick(row.experiment)) for row in distinct_rows(groups)))


def comparison_tables(groups: Sequence[Group], every: bool = True) -> list[Table]:
    """Return the table of all numbers, or of the main ones. With several groups, the overview comes before it."""
    table = results_table(groups, every)
    return [table] if len(groups) == 1 else [overview(groups), table]


def results_table(groups: Sequence[Group], every: bool = True) -> Table:
    """Show all numbers of every row, or only the main ones."""
    return table_of(groups, columns_of(groups, every), list(notes(groups) if every else main_notes(groups)))


def table_of(groups: Sequence[Group], columns: Sequence[Column], notes: Sequence[str]) -> Table:
    """Show these columns of every row."""
    lines = [(group, row) for group in groups for row in group.rows]
    cells = {column: [column.cell(group, row) for group, row in lines] for column in columns}
    labels = [label_of(row) for group in groups for row in group.relabeled]
    best, second = set[tuple[int, int]](), set[tuple[int, int]]()
    for number, column in enumerate(cells, 1):
        for group in groups:
            first, next_ = group.ranked(column.number) if column.number else (set(), set())
            own = [(n, row) for n, (its, row) in enumerate(lines) if its is group]
            best |= {(n, number) for n, row in own if row in first}
            second |= {(n, number) for n, row in own if row in next_}
    several = len(groups) > 1
    return Table(
        f"Test results on {values_of(groups, lambda e: e.data.name)}, in percent",
        ("method", *(column.heading for column in cells)),
        tuple(zip(labels, *cells.values(), strict=True)),
        tuple(notes),
        frozenset(best),
        frozenset(second),
        tuple((n, group.label) for n, (group, row) in enumerate(lines) if several and row is group.rows[0]),
    )


def label_of(row: Row) -> str:
    """Return a row's label, with a mark if it is unfinished and words if it guesses."""
    return f"{row.label}{'*' if row.unfinished else ''}{f' ({row.guesses})' if row.guesses else ''}"


def overview(groups: Sequence[Group]) -> Table:
    """Show accuracy only: a row for each method, a column for each group."""
    labels = list(dict.fromkeys(label for group in groups for label in group.row_labels))
    labels.sort(key=lambda label: label in EVERY_LABEL)  # last
    rows = [[label] for label in labels]
    best, second = set[tuple[int, int]](), set[tuple[int, int]]()
    for number, group in enumerate(groups, 1):
        own = dict(zip(group.row_labels, group.rows, strict=True))
        first, next_ = group.ranked(lambda row: row.last["accuracy"])
        for n, label in enumerate(labels):
            row = own.get(label)
            cell = str((row.last["accuracy"] if row else None) or "–")
            rows[n].append(f"{cell} ({row.guesses})" if row and row.guesses else cell)
            best |= {(n, number)} if own.get(label) in first else set()
            second |= {(n, number)} if own.get(label) in next_ else set()
    title = f"Test accuracy on {values_of(groups, lambda e: e.data.name)}, in percent"
    columns = ("method", *(group.label for group in groups))
    return Table(title, columns, tuple(map(tuple, rows)), (), frozenset(best), frozenset(second))


def notes(groups: Sequence[Group]) -> Iterator[str]:
    """Yield the sentences below the table: what its columns mean, then what makes rows hard to compare."""
    rows = distinct_rows(groups)
    yield about_rounds(groups, rows)
    if len(rows) > 1:
        yield about_differences(groups)
    yield about_recipes([row.experiment for row in rows])
    yield "The chosen round is the one with the best balanced accuracy on validation."
    yield from about_gap(groups)
    if any(row.client_metrics["pseudo_label_coverage"] for row in rows):
        yield (
            "Pseudo-labels: precision is the share that is right; coverage is the share of unlabeled images that have "
            "one."
        )
    yield from about_images(rows)
    yield "Sent: upload plus download; the percentage compares it with FedAvg for as many local trainings."
    yield from warnings(groups, rows)
    yield from about_conclusions(rows)


def main_notes(groups: Sequence[Group]) -> Iterator[str]:
    """Yield at most three notes: what the numbers are, what columns mean, and what makes rows hard to compare."""
    rows = distinct_rows(groups)
    yield f"{about_rounds(groups, rows)} {about_recipes([row.experiment for row in rows])}"
    for part in ([*about_gap(groups), *about_images(rows)], [*warnings(groups, rows), *about_conclusions(rows, False)]):
        if part:
            yield " ".join(part)


def warnings(groups: Sequence[Group], rows: Sequence[Row]) -> Iterator[str]:
    """Yield what makes rows hard to compare."""
    yield from about_unequal_work(groups)
    yield from about_guessing(rows)
    if any(group.below_floor for group in groups):
        yield f"What is below {FLOOR} has no rank."
    yield from about_suspects(rows)
    if len({len(row.seeds) for row in rows}) > 1:
        counts = ", ".join(f"{row.label} {len(row.seeds)}" for row in rows)
        yield f"Rows differ in their number of seeds: {counts}."
    if others := list(dict.fromkeys(key for group in groups for key in group.other_differences())):
        yield f"Rows differ in more than their method: {', '.join(others)}."
    for row in rows:
        for seed, status in row.unfinished.items():
            yield f"* {row.label}, seed {seed}: {status}."
        for run in row.results:
            if run.ended:
                yield f"* {row.label}, seed {run.seed}: {run.ended}"


def about_conclusions(rows: Sequence[Row], every: bool = True) -> Iterator[str]:
    """Tell what methods conclude about their own runs: of each seed, or in short if there are several."""
    for row in rows:
        found = [(run.seed, text) for run in row.results for text in conclusions(run.experiment.method, run.rounds)]
        if every or len(found) < 2:
            yield from (f"{row.label}, seed {seed}: {text}" for seed, text in found)
        else:
            seeds = defaultdict[str, list[int]](list)
            for seed, text in found:
                seeds[text.partition(": ")[0]].append(seed)
            each = (f"{text} (seed{'s'[: len(of) > 1]} {', '.join(map(str, of))})" for text, of in seeds.items())
            yield f"{row.label}: {'. '.join(each)}."


def about_images(rows: Sequence[Row]) -> Iterator[str]:
    if any(trained(row) != "–" for row in rows):
        yield "Images: those trained on, labeled + unlabeled."


def about_rounds(groups: Sequence[Group], rows: Sequence[Row]) -> str:
    seeds = sorted({seed for row in rows for seed in row.seeds})
    several = any(len(row.seeds) > 1 for row in rows)
    of = "Mean ± standard deviation of seeds" if several else "Seed" if len(seeds) == 1 else "Seeds"
    rounds = values_of(groups, lambda e: e.rounds)
    plural = "" if rounds == "1" else "s"
    counted = f"{of} {', '.join(map(str, seeds))}; {rounds} round{plural}."
    shown = not several and any(row.interval for row in rows)
    margin = " ± is a 95 % interval over test images." if shown else ""
    return f"{counted} Metrics are of the last round, never of the best one on test.{margin}"


def about_recipes(experiments: Sequence[Experiment]) -> str:
    """Name the recipe by which models were trained, and the settings of sites that someone set otherwise."""
    found = list(dict.fromkeys(experiment.recipe for experiment in experiments))
    changed = about_sites(experiments)
    if len(found) > 1:
        return f"Recipes: {', '.join(dict.fromkeys(experiment.recipe_name for experiment in experiments))}.{changed}"
    return f"Recipe {experiments[0].recipe_name}: {found[0].words}.{changed}"


def about_sites(experiments: Sequence[Experiment]) -> str:
    """Say which rows of our recipe train their sites otherwise, and in which settings."""
    from fewlabel.methods.recipe import own_sites

    names = dict[str, None]()
    for experiment in experiments:
        keys = own_sites(experiment.method, USUAL) if experiment.recipe_name == USUAL else []
        if keys:
            more = f" and {len(keys) - MOST_SETTINGS} more" if keys[MOST_SETTINGS:] else ""
            shown = ", ".join(f"method.{key}" for key in keys[:MOST_SETTINGS])
            names[f"{experiment.name} ({shown}{more})"] = None
    return f" Not as the recipe trains sites: {'; '.join(names)}." if names else ""


def about_differences(groups: Sequence[Group]) -> str:
    if not any(group.p_to_floor or group.p_to_best for group in groups):
        return f"Too few seeds to tell a difference from chance: that takes {SEEDS} or more."
    return (
        f"p: two-sided paired t-test of accuracy over common seeds ({SEEDS} or more), with Holm's correction. Below "
        f"{LEVEL}, a difference is hardly chance."
    )


def about_gap(groups: Sequence[Group]) -> Iterator[str]:
    """Say what the gap closed is, or why none is shown."""
    if any(group.gap_closed(row) is not None for group in groups for row in group.rows):
        yield f"Gap closed: 0 is as accurate as {FLOOR}, the floor; 100 is as accurate as {CEILING}, the ceiling."

    def where(without: list[Group]) -> str:
        return f" in {'; '.join(group.label for group in without)}" if len(groups) > 1 else ""

    if equal := [group for group in groups if group.without_gap]:
        yield f"No gap to close{where(equal)}: {CEILING} has no more labels than {FLOOR}."
    if narrow := [group for group in groups if group.narrow and group.candidates and group not in equal]:
        points = f"{100 * NARROW:.0f} points"
        yield f"No gap closed{where(narrow)}: {CEILING} is less than {points} more accurate than {FLOOR}."


def about_unequal_work(groups: Sequence[Group]) -> Iterator[str]:
    ratios = {
        row.label: ratio
        for g in groups
        for row in g.rows
        if max(ratio := g.work(row), 1 / max(ratio, 1e-9)) > 1 + UNEQUAL
    }
    if ratios:
        (label, ratio), *others = ratios.items()
        more = "".join(f", {other} on {its:.1f}" for other, its in others)
        yield f"Unequal work: {label} trained on {ratio:.1f}{more} times as many images as {FLOOR}."


def about_suspects(rows: Sequence[Row]) -> Iterator[str]:
    """Name the clients whose updates were odd."""
    odd = [
        f"{row.label}, seed {run.seed}: {text}"
        for row in rows
        for run in row.results
        if (text := odd_updates(run.rounds))
    ]
    if odd:
        yield f"Odd updates, by rounds.jsonl: {' | '.join(odd)}."


def about_guessing(rows: Sequence[Row]) -> Iterator[str]:
    if any(row.guessing for row in rows):
        yield f"Guesses: {GUESS}. Such a row has no rank."
    constant = {row: [run.seed for run in row.results if run.last and predicts_one_class(run.last)] for row in rows}
    names = [
        f"{row.label} (seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))})"
        for row, seeds in constant.items()
        if seeds
    ]
    if names:
        yield f"These models predict the same class for every image: {', '.join(names)}."
