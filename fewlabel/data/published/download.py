"""Files from their publishers, on request alone: what has arrived is kept, continued, and checked before it counts.

By urllib, because pooch and torchvision begin a broken download of gigabytes from its first byte again, and the rest of
what they do is these few lines.
"""

import fcntl
import http.client
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fewlabel.core.errors import BadInput, FewLabelError, StorageError
from fewlabel.data.published.files import File, md5_of

Progress = Callable[[str, int, int | None], None]  # a file's name, its bytes so far, and of how many if that is known

BLOCK = 1 << 16
TRIES = 5  # without a byte of progress
TIMEOUT = 30.0  # seconds of silence


class Lost(Exception):
    """The network's fault, not the disk's: another try may mend it."""


@contextmanager
def network() -> Iterator[None]:
    try:
        yield
    except urllib.error.HTTPError:  # an answer
        raise
    except (OSError, http.client.HTTPException) as error:
        raise Lost(str(getattr(error, "reason", "") or error or type(error).__name__)) from None


def fetch(files: Sequence[File], to: Path, progress: Progress = lambda *_: None, wait: float = 1.0) -> list[Path]:
    """Each file's path below `to`; what lies there already is not downloaded, but must have its checksum."""
    made = [folder for folder in (to, *to.parents) if not folder.exists()]
    try:
        to.mkdir(parents=True, exist_ok=True)
        with alone(to):
            return [one(file, to, progress, wait) for file in files]
    except (OSError, FewLabelError) as error:
        for folder in made:
            with suppress(OSError):  # where something has arrived
                folder.rmdir()
        if isinstance(error, OSError):
            raise StorageError(f"{to} cannot be written: {error.strerror or error}") from None
        raise


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits for whoever else downloads into a folder; the second then finds what the first has got."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some network disks cannot
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield
    finally:
        os.close(opened)


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
        discard(part)
        transfer(file, part, progress, wait)
    if file.md5 and (found := md5_of(part)) not in file.md5:
        discard(part)
        raise BadInput(f"{file.url} does not give the published {file.name}: its md5 is {found}; it was not kept")
    part.replace(path)
    discard(part)
    return path


def version(part: Path) -> Path:
    """Where it stands which version of a file on the server a part is of."""
    return part.with_suffix(".version")


def discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    version(part).unlink(missing_ok=True)


def transfer(file: File, part: Path, progress: Progress, wait: float) -> None:
    """Asks for what is still missing until all is there; gives up after several tries that brought nothing new."""
    tries, furthest = 0, part.stat().st_size if part.exists() else 0
    while True:
        try:
            if more(file, part, progress):
                return
            reason = "the connection ended early, or it was not said how much there is"
        except Lost as error:
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


def more(file: File, part: Path, progress: Progress) -> bool:
    """One request; whether the file is complete after it.

    Without a checksum that would tell, what is there is continued only if it is of the version that the server has.
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
        tag, told = response.headers.get("ETag") or "", response.headers.get("Content-Length") or ""
        total_bytes = have + int(told) if told.isdigit() else None
        if have and (whole := span.rpartition("/")[2]).isdigit():  # an answer may be less than all that was asked for
            total_bytes = int(whole)
        if not have:
            of = response.headers.get("Last-Modified") or "" if not tag or tag.startswith("W/") else tag
            version(part).write_text(of)
        with part.open("ab" if have else "wb") as out:
            progress(file.name, have, total_bytes)
            while block := received(response):
                out.write(block)
                have += len(block)
                progress(file.name, have, total_bytes)
    # An answer in chunks tells its end; of one that just ends, the checksum must tell.
    return have == total_bytes if total_bytes is not None else bool(file.md5 or getattr(response, "chunked", False))


def received(response: http.client.HTTPResponse) -> bytes:
    with network():
        return response.read(BLOCK)
