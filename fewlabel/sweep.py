"""Many runs side by side, one core each: what is done is skipped, what was interrupted is resumed."""

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from fewlabel import strict
from fewlabel.errors import FewLabelError, RunFailed
from fewlabel.experiment import Experiment, dumps, read
from fewlabel.runs import Interrupted, execute, prepare

Watch = Callable[
    [Path, dict[str, Any]], None
]  # is shown each run's lines, and at its end {"done": true} or {"failed": …}


def grid(base: Mapping[str, Any], axes: Mapping[str, Sequence[Any]], changes: Sequence[str] = ()) -> list[Experiment]:
    """Every combination of the axes, which are dotted settings such as method, seed or clients.alpha."""
    experiments = []
    for values in product(*axes.values()):
        table: dict[str, Any] = json.loads(json.dumps(dict(base)))
        for key, value in zip(axes, values, strict=True):
            if key == "method":
                table["method"] = value if isinstance(value, dict) else {"name": value}
            else:
                strict.assign(table, key, value)
        experiments.append(read(table, changes))
    return experiments


def place(experiment: Experiment, root: Path) -> Path:
    """Where a run of this experiment lies below a sweep's directory: equal experiments at the same place."""
    digest = hashlib.blake2b(dumps(experiment).encode(), digest_size=4).hexdigest()
    name = experiment.name.replace(":", "-").replace("/", "-")
    return root / f"{name}-{experiment.data.name.replace(':', '-')}-seed{experiment.seed}-{digest}"


def sweep(
    experiments: Iterable[Experiment],
    root: Path,
    *,
    workers: int | None = None,
    watch: Watch = lambda directory, line: None,
    stop: Callable[[], bool] = lambda: False,
) -> list[Path]:
    """Runs all experiments and returns their directories; a failure of one does not stop the others."""
    directories = list(dict.fromkeys(lay_out(experiment, root) for experiment in experiments))
    workers = workers or os.cpu_count() or 1
    todo = [directory for directory in directories if not (directory / "summary.json").exists()]
    if len(todo) == 1 or workers == 1:
        for directory in todo:
            execute(directory, workers=workers, watch=partial(watch, directory), stop=stop)
            watch(directory, {"done": True})
        return directories
    failures, waiting, under_way = [], list(reversed(todo)), dict[Connection, Path]()
    context = multiprocessing.get_context("fork")
    while under_way or (waiting and not stop()):
        while waiting and len(under_way) < workers and not stop():
            directory = waiting.pop()
            mine, its = context.Pipe(duplex=False)
            context.Process(target=child, args=(directory, its, stop), daemon=True).start()
            its.close()
            under_way[mine] = directory
        for ready in wait(list(under_way)):
            assert isinstance(ready, Connection)
            directory = under_way[ready]
            try:
                line = json.loads(ready.recv_bytes())
            except EOFError:
                line = {"failed": f"its process died; do the same again to resume {directory}"}
            watch(directory, line)
            if "failed" in line:
                failures.append(f"{directory.name}: {line['failed']}")
            if "failed" in line or "done" in line:
                del under_way[ready]
                ready.close()
    if failures:
        raise RunFailed(f"{len(failures)} of {len(todo)} runs failed: " + "; ".join(failures))
    if waiting or stop():
        raise Interrupted(f"stopped with {len(waiting)} of {len(todo)} runs not begun; do the same again to go on")
    return directories


def lay_out(experiment: Experiment, root: Path) -> Path:
    directory = place(experiment, root)
    if not (directory / "experiment.toml").exists():
        prepare(experiment, directory)
    return directory


def child(directory: Path, tell: Connection, stop: Callable[[], bool]) -> None:
    """One run in a process of its own, which tells what happens as lines of JSON."""
    try:
        execute(directory, workers=1, watch=lambda line: tell.send_bytes(json.dumps(line).encode()), stop=stop)
        last: dict[str, Any] = {"done": True}
    except Interrupted as error:
        last = {"done": False, "stopped": str(error)}
    except (FewLabelError, OSError) as error:
        last = {"failed": str(error)}
    tell.send_bytes(json.dumps(last).encode())
