"""Results: what runs say of themselves, alone and side by side, as tables, curves and pages.

Every number is read from a run's directory, at the last round measured or at the one that validation chose: never at
the best on test.
"""

import html
import io
import json
import shutil
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fewlabel import strict
from fewlabel.errors import BadInput, StorageError
from fewlabel.experiment import ROWS, Experiment, dumps, load
from fewlabel.report import COLORS, GREY, draw, empty_plot, finish_plot, matrices, write_page

if TYPE_CHECKING:
    import rich.table
    from matplotlib.figure import Figure

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
DASHES = {FLOOR: (0, (2, 2)), CEILING: (0, (6, 2))}


@dataclass(frozen=True)
class Table:
    """Words in the first column and numbers in the others, for a terminal, a page or a README."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    best: frozenset[tuple[int, int]] = frozenset()  # (row, column) of the cells to mark

    def rich(self) -> "rich.table.Table":
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title),
            caption=Text("\n".join(self.notes)) if self.notes else None,
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            collapse_padding=True,
            min_width=max(40, len(self.title)),
            title_justify="left",
            title_style="bold",
            caption_justify="left",
            caption_style="dim",
        )
        for number, column in enumerate(self.columns):
            if number == 0:
                table.add_column(Text(column), overflow="fold")
            else:  # rich would break numbers before headings, so headings are broken here
                width = max([len(row[number]) for row in self.rows] + [len(word) for word in column.split()])
                table.add_column(Text(textwrap.fill(column, width)), justify="right", no_wrap=True)
        for r, row in enumerate(self.rows):
            table.add_row(*(Text(cell, "bold" if (r, c) in self.best else "") for c, cell in enumerate(row)))
        return table

    def __str__(self) -> str:
        from rich.console import Console

        width = shutil.get_terminal_size((80, 24)).columns
        # Asked outright: a notebook is where rich would show the table instead of writing it into the file.
        console = Console(file=io.StringIO(), width=width, color_system=None, force_jupyter=False)
        console.print(self.rich())
        return "\n".join(line.rstrip() for line in console.file.getvalue().splitlines())  # type: ignore[attr-defined]

    def html(self) -> str:
        head = "".join(f'<th scope="col">{html.escape(column)}</th>' for column in self.columns)
        body = ""
        for r, row in enumerate(self.rows):
            cells = [f"<b>{html.escape(c)}</b>" if (r, n) in self.best else html.escape(c) for n, c in enumerate(row)]
            numbers = "".join(f"<td>{cell}</td>" for cell in cells[1:])
            body += f'<tr><th scope="row">{cells[0]}</th>{numbers}</tr>\n'
        notes = "".join(f"<p><small>{html.escape(note)}</small></p>\n" for note in self.notes)
        top = f"<caption>{html.escape(self.title)}</caption>\n<thead><tr>{head}</tr></thead>"
        return f"<table>\n{top}\n<tbody>\n{body}</tbody></table>\n{notes}"

    def _repr_html_(self) -> str:
        return self.html()

    def markdown(self) -> str:
        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

        rows = [
            line(f"**{cell}**" if (r, c) in self.best else cell for c, cell in enumerate(row))
            for r, row in enumerate(self.rows)
        ]
        ruler = line(["---", *["---:"] * (len(self.columns) - 1)])
        table = "\n".join([line(self.columns), ruler, *rows])
        return "\n\n".join([f"**{self.title}**", table, *self.notes]) + "\n"


class Result:
    """One run, finished or not, as its directory tells it."""

    def __init__(self, directory: Path | str) -> None:
        from fewlabel.runs import read_rounds, summary

        self.directory = Path(directory)
        if not (self.directory / "experiment.toml").is_file():
            raise BadInput(f"{self.directory} holds no run: it has no experiment.toml")
        self.experiment: Experiment = load(self.directory / "experiment.toml")
        self.name, self.seed = self.experiment.name, self.experiment.seed
        # In this order, so that a run that ends meanwhile is not taken for finished without its last rounds.
        finished = (self.directory / "summary.json").exists()
        self.summary: dict[str, Any] | None = summary(self.directory) if finished else None
        self.rounds: list[dict[str, Any]] = read_rounds(self.directory)

    @property
    def finished(self) -> bool:
        return self.summary is not None

    @property
    def standing(self) -> str:
        reached = self.rounds[-1]["round"] if self.rounds else 0
        return "finished" if self.finished else f"unfinished, round {reached} of {self.experiment.rounds}"

    @cached_property
    def last(self) -> dict[str, Any] | None:
        from fewlabel.runs import last_measured

        return last_measured(self.rounds)

    @cached_property
    def chosen(self) -> dict[str, Any] | None:
        from fewlabel.runs import chosen_on_validation

        return chosen_on_validation(self.rounds)

    def spent(self, until: int | None = None) -> dict[str, float]:
        """What the rounds cost, up to and including one of them, and how that compares with FedAvg's bytes."""
        from fewlabel.runs import spent

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
            for n, name in enumerate(self._classes())
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
                ("both, % of FedAvg", *(f"{100 * s['bytes_of_fedavg']:.0f}" for s in spent)),
                ("replies", *(f"{s['replies']} of {s['asked']}" for s in spent)),
                ("images trained on, labeled", *(f"{s['images_labeled']:,}" for s in spent)),
                ("images trained on, unlabeled", *(f"{s['images_unlabeled']:,}" for s in spent)),
                ("seconds", *(seconds(s["seconds"]) for s in spent)),
            ]
        notes = ["Metrics on the test set in percent; costs from the first round up to the column's."]
        if not self.finished:
            notes.append(f"{self.standing}.".capitalize())
        title = f"{self.name} on {self.experiment.data.name}, seed {self.seed}"
        return Table(title, ("", *columns), tuple(rows), tuple(notes))

    def _classes(self) -> list[str]:
        path = self.directory / "partition.json"
        try:
            names = [str(name) for name in json.loads(path.read_text())["classes"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path} is not a partition that can be read: {error}") from None
        return names if len(names) <= MOST_CLASSES else []

    def plot(self, path: Path | str | None = None) -> "Figure":
        """Accuracy and AUC over the rounds, on test and on validation, and the round that validation chose."""
        figure, axes = empty_plot("%")
        for key, color in zip(("accuracy", "auc"), COLORS, strict=False):
            for split, dashes in {"test": "-", "validation": "--"}.items():
                found = {line["round"]: line[split][key] for line in self.rounds if split in line}
                points = {number: 100 * value for number, value in found.items() if value is not None}
                draw(axes, points, label=f"{split} {METRICS[key]}", color=color, linestyle=dashes)
        if self.chosen:
            axes.axvline(self.chosen["round"], color=GREY, linewidth=0.8, label="chosen on validation")
        return finish_plot(figure, path)

    def report(self, path: Path | str | None = None) -> Path:
        """One self-contained page about this run; by default report.html in its directory."""
        path = Path(path or self.directory / "report.html")
        table, plots = self.table(), {"Over the rounds": self.plot()}
        if self.relations:
            plots["Relations among classes"] = self.plot_relations()
        write_page(path, table.title, table.html(), plots, [settings("Settings", [self])], versions([self]))
        return path

    @property
    def relations(self) -> dict[str, Any] | None:
        """The last round's line that has FedIRM's relations of labeled and of unlabeled clients."""
        found = [line for line in self.rounds if "relation" in line and "relation" in line.get("shown", {})]
        return found[-1] if found else None

    def plot_relations(self, path: Path | str | None = None) -> "Figure":
        """FedIRM's relations among classes, at labeled and at unlabeled clients, and how far they differ."""
        if not (line := self.relations):
            raise BadInput(f"{self.directory} has no relations among classes; FedIRM's runs have them")
        pairs = {"labeled clients": line["relation"], "unlabeled clients": line["shown"]["relation"]}
        return matrices(pairs, f"round {line['round']}", path)

    def __repr__(self) -> str:
        return f"Result({str(self.directory)!r}: {self.name}, seed {self.seed}, {self.standing})"

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


@dataclass(frozen=True)
class Spread:
    """A number over seeds."""

    mean: float
    std: float | None  # of the sample; none of a single seed

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Self | None:
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None)

    def __str__(self) -> str:
        if self.std is None:
            return percent(self.mean)
        spread = 100 * self.std
        return f"{percent(self.mean)} ± {spread:.0f}" if spread >= 9.95 else f"{percent(self.mean)} ± {spread:.1f}"


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
        return {key: statistics.fmean(cost[key] for cost in costs) for key in costs[0]}

    def curve(self, metric: str = "accuracy") -> dict[int, Spread]:
        """A test metric by round, over the seeds that were measured in that round."""
        found: dict[int, list[float]] = {}
        for result in self.results:
            for line in result.rounds:
                if (value := line.get("test", {}).get(metric)) is not None:
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
            **self.spent,
            "directories": [str(result.directory) for result in self.results],
        }


