"""The study of docs/RESULTS.md: tunes, runs and renders what `experiments/results/` describes.

    python -m experiments.study run [TABLE ...]   runs what has no line in docs/results/ yet; by default everything
        --set a.data.path=pbc.npz                 a setting of table (a) and of those that build on it; without a
                                                  table's letter in front, of all
        --without tutor                           leaves out a row, its versions and its parts
        --workers 2                               runs at the same time; by default one on each core
        --runs runs/results                       where runs are while they are under way
    python -m experiments.study plan [TABLE ...]  lists what can be run by now, and runs nothing
    python -m experiments.study render            docs/results/ -> the tables and plots of docs/RESULTS.md

A finished run adds one line to docs/results/TABLE.csv at once. A line that is there counts as done. Stop it at any
time, by Ctrl-C or harder: done again, it goes on. docs/PROTOCOL.md says why the study is as it is. Settings are chosen
by validation alone, and nothing here prints a number of the test set.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from experiments import lines
from experiments.plan import EVERY, Line, Trial, content, plan
from fewlabel.cli.run import interruptible
from fewlabel.core import storage
from fewlabel.core.errors import BadInput, FewLabelError
from fewlabel.data import partition
from fewlabel.data.labels import spread
from fewlabel.engine import record
from fewlabel.engine.pool import end_with
from fewlabel.engine.run import Interrupted, prepare
from fewlabel.engine.sweep import attempt
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import Experiment, load
from fewlabel.report.results import Result


def known_lines(tables: Sequence[str] = EVERY) -> list[Line]:
    """All lines of these tables and of what tunes them."""
    tuning = dict.fromkeys(f"tuning-{content(table)['tuned'][0]}" for table in tables)
    base = [content(table)["tuned"] for table in tables]
    return [line for name in dict.fromkeys([*tuning, *base, *tables]) for line in lines.read_lines(name)]


def changes_for(trial: Trial, changes: Sequence[str]) -> list[str]:
    """The changes that are for a trial's table: `a.data.path=…` is for (a) and those that build on it."""
    table = next((name for name in EVERY if trial.table in (name, f"tuning-{name[0]}")), trial.table)
    base = content(table).get("cells", {}).get(trial.cell, {}).get("of") or content(table).get("of", table)
    letters = {name[0] for name in EVERY}
    split = [
        (change.partition(".") if change[1:2] == "." and change[0] in letters else ("", "", change))
        for change in changes
    ]
    return [change for letter, _, change in split if letter in ("", base[0], table[0])]


def place(trial: Trial, root: Path) -> Path:
    name = "-".join([trial.row, f"seed{trial.seed}", *(trial.settings if trial.tunes else ())])
    return root / trial.table / trial.cell.replace(" ", "-") / name.replace("method.", "").replace("local.", "")


def experiment_of(trial: Trial, changes: Sequence[str], root: Path) -> Experiment:
    found = trial.experiment(changes_for(trial, changes))
    return found if trial.fewer is None else with_fewer(found, trial.fewer, root)


def with_fewer(experiment: Experiment, count: int, root: Path) -> Experiment:
    """The same clients, but the labeled ones keep so many images each, evenly over their classes."""
    dataset = dataset_of(experiment)
    dealt, y = partition.of(dataset, experiment), dataset.splits["train"].labels.numpy()
    labeled = [client for client in dealt.clients if len(dealt.shares[client].labeled)]
    shares = [
        partition.Holding(spread(y, share.labeled, min(count, len(share.labeled))), share.unlabeled)
        for share in dealt.shares
    ]
    fewer = replace(dealt, shares=shares)
    path = root / "partitions" / f"{fewer.checksum[:16]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        fewer.save(path, y, dataset.classes)
    clients = replace(experiment.clients, partition="file", file=str(path))
    return replace(experiment, clients=clients, labels=replace(experiment.labels, ids=tuple(labeled), which="first"))


def work(
    trial: Trial,
    changes: Sequence[str],
    directory: Path,
    root: Path,
    tell: Connection,
    stop: Callable[[], bool],
    parent: int,
) -> None:
    """Do one run in this process, or the rest of it, and say how it ended."""
    end_with(parent)
    try:
        wanted = experiment_of(trial, changes, root)
        if record.is_run(directory) and load(directory / record.EXPERIMENT).resolved != wanted.resolved:
            shutil.rmtree(directory)  # of another plan; its line is not there, so nothing is lost
        if not record.is_run(directory):
            prepare(wanted, directory)
        end = attempt(directory, 1, lambda line: None, stop)
    except FewLabelError as error:
        end = {"failed": str(error)}
    except Exception as error:  # the other runs go on
        end = {"failed": f"{type(error).__name__}: {error}"}
    tell.send_bytes(json.dumps(end).encode())


