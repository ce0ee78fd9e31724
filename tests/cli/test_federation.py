"""The coordinator's commands: what they create, whom they admit, what they start and that nothing of it is left."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys, members, processes, submit, superlink, wishes
from fewlabel.deploy.run_plan import prepare
from fewlabel.deploy.site import load_terms
from fewlabel.experiment import load
from tests.cli.test_main import ROOT
from tests.conftest import Command
from tests.deploy.federated import experiment, lines, simulated, weights
from tests.deploy.test_gateway import signed
from tests.deploy.test_members import admit, enrolled
from tests.deploy.test_submit import stand_in
from tests.flower_processes import free_ports, until
from tests.hosts import Host, hosts, permitted

COMMANDS = [
    f"federation {name}"
    for name in ("init", "enrol", "remove", "ask", "serve", "run", "attach", "cancel", "status", "stop")
]
COMMANDS += [f"site {name}" for name in ("init", "check", "join", "leave")]
TERMS = {"classes": ["cat", "dog"], "channels": 1, "image_size": 16, "mean": [0.5], "std": [0.25]}
FLAGS = ["--classes", "cat,dog", "--image-size", "16", "--mean", "0.5", "--std", "0.25"]
INIT = ["federation", "init", "lungs", "--address", "10.0.0.5:9443"]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_has_examples_and_fits_the_screen(name: str, fewlabel: Command) -> None:
    found = fewlabel(*name.split(), "--help")
    assert found.code == 0
    assert f"  fewlabel {name}" in found.out
    assert max(map(len, found.out.splitlines())) <= 80


@pytest.mark.parametrize("group", ["federation", "site"])
def test_help_loads_nothing_that_is_slow(group: str) -> None:
    code = (
        f"import sys\nfrom fewlabel.cli.main import main\nmain(['{group}', 'init', '--help'])\n"
        "print(*{'torch', 'numpy', 'flwr', 'cryptography'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"


def test_a_federation_has_terms_from_a_file_or_from_flags(fewlabel: Command, tmp_path: Path) -> None:
    (tmp_path / "terms.json").write_text(json.dumps(TERMS))
    assert fewlabel(*INIT, "--terms", "terms.json", "--methods", "labels-only").code == 0
    assert fewlabel("federation", "init", "other", "--address", "h:1", *FLAGS, "--name", "Lungs (test)").code == 0
    assert members.read_trust(tmp_path / "lungs" / "trust") == members.Federation(
        "lungs", "10.0.0.5:9443", version("fewlabel"), ("labels-only",)
    )
    assert members.read_trust(tmp_path / "other" / "trust") == members.Federation(
        "Lungs (test)", "h:1", version("fewlabel")
    )
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
        ([*INIT, "--terms", "none.json", "--classes", "a"], "--terms sets all of them, so leave out --classes"),
        ([*INIT, "--classes", "cat,cat", "--image-size", "8"], "a federation has two classes or more, each once"),
        ([*INIT, *FLAGS, "--mean", "0.5,0.5"], "mean and std are 1 numbers each"),
        ([*INIT, *FLAGS, "--mean", "much"], "--mean takes numbers such as 0.5"),
        ([*INIT, *FLAGS, "--methods", "fedavgg"], "there is no method 'fedavgg'; did you mean 'fedavg'?"),
        ([*INIT, *FLAGS, "--name", "\x1b[0m"], "a name has up to 63 letters"),
        (["federation", "serve", "x"], "x holds no federation; `fewlabel federation init` creates one"),
        (["federation", "status", "x"], "x holds no federation"),
        (["federation", "enrol", "x", "y"], "x holds no federation"),
        (["federation", "remove", "x", "y"], "x holds no federation"),
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
    key = keys.fingerprint(json.loads(file.read_text())["key"])
    assert (found.code, found.out) == (0, f"client 2 is 'north', with the key {key}\n")
    again = fewlabel("federation", "enrol", "lungs", file)
    assert (again.code, again.err) == (2, "fewlabel: 'north' is enrolled with this key already, as client 2\n")
    told = fewlabel("federation", "status", "lungs")
    assert told.out == "'lungs' at 10.0.0.5:9443: not served\nclient 2 'north': enrolled\n"
    whole = json.loads(fewlabel("federation", "status", "lungs", "--format", "json").out)
    assert [(site["client"], site["key"]) for site in whole["sites"]] == [(2, key)]
    wishes.change(lungs, reported={2: 1200})
    asked = fewlabel("federation", "ask", "lungs", "north", "--labels", "40")
    assert (asked.code, asked.out) == (0, "'north' is asked for 40 more labels, from its next run on\n")
    told = fewlabel("federation", "status", "lungs").out
    assert "client 2 'north': enrolled; 1,200 labels in its last run, asked for 40 more\n" in told
    assert fewlabel("federation", "ask", "lungs", "2", "--labels", "0").out.startswith("'north' is no longer asked")
    assert "asked for" not in fewlabel("federation", "status", "lungs").out
    assert "'south' is no member: there is 2 'north'" in fewlabel("federation", "ask", "lungs", "south").err


def test_a_removed_site_is_no_member_and_its_key_never_again_one(
    lungs: Path, fewlabel: Command, tmp_path: Path
) -> None:
    first, second = enrolled(lungs, tmp_path / "a", 2, "north"), enrolled(lungs, tmp_path / "b", 2, "north")
    assert fewlabel("federation", "enrol", "lungs", first).code == 0
    head = [value.encode() for value in signed(keys.load_key(tmp_path / "a" / "key")).values()]
    roll = members.Roll(lungs)
    assert roll.signer(*head).name == "north"
    wrong = fewlabel("federation", "remove", "lungs", "south")
    assert (wrong.code, wrong.err) == (2, "fewlabel: 'south' is no member: there is 2 'north'\n")
    gone = fewlabel("federation", "remove", "lungs", "north")
    key = keys.fingerprint(json.loads(first.read_text())["key"])
    assert (gone.code, gone.out) == (0, f"client 2 is no longer 'north', with the key {key}\n")
    assert members.members(lungs) == ()
    with pytest.raises(BadInput, match="it was removed from the federation"):
        roll.signer(*head)
    again = fewlabel("federation", "enrol", "lungs", first)
    assert again.code == 2
    assert "'north' was removed with this key; a new `fewlabel site init` makes another one" in again.err
    assert fewlabel("federation", "enrol", "lungs", second).code == 0  # its place is free, for another key
    assert fewlabel("federation", "remove", "lungs", "2").code == 0
    assert [member.nonce for member in members.removed(lungs)] == [
        json.loads(path.read_text())["nonce"] for path in (first, second)
    ]


def test_a_site_is_removed_by_its_number_though_another_has_that_for_a_name(
    lungs: Path, fewlabel: Command, tmp_path: Path
) -> None:
    for client, name in ((0, "1"), (1, "0"), (2, "both"), (3, "both")):
        admit(lungs, enrolled(lungs, tmp_path / str(client), client, name))
    assert fewlabel("federation", "remove", "lungs", "1").out.startswith("client 1 is no longer '0'")
    assert fewlabel("federation", "remove", "lungs", "1").out.startswith("client 0 is no longer '1'")
    assert fewlabel("federation", "remove", "lungs", "both").err == (
        "fewlabel: 'both' is more than one site: there is 2 'both', 3 'both'\n"
    )


LATE = """\
#!{python} -S
import os, pathlib, signal, sys, time
def leave(*_):
    os.kill(os.getppid(), signal.SIGINT)
    os._exit(0)
