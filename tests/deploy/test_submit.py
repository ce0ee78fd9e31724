"""A run that is submitted is followed to its end, and whoever gives no reply is named."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.core.errors import RunFailed
from fewlabel.deploy import members, processes, submit
from fewlabel.experiment import Experiment
from tests.deploy.test_members import admit, enrolled, made
from tests.flower_processes import until


@pytest.fixture
def lungs(tmp_path: Path) -> Path:
    return made(tmp_path, "lungs")


@pytest.mark.parametrize(
    ("checkpoint", "lines", "sentence"),
    [
        (0, 0, "run begins with round 1"),
        (0, 1, "run begins with round 1; computed again: round 1"),
        (0, 3, "run begins with round 1; computed again: rounds 1 to 3"),
        (4, 4, "run goes on after round 4 of 9, its last checkpoint"),
        (4, 5, "run goes on after round 4 of 9, its last checkpoint; computed again: round 5"),
        (4, 6, "run goes on after round 4 of 9, its last checkpoint; computed again: rounds 5 to 6"),
    ],
)
def test_a_resumed_run_says_where_it_goes_on(checkpoint: int, lines: int, sentence: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoint").mkdir(parents=True)
    if checkpoint:
        (run / "checkpoint" / f"round-{checkpoint:06d}-0123456789abcdef.safetensors").touch()
    (run / "rounds.jsonl").write_text("".join(f'{{"round": {n + 1}}}\n' for n in range(lines)))
    assert submit.resume_notice(run, 9) == f"{tmp_path}/{sentence}"


def test_who_gives_no_reply_is_told_once_until_that_changes(lungs: Path, tmp_path: Path) -> None:
    admit(lungs, enrolled(lungs, tmp_path / "a", 2, "north"))
    missing = submit.MissingSites(members.names(lungs))

    def news(number: int, replies: int, *whys: str) -> list[str]:
        failures = [{"client": int(why[0]), "task": "local_update", "why": why[2:]} for why in whys]
        return list(missing.news({"round": number, "asked": 3, "replies": replies, "failures": failures}))

    away = "it is not connected"
    assert news(1, 3) == []
    assert news(2, 2, f"2 {away}") == [f"'north' gave no reply in round 2: {away}"]
    assert news(3, 2, f"2 {away}") == []
    assert news(4, 1, f"2 {away}", "0 it refused: no") == ["client 0 gave no reply in round 4: it refused: no"]
    assert news(5, 2, "2 it was silent for 9 s") == ["'north' gave no reply in round 5: it was silent for 9 s"]
    assert news(6, 2) == ["all sites that were asked replied in round 6"]  # one of them had nothing to send
    assert news(7, 3) == []
    sites = {"failures": [{"client": 2, "task": "evaluate", "why": away}]}
    told = list(missing.news({"round": 8, "asked": 3, "replies": 3, "sites": sites}))
    assert told == [f"'north' gave no reply in round 8: {away}"]


def test_failures_as_0_1_wrote_them_are_shown_as_they_are(lungs: Path) -> None:
    old = "client 2 failed in 'local_update' of round 3: it is not connected"
    assert list(submit.MissingSites({}).news({"round": 3, "failures": [old]})) == [old]


def stand_in(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a program in the place of Flower's command."""
    folder.mkdir()
    (folder / "flwr").write_text(code.format(python=sys.executable))
    (folder / "flwr").chmod(0o755)
    monkeypatch.setattr(processes, "BIN", folder)


FLWR = """\
#!{python} -S
import pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "asked").open("a+") as file:
    file.write(sys.argv[1] + "\\n")
    file.seek(0)
    asked = file.read().split()
if sys.argv[1] == "run":
    print('{{"success": true, "run-id": "7"}}')
elif sys.argv[1] == "list":
    state = "running" if asked.count("log") < 2 else "finished:failed"
    print('{{"success": true, "runs": [{{"run-id": "7", "status": "%s"}}]}}' % state)
else:
    print("fewlabel: 1 of 2 sites are there\\nfewl", end="" if asked.count("log") == 1 else "abel: 2 of 2 are\\n")
"""


