"""Rounds as TensorBoard and MLflow have them, read back by their own libraries."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fewlabel.cli.main import main
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import Interrupted, execute
from fewlabel.report.trackers import Trackers, numbers
from tests.conftest import SMALL

RunDir = Callable[..., Path]
QUICK = ("method=fedprox", "rounds=3", "evaluate.every=1", "checkpoint.rounds=1")


def events(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tensorboard"))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def settings(directory: Path) -> dict[str, Any]:
    """What TensorBoard's page of hyper-parameters shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    reader = EventAccumulator(str(directory / "tensorboard"))
    reader.Reload()
    data = reader.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    found = parse_session_start_info_plugin_data(data).hparams
    return {key: getattr(value, value.WhichOneof("kind")) for key, value in found.items()}


def stored(root: Path) -> dict[str, tuple[str, dict[str, str], dict[str, list[tuple[int, float]]], list[str]]]:
    """By name, a run's status, parameters, metrics by step and files."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlruns/mlflow.db")
    experiment = client.get_experiment_by_name(root.name)
    assert experiment is not None
    found = {}
    for run in client.search_runs([experiment.experiment_id]):
        key = run.info.run_id
        steps = {m: [(e.step, e.value) for e in client.get_metric_history(key, m)] for m in run.data.metrics}
        files = [file.path for file in client.list_artifacts(key)]
        assert run.info.run_name not in found
        found[run.info.run_name] = run.info.status, run.data.params, steps, files
    return found


def expected(directory: Path) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for line in read_rounds(directory):
        for name, value in numbers(line):
            found.setdefault(name, []).append((line["round"], pytest.approx(value, rel=1e-6)))
    return found


def test_names_are_those_of_rounds_jsonl_joined_by_slashes_and_tables_stay_there() -> None:
    test = {"accuracy": 0.5, "auc": None, "recall_per_class": [0.25, None], "confusion": [[1, 2], [3, 4]]}
    line = {"round": 3, "seconds": 2, "test": test, "failures": ["client 1 failed"]}
    assert dict(numbers(line)) == {"seconds": 2.0, "test/accuracy": 0.5, "test/recall_per_class/0": 0.25}


def test_a_tracked_run_has_the_bits_of_one_that_is_not_and_its_trackers_every_round(
    run_dir: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, tracked = run_dir(*QUICK), run_dir(*QUICK)
    execute(plain, workers=1)
    assert main(["run", "--resume", str(tracked), "--workers", "1", "--track", "tensorboard,mlflow"]) == 0
    assert "gets no more rounds" not in capsys.readouterr().err
    assert (tracked / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()
    one, other = (
        [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in read_rounds(directory)]
        for directory in (plain, tracked)
    )
    assert one == other
    more = {"tensorboard", "mlruns", "report.html"}
    assert {path.name for path in tracked.iterdir()} - {path.name for path in plain.iterdir()} == more
    assert events(tracked) == expected(tracked)
    assert settings(tracked)["clients.count"] == 5
    assert settings(tracked)["data.name"] == "digits"
    [(name, (status, params, steps, files))] = stored(tracked).items()
    assert (name, status, files) == (tracked.name, "FINISHED", ["experiment.toml"])
    assert (params["clients.count"], params["seed"], params["name"]) == ("5", "0", "fedprox")
    assert steps == expected(tracked)

    # Another run in the same store, as below one directory: one that is there stays as it is, and one that is
    # resumed, and ahead of what is told of it as in a process of its own, is not told twice.
    root = tracked
    tracks = Trackers(["tensorboard", "mlflow"], root)
    tracks.complete(tracked)
    lines = read_rounds(plain)
    (plain / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    tracks.watch(plain, lines[0])
    tracks.watch(plain, lines[1])
    tracks.watch(plain, {"done": False, "stopped": "after round 2"})
    found = stored(root)
    assert found[plain.name][0] == "KILLED"
    assert [step for step, _ in found[plain.name][2]["seconds"]] == [1, 2]
    again = Trackers(["tensorboard", "mlflow"], root)
    (plain / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    again.watch(plain, lines[1])
    again.watch(plain, lines[2])
    again.watch(plain, {"done": True})
    again.complete(plain)
    found = stored(root)
    assert sorted(found) == sorted([plain.name, tracked.name])
    assert found[plain.name][0] == "FINISHED"
    assert found[plain.name][2] == expected(plain)
    assert events(plain) == expected(plain)
    assert found[tracked.name][2] == expected(tracked)
    assert capsys.readouterr().err == ""


def test_many_runs_are_tracked_from_the_process_that_started_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [word for change in (*SMALL, *QUICK[1:]) for word in ("--set", change)]
    command = ["sweep", "--methods", "fedprox", "--seeds", "0,1", "--out", str(tmp_path), "--workers", "2"]
    assert main([*command, *changes, "--track", "tensorboard"]) == 0
    runs = [path.parent for path in tmp_path.glob("*/experiment.toml")]
    assert len(runs) == 2
    for run in runs:
        assert events(run) == expected(run)


def test_a_tracker_that_fails_loses_itself_alone(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_dir(*QUICK)
    (directory / "tensorboard").write_text("in the way")
    assert main(["run", "--resume", str(directory), "--workers", "1", "--track", "tensorboard"]) == 0
    err = capsys.readouterr().err
    assert "tensorboard gets no more rounds: FileExistsError" in err
    assert err.count("gets no more rounds") == 1
    assert len(read_rounds(directory)) == 3
    assert (directory / "summary.json").exists()


def test_what_is_missing_or_unknown_is_said_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(names: str) -> str:
        assert main(["run", "--method", "fedprox", "--out", str(tmp_path / "run"), "--track", names]) == 2
        return capsys.readouterr().err

    assert said("tensorbord") == "fewlabel: --track knows tensorboard and mlflow, found 'tensorbord'\n"
    for name in ("mlflow", "sqlalchemy"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr("fewlabel.report.trackers.find_spec", lambda name: None if name == "sqlalchemy" else object())
    assert said("mlflow") == "fewlabel: --track mlflow needs sqlalchemy: in FewLabel's folder, pip install '.[track]'\n"
    assert not (tmp_path / "run").exists()


def test_how_a_run_ended_is_seen_from_how_its_block_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracks, ends = Trackers([], tmp_path), list[Any]()
    monkeypatch.setattr(tracks, "watch", lambda directory, line: ends.append(line))
    with tracks.following(tmp_path):
        pass
    for error in (KeyboardInterrupt(), Interrupted("stopped"), ValueError("x")):
        with pytest.raises(type(error)), tracks.following(tmp_path):
            raise error
    assert ends == [{"done": True}, {"done": False}, {"done": False}, {"failed": "x"}]
