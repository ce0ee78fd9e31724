"""Attacks on a real federation on this machine: nobody gets code to a site, nor past the gateway, and a run goes on."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.cli.build import build_fab_from_disk

import fewlabel
from fewlabel.core import storage
from fewlabel.deploy import flower, keys, members
from tests.deploy.federated import experiment, federate, local_grid, split
from tests.deploy.test_gateway import ATTACKS, BIG, Guarded, member, rest, signed
from tests.flower_processes import Processes, free_ports

pytestmark = pytest.mark.slow

EVIL = {
    "pyproject.toml": flower.APP.format(version="6.6.6").replace("fewlabel.deploy.flower:", "evil.app:"),
    "evil/__init__.py": "",
    "evil/app.py": """\
import pathlib, time
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

pathlib.Path({marker!r}).touch()  # at whoever imports it: the coordinator does
server_app = ServerApp()
client_app = ClientApp()

@server_app.main()
def main(grid, context):
    pathlib.Path({marker!r}).unlink()
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.5)
    content = RecordDict({{"fewlabel": ConfigRecord({{"a": 1}})}})
    replies = list(grid.send_and_receive([Message(content, node, "query") for node in nodes], timeout=60))
    print("replies:", len(replies), *(reply.error.reason for reply in replies if reply.has_error()), flush=True)

@client_app.query()
def query(message, context):
    return Message(RecordDict(), reply_to=message)
""",
}

# Added to the coordinator's `deploy.server`: in a run of this name it asks client 0 for what is none of its tasks.
ALTERED = """

honest = serve


def serve(grid, directory, **more):
    if directory.name != "altered":
        return honest(grid, directory, **more)
    import time
    from fewlabel.deploy.messages import Order
    from fewlabel.engine import flower_messages
    plan, text = load_plan(directory), (directory / "experiment.toml").read_text()
    job = Job(plan.run, "client", "local_update", client=0, round=1)
    order = Order(text, plan.terms, job)
    asked = {
        "function": replace(order, job=replace(job, task="round")),
        "private": replace(order, job=replace(job, task="__init__")),
        "module": replace(order, experiment=text.replace('"fedavg"', '"os:system"')),
        "kind": replace(order, job=replace(job, kind="server")),
        "path": replace(order, job=replace(job, run="../../../tmp/x")),
    }
    while len(nodes := list(grid.get_node_ids())) < 2:
        time.sleep(0.5)
    sent, heard = {}, {}
    for name, wanted in asked.items():
        for node in nodes:
            sent[flower_messages.send(grid, node, 300.0, "query", name, order=wire.pack(wanted), message=b"")] = name
    while sent:
        for number, reply in flower_messages.receive(grid, sent):
            said, name = str(reply.content[flower_messages.RECORD].get("refused")), sent.pop(number)
            if said != "this is client 1, not client 0":
                heard[name] = said
    (directory / "heard.json").write_text(json.dumps(heard))
"""


class Fenced(Processes):
    """Sites come through the gateway, and each has a Flower home of its own."""

    outside: int

    def link(self) -> None:
        shutil.copytree(Path(fewlabel.__file__).parent, self.folder / "altered" / "fewlabel")
        with (self.folder / "altered" / "fewlabel" / "deploy" / "server.py").open("a") as file:
            file.write(ALTERED)
        before, path = self.environment, f"{self.folder / 'altered'}{os.pathsep}{self.environment['PYTHONPATH']}"
        self.environment = {**before, "PYTHONPATH": path}
        super().link()
        self.environment = before
        (self.outside,) = free_ports(1)
        files = ["--certificate", "server.pem", "--key", "server.key", "--ca", "ca.pem", "--members", "."]
        address, to = f"127.0.0.1:{self.outside}", f"127.0.0.1:{self.port}"
        self.start(
            "gateway", [sys.executable, "-m", "fewlabel.deploy.gateway", "--listen", address, "--to", to, *files]
        )
        self.wait_for("gateway", "127.0.0.1", self.outside)
        with (self.folder / "home" / "config.toml").open("a") as file:
            file.write(f'[superlink.outside]\naddress = "{address}"\nroot-certificates = "{self.folder / "ca.pem"}"\n')

    def enrol(self, number: int) -> None:
        super().enrol(number)
        with storage.locked(self.folder / members.LOCK):
            member(self.folder, number, keys.load_key(self.folder / f"key{number}"))

    def node(self, number: int) -> None:
        socket = f'socket="{self.folder / f"site{number}.socket"}"'
        self.supernode(f"node{number}", "--root-certificates", "ca.pem", "--auth-supernode-private-key", f"key{number}",
                       "--node-config", socket, "--port", str(self.ports[number]))  # fmt: skip

    def supernode(self, name: str, *arguments: str) -> "subprocess.Popen[bytes]":
        home = f"FLWR_HOME={self.folder / f'home-{name}'}"
        command = ["env", home, sys.executable, "-m", "fewlabel.deploy.flower", "supernode"]
        return self.start(name, [*command, "--superlink", f"127.0.0.1:{self.outside}", *arguments])

    def said(self, name: str) -> str:
        return self.log(name).read_text()

    def controlled(self) -> list[str]:
        """The requests to other interfaces than the nodes' of which the SuperLink has taken note."""
        calls = [line for line in self.said("link").splitlines() if "HTTP/1.1" in line]
        return [line for line in calls if "/v1/fleet/" not in line and "/v1/runtime/" not in line]