if sys.argv[1] == "run":
    print('{{"success": true, "run-id": "7"}}')
else:
    signal.signal(signal.SIGTERM, leave)
    pathlib.Path("run/summary.json").touch()
    time.sleep(99)
"""


def test_a_run_that_is_interrupted_after_its_end_is_completed(
    lungs: Path, fewlabel: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for Flower's command, at whose end Ctrl-C comes in."""
    stand_in(LATE, tmp_path / "bin", monkeypatch)
    (tmp_path / "e.toml").write_text('method = "labels-only"\n')
    superlink.connect(lungs, ("127.0.0.1", 1), insecure=False)
    with processes.in_use(lungs):
        found = fewlabel("federation", "run", "lungs", "e.toml", "--out", "run")
    assert found.code == 0, found.err
    assert found.err.endswith("fewlabel: the run is completed; to see it: fewlabel show run\n")


def test_commands_are_shown_with_tls_and_keys_unless_told_otherwise(lungs: Path, fewlabel: Command) -> None:
    link, gateway = fewlabel("federation", "serve", "lungs", "--print-command").out.splitlines()
    assert "--enable-supernode-auth" in link
    assert f"--ssl-keyfile {lungs}/server.key" in link
    assert "--host 127.0.0.1" in link
    assert "--insecure" not in link
    assert f"--database {lungs}/link.db" in link
    assert "--disable-runtime-dependency-installation" in link
    assert "FLWR_TELEMETRY_ENABLED=0" in link
    assert "-m fewlabel.deploy.gateway --listen 10.0.0.5:9443 --to 127.0.0.1:" in gateway
    (open_link,) = fewlabel("federation", "serve", "lungs", "--insecure", "--print-command").out.splitlines()
    assert "--host 10.0.0.5 --port 9443" in open_link
    assert open_link.endswith("--insecure")
    assert "--enable-supernode-auth" not in open_link
    assert not list(lungs.glob("*.log"))


