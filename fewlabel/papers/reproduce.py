"""The papers' tables and figures: every row an experiment, and what it gives here beside what is printed there.

`papers/NAME.toml` is one table or figure: what all of its experiments share (`experiment`), what some of them share
(`groups`), and its `rows`. A row names the groups that it `use`s, in their order, and has settings of its own, which
win; `paper` holds what is printed there in percent, with the standard deviation where there is one, by the names of
`fewlabel.core.metrics`. A `note`, of the table, of a group or of a row, tells what is not the paper's.

Where a table has `cells`, every row stands in each of them, as CELL/ROW; a cell's `paper` and `passes` are by row.
`tuned` names a file beside the table's whose `rows` have the settings that validation chose; a row may say by `tuned`
which of them are its own. A table that gives `images` in place of rounds has runs of equal work: a row's `passes` say
how often its rounds pass over labeled and over unlabeled images. `of` names a table beside this one that has what this
one does not say.
"""

import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.errors import BadInput, FewLabelError, unknown
from fewlabel.experiment import Experiment, dumps, overlay, read
from fewlabel.report.page import again, versions
from fewlabel.report.plots import about_sections, left_out, plots
from fewlabel.report.results import METRICS, Result, Row
from fewlabel.report.style import write_page
from fewlabel.report.tables import Spread, Table

if TYPE_CHECKING:
    from rich.table import Table as RichTable

FOLDER = Path(__file__).parent  # inside the package, so that a clone and a wheel both have it
WORDS = {
    **METRICS,
    "binary_accuracy": "accuracy, binary",
    "binary_sensitivity": "sensitivity, binary",
    "binary_specificity": "specificity, binary",
    "binary_f1": "F1, binary",
    "local_accuracy": "local accuracy",
    "labeled_accuracy": "accuracy on own labels",
    "sent": "numbers sent",
    "bytes_sent": "bytes sent",
}
USUAL = ("accuracy", "auc")  # shown of rows of which no number is printed


@dataclass(frozen=True)
class Printed:
    """A number as the paper has it, in percent."""

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:g}" if self.std is None else f"{self.mean:g} ± {self.std:g}"


@dataclass(frozen=True)
class Work:
    """How many images a run trains on, from which its rounds follow: that depends on who holds what."""

    images: int
    labeled: float  # passes over labeled images in a round, warm-up aside
    unlabeled: float
    measured: int = 16  # times in a run

    def given(self, experiment: Experiment) -> Experiment:
        """The experiment with the rounds that come nearest."""
        from fewlabel.data import partition
        from fewlabel.engine.world import dataset_of

        dealt = partition.of(dataset_of(experiment), experiment)
        labeled = len(dealt.server) + sum(len(share.labeled) for share in dealt.shares)
        unlabeled = sum(len(share.unlabeled) for share in dealt.shares)
        warmup = getattr(experiment.method, "warmup", 0)
        first = warmup * getattr(experiment.method, "warmup_epochs", 1) * labeled
        rest = round((self.images - first) / (self.labeled * labeled + self.unlabeled * unlabeled))
        rounds = warmup + max(1, rest)
        every = max(1, round(rounds / self.measured))
        return replace(experiment, rounds=rounds, evaluate=replace(experiment.evaluate, every=every))


@dataclass(frozen=True)
class PaperRow:
    """A row of a table, or a curve or point of a figure."""

    table: str
    name: str
    settings: dict[str, Any]  # of the whole experiment
    paper: dict[str, Printed]
    notes: tuple[str, ...]
    work: Work | None = None

    @property
    def id(self) -> str:
        return f"{self.table}/{self.name}"

    @property
    def rounds(self) -> int:
        return int(self.settings.get("rounds", 0))  # 0: they follow from the work

    def experiment(self, changes: Sequence[str] = ()) -> Experiment:
        try:
            return read(self.settings, changes)
        except BadInput as error:
            raise BadInput(f"{self.id}: {error}") from None


@dataclass(frozen=True)
class PaperTable:
    name: str
    paper: str
    title: str
    rows: tuple[PaperRow, ...]

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(row.settings["data"]["name"] for row in self.rows))


@cache
def tables() -> dict[str, PaperTable]:
    return {path.stem: read_table(path) for path in sorted(FOLDER.glob("*.toml"))}


def own_table(path: Path) -> PaperTable:
    """A table of one's own, in a file of the same form."""
    try:
        table = read_table(path)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadInput(f"{path} cannot be read as a table of experiments: {error}") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(
            f"{path} is no table of experiments, which has paper, title, experiment and rows: {error}"
        ) from None
    tables()[table.name] = table
    return table


