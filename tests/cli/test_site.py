"""A site's commands: what it sets up, what it checks, and what it lets leave."""

import io
import json
import socket
import stat
import sys
import threading
import tomllib
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.deploy import join, members, processes, site_folder
from tests.cli.test_federation import FLAGS
from tests.conftest import Command
from tests.deploy.federated import grey

INIT = ["site", "init", "--trust", "lungs/trust", "--name", "north", "--client", "2", "--data", "images"]


@pytest.fixture
def images(fewlabel: Command, tmp_path: Path) -> Path:
    """A federation of cats and dogs that nobody serves, and a site's images."""
    found = fewlabel("federation", "init", "lungs", "--address", "127.0.0.1:9", *FLAGS, "--methods", "labels-only")
    assert found.code == 0
    for value, name in enumerate(("dog/1.png", "dog/2.png", "unlabeled/3.png")):
        grey(tmp_path / "images" / name, value)
    return tmp_path / "images"


def test_a_site_is_set_up_with_a_key_that_stays_and_an_enrolment_that_is_admitted(
    images: Path, fewlabel: Command, tmp_path: Path
) -> None:
    assert fewlabel(*INIT).code == 0
    site = tmp_path / "site"
    table = tomllib.loads((site / "site.toml").read_text())
    assert table.pop("place") == {
        "client": 2,
        "data": str(images),
        "state": str(site / "state"),
        "methods": "labels-only",
        "terms": str(site / "trust"),
    }
    assert table == {"name": "north", "trust": str(site / "trust"), "key": str(site / "key")}
    assert stat.S_IMODE((site / "key").stat().st_mode) == 0o600
    assert stat.S_IMODE((site / "state").stat().st_mode) == 0o700
    assert fewlabel("federation", "enrol", "lungs", site / "enrolment.json").code == 0
    assert members.members(tmp_path / "lungs")[0].client == 2
    again = fewlabel(*INIT)
    assert (again.code, again.err) == (2, "fewlabel: site is there already and not empty; choose another directory\n")


def test_what_is_not_given_is_asked_for(
    images: Path, fewlabel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", answers := io.StringIO("lungs/trust\nsouth\n1\nimages\n"))
    answers.isatty = lambda: True  # type: ignore[method-assign]
    found = fewlabel("site", "init")
    assert (found.code, found.err.count(":")) == (0, 5)
    assert found.out.startswith("'south' is set up as client 1 of 'lungs', with the key SHA256:")


@pytest.mark.parametrize("missing", ["--trust", "--name", "--client", "--data"])
def test_where_nobody_can_be_asked_the_missing_option_is_named(missing: str, images: Path, fewlabel: Command) -> None:
    at = INIT.index(missing)
    found = fewlabel(*INIT[:at], *INIT[at + 2 :])
    assert (found.code, found.err) == (2, f"fewlabel: site init needs {missing}\n")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([*INIT, "--data", "nowhere"], "there is no nowhere; --data is where this site's images are"),
        ([*INIT, "--trust", "images"], "there is no file images/federation.json"),
        ([*INIT, "--name", "a/b"], "a name has up to 63 letters"),
        ([*INIT[:2], "x" * 100, *INIT[2:]], "is too long a path for a socket"),
        (["site", "check"], "holds no site; `fewlabel site init` sets one up"),
        (["site", "join"], "holds no site; `fewlabel site init` sets one up"),
        (["site", "leave"], "holds no site; `fewlabel site init` sets one up"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], sentence: str, images: Path, fewlabel: Command, tmp_path: Path
) -> None:
    found = fewlabel(*words)
    assert (found.code, found.out) == (2, "")
    assert sentence in found.err
    assert found.err.count("\n") == 1
    assert not (tmp_path / "site" / "key").exists()


def checked(fewlabel: Command) -> dict[str, str]:
    """What is said of each thing that is wrong."""
    found = fewlabel("site", "check")
    wrong = dict(
        line.removeprefix("failed").strip().split(": ", 1)
        for line in found.out.splitlines()
        if line.startswith("failed")
    )
    assert found.code == (2 if wrong else 0)
    assert found.out.count("\n") == 8
    return wrong


def test_everything_that_is_wrong_has_a_line_of_its_own(images: Path, fewlabel: Command, tmp_path: Path) -> None:
    assert fewlabel(*INIT).code == 0
    assert "ok      data: 2 images with a label and 1 without, of 1 of 2 classes, read at 16x16" in (
        fewlabel("site", "check").out
    )
    away = "127.0.0.1:9 does not answer: Connection refused"
    assert checked(fewlabel) == {"connection": away, "clock": away}
    site = tmp_path / "site"
    grey(images / "horse" / "4.png", 4)
    (site / "state").chmod(0o755)
    (site / "key").chmod(0o644)
    (site / "trust" / "ca.pem").write_text("none")
    about = json.loads((site / "trust" / "federation.json").read_text())
    (site / "trust" / "federation.json").write_text(json.dumps(about | {"version": "9.9"}))
    wrong = checked(fewlabel)
    assert list(wrong) == ["data", "disk", "key", "certificate", "connection", "clock", "versions"]
    assert "has images of 'horse', which is no class of this federation; it has cat, dog" in wrong["data"]
    assert wrong["disk"].endswith(f"forbid it by: chmod 700 {site}/state")
    assert wrong["key"].endswith(f"forbid it by: chmod 600 {site}/key")
    assert wrong["certificate"].endswith("ca.pem is no certificate")
    assert (
        wrong["versions"]
        == f"FewLabel is {version('fewlabel')} here and 9.9 at the coordinator; both must have the same"
    )


