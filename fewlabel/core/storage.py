"""Files on disk: writing one as a whole or not at all, and locks between processes."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from fewlabel.core.errors import StorageError


def write(path: Path, data: bytes, durable: bool = True) -> None:
    """Write a file as a whole or not at all. A `durable` one also survives a power cut."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        aside.rename(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written: {error.strerror}; make room or choose another directory, then resume"
        ) from None


def drop_torn_line(file: IO[bytes]) -> None:
    """Remove what a power cut has left of a last line, from a file that is open to append lines to."""
    size = file.seek(0, os.SEEK_END)
    while size:
        start = max(0, size - (1 << 16))
        file.seek(start)
        if (end := file.read(size - start).rfind(b"\n")) >= 0:
            file.truncate(start + end + 1)
            return
        size = start
    file.truncate(0)


def make_folder(path: Path) -> None:
    """Create a folder and those above it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path} cannot be made: {error.strerror}; choose another directory") from None


def lock(file: IO[bytes] | IO[str] | int, wait: bool = True) -> bool:
    """Lock an open file against other processes until it is closed. Return False if it is taken and we do not wait."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise StorageError(f"a file cannot be locked: {error.strerror}; choose a directory on another disk") from None
    return True


def is_locked(file: IO[bytes] | IO[str]) -> bool:
    """Return True if another process has locked this file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock file, then hold it inside the `with` block."""
    with path.open("w") as file:
        lock(file)
        yield