def test_a_run_needs_a_server_and_a_method_that_sites_have_consented_to(
    lungs: Path, fewlabel: Command, tmp_path: Path
) -> None:
    (tmp_path / "e.toml").write_text('method = "labels-only"\n')
    nowhere = fewlabel("federation", "run", "lungs", "e.toml", "--data", "lost", "--out", "run")
    assert (nowhere.code, nowhere.err) == (
        2, "fewlabel: there is no directory lost; --data is where test, validation and server lie\n",
    )  # fmt: skip
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


@pytest.mark.parametrize("secure", [True, False])
def test_a_run_is_resumed_with_the_keys_that_it_began_with(
    secure: bool, lungs: Path, fewlabel: Command, tmp_path: Path
) -> None:
    given = {"members": str(lungs)} if secure else {}
    prepare(experiment("method=labels-only"), tmp_path / "run", load_terms(lungs / "trust"), **given)
    resume = ["federation", "run", "lungs", "--resume", "run"]
    right, wrong = [resume, [*resume, "--insecure"]][:: 1 if secure else -1]
    assert f"nobody serves {lungs}" in fewlabel(*right).err
    how = f"with the keys of {lungs}" if secure else "with --insecure"
    found = fewlabel(*wrong)
    assert (found.code, found.err) == (2, f"fewlabel: run was begun {how}, and can only be resumed so\n")


# All of it


