"""Runs watched from outside: what is shown of them while they run, and what is said once no process works on them."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fewlabel.cli.main import main
from fewlabel.engine import record
from fewlabel.report.watch import PATIENCE, Watcher, spark

RunDir = Callable[..., Path]


def line(number: int, **more: Any) -> dict[str, Any]:
    test = {"accuracy": number / 10, "balanced_accuracy": 0.5, "auc": None}
    pseudo = {"precision": 0.75, "coverage": 0.5}
    found = {"round": number, "seconds": 2.0, "seconds_evaluate": 1.0, "bytes_up": 1000, "bytes_down": 3000}
    return found | {"test": test, "pseudo_labels": pseudo} | more


def reach(directory: Path, *numbers: int) -> None:
    with (directory / "rounds.jsonl").open("a") as file:
        file.writelines(json.dumps(line(number)) + "\n" for number in numbers)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["watch", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_run_under_way_shows_how_far_it_is_and_what_it_found(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three of six rounds, of three seconds each with their evaluation: nine seconds left."""
    directory = run_dir("method=fedprox")
    reach(directory, 1, 2, 3)
    with record.in_use(directory):
        code, out, _ = told(capsys, str(directory))  # through a pipe: once
        assert code == 0
        assert "round 3 of 6, 9.0 s left" in out
        assert [words.split() for words in out.splitlines() if words.startswith("accuracy")] == [
            ["accuracy,", "%", "30.0", "▁▅█", "10.0", "to", "30.0"]
        ]
        assert "pseudo-labels: precision, % 75.0" in " ".join(out.split())
        assert "AUC" not in out  # nobody knows it
        assert "3.0 kB" in out
        assert "9.0 kB" in out
        found = json.loads(told(capsys, str(directory), "--format", "json")[1])
    assert (found["running"], found["seconds_left"], found["runs"][0]["round"]) == (True, 9.0, 3)
    assert found["runs"][0]["last"]["test"]["accuracy"] == 0.3


def test_a_run_that_nobody_works_on_is_told_in_a_sentence(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_dir("method=fedprox")
    code, _, err = told(capsys, str(directory), "--once")
    assert code == 3
    assert err.endswith(f"was not started, and no process works on it; to go on: fewlabel run --resume {directory}\n")
    reach(directory, 1, 2)
    assert "stopped after round 2 of 6" in told(capsys, str(directory))[2]
    (directory / "error.txt").write_text("Traceback")
    assert f"failed, traceback in {directory}/error.txt" in told(capsys, str(directory))[2]
    (directory / "summary.json").write_text("{}")
    code, out, err = told(capsys, str(directory))
    assert (code, err) == (0, "")
    assert out.endswith(f"{directory} is finished: fewlabel show {directory}\n")
    code, _, err = told(capsys, str(directory / "none"))
    assert (code, err) == (
        2,
        f"fewlabel: {directory}/none is not there; give the directory of a run, or one with runs in it\n",
    )


@pytest.mark.parametrize("width", [80, 120])
def test_many_runs_are_lines_that_fit_those_at_work_first(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """Six rounds each: one is done, one is at its second, one waits; ten are left, of three seconds each."""
    monkeypatch.setenv("COLUMNS", str(width))
    done, waiting, running = (run_dir("method=fedprox", f"seed={seed}") for seed in range(3))
    reach(done, *range(1, 7))
    (done / "summary.json").write_text("{}")
    reach(running, 1, 2)
    with record.in_use(running):
        code, out, _ = told(capsys, str(done.parent))
    assert code == 0
    assert "8 of 18 rounds, 30.0 s left" in out
    lines = [text.split() for text in out.splitlines() if text.startswith("fedprox")]
    assert [words[1:4] for words in lines] == [["2", "2/6", "20.0"], ["0", "done", "60.0"], ["1", "waiting", "–"]]
    assert max(map(len, out.splitlines()[:-1])) <= width
    assert "…" not in out
    code, _, err = told(capsys, str(waiting.parent))
    assert code == 3
    assert "1 of 3 runs finished, and no process works on the others; to go on: do the same again" in err


def test_runs_alike_in_name_and_seed_are_told_apart_by_their_directories(
    run_dir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for rounds in (6, 7):
        run_dir("method=fedprox", f"rounds={rounds}")
    other = run_dir("method=fedprox", "seed=1")
    lines = told(capsys, str(other.parent), "--once")[1].splitlines()
    names = {path.name for path in other.parent.iterdir()} - {other.name}
    assert {text.split()[0] for text in lines if " waiting " in text} == names | {"fedprox"}


def test_it_reads_what_changed_and_ends_with_the_run(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fewlabel.report.watch.PAUSE", 0.0)
    directory = run_dir("method=fedprox")
    readings = Watcher(directory).readings()
    with record.in_use(directory):
        first, again = next(readings), next(readings)
        assert first.runs[0].run is again.runs[0].run
        reach(directory, 1)
        assert next(readings).runs[0].reached == 1
        (directory / "rounds.jsonl").unlink()  # as by a resume from a checkpoint before
        assert next(readings).runs[0].reached == 0
    assert len(list(readings)) == PATIENCE
    with record.in_use(directory):
        readings = Watcher(directory).readings()
        next(readings)
        (directory / "summary.json").write_text("{}")
        assert [progress.finished for progress in readings] == [True]


def test_a_line_of_blocks_goes_from_the_lowest_to_the_highest_and_keeps_the_last() -> None:
    assert spark([], 5) == ""
    assert spark([3.0, 3.0], 5) == "▄▄"
    assert spark([0.0, 0.5, 1.0], 9) == "▁▅█"
    assert spark([float(n) for n in range(100)], 4) == "▁▃▆█"


def test_ctrl_c_at_a_terminal_leaves_with_130_and_the_run_alone(run_dir: RunDir) -> None:
    directory = run_dir("method=fedprox")
    reach(directory, 1)
    with record.in_use(directory):
        screen, its = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "80"}
        command = [sys.executable, "-m", "fewlabel", "watch", str(directory)]
        with subprocess.Popen(command, stdin=its, stdout=its, stderr=subprocess.PIPE, env=environment) as process:
            os.close(its)
            seen, until = b"", time.monotonic() + 180
            while b"left" not in seen and time.monotonic() < until:
                if select.select([screen], [], [], 1)[0]:
                    seen += os.read(screen, 4096)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=30)
    os.close(screen)
    assert b"round 1 of 6" in seen
    assert (process.returncode, err) == (130, b"fewlabel: interrupted\n")
