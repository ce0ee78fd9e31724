"""The Python API: light to import, complete, and the same bits as any other way to run an experiment."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import fewlabel as fl
from fewlabel.api import bounds, fresh_directory
from fewlabel.core.errors import BadInput
from fewlabel.engine.run import execute, prepare
from fewlabel.experiment import RECIPES
from fewlabel.learn.optim import Local
from fewlabel.methods.fedavg import FedAvg

EXPERIMENT = fl.Experiment(method=FedAvg(local=Local(epochs=1)), rounds=1)


def test_importing_is_light_and_an_experiment_is_not_yet_torch() -> None:
    code = "import sys, fewlabel as fl; fl.__version__, fl.Experiment, fl.run, fl.Result, fl.FewLabelError;"
    code += "print([m for m in ('torch', 'matplotlib', 'rich', 'sklearn') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_every_name_is_there_and_no_other() -> None:
    assert dir(fl) == sorted(fl.__all__)
    for name in fl.__all__:
        assert getattr(fl, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Experimnt'"):
        fl.Experimnt  # type: ignore[attr-defined]  # noqa: B018


def test_a_run_from_python_has_the_bits_of_prepare_and_execute(tmp_path: Path) -> None:
    result = fl.run(EXPERIMENT, tmp_path / "one", workers=1)
    execute(prepare(replace(EXPERIMENT, train="fewlabel"), tmp_path / "two"), workers=1)
    assert result.finished
    for name in ("model.safetensors", "experiment.toml", "partition.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert result.rounds[0]["test"] == fl.Result(tmp_path / "two").rounds[0]["test"]
    assert "accuracy" in result._repr_html_()


def test_without_a_directory_a_run_takes_the_first_free_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert fl.run(EXPERIMENT, workers=1).directory == Path("runs/fedavg-digits-seed0")
    assert fresh_directory(EXPERIMENT) == Path("runs/fedavg-digits-seed0-2")
    Path("runs/fedavg-digits-seed0-2").write_text("a file")
    Path("runs/fedavg-digits-seed0-3").mkdir()  # empty: nothing is lost there
    assert fresh_directory(EXPERIMENT) == Path("runs/fedavg-digits-seed0-3")
    named = replace(EXPERIMENT, name="my:own/method", seed=7)
    assert fresh_directory(named, tmp_path) == tmp_path / "my-own-method-digits-seed7"


def test_a_run_goes_on_only_where_it_is_asked_to_and_only_with_the_same_experiment(tmp_path: Path) -> None:
    first = fl.run(EXPERIMENT, tmp_path / "run", workers=1, resume=True)  # nothing there yet: it begins
    before = (tmp_path / "run" / "summary.json").read_bytes()
    assert fl.run(EXPERIMENT, tmp_path / "run", workers=1, resume=True).rounds == first.rounds
    assert (tmp_path / "run" / "summary.json").read_bytes() == before
    with pytest.raises(BadInput, match="is not empty"):
        fl.run(EXPERIMENT, tmp_path / "run", workers=1)
    with pytest.raises(BadInput, match="another experiment"):
        fl.run(replace(EXPERIMENT, seed=1), tmp_path / "run", workers=1, resume=True)
    with pytest.raises(BadInput, match="needs the directory"):
        fl.run(EXPERIMENT, resume=True)


def test_a_run_has_our_recipe_unless_its_experiment_says_otherwise(tmp_path: Path) -> None:
    assert fl.run(EXPERIMENT, tmp_path / "ours", workers=1).experiment.train == RECIPES["fewlabel"]
    own = replace(EXPERIMENT, train=fl.Train(average=0.5))
    assert fl.run(own, tmp_path / "own", workers=1).experiment.train == fl.Train(average=0.5)
    assert fl.run(replace(EXPERIMENT, train="printed"), tmp_path / "p", workers=1).experiment.train == fl.Train()
    found = fl.compare([replace(EXPERIMENT, train="printed")], methods=["fedprox"], base=EXPERIMENT, out=tmp_path / "c")
    assert sorted((row.name, row.experiment.recipe_name) for row in found.rows) == [
        ("all-labels", "fewlabel"), ("all-labels", "printed"), ("fedavg", "printed"), ("fedprox", "fewlabel"),
        ("labels-only", "fewlabel"), ("labels-only", "printed"),
    ]  # fmt: skip


def test_an_object_in_a_comparison_trains_its_sites_like_floor_and_ceiling(tmp_path: Path) -> None:
    own = FedAvg(proximal=0.5)
    found = fl.compare(methods=[own], base=replace(EXPERIMENT, train="fewlabel"), out=tmp_path / "named", workers=1)
    assert {row.experiment.method.local for row in found.rows} == {fl.Experiment(train="fewlabel").method.local}
    found = fl.compare(methods=[own], base=replace(EXPERIMENT, train="printed"), out=tmp_path / "printed", workers=1)
    assert next(row for row in found.rows if row.name == "fedavg").experiment.method == own


def test_a_run_without_a_recipe_goes_on_as_it_was(tmp_path: Path) -> None:
    """Runs of FewLabel 0.1 have no table [train]: they were trained as printed, and stay so."""
    before = prepare(EXPERIMENT, tmp_path / "old")
    assert "[train]" not in (before / "experiment.toml").read_text()
    after = fl.run(EXPERIMENT, before, workers=1, resume=True)
    execute(prepare(replace(EXPERIMENT, train="printed"), tmp_path / "new"), workers=1)
    assert after.experiment.train == fl.Train()
    assert after.rounds[0]["test"] == fl.Result(tmp_path / "new").rounds[0]["test"]
    with pytest.raises(BadInput, match="another experiment"):
        fl.run(replace(EXPERIMENT, train="fewlabel"), before, workers=1, resume=True)


def test_a_run_cannot_get_longer(tmp_path: Path) -> None:
    fl.run(EXPERIMENT, tmp_path / "run", workers=1)
    longer = replace(EXPERIMENT, rounds=2)
    with pytest.raises(BadInput, match=r"run of 1 rounds and cannot become one of 2, .* start a new run"):
        fl.run(longer, tmp_path / "run", workers=1, resume=True)
    with pytest.raises(BadInput, match="cannot become one of 2"):
        fl.run(longer, tmp_path / "run", workers=1)


def test_a_comparison_has_floor_and_ceiling_and_runs_nothing_twice(tmp_path: Path) -> None:
    base = replace(EXPERIMENT, clients=fl.Clients(count=4))
    found = fl.compare(methods=["fedprox"], seeds=(0, 1), base=base, out=tmp_path, workers=1)
    assert [row.name for row in found.rows] == ["labels-only", "fedprox", "all-labels"]
    assert [row.seeds for row in found.rows] == [(0, 1)] * 3
    assert all(row.experiment.clients.count == 4 for row in found.rows)
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")}
    assert len(written) == 6
    fewer = fl.compare([replace(base, method="fedprox", name="")], out=tmp_path, workers=1)
    assert [row.seeds for row in fewer.rows] == [(0,)] * 3
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("summary.json")} == written


def test_floor_and_ceiling_are_those_of_the_same_circumstances() -> None:
    some = fl.Experiment(method="fedprox")
    skewed = replace(some, clients=fl.Clients(alpha=0.1))
    found = bounds([some, skewed])
    assert [(each.name, each.clients.alpha) for each in found] == [
        ("labels-only", 0.8),
        ("all-labels", 0.8),
        ("labels-only", 0.1),
        ("all-labels", 0.1),
    ]
    assert bounds([some, *found[:2]]) == []
    assert bounds([some, found[1]]) == found[:1]
    assert bounds([found[1]]) == []  # which labels there were is not to be seen in a ceiling
    own = fl.Experiment(
        method=FedAvg(local=Local(epochs=1)), name="labels-only"
    )  # a floor of one's own stays the floor
    assert bounds([some, own]) == found[1:2]
