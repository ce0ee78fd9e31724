"""Programs that are started end with all that they have started, and nothing else ends with them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fewlabel.core.errors import BadInput
from fewlabel.deploy import processes
from tests.flower_processes import until

DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
NEST = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True)
time.sleep(99)
"""


def test_whatever_a_program_starts_ends_with_it_and_nothing_else_does(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    try:
        programs = processes.Programs(tmp_path, {})
        with programs.cleaned_up():
            programs.start("nest", [sys.executable, "-c", NEST])
            until(lambda: "up" in programs.log("nest").read_text())
            assert len(processes.marked(tmp_path)) == 2
            assert processes.process_using(tmp_path) == os.getpid()
            with pytest.raises(BadInput, match=f"in use already, by process {os.getpid()}"), processes.in_use(tmp_path):
                pass
            processes.end(tmp_path, programs.started.values(), patience=1)  # the inner one must be killed
            assert processes.marked(tmp_path) == []
        assert processes.process_using(tmp_path) is None
        (tmp_path / ".running").write_text(str(other.pid))  # as somebody who was killed may leave it
        assert not processes.stop(tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize("ends", [False, True])
def test_a_number_that_is_another_process_here_is_not_ended(ends: bool, tmp_path: Path) -> None:
    """As where a container holds the folder: from the first, or since a process of this machine has ended."""
    code = f"file = open({os.devnull if not ends else '.running'!r}); print(flush=True); import time; time.sleep(99)"
    with processes.in_use(tmp_path):
        other = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE)
        try:
            assert other.stdout is not None
            other.stdout.readline()
            (tmp_path / ".running").write_text(str(other.pid))
            with pytest.raises(
                BadInput, match="is in use by a process that is not on this machine, or is another user's"
            ):
                processes.stop(tmp_path, patience=0)
            assert (other.poll() is not None) == ends
        finally:
            other.kill()
            other.communicate()


ENDED = """\
\x1b[92mINFO \x1b[0m:      Starting Flower SuperNode
INFO:     Uvicorn running on http://127.0.0.1:35779 (Press CTRL+C to quit)
\x1b[91mERROR \x1b[0m:     Exit Code: 305
Failed to initialize the connection to the SuperLink.
[code: 2004] Failed to activate SuperNode.

For more information, visit: <https://flower.ai/305.html>
INFO:     Finished server process [1614]
"""


def test_what_is_shown_of_a_program_is_its_last_error_since_it_was_started(tmp_path: Path) -> None:
    programs = processes.Programs(tmp_path, {})
    assert programs.output("node") == ""
    for code, word in ((f"print({ENDED!r})", "Exit Code: 305 Failed to initialize the connection to the SuperLink. "
                        "[code: 2004] Failed to activate SuperNode."),
                       ("print('a'); print('b\\x1b[0m')", "b"), ("", "it printed nothing"),
                       ("print('╭─ Error ─╮\\n│ gone │\\n╰─────────╯')", "gone")):  # fmt: skip
        programs.start("node", [sys.executable, "-c", code]).wait()
        assert programs.last_error("node") == f"{word} (all of it: {tmp_path}/node.log)"
