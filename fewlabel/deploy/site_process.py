"""A site's own process: it keeps PyTorch loaded, and Flower's short-lived processes pass messages on to it.

They talk through a Unix socket in the site's folder. Only names and bytes go through it, never objects.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from fewlabel.core.errors import FewLabelError

Parts = dict[str, Any]  # of a message or a reply: bytes or texts by name
BEAT = 2.0  # seconds between two signs of life
ALIVE = "alive"  # a file beside the socket, whose time is the last sign of life
WORKING = "working"  # a file beside the socket while an order is carried out, with the time by which it must be done
LEAST = 60.0  # seconds that an order may take, whatever the coordinator says


def attempt(work: Callable[[], Parts]) -> Parts:
    """Return the reply that `work` makes. If it raises, return one that says which kind of error it was.

    This is the only place where an error at a site becomes a reply. The text of an error may show data or paths, so it
    goes to the site's own log and does not leave.
    """
    try:
        return work()
    except Exception as error:
        if isinstance(error, FewLabelError):
            print(f"fewlabel: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error, file=sys.stderr)
        return {"failed": f"{type(error).__name__}; the site's own log says more"}


def ask(socket: Path, parts: Mapping[str, Any]) -> Parts:
    """Pass a message on to the site process that listens at a socket, and return its reply."""
    try:
        with Client(str(socket), "AF_UNIX") as connection:
            send(connection, parts)
            return receive(connection)
    except (FileNotFoundError, ConnectionRefusedError):
        return {"failed": "its site process does not run now; `fewlabel site join` starts it again"}
    except (OSError, EOFError):
        return {"failed": "its site process ended before it had answered; `fewlabel site join` starts it again"}


def serve(reply: Callable[[Parts], Parts], socket: Path) -> None:
    """Answer one message after the other by `reply`, until this process is ended. Log why there is no upload."""
    socket.unlink(missing_ok=True)
    socket.with_name(WORKING).unlink(missing_ok=True)
    os.umask(0o077)  # nobody else may connect, or read images that are decoded here
    threading.Thread(target=beat, args=(socket.with_name(ALIVE),), daemon=True).start()
    with Listener(str(socket), "AF_UNIX") as listener:
        while True:
            with suppress(OSError, EOFError, ValueError), listener.accept() as connection:
                parts = receive(connection)
                with working(socket.with_name(WORKING), parts.get("seconds")):
                    made = reply(parts)
                if "failed" in made:  # a refusal is said where it is decided
                    print(f"fewlabel: an order was not carried out: {made['failed']}", file=sys.stderr, flush=True)
                send(connection, made)


@contextmanager
def working(file: Path, seconds: object) -> Iterator[None]:
    """Note by when an order must be done: as long as the coordinator waits, for later nobody reads the reply."""
    with suppress(ValueError, OSError):
        file.write_text(str(time.monotonic() + max(LEAST, float(str(seconds)))))
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def is_late(socket: Path) -> bool:
    """Return True if the process at a socket is at an order for longer than anybody waits for it."""
    with suppress(ValueError, OSError):
        return time.monotonic() > float(socket.with_name(WORKING).read_text())
    return False


def beat(file: Path) -> None:
    """Give signs of life: a process that is stopped, or that no thread of Python can run in, gives none."""
    while True:
        with suppress(OSError):
            file.touch()
        time.sleep(BEAT)


def last_beat(socket: Path) -> int:
    """Return a number that changes with each sign of life of the process at a socket."""
    with suppress(OSError):
        return socket.with_name(ALIVE).stat().st_mtime_ns
    return 0


def send(connection: "Connection[Any, Any]", parts: Mapping[str, Any]) -> None:
    """Send parts: first their names, with the texts among them, then the bytes of the others."""
    texts = {name: None if isinstance(part, bytes) else str(part) for name, part in parts.items()}
    connection.send_bytes(json.dumps(texts).encode())
    for part in parts.values():
        if isinstance(part, bytes):
            connection.send_bytes(part)


def receive(connection: "Connection[Any, Any]") -> Parts:
    names: dict[str, Any] = json.loads(connection.recv_bytes())
    return {name: connection.recv_bytes() if text is None else text for name, text in names.items()}
