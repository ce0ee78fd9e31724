"""What a person sees at the terminal: progress on stderr, lists and results on stdout.

Progress is a bar on a terminal, a line that changes in a notebook, and plain lines in a log or a pipe. No thread
redraws the bar: worker processes are forked meanwhile, and a fork copies a thread's locks as they stand.
"""

import ast
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import reduce
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.table import Column, Table

from fewlabel.core.described import leaves
from fewlabel.core.schema import settings
from fewlabel.engine.record import FEDERATION, NOTES, Line, read_rounds
from fewlabel.experiment import RECIPES, ROWS, USUAL, Experiment, Stream, dumps, method_named
from fewlabel.report.comparison import Comparison
from fewlabel.report.findings import Finding, in_last_round, too_few_rounds
from fewlabel.report.groups import short_labels
from fewlabel.report.results import Result
from fewlabel.report.runs import CEILING

MOST_NOTES = 8  # sentences about the data of many runs


def tell(sentence: str) -> None:
    """Print one sentence on stderr, as `fewlabel: …`."""
    with suppress(OSError):  # stderr may be closed, and then nobody reads it
        print("fewlabel:", " ".join(sentence.split()), file=sys.stderr)


def tell_notes(runs: Sequence[Result]) -> None:
    """Tell, once each, what may not be meant though it runs, and what to know about the data. Skip finished runs."""
    runs = [run for run in runs if not run.finished]
    for sentence in dict.fromkeys(sentence for run in runs for sentence in run.experiment.cautions):
        tell(sentence)
    shown = [run for run in runs if run.name != CEILING] or runs  # the ceiling has every label, as its name says
    told = defaultdict[str, set[int]](set)
    for run in shown:
        for sentence in run.notes.get("sentences", []):
            told[sentence].add(run.seed)
    seeds = {run.seed for run in shown}
    for sentence, of in list(told.items())[:MOST_NOTES]:
        tell(sentence if of == seeds else f"seed {', '.join(map(str, sorted(of)))}: {sentence}")
    if len(told) > MOST_NOTES:
        tell(f"{len(told) - MOST_NOTES} more such sentences are in the {NOTES} of the runs")


