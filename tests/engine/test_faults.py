"""Killed at any moment and resumed is never killed, to the bit; and whoever is killed leaves nothing behind."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from fewlabel.core.errors import StorageError
from fewlabel.core.federation import ClientError
from fewlabel.engine.checkpoint import Checkpoints
from fewlabel.engine.executor import Job, Tickets
from fewlabel.engine.pool import Pool, WorkerDied
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import Interrupted, execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.experiment import load
from tests.probe import wait_for

RunDir = Callable[..., Path]
ROOT = Path(__file__).parents[2]
KEEPER = ("method=tests.keeper:Keeper", "rounds=8")
EXECUTE = "import pathlib, sys; from fewlabel.engine.run import execute; execute(pathlib.Path(sys.argv[1]), workers=2)"


class Result(NamedTuple):
    """All of a run that must not depend on who did it, or how often it was killed."""

    models: list[bytes]
    rounds: list[dict[str, Any]]


def result(directory: Path) -> Result:
    rounds = [
        {key: value for key, value in line.items() if not key.startswith("seconds")} for line in read_rounds(directory)
    ]
    return Result([path.read_bytes() for path in sorted(directory.glob("model*.safetensors"))], rounds)


@pytest.fixture(scope="session")
def undisturbed(small_run: RunDir) -> Result:
    """Keeper, never killed, in one process."""
    directory = small_run(*KEEPER)
    execute(directory, executor=Serial())
    return result(directory)


def killed(directory: Path, lay: Callable[[], None] = lambda: None, **how: Any) -> None:
    """Runs in a forked process in which `lay` has laid a mine, and sees it killed."""

    def run() -> None:
        lay()
        execute(directory, **{"workers": 2, **how})

    child = get_context("fork").Process(target=run)
    child.start()
    child.join(120)
    assert child.exitcode == -signal.SIGKILL
    nobody_left(lambda: members_of(child.pid or 0, directory))


def after(rounds: int) -> Callable[[], bool]:
    """Stops a run after so many rounds: it asks once a round."""
    asked = count(1)
    return lambda: next(asked) >= rounds


def kill_me(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def members_of(group: int, directory: Path) -> list[psutil.Process]:
    """Living processes of a process group, or that have a file of the run's directory open (its lock)."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = os.getpgid(process.pid) == group or any(
                Path(f.path).parent == directory for f in process.open_files()
            )
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.Error, ProcessLookupError):
            pass
    return found


