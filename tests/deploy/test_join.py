"""A site that joins waits for a server that does not let it in yet."""

import sys
from pathlib import Path

import pytest

from fewlabel.deploy import join, processes

NODE = """
import pathlib, sys, time
first = pathlib.Path("first")
if first.exists():
    print("SuperNode ID: 7", flush=True)
    time.sleep(99)
first.touch()
time.sleep(0.3)
print("ERROR: [code: 2004] Failed to activate SuperNode.")
"""


def test_a_site_is_patient_from_the_first_refusal_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However long the server gave no answer before."""
    monkeypatch.setattr(join, "PATIENCE", 0.2)
    monkeypatch.setattr(join, "PAUSE", 0.05)
    programs = processes.Programs(tmp_path, {})
    with programs.cleaned_up():
        join.start_node(programs, [sys.executable, "-c", NODE])
    waiting, refused = capsys.readouterr().err.splitlines()
    assert waiting == "fewlabel: waiting for the server to answer; press Ctrl-C to give up"
    assert refused.startswith("fewlabel: the server still counts this site as connected, or does not know its key; ")