class Session:
    """Commands as people type them, and their ends; the coordinator's at the first host, a site's at its own."""

    def __init__(self, folder: Path, hosts: Sequence[Host] = ()) -> None:
        self.folder, self.hosts, self.left = folder, hosts, dict[str, subprocess.Popen]()
        paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}

    def set_up(self, sites: int, rounds: int, more: str = "", method: str = "labels-only") -> int:
        """Create a federation, and a site for each client. Return the port at which sites will reach it."""
        (self.folder / "e.toml").write_text(
            f'method = "{method}"\nrounds = {rounds}\nseed = 5\nmodel = "tests.nets:tiny"\n'
            f'[data]\nname = "digits"\nimage_size = 16\n[clients]\ncount = {sites}\nalpha = 2.0\n{more}'
        )
        (port,) = free_ports(1)
        address = f"{self.hosts[0].address if self.hosts else '127.0.0.1'}:{port}"
        self.run("data split e.toml --to sites")
        self.run(f"federation init fed --address {address} --terms sites/terms.json --methods {method}")
        for n in range(sites):
            who = f"--name s{n} --client {n} --data sites/client-{n}"
            self.run(f"site init site-{n} --trust fed/trust {who} --modules tests.nets")
        self.run("federation enrol fed site-0/enrolment.json")  # before it is served, and the others while it is
        return port

    def command(self, words: str) -> list[str]:
        site = re.match(r"site \w+ site-(\d)", words)
        enter = self.hosts[int(site[1]) + 1 if site else 0].enter if self.hosts else []
        return [*enter, sys.executable, "-m", "fewlabel", *words.split()]

    def run(self, words: str, code: int = 0) -> str:
        done = subprocess.run(
            self.command(words), cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == code, f"{words}: {done.stdout}{done.stderr}{self.logs()}"
        return done.stdout + done.stderr

    def begin(self, name: str, words: str, until_said: str) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self.left[name] = subprocess.Popen(
                self.command(words),
                cwd=self.folder,
                env=self.environment,
                stdout=out,
                stderr=out,
                preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # also if the tests ignore it
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


@pytest.fixture
def machines() -> Iterator[list[Host]]:
    """Four with networks of their own, where that is permitted; elsewhere all is on the loopback."""
    if not permitted():
        yield []
        return
    with hosts(4) as found:
        yield found


@pytest.mark.slow
def test_three_sites(tmp_path: Path, machines: list[Host]) -> None:
    """From nothing to a trained model by commands alone: one site with labels, two without, the simulator's bits."""
    session = Session(tmp_path, machines)
    port = session.set_up(sites=3, rounds=2)
    try:
        session.begin("serve", "federation serve fed", "serving at")
        for n in (1, 2):
            session.run(f"federation enrol fed site-{n}/enrolment.json")
        assert session.run("site check site-0").count("ok ") == 8
        for n in range(3):
            session.begin(f"join{n}", f"site join site-{n} --yes", f"joined as client {n} of 'fed'")
        # What others reach: of the coordinator the gateway alone, of a site nothing.
        assert [[port for _, port in machine.listens()] for machine in machines] in ([], [[port], [], [], []])
        (process,) = [
            pid
            for pid in processes.marked(tmp_path / "site-0")
            if b"answer" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]
        os.kill(process, 9)
        session.until_said("join0", "the site-process has died and is started again")
        told = session.run("federation run fed e.toml --data sites --out run --deadline 120 --patience 120")
        assert "round 2/2  accuracy 0." in told
        status = json.loads(session.run("federation status fed --format json"))
        assert [site["state"] for site in status["sites"]] == ["connected"] * 3
        assert [(run["state"], run["round"]) for run in status["runs"]] == [("completed", "2")]
        assert "no longer served" in session.run("federation stop fed")
        assert session.left.pop("serve").wait(60) == 0
    finally:
        session.end()
    assert [processes.marked(tmp_path / name) for name in ("fed", "site-0", "site-1", "site-2")] == [[]] * 4
    assert "lines that the coordinator kept of it" in session.run("audit site-0 --federation fed")
    log = tmp_path / "site-0" / "state" / "audit.jsonl"
    log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:-2]))
    session.run("audit site-0")  # a cut does not show in the log alone
    assert "which the coordinator kept on" in session.run("audit site-0 --federation fed", 4)
    simulated(load(tmp_path / "run" / "experiment.toml"), tmp_path / "simulated")
    assert lines(tmp_path / "run") == lines(tmp_path / "simulated")
    assert weights(tmp_path / "run") == weights(tmp_path / "simulated")


