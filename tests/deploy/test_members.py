"""Members of a federation: whoever is not who they say, or says it twice, is refused by name."""

import base64
import json
import stat
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="it comes with Flower: pip install '.[flower]'")

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys, members


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path, "lungs")


def made(where: Path, name: str, address: str = "localhost:9443") -> Path:
    members.create(where / name, members.Federation(name, address, "0.1.0"), {})
    return where / name


def enrolled(folder: Path, where: Path, client: int = 0, name: str = "north") -> Path:
    """An enrolment as a site writes it, with a new key."""
    where.mkdir(exist_ok=True)
    keys.new_key(where / "key", ssh=True)
    path = where / "enrolment.json"
    path.write_bytes(members.as_json(asdict(members.enrol(folder / "trust", where / "key", client, name))))
    return path


def admit(folder: Path, path: Path) -> members.Member:
    return members.admit(folder, members.read_enrolment(path))


def test_an_enrolment_makes_a_member_and_says_all_of_it(folder, tmp_path):
    member = admit(folder, enrolled(folder, tmp_path / "a", 3))
    assert (member.client, member.name, member.node) == (3, "north", None)
    assert member.key == keys.public_half(keys.load_key(tmp_path / "a" / "key"))
    assert members.members(folder) == (member,)


def test_no_secret_is_for_others_to_read_or_in_what_is_given_away(folder, tmp_path):
    enrolled(folder, tmp_path / "a")
    for key in (folder / "ca.key", folder / "server.key", tmp_path / "a" / "key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        assert b"PRIVATE KEY" in key.read_bytes()
    given = [*(folder / "trust").iterdir(), tmp_path / "a" / "enrolment.json"]
    assert sorted(path.name for path in given) == ["ca.pem", "enrolment.json", "federation.json", "terms.json"]
    assert not any(b"PRIVATE" in path.read_bytes() for path in given)


@pytest.mark.parametrize(
    "change",
    [
        {"client": 1},
        {"name": "south"},
        {"nonce": "0" * 32},
        {"time": "2026-01-01T00:00:00+00:00"},
        {"federation": "other"},
        {"signature": ""},
        {"signature": "AAAA"},
        {"signature": "?"},
        {"key": "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIB"},
        {"key": "nothing"},
    ],
    ids=lambda change: "-".join(
        f"{name}={value[:4] if isinstance(value, str) else value}" for name, value in change.items()
    ),
)
def test_whatever_is_changed_in_an_enrolment_it_is_refused(change, folder, tmp_path):
    path = enrolled(folder, tmp_path / "a")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(BadInput, match="is not what its key has signed"):
        members.read_enrolment(path)


def test_another_key_under_the_same_signature_is_refused(folder, tmp_path):
    path, other = enrolled(folder, tmp_path / "a"), enrolled(folder, tmp_path / "b")
    table = json.loads(path.read_text()) | {"key": json.loads(other.read_text())["key"]}
    path.write_text(json.dumps(table))
    with pytest.raises(BadInput, match="is not what its key has signed"):
        members.read_enrolment(path)


def test_a_second_enrolment_is_refused_whatever_it_repeats(folder, tmp_path):
    first = enrolled(folder, tmp_path / "a")
    admit(folder, first)
    with pytest.raises(BadInput, match="'north' is enrolled with this key already, as client 0"):
        admit(folder, first)
    again = members.enrol(folder / "trust", tmp_path / "a" / "key", 5, "south")
    with pytest.raises(BadInput, match="'north' is enrolled with this key already, as client 0"):
        members.admit(folder, again)
    commented = replace(again, key=f"{again.key} a comment")
    with pytest.raises(BadInput, match="enrolled with this key already"):
        members.admit(folder, commented)
    with pytest.raises(BadInput, match="client 0 is 'north' already; the site needs another --client"):
        admit(folder, enrolled(folder, tmp_path / "b", 0, "south"))
    assert [member.name for member in members.members(folder)] == ["north"]


def test_a_key_in_another_spelling_is_refused(folder, tmp_path):
    """It would pass for a second key, though its base64 stands for the same."""
    path = enrolled(folder, tmp_path / "a")
    wish, private = members.read_enrolment(path), keys.load_key(tmp_path / "a" / "key")
    changed = replace(wish, key=f"{wish.key[:40]}!{wish.key[40:]}", client=5, nonce="1" * 32)
    signature = private.sign(changed.signed_part(), ec.ECDSA(hashes.SHA384()))
    path.write_text(json.dumps(asdict(replace(changed, signature=base64.b64encode(signature).decode()))))
    with pytest.raises(BadInput, match="is not what its key has signed"):
        members.read_enrolment(path)


def test_an_enrolment_for_another_federation_is_refused_even_of_the_same_name(folder, tmp_path):
    (tmp_path / "x").mkdir()
    with pytest.raises(BadInput, match="for 'brains', and this federation is 'lungs'"):
        admit(folder, enrolled(made(tmp_path, "brains"), tmp_path / "a"))
    with pytest.raises(BadInput, match="for another one of the same name"):
        admit(folder, enrolled(made(tmp_path / "x", "lungs"), tmp_path / "b"))
    assert members.members(folder) == ()


def test_an_old_enrolment_is_refused(folder, tmp_path, monkeypatch):
    path, now = enrolled(folder, tmp_path / "a"), keys.now()
    monkeypatch.setattr(keys, "now", lambda: now + timedelta(days=31))
    with pytest.raises(BadInput, match="must not be older than 30 days"):
        admit(folder, path)
    monkeypatch.setattr(keys, "now", lambda: now - timedelta(days=2))
    with pytest.raises(BadInput, match="must not be older than 30 days"):
        admit(folder, path)
    assert members.members(folder) == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", "{", '{"client": -1}', "[" * 70_000, '"' + "x" * 70_000 + '"'])
def test_what_is_no_enrolment_is_refused_by_its_name(text, tmp_path):
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(BadInput, match=r"odd\.json"):
        members.read_enrolment(tmp_path / "odd.json")


@pytest.mark.parametrize("name", ["", " north", "north\n", "\x1b[31mred", "a" * 64, "x/y", "‮north"])
def test_a_name_that_could_mislead_people_is_refused(name):
    with pytest.raises(BadInput, match="a name has up to 63 letters"):
        members.check_name(name)


@pytest.mark.parametrize("name", ["north", "St. Mary (Ward 3)", "Charité", "a" * 63])
def test_names_of_hospitals_are_names(name):
    assert members.check_name(name) == name


# A node may be the client that its key is, and no other


def test_a_node_is_admitted_as_the_client_of_its_key_alone(folder, tmp_path):
    for client in (0, 1):
        admit(folder, enrolled(folder, tmp_path / str(client), client))
    nodes = (13296509793928455766, None)
    members.write_members(
        folder, tuple(replace(m, node=n) for m, n in zip(members.members(folder), nodes, strict=True))
    )
    assert members.clients_by_node(folder) == {13296509793928455766: 0}
    members.check_client(folder, 13296509793928455766, 0)
    with pytest.raises(BadInput, match="claims to be client 1, and its key is that of 'north'"):
        members.check_client(folder, 13296509793928455766, 1)
    with pytest.raises(BadInput, match="claims to be client 1, and its key is not enrolled"):
        members.check_client(folder, 7, 1)
