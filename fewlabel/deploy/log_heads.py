"""The heads of sites' logs that a coordinator keeps: with each reply comes the line of the log about it, signed.

Later, a log that lacks one of these lines was cut off or written anew, even by someone who has the site's key.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core import storage
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.deploy import keys, members
from fewlabel.deploy.site_log import Account, Entry, entry_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

FILE = "heads.jsonl"
ABSENT = "came without a signed line of the site's log"
PARTS = ("upload", "refused", "failed")  # of a reply, of which it has one or none


@dataclass(frozen=True)
class Kept:
    """What a coordinator keeps of one reply."""

    client: int
    name: str
    key: str  # fingerprint
    number: int  # of the line in the site's log
    hash: str
    time: str
    fault: str = ""  # what was wrong with it when it came


class Heads:
    """Keeps heads in a federation's folder, and says at once if a site's log does not go on where it was."""

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self.folder, self.say = folder, say
        self.last = {kept.key: kept for kept in read(folder / FILE) if kept.hash}

    def take(self, node: int, parts: Mapping[str, Any]) -> None:
        """Check and keep the line that came with a reply of a node."""
        member = next((one for one in members.members(self.folder) if one.node == node), None)
        if member is None:
            return  # whoever is no member has been refused already
        print_, key = keys.fingerprint(member.key), keys.load_public(member.key)
        line = str(parts.get("log", ""))
        if not line and "failed" in parts:
            return  # Flower's own program says so if the site's process does not run
        entry = entry_of(line.encode()) if line else None
        fault = wrong(entry, key, parts, self.last.get(print_))
        found = entry if entry is not None and not fault.startswith(("came", "has a line that")) else None
        number, head = (found.number, found.hash) if found else (0, "")
        kept = Kept(member.client, member.name, print_, number, head, members.now_text(), fault)
        with (self.folder / FILE).open("a+b") as file:
            storage.drop_torn_line(file)
            file.write(json.dumps(asdict(kept)).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if found is not None:
            self.last[print_] = kept
        if fault:
            self.say(f"a reply of client {member.client} '{member.name}' {fault}")


def wrong(entry: Entry | None, key: "EllipticCurvePublicKey", parts: Mapping[str, Any], last: Kept | None) -> str:
    """Return what is wrong with the line that came with a reply, or an empty text."""
    if entry is None:
        return ABSENT
    if not entry.signed_by(key):
        return "has a line that the site's key has not signed"
    given = [
        part.encode() if isinstance(part, str) else part for name in PARTS if (part := parts.get(name)) is not None
    ]
    if entry.direction != "out" or entry.sha256 != hashlib.sha256(b"".join(given)).hexdigest():
        return "has a line that is about another reply"
    if last is not None and entry.number <= last.number:
        return f"is line {entry.number} of a log that had line {last.number} before: it was cut off or written anew"
    if last is not None and entry.number == last.number + 1 and entry.previous != last.hash:
        return f"does not follow on line {last.number} of the site's log: it was written anew"
    return ""


def read(path: Path) -> list[Kept]:
    """Read the heads that were kept, if there are any."""
    if not path.exists():
        return []
    try:
        *lines, _ = path.read_bytes().split(b"\n")  # a power cut may leave a last line half written
        return [Kept(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from None


def signers(folder: Path) -> Iterator[tuple[str, "EllipticCurvePublicKey"]]:
    """Return the keys of all who are or were members, by fingerprint."""
    for member in (*members.members(folder), *members.removed(folder)):
        yield keys.fingerprint(member.key), keys.load_public(member.key)


def signer_of(account: Account, known: Mapping[str, "EllipticCurvePublicKey"]) -> str | None:
    """Return whose log this is: the fingerprint of the key that signed its last signed line."""
    signed = [entry for entry in account.entries if entry.signature]
    return next((name for name, key in known.items() if signed and signed[-1].signed_by(key)), None)


def compare(account: Account, kept: list[Kept]) -> list[str]:
    """Return what a log lacks of the heads that a coordinator kept of it, and what was wrong when they came."""
    lines = {entry.number: entry for entry in account.entries}
    faults = [f"the coordinator notes of {one.time} that a reply {one.fault}" for one in kept if one.fault]
    for one in kept:
        if one.hash and (one.number not in lines or lines[one.number].hash != one.hash):
            what = "is another now" if one.number in lines else "is gone"
            faults.append(
                f"line {one.number}, which the coordinator kept on {one.time}, {what}: the log was "
                f"{'written anew' if one.number in lines else 'cut off or written anew'}"
            )
    return faults


def heads_file(path: Path) -> Path:
    """Return the file of heads in a federation's folder, or the file itself."""
    found = path / FILE if path.is_dir() else path
    if not found.exists():
        raise BadInput(f"there is no file {found}; a coordinator has it once a site has replied")
    return found
