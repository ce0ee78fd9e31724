"""The command `fewlabel`: results on stdout, everything else on stderr, and one sentence for whatever goes wrong.

PyTorch takes seconds to import, so it comes in with the commands that need it, and help is there at once.
"""

import json
import mmap
import os
import shlex
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from enum import StrEnum
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
import typer
from typer import Argument, Option

from fewlabel import data_cli, model_cli
from fewlabel.errors import BadInput, FewLabelError, RunFailed

if TYPE_CHECKING:
    from fewlabel.experiment import Experiment
    from fewlabel.reproduce import PaperRow

RUNS = Path("runs")
EXIT_CODES = (
    "Exit codes: 0 fine, 1 a bug in FewLabel, 2 bad input, 3 the run failed and can be resumed, "
    "4 disk or files, 130 interrupted."
)
app = typer.Typer(add_completion=False, suggest_commands=False, rich_markup_mode="rich")
app.add_typer(data_cli.app, name="data")


class Form(StrEnum):
    TEXT = "text"
    JSON = "json"


class Layout(StrEnum):
    TEXT = "text"
    MARKDOWN = "markdown"
    LATEX = "latex"
    CSV = "csv"
    JSON = "json"


class Known(StrEnum):
    METHODS = "methods"
    DATASETS = "datasets"
    MODELS = "models"
    PARTITIONS = "partitions"
    VIEWS = "views"
    SETTINGS = "settings"


def use_data_dir(folder: Path | None) -> None:
    if folder is not None:
        os.environ["FEWLABEL_DATA"] = str(folder)  # worker processes inherit it


# Arguments are hidden from the list of options, and told in the command's own words.
File = Annotated[Path | None, Argument(metavar="FILE", hidden=True)]
Method = Annotated[str | None, Option("--method", metavar="NAME", help="Method, or module:Class of your own.")]
Methods = Annotated[str | None, Option("--methods", metavar="A,B", help="Methods, as in `fewlabel list methods`.")]
Data = Annotated[str | None, Option("--data", metavar="NAME", help="Data set, or module:function of your own.")]
Changes = Annotated[
    list[str] | None, Option("--set", metavar="A.B=C", help="A setting, such as clients.alpha=0.1; repeatable.")
]
Vary = Annotated[list[str] | None, Option("--vary", metavar="A.B=C,D", help="A setting and its values; repeatable.")]
Seed = Annotated[int | None, Option("--seed", metavar="N", min=0, help="All that is random follows from it.")]
Seeds = Annotated[str | None, Option("--seeds", metavar="0,1,2", help="A run for each of them.")]
Workers = Annotated[
    int | None, Option("--workers", metavar="N", min=1, help="Processes; by default one per core, or two per GPU.")
]
Device = Annotated[
    str | None, Option("--device", metavar="NAME", help="cpu, or cuda for GPUs: short for --set device=NAME.")
]
Out = Annotated[Path | None, Option("--out", metavar="DIR", help="Where results go; by default below runs/.")]
Resume = Annotated[Path | None, Option("--resume", metavar="DIR", help="The run to go on with, as it is.")]
DataDir = Annotated[
    Path | None, Option(metavar="DIR", exists=True, file_okay=False, callback=use_data_dir, help="Where data are read.")
]
Format = Annotated[Form, Option("--format", help="json: exactly one JSON document on stdout.")]

Tables = Annotated[
    Layout, Option("--format", metavar="FORM", help="text, markdown, latex; csv or json with all numbers, unrounded.")
]


