"""Programs that we start and end. Each has a mark in its environment, so that none of its helpers is left behind.

Flower's programs start programs of their own, and some of those outlive their parents. We end whatever has the mark of
a folder, and nothing else: a process number in a file may long belong to another process.
"""

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

from fewlabel.core import storage
from fewlabel.core.errors import BadInput, RunFailed, install

MARK = "FEWLABEL_PART_OF"
LOCK = ".running"  # held by whoever starts a folder's programs, with the number of its process
BIN = Path(sys.executable).parent
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
BOX = re.compile("[\u2500-\u257f]+")  # what Flower's commands draw around their errors
LEVEL = re.compile(r"^(?=(?:DEBUG|INFO|WARNING|ERROR)\b)", re.M)  # where one of Flower's messages begins
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def need_flower() -> None:
    if find_spec("flwr") is None:
        raise BadInput(f"Flower is not installed: {install('flower')}")


def flower_environment(home: Path) -> dict[str, str]:
    """Return what Flower's programs need in their environment: a home of their own, and no telemetry."""
    need_flower()
    paths = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",
        # Your own methods, networks and data are found in the working directory, as by any command.
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
        **({} if str(BIN) in paths else {"PATH": os.pathsep.join([str(BIN), *paths])}),
    }


@dataclass
class Programs:
    """The programs of a folder. Their logs are in it, too."""

    folder: Path  # absolute
    environment: Mapping[str, str]
    started: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    log_starts: dict[str, int] = field(default_factory=dict)  # bytes that each log had when its program was started

    def start(self, name: str, command: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Start a program in a group of its own, so that a Ctrl-C reaches only us."""
        with self.log(name).open("ab") as log:
            environment = {**os.environ, **self.environment, MARK: str(self.folder)}
            self.log_starts[name] = log.tell()
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

    def shown(self, commands: Mapping[str, Sequence[str]]) -> str:
        """Return commands as you would type them, one in a line."""
        before = ["env", *(f"{name}={value}" for name, value in self.environment.items())]
        return "\n".join(shlex.join([*before, *command]) for command in commands.values())

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def output(self, name: str) -> str:
        """Return what a program has printed since it was started."""
        return read_from(self.log(name), self.log_starts.get(name, 0))

    def last_error(self, name: str) -> str:
        """Return the last error that a program has printed since it was started, or its last line."""
        return f"{last_error(self.output(name))} (all of it: {self.log(name)})"

    def how_ended(self, name: str) -> str:
        """Say how a program has ended: by which signal, or with which last words."""
        code = self.started[name].returncode
        if code is not None and code < 0:
            return f"it was killed by {signal.Signals(-code).name} (its log: {self.log(name)})"
        return f"its last words: {self.last_error(name)}"

    def wait_for(self, name: str, host: str, port: int, patience: float = 120) -> None:
        """Wait until a program listens."""
        until = time.monotonic() + patience
        while self.started[name].poll() is None and time.monotonic() < until:
            with suppress(OSError):
                return socket.create_connection((host, port), 1).close()
            time.sleep(0.1)
        raise RunFailed(f"{name} does not listen at {host}:{port}: {self.last_error(name)}")

    def first_ended(self) -> str | None:
        """Return the name of a program that has ended, if there is one."""
        return next((name for name, process in self.started.items() if process.poll() is not None), None)

    @contextmanager
    def cleaned_up(self) -> Iterator[None]:
        """End what an earlier command left behind, and at the end of the block what was started in it."""
        with in_use(self.folder):
            end(self.folder)
            try:
                yield
            finally:
                before = [(number, signal.signal(number, signal.SIG_IGN)) for number in ENDS]
                end(self.folder, self.started.values())
                for number, handler in before:
                    signal.signal(number, handler)


@contextmanager
def interruptible() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C, and SIGHUP too, unless the command was started by nohup."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    heeded = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, leave)) for number in heeded]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def marked(folder: Path, using: Path | None = None) -> list[int]:
    """List the processes that have the mark of a folder, or those of them that have a file open."""
    wanted, found = f"{MARK}={folder}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError):  # somebody else's, or gone
                if wanted in (entry / "environ").read_bytes().split(b"\0") and (
                    using is None or uses(int(entry.name), using)
                ):
                    found.append(int(entry.name))
    return found


def is_stopped(number: int) -> bool:
    """Return True if a process of this machine is stopped, as by SIGSTOP or Ctrl-Z."""
    with suppress(OSError):  # it is gone
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def uses(number: int, file: Path) -> bool:
    """Return True if a process of this machine has a file open."""
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
    """End the processes that `marked` lists. They are asked first, and killed if they do not listen."""
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
def in_use(folder: Path) -> Iterator[None]:
    """Keep other commands from starting a folder's programs. Meanwhile our process number is in its lock file."""
    with (folder / LOCK).open("a+") as file:
        if not storage.lock(file, wait=False):
            raise BadInput(f"{folder} is in use already, by process {process_using(folder)}")
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
        file.truncate(0)


def process_using(folder: Path) -> int | None:
    """Return the number of the process that uses a folder, if there is one."""
    with suppress(FileNotFoundError), (folder / LOCK).open() as file:
        if storage.is_locked(file):
            return int(file.read() or 0) or None
    return None


def stop(folder: Path, patience: float = 30) -> bool:
    """End what runs for a folder, whoever started it. Return True if there was something."""
    found = bool(marked(folder))
    if (number := process_using(folder)) is not None:
        found, until = True, time.monotonic() + patience
        signal_process_using(folder, number, signal.SIGTERM)
        while process_using(folder) == number:
            if time.monotonic() > until:
                signal_process_using(folder, number, signal.SIGKILL)
            time.sleep(0.05)
    end(folder)
    return found


def signal_process_using(folder: Path, number: int, how: signal.Signals) -> None:
    """Signal the process that uses a folder. One in a container or on another machine has another number here."""
    if uses(number, folder / LOCK):
        with suppress(ProcessLookupError):
            os.kill(number, how)
        return
    time.sleep(0.2)  # a process that ends closes the file a moment before others see it
    if process_using(folder) == number:
        raise BadInput(
            f"{folder} is in use by a process that is not on this machine, or is another user's; end it from there"
        )


def refuse_taken(host: str, port: int) -> None:
    """Refuse an address at which we cannot listen."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        why = error.strerror or error
        raise BadInput(f"nothing can listen at {host}:{port}: {why}; --listen sets another address") from None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def read_from(log: Path, start: int) -> str:
    """Read a log from a byte on, as plain text."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(start)
        return COLOUR.sub("", file.read().decode(errors="replace"))


def last_error(output: str) -> str:
    """Return the last error in a program's output, or else its last line, short enough for a sentence."""
    errors = [part for part in LEVEL.split(output) if part.startswith("ERROR")]
    last = errors[-1].partition("\n\n")[0] if errors else BOX.sub("", output).strip().rpartition("\n")[2]
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in last).split())
    return words.removeprefix("ERROR").lstrip(" :")[:300] or "it printed nothing"
