"""Download published files: continue what was interrupted, and check a file before it counts.

This uses urllib, because pooch and torchvision start a broken download of gigabytes again from its first byte.
"""

import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.errors import BadInput, FewLabelError, StorageError
from fewlabel.data.published.files import PublishedFile, md5_of

Progress = Callable[[str, int, int | None], None]  # a file's name, its bytes so far, and its size if known

BLOCK = 1 << 16
TRIES = 5  # without a byte of progress
TIMEOUT = 30.0  # seconds of silence


class NetworkFailed(Exception):
    """A fault of the network, not of the disk: another try may succeed."""


@contextmanager
def network() -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError:  # an answer
        raise
    except (OSError, http.client.HTTPException) as error:
        raise NetworkFailed(str(getattr(error, "reason", "") or error or type(error).__name__)) from None


def fetch(
    files: Sequence[PublishedFile], to: Path, progress: Progress = lambda *_: None, wait: float = 1.0
) -> list[Path]:
    """Download files into a folder and return their paths. A file that is there already must have its checksum."""
    made = [folder for folder in (to, *to.parents) if not folder.exists()]
    try:
        to.mkdir(parents=True, exist_ok=True)
        with locked(to):
            return [fetch_one(file, to, progress, wait) for file in files]
    except (OSError, FewLabelError) as error:
        for folder in made:
            with suppress(OSError):  # where something has arrived
                folder.rmdir()
        if isinstance(error, OSError):
            raise StorageError(f"{to} cannot be written: {error.strerror or error}") from None
        raise


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for other downloads into a folder. The second then finds what the first has downloaded."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(StorageError):  # some network disks cannot
            storage.lock(opened)
        yield
    finally:
        os.close(opened)


def fetch_one(file: PublishedFile, to: Path, progress: Progress, wait: float) -> Path:
    path, part = to / file.name, to / f".{file.name}.part"
    if path.exists():
        if file.md5 and (found := md5_of(path)) not in file.md5:
            raise BadInput(f"{path} is damaged or another file: its md5 is {found}; delete it and download it again")
        return path
    if not file.url:
        raise BadInput(f"{file.name} cannot be downloaded by a command; get it from its publisher and put it into {to}")
    continued = part.exists()
    transfer(file, part, progress, wait)
    if file.md5 and md5_of(part) not in file.md5 and continued:  # the beginning may belong to something else
        discard(part)
        transfer(file, part, progress, wait)
    if file.md5 and (found := md5_of(part)) not in file.md5:
        discard(part)
        raise BadInput(f"{file.url} does not give the published {file.name}: its md5 is {found}; it was not kept")
    part.replace(path)
    discard(part)
    return path


def version(part: Path) -> Path:
    """Return the file that records which version on the server a part belongs to."""
    return part.with_suffix(".version")


def discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    version(part).unlink(missing_ok=True)


def transfer(file: PublishedFile, part: Path, progress: Progress, wait: float) -> None:
    """Ask for what is missing until all is there. Give up after several tries that brought nothing new."""
    tries, furthest = 0, part.stat().st_size if part.exists() else 0
    while True:
        try:
            if request(file, part, progress):
                return
            reason = "the connection ended early, or the server did not say how much there is"
        except NetworkFailed as error:
            reason = str(error)
        except urllib.error.HTTPError as error:
            reason = f"{error.code} {error.reason}"
            if 400 <= error.code < 500 and error.code not in (408, 429):
                tries = TRIES
        have = part.stat().st_size if part.exists() else 0
        tries, furthest = (0, have) if have > furthest else (tries + 1, furthest)
        if tries >= TRIES:
            kept = "what has arrived is kept, and the same command continues it" if have else "try again later"
            raise StorageError(
                f"{file.name} cannot be downloaded from {file.url}: {reason}; {kept}, "
                f"or get it in another way and put it into {part.parent}"
            )
        time.sleep(wait * 2**tries)


def request(file: PublishedFile, part: Path, progress: Progress) -> bool:
    """Make one request. Return True if the file is complete after it.

    Without a checksum, a part is continued only if it belongs to the version that the server has now.
    """
    have = part.stat().st_size if part.exists() else 0
    of = version(part).read_text() if version(part).exists() else ""
    if have and not (of or file.md5):
        have = 0
    asked = {"User-Agent": "fewlabel"} | ({"Range": f"bytes={have}-"} if have else {})
    asked |= {"If-Range": of} if have and of else {}
    try:
        with network():
            response = urllib.request.urlopen(urllib.request.Request(file.url, headers=asked), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:  # nothing is missing, or too much is there
            total = (error.headers.get("Content-Range") or "").removeprefix("bytes */")
            if total == str(have):
                return True
            discard(part)
            return False
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0  # the server sends all of it again
        elif not (span := response.headers.get("Content-Range") or "").startswith(f"bytes {have}-"):
            discard(part)
            return False
        tag, length = response.headers.get("ETag") or "", response.headers.get("Content-Length") or ""
        total_bytes = have + int(length) if length.isdigit() else None
        if have and (whole := span.rpartition("/")[2]).isdigit():  # an answer may be less than all that was asked for
            total_bytes = int(whole)
        if not have:
            of = response.headers.get("Last-Modified") or "" if not tag or tag.startswith("W/") else tag
            version(part).write_text(of)
        with part.open("ab" if have else "wb") as out:
            progress(file.name, have, total_bytes)
            while block := read_block(response):
                out.write(block)
                have += len(block)
                progress(file.name, have, total_bytes)
    # An answer in chunks marks its end. For one that just ends, the checksum must tell.
    return have == total_bytes if total_bytes is not None else bool(file.md5 or getattr(response, "chunked", False))


def read_block(response: http.client.HTTPResponse) -> bytes:
    with network():
        return response.read(BLOCK)