def read_table(path: Path) -> PaperTable:
    content = tomllib.loads(path.read_text())
    if "of" in content:
        content = tomllib.loads((path.parent / content["of"]).read_text()) | content
    chosen, note = tuned(path.parent / content["tuned"]) if "tuned" in content else ({}, "")
    shared = {**content["experiment"], "note": " ".join(filter(None, (content.get("note"), note)))}

    def row(where: str, cell: dict[str, Any], name: str, own: dict[str, Any]) -> PaperRow:
        groups = (content["groups"][group] for group in own.get("use", ()))
        here = {**cell, "paper": cell.get("paper", {}).get(name, {})}
        parts = [shared, here, *groups, own, chosen.get(own.get("tuned", name), {})]
        found = read_row(path.stem, f"{where}/{name}" if where else name, parts)
        if "images" not in content:
            return found
        return replace(found, work=Work(content["images"], *cell.get("passes", {}).get(name, own["passes"])))

    rows = content["rows"].items()
    cells = content.get("cells", {"": {}}).items()
    every = tuple(row(where, cell, name, own) for where, cell in cells for name, own in rows)
    return PaperTable(path.stem, content["paper"], content["title"], every)


def tuned(path: Path) -> tuple[dict[str, Any], str]:
    """The settings that validation chose by row; and a note where there are none yet."""
    if not path.exists():
        return {}, "Not tuned yet."
    rows: dict[str, Any] = tomllib.loads(path.read_text())["rows"]
    return rows, ""


def read_row(table: str, name: str, parts: Sequence[dict[str, Any]]) -> PaperRow:
    notes = tuple(part["note"] for part in parts if part.get("note"))
    settings: dict[str, Any] = reduce(overlay, parts, {})
    known = [key for part in parts for key in part.get("paper", {})]
    if strange := [key for key in known if key not in WORDS]:
        raise BadInput(f"{table}/{name}: {unknown('metric', strange[0], WORDS)}")
    printed = {key: Printed(*(value if isinstance(value, list) else [value])) for key, value in rest(settings).items()}
    return PaperRow(table, name, settings, printed, notes)


def rest(settings: dict[str, Any]) -> dict[str, Any]:
    """Takes out of a row what is no setting; returns the paper's numbers."""
    for key in ("use", "note", "passes", "tuned"):
        settings.pop(key, None)
    paper: dict[str, Any] = settings.pop("paper", {})
    return paper


def select(name: str) -> list[PaperRow]:
    """The rows that NAME or NAME/ROW stands for; either may hold * and ?. A NAME that ends in .toml is a file's."""
    return [row for table in chosen(name) for row in table.rows]


def chosen(name: str) -> list[PaperTable]:
    """Tables with those of their rows that a name stands for."""
    file, ending, row = name.rpartition(".toml")
    if ending:
        table, found, row = name, [own_table(Path(file + ending))], row.removeprefix("/")
    else:
        table, _, row = name.partition("/")
        found = [known for known in tables().values() if fnmatchcase(known.name, table)]
    if not found:
        raise BadInput(unknown("table or figure", table, tables()))
    parts = [(known, tuple(one for one in known.rows if fnmatchcase(one.name, row or "*"))) for known in found]
    if not any(rows for _, rows in parts):
        raise BadInput(unknown(f"row in {table} named", row, [one.name for known in found for one in known.rows]))
    return [replace(known, rows=rows) for known, rows in parts if rows]


def lacking(data: str) -> str:
    """What it takes to have a data set on this machine; nothing if it is here."""
    from fewlabel.data import datasets
    from fewlabel.data.published import files

    source = datasets.source_of(data)
    try:
        if source.editions:  # else images of one's own, about which the run knows more
            files.find(data, source)
    except BadInput as error:
        return str(error)
    return ""


def listed(name: str = "*") -> list[dict[str, Any]]:
    """The tables and figures that a name stands for, and whether their data are on this machine."""
    return [
        {
            "name": table.name,
            "paper": table.paper,
            "title": table.title,
            "rows": [row.name for row in table.rows],
            "data": {data: not lacking(data) for data in table.data},
        }
        for table in chosen(name)
    ]


def overview(found: Iterable[dict[str, Any]]) -> "RichTable":
    """What `listed` found, for a person to read."""
    from rich.table import Table as RichTable

    caption = "* not on this machine: `fewlabel data get NAME` gets it, or says how"
    table = RichTable("name", "what", "rows", "data", box=None, pad_edge=False, caption=caption, caption_justify="left")
    table.columns[0].no_wrap = True
    for one in found:
        data = [name if here else f"{name}*" for name, here in one["data"].items()]
        table.add_row(one["name"], one["title"], str(len(one["rows"])), ", ".join(data))
    return table


