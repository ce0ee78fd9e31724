"""Sites read each other's keys from a file that the coordinator makes, once a person has compared them."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.cli.main import main
from fewlabel.deploy import peers
from tests.deploy.federated import grey


def test_a_site_takes_the_keys_of_its_own_federation_after_they_were_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    grey(Path("images") / "a" / "1.png", 7)
    for name in ("demo", "other"):
        asked = ["--address", "127.0.0.1:9443", "--classes", "a,b", "--image-size", "16"]
        assert main(["federation", "init", name, *asked]) == 0
    for client, name in enumerate(("north", "south")):
        asked = ["--trust", "demo/trust", "--name", name, "--client", str(client), "--data", "images"]
        assert main(["site", "init", name, *asked]) == 0
        assert main(["federation", "enrol", "demo", f"{name}/enrolment.json"]) == 0
    assert main(["federation", "peers", "demo"]) == 0
    capsys.readouterr()
    assert main(["site", "peers", "peers.json", "north"]) == 2
    told = capsys.readouterr()
    assert "there is nobody to ask; if you have compared the fingerprints, add --yes" in told.err
    assert "client 0 is 'north', with the key SHA256:" in told.out
    assert not Path("north", peers.FILE).exists()
    assert main(["site", "peers", "peers.json", "north", "--yes"]) == 0
    assert peers.read(Path("north", peers.FILE)) == peers.of(Path("demo"))
    assert main(["federation", "peers", "other", "--out", "others.json"]) == 0
    assert main(["site", "peers", "others.json", "north", "--yes"]) == 2
    assert "the list is of 'other', which is not this site's federation" in capsys.readouterr().err
