"""Programs that this one starts and ends: each bears a mark in its environment, so that no helper of theirs is left.

Flower's programs start programs of their own, some of which outlive their parents. What is ended here is whatever
bears the mark of a folder, and nothing else: a number in a file may long be another's process.
"""

import fcntl
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from fewlabel.core.errors import BadInput, RunFailed

MARK = "FEWLABEL_PART_OF"
BIN = Path(sys.executable).parent
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BOX = re.compile("[\u2500-\u257f]+")  # what Flower's commands draw around their errors
LEVEL = re.compile(r"^(?=(?:DEBUG|INFO|WARNING|ERROR)\b)", re.M)  # where one of Flower's messages begins


def need_flower() -> None:
    if find_spec("flwr") is None:
        raise BadInput("Flower is not installed; install it by: pip install 'fewlabel[flower]'")


def flower_environment(home: Path) -> dict[str, str]:
    """What Flower's programs need, beside what is there: a home of their own, and no word to anybody else."""
    need_flower()
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        # Methods, networks and data of one's own lie there, as for any command.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
        **({} if str(BIN) in paths else {"PATH": os.pathsep.join([str(BIN), *paths])}),
    }


@dataclass
class Programs:
    """The programs of a folder, which also holds their logs."""

    folder: Path  # absolute
    environment: Mapping[str, str]
    started: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    begun: dict[str, int] = field(default_factory=dict)  # bytes that their logs had then

    def start(self, name: str, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Starts a program in a group of its own, so that a Ctrl-C is this program's alone to answer."""
        with self.log(name).open("ab") as log:
            environment = {**os.environ, **self.environment, MARK: str(self.folder)}
            self.begun[name] = log.tell()
            self.started[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env=environment,
                start_new_session=True,
            )
        return self.started[name]

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def said(self, name: str) -> str:
        """What one of them has said since it was started."""
        return read_from(self.log(name), self.begun.get(name, 0))

    def verdict(self, name: str) -> str:
        """Its last error since then, or the last that it said."""
        return f"{last_word(self.said(name))} (all of it: {self.log(name)})"

    def wait_for(self, name: str, host: str, port: int, patience: float = 120) -> None:
        """Until one of them listens."""
        until = time.monotonic() + patience
        while self.started[name].poll() is None and time.monotonic() < until:
            with suppress(OSError):
                return socket.create_connection((host, port), 1).close()
            time.sleep(0.1)
        raise RunFailed(f"{name} does not listen at {host}:{port}: {self.verdict(name)}")

    def ended(self) -> str | None:
        """The first that is not there any more."""
        return next((name for name, process in self.started.items() if process.poll() is not None), None)

    @contextmanager
    def all_ended(self) -> Iterator[None]:
        """What a former one left is ended now, and what is started here is ended with this block."""
        with held(self.folder):
            end(self.folder)
            try:
                yield
            finally:
                before = [(number, signal.signal(number, signal.SIG_IGN)) for number in ENDS]
                end(self.folder, self.started.values())
                for number, handler in before:
                    signal.signal(number, handler)


ENDS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM is answered as Ctrl-C is."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before = [(number, signal.signal(number, leave)) for number in ENDS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def marked(folder: Path, using: Path | None = None) -> list[int]:
    """The processes that bear the mark of a folder; or those of them that have a file open."""
    wanted, found = f"{MARK}={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # somebody else's, or gone
                if wanted in (entry / "environ").read_bytes().split(b"\0") and (
                    using is None or uses(int(entry.name), using)
                ):
                    found.append(int(entry.name))
    return found


def uses(number: int, file: Path) -> bool:
    """Whether a process of this machine has a file open."""
    with suppress(OSError):  # somebody else's, or gone
        for link in Path(f"/proc/{number}/fd").iterdir():
            with suppress(OSError):  # closed since
                if os.readlink(link) == str(file):
                    return True
    return False


def end(
    folder: Path,
    children: Iterable["subprocess.Popen[bytes]"] = (),
    using: Path | None = None,
    patience: float = 10,
) -> None:
    """Ends them: they are asked first."""
    children = list(children)
    for how, until in ((signal.SIGTERM, time.monotonic() + patience), (signal.SIGKILL, float("inf"))):
        asked: set[int] = set()
        while (left := marked(folder, using)) and time.monotonic() < until:
            for number in set(left) - asked:
                with suppress(ProcessLookupError):
                    os.kill(number, how)
            asked.update(left)
            for child in children:
                child.poll()  # or it would stay as a zombie
            time.sleep(0.05)
    for child in children:
        child.wait()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Whoever starts a folder's programs holds it, and its number is in the file for as long."""
    with (folder / ".running").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BadInput(f"{folder} is in use already, by process {holder(folder)}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def holder(folder: Path) -> int | None:
    """The process that holds a folder."""
    try:
        with (folder / ".running").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return int(file.read() or 0) or None
    except FileNotFoundError:
        pass
    return None


def stop(folder: Path, patience: float = 30) -> bool:
    """Ends what runs for a folder, whoever started it; whether there was something."""
    found = bool(marked(folder))
    if (number := holder(folder)) is not None:
        found, until = True, time.monotonic() + patience
        ask(folder, number, signal.SIGTERM)
        while holder(folder) == number:
            if time.monotonic() > until:
                ask(folder, number, signal.SIGKILL)
            time.sleep(0.05)
    end(folder)
    return found


def ask(folder: Path, number: int, how: signal.Signals) -> None:
    """Signals who holds a folder: in a container, or on another machine, its number is another process here."""
    if uses(number, folder / ".running"):
        with suppress(ProcessLookupError):
            os.kill(number, how)
        return
    time.sleep(0.2)  # one that ends has closed the file a moment before others see it
    if holder(folder) == number:
        raise BadInput(
            f"{folder} is held by a process that is not on this machine, or is another user's; end it from there"
        )


def refuse_taken(host: str, port: int) -> None:
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        why = error.strerror or error
        raise BadInput(f"{host}:{port} is no place to listen at: {why}; --listen is another one") from None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def read_from(log: Path, start: int) -> str:
    """What was written to a log behind so many bytes, as plain text."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return COLOUR.sub("", file.read().decode(errors="replace"))


def last_word(text: str) -> str:
    """The last error in what a program said, or else its last line, short enough for a sentence."""
    errors = [part for part in LEVEL.split(text) if part.startswith("ERROR")]
    last = errors[-1].partition("\n\n")[0] if errors else BOX.sub("", text).strip().rpartition("\n")[2]
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in last).split())
    return words.removeprefix("ERROR").lstrip(" :")[:300] or "it said nothing"


def shown(environment: Mapping[str, str], command: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(["env", *(f"{name}={value}" for name, value in environment.items()), *command])
