"""Flower's SuperLink as its coordinator sees it: where it is, what it is asked, and the keys that it knows."""

import json
import os
import sqlite3
import subprocess
import time
import tomllib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

from fewlabel.core.errors import RunFailed
from fewlabel.deploy import keys, processes

HERE = "here"  # Flower's name for the connection
DATABASE = "link.db"
BEATS = 2  # of a node that Flower can miss before the node is gone to it


def command(folder: Path, host: str, port: int, insecure: bool) -> list[str]:
    """What starts it, with TLS and keys of nodes unless it is to be insecure."""
    files = {"--ssl-ca-certfile": "ca.pem", "--ssl-certfile": "server.pem", "--ssl-keyfile": "server.key"}
    secure = [word for flag, name in files.items() for word in (flag, str(folder / name))]
    return [
        str(processes.BIN / "flower-superlink"),
        *("--host", host, "--port", str(port)),
        *("--database", str(folder / DATABASE)),
        "--disable-runtime-dependency-installation",
        *(["--insecure"] if insecure else ["--enable-supernode-auth", *secure]),
    ]


def connect(folder: Path, host: str, port: int, insecure: bool) -> None:
    """Tells Flower's commands where the SuperLink is."""
    how = "insecure = true" if insecure else f"root-certificates = {json.dumps(str(folder / 'ca.pem'))}"
    (folder / "flower").mkdir(exist_ok=True)
    keys.put(folder / "flower" / "config.toml", f'[superlink.{HERE}]\naddress = "{host}:{port}"\n{how}\n'.encode())


def connection(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((folder / "flower" / "config.toml").read_text())["superlink"][HERE]
    return found


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, **processes.flower_environment(folder / "flower")}


def flwr(folder: Path, *arguments: str) -> dict[str, Any]:
    return answered(folder, [str(processes.BIN / "flwr"), *arguments, HERE, "--format", "json"])


def answered(folder: Path, command: list[str]) -> dict[str, Any]:
    """What one of Flower's commands has to say, as JSON."""
    done = subprocess.run(command, env=environment(folder), capture_output=True, text=True)
    with suppress(ValueError):
        answer: dict[str, Any] = json.loads(done.stdout)
        if answer.get("success"):
            return answer
        raise RunFailed(f"Flower refuses: {answer.get('error-message', done.stdout)}")
    raise RunFailed(f"Flower failed: {' '.join((done.stderr or done.stdout).split())[-300:]}")


def register(folder: Path) -> None:
    """Makes the SuperLink's nodes the members: it learns the keys that it does not know, and forgets removed ones."""
    there = keys.members(folder)
    if not there + keys.removed(folder) or connection(folder).get("insecure"):
        return
    for member in there:
        if member.key not in nodes(folder):
            public = folder / "flower" / "member.pub"
            public.write_text(member.key)
            try:
                flwr(folder, "supernode", "register", str(public))
            except RunFailed:
                if member.key not in nodes(folder):  # or another command was quicker
                    raise
    known = nodes(folder)
    for member in there:
        if member.node != known[member.key].number:
            keys.place_at(folder, member, known[member.key].number)
    for member in keys.removed(folder):
        if (node := known.get(member.key)) and node.status != "unregistered":
            flwr(folder, "supernode", "unregister", str(node.number))


class Node(NamedTuple):
    """What the SuperLink knows of a key."""

    number: int
    status: str  # registered, online, offline or unregistered
    until: float  # when it is gone to Flower, or was, unless it is heard of again
    beat: float  # seconds, after which it should be

    def standing(self) -> dict[str, Any]:
        """Whether it is connected, and the seconds for which it has not been heard, or has not been connected."""
        gone = time.time() - self.until
        if self.status == "online" and gone < 0:
            return {"state": "connected", "seconds": gone + BEATS * self.beat}
        if self.status in ("online", "offline"):
            return {"state": "not connected", "seconds": gone}
        return {"state": "never connected"}


def nodes(folder: Path) -> dict[str, Node]:
    """The nodes by their keys; Flower's own commands tell of neither keys nor heartbeats, so its file is read."""
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    if not (folder / DATABASE).exists():
        return {}
    asked = "SELECT public_key, node_id, status, online_until, heartbeat_interval FROM node"
    try:
        with closing(sqlite3.connect(f"{(folder / DATABASE).as_uri()}?mode=ro", uri=True)) as database:
            rows = database.execute(asked).fetchall()
    except sqlite3.DatabaseError as error:
        if "no such table" in str(error):  # before the SuperLink has begun
            return {}
        raise RunFailed(f"Flower's file {folder / DATABASE} cannot be read: {error}") from None
    return {
        keys.written(load_pem_public_key(key)): Node(number % 2**64, status, until or 0.0, beat or 0.0)  # type: ignore[arg-type]
        for key, number, status, until, beat in rows
    }
