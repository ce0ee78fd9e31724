"""Grids must hold every combination that was asked for, each at a place of its own."""

import sys
from pathlib import Path

import pytest

from fewlabel.core.errors import BadInput
from fewlabel.engine.sweep import grid, place
from fewlabel.experiment import read


def test_settings_of_a_method_vary_with_the_method_whatever_their_order():
    axes = {"method.local.lr": [0.01, 0.1], "method": ["fedavg", "fedprox"]}
    found = grid({}, axes)
    assert {(e.name, e.method.local.lr) for e in found} == {(n, r) for n in axes["method"] for r in (0.01, 0.1)}
    assert len({place(e, Path("runs")) for e in found}) == 4


def test_what_is_set_cannot_be_varied():
    with pytest.raises(BadInput, match=r"clients\.alpha is both set and varied"):
        grid({}, {"clients.alpha": [0.1, 0.2]}, ["clients.alpha=5"])


def test_a_method_of_ones_own_that_was_edited_is_run_again(tmp_path, monkeypatch):
    source = (Path(__file__).parents[1] / "keeper.py").read_text()
    (tmp_path / "mykeeper.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    experiment = read({"method": "mykeeper:Keeper"})
    before = place(experiment, tmp_path)
    assert place(experiment, tmp_path) == before
    (tmp_path / "mykeeper.py").write_text(source.replace("0.11", "0.12"))
    assert place(experiment, tmp_path) != before
    del sys.modules["mykeeper"]