def nobody_left(find: Callable[[], list[psutil.Process]]) -> None:
    """A killed run's workers are killed by the system; two seconds are more than they need to be gone."""
    deadline = time.monotonic() + 2
    while (left := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@pytest.fixture(autouse=True)
def _nothing_in_shared_memory() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    assert set(os.listdir("/dev/shm")) <= before


# --- what the other tests stand on


def test_the_model_depends_on_what_clients_remember(run_dir: RunDir, undisturbed: Result) -> None:
    """Else a client's state that is lost in a kill would go unnoticed below."""
    directory = run_dir(*KEEPER)
    with pytest.raises(Interrupted):
        execute(directory, executor=Serial(), stop=after(3))
    for memory in (directory / "clients").iterdir():
        if memory.name == "2":
            shutil.rmtree(memory)
    execute(directory, executor=Serial())
    assert result(directory).models != undisturbed.models
    assert [line["asked"] for line in undisturbed.rounds] == [6] * 8  # of 5 clients: some are asked twice
    assert undisturbed.rounds[-1]["pseudo_labels"]["coverage"] > 0


# --- any number of workers


@pytest.mark.parametrize("workers", [2, 3])
def test_any_number_of_workers_gives_the_bits_of_one_process(
    run_dir: RunDir, undisturbed: Result, workers: int
) -> None:
    directory = run_dir(*KEEPER)
    execute(directory, workers=workers)
    assert result(directory) == undisturbed


def test_fedavg_has_the_same_bits_with_any_number_of_workers(run_dir: RunDir) -> None:
    results = []
    for workers in (1, 2, 3):
        directory = run_dir("method=fedavg", "labels.clients=4", "evaluate.local=true")
        execute(directory, workers=workers)
        results.append(result(directory))
    assert results[0] == results[1] == results[2]


def test_spawned_workers_give_the_bits_of_forked_ones(run_dir: RunDir, undisturbed: Result) -> None:
    directory = run_dir(*KEEPER)
    with Pool(2, start="spawn") as spawned:
        execute(directory, executor=spawned)
    assert result(directory) == undisturbed


# --- kill -9 from outside


class Program:
    """A run as its user starts it: a program of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        command = [sys.executable, "-c", EXECUTE, str(directory)]
        self.process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        nobody_left(lambda: members_of(self.process.pid, self.directory))


def kill_at_random_moments(run_dir: RunDir, pool: Pool, undisturbed: Result, kills: int) -> None:
    directory, began = run_dir(*KEEPER), time.monotonic()
    assert Program(directory).process.wait() == 0
    seconds = time.monotonic() - began
    assert result(directory) == undisturbed
    chance = random.Random(kills)
    for number in range(kills):
        directory = run_dir(*KEEPER)
        program = Program(directory)
        time.sleep(seconds * (number + chance.random()) / kills)
        program.kill()
        execute(directory, executor=pool)
        assert result(directory) == undisturbed, f"kill {number} of {kills}"


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(
    run_dir: RunDir, pool: Pool, undisturbed: Result
) -> None:
    kill_at_random_moments(run_dir, pool, undisturbed, 3)


@pytest.mark.slow
def test_a_run_killed_at_ten_random_moments_ends_with_the_same_bits(
    run_dir: RunDir, pool: Pool, undisturbed: Result
) -> None:
    kill_at_random_moments(run_dir, pool, undisturbed, 10)


def test_one_run_killed_again_and_again_ends_with_the_same_bits(run_dir: RunDir, undisturbed: Result) -> None:
    directory = run_dir(*KEEPER)
    for last in (1, 3, 4, 6):  # the round whose line is the last thing that the process writes
        killed(directory, watch=lambda line, last=last: line["round"] == last and kill_me())
    execute(directory, workers=2)
    assert result(directory) == undisturbed


# --- kill -9 at a chosen moment


def mine(at: float, seen: Callable[[int], None] = lambda number: None) -> Callable[[], None]:
    """Kills this process just before its n-th change of what is on disk: a sync, a rename, or a removal."""

    def lay() -> None:
        numbers = count(1)

        def guarded(operation: Callable[..., Any]) -> Callable[..., Any]:
            def step(*args: Any, **more: Any) -> Any:
                if (number := next(numbers)) == at:
                    kill_me()
                seen(number)
                return operation(*args, **more)

            return step

        os.fsync, os.rename, os.unlink = guarded(os.fsync), guarded(os.rename), guarded(os.unlink)

    return lay


def steps_on_disk(run_dir: RunDir) -> int:
    """How often a run in one process changes what is on disk."""
    directory, numbers = run_dir(*KEEPER), list[int]()
    with pytest.MonkeyPatch.context() as restored:
        for operation in ("fsync", "rename", "unlink"):
            restored.setattr(os, operation, getattr(os, operation))
        mine(-1, numbers.append)()
        execute(directory, executor=Serial())
    return numbers[-1]


def kill_at_steps(steps: Iterable[int], run_dir: RunDir, pool: Pool, undisturbed: Result) -> None:
    for step in steps:
        directory = run_dir(*KEEPER)
        killed(directory, mine(step), workers=1)
        execute(directory, executor=pool)
        assert result(directory) == undisturbed, f"killed before step {step}"
        shutil.rmtree(directory)


def test_a_run_killed_between_two_changes_on_disk_ends_with_the_same_bits(
    run_dir: RunDir, pool: Pool, undisturbed: Result
) -> None:
    steps = steps_on_disk(run_dir)
    chosen = random.Random(8).sample(range(1, steps + 1), 6)
    kill_at_steps(chosen, run_dir, pool, undisturbed)


@pytest.mark.slow
def test_a_run_killed_between_any_two_changes_on_disk_ends_with_the_same_bits(
    run_dir: RunDir, pool: Pool, undisturbed: Result
) -> None:
    steps = steps_on_disk(run_dir)
    kill_at_steps(range(1, steps + 1), run_dir, pool, undisturbed)


def test_a_run_killed_while_it_is_laid_out_can_be_laid_out_again(tmp_path: Path, run_dir: RunDir) -> None:
    experiment = load(run_dir() / "experiment.toml")
    for step in count(1):
        directory = tmp_path / f"laid-out-{step}"

        def lay_out(step: int = step, directory: Path = directory) -> None:
            mine(step)()
            prepare(experiment, directory)

        child = get_context("fork").Process(target=lay_out)
        child.start()
        child.join(60)
        if child.exitcode == 0:
            break
        assert child.exitcode == -signal.SIGKILL
        assert (prepare(experiment, directory) / "experiment.toml").exists()


def test_a_kill_while_a_checkpoint_is_written_resumes_from_the_one_before(
    run_dir: RunDir, pool: Pool, undisturbed: Result
) -> None:
    directory = run_dir(*KEEPER)

    def in_the_second_checkpoint() -> None:
        sync = os.fsync

        def guarded(file: int) -> None:
            if "/checkpoint/.round-000004" in os.readlink(f"/proc/self/fd/{file}"):
                kill_me()
            sync(file)

        os.fsync = guarded

    killed(directory, in_the_second_checkpoint)
    assert sorted(path.name[:13] for path in (directory / "checkpoint").glob("*round-*")) == [
        ".round-000004",
        "round-000002-",
    ]
    done: list[int] = []
    execute(directory, executor=pool, watch=lambda line: done.append(line["round"]))
    assert done == [3, 4, 5, 6, 7, 8]
    assert result(directory) == undisturbed
    assert sorted(path.name[:13] for path in (directory / "checkpoint").glob("*round-*")) == ["round-000008-"]


def test_a_line_cut_short_by_a_kill_is_written_anew(run_dir: RunDir, pool: Pool, undisturbed: Result) -> None:
    """Wherever it is cut: even where what is left ends like a whole line."""
    for cut in ('{"round": 4, "sec', '{"round": 4, "pseudo_labels": {"coverage": 1.0}'):
        directory = run_dir(*KEEPER)
        killed(directory, watch=lambda line: line["round"] == 3 and kill_me())
        with (directory / "rounds.jsonl").open("a") as file:
            file.write(cut)
        execute(directory, executor=pool)
        assert result(directory) == undisturbed


# --- something happens in the middle of a task


@pytest.fixture
def trapped(run_dir: RunDir, tmp_path: Path) -> Callable[..., tuple[Path, Path, Result]]:
    """A file that traps client 2 in a round of Keeper, a run to be trapped, and what it gives without a trap."""

    def lay(at: int, *changes: str) -> tuple[Path, Path, Result]:
        trap = tmp_path / "trap"
        settings = ("method=tests.probe:Trap", f"method.trap={trap}", f"method.at={at}", "method.client=2", *changes)
        spared, directory = run_dir(*settings), run_dir(*settings)
        execute(spared, workers=2)
        return trap, directory, result(spared)

    return lay


@pytest.mark.parametrize("at", [1, 4])
def test_a_worker_killed_in_its_task_fails_the_run_which_can_be_resumed(trapped: Any, at: int) -> None:
    trap, directory, spared = trapped(at)

    def kill_the_trapped() -> None:
        os.kill(int(wait_for(trap, content=True)), signal.SIGKILL)

    trap.touch()
    before = {child.pid for child in psutil.Process().children()}
    killer = threading.Thread(target=kill_the_trapped)
    killer.start()
    with pytest.raises(WorkerDied, match=rf"killed by signal 9\) while client 2 was at 'local_update' of round {at};"):
        execute(directory, workers=2)
    killer.join()
    assert {child.pid for child in psutil.Process().children()} == before
    trap.unlink()
    execute(directory, workers=2)
    assert result(directory) == spared


def test_a_run_killed_while_a_worker_hangs_takes_its_workers_along(trapped: Any, pool: Pool) -> None:
    trap, directory, spared = trapped(3)
    trap.touch()
    program = Program(directory)
    worker = int(wait_for(trap, content=True))
    assert worker in {process.pid for process in members_of(program.process.pid, directory)}
    assert len(members_of(program.process.pid, directory)) == 3  # it and its two workers
    program.kill()
    trap.unlink()
    execute(directory, executor=pool)
    assert result(directory) == spared


def test_a_task_that_raises_keeps_the_rounds_before_and_the_run_can_be_resumed(trapped: Any, pool: Pool) -> None:
    trap, directory, spared = trapped(4, "checkpoint.rounds=100")
    trap.write_text("raise")
    with pytest.raises(ClientError, match="client 2 failed in 'local_update' of round 4: ValueError: trapped"):
        execute(directory, executor=pool)
    assert "ValueError: trapped" in (directory / "error.txt").read_text()
    trap.unlink()
    done: list[int] = []
    execute(directory, executor=pool, watch=lambda line: done.append(line["round"]))
    assert done == [4, 5, 6]
    assert result(directory) == spared


def test_a_failure_that_cannot_be_checkpointed_still_leaves_the_pool_free(
    trapped: Any, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise StorageError("no room")

    trap, directory, _ = trapped(5, "checkpoint.rounds=100")  # where client 2 is not among the last
    trap.write_text("raise")
    monkeypatch.setattr(Checkpoints, "save", full)
    with pytest.raises(ClientError, match="trapped"):
        execute(directory, executor=pool)
    left = dict(pool.tickets.under_way)
    pool.discard()  # for the tests to come
    assert not left


# --- resume


def test_a_run_resumed_with_other_numbers_of_workers_ends_with_the_same_bits(
    run_dir: RunDir, undisturbed: Result
) -> None:
    directory = run_dir(*KEEPER)
    for workers, rounds, last in ((2, 2, 2), (1, 2, 4), (3, 3, 7)):
        with pytest.raises(Interrupted, match=rf"stopped after round {last} of 8"):
            execute(directory, workers=workers, stop=after(rounds))
        assert [line["round"] for line in read_rounds(directory)] == list(range(1, last + 1))
    execute(directory, workers=2)
    assert result(directory) == undisturbed


def test_a_finished_run_is_not_run_again(run_dir: RunDir, pool: Pool) -> None:
    class Idle:
        window, tickets = 1, Tickets()

        def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
            raise AssertionError(f"there is nothing to do, but {job}")

        wait = discard = submit

    directory = run_dir("rounds=2")
    done = execute(directory, executor=pool)
    before = {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    assert execute(directory, executor=Idle()) == done
    assert {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lost", ["summary.json", "model.safetensors"])
def test_a_run_killed_after_its_last_round_only_writes_its_results(
    run_dir: RunDir, pool: Pool, undisturbed: Result, lost: str
) -> None:
    def before_the_last_file() -> None:
        rename = os.rename

        def guarded(source: Any, target: Any) -> None:
            if Path(target).name == lost:
                kill_me()
            rename(source, target)

        os.rename = guarded

    directory, done = run_dir(*KEEPER), list[int]()
    killed(directory, before_the_last_file)
    execute(directory, executor=pool, watch=lambda line: done.append(line["round"]))
    assert done == []
    assert result(directory) == undisturbed
    assert json.loads((directory / "summary.json").read_text())["last"]["round"] == 8


def test_the_first_weights_do_not_depend_on_the_threads_of_the_process(run_dir: RunDir) -> None:
    seen = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            directory = run_dir("model=tests.nets:orthogonal", "rounds=1", "data.image_size=32")
            execute(directory, executor=Serial())
        finally:
            torch.set_num_threads(1)
        seen.append((directory / "model.safetensors").read_bytes())
    assert seen[0] == seen[1]