@pytest.fixture(scope="module")
def fenced(tmp_path_factory) -> Iterator[tuple[Fenced, Path]]:
    """A federation of two sites, and the data that its server has."""
    folder = tmp_path_factory.mktemp("attacks")
    data = split(experiment("method=fedavg", "clients.count=2", "labels.at=every-client"), folder / "sites")
    sites = list(local_grid(data, folder / "state").configs.values())
    with Fenced(folder / "processes", sites) as processes:
        yield processes, data


def laid_out(data: Path, directory: Path) -> Path:
    whole = experiment("method=fedavg", "clients.count=2", "labels.at=every-client", "rounds=1")
    return federate(whole, data, directory, patience=120.0, deadline=120.0)


def test_a_round_works_through_the_gateway(fenced, tmp_path):
    processes, data = fenced
    told = processes.run(run := laid_out(data, tmp_path / "before"))
    assert (run / "model.safetensors").exists(), told


def test_nobody_outside_can_submit_a_run_or_register_a_key(fenced):
    processes, _ = fenced
    before = processes.controlled()
    assert before  # of the two keys, registered from inside
    for command in (["run", str(processes.app)], ["supernode", "register", "key0.pub"], ["supernode", "list"]):
        with pytest.raises(AssertionError, match="404"):
            processes.flwr(*command, "outside")
    gateway = Guarded(processes.folder, None, None, processes.outside)
    for attack in (name for name in ATTACKS if "long" not in name):
        gateway.say(ATTACKS[attack])
    assert processes.controlled() == before


def test_nobody_without_a_registered_key_can_have_the_superlink_read_a_large_message(fenced, tmp_path):
    processes, _ = fenced
    gateway = Guarded(processes.folder, None, None, processes.outside)

    def heard_of() -> int:
        """How often the SuperLink has told of such a call so far, when it has had time to."""
        time.sleep(2)
        return processes.said("link").count("push-object")

    before, headers = heard_of(), signed(keys.new_key(tmp_path / "stranger", ssh=True))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
    with gateway.connect() as connection:
        connection.sendall((BIG % (2 << 30)).replace(b"host: a\r\n", b"host: a\r\n" + lines))
        heard = rest(connection)
    assert heard.startswith(b"HTTP/1.1 412")
    assert b"the coordinator enrols it" in heard  # which the gateway says, and not the SuperLink
    with gateway.caller(headers) as client:
        assert client.post("/v1/fleet/push-object", content=b"a stranger's").status_code == 412
    assert heard_of() == before
    with gateway.client() as client:
        client.post("/v1/fleet/push-object", content=b"a member's")
    assert heard_of() > before


def test_a_bundle_of_somebody_elses_is_executed_at_no_site(fenced, tmp_path):
    """Submitted at the coordinator's own machine, where nothing hinders it."""
    processes, _ = fenced
    marker, app = tmp_path / "executed", tmp_path / "evil-app"
    for name, text in EVIL.items():
        (app / name).parent.mkdir(parents=True, exist_ok=True)
        (app / name).write_text(text.format(marker=str(marker)) if name == "evil/app.py" else text)
    theirs = hashlib.sha256(build_fab_from_disk(app)).hexdigest()
    ours = hashlib.sha256(build_fab_from_disk(processes.app)).hexdigest()
    told = processes.flwr("run", str(app), "here", "--stream")
    assert "replies: 2" in told
    assert told.count("refused run") == 2
    assert not marker.exists()
    for number in range(2):
        lines = [line for line in processes.said(f"node{number}").splitlines() if "refused run" in line]
        assert len(lines) == 1
        assert f"which brings bundle {theirs}: this site executes only {ours}, " in lines[0]
        apps = processes.folder / f"home-node{number}" / "apps"
        assert not [path for path in apps.glob("*") if ours[:8] not in path.name]


def test_a_coordinator_whose_fewlabel_was_altered_can_call_nothing_but_tasks(fenced, tmp_path):
    processes, data = fenced
    told = processes.run(run := laid_out(data, tmp_path / "altered"))
    assert (run / "heard.json").exists(), told
    heard = json.loads((run / "heard.json").read_text())
    assert heard == {
        "function": "fedavg has no task 'round' for clients; it has local_update",
        "private": "fedavg has no task '__init__' for clients; it has local_update",
        "module": "method 'os:system' is not FewLabel's, and this site trusts no module of that name",
        "kind": "a client does no 'server'",
        "path": "the run has no proper name",
    }


def test_a_node_without_a_registered_key_or_without_tls_is_refused(fenced, tmp_path):
    processes, _ = fenced
    keys.new_key(tmp_path / "stranger", ssh=True)
    strange = ["--root-certificates", "ca.pem", "--auth-supernode-private-key", str(tmp_path / "stranger")]
    nodes = {
        "stranger": strange,
        "keyless": ["--root-certificates", "ca.pem"],
        "plain": ["--insecure"],
        "distrustful": [],  # it knows no authority that would have signed this
    }
    before = json.loads(processes.flwr("supernode", "list", "here", "--format", "json"))
    for name, arguments in nodes.items():
        port = str(free_ports(1)[0])
        assert processes.supernode(name, *arguments, "--port", port, "--max-retries", "1").wait(60) != 0
        assert "SuperNode ID" not in processes.said(name)
        processes.started.pop(name)
    after = json.loads(processes.flwr("supernode", "list", "here", "--format", "json"))
    assert [node["node-id"] for node in after["nodes"]] == [node["node-id"] for node in before["nodes"]]


def test_and_afterwards_a_round_still_works(fenced, tmp_path):
    processes, data = fenced
    told = processes.run(run := laid_out(data, tmp_path / "after"))
    assert (run / "model.safetensors").exists(), told
