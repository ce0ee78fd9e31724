"""A site's log is anchored: who writes it anew without the key, or cuts it, is found by the site or the coordinator."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fewlabel.cli.main import main
from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys, log_heads, members, site_folder, site_log
from fewlabel.deploy.members import Federation
from tests.deploy.test_site_log import forged, lines


@pytest.fixture
def parties(tmp_path) -> tuple[Path, Path]:
    """A federation, and the folder of its one site, as the commands set them up. Its node has the number 70."""
    federation, site = tmp_path / "federation", tmp_path / "site"
    members.create(federation, Federation("lungs", "127.0.0.1:9443", "0.2.0"), {})
    config = site_folder.SiteConfig(0, "images", str(site / "state"))
    request = site_folder.create(site, "north", federation / "trust", config)
    members.note_node(federation, members.admit(federation, request), 70)
    return federation, site


def reply(site: Path, upload: bytes = b"weights") -> dict:
    """Log a message and its reply as a site does, and return the reply."""
    state, key = site / "state", str(site / "key")
    site_log.note(state, "in", [b"order"], "run", 1, "local_update", key=key)
    line = site_log.note(state, "out", [upload], "run", 1, "local_update", key=key)
    return {"upload": upload, "log": line.text()}


def log_of(site: Path) -> Path:
    return site / "state" / site_log.FILE


def test_a_line_is_signed_by_the_sites_key_and_no_other(parties, tmp_path):
    _, site = parties
    reply(site)
    public = keys.load_public(members.read_enrolment(site / "enrolment.json").key)
    stranger = keys.new_key(tmp_path / "stranger", ssh=True).public_key()
    first = site_log.verify(log_of(site)).entries[0]
    assert first.signed_by(public)
    assert not first.signed_by(stranger)
    assert not replace(first, hash="0" * 64).signed_by(public)
    assert site_log.verify(log_of(site), public).faults == ()


def test_a_log_that_someone_without_the_key_writes_anew_is_found_at_the_site(parties, tmp_path, capsys):
    """Its chain has no break, but nobody else can sign it: neither with a key of their own nor without one."""
    _, site = parties
    reply(site)
    assert main(["audit", str(site)]) == 0
    assert "2 lines are signed by the key SHA256:" in capsys.readouterr().out
    keys.new_key(tmp_path / "stranger", ssh=True)
    whole = log_of(site).read_bytes()
    for key, said in ((str(tmp_path / "stranger"), "nobody whose key is known has signed its last line"), ("", "")):
        log_of(site).unlink()
        for _ in range(2):
            site_log.note(site / "state", "out", [b"less"], "run", 1, "local_update", key=key)
        assert main(["audit", str(site / "state")]) == (4 if said else 0)
        shown = capsys.readouterr()
        assert said in shown.err
        assert ("no line of it is signed" in shown.out) == (not said)
    log_of(site).write_bytes(
        whole + forged(lines_of(whole)[-1], number=3, previous=json.loads(lines_of(whole)[-1])["hash"])
    )
    assert main(["audit", str(site)]) == 4
    assert "line 3" in capsys.readouterr().err


def lines_of(data: bytes) -> list[bytes]:
    return data.splitlines(keepends=True)


def test_a_coordinator_keeps_the_line_of_each_reply(parties):
    federation, site = parties
    said: list[str] = []
    heads = log_heads.Heads(federation, said.append)
    for upload in (b"one", b"two"):
        heads.take(70, reply(site, upload))
    kept = log_heads.read(federation / log_heads.FILE)
    assert [(one.client, one.name, one.number, one.fault) for one in kept] == [(0, "north", 2, ""), (0, "north", 4, "")]
    assert [one.hash for one in kept] == [
        entry.hash for entry in site_log.verify(log_of(site)).entries if entry.number in (2, 4)
    ]
    assert said == []
    log_heads.Heads(federation, said.append).take(70, reply(site))  # in a later run
    assert said == []


def test_a_coordinator_notices_at_once_what_is_wrong(parties, tmp_path):
    federation, site = parties
    said: list[str] = []
    heads = log_heads.Heads(federation, said.append)
    heads.take(70, reply(site))
    heads.take(70, reply(site, b"a") | {"upload": b"b"})
    heads.take(70, {"upload": b"c"})
    heads.take(70, {"failed": "its site process does not run"})  # says nothing of the site's images
    keys.new_key(tmp_path / "stranger", ssh=True)
    line = site_log.note(tmp_path, "out", [b"d"], "run", 1, "x", key=str(tmp_path / "stranger"))
    heads.take(70, {"upload": b"d", "log": line.text()})
    log_of(site).unlink()
    heads.take(70, reply(site))
    assert said == [
        "a reply of client 0 'north' has a line that is about another reply",
        "a reply of client 0 'north' came without a signed line of the site's log",
        "a reply of client 0 'north' has a line that the site's key has not signed",
        "a reply of client 0 'north' is line 2 of a log that had line 2 before: it was cut off or written anew",
    ]


CUT = {
    "cut": lambda log: log.write_bytes(b"".join(lines(log)[:-2])),
    "cut and gone on": lambda log: log.write_bytes(b"".join(lines(log)[:-2])) and reply(log.parent.parent, b"other"),
    "anew": lambda log: log.unlink() or [reply(log.parent.parent, b"other") for _ in range(3)],
}


@pytest.mark.parametrize("how", CUT)
def test_a_log_that_its_own_site_cut_or_wrote_anew_is_found_by_what_the_coordinator_kept(
    how, parties, tmp_path, capsys
):
    """With the key, so that the log itself is without a fault."""
    federation, site = parties
    heads = log_heads.Heads(federation)
    for upload in (b"one", b"two", b"three"):
        heads.take(70, reply(site, upload))
    given = tmp_path / "given.jsonl"
    given.write_bytes(log_of(site).read_bytes())
    assert main(["audit", str(given), "--federation", str(federation)]) == 0
    assert "the log has all 3 lines that the coordinator kept of it" in capsys.readouterr().out
    CUT[how](log_of(site))
    assert main(["audit", str(site)]) == 0  # alone, it does not show
    given.write_bytes(log_of(site).read_bytes())
    capsys.readouterr()
    assert main(["audit", str(given), "--federation", str(federation)]) == 4
    assert "line 6, which the coordinator kept on " in (told := capsys.readouterr().err)
    assert "the log is not the one that the coordinator knows" in told
    # And the site finds it as well, with the coordinator's file.
    assert main(["audit", str(site), "--federation", str(federation / log_heads.FILE)]) == 4


def test_lines_of_before_signatures_are_read_and_none_may_follow_on_a_signed_one(parties):
    _, site = parties
    state = site / "state"
    site_log.note(state, "in", [b"x"], "run", 1, "info")
    assert "signature" not in json.loads(lines(log_of(site))[0])
    reply(site)
    public = keys.load_public(members.read_enrolment(site / "enrolment.json").key)
    assert site_log.verify(log_of(site), public).faults == ()
    site_log.note(state, "in", [b"x"], "run", 1, "info")
    assert site_log.verify(log_of(site), public).faults == (
        "line 4 is not signed, although one before it is: it was put in",
    )


def test_a_federation_without_heads_is_told_so(parties):
    federation, _ = parties
    with pytest.raises(BadInput, match=r"there is no file .*heads.jsonl; a coordinator has it once a site has replied"):
        log_heads.heads_file(federation)
