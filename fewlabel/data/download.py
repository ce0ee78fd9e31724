"""Files from their publishers, on request alone: what has arrived is kept, continued, and checked before it counts.

By urllib, because pooch and torchvision begin a broken download of gigabytes from its first byte again, and the rest of
what they do is these few lines.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

from fewlabel.data.files import File, md5_of
from fewlabel.errors import BadInput, StorageError

Progress = Callable[[str, int, int | None], None]  # a file's name, its bytes so far, and of how many if that is known

BLOCK = 1 << 16
TRIES = 5  # without a byte of progress
TIMEOUT = 30.0  # seconds of silence


def fetch(files: Sequence[File], to: Path, progress: Progress = lambda *_: None, wait: float = 1.0) -> list[Path]:
    """Each file's path below `to`; what lies there already is not downloaded, but must have its checksum."""
    try:
        to.mkdir(parents=True, exist_ok=True)
        return [one(file, to, progress, wait) for file in files]
    except OSError as error:
        raise StorageError(f"{to} cannot be written: {error.strerror or error}") from None


def one(file: File, to: Path, progress: Progress, wait: float) -> Path:
    path, part = to / file.name, to / f".{file.name}.part"
    if path.exists():
        if file.md5 and (found := md5_of(path)) not in file.md5:
            raise BadInput(f"{path} is damaged or another file: its md5 is {found}; delete it and get it anew")
        return path
    if not file.url:
        raise BadInput(f"{file.name} cannot be downloaded by a command; get it from its publisher and put it into {to}")
    continued = part.exists()
    transfer(file, part, progress, wait)
    if file.md5 and md5_of(part) not in file.md5 and continued:  # the beginning may have been of something else
        part.unlink()
        transfer(file, part, progress, wait)
    if file.md5 and (found := md5_of(part)) not in file.md5:
        part.unlink()
        raise BadInput(f"{file.url} does not give the published {file.name}: its md5 is {found}; it was not kept")
    part.replace(path)
    return path


def transfer(file: File, part: Path, progress: Progress, wait: float) -> None:
    """Asks for what is still missing until all is there; gives up after several tries that brought nothing new."""
    tries, furthest = 0, part.stat().st_size if part.exists() else 0
    while True:
        try:
            if more(file, part, progress):
                return
            reason = "the connection ended early"
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
            reason = str(getattr(error, "reason", "") or error or type(error).__name__)
            if isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code not in (408, 429):
                reason, tries = f"{error.code} {error.reason}", TRIES
        have = part.stat().st_size if part.exists() else 0
        tries, furthest = (0, have) if have > furthest else (tries + 1, furthest)
        if tries >= TRIES:
            raise StorageError(
                f"{file.name} cannot be downloaded from {file.url}: {reason}; what has arrived is kept, "
                "and the same command continues it"
            )
        time.sleep(wait * 2**tries)


def more(file: File, part: Path, progress: Progress) -> bool:
    """One request; whether the file is complete after it."""
    have = part.stat().st_size if part.exists() else 0
    asked = {"User-Agent": "fewlabel"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(file.url, headers=asked), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # nothing is missing, or too much is there
            total = (error.headers.get("Content-Range") or "").removeprefix("bytes */")
            if total == str(have):
                return True
            part.unlink()
            return False
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server sends all of it again
        length = response.headers.get("Content-Length")
        total_bytes = have + int(length) if length else None
        with part.open("ab" if have else "wb") as out:
            progress(file.name, have, total_bytes)
            while block := response.read(BLOCK):
                out.write(block)
                have += len(block)
                progress(file.name, have, total_bytes)
    return total_bytes is None or have == total_bytes
