"""The command as people and scripts use it: help, runs that can be repeated, stopped and resumed, and clean JSON."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import click
import pytest
import typer

from fewlabel.cli.main import app
from fewlabel.engine.record import read_rounds
from fewlabel.experiment import RECIPES, Clients, Experiment, Train, load, read
from fewlabel.methods.fedavg import FedAvg
from fewlabel.report import terminal
from fewlabel.report.terminal import Rounds, Runs, names_of, size, span
from tests.conftest import SMALL, Command

QUICK = [word for change in (*SMALL, "rounds=2") for word in ("--set", change)]
ROOT = Path(__file__).parents[2]


def process(*argv: str) -> "subprocess.Popen[str]":
    """The command, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "fewlabel.cli.main", *argv]
    pipe = subprocess.PIPE
    return subprocess.Popen(words, env=environment, stdout=pipe, stderr=pipe, text=True)


def weights(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


def commands(group: click.Group, *above: str) -> Iterator[tuple[str, ...]]:
    for name, found in group.commands.items():
        if isinstance(found, click.Group):
            yield from commands(found, *above, name)
        elif not found.hidden:
            yield (*above, name)


COMMANDS = list(commands(typer.main.get_command(app)))


def test_help_names_every_command_and_every_exit_code(fewlabel: Command) -> None:
    found = fewlabel("--help")
    assert found.code == 0
    assert [words for words in COMMANDS if f" {words[0]} " not in found.out] == []
    text = " ".join(found.out.split())
    for words in ("0 success", "1 a bug", "2 bad input", "3 the run failed", "4 disk or files", "130 interrupted"):
        assert words in text


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_of_a_command_has_examples_and_fits_the_screen(words: tuple[str, ...], fewlabel: Command) -> None:
    found = fewlabel(*words, "--help")
    assert found.code == 0
    assert f"  fewlabel {' '.join(words)}" in found.out
    assert max(map(len, found.out.splitlines())) <= 80


def test_without_a_command_there_is_help_and_a_version(fewlabel: Command) -> None:
    assert "Usage: fewlabel" in fewlabel().out
    assert fewlabel("--version") == (0, f"{version('fewlabel')}\n", "")


def test_help_does_not_import_what_is_slow() -> None:
    slow = {"torch", "sklearn", "matplotlib", "torchvision", "numpy", "onnx", "flwr", "rich.progress"}
    code = (
        "import sys\nfrom fewlabel.cli.main import main\nmain(['run', '--help'])\n"
        f"print(*{slow} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"


@pytest.mark.parametrize("what", ["methods", "datasets", "models", "partitions"])
def test_a_list_says_what_each_name_stands_for(what: str, fewlabel: Command) -> None:
    found = fewlabel("list", what, "--format", "json")
    rows = json.loads(found.out)
    assert (found.code, found.err) == (0, "")
    assert rows
    assert all(row["name"] and row["about"] for row in rows)
    text = fewlabel("list", what).out
    assert [row["name"] for row in rows if row["name"] not in text] == []


def test_methods_are_listed_with_the_floor_the_ceiling_and_where_labels_may_be(fewlabel: Command) -> None:
    rows = {row["name"]: row for row in json.loads(fewlabel("list", "methods", "--format", "json").out)}
    assert {"labels-only", "all-labels", "fedavg", "fedprox"} <= rows.keys()
    assert rows["fedavg"]["label_places"] == ["every-client", "server", "some-clients"]
    assert "relation matrix" in rows["fedirm"]["leaves"]
    assert rows["fedprox"]["like"] == "fedavg"


def test_a_run_leaves_its_files_and_shows_its_result(fewlabel: Command, tmp_path: Path) -> None:
    found = fewlabel("run", *QUICK, "--workers", "1", "--out", "one")
    names = {path.name for path in (tmp_path / "one").iterdir()}
    assert found.code == 0
    assert names >= {"experiment.toml", "partition.json", "rounds.jsonl", "summary.json", "model.safetensors"}
    assert names >= {"checkpoint", "report.html"}
    assert "accuracy" in found.out
    assert found.out.endswith("one/report.html\n")
    assert [line for line in found.err.splitlines() if line.startswith("round")][-1].startswith(
        "round 2/2  accuracy 0."
    )


def test_a_saved_experiment_run_again_gives_the_same_bytes(fewlabel: Command, tmp_path: Path) -> None:
    assert fewlabel("run", *QUICK, "--method", "fedprox", "--workers", "1", "--out", "first").code == 0
    assert fewlabel("run", "first/experiment.toml", "--workers", "2", "--out", "second").code == 0
    assert weights(tmp_path / "first") == weights(tmp_path / "second")


def test_options_win_over_the_file_and_the_file_over_defaults(fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        'name = "mine"\nrounds = 3\nseed = 7\n[clients]\ncount = 4\nalpha = 2.0\n'
        '[method]\nname = "fedprox"\nproximal = 0.5\n[data]\nimage_size = 16\n'
    )
    given = ["--method", "fedavg", "--set", "rounds=1", "--set", "clients.count=3"]
    assert fewlabel("run", "my.toml", *given, "--workers", "1", "--out", "run").code == 0
    used = load(tmp_path / "run" / "experiment.toml")
    assert (used.rounds, used.clients.count) == (1, 3)  # the command's
    assert (used.seed, used.clients.alpha) == (7, 2.0)  # the file's
    assert (used.labels.clients, used.clients.partition) == (1, "dirichlet")  # defaults
    assert (used.name, used.method.proximal) == ("fedavg", 0.0)  # another method, without what was the first one's


def test_json_is_all_there_is_on_stdout(fewlabel: Command) -> None:
    found = fewlabel("run", *QUICK, "--workers", "1", "--out", "one", "--format", "json")
    told = json.loads(found.out)
    assert (told["finished"], told["rounds"], told["name"]) == (True, 2, "fedavg")
    assert told["last"]["test"]["accuracy"] >= 0
    assert told["report"] == "one/report.html"
    assert json.loads(fewlabel("show", "one", "--format", "json").out)["directory"] == "one"


def test_several_seeds_are_one_row_with_its_spread(fewlabel: Command) -> None:
    found = fewlabel("run", *QUICK, "--seeds", "3,4", "--workers", "2", "--format", "json")
    [row] = json.loads(found.out)["rows"]
    assert (found.code, row["seeds"]) == (0, [3, 4])
    assert row["last"]["accuracy"]["std"] is not None


def test_a_comparison_stands_between_floor_and_ceiling_and_is_not_run_twice(fewlabel: Command, tmp_path: Path) -> None:
    argv = ["compare", "--methods", "fedprox", *QUICK, "--workers", "2"]
    found = fewlabel(*argv)
    lines = found.out.splitlines()
    assert found.code == 0
    rows = [line.split()[0] for line in lines if re.match(r"(labels-only|fedprox|all-labels)( \(guesses\))? +\d", line)]
    assert rows == ["labels-only", "fedprox", "all-labels"]  # one block
    assert lines[-1] == "runs/compare/report.html"
    assert (tmp_path / lines[-1]).read_text().startswith("<!doctype html>")
    written = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/compare/*/summary.json")}
    assert len(written) == 3
    again = fewlabel(*argv)
    assert again.err == "3 of 3 runs are done already\n"
    assert again.out == found.out
    everything = fewlabel(*argv, "--all").out
    for words in ("sent, MB", "Too few seeds"):
        assert (words in found.out, words in everything) == (False, True)
    assert written == {path: path.stat().st_mtime_ns for path in written}


def test_the_files_method_keeps_its_settings_in_a_comparison(fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[method]\nname = "fedprox"\nproximal = 0.5\n')
    fewlabel("compare", "my.toml", "--methods", "fedprox", *QUICK, "--set", "rounds=1", "--workers", "2", "--out", "c")
    used = {e.name: e.method.proximal for e in (load(path) for path in (tmp_path / "c").glob("*/experiment.toml"))}
    assert used == {"labels-only": 0.0, "fedprox": 0.5, "all-labels": 0.0}


def test_a_file_gives_settings_to_several_methods_of_a_comparison(fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text(
        'name = "mine"\n[method]\nname = "fedavg"\nlocal.lr = 0.2\n'
        "[methods.fedprox]\nproximal = 0.5\nlocal.lr = 0.3\n[methods.labels-only]\nlocal.lr = 0.4\n"
    )
    given = ["--set", "methods.fedprox.local.lr=0.5", "--workers", "2", "--out", "c"]
    found = fewlabel("compare", "my.toml", "--methods", "fedprox,fedavg", *QUICK, "--set", "rounds=1", *given)
    assert found.code == 0
    runs = [load(path) for path in (tmp_path / "c").glob("*/experiment.toml")]
    assert {e.name: (e.method.proximal, e.method.local.lr) for e in runs} == {
        "labels-only": (0.0, 0.4),
        "fedprox": (0.5, 0.5),  # the file's, and the command's, which wins
        "fedavg": (0.0, 0.2),
        "all-labels": (0.0, FedAvg().local.lr),
    }


def test_a_sweep_runs_the_grid_of_file_and_options_and_resumes(fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text('[grid]\nclients.alpha = [0.5, 5.0]\nmethod = ["fedavg", "fedprox"]\n')
    argv = ["sweep", "my.toml", "--methods", "fedavg", "--vary", "clients.partition=iid,dirichlet", *QUICK]
    found = fewlabel(*argv, "--workers", "2", "--format", "json")
    assert found.code == 0
    labels = {row["label"] for row in json.loads(found.out)["rows"]}
    alphas, partitions = ("0.5", "5.0"), ("iid", "dirichlet")
    assert {(a, p) for a in alphas for p in partitions for label in labels if a in label and p in label} == {
        (a, p) for a in alphas for p in partitions
    }
    assert len(labels) == 4
    first = next((tmp_path / "runs" / "sweep-my").glob("*/summary.json"))
    first.unlink()  # as if it had been killed before its end
    again = fewlabel(*argv, "--workers", "2", "--format", "json")
    assert again.err.splitlines()[0] == "3 of 4 runs are done already"
    assert again.err.splitlines()[1].startswith("fewlabel: Labels: 1 of 5 clients")
    (progress,) = [line for line in again.err.splitlines()[1:] if not line.startswith("fewlabel: ")]
    assert progress.startswith("4/4  ")  # notes depend on which of the four it was
    assert first.exists()


def test_showing_an_unfinished_run_says_so_and_writes_nothing(
    fewlabel: Command, run_dir: Callable[..., Path], tmp_path: Path
) -> None:
    directory = run_dir()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    found = fewlabel("show", directory)
    assert found.code == 0
    assert "round 0 of 6" in found.out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_resuming_what_is_finished_shows_its_result(fewlabel: Command) -> None:
    first = fewlabel("run", *QUICK, "--workers", "1", "--out", "one", "--format", "json")
    again = fewlabel("run", "--resume", "one", "--format", "json")
    assert "finished already" in again.err
    assert json.loads(again.out)["last"] == json.loads(first.out)["last"]


def test_methods_and_data_of_the_current_directory_are_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "from fewlabel.data.datasets import Raw\n"
        "from fewlabel.methods.fedavg import FedAvg as Mine\n"
        "def noise():\n"
        "    images, labels = np.zeros((60, 1, 16, 16), np.uint8), np.arange(60) % 2\n"
        "    return Raw(('a', 'b'), {'train': (images, labels), 'test': (images, labels)})\n"
    )
    script = Path(sys.executable).with_name("fewlabel")  # which, unlike -m, does not look here by itself
    argv = [script, "run", "--method", "mine:Mine", "--data", "mine:noise", *QUICK, "--set", "clients.count=2"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run([*argv, "--format", "json"], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["data"] == "mine:noise"


def test_the_data_directory_is_told_to_whoever_reads_data(
    fewlabel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images").mkdir()
    fewlabel("run", *QUICK, "--set", "rounds=1", "--workers", "1", "--data-dir", "images")
    assert os.environ["FEWLABEL_DATA"] == "images"


def after_notes(running: subprocess.Popen[str]) -> str:
    """The first line that is no note on the data."""
    assert running.stderr is not None
    return next(line for line in iter(running.stderr.readline, "") if not line.startswith("fewlabel: "))


def test_a_run_stopped_by_ctrl_c_ends_its_round_and_resumes_to_the_same_bytes(
    fewlabel: Command, tmp_path: Path
) -> None:
    settings = [*QUICK, "--set", "rounds=60"]
    running = process("run", *settings, "--workers", "2", "--out", "stopped")
    assert after_notes(running).startswith("round 1/60")
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    last = err.splitlines()[-1]
    assert last.startswith("fewlabel: stopped after round ")
    assert last.endswith("to go on: fewlabel run --resume stopped")
    assert not (tmp_path / "stopped" / "summary.json").exists()
    assert fewlabel("run", "--resume", "stopped", "--workers", "1").code == 0
    assert fewlabel("run", *settings, "--workers", "1", "--out", "undisturbed").code == 0
    assert weights(tmp_path / "stopped") == weights(tmp_path / "undisturbed")


def test_one_signal_to_a_sweep_stops_all_its_runs(tmp_path: Path) -> None:
    running = process("sweep", "--vary", "seed=0,1,2", *QUICK, "--set", "rounds=5000", "--workers", "2", "--out", "s")
    wait_for(lambda: len(list(tmp_path.glob("s/*/rounds.jsonl"))) == 2)
    running.send_signal(signal.SIGTERM)  # to the parent alone, unlike Ctrl-C at a terminal
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (130, "")
    assert "3 of 3 runs unfinished; do the same again to go on" in err.splitlines()[-1]
    assert len(list(tmp_path.glob("s/*/checkpoint/round-*"))) == 2


def test_a_second_ctrl_c_leaves_at_once(tmp_path: Path) -> None:
    running = process("run", "--method", "tests.bad_methods:Sleeps", *QUICK, "--workers", "2", "--out", "slow")
    wait_for((tmp_path / "slow" / "rounds.jsonl").exists)
    running.send_signal(signal.SIGINT)
    assert "once more to leave at once" in after_notes(running)
    time.sleep(0.3)  # nobody is faster, and Python may take two signals within a moment for one
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=20)
    assert running.returncode == 130
    assert err == "fewlabel: interrupted; to go on: fewlabel run --resume slow\n"


@pytest.mark.parametrize("words", [("list", "models"), ("list", "models", "--format", "json"), ("data", "--help")])
def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    running = process(*words)
    assert running.stdout is not None
    running.stdout.close()
    assert running.stderr is not None
    assert running.stderr.read() == ""
    assert running.wait() == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("code", "told"),
    [("mine needs\na licence file.", "mine needs a licence file"), (0, "something ended the command by exit(0)")],
)
def test_a_module_that_ends_the_command_is_heard(fewlabel: Command, tmp_path: Path, code: str | int, told: str) -> None:
    (tmp_path / "licensed.py").write_text(f"import sys\nsys.exit({code!r})\n")
    assert fewlabel("run", *QUICK, "--method", "licensed:Mine") == (2, "", f"fewlabel: {told}\n")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_fast_rounds_do_not_flood_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"seconds": 0.01, "bytes_up": 600_000, "bytes_down": 700_000, "test": {"accuracy": 0.5317, "auc": None}}
    with Rounds(Experiment(rounds=1000), Path("s")) as shown:
        for number in range(1, 1001):
            shown.watch(line | {"round": number})
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "round 1/1000  accuracy 0.532  1.3 MB  0.0 s, 10.0 s left"  # 999 rounds of 0.01 s
    assert told[-1] == "round 1000/1000  accuracy 0.532  1.3 MB  0.0 s"
    assert len(told) <= 4


def test_u17_a_sweep_says_how_each_run_ended_by_the_values_that_it_varies(capsys: pytest.CaptureFixture[str]) -> None:
    alphas = {Path(f"s/{name}"): Experiment(rounds=2, clients=Clients(alpha=n)) for n, name in enumerate("abc", 1)}
    with Runs(alphas, done=1) as shown:
        shown.watch(Path("s/a"), {"round": 2, "test": {"accuracy": 0.5, "auc": 0.75}})
        shown.watch(Path("s/a"), {"done": True})
        shown.watch(Path("s/b"), {"failed": "the disk is full"})
    assert capsys.readouterr().err.splitlines() == [
        "1 of 3 runs are done already",
        "2/3  fedavg alpha=1  accuracy 0.500  auc 0.75",
        "2/3  fedavg alpha=2  the disk is full",
    ]
    seeds = [Experiment(method=name, seed=seed) for name in ("fedavg", "fedprox") for seed in (0, 1)]
    assert names_of(seeds) == ["fedavg seed=0", "fedavg seed=1", "fedprox seed=0", "fedprox seed=1"]


def test_many_runs_say_how_long_the_others_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of four was done before. Ten seconds later one more is, and half of another: 1.5 more take ten, too."""
    runs = {Path(f"s/{name}"): Experiment(rounds=2, seed=n) for n, name in enumerate("abcd")}
    now = iter([100.0, 110.0])
    monkeypatch.setattr(terminal.time, "monotonic", lambda: next(now))
    with Runs(runs, done=1) as shown:
        shown._last = {Path("s/b"): {"round": 2}, Path("s/c"): {"round": 1}}
        shown.watch(Path("s/b"), {"done": True})
    assert capsys.readouterr().err.splitlines()[1] == "2/4  fedavg seed=1  10.0 s left"


def test_sizes_and_times_are_short() -> None:
    assert [size(n) for n in (12, 12_300, 12_300_000, 4e9)] == ["12 B", "12.3 kB", "12.3 MB", "4.0 GB"]
    assert [span(n) for n in (0.42, 61, 7_260)] == ["0.4 s", "1 min 01 s", "2 h 01 min"]


def test_a_measurement_is_one_json_document_whatever_it_prints(
    fewlabel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()  # other projects install a package of that name
    (tmp_path / "benchmarks" / "tiny.py").write_text(
        '"""How fast nothing is."""\ndef main():\n    print(1)\n    return {"s": 0}'
    )
    monkeypatch.setattr("fewlabel.cli.show.__file__", str(tmp_path / "fewlabel" / "cli" / "show.py"))
    assert fewlabel("bench") == (0, "tiny  How fast nothing is.\n", "")
    with patch.dict(sys.modules):  # the package of the source tree may be loaded already
        sys.modules.pop("benchmarks", None)
        assert fewlabel("bench", "tiny") == (0, '{\n "s": 0\n}\n', "1\n")


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_paths_in_a_file_are_from_its_own_folder(fewlabel: Command, tmp_path: Path, command: str) -> None:
    (tmp_path / "far" / "images").mkdir(parents=True)
    (tmp_path / "far" / "e.toml").write_text('rounds = 1\n[data]\nname = "folder"\npath = "images"\n')
    more = ["--seeds", "0"] if command == "sweep" else []
    found = fewlabel(command, "far/e.toml", *more)
    assert f"there are no images in {tmp_path / 'far' / 'images'}" in found.err


def test_a_stream_that_outlasts_the_run_is_told_in_one_line(fewlabel: Command) -> None:
    stream = ["--set", "stream.steps=3", "--set", "stream.rounds=1", "--set", "method.local.epochs=1"]
    told = "after 2 rounds the stream is at step 2 of 3, and no client gets the images of later ones; raise rounds"
    assert fewlabel("run", *QUICK, *stream).err.count(told) == 1
    assert fewlabel("sweep", *QUICK, *stream, "--seeds", "0,1", "--workers", "1").err.count(told) == 1
    assert "stream" not in fewlabel("run", *QUICK, *stream, "--set", "stream.steps=2").err


def test_rounds_that_are_all_warm_up_and_groups_that_are_all_alike_are_told(fewlabel: Command) -> None:
    found = fewlabel("run", *QUICK, "--method", "rscfed", "--set", "method.warmup=2", "--set", "method.group_size=99")
    assert "rscfed: all of its 2 rounds are warm-up, in which labeled clients train alone; raise rounds" in found.err
    assert "rscfed: its groups of method.group_size = 99 are all alike" in found.err
    assert "are warm-up" not in fewlabel("run", *QUICK, "--method", "rscfed", "--set", "method.warmup=1").err


def test_a_learning_rate_that_changes_nothing_is_told() -> None:
    told = "fedmatch: method.local.lr_unlabeled changes nothing"
    for rate, cautions in (("0.1", 1), ("0.01", 0), ("none", 0)):
        given = read({"method": "fedmatch"}, ["method.local.lr=0.01", f"method.local.lr_unlabeled={rate}"])
        assert [sentence.startswith(told) for sentence in given.cautions] == [True] * cautions


def test_settings_of_a_method_are_listed_as_its_source_explains_them(fewlabel: Command) -> None:
    found = {row["name"]: row for row in json.loads(fewlabel("list", "settings", "fedmatch", "--format", "json").out)}
    assert all(name.startswith("method.") for name in found)
    assert found["method.name"]["default"] == "fedmatch"
    assert found["method.confidence"] == {
        "name": "method.confidence",
        "default": "0.75",
        "about": "tau: probability from which a pseudo-label counts",
        "allowed": "a number from 0 to 1",
    }
    assert "method.teacher_decay" in fewlabel("list", "settings", "fedirm").out  # off by default
    assert "did you mean 'rscfed'?" in fewlabel("list", "settings", "rscfedd").err
    assert "only settings are listed for a method" in fewlabel("list", "models", "rscfed").err


def test_settings_are_listed_with_their_defaults(fewlabel: Command) -> None:
    found = json.loads(fewlabel("list", "settings", "--format", "json").out)
    assert {row["name"] for row in found if not row["about"] and not row["name"].startswith("method.")} == set()
    assert all("off unless a stream" in row["about"] for row in found if row["name"].startswith("stream."))
    rows = {row["name"]: row for row in found}
    defaults = {"rounds": "30", "clients.per_round": "none", "method.local.lr": "0.03", "stream.steps": "10"}
    defaults |= {"recipe": "fewlabel", "train.average": "0.8"}
    assert {name: rows[name]["default"] for name in defaults} == defaults
    alpha, text = rows["clients.alpha"], " ".join(fewlabel("list", "settings").out.split())
    assert (alpha["default"], alpha["allowed"]) == ("0.8", "a number above 0")
    assert f"clients.alpha 0.8 {alpha['about']} (a number above 0)" in text


# The recipe


def trained(fewlabel: Command, *words: str | Path) -> Train | None:
    """Lay out a run that ends in its first round: what its experiment.toml says about training."""
    found = fewlabel("run", *words, "--method", "tests.bad_methods:Stumbles", *QUICK, "--workers", "1", "--out", "told")
    assert (found.code, "nothing to share" in found.err) == (3, True), found.err
    train = load(Path("told/experiment.toml")).train
    shutil.rmtree("told")
    return train


def test_commands_train_by_our_recipe_and_write_it_down(fewlabel: Command, tmp_path: Path) -> None:
    assert trained(fewlabel) == RECIPES["fewlabel"]
    assert trained(fewlabel, "--set", "recipe=printed") == Train()
    assert trained(fewlabel, "--set", "train.average=0.5") == replace(RECIPES["fewlabel"], average=0.5)
    both = trained(fewlabel, "--set", "train.average=0.5", "--set", "recipe=printed")
    assert both == Train(average=0.5)


def test_what_a_file_does_not_say_about_training_is_our_recipe(fewlabel: Command, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    for text, told in {
        "seed = 1": RECIPES["fewlabel"],
        'recipe = "printed"': Train(),
        "[train]\naverage = 0.5": replace(RECIPES["fewlabel"], average=0.5),
        'recipe = "printed"\n[train]\naverage = 0.5': Train(average=0.5),
    }.items():
        file.write_text(text)
        assert trained(fewlabel, file) == told, text
    assert trained(fewlabel, file, "--set", "recipe=fewlabel") == RECIPES["fewlabel"]  # which wins over the file


def test_an_old_runs_own_file_runs_as_it_did(fewlabel: Command, tmp_path: Path, run_dir: Callable[..., Path]) -> None:
    old = run_dir("rounds=1")
    assert "[train]" not in (old / "experiment.toml").read_text()
    assert fewlabel("run", "--resume", old, "--workers", "1").code == 0
    assert fewlabel("run", old / "experiment.toml", "--workers", "1", "--out", "again").code == 0
    assert read_rounds(old)[0]["test"] == read_rounds(Path("again"))[0]["test"]


def test_tables_name_the_recipe(fewlabel: Command) -> None:
    shown = fewlabel("run", *QUICK, "--workers", "1", "--out", "one").out
    told = "Recipe fewlabel: cosine schedule, average over rounds, balanced classes, warm-up on labels alone"
    assert told in " ".join(shown.split())
    assert told in Path("one/report.html").read_text()
    recipes = ("--vary", "recipe=fewlabel,printed", "--set", "data.name=digits")
    shown = " ".join(fewlabel("sweep", *recipes, *QUICK, "--set", "rounds=1", "--workers", "1").out.split())
    assert "recipe=printed" in shown
    assert "Recipes: fewlabel, printed." in shown


def test_lengthening_a_run_is_a_new_run_and_says_so(fewlabel: Command) -> None:
    quick = [*QUICK, "--workers", "1"]
    fewlabel("run", *quick, "--out", "one")
    longer = fewlabel("run", *quick, "--set", "rounds=3", "--out", "one")
    assert longer.code == 2
    assert "one is a run of 2 rounds and cannot become one of 3, because training depends on" in longer.err
    assert "other rounds make a new run" in fewlabel("run", "--resume", "one", "--set", "rounds=3").err
    file = Path("one/experiment.toml")
    file.write_text(file.read_text().replace("rounds = 2\n", "rounds = 3\n", 1))
    edited = fewlabel("run", "--resume", "one")
    assert (edited.code, "cannot become one of 3" in edited.err) == (2, True)
    Path("one/summary.json").unlink()  # as if it had been stopped before its end
    edited = fewlabel("run", "--resume", "one")
    assert (edited.code, "cannot become one of 3" in edited.err) == (2, True)


def test_a_comparison_with_other_rounds_begins_anew_and_says_so(fewlabel: Command) -> None:
    words = ["compare", "--methods", "fedprox", *QUICK, "--workers", "1"]
    assert "begin anew" not in fewlabel(*words, "--set", "rounds=1").err
    assert "begin anew" not in fewlabel(*words, "--set", "rounds=1").err
    told = "runs/compare has the same with 1 rounds; training depends on the number of rounds, so runs of 2 rounds"
    assert told in fewlabel(*words).err
