"""A site's log: what came and left is in it before it leaves, and whoever meddles with a line is found out."""

import hashlib
import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from fewlabel.cli.main import main
from fewlabel.core import wire
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.site_files import Terms
from fewlabel.deploy import site, site_log, site_process
from fewlabel.deploy.messages import Order
from fewlabel.engine.executor import Job
from fewlabel.experiment import Experiment, dumps

TERMS = Terms(("a", "b"), 1, 4, (0.5,), (0.25,))


@pytest.fixture
def log(tmp_path) -> Path:
    """Three messages and their replies."""
    for number in range(3):
        site_log.note(tmp_path, "in", [b"order", b"x" * number], "run", number, "local_update")
        site_log.note(tmp_path, "out", [b"up"], "run", number, "local_update")
    return tmp_path / site_log.FILE


def lines(log: Path) -> list[bytes]:
    return log.read_bytes().splitlines(keepends=True)


def forged(line: bytes, **changes) -> bytes:
    """A line with other content, whose own hash is right."""
    table = json.loads(line) | changes
    table.pop("hash")
    return json.dumps(table | {"hash": site_log.hashed(table)}).encode() + b"\n"


def test_a_line_says_what_it_is_about_and_names_the_line_before(log):
    first, second = map(json.loads, lines(log)[:2])
    assert (first["number"], first["direction"], first["bytes"], first["round"]) == (1, "in", 5, 0)
    assert first["sha256"] == hashlib.sha256(b"order").hexdigest()
    assert first["previous"] == "0" * 64
    assert second["previous"] == first.pop("hash")
    written = json.dumps(first, sort_keys=True, separators=(",", ":")).encode()
    assert second["previous"] == hashlib.sha256(written).hexdigest()


def test_a_whole_log_has_no_faults_and_adds_up(log):
    account = site_log.verify(log)
    assert account.faults == ()
    assert account.totals() == {"local_update": {"in": 3, "bytes_in": 18, "out": 3, "bytes_out": 6}}


