"""Whoever sends something odd is named where a person looks: at the terminal, below tables, in the notes."""

from pathlib import Path

from fewlabel.engine.record import read_notes
from fewlabel.experiment import Experiment
from fewlabel.report.findings import in_last_round, odd_updates


def line(round: int, *suspects: tuple[int, str]) -> dict:
    return {"round": round, "suspects": [{"client": c, "task": "t", "why": "odd", "did": did} for c, did in suspects]}


def test_a_note_counts_the_rounds_of_each_client():
    lines = [line(1, (3, "clipped"), (5, "left out")), line(2, (3, "clipped"), (3, "named")), line(3, (5, "excluded"))]
    assert odd_updates(lines) == (
        "client 3 clipped in 2 rounds, named in 1 round; client 5 left out in 1 round, excluded after round 3"
    )
    assert odd_updates([{"round": 1}]) == ""
    many = [line(1, *((client, "clipped") for client in range(6)))]
    assert odd_updates(many).endswith("client 3 clipped in 1 round; 2 more")


def test_a_finding_has_the_members_name_and_what_to_set():
    suspect = {"client": 2, "name": "Klinik B", "task": "t", "why": "its update has norm 9", "did": "named"}
    (found,) = in_last_round(Experiment(), [{"round": 4, "suspects": [suspect]}])
    assert str(found).startswith(
        "Client 2 'Klinik B' sent something odd, which counted nevertheless. Its update has norm 9. To bound what"
    )
    (found,) = in_last_round(Experiment(), [{"round": 4, "suspects": [suspect | {"did": "left out"}]}])
    assert str(found) == "Client 2 'Klinik B' was left out of the round. Its update has norm 9."


SMALL = ("data.image_size=8", "model=tests.nets:linear", "clients.count=5", "labels.clients=4", "rounds=3")


def test_a_run_names_its_attacker_at_the_terminal_below_its_table_and_in_its_notes(fewlabel, tmp_path: Path):
    settings = [*SMALL, "clients.attack.kind=huge", "clients.attack.ids=[1]", "clients.exclude_after=2"]
    changes = [word for setting in settings for word in ("--set", setting)]
    found = fewlabel("run", "--method", "labels-only", *changes, "--out", tmp_path / "run")
    assert found.code == 0
    assert found.err.count("Client 1 was left out of the round. Its upload is refused: it holds 3e+38") == 1
    assert found.err.count("round 2: Client 1 is not asked again.") == 1
    assert "Attack by client 1: huge (clients.attack). Protection: clients.exclude_after = 2" in found.err
    table = " ".join(found.out.split())
    assert "Odd updates: client 1 left out in 2 rounds, excluded after round 2." in table
    assert any("Attack by client 1" in sentence for sentence in read_notes(tmp_path / "run")["sentences"])
    shown = " ".join(fewlabel("show", tmp_path / "run", "--format", "markdown").out.split())
    assert "excluded after round 2" in shown
