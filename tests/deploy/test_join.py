"""A site's folder is read as it was set up, and a site that joins waits for a server that does not let it in yet."""

import sys
from pathlib import Path

import pytest

from fewlabel.core.errors import BadInput
from fewlabel.deploy import join, processes, site_folder

# As FewLabel 0.1 wrote it.
OLD = """\
name = "north"
trust = "/site/trust"
key = "/site/key"

[place]
client = 2
data = "/images"
state = "/site/state"
methods = "labels-only"
terms = "/site/trust"
"""


def test_a_site_of_0_1_is_read_and_written_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(OLD)
    found = site_folder.read(tmp_path)
    assert found.place == site_folder.SiteConfig(
        2, "/images", "/site/state", methods="labels-only", terms="/site/trust"
    )
    site_folder.write(tmp_path, found)
    assert (tmp_path / "site.toml").read_text() == OLD


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("][", "is not TOML"),
        (OLD.partition("[place]")[0], "site.toml: place is missing"),
        (OLD.replace("client = 2", "client = -1"), "site.toml: place.client must be at least 0, found -1"),
    ],
)
def test_settings_that_cannot_be_are_named_with_their_file(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(BadInput, match=sentence):
        site_folder.read(tmp_path)


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
