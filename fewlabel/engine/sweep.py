"""Many runs side by side, one core each. Finished runs are skipped, interrupted ones are resumed."""

import hashlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fewlabel.core import schema
from fewlabel.core.errors import BadInput, FewLabelError, RunFailed
from fewlabel.engine import record
from fewlabel.engine.pool import end_with
from fewlabel.engine.run import Interrupted, execute, prepare
from fewlabel.experiment import Experiment, by_another_recipe, dumps, load, read

# Called with each line of a run, and at its end with {"done": true} or {"failed": …}.
Watch = Callable[[Path, dict[str, Any]], None]


def grid(base: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], changes: Sequence[str] = ()) -> list[Experiment]:
    """Return an experiment for every combination of the axes: dotted settings such as method, seed or clients.alpha."""
    if twice := {change.partition("=")[0].strip() for change in changes} & axes.keys():
        raise BadInput(f"{min(twice)} is both set and varied; give one of them")
    axes = dict(sorted(axes.items(), key=lambda axis: axis[0] != "method"))  # method comes first
    recipes = [change.partition("=")[2].strip() for change in changes if change.partition("=")[0].strip() == "recipe"]
    others = [change for change in changes if change.partition("=")[0].strip() != "recipe"]
    experiments = []
    for values in product(*axes.values()):
        table: dict[str, Any] = json.loads(json.dumps(dict(base)))
        varied = dict(zip(axes, values, strict=True))
        if (method := varied.pop("method", None)) is not None:
            table["method"] = method if isinstance(method, dict) else {"name": method}
        for recipe in [*recipes, *([varied.pop("recipe")] if "recipe" in varied else [])]:
            table = by_another_recipe(table, recipe)  # wins over the file's training; what is varied wins over it
        for key, value in varied.items():
            schema.assign(table, key, value)
        try:
            experiments.append(read(table, others))
        except BadInput as error:
            if "method" not in axes or "method." not in str(error):
                raise
            mend = "what is for one method goes into a file's table [methods.NAME], or --set methods.NAME.SETTING=…"
            raise BadInput(f"{table['method']['name']}: {error}; {mend}") from None
    return experiments


def place(experiment: Experiment, root: Path) -> Path:
    """Return the directory of a run below a sweep's directory. Equal experiments have the same one."""
    digest = hashlib.blake2b(dumps(experiment).encode() + own_code(experiment), digest_size=4).hexdigest()
    name = f"{experiment.name}-{experiment.data.name}".replace(":", "-").replace("/", "-")
    return root / f"{name}-seed{experiment.seed}-{digest}"


def other_rounds(experiments: Iterable[Experiment], root: Path) -> Iterator[str]:
    """Say which runs begin anew, although the same ones with another number of rounds are there already."""
    new = {place(experiment, root): experiment.resolved for experiment in experiments}
    new = {directory: experiment for directory, experiment in new.items() if not record.is_run(directory)}
    there = []
    for directory in record.runs_in(root) if new else ():
        with suppress(FewLabelError):  # it may be of a method that is gone
            there.append(load(directory / record.EXPERIMENT).resolved)
    for rounds in dict.fromkeys(experiment.rounds for experiment in new.values()):
        alike = [replace(experiment, rounds=1) for experiment in new.values() if experiment.rounds == rounds]
        before = dict.fromkeys(old.rounds for old in there if replace(old, rounds=1) in alike)
        if before:
            yield (
                f"{root} has the same with {' and '.join(map(str, before))} rounds; training depends on the number of "
                f"rounds, so runs of {rounds} rounds begin anew"
            )


def own_code(experiment: Experiment) -> bytes:
    """Return the code of a user's own method or network, because its runs must be done again after an edit."""
    names = [type(experiment.method).__module__, *experiment.model.name.split(":")[:-1]]
    own = [name for name in names if name != "timm" and not name.startswith("fewlabel.")]
    files = [getattr(import_module(name), "__file__", None) for name in own]
    return b"".join(Path(file).read_bytes() for file in files if file)


