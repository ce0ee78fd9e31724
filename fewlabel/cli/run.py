"""The commands that run: `fewlabel run`, `fewlabel compare` and `fewlabel sweep`."""

import mmap
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fewlabel.api import fresh_directory
from fewlabel.cli.options import (
    RUNS,
    SIMULATOR,
    Backend,
    Changes,
    Data,
    DataDir,
    Device,
    Every,
    File,
    Layout,
    Method,
    Methods,
    Out,
    Resume,
    Seed,
    Seeds,
    Tables,
    Track,
    Vary,
    Workers,
    axes_of,
    axis,
    changes_of,
    seeds_axis,
    table_of,
    without_method,
    words,
)
from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.engine import backends, record
from fewlabel.experiment import Experiment, method_table, read
from fewlabel.report.comparison import Comparison
from fewlabel.report.results import Result
from fewlabel.report.runs import CEILING, FLOOR
from fewlabel.report.terminal import Rounds, Runs, show_result, tell, tell_notes
from fewlabel.report.trackers import Trackers

AGAIN = "do the same again"


def run(
    file: File = None,
    method: Method = None,
    data: Data = None,
    changes: Changes = None,
    seed: Seed = None,
    seeds: Seeds = None,
    workers: Workers = None,
    device: Device = None,
    backend: Backend = SIMULATOR,
    out: Out = None,
    resume: Resume = None,
    data_dir: DataDir = None,
    track: Track = None,
    form: Tables = Layout.TEXT,
) -> None:
    """Run an experiment, or resume a run.

    FILE (TOML) changes the default settings, and options change them further.

    Examples:
      fewlabel run --method fedprox --set clients.alpha=0.1 --set rounds=50
      fewlabel run experiment.toml --seeds 0,1,2 --out runs/three
      fewlabel run --resume runs/fedprox-digits-seed0
    """
    if resume is not None:
        if [given for given in (file, method, data, changes, seed, seeds, device, out) if given not in (None, [])]:
            longer = "; other rounds make a new run" if any(text.startswith("rounds") for text in changes or ()) else ""
            raise BadInput(
                f"--resume goes on with a run as it is: give no FILE and no option that would change it{longer}"
            )
        return run_one(resume, workers, form, backend, track)
    if seed is not None and seeds is not None:
        raise BadInput("--seed is for one run and --seeds is for several: give one of them")
    if seeds is not None and backend != SIMULATOR:
        raise BadInput("--backend is for one run at a time: give --seed in place of --seeds")
    base = table_of(file)
    if method is not None:
        base = without_method(base) | {"method": method_table(base, method)}
    changed = changes_of(data, device, changes) + ([] if seed is None else [f"seed={seed}"])
    if seeds is not None:
        return run_many(base, seeds_axis(seeds), changed, out or RUNS / "seeds", workers, form, track)
    from fewlabel.engine.run import laid_out

    backends.check(backend)
    experiment = read(base, changed)
    with laid_out(experiment, out or fresh_directory(experiment, RUNS)) as directory:
        return run_one(directory, workers, form, backend, track)


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
    track: Track = None,
    form: Tables = Layout.TEXT,
    every: Every = False,
) -> None:
    r"""Compare methods with a floor and a ceiling.

    All methods run the experiment in FILE (TOML). The rows labels-only, the
    floor, and all-labels, the ceiling, are added. --set changes every row; a
    table \[methods.cbafed] in FILE, or --set methods.cbafed.beta=0.2, changes
    only cbafed. There may be one for each method. Run the same command again
    to go on: finished runs are kept, others are resumed.

    Examples:
      fewlabel compare --methods fedprox --seeds 0,1,2
      fewlabel compare --methods fedprox --set methods.fedprox.proximal=0.1
      fewlabel compare experiment.toml --methods fedprox --set rounds=50
    """
    if not methods:
        raise BadInput("compare needs --methods, such as --methods fedprox")
    base = table_of(file)
    names = dict.fromkeys([FLOOR, *words(methods), CEILING])
    axes = {"method": [method_table(base, name) for name in names]} | seeds_axis(seeds)
    run_many(base, axes, changes_of(data, device, changes), out or RUNS / "compare", workers, form, track, every)


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
    track: Track = None,
    form: Tables = Layout.TEXT,
    every: Every = False,
) -> None:
    r"""Run every combination of methods, seeds and settings.

    FILE (TOML) may hold a table \[grid], with a list of values for each
    setting. Options win over it. Run the same command again to go on: finished
    runs are kept, others are resumed.

    Examples:
      fewlabel sweep --methods fedavg,fedprox --vary clients.alpha=0.1,0.5
      fewlabel sweep grid.toml --seeds 0,1,2 --workers 4
    """
    base = table_of(file, grid=True)
    axes = dict(axes_of(base.pop("grid", {}))) | dict(map(axis, vary or []))
    if methods is not None:
        axes["method"] = [method_table(base, name) for name in words(methods)]
    if not axes and seeds is None:
        raise BadInput("sweep needs something to vary: --vary, --methods, --seeds or a table [grid] in FILE")
    root = out or RUNS / (f"sweep-{file.stem}" if file else "sweep")
    run_many(base, axes | seeds_axis(seeds), changes_of(data, device, changes), root, workers, form, track, every)