def test_a_run_is_followed_until_it_has_ended_though_its_log_breaks_off(
    lungs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a stand-in for Flower's command, whose first stream of the log ends in the middle of a line."""
    stand_in(FLWR, tmp_path / "bin", monkeypatch)
    (run := tmp_path / "run").mkdir()
    with pytest.raises(RunFailed, match="the run has ended: "):
        submit.follow(lungs, run, Experiment(rounds=2))
    assert (tmp_path / "bin" / "asked").read_text().split() == ["run", "log", "list", "log", "list"]
    said = [line for line in capsys.readouterr().err.splitlines() if "of 2" in line]
    assert said == ["fewlabel: 1 of 2 sites are there", "fewlabel: 2 of 2 are"]


def test_why_a_run_has_ended_is_told_by_fewlabel_or_by_the_disk_or_by_flower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the log ends within the line of a round, before the sentence that says why."""
    cut = 'fewlabel: 2 of 2 sites are there\n{"round": 1, "seconds": 1.0}\n{"round": 2, "sec'
    own = "\nTraceback\nfewlabel.core.errors.StorageError: it cannot be written\n"
    assert submit.reason(tmp_path, cut + own) == "it cannot be written"
    told = submit.reason(tmp_path, cut + "\nERROR : it broke\n")
    assert told == (
        "Flower ended it, for a reason that FewLabel does not know "
        f"(Flower's words: it broke; all of them: {tmp_path}/flower.log)"
    )
    assert submit.reason(tmp_path, cut).startswith("somebody cancelled it, or its SuperLink ended; ")
    monkeypatch.setattr(submit, "ROOM", 1 << 60)
    assert submit.reason(tmp_path, cut) == f"the disk of {tmp_path} is full; make room"


GOING = """\
#!{python} -S
import pathlib, sys, time
here = pathlib.Path(__file__).parent
with (here / "asked").open("a") as file:
    file.write(sys.argv[1] + "\\n")
if sys.argv[1] == "list":
    print('{{"success": true, "runs": [{{"run-id": "7", "status": "%s"}}]}}' % (here / "state").read_text())
elif sys.argv[1] == "stop":
    (here / "state").write_text("finished:stopped")
    print('{{"success": true}}')
else:
    print("fewlabel: 2 of 2 sites are there", flush=True)
    time.sleep(99)
"""


@pytest.fixture
def run(lungs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of two rounds that goes on after the first, with a stand-in for Flower's command."""
    stand_in(GOING, tmp_path / "bin", monkeypatch)
    (tmp_path / "bin" / "state").write_text("running")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").write_text(LINE % 1)
    (lungs / submit.RUNS).mkdir()
    (lungs / submit.RUNS / "7").write_text(str(tmp_path / "run"))
    return tmp_path / "run"


LINE = '{"round": %d, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1}\n'


def test_who_attaches_to_a_run_sees_the_rounds_from_now_on_and_its_end(
    lungs: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def end() -> None:
        with (run / "rounds.jsonl").open("a") as lines:
            lines.write(LINE % 2)
        (run / "summary.json").touch()

    assert submit.goes_on(lungs, run) is None  # nobody serves
    with processes.in_use(lungs):
        assert submit.goes_on(lungs, run) == "7"
        later = threading.Timer(1.0, end)
        later.start()
        assert submit.attach(lungs, run, Experiment(rounds=2), "7")
        later.join()
        assert submit.goes_on(lungs, run) is None
    told = capsys.readouterr().err
    assert "goes on, round 1 of 2 is done; Ctrl-C leaves it running" in told
    assert "round 2/2" in told
    assert "round 1/2" not in told
    assert "sites are there" not in told  # that was before its first round


def test_ctrl_c_leaves_a_run_alone_that_is_only_watched(
    lungs: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # also where a script has started the tests with &
    try:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert not submit.attach(lungs, run, Experiment(rounds=2), "7")
    finally:
        signal.signal(signal.SIGINT, before)
    assert f"{run} goes on; to see it again: fewlabel federation attach {run}" in capsys.readouterr().err
    assert (tmp_path / "bin" / "asked").read_text() == "log\n"


def test_a_run_is_cancelled_whoever_submitted_it(lungs: Path, run: Path, tmp_path: Path) -> None:
    code = "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
    code += "print(1, flush=True); time.sleep(99)"
    programs = processes.Programs(lungs, {})
    server = programs.start("server", [sys.executable, "-c", code, str(run / ".lock")])
    until(lambda: programs.output("server"))
    with processes.in_use(lungs):
        assert submit.cancel(lungs, run)
        assert server.wait(60) == -signal.SIGTERM
        assert (tmp_path / "bin" / "state").read_text() == "finished:stopped"
        assert not submit.cancel(lungs, run)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_closed_terminal_is_like_ctrl_c_unless_the_command_was_started_by_nohup(ignored: bool) -> None:
    code = (
        f"import os, signal\nfrom fewlabel.deploy import processes\n"
        f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})\n"
        "try:\n with processes.interruptible():\n  os.kill(os.getpid(), signal.SIGHUP)\n  print('on')\n"
        "except KeyboardInterrupt:\n print('interrupted')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ("on\n" if ignored else "interrupted\n")
