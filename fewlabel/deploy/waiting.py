"""Whom a run waits for: written down by its server, and shown to people by whoever watches the run."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.errors import StorageError
from fewlabel.deploy.members import called

FILE = "waiting.json"  # in a run's directory
NAMED = 10.0  # seconds until whoever is waited for is named


@dataclass(frozen=True)
class Waited:
    """A client that is waited for."""

    client: int
    since: float  # seconds since 1970
    usual: float = 0.0  # seconds that its task takes
    refused: str = ""  # why it may not take part, as long as it asks before the first round


def write(directory: Path, waited: Sequence[Waited]) -> None:
    """Write down who is waited for, so that other processes can show it."""
    with suppress(OSError, StorageError):  # it is only for people, and a full disk is told elsewhere
        if waited:
            storage.write(directory / FILE, json.dumps([vars(one) for one in waited]).encode(), durable=False)
        else:
            (directory / FILE).unlink(missing_ok=True)


def read(directory: Path) -> list[Waited]:
    """Read who is waited for in a run."""
    with suppress(OSError, ValueError, TypeError):
        return [Waited(**one) for one in json.loads((directory / FILE).read_text())]
    return []


def text(waited: Sequence[Waited], names: Mapping[int, str]) -> str:
    """Return whom a run waits for and how long, such as "waiting for 'Klinik B', 30 s". Empty if for nobody."""
    if not waited:
        return ""
    who = ", ".join(called(names, one.client) for one in waited)
    return f"waiting for {who}, {max(0.0, time.time() - min(one.since for one in waited)):.0f} s"


class News:
    """Tells who is waited for: after ten seconds, and again from time to time if that is longer than usual."""

    TIMES = (NAMED, 30, 60, 120, 300, 600)  # seconds after which it is told; later every 600

    def __init__(self, directory: Path, names: Mapping[int, str]) -> None:
        self.directory, self.names = directory, names
        self.since, self.told = 0.0, 0.0

    def news(self) -> str:
        """Return a line if there is something new to tell."""
        waited = read(self.directory)
        if not waited:
            return ""
        since = min(one.since for one in waited)
        if since > self.since + NAMED:  # those of one round are asked within a moment
            self.since, self.told = since, 0.0
        seconds = time.time() - since
        due = max((at for at in self.TIMES if at <= seconds), default=0.0)
        due = max(due, seconds // 600 * 600)
        if due <= self.told or (self.told and all(seconds < 1.5 * one.usual for one in waited)):
            return ""
        self.told = due
        return text(waited, self.names)
