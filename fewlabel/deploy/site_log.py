"""A site's own log of all that came and all that left. Each line is chained to the one before, and signed.

A line is on the disk before the reply that it describes leaves the site. Whoever changes, removes, inserts or moves a
line breaks the chain there. Whoever writes the whole log anew without the site's key cannot sign it. Whoever cuts lines
off at the end, or has the key, leaves a chain without a break. That shows by the hash of a later line, the head: each
reply takes the line about itself along, and the coordinator keeps it (`log_heads`). Lines of before 0.2 have no
signature; none may follow on a line that has one.
"""

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fewlabel.core import storage
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.deploy import log_signature

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

FILE = "audit.jsonl"
START = "0" * 64  # what the first line has before it
TAIL = 1 << 16  # bytes in which the last line is found; no line is that long
TEXT = 200  # characters of a name that a server may have made up


@dataclass(frozen=True)
class Entry:
    """One line: a message that came, or a reply that left."""

    number: int  # from 1
    time: str  # UTC
    run: str
    round: int
    task: str
    direction: str  # in, out
    bytes: int
    sha256: str  # of the payload
    previous: str  # hash of the line before
    hash: str  # of all fields before it
    signature: str = ""  # of the hash, by the site's key, in base64; empty before 0.2

    @property
    def sound(self) -> bool:
        named = ("hash", "signature")
        return self.hash == hashed({key: value for key, value in asdict(self).items() if key not in named})

    def text(self) -> str:
        """Return the line as it is written. One without a signature is as before 0.2."""
        table = asdict(self)
        if not self.signature:
            del table["signature"]
        return json.dumps(table)

    def signed_by(self, key: "EllipticCurvePublicKey") -> bool:
        return bool(self.signature) and log_signature.verified(key, self.hash, self.signature)


def hashed(line: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(line, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def note(
    folder: Path, direction: str, payload: Sequence[bytes], run: str, round: int, task: str, key: str = ""
) -> Entry:
    """Append a line about a payload, which may come in parts, and return it. It then survives a power cut.

    `key` is the file of the key that signs it.
    """
    digest = hashlib.sha256()
    for part in payload:
        digest.update(part)
    path = folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new = not path.exists()
        with path.open("a+b") as file:
            storage.lock(file)
            last = last_whole_line(file, path)
            line: dict[str, Any] = {
                "number": last.number + 1 if last else 1,
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "run": run[:TEXT],
                "round": round,
                "task": task[:TEXT],
                "direction": direction,
                "bytes": sum(map(len, payload)),
                "sha256": digest.hexdigest(),
                "previous": last.hash if last else START,
            }
            whole = hashed(line)
            entry = Entry(**line, hash=whole, signature=log_signature.signed(Path(key), whole) if key else "")
            file.write(entry.text().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            handle = os.open(folder, os.O_RDONLY)
            os.fsync(handle)  # or the file itself might not survive
            os.close(handle)
        return entry
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; nothing leaves this site until it can"
        ) from None


def last_whole_line(file: IO[bytes], path: Path) -> Entry | None:
    """Return the last whole line. Drop a half-written one behind it: the reply that it describes has not left."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - TAIL))
    tail = file.read()
    torn = len(tail) - (tail.rfind(b"\n") + 1)
    if torn:
        file.truncate(size - torn)
    lines = tail[: len(tail) - torn].splitlines()
    if not lines:
        return None
    entry = entry_of(lines[-1])
    if entry is None:
        raise StorageError(f"the last line of {path} is damaged; look into it with `fewlabel audit`, and move it away")
    return entry


def entry_of(line: bytes) -> Entry | None:
    """Read a line. Return None if it is not, to the byte, what `note` would write."""
    if len(line) > TAIL:
        return None
    try:
        entry = Entry(**json.loads(line))
    except (ValueError, TypeError, RecursionError):
        return None
    known = all(type(getattr(entry, field.name)) is field.type for field in fields(Entry))
    same = known and entry.direction in ("in", "out") and entry.text().encode() == line
    return entry if same and entry.sound else None


@dataclass(frozen=True)
class Account:
    """What a log says, and what is wrong with it."""

    entries: tuple[Entry, ...]
    faults: tuple[str, ...]  # each with the number of its line
    torn: bool  # True if the last line is half written, as a kill leaves it

    @property
    def head(self) -> str:
        return self.entries[-1].hash if self.entries else START

    def totals(self) -> dict[str, dict[str, int]]:
        """Count by task the messages that came and the replies that left, and their bytes."""
        found: dict[str, dict[str, int]] = {}
        for entry in self.entries:
            row = found.setdefault(entry.task, {"in": 0, "bytes_in": 0, "out": 0, "bytes_out": 0})
            row[entry.direction] += 1
            row[f"bytes_{entry.direction}"] += entry.bytes
        return found

    def line_of(self, head: str) -> int:
        """Return the number of the line with this hash, or with one that begins like this."""
        if not re.fullmatch(r"[0-9a-f]{8,64}", head):
            raise BadInput(f"'{head}' is no head: a head is 64 hexadecimal digits, and the first eight are enough")
        for entry in self.entries:
            if entry.hash.startswith(head):
                return entry.number
        raise StorageError(f"no line has the hash {head}: the log was cut off or written anew since you noted it")


def verify(path: Path, key: "EllipticCurvePublicKey | None" = None) -> Account:
    """Read a log, and find each place where the chain is broken, and with a key each line that it did not sign."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from None
    entries, faults, number, previous, spoiled = list[Entry](), list[str](), 0, START, 0
    signed = False
    for place, line in enumerate(lines, 1):
        entry = entry_of(line)
        if entry is None:
            faults.append(f"line {place} was changed, or put in")
            spoiled += 1
            continue
        entries.append(entry)
        if signed and not entry.signature:
            faults.append(f"line {place} is not signed, although one before it is: it was put in")
        elif key is not None and entry.signature and not entry.signed_by(key):
            faults.append(f"line {place} is not signed by this site's key: it was written anew, or put in")
        signed = signed or bool(entry.signature)
        if entry.number <= number:
            faults.append(f"line {place} has the number {entry.number}, which came before: it was moved, or put in")
            continue
        if entry.number > number + 1 + spoiled:
            gone = f"{number + 1 + spoiled}" + (
                f" to {entry.number - 1}" if entry.number > number + 2 + spoiled else ""
            )
            faults.append(f"line {place} has the number {entry.number}: before it {gone} was removed, or moved")
        elif entry.number == number + 1 and entry.previous != previous:
            faults.append(f"line {place} does not follow on the one before: that was written anew, or put in")
        number, previous, spoiled = entry.number, entry.hash, 0
    return Account(tuple(entries), tuple(faults), bool(rest))