def wanted(
    row: PaperRow, changes: Sequence[str] = (), rounds: int | None = None, seeds: Sequence[int] | None = None
) -> tuple[Experiment, ...]:
    """A row's experiment for each seed, by default its own."""
    given = {change.partition("=")[0].strip() for change in changes}
    for key, option in (("rounds", rounds), ("seed", seeds)):
        if key in given and option is not None:
            raise BadInput(f"{key} is given twice, by --set and by an option of its own; give one of them")
    one = row.experiment([*changes, *([] if rounds is None else [f"rounds={rounds}"])])
    work = row.work if rounds is None and "rounds" not in given else None
    every = (replace(one, seed=seed) for seed in dict.fromkeys(seeds or [one.seed]))
    return tuple(work.given(experiment) if work else experiment for experiment in every)


def as_file(row: PaperRow, experiment: Experiment) -> str:
    """A row as a file for `fewlabel run`."""
    table = tables()[row.table]
    numbers = ", ".join(f"{WORDS[key]} {value}" for key, value in row.paper.items())
    told = [f"In the paper: {numbers}."] if numbers else []
    comments = [row.id, f"{table.paper}, {table.title}", *told, *row.notes]
    return "".join(f"# {comment}\n" for comment in comments) + dumps(experiment)


@dataclass(frozen=True)
class Attempt:
    """A row that is to be run here, once per seed, or the sentence that says why it is not."""

    row: PaperRow
    experiments: tuple[Experiment, ...]
    directories: tuple[Path, ...]
    refused: str = ""


def plan(
    rows: Iterable[PaperRow],
    root: Path,
    changes: Sequence[str] = (),
    rounds: int | None = None,
    seeds: Sequence[int] | None = None,
) -> list[Attempt]:
    """Lays out the runs of these rows below `root`, where equal experiments of several tables are one run."""
    from fewlabel.engine.sweep import place

    every = [(row, wanted(row, changes, rounds, seeds)) for row in rows]  # all are read before the first is laid out
    return [
        Attempt(row, experiments, tuple(place(e, root) for e in experiments), obstacle(row, experiments, root))
        for row, experiments in every
    ]


def obstacle(row: PaperRow, experiments: Sequence[Experiment], root: Path) -> str:
    """Why a row cannot run, if it cannot; else its runs are laid out."""
    from fewlabel.engine.sweep import lay_out, place

    one = experiments[0]
    if (warmup := getattr(one.method, "warmup", 0)) >= one.rounds:
        return f"{row.id} needs more rounds than {one.rounds}, because its warm-up alone takes {warmup}"
    todo = [experiment for experiment in experiments if not (place(experiment, root) / "summary.json").exists()]
    try:
        if todo and (missing := lacking(one.data.name)):
            return missing
        for experiment in todo:
            lay_out(experiment, root)
    except FewLabelError as error:  # the other rows go on
        return str(error)
    return ""


def measured(result: Result) -> dict[str, float | None]:
    """A run's metrics in the last round measured, and what a client sent on average, in shares of a whole model.

    Of a model's numbers, where the method counts them; whoever does not sends whole models.
    """
    last, spent = result.last or {}, result.spent()
    found = {**last.get("test", {}), "local_accuracy": last.get("local_accuracy")}
    if "labeled_accuracy" in (shown := last.get("shown", {})):
        found["labeled_accuracy"] = shown["labeled_accuracy"]
    if spent["replies"]:
        one = spent["model_bytes"] / (2 * spent["asked"])
        found["bytes_sent"] = spent["bytes_up"] / (one * spent["replies"])
        counted = Spread.of(line.get("sent") for line in result.rounds)
        found["sent"] = counted.mean if counted else found["bytes_sent"]
    return found


