"""The coordinator's commands: what they make, whom they admit, what they start and that nothing of it is left."""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'fewlabel[flower]'")

from fewlabel import programs, trust
from fewlabel.errors import BadInput, RunFailed
from fewlabel.experiment import load
from fewlabel.fleet import serve
from tests import test_cli
from tests.flower_processes import free_ports
from tests.test_cli import ROOT, Command
from tests.test_flower import experiment, federate, lines, room, simulated, split, weights
from tests.test_trust import admit, enrolled

fewlabel, _elsewhere = test_cli.fewlabel, test_cli._elsewhere  # fixtures
COMMANDS = ["init", "enrol", "serve", "run", "status", "stop"]
TERMS = {"classes": ["cat", "dog"], "channels": 1, "image_size": 16, "mean": [0.5], "std": [0.25]}
FLAGS = ["--classes", "cat,dog", "--image-size", "16", "--mean", "0.5", "--std", "0.25"]
INIT = ["federation", "init", "lungs", "--address", "10.0.0.5:9443"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples_and_fits_the_screen(name: str, fewlabel: Command) -> None:
    found = fewlabel("federation", name, "--help")
    assert found.code == 0
    assert f"  fewlabel federation {name} " in found.out
    assert max(map(len, found.out.splitlines())) <= 80


@pytest.mark.parametrize("group", ["federation", "site"])
def test_help_loads_nothing_that_is_slow(group: str) -> None:
    code = (
        f"import sys\nfrom fewlabel.cli import main\nmain(['{group}', 'init', '--help'])\n"
        "print(*{'torch', 'numpy', 'flwr', 'cryptography'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"


def test_a_federation_has_terms_from_a_file_or_from_flags(fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "terms.json").write_text(json.dumps(TERMS))
    assert fewlabel(*INIT, "--terms", "terms.json", "--methods", "labels-only").code == 0
    assert fewlabel("federation", "init", "other", "--address", "h:1", *FLAGS, "--name", "Lungs (test)").code == 0
    assert trust.read_trust(tmp_path / "lungs" / "trust") == trust.Federation(
        "lungs", "10.0.0.5:9443", "0.1.0", ("labels-only",)
    )
    assert trust.read_trust(tmp_path / "other" / "trust") == trust.Federation("Lungs (test)", "h:1", "0.1.0")
    for name in ("lungs", "other"):
        told = json.loads((tmp_path / name / "trust" / "terms.json").read_text())
        assert {key: told[key] for key in TERMS} == TERMS


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["federation", "init", "x"], "federation init needs --address"),
        (["federation", "init", "x", "--address", "nowhere", *FLAGS], "an address is HOST:PORT"),
        (INIT, "federation init needs --terms, or at least --classes and --image-size"),
        ([*INIT, "--terms", "none.json"], "there is no file none.json"),
        ([*INIT, "--terms", "none.json", "--classes", "a"], "--terms says all, so leave out --classes"),
        ([*INIT, "--classes", "cat,cat", "--image-size", "8"], "a federation has two classes or more, each once"),
        ([*INIT, *FLAGS, "--mean", "0.5,0.5"], "mean and std are 1 numbers each"),
        ([*INIT, *FLAGS, "--mean", "much"], "--mean takes numbers such as 0.5"),
        ([*INIT, *FLAGS, "--methods", "fedavgg"], "there is no method 'fedavgg'; did you mean 'fedavg'?"),
        ([*INIT, *FLAGS, "--name", "\x1b[0m"], "a name has up to 63 letters"),
        (["federation", "serve", "x"], "x holds no federation; `fewlabel federation init` makes one"),
        (["federation", "status", "x"], "x holds no federation"),
        (["federation", "enrol", "x", "y"], "x holds no federation"),
    ],
)
def test_mistakes_are_one_sentence(words: list[str], sentence: str, fewlabel: Command, tmp_path: Path) -> None:
    found = fewlabel(*words)
    assert (found.code, found.out) == (2, "")
    assert found.err.startswith(f"fewlabel: {sentence}")
    assert found.err.count("\n") == 1
    assert not (tmp_path / "lungs").exists()


@pytest.fixture
def lungs(fewlabel: Command, tmp_path: Path) -> Path:
    assert fewlabel(*INIT, *FLAGS, "--methods", "labels-only").code == 0
    return tmp_path / "lungs"


