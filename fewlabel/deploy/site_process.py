"""A site's resident: one process that keeps PyTorch at hand, and does what Flower's process for a message passes on.

They talk by a Unix socket in a directory of the site's own. What goes through it are names and bytes, never objects.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any


def reply(config: Mapping[str, Any], parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts of a site's reply, from its resident where the site's configuration names one, or from this process."""
    if "resident" in config:
        try:
            with Client(str(config["resident"]), "AF_UNIX") as connection:
                put(connection, parts)
                return get(connection)
        except (FileNotFoundError, ConnectionRefusedError):
            return {"failed": "its resident is not there; start it again at the site"}
        except (OSError, EOFError):
            return {"failed": "its resident ended before it had answered; start it again at the site"}
    from fewlabel.deploy import site as apart

    return apart.reply(config, parts)


def reside(config: Mapping[str, Any], socket: Path) -> None:
    """Answers one message after the other, until the process is ended."""
    from fewlabel.deploy import site as apart

    socket.unlink(missing_ok=True)
    os.umask(0o077)  # nobody else may connect, or read what is decoded here
    with Listener(str(socket), "AF_UNIX") as listener:
        while True:
            with suppress(OSError, EOFError, ValueError), listener.accept() as connection:
                put(connection, apart.reply(config, get(connection)))


def put(connection: "Connection[Any, Any]", parts: Mapping[str, Any]) -> None:
    """Sends parts: their names, with the texts among them, and then the bytes of the others."""
    connection.send_bytes(
        json.dumps({name: None if isinstance(p, bytes) else str(p) for name, p in parts.items()}).encode()
    )
    for part in parts.values():
        if isinstance(part, bytes):
            connection.send_bytes(part)


def get(connection: "Connection[Any, Any]") -> dict[str, Any]:
    names: dict[str, Any] = json.loads(connection.recv_bytes())
    return {name: connection.recv_bytes() if text is None else text for name, text in names.items()}
