"""The examples work: a method in 40 lines of code that passes what every method must, and two notebooks."""

import os
import shutil
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from fewlabel.engine import conformance

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from agree import Agree  # noqa: E402


def test_the_example_is_a_whole_method_in_at_most_40_lines():
    assert len([line for line in (EXAMPLES / "agree.py").read_text().splitlines() if line]) <= 40


def test_the_example_passes_what_every_method_must(tmp_path):
    findings = list(conformance.check(Agree(confidence=0.3), tmp_path))
    assert [finding for finding in findings if finding.why] == []
    assert len(findings) == 2 + len(conformance.CHECKS)  # it has one task and one place for labels


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
