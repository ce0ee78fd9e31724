"""The examples work: a method in 40 lines of code that passes what every method must, and two notebooks."""

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.methods import test_conformance as conformance
from tests.methods.test_conformance import undisturbed  # noqa: F401 (a fixture)

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from agree import Agree  # noqa: E402

(SETTING,) = Agree.label_places


def test_the_example_is_a_whole_method_in_at_most_40_lines():
    assert len([line for line in (EXAMPLES / "agree.py").read_text().splitlines() if line]) <= 40


def test_the_example_passes_what_every_method_must(undisturbed, pool, tmp_path, monkeypatch):  # noqa: F811
    method = Agree(confidence=0.3)
    conformance.test_refuses_in_one_sentence_the_settings_it_does_not_declare(method)
    conformance.test_two_and_three_workers_give_the_bits_of_one(method, SETTING, undisturbed, pool, pool, tmp_path)
    conformance.test_messages_survive_the_wire_and_the_ledger_counts_just_their_bytes(
        method, SETTING, tmp_path / "wire"
    )
    conformance.test_any_client_and_all_labeled_ones_may_be_missing(method, SETTING, tmp_path / "missing")
    conformance.test_server_state_survives_the_wire(method, SETTING, undisturbed)
    (tmp_path / "hidden").mkdir()
    conformance.test_hidden_labels_reach_nothing_but_the_audit(
        method, SETTING, undisturbed, tmp_path / "hidden", monkeypatch
    )


@pytest.mark.parametrize("name", ["research", "hospital"])
def test_a_notebook_runs_from_top_to_bottom(name, tmp_path, monkeypatch):
    book = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)  # what they print is not kept
    shutil.copy(EXAMPLES / "agree.py", tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in book.cells for output in cell.get("outputs", []))
    if name == "research":
        assert all(row in printed for row in ("labels-only", "fed-consist", "agree:Agree", "all-labels"))
        assert (tmp_path / "curves.png").exists()
        assert (tmp_path / "research.html").exists()
    else:
        assert "without label     838" in printed
        assert "my/test" in printed
        assert (tmp_path / "runs" / "hospital" / "export" / "model.safetensors").exists()