def copied(trial: Trial, wanted: Experiment, known: Sequence[Line]) -> bool:
    """Take over the line of the same experiment in another table, if there is one."""
    same = next((one for one in known if one.get("experiment") == lines.hash_of(wanted) and one["partition"]), None)
    if trial.tunes or same is None:
        return False
    own = {"table": trial.table, "cell": trial.cell, "row": trial.row, "settings": " ".join(trial.settings)}
    curves = lines.read_curves(same["table"]).get(same["cell"], {}).get(same["row"], {}).get(same["seed"])
    if curves:
        lines.add_curves(trial.table, trial.cell, trial.row, str(trial.seed), curves)
    lines.add({**same, **own})
    return True


def finish(trial: Trial, directory: Path) -> str:
    """Write down a finished run, and return what may be said about it."""
    result = Result(directory)
    line = lines.line_of(trial, result)
    if not trial.tunes:
        lines.add_curves(trial.table, trial.cell, trial.row, str(trial.seed), lines.curves_of(result))
    lines.add(line)
    for left in [directory] if trial.tunes else [directory / record.CHECKPOINTS, directory / record.CLIENTS]:
        shutil.rmtree(left, ignore_errors=True)  # of tuning everything: nobody shall look at its test numbers
    return f"validation {100 * (line['last_validation_balanced_accuracy'] or 0):.1f}, {line['seconds']:.0f} s"


def run(tables: Sequence[str], changes: Sequence[str], without: Sequence[str], workers: int, root: Path) -> int:
    """Run what has no line, the first first, as many at once as there are workers. Return how many failed."""
    root.mkdir(parents=True, exist_ok=True)
    failed, died = set[tuple[str, ...]](), set[tuple[str, ...]]()
    under_way: dict[Connection, tuple[Trial, Path, BaseProcess]] = {}
    context = multiprocessing.get_context("fork")
    with (root / ".lock").open("w") as lock, interruptible("do the same again") as stop:
        if not storage.lock(lock, wait=False):
            raise BadInput(f"another process runs the study in {root}; wait for it, or choose another --runs")

        def start() -> bool:
            known = known_lines(tables)
            busy = {trial.key for trial, *_ in under_way.values()}
            trial = next((one for one in plan(tables, known, failed, without, died) if one.key not in busy), None)
            if trial is None:
                return False
            try:
                every = [line for table in EVERY for line in lines.read_lines(table)]
                if trial.fewer is None and copied(trial, experiment_of(trial, changes, root), every):
                    say(trial, "as in another table")
                    return True
            except FewLabelError as error:
                failed.add(trial.key)
                say(trial, f"FAILED: {error}")
                return True
            directory, (mine, its) = place(trial, root), context.Pipe(duplex=False)
            process = context.Process(
                target=work, args=(trial, changes, directory, root, its, stop, os.getpid()), daemon=False
            )
            process.start()
            its.close()
            under_way[mine] = trial, directory, process
            return True

        try:
            while True:
                while len(under_way) < workers and not stop() and start():
                    pass
                if not under_way:
                    break
                for ready in wait(list(under_way)):
                    assert isinstance(ready, Connection)
                    trial, directory, process = under_way.pop(ready)
                    try:
                        end = json.loads(ready.recv_bytes())
                    except EOFError:  # killed by someone, or by the system for want of memory: it may do well later
                        end = {}
                        died.add(trial.key)
                    ready.close()
                    process.join()
                    try:
                        words = (
                            finish(trial, directory) if end.get("done") else end.get("failed", "its process stopped")
                        )
                    except FewLabelError as error:
                        words, end = str(error), {}
                        died.add(trial.key)
                    if "failed" in end:
                        failed.add(trial.key)
                    say(trial, f"FAILED: {words}" if trial.key in failed | died else words)
        finally:
            for _, _, process in under_way.values():
                process.kill()
                process.join()
        if stop():
            raise Interrupted("stopped; do the same again to go on")
    if failed | died:
        print(f"{len(failed | died)} runs failed; do the same again to try them again", file=sys.stderr)
    return len(failed | died)


def say(trial: Trial, words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {trial.words}: {words}", flush=True)


def named(tables: Sequence[str]) -> list[str]:
    """Tables by name or letter, in the order of the study."""
    if strange := [name for name in tables if name not in EVERY and name not in {table[0] for table in EVERY}]:
        raise BadInput(f"there is no table '{strange[0]}'; there are {', '.join(EVERY)}")
    return [table for table in EVERY if not tables or table in tables or table[0] in tables]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        "experiments.study", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("command", choices=("run", "plan", "render"))
    parser.add_argument("tables", nargs="*")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--runs", type=Path, default=Path("runs/results"))
    given = parser.parse_args(words)
    tables = named(given.tables)
    if given.command == "render":
        from experiments.render import render

        render()
    elif given.command == "plan":
        for trial in plan(tables, known_lines(tables), (), given.without):
            print(trial.words)
    else:
        return 1 if run(tables, given.changes, given.without, given.workers, given.runs.absolute()) else 0
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except FewLabelError as error:
        sys.exit(str(error))