@app.callback(invoke_without_command=True, epilog=EXIT_CODES)
def fewlabel(
    context: typer.Context,
    show_version: Annotated[bool, Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Federated learning for when few have labels.

    Every command explains itself, as in `fewlabel run --help`.

    Examples:
      fewlabel run --method fedprox --set rounds=10
      fewlabel compare --methods fedprox --seeds 0,1,2
    """
    if show_version:
        print(version("fewlabel"))
    elif context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def run(
    file: File = None,
    method: Method = None,
    data: Data = None,
    changes: Changes = None,
    seed: Seed = None,
    seeds: Seeds = None,
    workers: Workers = None,
    device: Device = None,
    out: Out = None,
    resume: Resume = None,
    data_dir: DataDir = None,
    form: Tables = Layout.TEXT,
) -> None:
    """Run an experiment, or go on with a run.

    Settings are the defaults, changed by FILE (TOML), changed by options.

    Examples:
      fewlabel run --method fedprox --set clients.alpha=0.1 --set rounds=50
      fewlabel run experiment.toml --seeds 0,1,2 --out runs/three
      fewlabel run --resume runs/fedprox-digits-seed0
    """
    if resume is not None:
        if [given for given in (file, method, data, changes, seed, seeds, device, out) if given not in (None, [])]:
            raise BadInput("--resume goes on with a run as it is: give no FILE and no option that would change it")
        return run_one(resume, workers, form)
    if seed is not None and seeds is not None:
        raise BadInput("--seed is for one run and --seeds is for several: give one of them")
    base = table_of(file)
    if method is not None:
        base = without_method(base) | {"method": method_of(base, method)}
    changed = settings(data, device, changes) + ([] if seed is None else [f"seed={seed}"])
    if seeds is not None:
        return run_many(base, seeds_axis(seeds), changed, out or RUNS / "seeds", workers, form)
    from fewlabel.api import fresh_directory
    from fewlabel.experiment import read
    from fewlabel.runs import prepare

    experiment = read(base, changed)
    return run_one(prepare(experiment, out or fresh_directory(experiment, RUNS)), workers, form)


@app.command()
def compare(
    file: File = None,
    methods: Methods = None,
    seeds: Seeds = None,
    data: Data = None,
    changes: Changes = None,
    workers: Workers = None,
    device: Device = None,
    out: Out = None,
    data_dir: DataDir = None,
    form: Tables = Layout.TEXT,
) -> None:
    r"""Compare methods between their floor and their ceiling.

    All run the experiment in FILE (TOML); rows labels-only and all-labels are added.
    --set is for every row; what concerns one method goes into FILE's table \[method].
    Repeated, it skips what is done and resumes what was interrupted.

    Examples:
      fewlabel compare --methods fedprox --seeds 0,1,2
      fewlabel compare experiment.toml --methods fedprox --set rounds=50
    """
    if not methods:
        raise BadInput("compare needs --methods, such as --methods fedprox")
    base = table_of(file)
    names = dict.fromkeys(["labels-only", *words(methods), "all-labels"])
    axes = {"method": [method_of(base, name) for name in names]} | seeds_axis(seeds)
    run_many(base, axes, settings(data, device, changes), out or RUNS / "compare", workers, form)


@app.command()
def sweep(
    file: File = None,
    vary: Vary = None,
    methods: Methods = None,
    seeds: Seeds = None,
    data: Data = None,
    changes: Changes = None,
    workers: Workers = None,
    device: Device = None,
    out: Out = None,
    data_dir: DataDir = None,
    form: Tables = Layout.TEXT,
) -> None:
    r"""Run every combination of methods, seeds and settings.

    FILE (TOML) may hold a table \[grid] of settings to lists; options win over it.
    Repeated, it skips what is done and resumes what was interrupted.

    Examples:
      fewlabel sweep --methods fedavg,fedprox --vary clients.alpha=0.1,0.5
      fewlabel sweep grid.toml --seeds 0,1,2 --workers 4
    """
    base = table_of(file, grid=True)
    axes = dict(axes_of(base.pop("grid", {}))) | dict(map(axis, vary or []))
    if methods is not None:
        axes["method"] = [method_of(base, name) for name in words(methods)]
    if not axes and seeds is None:
        raise BadInput("sweep needs something to vary: --vary, --methods, --seeds or a table [grid] in FILE")
    root = out or RUNS / (f"sweep-{file.stem}" if file else "sweep")
    run_many(base, axes | seeds_axis(seeds), settings(data, device, changes), root, workers, form)


@app.command()
def reproduce(
    name: Annotated[str, Argument(metavar="NAME[/ROW]", hidden=True)] = "",
    listing: Annotated[bool, Option("--list", help="Which tables there are, and which data they need.")] = False,
    printing: Annotated[bool, Option("--print", help="Print a row as a file for `fewlabel run` instead.")] = False,
    rounds: Annotated[int | None, Option("--rounds", metavar="N", min=1, help="Fewer than the paper's, say.")] = None,
    seeds: Seeds = None,
    changes: Changes = None,
    workers: Workers = None,
    device: Device = None,
    out: Out = None,
    data_dir: DataDir = None,
    form: Format = Form.TEXT,
) -> None:
    """Run rows of the papers' tables; show ours beside theirs.

    NAME is a table or figure, ROW one of its rows; both may hold * and ?.
    Rows whose data are not here are left out.
    Repeated, it skips what is done and resumes what was interrupted.

    Examples:
      fewlabel reproduce --list
      fewlabel reproduce 'rscfed-table1/svhn-*' --rounds 50 --seeds 0,1,2
      fewlabel reproduce isofed-table2/pneumonia-isofed-l1u3-g08 --print
    """
    from fewlabel import reproduce as papers

    if listing or not name:
        return show_papers(form)
    rows, changed, numbers = papers.select(name), settings(None, device, changes), seeds_axis(seeds).get("seed")
    if printing:
        return print_row([(row, e) for row in rows for e in papers.wanted(row, changed, rounds, numbers)], form)
    root = out or RUNS / "reproduce"
    attempts = papers.plan(rows, root, changed, rounds, numbers)
    if not [attempt for attempt in attempts if not attempt.refused]:
        raise BadInput("; ".join(papers.Reproduction(attempts).refused()))
    able = [experiment for attempt in attempts if not attempt.refused for experiment in attempt.experiments]
    failure = run_all(able, root, workers)
    found = papers.Reproduction(attempts, changed)
    page = str(found.report(root))
    print(json.dumps(found.to_json() | {"report": page}, indent=1) if form == "json" else f"{found}\n{page}")
    if failure is not None:
        raise failure
    return None


def print_row(found: "Sequence[tuple[PaperRow, Experiment]]", form: Form) -> None:
    """An experiment of the papers as a file, or for programs to read."""
    from fewlabel.reproduce import as_file
    from fewlabel.strict import plain

    if len(found) > 1:
        raise BadInput(f"--print prints one row with one seed, and these are {len(found)}, such as {found[0][0].id}")
    row, experiment = found[0]
    print(json.dumps(plain(experiment), indent=1) + "\n" if form == "json" else as_file(row, experiment), end="")


def show_papers(form: Form) -> None:
    from rich.console import Console

    from fewlabel.reproduce import listed, overview

    if form == "json":
        return print(json.dumps(listed(), indent=1))
    return Console(highlight=False, markup=False, emoji=False).print(overview(listed()))


@app.command("list")
def list_(
    what: Annotated[Known, Argument(metavar="WHAT", hidden=True)],
    method: Annotated[str, Argument(metavar="[METHOD]", hidden=True)] = "",
    form: Format = Form.TEXT,
) -> None:
    """List what there is to choose from.

    WHAT is methods, datasets, models, partitions, views, or settings with their defaults (those of METHOD).

    Examples:
      fewlabel list methods
      fewlabel list settings rscfed
      fewlabel list models --format json
    """
    from fewlabel import display

    if method and what != Known.SETTINGS:
        raise BadInput(f"only settings are listed for a method, as in `fewlabel list settings {method}`")
    display.show_list(display.known(what, method), form)


@app.command()
def show(
    directory: Annotated[Path, Argument(metavar="RUN", hidden=True)],
    relations: Annotated[
        Path | None, Option("--relations", metavar="FILE", help="Draw FedIRM's relations among classes (.png, .svg).")
    ] = None,
    report: Annotated[Path | None, Option("--report", metavar="FILE", help="Write the page with the plots.")] = None,
    form: Tables = Layout.TEXT,
) -> None:
    """Show the result of a run, or of many side by side.

    RUN is its directory, or one that holds those of many; they may be unfinished.

    Examples:
      fewlabel show runs/fedprox-digits-seed0
      fewlabel show runs/compare --format latex
      fewlabel show runs/compare --report report.html
    """
    from fewlabel import display
    from fewlabel.comparison import found_in
    from fewlabel.results import Result

    if relations:
        Result(directory).plot_relations(relations)
    found = found_in(directory)
    display.show_result(found, form, found.report(report) if report else None)


app.command()(model_cli.predict)
app.command()(model_cli.export)


@app.command()
def bench(
    name: Annotated[str, Argument(metavar="[NAME]", hidden=True)] = "",
    full: Annotated[bool, Option("--full", help="All the data where a part is the default: fedavg.")] = False,
    form: Format = Form.TEXT,
) -> None:
    """Measure speed.

    NAME is a file in benchmarks/ of the source tree, and what it finds is JSON; without NAME, they are listed.

    Examples:
      fewlabel bench overhead
      fewlabel bench fedavg --full
    """
    from fewlabel import display

    folder = Path(__file__).parents[1] / "benchmarks"
    files = {path.stem: path for path in sorted(folder.glob("*.py")) if "\ndef main(" in path.read_text()}
    if not files:
        raise BadInput(f"there are no measurements in {folder}: they come with the source tree alone")
    if not name:
        return display.show_list(display.scripts(files), form)
    if name not in files:
        from fewlabel.experiment import unknown

        raise BadInput(unknown("measurement", name, files))
    sys.path.insert(0, str(folder.parent))  # its worker processes import it by this name
    with redirect_stdout(sys.stderr):
        measure = import_module(f"benchmarks.{name}").main
        if full and "full" not in signature(measure).parameters:
            raise BadInput(f"'{name}' has no part that is left out; --full is for fedavg")
        found = measure(full=True) if full else measure()
    return print(json.dumps(found, indent=1))


def table_of(file: Path | None, grid: bool = False) -> dict[str, Any]:
    """The settings in a file, not yet checked."""
    if file is None:
        return {}
    try:
        table = tomllib.loads(file.read_text())
    except (OSError, ValueError):
        from fewlabel.experiment import load

        load(file)  # fails as well, with the right sentence
        raise
    if "grid" in table and not grid:
        raise BadInput(f"{file} has a table [grid], which is for: fewlabel sweep {shlex.quote(str(file))}")
    from fewlabel.experiment import rooted

    return rooted(table, file.parent)


def method_of(base: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A method by name, with the file's settings if they are for it, or for whichever: a table without a name."""
    given = base.get("method")
    own = isinstance(given, dict) and given.get("name", name) == name == base.get("name", name)
    return {**given, "name": name} if own and given else {"name": name}


def without_method(base: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for any method; a row's name goes with the method that it named."""
    return {key: value for key, value in base.items() if key not in ("method", "name")}


def settings(data: str | None, device: str | None, changes: Sequence[str] | None) -> list[str]:
    given = {"data.name": data, "device": device}
    return [f"{key}={value}" for key, value in given.items() if value is not None] + list(changes or [])


def words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def seeds_axis(text: str | None) -> dict[str, list[Any]]:
    try:
        return {} if text is None else {"seed": [int(word) for word in text.split(",")]}
    except ValueError:
        raise BadInput(f"--seeds takes whole numbers such as 0,1,2, found '{text}'") from None


def axis(text: str) -> tuple[str, list[Any]]:
    """A setting and its values from `a.b=c,d`."""
    from fewlabel.strict import parse

    key, _, values = text.partition("=")
    if not words(values):
        raise BadInput(f"--vary takes a.b=c,d, found '{text}'")
    listed = parse(f"[{values}]")
    return key.strip(), listed if isinstance(listed, list) else [parse(word) for word in words(values)]


def axes_of(grid: Any, above: str = "grid") -> Iterator[tuple[str, list[Any]]]:
    """Dotted settings and their values from the tables of a grid."""
    if isinstance(grid, list) and grid:
        yield above.removeprefix("grid."), grid
    elif isinstance(grid, dict):
        for key, value in grid.items():
            yield from axes_of(value, f"{above}.{key}")
    else:
        raise BadInput(f"{above} must be a list of values, found {grid!r}")


def run_one(directory: Path, workers: int | None, form: Layout) -> None:
    """Runs what is left of a run and shows its result."""
    from fewlabel.display import Rounds, show_result
    from fewlabel.results import Result
    from fewlabel.runs import execute

    result, page = Result(directory), None
    if result.finished:
        tell(f"{directory} is finished already; this is its result")
        page = None if (directory / "report.html").exists() else result.report()
    else:
        again = f"fewlabel run --resume {shlex.quote(str(directory))}"
        caution([result.experiment])
        with interruptible(again) as stop, Rounds(result.experiment.rounds) as shown:
            execute(directory, workers=workers, watch=shown.watch, stop=stop)
        result = Result(directory)
        page = result.report()
    show_result(result, form, page)


def run_many(
    base: Mapping[str, Any],
    axes: Mapping[str, Sequence[Any]],
    changes: Sequence[str],
    root: Path,
    workers: int | None,
    form: Layout,
) -> None:
    """Runs all combinations side by side and shows how they compare."""
    from fewlabel import sweep
    from fewlabel.comparison import Comparison
    from fewlabel.display import show_result
    from fewlabel.results import Result

    experiments = sweep.grid(without_method(base) if "method" in axes else base, axes, changes)
    failure = run_all(experiments, root, workers)
    directories = dict.fromkeys(sweep.place(experiment, root) for experiment in experiments)
    comparison = Comparison([Result(directory) for directory in directories])
    show_result(comparison, form, comparison.report(root / "report.html"))
    if failure is not None:
        raise failure


def run_all(experiments: "Sequence[Experiment]", root: Path, workers: int | None) -> RunFailed | None:
    """Runs experiments side by side, and returns the failure of some: what the others found is to be shown first."""
    from fewlabel import sweep
    from fewlabel.display import Runs

    caution(experiments)
    rounds = {sweep.place(experiment, root): experiment.rounds for experiment in experiments}
    done = sum((directory / "summary.json").exists() for directory in rounds)
    with interruptible("do the same again") as stop, Runs(rounds, done) as shown:
        try:
            sweep.sweep(experiments, root, workers=workers, watch=shown.watch, stop=stop)
        except RunFailed as error:
            error.add_note("to go on: do the same again")
            return error
    return None


@contextmanager
def interruptible(again: str) -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM end the round first, a second one leaves at once; an error tells how to go on: `again`."""
    from fewlabel.runs import Interrupted

    flag, owner = mmap.mmap(-1, 1), os.getpid()  # memory that forked processes share: one signal stops them all

    def handle(*_: object) -> None:
        if os.getpid() != owner:
            return
        if flag[0]:
            raise KeyboardInterrupt
        flag[0] = 1
        os.write(2, b"finishing this round; once more to leave at once\n")  # print is not safe in a handler

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(flag[0])
    except BaseException as error:
        unfinished = isinstance(error, RunFailed | Interrupted | KeyboardInterrupt | OSError) or "resume" in str(error)
        if unfinished and again not in str(error):
            error.add_note(f"to go on: {again}")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def caution(experiments: "Sequence[Experiment]") -> None:
    """Tells once what may not be meant, though it runs."""
    for sentence in dict.fromkeys(sentence for experiment in experiments for sentence in experiment.cautions):
        tell(sentence)


def tell(sentence: str) -> None:
    with suppress(OSError):  # where stderr is gone, nobody is left to be told
        print("fewlabel:", " ".join(sentence.split()), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; what goes wrong is told in one line."""
    try:
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)  # methods and data of one's own lie there
        command = typer.main.get_command(app)
        # Not command.main(), which has its own idea of what to print when something goes wrong.
        with command.make_context("fewlabel", list(sys.argv[1:] if argv is None else argv)) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except BaseException as error:
        sentence, code = verdict(error)
        if sentence:
            tell("; ".join([sentence.rstrip("."), *getattr(error, "__notes__", [])]))
        return code
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # or Python would try once more at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def verdict(error: BaseException) -> tuple[str, int]:
    """The sentence for an error, and the exit code."""
    match error:
        case click.ClickException():
            return error.format_message(), 2
        case FewLabelError():
            return str(error), error.exit_code
        case KeyboardInterrupt():
            return "interrupted", 130
        case BrokenPipeError():
            return "", 128 + signal.SIGPIPE  # the reader has seen enough
        case OSError():
            return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error), 4
    with tempfile.NamedTemporaryFile("w", prefix="fewlabel-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    return f"this is a bug in FewLabel: {type(error).__name__}: {error}; traceback in {file.name}", 1


if __name__ == "__main__":
    sys.exit(main())