@pytest.mark.slow
def test_a_site_decides_what_runs(tmp_path: Path) -> None:
    """It refuses by its policy, a person approves, and it withdraws; both sides read why, in their terminals."""
    session = Session(tmp_path)
    session.set_up(sites=2, rounds=2)
    run = "federation run fed e.toml --data sites --out {} --patience {}"
    try:
        session.begin("serve", "federation serve fed", "serving at")
        session.run("federation enrol fed site-1/enrolment.json")
        for n in range(2):
            session.begin(f"join{n}", f"site join site-{n} --yes", f"joined as client {n} of 'fed'")
        told = session.run(f"{run.format('fast', 15)} --set method.local.lr=1.0", 3)
        why = "the policy of this site does not allow it: its largest learning rate is 0.1, and method.local.lr = 1"
        assert f"'s0' refuses: {why}" in told
        session.until_said("join0", f"refused info: {why}")

        file = tmp_path / "site-0" / "policy.toml"
        file.write_text(file.read_text().replace('ask = "never"', 'ask = "once"'))
        session.begin("run", run.format("run", 300), "a person at this site approves each experiment")
        assert "method    labels-only, for 2 rounds" in session.run("site approve site-0 --yes")
        session.until_said("run", "round 2/2")
        assert session.left.pop("run").wait(120) == 0

        told = session.run("site leave site-0 --withdraw")
        assert "(labels-only): 2 x local_update in rounds 1 to 2" in told
        assert "does not unlearn" in told
        assert session.left.pop("join0").wait(60) == 0
        assert "has withdrawn; to take part again" in session.run("site join site-0 --yes", 2)
        session.run("federation stop fed")
    finally:
        session.end()
    simulated(load(tmp_path / "run" / "experiment.toml"), tmp_path / "simulated")
    assert weights(tmp_path / "run") == weights(tmp_path / "simulated")


@pytest.mark.slow
def test_sites_come_and_go(tmp_path: Path) -> None:
    """One site with labels, one without: cut off, back, away in mid-run, back, and removed; each of it is told."""
    session, fed = Session(tmp_path), tmp_path / "fed"
    session.set_up(sites=2, rounds=8)
    joined = "joined as client {} of 'fed'"
    try:
        session.begin("serve", "federation serve fed", "serving at")
        session.begin("stranger", "site join site-1 --yes", "its key is not enrolled")
        assert session.left.pop("stranger").wait(60) == 3
        assert "joined" not in session.said("stranger")

        before = members.members(fed)  # as a kill leaves it after the registration of a key
        members.write_members(fed, tuple(replace(member, node=None) for member in before))
        session.run("federation enrol fed site-1/enrolment.json")
        assert members.members(fed)[0] == before[0]

        for n in range(2):
            session.begin(f"join{n}", f"site join site-{n} --yes", joined.format(n))
        for process in (session.left["join0"].pid, *processes.marked(tmp_path / "site-0")):
            os.kill(process, 9)
        session.left.pop("join0").wait(60)
        session.begin("join0", "site join site-0 --yes", "still counts this site as connected")
        assert "joined" not in session.said("join0")
        session.until_said("join0", joined.format(0))

        session.begin("run", "federation run fed e.toml --data sites --out run", "round 2/8")
        assert "has left the federation" in session.run("site leave site-0")
        assert session.left.pop("join0").wait(60) == 0
        assert session.left.pop("run").wait(240) == 3
        assert "2 of 2 sites are there" in session.said("run")
        assert "the last site with labels was lost ('s0': " in session.said("run")
        done = submit.checkpointed(tmp_path / "run")
        status = session.run("federation status fed")
        assert "client 0 's0': not connected for " in status
        assert "client 1 's1': connected, last heard " in status

        session.begin("join0", "site join site-0 --yes", joined.format(0))
        session.begin("resumed", "federation run fed --resume run", "round 8/8")
        session.left["resumed"].send_signal(2)  # when there is nothing left to interrupt
        assert session.left.pop("resumed").wait(60) == 0
        told = session.said("resumed")
        assert f"goes on after round {done} of 8" in told
        assert re.findall(r"^round (\d)/8", session.said("run") + told, re.M) == [str(n) for n in range(1, 9)]
        (run,) = json.loads(session.run("federation status fed --format json"))["runs"]
        assert (run["state"], run["round"]) == ("completed", "8")

        session.run("federation remove fed s0")
        assert session.left.pop("join0").wait(120) == 3
        assert "does not let this site in: it was removed from the federation" in session.said("join0")
        assert "was removed with this key" in session.run("federation enrol fed site-0/enrolment.json", 2)
        assert [node.status for node in superlink.nodes(fed).values()] == ["unregistered", "online"]
        session.run("federation stop fed")
        assert session.left.pop("serve").wait(60) == 0
    finally:
        session.end()
    assert [processes.marked(tmp_path / name) for name in ("fed", "site-0", "site-1")] == [[]] * 3
    assert "Traceback" not in (fed / "gateway.log").read_text()
    assert "images trained on" not in session.run("show run")