class Screen:
    """Lines that stay, and below them a bar on a terminal, or a line that changes in a notebook.

    The bar appears when there is something to show. `live` says whether there can be one.
    """

    def __init__(self, total: float) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._notebook = self._console.is_jupyter
        self._line: Any = None
        self.live = self._console.is_interactive or self._notebook
        columns = BarColumn(12), TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True))
        self._bar = Progress(
            *columns,
            console=self._console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = self._bar.add_task("", total=total)

    def show(self, completed: float, text: str) -> None:
        """Move the bar and change the text beside it."""
        if self._notebook:
            self._show_in_notebook(text)
        elif self.live:
            self._bar.start()
            self._bar.update(self._task, completed=completed, description=text, refresh=True)

    def _show_in_notebook(self, text: str) -> None:
        if self._line is None:
            display: Any = import_module("IPython.display").display  # in a notebook it is there
            self._line = display({"text/plain": text}, raw=True, display_id=True)
        else:
            self._line.update({"text/plain": text}, raw=True)

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._notebook:
            return print(text)  # a notebook shows stderr in red
        return self._console.print(text, soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live and not self._notebook:  # or it would leave an empty line
            self._bar.stop()


class Rounds(Screen):
    """The progress of one run. A log gets at most a line every `pace` seconds, so that fast rounds do not flood it."""

    def __init__(self, experiment: Experiment, directory: Path, pace: float = 1) -> None:
        super().__init__(experiment.rounds)
        self._rounds, self._count, self._seconds = experiment.rounds, 0, 0.0
        self._pace, self._last_line = pace, 0.0
        self._news, self._hint = News(experiment, directory), too_few_rounds(experiment)

    def watch(self, line: Line) -> None:
        """Show a line of rounds.jsonl, and what it shows to be wrong."""
        number = line["round"]
        self._count += 1
        self._seconds += line["seconds"] + line.get("seconds_evaluate", 0)
        left = self._seconds / self._count * (self._rounds - number)
        begin = f"round {number}/{self._rounds}{metrics(line)}  {size(line['bytes_up'] + line['bytes_down'])}"
        news = self._news.of(line)
        if self.live:
            self.show(number, f"{begin}  {span(left)} left" if number < self._rounds else begin)
        elif news or number == self._rounds or time.monotonic() - self._last_line >= self._pace:
            self._last_line = time.monotonic()
            self.say(f"{begin}  {span(line['seconds'])}" + f", {span(left)} left" * (number < self._rounds))
        for finding in news:
            self.say(f"fewlabel: round {number}: {finding}")
        if number == self._rounds and self._hint:
            self.say(f"fewlabel: {self._hint}")


class News:
    """What is wrong in a run, told once each, in the round that shows it."""

    def __init__(self, experiment: Experiment, directory: Path) -> None:
        self._experiment, self._directory = experiment, directory
        self._lines, self._told = list[Line](), set[str]()

    def of(self, line: Line) -> list[Finding]:
        """Return what this line, the next one of its run, shows to be wrong."""
        if not self._lines:  # a run that is resumed has earlier ones
            self._lines = [each for each in read_rounds(self._directory) if each["round"] < line["round"]]
        self._lines.append(line)
        found = [each for each in in_last_round(self._experiment, self._lines) if each.kind not in self._told]
        if (self._directory / FEDERATION).exists():  # then `deploy.submit` tells of failures
            failed = {
                f"left out {failure['client']}"
                for failure in line.get("failures", ())
                if failure.get("client", -1) >= 0
            }
            found = [each for each in found if each.kind not in failed]
        self._told |= {each.kind for each in found}
        return found


class Runs(Screen):
    """The progress of many runs: how many are done, a line for each that ends, and what is wrong in any of them."""

    def __init__(self, experiments: Mapping[Path, Experiment], done: int) -> None:
        super().__init__(len(experiments))
        self._experiments, self._done, self._last = experiments, done, dict[Path, Line]()
        self._began, self._done_before = time.monotonic(), done
        self._names = dict(zip(experiments, names_of(list(experiments.values())), strict=True))
        self._news = {directory: News(experiment, directory) for directory, experiment in experiments.items()}
        if done:
            self.say(f"{done} of {len(experiments)} runs are done already")

    def watch(self, directory: Path, line: Line) -> None:
        """Show a line of a run's rounds.jsonl, or how the run ended."""
        if "round" in line:
            self._last[directory] = line
            for finding in self._news[directory].of(line):
                self.say(f"fewlabel: {self._names[directory]}, round {line['round']}: {finding}")
        else:
            last, end = self._last.pop(directory, {}), line.get("failed") or line.get("stopped")
            self._done += not end
            outcome = f"  {end}" if end else metrics(last)
            left = "" if self.live else self._left()
            self.say(f"{self._done}/{len(self._experiments)}  {self._names[directory]}{outcome}{left}")
        if self.live:
            self.show(self._completed(), f"{self._done}/{len(self._experiments)} runs{self._left()}")

    def _completed(self) -> float:
        """Return how many runs are done, with those under way in parts."""
        return self._done + sum(int(last["round"]) / self._experiments[at].rounds for at, last in self._last.items())

    def _left(self) -> str:
        """Return how long the other runs take if they go on as fast. Less than a second is not worth a word."""
        gained, todo = self._completed() - self._done_before, len(self._experiments) - self._completed()
        seconds = (time.monotonic() - self._began) / gained * todo if gained > 0 else 0.0
        return f"  {span(seconds)} left" if seconds >= 1 else ""


def names_of(experiments: Sequence[Experiment]) -> list[str]:
    """Name each run by what tells it apart from the others: its method, settings that differ, and its seed."""
    seedless = [replace(experiment, seed=0) for experiment in experiments]
    unlike = {dumps(one): one for one in seedless}
    labels = dict(zip(unlike, short_labels(list(unlike.values())), strict=True))
    several = len({experiment.seed for experiment in experiments}) > 1
    return [
        labels[dumps(one)] + (f" seed={experiment.seed}" if several else "")
        for one, experiment in zip(seedless, experiments, strict=True)
    ]


def metrics(line: Mapping[str, Any]) -> str:
    """Return the accuracy and AUC of a round's line, as far as it has them."""
    test = line.get("test") or {}
    digits = {"accuracy": 3, "auc": 2}
    return "".join(f"  {name} {test[name]:.{n}f}" for name, n in digits.items() if test.get(name) is not None)


def size(count: float) -> str:
    """Write a number of bytes."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def span(seconds: float) -> str:
    """Write a length of time."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"


def known(what: str, method: str = "") -> list[dict[str, Any]]:
    """List the names of a kind, such as methods or datasets, each with an explanation."""
    if what == "methods":
        from fewlabel.methods import ABOUT, METHODS

        rows = {name: (METHODS[method], about) for name, (method, _, about) in ROWS.items()}
        rows |= {name: (method, ABOUT.get(name, first_line(method.__doc__))) for name, method in METHODS.items()}
        first = {(type(method), leaves(method)): name for name, method in reversed(METHODS.items())}
        like = {name: same for name, (m, _) in rows.items() if (same := first[type(m), leaves(m)]) != name}
        return [
            {"name": name, "about": about, "label_places": sorted(method.label_places)}
            | ({"like": like[name]} if name in like else {"leaves": leaves(method)})
            for name, (method, about) in rows.items()
        ]
    if what == "datasets":
        from fewlabel.data.datasets import DATASETS

        abouts = {name: source.about for name, source in DATASETS.items()}
    elif what == "models":
        from fewlabel.networks import MODELS

        abouts = {name: entry.about for name, entry in MODELS.items()}
    elif what == "settings":
        return settings_of(method)
    elif what == "views":
        from fewlabel.data.views import VIEWS

        abouts = {name: entry.about for name, entry in VIEWS.items()}
    else:
        from fewlabel.data.partition import PARTITIONS

        abouts = {name: about for name, (_, about) in PARTITIONS.items()}
    return [{"name": name, "about": about} for name, about in abouts.items()]


def settings_of(method: str = "") -> list[dict[str, Any]]:
    """List all settings of an experiment with the default method, or those of one method."""
    usual = Experiment(stream=Stream(), train=RECIPES[USUAL])  # a stream, to have its defaults
    chosen = method_named(method) if method else usual.method
    abouts = {key: about for key, about in settings(Experiment).items() if key != "method" and not method}
    if not method:
        about = "sets all of train.*, each of which may still be changed; printed: as the papers print it"
        abouts["recipe"] = about, f"one of {', '.join(RECIPES)}"
    abouts["method.name"] = "one of `fewlabel list methods`; its own settings are method.*", "text"
    abouts |= {f"method.{key}": about for key, about in settings(type(chosen)).items()}

    def default(key: str) -> Any:
        whole, path = (chosen, key.split(".")[1:]) if key.startswith("method.") else (usual, key.split("."))
        return reduce(lambda part, name: getattr(part, name, None), path, whole)

    defaults = {key: default(key) for key in abouts} | {"method.name": method or usual.name, "recipe": USUAL}
    off = "off unless a stream.* is set; "
    return [
        {
            "name": key,
            "default": "none" if defaults[key] is None else str(defaults[key]),
            "about": off * key.startswith("stream.") + about,
            "allowed": allowed,
        }
        for key, (about, allowed) in abouts.items()
    ]


def first_line(doc: str | None) -> str:
    return (doc or "").strip().partition("\n")[0]


def scripts(files: Mapping[str, Path]) -> list[dict[str, Any]]:
    """List Python files, each with the first line of its docstring."""
    docs = {name: ast.get_docstring(ast.parse(path.read_text())) for name, path in files.items()}
    return [{"name": name, "about": first_line(doc)} for name, doc in docs.items()]


def show_list(rows: Sequence[Mapping[str, Any]], form: str) -> None:
    """Print a list of names and explanations."""
    if form == "json":
        return print(json.dumps(rows, indent=1))
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    if rows and "default" in rows[0]:
        table.add_column(overflow="fold")
    for row in rows:
        if "default" in row:
            allowed = f"({row['allowed']})" if row["allowed"] else ""
            table.add_row(row["name"], row["default"], " ".join(filter(None, [row["about"], allowed])))
            continue
        places = f" Labels at {', '.join(row['label_places'])}." if "label_places" in row else ""
        table.add_row(row["name"], row["about"] + places)
        if "label_places" in row:
            table.add_row("", f"What leaves a site: {row.get('leaves') or 'as for ' + row['like'] + '.'}", style="dim")
    console = Console(highlight=False, markup=False, emoji=False)
    with console.capture() as lines:
        console.print(table)
    return print("\n".join(map(str.rstrip, lines.get().splitlines())))  # rich fills them with spaces


def show_result(found: Result | Comparison, form: str, page: Path | None = None, every: bool = False) -> None:
    """Print a result, and the path of the page about it if one was written. A comparison may show every column."""
    if form == "json":
        return print(json.dumps(document(found) | ({"report": str(page)} if page else {}), indent=1))
    if form == "csv":
        return print((found if isinstance(found, Comparison) else Comparison([found])).csv(), end="")
    tables = found.tables(every) if isinstance(found, Comparison) else [found.table()]
    if form in ("markdown", "latex"):
        return print("\n".join(getattr(table, form)() for table in tables), end="")
    if (console := Console(highlight=False)).color_system:
        console.print(*(table.rich(console.width) for table in tables), sep="\n\n")
    else:
        print("\n\n".join(map(str, tables)))
    return print(page) if page else None


def document(found: Result | Comparison) -> dict[str, Any]:
    """Return a comparison, or a run, as JSON for programs."""
    if isinstance(found, Comparison):
        return {"rows": found.to_json()}
    experiment = found.experiment
    about = {"directory": str(found.directory), "finished": found.finished, "name": found.name, "seed": found.seed}
    about |= {"data": experiment.data.name, "rounds": experiment.rounds, "recipe": experiment.recipe_name}
    return about | {"last": found.last, "chosen_on_validation": found.chosen} | found.spent() | (found.summary or {})