def test_a_federation_is_never_overwritten(lungs: Path, fewlabel: Command) -> None:
    before = (lungs / "ca.key").read_bytes()
    assert fewlabel(*INIT, *FLAGS).code == 2
    assert (lungs / "ca.key").read_bytes() == before


def test_a_site_is_enrolled_once_and_shown(lungs: Path, fewlabel: Command, tmp_path: Path) -> None:
    file = enrolled(lungs, tmp_path / "site", 2, "north")
    found = fewlabel("federation", "enrol", "lungs", file)
    key = trust.fingerprint(json.loads(file.read_text())["key"])
    assert (found.code, found.out) == (0, f"client 2 is 'north', by the key {key}\n")
    again = fewlabel("federation", "enrol", "lungs", file)
    assert (again.code, again.err) == (2, "fewlabel: 'north' is enrolled with this key already, as client 2\n")
    told = fewlabel("federation", "status", "lungs")
    assert told.out == "'lungs' at 10.0.0.5:9443: not served\nclient 2 'north': enrolled\n"
    whole = json.loads(fewlabel("federation", "status", "lungs", "--format", "json").out)
    assert [(site["client"], site["key"]) for site in whole["sites"]] == [(2, key)]


def test_commands_are_shown_with_tls_and_keys_unless_told_otherwise(lungs: Path, fewlabel: Command) -> None:
    link, front = fewlabel("federation", "serve", "lungs", "--print-command").out.splitlines()
    assert "--enable-supernode-auth" in link
    assert f"--ssl-keyfile {lungs}/server.key" in link
    assert "--host 127.0.0.1" in link
    assert "--insecure" not in link
    assert f"--database {lungs}/link.db" in link
    assert "--disable-runtime-dependency-installation" in link
    assert "FLWR_TELEMETRY_ENABLED=0" in link
    assert "-m fewlabel.front --listen 10.0.0.5:9443 --to 127.0.0.1:" in front
    (open_link,) = fewlabel("federation", "serve", "lungs", "--insecure", "--print-command").out.splitlines()
    assert "--host 10.0.0.5 --port 9443" in open_link
    assert open_link.endswith("--insecure")
    assert not list(lungs.glob("*.log"))


def test_a_run_needs_a_server_and_a_method_that_sites_have_consented_to(
    lungs: Path, fewlabel: Command, tmp_path: Path
) -> None:
    (tmp_path / "e.toml").write_text('method = "labels-only"\n')
    shown = fewlabel("federation", "run", "lungs", "e.toml", "--out", "run", "--print-command").out
    assert shown.endswith(f"""here --run-config 'directory="{tmp_path}/run"' --format json\n""")
    unserved = fewlabel("federation", "run", "lungs", "e.toml", "--out", "run")
    assert unserved.code == 2
    assert f"nobody serves {lungs}; start it in another terminal: fewlabel federation serve {lungs}" in unserved.err
    other = fewlabel("federation", "run", "lungs", "e.toml", "--set", "method=fedirm", "--out", "run")
    assert (other.code, other.err) == (
        2, "fewlabel: sites have consented to labels-only, and fedirm sends something else\n",
    )  # fmt: skip
    assert fewlabel("federation", "run", "lungs").err == (
        "fewlabel: federation run needs an experiment (TOML), or --resume with the directory of a run\n"
    )
    assert not (tmp_path / "run").exists()


def test_a_node_with_another_clients_key_takes_no_part(tmp_path: Path, lungs: Path) -> None:
    whole = experiment("method=labels-only", "labels.clients=4", "rounds=1")
    data = split(whole, tmp_path / "sites")
    for client in range(4):
        admit(lungs, enrolled(lungs, tmp_path / f"site-{client}", client))
    nodes = [7000, 7001, 7003, 7002]
    trust.write_members(lungs, tuple(replace(m, node=n) for m, n in zip(trust.members(lungs), nodes, strict=True)))
    run = federate(whole, data, tmp_path / "run", members=str(lungs), patience=3.0)
    with pytest.raises(RunFailed) as failure:
        serve(room(data, tmp_path / "state"), run)
    assert "2 of 4 sites were there" in str(failure.value)
    assert "node 7002 is refused: it claims to be client 2, and its key is that of client 3" in str(failure.value)


# Programs


DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(99)"
NEST = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {DEAF!r}], start_new_session=True)
time.sleep(99)
"""


def test_whatever_a_program_starts_ends_with_it_and_nothing_else_does(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(99)"])
    try:
        ours = programs.Programs(tmp_path, {})
        with ours.all_ended():
            ours.start("nest", [sys.executable, "-c", NEST])
            until(lambda: "up" in ours.log("nest").read_text())
            assert len(programs.marked(tmp_path)) == 2
            assert programs.holder(tmp_path) == os.getpid()
            with pytest.raises(BadInput, match=f"in use already, by process {os.getpid()}"), programs.held(tmp_path):
                pass
            programs.end(tmp_path, ours.started.values(), patience=1)  # the inner one does not listen, and is killed
            assert programs.marked(tmp_path) == []
        assert programs.holder(tmp_path) is None
        (tmp_path / ".running").write_text(str(other.pid))  # as somebody who was killed may leave it
        assert not programs.stop(tmp_path)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def until(true, seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


# All of it


class Session:
    """Commands as people type them, and their ends."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.left = folder, dict[str, subprocess.Popen]()
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def command(self, words: str) -> list[str]:
        return [sys.executable, "-m", "fewlabel", *words.split()]

    def run(self, words: str, code: int = 0) -> str:
        done = subprocess.run(
            self.command(words), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout + done.stderr

    def begin(self, name: str, words: str, until_said: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self.left[name] = subprocess.Popen(
                self.command(words), cwd=self.folder, env=self.environment, stdout=out, stderr=out
            )
        self.until_said(name, until_said)

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def until_said(self, name: str, words: str) -> None:
        until(lambda: words in self.said(name) or self.left[name].poll() is not None)
        assert words in self.said(name), self.said(name) + self.logs()

    def logs(self) -> str:
        return "".join(f"\n== {path}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*/*.log"))

    def end(self) -> None:
        for process in self.left.values():
            with suppress(ProcessLookupError):
                process.terminate()
        for process in self.left.values():
            process.wait(60)


@pytest.mark.slow
def test_three_sites(tmp_path: Path) -> None:
    """From nothing to a trained model by commands alone: one site with labels, two without, the simulator's bits."""
    (tmp_path / "e.toml").write_text(
        'method = "labels-only"\nrounds = 2\nseed = 5\nmodel = "tests.nets:tiny"\n'
        '[data]\nname = "digits"\nimage_size = 16\n[clients]\ncount = 3\nalpha = 2.0\n'
    )
    session = Session(tmp_path)
    (port,) = free_ports(1)
    session.run("data split e.toml --to sites")
    session.run(f"federation init fed --address 127.0.0.1:{port} --terms sites/terms.json --methods labels-only")
    for n in range(3):
        who = f"--name s{n} --client {n} --data sites/client-{n}"
        session.run(f"site init site-{n} --trust fed/trust {who} --modules tests.nets")
    session.run("federation enrol fed site-0/enrolment.json")  # before it is served, and the others while it is
    try:
        session.begin("serve", "federation serve fed", "serving at")
        for n in (1, 2):
            session.run(f"federation enrol fed site-{n}/enrolment.json")
        assert session.run("site check site-0").count("ok ") == 6
        for n in range(3):
            session.begin(f"join{n}", f"site join site-{n} --yes", f"joined as client {n} of 'fed'")
        (resident,) = [
            pid
            for pid in programs.marked(tmp_path / "site-0")
            if b"reside" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
        os.kill(resident, 9)
        session.until_said("join0", "the resident has died and is started again")
        told = session.run("federation run fed e.toml --data sites --out run --deadline 120 --patience 120")
        assert "round 2/2  accuracy 0." in told
        status = json.loads(session.run("federation status fed --format json"))
        assert [site["state"] for site in status["sites"]] == ["connected"] * 3
        assert [(run["state"], run["round"]) for run in status["runs"]] == [("completed", "2")]
        assert "no longer served" in session.run("federation stop fed")
        assert session.left.pop("serve").wait(60) == 0
    finally:
        session.end()
    assert [programs.marked(tmp_path / name) for name in ("fed", "site-0", "site-1", "site-2")] == [[]] * 4
    simulated(load(tmp_path / "run" / "experiment.toml"), tmp_path / "simulated")
    assert lines(tmp_path / "run") == lines(tmp_path / "simulated")
    assert weights(tmp_path / "run") == weights(tmp_path / "simulated")
