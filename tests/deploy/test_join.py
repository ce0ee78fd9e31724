"""A site's folder is read as it was set up, and a site that joins waits for a server that does not let it in yet."""

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.deploy import join, processes, site_folder, site_process
from fewlabel.deploy.site_process import ask, last_beat
from tests.flower_processes import until

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


def test_a_node_that_ends_is_started_again_with_growing_pauses_whatever_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(join, "PAUSE", 0.05)
    programs = processes.Programs(tmp_path, {})
    code = NODE.replace("[code: 2004] Failed to activate SuperNode.", "[SSL: CERTIFICATE_VERIFY_FAILED] no")
    with programs.cleaned_up():
        join.start_node(programs, [sys.executable, "-c", code])
    told = capsys.readouterr().err
    assert "Flower's node has ended: its last words: [SSL: CERTIFICATE_VERIFY_FAILED] no" in told
    assert "the next attempt is in " in told


def test_a_member_that_is_refused_by_name_is_not_let_in_later_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "print('ERROR: [code: 412] it was removed from the federation')"
    programs = processes.Programs(tmp_path, {})
    with programs.cleaned_up(), pytest.raises(RunFailed, match="does not let this site in: it was removed"):
        join.start_node(programs, [sys.executable, "-c", code])


ANSWERS = """
import sys
from pathlib import Path
from fewlabel.deploy import site_process
site_process.BEAT = 0.1
site_process.serve(lambda parts: {"failed": "no " + parts["order"]}, Path(sys.argv[1]))
"""


def test_a_process_that_is_stopped_is_found_and_ended_and_one_at_work_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(join, "HUNG", 2.0)
    socket = tmp_path / site_folder.SOCKET
    programs = processes.Programs(tmp_path, {"PYTHONPATH": os.pathsep.join(sys.path)})
    command = [sys.executable, "-c", ANSWERS, str(socket)]
    with programs.cleaned_up():
        join.start_process(programs, command)
        programs.start(join.NODE, [sys.executable, "-c", "import time; time.sleep(999)"])
        hangs, words = join.Hangs(programs), join.Words(programs.log(join.PROCESS))
        first = last_beat(socket)
        until(lambda: hangs.end() or last_beat(socket) != first)
        assert programs.first_ended() is None

        assert ask(socket, {"order": "way"}) == ask(socket, {"order": "way"}) == {"failed": "no way"}
        until(lambda: words.tell() or words.told)
        assert capsys.readouterr().err == "fewlabel: an order was not carried out: no way\n"

        programs.started[join.PROCESS].send_signal(signal.SIGSTOP)
        until(hangs.end)
        assert programs.first_ended() == join.PROCESS
        assert "has given no sign of life for 2 s, so it is ended and started again" in capsys.readouterr().err
        join.start_process(programs, command)
        assert ask(socket, {"order": "way"}) == {"failed": "no way"}

        monkeypatch.setattr(join, "LOOK", 0.1)
        programs.started[join.NODE].send_signal(signal.SIGSTOP)
        until(lambda: hangs.end() or programs.first_ended() == join.NODE)
        assert programs.started[join.PROCESS].poll() is None


STUCK = """
import sys
from pathlib import Path
from fewlabel.deploy import site_process
site_process.BEAT, site_process.LEAST = 0.1, 1.0

def reply(parts):
    if parts["order"] == "read":
        Path(sys.argv[2]).read_bytes()  # a pipe that nobody writes to, like a disk that does not answer
    return {"upload": parts["order"]}

site_process.serve(reply, Path(sys.argv[1]))
"""


def test_a_process_that_waits_for_a_disk_is_ended_when_nobody_waits_for_it_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It still gives signs of life."""
    socket, disk = tmp_path / site_folder.SOCKET, tmp_path / "disk"
    os.mkfifo(disk)
    programs = processes.Programs(tmp_path, {"PYTHONPATH": os.pathsep.join(sys.path)})
    command = [sys.executable, "-c", STUCK, str(socket), str(disk)]
    with programs.cleaned_up(), ThreadPoolExecutor(1) as threads:
        join.start_process(programs, command)
        programs.start(join.NODE, [sys.executable, "-c", "import time; time.sleep(999)"])
        hangs = join.Hangs(programs)
        assert ask(socket, {"order": "think", "seconds": "0.1"}) == {"upload": "think"}
        assert not site_process.is_late(socket)
        stuck, first = threads.submit(ask, socket, {"order": "read", "seconds": "1.5"}), last_beat(socket)
        until(hangs.end)
        assert last_beat(socket) != first  # it was alive
        assert "failed" in stuck.result()
        told = capsys.readouterr().err
        assert "has been at an order for longer than the coordinator waits for it, so it is ended and started" in told
        join.start_process(programs, command)
        assert not hangs.end()
        assert ask(socket, {"order": "think"}) == {"upload": "think"}  # an older coordinator does not say how long