def run_all(
    directories: Sequence[Path],
    *,
    workers: int | None = None,
    watch: Watch = lambda directory, line: None,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Run what is laid out in these directories. A failure of one does not stop the others."""
    todo = [directory for directory in directories if not (directory / "summary.json").exists()]
    experiments = [load(directory / "experiment.toml") for directory in todo]
    # Runs go one after the other, each with all workers, if there is only one, or if threads or a GPU rule out a fork.
    together = len(todo) > 1 and all((one.threads, one.device) == (1, "cpu") for one in experiments)
    cores = workers or os.cpu_count() or 1
    ends = side_by_side(todo, cores, watch, stop) if together else in_turn(todo, workers, watch, stop)
    failures = [f"{directory.name}: {line['failed']}" for directory, line in ends.items() if "failed" in line]
    if failures:
        raise RunFailed(f"{len(failures)} of {len(todo)} runs failed: " + "; ".join(failures))
    if unfinished := len(todo) - sum(line["done"] for line in ends.values()):
        raise Interrupted(f"stopped with {unfinished} of {len(todo)} runs unfinished; do the same again to go on")


def in_turn(
    todo: Sequence[Path], workers: int | None, watch: Watch, stop: Callable[[], bool]
) -> dict[Path, dict[str, Any]]:
    """Do one run after the other, and return how each ended."""
    ends = {}
    for directory in todo:
        if stop():
            break
        ends[directory] = attempt(directory, workers, partial(watch, directory), stop)
        watch(directory, ends[directory])
    return ends


def side_by_side(
    todo: Sequence[Path], workers: int, watch: Watch, stop: Callable[[], bool]
) -> dict[Path, dict[str, Any]]:
    """Do each run in its own process, as many at once as there are workers, and return how each ended."""
    ends: dict[Path, dict[str, Any]] = {}
    waiting, under_way = list(reversed(todo)), dict[Connection, tuple[Path, BaseProcess]]()
    context = multiprocessing.get_context("fork")
    try:
        while under_way or (waiting and not stop()):
            while waiting and len(under_way) < workers and not stop():
                directory = waiting.pop()
                mine, its = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(
                    target=child, args=(directory, its, stop, os.getpid()), daemon=True
                )
                process.start()
                its.close()
                under_way[mine] = directory, process
            for ready in wait(list(under_way)):
                assert isinstance(ready, Connection)
                directory, process = under_way[ready]
                try:
                    line = json.loads(ready.recv_bytes())
                except EOFError:
                    line = {"failed": "its process died; do the same again to resume it"}
                watch(directory, line)
                if "failed" in line or "done" in line:
                    ends[directory] = line
                    del under_way[ready]
                    ready.close()
                    process.join()
    finally:
        for _, process in under_way.values():
            process.kill()
            process.join()
    return ends


def lay_out(experiments: Iterable[Experiment], root: Path) -> list[Path]:
    """Lay out runs that are not there yet, and return the directories of all."""
    places = {place(experiment, root): experiment for experiment in experiments}
    for directory, experiment in places.items():
        if not (directory / "experiment.toml").exists():
            prepare(experiment, directory)
    return list(places)


def child(directory: Path, tell: Connection, stop: Callable[[], bool], parent: int) -> None:
    """Do one run in this process, and tell what happens as lines of JSON."""
    end_with(parent)
    tell.send_bytes(
        json.dumps(attempt(directory, 1, lambda line: tell.send_bytes(json.dumps(line).encode()), stop)).encode()
    )


def attempt(
    directory: Path, workers: int | None, watch: Callable[[dict[str, Any]], None], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Do one run, and return how it ended."""
    try:
        execute(directory, workers=workers, watch=watch, stop=stop)
    except Interrupted as error:
        return {"done": False, "stopped": str(error)}
    except FewLabelError as error:
        return {"failed": str(error)}
    except Exception as error:  # the other runs go on
        (directory / "error.txt").write_text(traceback.format_exc())
        return {"failed": f"{type(error).__name__}: {error}; traceback in {directory / 'error.txt'}"}
    return {"done": True}