def test_commands_are_shown_with_tls_and_a_key_unless_told_otherwise(
    images: Path, fewlabel: Command, tmp_path: Path
) -> None:
    assert fewlabel(*INIT).code == 0
    site = tmp_path / "site"
    process, node = fewlabel("site", "join", "--print-command").out.splitlines()
    assert process.endswith(f"-m fewlabel site answer {site}")
    assert f"--root-certificates {site}/trust/ca.pem --auth-supernode-private-key {site}/key" in node
    assert f"""--node-config 'socket="{site}/socket"'""" in node
    assert "--insecure" not in node
    _, node = fewlabel("site", "join", "--insecure", "--print-command").out.splitlines()
    assert " --insecure " in node
    assert "--auth-supernode-private-key" not in node


def test_a_site_tries_again_at_who_is_not_the_federations_server_and_says_why(
    images: Path,
    fewlabel: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Something between may stand in the server's place for a while. Here it is a server without TLS."""
    assert fewlabel(*INIT).code == 0
    monkeypatch.setattr(join, "PAUSE", 0.1)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        path = tmp_path / "site" / "trust" / "federation.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"address": f"127.0.0.1:{port}"}))

        def answer() -> None:
            with suppress(OSError):
                while True:
                    with other.accept()[0] as caller:
                        caller.recv(1 << 16)
                        caller.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        programs = processes.Programs(tmp_path / "site", {})
        reachable = partial(join.check_server, tmp_path / "site" / "trust")
        monkeypatch.setattr(join.time, "sleep", sleep)
        with pytest.raises(KeyboardInterrupt):
            join.start_node(programs, [sys.executable, "-c", "raise SystemExit(9)"], reachable)
        monkeypatch.undo()
    assert waits == [0.1, 0.2, 0.4]
    why = "is not the server of this federation: it does not speak TLS, as if served with --insecure"
    assert capsys.readouterr().err.count(f"fewlabel: 127.0.0.1:{port} {why}; the next attempt is in ") == 3


def test_a_site_does_not_join_where_a_check_fails(images: Path, fewlabel: Command, tmp_path: Path) -> None:
    assert fewlabel(*INIT).code == 0
    (tmp_path / "site" / "state").chmod(0o755)
    found = fewlabel("site", "join", "--yes")
    assert found.code == 2
    assert found.err.startswith(f"fewlabel: disk: others may look into {tmp_path}/site/state; forbid it by: chmod 700")
    (tmp_path / "site" / "state").chmod(0o700)
    about = tmp_path / "site" / "trust" / "federation.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"version": "9.9"}))
    assert "fewlabel: versions: FewLabel is" in fewlabel("site", "join", "--yes").err
    (tmp_path / "site" / "trust" / "ca.pem").write_text("none")
    assert "ca.pem is no certificate" in fewlabel("site", "join", "--yes").err


def test_images_that_cannot_be_read_are_refused_or_left_out(images: Path, fewlabel: Command, tmp_path: Path) -> None:
    assert fewlabel(*INIT).code == 0
    (images / "dog" / "4.png").write_bytes(b"no image")
    wrong = checked(fewlabel)["data"]
    assert "at least 1 of 4 images cannot be read, such as dog/4.png" in wrong
    assert "leave them out by data.unreadable = 'skip'" in wrong
    answer = fewlabel("site", "answer")  # which `site join` starts
    assert (answer.code, "cannot be read" in answer.err) == (2, True)
    file = tmp_path / "site" / "site.toml"
    with file.open("a") as more:
        more.write('\n[data]\nunreadable = "skip"\n')
    assert set(checked(fewlabel)) == {"connection", "clock"}
    assert "2 images with a label and 1 without (1 of 4 images cannot be read and are left out)" in (
        fewlabel("site", "check").out
    )
    read = site_folder.read(tmp_path / "site")
    site_folder.write(tmp_path / "site", read)
    assert tomllib.loads(file.read_text())["data"] == {"unreadable": "skip"}
    assert site_folder.read(tmp_path / "site") == read
    file.write_text(file.read_text().replace("skip", "hide"))
    assert "place.unreadable" in fewlabel("site", "check").err


def test_nobody_joins_without_consent_to_what_leaves(images: Path, fewlabel: Command, tmp_path: Path) -> None:
    assert fewlabel(*INIT).code == 0
    found = fewlabel("site", "join")
    assert found.code == 2
    assert "If you take part in 'labels-only', this leaves your site." in found.err
    assert found.err.endswith("there is nobody to ask for consent; if you have read this and agree, add --yes\n")
    assert not list((tmp_path / "site").glob("*.log"))
