"""The examples work: a method in 40 lines of code that passes what every method must, and two notebooks."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

from fewlabel.engine import conformance

EXAMPLES = Path(__file__).parents[1] / "examples"
sys.path[:0] = [str(EXAMPLES), str(EXAMPLES.parent / "docs")]

import notebooks  # noqa: E402
from agree import Agree  # noqa: E402


def test_the_example_is_a_whole_method_in_at_most_40_lines():
    assert len([line for line in (EXAMPLES / "agree.py").read_text().splitlines() if line]) <= 40


def test_the_example_passes_what_every_method_must(tmp_path):
    findings = list(conformance.check(Agree(confidence=0.3), tmp_path))
    assert [finding for finding in findings if finding.why] == []
    assert len(findings) == 2 + len(conformance.CHECKS)  # it has one task and one place for labels


@pytest.mark.parametrize("name", notebooks.NAMES)
def test_a_notebook_prints_what_it_shows(name, tmp_path):
    """If not: python docs/notebooks.py."""
    kept = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    book = notebooks.executed(name, tmp_path)
    printed = notebooks.text(book)
    assert words(printed) == words(notebooks.text(kept))
    if name == "research":
        assert all(row in printed for row in ("labels-only", "fed-consist", "agree:Agree", "all-labels"))
        assert "4/4 runs" in printed  # the progress of `fl.compare`
        assert (tmp_path / "curves.png").exists()
        assert (tmp_path / "research.html").exists()
    else:
        assert "without label     838" in printed
        assert "my/test" in printed
        assert (tmp_path / "runs" / "hospital" / "export" / "model.safetensors").exists()


def words(text):
    """Return the words of an output. Numbers differ between machines, and checksums between folders."""
    return set(re.findall(r"[^\W\d_]+", re.sub(r"[¹²]|\b[0-9a-f]{64}\b", "", text)))