class Reproduction:
    """What came out here, beside what is in the papers."""

    def __init__(self, attempts: Sequence[Attempt], changes: Sequence[str] = ()) -> None:
        self.attempts, self.changes = attempts, changes
        self.results = {a.row.id: [Result(directory) for directory in a.directories] for a in attempts if not a.refused}

    @property
    def tables(self) -> list[PaperTable]:
        return [tables()[name] for name in dict.fromkeys(attempt.row.table for attempt in self.attempts)]

    @property
    def title(self) -> str:
        one, *others = self.tables
        return "Ours beside the papers'" if others else f"{one.paper}, {one.title}"

    def label(self, row: PaperRow) -> str:
        return row.name if len(self.tables) == 1 else row.id

    def ours(self, row: PaperRow) -> dict[str, Spread | None]:
        """The row's metrics in the last round measured, and what a client sent, over its seeds."""
        found = [measured(result) for result in self.results[row.id]]
        shown = [] if row.paper or "labeled_accuracy" not in found[0] else ["labeled_accuracy"]
        keys = [*(row.paper or USUAL), *shown, *(["bytes_sent"] if "sent" in row.paper else [])]
        return {key: Spread.of(one.get(key) for one in found) for key in keys}

    def table(self) -> Table:
        lines = []
        for attempt in self.attempts:
            row = attempt.row
            if attempt.refused:
                continue
            begin = self.label(row) + ("*" if self.unfinished(row) else ""), self.rounds(attempt)
            for key, spread in self.ours(row).items():
                lines.append((*begin, WORDS[key], *self.cells(spread, row.paper.get(key))))
                begin = "", ""
        columns = ("row", "rounds", "metric", "ours", "paper", "difference")
        return Table(f"{self.title}, in percent", columns, tuple(lines), tuple(self.notes()))

    def cells(self, ours: Spread | None, paper: Printed | None) -> tuple[str, str, str]:
        difference = f"{100 * ours.mean - paper.mean:+.1f}" if ours and paper else "–"
        return str(ours or "–"), str(paper or "–"), difference

    def rounds(self, attempt: Attempt) -> str:
        ran = attempt.experiments[0].rounds
        return f"{ran} of {attempt.row.rounds}" if ran < attempt.row.rounds else str(ran)

    def unfinished(self, row: PaperRow) -> dict[int, str]:
        return {result.seed: result.standing for result in self.results[row.id] if not result.finished}

    def notes(self) -> Iterator[str]:
        ran = [attempt for attempt in self.attempts if not attempt.refused]
        seeds = sorted({experiment.seed for attempt in ran for experiment in attempt.experiments})
        counted = f"Seed {seeds[0]}" if len(seeds) == 1 else f"Seeds {', '.join(map(str, seeds))}, mean ± std"
        yield f"{counted}. Ours is the last round; never the best on test."
        if any(attempt.experiments[0].rounds < attempt.row.rounds for attempt in ran):
            yield "SHORT: with fewer rounds than the paper's, this reproduces nothing yet."
        if self.changes:
            yield f"CHANGED: not the paper's experiment, but with {', '.join(self.changes)}."
        for attempt in ran:
            for seed, standing in self.unfinished(attempt.row).items():
                yield f"* {attempt.row.name}, seed {seed}: {standing}."
        yield from dict.fromkeys(note for attempt in ran for note in attempt.row.notes)
        for sentence, names in self.refused().items():
            yield f"Not run: {', '.join(names)}: {sentence}."

    def refused(self) -> dict[str, list[str]]:
        """Why rows did not run, and which."""
        found: dict[str, list[str]] = {}
        for attempt in self.attempts:
            if attempt.refused:
                found.setdefault(attempt.refused.rstrip("."), []).append(attempt.row.name)
        return found

    def to_json(self) -> dict[str, Any]:
        return {"changes": list(self.changes), "rows": [self.row_to_json(attempt) for attempt in self.attempts]}

    def row_to_json(self, attempt: Attempt) -> dict[str, Any]:
        row, one = attempt.row, attempt.experiments[0]
        about: dict[str, Any] = {
            "table": row.table,
            "row": row.name,
            "data": one.data.name,
            "rounds": one.rounds,
            "rounds_of_paper": row.rounds,
            "short": one.rounds < row.rounds,
            "seeds": [experiment.seed for experiment in attempt.experiments],
            "paper": {key: {"mean": value.mean, "std": value.std} for key, value in row.paper.items()},
            "notes": list(row.notes),
        }
        if attempt.refused:
            return about | {"not_run": attempt.refused}
        ours = {
            key: spread and {"mean": 100 * spread.mean, "std": None if spread.std is None else 100 * spread.std}
            for key, spread in self.ours(row).items()
        }
        unfinished = {str(seed): standing for seed, standing in self.unfinished(row).items()}
        return about | {"ours": ours, "unfinished": unfinished, "directories": [str(d) for d in attempt.directories]}

    def report(self, root: Path) -> Path:
        """One self-contained page below `root` with the curves, too."""
        path = root / f"{'-'.join(table.name for table in self.tables)}.html"
        ran = [attempt.row for attempt in self.attempts if not attempt.refused]
        rows = [Row(self.label(row), tuple(self.results[row.id])) for row in ran]
        tables, drawn = self.table().html() + left_out({"": rows}), plots({"": rows})
        write_page(path, self.title, tables, drawn, again(rows), versions(rows), about_sections(rows))
        return path

    def __str__(self) -> str:
        return str(self.table())