def found_in(directory: Path) -> "Result | Comparison":
    """The run in a directory, or all runs below it side by side."""
    runs = sorted(path.parent for path in directory.glob("*/experiment.toml"))
    return Comparison([Result(run) for run in runs]) if runs else Result(directory)


class Comparison:
    """Runs side by side: a row for each experiment, over its seeds; the floor first and the ceiling last."""

    def __init__(self, results: Sequence[Result]) -> None:
        if not results:
            raise BadInput("there is nothing to compare: no directory holds a run")
        groups: dict[str, dict[int, Result]] = {}
        for result in results:
            group = groups.setdefault(dumps(replace(result.experiment, seed=0)), {})
            # A run made twice gave the same bits twice; counted twice it would only seem to lower the spread.
            if result.seed not in group or len(result.rounds) > len(group[result.seed].rounds):
                group[result.seed] = result
        seeded = [tuple(group[seed] for seed in sorted(group)) for group in groups.values()]
        seeded.sort(key=lambda group: {FLOOR: 0, CEILING: 2}.get(group[0].name, 1))
        names = labels([group[0].experiment for group in seeded])
        self.rows = [Row(label, group) for label, group in zip(names, seeded, strict=True)]

    def table(self) -> Table:
        metrics = ("accuracy", "balanced acc.", "AUC", "chosen round: accuracy")
        columns = ("method", *metrics, "sent, MB (of FedAvg)", "sec.")
        cells = [
            (row.last["accuracy"], row.last["balanced_accuracy"], row.last["auc"], row.chosen["accuracy"])
            for row in self.rows
        ]
        rows = tuple(
            (
                row.label + ("*" if row.unfinished else ""),
                *(str(spread) if spread else percent(None) for spread in spreads),
                f"{megabytes(sum(row.spent[key] for key in ('bytes_up', 'bytes_down')))} "
                f"({100 * row.spent['bytes_of_fedavg']:.0f}%)",
                seconds(row.spent["seconds"]),
            )
            for row, spreads in zip(self.rows, cells, strict=True)
        )
        title = f"Test results on {self._said(lambda e: e.data.name)}, in percent"
        return Table(title, columns, rows, tuple(self._notes()), self._best(cells))

    def _best(self, cells: Sequence[Sequence[Spread | None]]) -> frozenset[tuple[int, int]]:
        """The best of each metric's column among the methods between floor and ceiling, if there is a choice."""
        between = [number for number, row in enumerate(self.rows) if row.name not in (FLOOR, CEILING)]
        best = set()
        for column in range(len(cells[0])) if len(between) > 1 else ():
            means = {number: spread.mean for number in between if (spread := cells[number][column])}
            best |= {(number, column + 1) for number, mean in means.items() if mean == max(means.values())}
        return frozenset(best)

    def _notes(self) -> Iterator[str]:
        seeds = sorted({seed for row in self.rows for seed in row.seeds})
        each = {len(row.seeds) for row in self.rows}
        counted = f"seed {seeds[0]}" if len(seeds) == 1 else f"seeds {', '.join(map(str, seeds))}"
        spread = ", mean ± standard deviation" if max(each) > 1 else ""
        yield f"{self._said(lambda e: e.rounds)} rounds; {counted}{spread}. Last round; never the best on test."
        yield "The chosen round is the one with the best accuracy on validation. Sent counts both directions."
        images = [
            f"{row.label} {row.spent['images_labeled'] / 1e3:,.0f} + {row.spent['images_unlabeled'] / 1e3:,.0f}"
            for row in self.rows
        ]
        yield f"Images trained on, labeled + unlabeled, in thousands: {'; '.join(images)}."
        if len(each) > 1:
            yield (
                "Not every row has every seed: " + ", ".join(f"{row.label} {len(row.seeds)}" for row in self.rows) + "."
            )
        others = [flat(row.experiment) for row in self.rows if row.name != CEILING]
        shown = {key for name in {row.name for row in self.rows} for key in self._differing_of(name)}
        if unlike := [key for key in differing(others) if key not in shown and not key.startswith(("method.", "name"))]:
            yield f"Not like with like: the rows also differ in {', '.join(unlike)}."
        for row in self.rows:
            for seed, standing in row.unfinished.items():
                yield f"* {row.label}, seed {seed}: {standing}."

    def _differing_of(self, name: str) -> list[str]:
        return differing([flat(row.experiment) for row in self.rows if row.name == name])

    def _said(self, what: Callable[[Experiment], object]) -> str:
        return ", ".join(dict.fromkeys(str(what(row.experiment)) for row in self.rows))

    def to_json(self) -> list[dict[str, Any]]:
        """The raw numbers of each row, metrics as fractions."""
        return [row.to_json() for row in self.rows]

    def plot(self, path: Path | str | None = None) -> "Figure":
        """Accuracy on test over the rounds: the mean over seeds, one standard deviation around it as a band."""
        figure, axes = empty_plot("test accuracy, %")
        colors = iter(COLORS * len(self.rows))
        for row in self.rows:
            curve = row.curve()
            bound = row.name in DASHES
            color = GREY if bound else next(colors)
            means = {number: 100 * spread.mean for number, spread in curve.items()}
            style = {"linestyle": DASHES[row.name], "zorder": 3} if bound else {}  # seen even where a method lies on it
            draw(axes, means, label=row.label, color=color, **style)
            band = {number: (means[number], 100 * s.std) for number, s in curve.items() if s.std is not None}
            if band:
                low, high = [mean - std for mean, std in band.values()], [mean + std for mean, std in band.values()]
                axes.fill_between(list(band), low, high, color=color, alpha=0.15, linewidth=0)
        return finish_plot(figure, path)

    def report(self, path: Path | str) -> Path:
        """One self-contained page: table, curves, and what it takes to do it all again."""
        path = Path(path)
        results = [result for row in self.rows for result in row.results]
        title = f"{len(self.rows)} methods on {self._said(lambda e: e.data.name)}"
        details = [settings(row.label, row.results) for row in self.rows]
        write_page(path, title, self.table().html(), {"Over the rounds": self.plot()}, details, versions(results))
        return path

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


def percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.1f}"


def megabytes(count: float) -> str:
    return f"{count / 1e6:,.0f}" if count >= 99.95e6 else f"{count / 1e6:.3g}"


def seconds(count: float) -> str:
    return f"{count:,.0f}" if count >= 99.95 else f"{count:.1f}"


def flat(experiment: Experiment) -> dict[str, Any]:
    """All settings by their dotted names, without the seed."""

    def walk(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
        for key, value in table.items():
            if isinstance(value, Mapping):
                yield from walk(value, f"{above}{key}.")
            else:
                yield above + key, value

    return {key: value for key, value in walk(strict.plain(experiment)) if key != "seed"}


def differing(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that are not the same in all of them."""
    keys = dict.fromkeys(key for table in tables for key in table)
    return [key for key in keys if any(table.get(key) != tables[0].get(key) for table in tables)]


def labels(experiments: Sequence[Experiment]) -> list[str]:
    """A row's name, and the settings in which rows of that name differ, as short as they are clear."""
    found = []
    tables = [flat(experiment) for experiment in experiments]
    for experiment, table in zip(experiments, tables, strict=True):
        keys = differing([other for other in tables if other["name"] == experiment.name])
        words = [key.rpartition(".")[2] for key in keys]
        short = {key: word if words.count(word) == 1 else key for key, word in zip(keys, words, strict=True)}
        found.append(" ".join([experiment.name, *(f"{short[key]}={table.get(key, 'none')}" for key in keys)]))
    return found


def settings(label: str, results: Sequence[Result]) -> str:
    """An experiment in full, and the command that repeats its runs."""
    experiment = dumps(replace(results[0].experiment, seed=0))
    seeds = ",".join(str(result.seed) for result in results)
    command = f"fewlabel run experiment.toml --seed{'s' if len(results) > 1 else ''} {seeds}"
    return (
        f"<details><summary>{html.escape(label)}</summary>\n<p>Save this as experiment.toml:</p>\n"
        f"<pre>{html.escape(experiment)}</pre>\n<p>and run</p>\n<pre>{html.escape(command)}</pre></details>\n"
    )


def versions(results: Sequence[Result]) -> list[str]:
    """What finished runs were made with."""
    finished = [result.summary["versions"] for result in results if result.summary]
    return list(dict.fromkeys(", ".join(f"{key} {value}" for key, value in found.items()) for found in finished))
