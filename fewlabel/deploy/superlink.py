"""Flower's SuperLink as its coordinator sees it: how it is served, what it is asked, and which nodes it knows."""

import json
import os
import subprocess
import sys
import time
import tomllib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fewlabel.core import storage
from fewlabel.core.errors import RunFailed
from fewlabel.deploy import keys, members, processes
from fewlabel.report.terminal import tell

LINK, GATEWAY = "superlink", "gateway"  # the two programs
CONNECTION = "here"  # Flower's name for the connection
HOME, DATABASE = "flower", "link.db"
RESTARTS = 3  # of the programs within a minute
HEARTBEATS = 2  # of a node that may be missing before it counts as gone

Address = tuple[str, int]


# Serving


def commands(folder: Path, outside: Address, inside: Address, insecure: bool) -> dict[str, list[str]]:
    """Return the commands that serve a federation: the SuperLink at `inside`, and a gateway unless it is insecure."""
    files = {"--ssl-ca-certfile": "ca.pem", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
    secure = [word for flag, name in files.items() for word in (flag, str(folder / name))]
    link = [
        str(processes.BIN / "flower-superlink"),
        *("--host", inside[0], "--port", str(inside[1])),
        *("--database", str(folder / DATABASE)),
        "--disable-runtime-dependency-installation",
        *(["--insecure"] if insecure else ["--enable-supernode-auth", *secure]),
    ]
    if insecure:
        return {LINK: link}
    files = {"--certificate": "server.pem", "--key": "server.key", "--ca": "ca.pem"}
    gateway = [
        *(sys.executable, "-m", "fewlabel.deploy.gateway"),
        *("--listen", address_text(outside), "--to", address_text(inside)),
        *(word for flag, name in files.items() for word in (flag, str(folder / name))),
        *("--members", str(folder)),
    ]
    return {LINK: link, GATEWAY: gateway}


def address_text(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def serve(programs: processes.Programs, commands: dict[str, list[str]], outside: Address, inside: Address) -> None:
    """Serve a federation until Ctrl-C. Start one of its programs again if it dies."""
    folder, insecure, (host, port) = programs.folder, GATEWAY not in commands, outside
    near = "127.0.0.1" if host in ("0.0.0.0", "::") else host

    def start(name: str) -> None:
        programs.start(name, commands[name])
        if name == LINK:
            programs.wait_for(LINK, *inside)
            register(folder)
        else:
            programs.wait_for(GATEWAY, near, port)

    with suppress(KeyboardInterrupt), processes.interruptible(), programs.cleaned_up():
        processes.refuse_taken(host, port)
        connect(folder, inside, insecure)
        for name in commands:
            start(name)
        how = " without TLS and keys" * insecure
        tell(f"serving at {host}:{port}{how}; press Ctrl-C to end it; logs are in {folder}")
        deaths: list[float] = []
        while True:
            if (gone := programs.first_ended()) is not None:
                deaths = [when for when in deaths if time.monotonic() - when < 60] + [time.monotonic()]
                what = f"the {gone} has ended: {programs.how_ended(gone)}"
                if len(deaths) > RESTARTS:
                    raise RunFailed(f"{what}; that happened again and again; mend it, serve again, then resume the run")
                tell(f"{what}; it is started again")
                start(gone)
                lost = "; a run that was under way has ended, and can be resumed" * (gone == LINK)
                tell(f"serving again{lost}")
            time.sleep(0.5)


# Asking


def connect(folder: Path, address: Address, insecure: bool) -> None:
    """Tell Flower's commands where the SuperLink is."""
    how = "insecure = true" if insecure else f"root-certificates = {json.dumps(str(folder / 'ca.pem'))}"
    (folder / HOME).mkdir(exist_ok=True)
    text = f'[superlink.{CONNECTION}]\naddress = "{address_text(address)}"\n{how}\n'
    storage.write(folder / HOME / "config.toml", text.encode())


def connection(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / HOME / "config.toml").read_text())["superlink"][CONNECTION]
    return found


def is_insecure(folder: Path) -> bool:
    return bool(connection(folder).get("insecure"))


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, **processes.flower_environment(folder / HOME)}


def flwr(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run one of Flower's commands for this SuperLink, and return what it prints as JSON."""
    return run_json(folder, [str(processes.BIN / "flwr"), *arguments, CONNECTION, "--format", "json"])


def run_json(folder: Path, command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True)
    said = done.stderr or done.stdout
    with suppress(ValueError):
        answer: dict[str, Any] = json.loads(done.stdout)
        if answer.get("success"):
            return answer
        said = str(answer.get("error-message", done.stdout))
    what = " ".join(["flwr", *command[1:3]])
    raise RunFailed(
        f"Flower's command `{what}` failed, so nothing was changed; is the federation served, and the disk not full? "
        f"(Flower's words: {processes.last_error(said)})"
    )


def register(folder: Path) -> None:
    """Make the SuperLink's nodes the members: it learns the keys that it does not know, and forgets removed ones."""
    there, removed = members.members(folder), members.removed(folder)
    if not there + removed or is_insecure(folder):
        return
    for member in there:
        if member.key not in nodes(folder):
            public = folder / HOME / "member.pub"
            public.write_text(member.key)
            try:
                flwr(folder, "supernode", "register", str(public))
            except RunFailed:
                if member.key not in nodes(folder):  # otherwise another command was quicker
                    raise
    known = nodes(folder)
    for member in there:
        if member.node != known[member.key].number:
            members.note_node(folder, member, known[member.key].number)
    for member in removed:
        if (node := known.get(member.key)) and node.status != "unregistered":
            flwr(folder, "supernode", "unregister", str(node.number))


# Nodes


class Node(NamedTuple):
    """What the SuperLink knows about a key."""

    number: int
    status: str  # registered, online, offline or unregistered
    until: float  # when it counts as gone unless it is heard of before, or since when it does
    heartbeat: float  # seconds between two signs of life

    def state(self) -> dict[str, Any]:
        """Return whether it is connected, and for how many seconds it has not been heard or not been connected."""
        gone = time.time() - self.until
        if self.status == "online" and gone < 0:
            return {"state": "connected", "seconds": gone + HEARTBEATS * self.heartbeat}
        if self.status in ("online", "offline"):
            return {"state": "not connected", "seconds": gone}
        return {"state": "never connected"}


def nodes(folder: Path) -> dict[str, Node]:
    """Ask the SuperLink for its nodes, by their keys.

    `flwr supernode list` asks the same, and prints neither keys nor heartbeats.
    """
    import httpx
    from cryptography.hazmat.primitives.serialization import load_pem_public_key
    from flwr.proto.control_pb2 import ListNodesRequest
    from flwr.supercore.control import ControlHttpClient

    where, insecure = connection(folder), is_insecure(folder)
    ca = None if insecure else Path(where["root-certificates"]).read_bytes()
    with closing(ControlHttpClient.from_server_address(where["address"], insecure, ca, [])) as client:
        try:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        except (httpx.HTTPError, ValueError) as error:
            raise RunFailed(f"the SuperLink at {where['address']} lists no nodes: {error}") from None
    return {
        keys.public_text(load_pem_public_key(node.public_key)): Node(  # type: ignore[arg-type]
            node.node_id, node.status, node.online_until, node.heartbeat_interval
        )
        for node in found
    }