def run_one(directory: Path, workers: int | None, form: Layout, backend: str, track: str | None) -> None:
    """Run what is left of a run and show its result."""
    from fewlabel.engine.run import execute

    result, page, trackers = Result(directory), None, Trackers(words(track or ""), directory)
    if result.summary is not None:
        record.check_rounds(directory, result.summary["rounds"], result.experiment.rounds)
        trackers.complete(directory)
        tell(f"{directory} is finished already; this is its result")
        page = None if (directory / record.REPORT).exists() else result.report()
    else:
        resume = f"fewlabel run --resume {shlex.quote(str(directory))}"
        resume += "" if backend == SIMULATOR else f" --backend {backend}"
        resume += f" --track {track}" if track else ""
        tell_notes([result])
        shown = Rounds(result.experiment, directory)
        with interruptible(resume) as stop, shown, trackers.following(directory) as follow:

            def watch(line: record.Line) -> None:
                shown.watch(line)
                follow(line)

            execute(directory, workers=workers, watch=watch, stop=stop, backend=backend)
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
    track: str | None,
    every: bool = False,
) -> None:
    """Run all combinations side by side and show how they compare."""
    from fewlabel.engine import sweep

    experiments = sweep.grid(without_method(base) if "method" in axes else base, axes, changes)
    failure = run_all(experiments, root, workers, track)
    directories = dict.fromkeys(sweep.place(experiment, root) for experiment in experiments)
    comparison = Comparison([Result(directory) for directory in directories])
    show_result(comparison, form, comparison.report(root / record.REPORT), every)
    if failure is not None:
        raise failure


def run_all(
    experiments: Sequence[Experiment], root: Path, workers: int | None, track: str | None = None
) -> RunFailed | None:
    """Run experiments side by side. Return the failure of some, so that the results of others are shown first."""
    from fewlabel.engine import sweep

    for sentence in sweep.other_rounds(experiments, root):
        tell(sentence)
    trackers = Trackers(words(track or ""), root)
    places = {sweep.place(experiment, root): experiment for experiment in experiments}
    done = [directory for directory in places if record.is_finished(directory)]
    for directory in done:
        trackers.complete(directory)
    with interruptible(AGAIN) as stop, Runs(places, len(done)) as shown:

        def watch(directory: Path, line: record.Line) -> None:
            shown.watch(directory, line)
            trackers.watch(directory, line)

        try:
            directories = sweep.lay_out(experiments, root)
            tell_notes([Result(directory) for directory in directories])
            sweep.run_all(directories, workers=workers, watch=watch, stop=stop)
        except RunFailed as error:
            error.add_note(f"to go on: {AGAIN}")
            return error
    return None


@contextmanager
def interruptible(resume: str) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C and SIGTERM end the current round first. A second one leaves at once.

    Yields a function that says whether to stop. `resume` tells people how to go on, and errors end with it.
    """
    from fewlabel.engine.run import Interrupted

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
        if unfinished and resume not in str(error):
            error.add_note(f"to go on: {resume}")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