@pytest.mark.slow
def test_faults_that_mend_themselves(tmp_path: Path) -> None:
    """A site's process hangs, the coordinator's terminal is lost, its SuperLink is killed: each is told and mended."""
    session = Session(tmp_path)
    session.set_up(sites=2, rounds=60, more='[labels]\nat = "every-client"\nfraction = 0.5\n')
    try:
        session.begin("serve", "federation serve fed", "serving at")
        session.run("federation enrol fed site-1/enrolment.json")
        for n in range(2):
            session.begin(f"join{n}", f"site join site-{n} --yes", f"joined as client {n} of 'fed'")
        session.begin("run", "federation run fed e.toml --data sites --out run", "round 1/60")
        before = {who: len(session.said(who)) for who in ("run", "join1")}
        began, after = time.monotonic(), dict[str, float]()
        os.kill(process_of(tmp_path / "site-1", b"answer"), signal.SIGSTOP)
        for what, who, words in (
            ("named", "run", "fewlabel: waiting for 's1', 1"),
            ("started again", "join1", "the site-process has given no sign of life for 30 s, so it is ended and start"),
            ("passed over", "run", "fewlabel: 's1' gave no reply in round "),
            ("back", "run", "fewlabel: all sites that were asked replied in round "),
        ):
            until(lambda who=who, words=words: words in session.said(who)[before[who] :])
            after[what] = time.monotonic() - began
        print("hung site:", {what: round(seconds, 1) for what, seconds in after.items()}, "s after it was stopped")

        session.left["run"].kill()
        session.left.pop("run").wait(60)
        session.begin("again", "federation run fed --resume run", "Ctrl-C leaves it running")
        session.until_said("again", "\nround ")
        session.left["again"].send_signal(signal.SIGHUP)
        assert session.left.pop("again").wait(60) == 0
        assert "run goes on; to see it again: fewlabel federation attach run" in session.said("again")

        session.begin("attached", "federation attach run", "\nround ")
        os.kill(process_of(tmp_path / "fed", b"--enable-supernode-auth"), 9)
        session.until_said("serve", "the superlink has ended: it was killed by SIGKILL")
        session.until_said("serve", "serving again; a run that was under way has ended, and can be resumed")
        assert session.left.pop("attached").wait(120) == 3
        assert "the run has ended: " in session.said("attached")
        assert "does not go on; to resume it: " in session.run("federation attach run", 2)

        session.begin("resumed", "federation run fed --resume run", "\nround ")
        assert "run has ended; to resume it: " in session.run("federation cancel run")
        assert session.left.pop("resumed").wait(120) == 3
        assert "run does not go on; to resume it: " in session.run("federation cancel run")
    finally:
        session.end()
    assert [processes.marked(tmp_path / name) for name in ("fed", "site-0", "site-1")] == [[]] * 3


def process_of(folder: Path, word: bytes) -> int:
    """The process of a folder that has this word in its command."""
    (found,) = [
        pid for pid in processes.marked(folder) if word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    ]
    return found
