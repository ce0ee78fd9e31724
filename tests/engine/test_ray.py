"""Flower's simulation on Ray gives the simulator's bits, is stopped and resumed like it, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

import fewlabel as fl
from fewlabel.cli.main import main
from fewlabel.core.errors import BadInput
from fewlabel.engine import run
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import execute
from fewlabel.experiment import read
from tests.conftest import SMALL

ROOT = Path(__file__).parents[2]
Start = Callable[..., "subprocess.Popen[str]"]
# RSCFed, as its clients keep a teacher and are asked several times in a round.
SETTINGS = [*SMALL, "method=rscfed", "rounds=2", "clients.count=3", "method.group_size=2", "evaluate.local=true"]
OPTIONS = [word for setting in SETTINGS for word in ("--set", setting)]
BAD = [word for setting in SMALL for word in ("--set", setting)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def by_ray() -> Iterator[Start]:
    """Starts a run by Ray, in a group of processes of its own, as at a terminal."""
    started = []

    def start(*argv: str) -> "subprocess.Popen[str]":
        words = [sys.executable, "-m", "fewlabel.cli.main", "run", *argv, "--workers", "2", "--backend", "flower-ray"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True, process_group=0))
        return started[-1]

    yield start
    for running in started:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)


def lines(directory: Path) -> list[dict]:
    """The lines of a run, without what depends on the clock."""
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in read_rounds(directory)]


def listening(process: int) -> set[str]:
    """Where a process and those that it started listen."""
    family = [psutil.Process(process), *psutil.Process(process).children(recursive=True)]
    found = [link.laddr.ip for one in family for link in one.net_connections("inet") if link.status == "LISTEN"]
    return set(found)


@pytest.mark.slow
def test_a_run_on_ray_has_the_simulators_bits_and_is_stopped_and_resumed_like_it(by_ray: Start, tmp_path: Path) -> None:
    longer = [*OPTIONS, "--set", "rounds=6"]
    running = by_ray(*longer, "--out", "ray")
    assert running.stderr is not None
    first = running.stderr.readline()
    assert first.startswith("round 1/6"), first
    family = psutil.Process(running.pid).children(recursive=True)
    heard = listening(running.pid)
    os.killpg(running.pid, signal.SIGINT)
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (130, ""), err
    assert err.splitlines()[-1].endswith("to go on: fewlabel run --resume ray --backend flower-ray")
    assert heard <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert family
    assert psutil.wait_procs(family, timeout=60)[1] == []
    assert 0 < len(read_rounds(tmp_path / "ray")) < 6

    resumed = by_ray("--resume", "ray", "--format", "json")
    out, err = resumed.communicate(timeout=300)
    assert (resumed.returncode, json.loads(out)["finished"]) == (0, True), err
    assert [line for line in err.splitlines() if not line.startswith("round ")] == []
    here = execute(run.prepare(read({}, [*SETTINGS, "rounds=6"]), tmp_path / "here"), workers=1)
    assert lines(tmp_path / "ray") == lines(tmp_path / "here")
    assert here["last"]["pseudo_labels"]["coverage"] > 0  # which only who holds the hidden labels can tell
    model = "model.safetensors"
    assert (tmp_path / "ray" / model).read_bytes() == (tmp_path / "here" / model).read_bytes()


@pytest.mark.slow
def test_a_task_that_fails_on_ray_is_named_as_in_the_simulator(by_ray: Start, tmp_path: Path) -> None:
    running = by_ray("--method", "tests.bad_methods:Raises", *BAD, "--out", "ray")
    out, err = running.communicate(timeout=300)
    assert (running.returncode, out) == (3, ""), err
    assert "failed in 'local_update' of round 1: ValueError: the scanner is broken" in err.splitlines()[-1]
    assert "raise ValueError" in (tmp_path / "ray" / "error.txt").read_text()


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_ray_at_once_and_nothing_behind(by_ray: Start) -> None:
    running = by_ray("--method", "tests.bad_methods:Sleeps", *BAD, "--out", "ray")
    assert running.stderr is not None
    wait_for_ray(running)
    for said in ("once more to leave at once", "interrupted"):
        family = psutil.Process(running.pid).children(recursive=True)
        os.killpg(running.pid, signal.SIGINT)
        assert any(said in line for line in running.stderr)  # Ray may say something of its own before
    assert running.wait(timeout=120) == 130
    assert psutil.wait_procs(family, timeout=60)[1] == []


def wait_for_ray(running: "subprocess.Popen[str]") -> None:
    """Until a client's task sleeps, in a process of Ray."""
    while not Path("ray/rounds.jsonl").exists():
        assert running.poll() is None
        psutil.Process(running.pid).cpu_percent(0.1)


def test_a_backend_that_is_not_there_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "--backend", "flower-rya", "--out", "run"]) == 2
    assert "'flower-rya' is not one of" in capsys.readouterr().err
    with pytest.raises(BadInput, match="there is no backend 'flower-rya'; did you mean 'flower-ray'"):
        fl.run(fl.Experiment(), "run", backend="flower-rya")
    assert main(["run", "--backend", "flower-ray", "--seeds", "0,1"]) == 2
    assert "--backend is for one run at a time" in capsys.readouterr().err
    monkeypatch.setattr("fewlabel.engine.backends.find_spec", lambda name: None)
    assert main(["run", "--backend", "flower-ray", "--out", "run"]) == 2
    assert "pip install '.[flower]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