CHANGED = b'"round": 1'
TAMPERED = {
    "changed": (lambda a: [*a[:2], a[2].replace(CHANGED, b'"round": 2'), *a[3:]], ["line 3 was changed"]),
    "spaces": (lambda a: [*a[:2], a[2].replace(CHANGED, b'"round":  1'), *a[3:]], ["line 3 was changed"]),
    "nonsense": (lambda a: [*a[:2], b"[]\n", *a[3:]], ["line 3 was changed"]),
    "written anew": (lambda a: [*a[:2], forged(a[2], bytes=1), *a[3:]], ["line 4 does not follow on the one before"]),
    "removed": (lambda a: a[:2] + a[3:], ["line 3 has the number 4: before it 3 was removed"]),
    "removed two": (lambda a: a[:1] + a[3:], ["line 2 has the number 4: before it 2 to 3 was removed"]),
    "removed first": (lambda a: a[1:], ["line 1 has the number 2: before it 1 was removed"]),
    "put in": (lambda a: [*a[:2], b"{}\n", *a[2:]], ["line 3 was changed, or put in"]),
    "put in again": (lambda a: [*a[:3], a[1], *a[3:]], ["line 4 has the number 2, which came before"]),
    "put in, forged": (
        lambda a: [*a[:2], forged(a[2], bytes=1), *a[2:]],
        ["line 4 has the number 3, which came before", "line 5 does not follow on the one before"],
    ),
    "moved": (
        lambda a: [*a[:2], a[3], a[2], *a[4:]],
        ["line 3 has the number 4: before it 3 was removed, or moved", "line 4 has the number 3, which came before"],
    ),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_a_line_that_was_meddled_with_is_named(how, log):
    tamper, told = TAMPERED[how]
    log.write_bytes(b"".join(tamper(lines(log))))
    faults = site_log.verify(log).faults
    assert len(faults) == len(told)
    assert all(fault.startswith(said) for fault, said in zip(faults, told, strict=True)), faults


def test_lines_cut_off_at_the_end_show_by_a_head_that_was_noted(log):
    before = site_log.verify(log).head
    site_log.note(log.parent, "in", [], "run", 9, "info")
    assert site_log.verify(log).line_of(before) == 6
    log.write_bytes(b"".join(lines(log)[:5]))
    assert site_log.verify(log).faults == ()
    with pytest.raises(StorageError, match=f"no line has the hash {before}: the log was cut off or written anew"):
        site_log.verify(log).line_of(before)
    assert site_log.verify(log).line_of(site_log.verify(log).head[:8]) == 5
    with pytest.raises(BadInput, match="'1f3c…' is no head: a head is 64 hexadecimal digits"):
        site_log.verify(log).line_of("1f3c…")


@pytest.mark.parametrize("left", [1, 40, -1])
def test_a_line_half_written_when_its_process_was_killed_is_dropped_and_the_chain_goes_on(log, left):
    whole = lines(log)
    log.write_bytes(b"".join(whole[:5]) + whole[5][:left])
    account = site_log.verify(log)
    assert (len(account.entries), account.torn, account.faults) == (5, True, ())
    site_log.note(log.parent, "out", [b"up"], "run", 2, "local_update")
    account = site_log.verify(log)
    assert (len(account.entries), account.torn, account.faults) == (6, False, ())


def test_processes_that_write_at_once_make_one_chain(tmp_path):
    code = "import sys; from pathlib import Path; from fewlabel.deploy import site_log\n"
    code += "for n in range(20): site_log.note(Path(sys.argv[1]), 'in', [b'x'], 'run', n, 'info')"
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    account = site_log.verify(tmp_path / site_log.FILE)
    assert (len(account.entries), account.faults) == (60, ())


# At a site


def config(tmp_path: Path) -> dict:
    return {"client": 0, "data": str(tmp_path / "data"), "state": str(tmp_path / "state")}


def parts() -> dict:
    order = Order(dumps(Experiment(method="fedavg")), TERMS, Job("0" * 32, "server", client=0, round=1))
    return {"order": wire.pack(order), "message": b"12345"}


def test_what_comes_and_what_leaves_is_logged_even_if_it_is_a_refusal(tmp_path):
    asked = parts()
    made = site.reply(config(tmp_path), asked)
    came, left = site_log.verify(tmp_path / "state" / site_log.FILE).entries
    assert (came.task, came.run, came.round, came.bytes) == ("server", "0" * 32, 1, len(asked["order"]) + 5)
    assert came.sha256 == hashlib.sha256(asked["order"] + b"12345").hexdigest()
    assert left.direction == "out"
    assert left.sha256 == hashlib.sha256(made["refused"].encode()).hexdigest()


def test_what_a_site_process_answers_is_logged_as_well(tmp_path):
    socket, reply = tmp_path / "socket", partial(site.reply, config(tmp_path))
    why = "its site process does not run now; `fewlabel site join` starts it again"
    assert site_process.ask(socket, parts()) == {"failed": why}
    threading.Thread(target=site_process.serve, args=(reply, socket), daemon=True).start()
    while not socket.exists():
        time.sleep(0.01)
    made = site_process.ask(socket, parts())
    assert made == {"refused": "a client does no 'server'"}
    assert [entry.direction for entry in site_log.verify(tmp_path / "state" / site_log.FILE).entries] == ["in", "out"]


def test_an_order_that_cannot_be_read_is_logged_as_such(tmp_path):
    site.reply(config(tmp_path), {"order": b"\xff", "message": b""})
    site.reply(config(tmp_path), {})
    entries = site_log.verify(tmp_path / "state" / site_log.FILE).entries
    assert [(entry.task, entry.bytes) for entry in entries if entry.direction == "in"] == [
        ("unreadable", 1),
        ("unreadable", 0),
    ]


def test_nothing_leaves_that_cannot_be_written_down(tmp_path, capfd):
    site.reply(config(tmp_path), parts())
    log = tmp_path / "state" / site_log.FILE
    log.write_bytes(log.read_bytes().replace(b'"out"', b'"in"'))
    assert site.reply(config(tmp_path), parts()) == {"failed": "StorageError; the site's own log says more"}
    assert "is damaged; look into it with `fewlabel audit`, and move it away" in capfd.readouterr().err
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="nothing leaves this site until it can"):
        site_log.note(tmp_path / "file" / "state", "in", [], "", 0, "")


# The command


def test_the_command_shows_what_came_and_left_and_the_head(log, capsys):
    head = site_log.verify(log).head
    assert main(["audit", str(log)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].split() == ["task", "came", "bytes", "left", "bytes"]
    assert shown[1].split() == ["local_update", "3", "18", "3", "6"]
    assert shown[-1] == f"head {head}"
    assert main(["audit", str(log.parent), "--head", head, "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["lines"], told["head"], told["head_at"], told["torn"]) == (6, head, 6, False)


def test_the_command_names_a_line_and_fails(log, capsys):
    log.write_bytes(b"".join(lines(log)[:2] + lines(log)[3:]))
    assert main(["audit", str(log)]) == 4
    assert "line 3 has the number 4: before it 3 was removed, or moved" in capsys.readouterr().err
    assert main(["audit", str(log.parent / "no-such")]) == 2
