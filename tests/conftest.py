"""What the tests share: one pool of workers for the whole suite, small runs that are laid out, and the command."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fewlabel.cli.main import main
from fewlabel.engine.pool import Pool
from fewlabel.engine.run import prepare
from fewlabel.experiment import read

# Decoded data of the tests are their own, in this process and in all that it starts.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="fewlabel-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# One thread, as in runs: threads that wait for each other crawl where other programs use the cores, too.
torch.set_num_threads(1)

SMALL = (
    "data.image_size=16",
    "clients.count=5",
    "rounds=6",
    "method.local.batch_size=32",
    "method.local.epochs=1",
    "evaluate.every=2",
    "checkpoint.rounds=2",
)

# Files that take longest, in order. They go first: a long file at the end would keep one worker busy, the other idle.
LONGEST = (
    "methods/test_conformance.py",
    "test_examples.py",
    "test_docs.py",
    "cli/test_main.py",
    "engine/test_faults.py",
    "test_study.py",
    "report/test_report.py",
    "deploy/test_flower.py",
    "deploy/test_masked_sums.py",
    "engine/test_conduct.py",
    "engine/test_device.py",
    "papers/test_reproduce.py",
)
PLACES = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES.get(item.path, len(PLACES)))


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Two workers, started by the first test that asks. A test that kills workers starts its own."""
    with Pool(2) as workers:
        yield workers


@pytest.fixture(scope="session")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Lays out a run of a second: `small_run("method=fedprox", "rounds=3")` returns its directory."""
    root, numbers = tmp_path_factory.mktemp("runs"), count()
    return lambda *changes: prepare(read({}, [*SMALL, *changes]), root / str(next(numbers)))


@pytest.fixture
def run_dir(tmp_path: Path) -> Callable[..., Path]:
    """Lays out a run of a second: `run_dir("method=fedprox", "rounds=3")` returns its directory."""
    numbers = count()
    return lambda *changes: prepare(read({}, [*SMALL, *changes]), tmp_path / f"run{next(numbers)}")


class Finished(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Finished]


@pytest.fixture
def fewlabel(capsys: pytest.CaptureFixture[str]) -> Command:
    """The command, in this process: `fewlabel("show", directory)` returns its exit code, stdout and stderr."""

    def run(*argv: str | Path) -> Finished:
        code = main([str(word) for word in argv])
        return Finished(code, *capsys.readouterr())

    return run
