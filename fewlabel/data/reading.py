"""What all readers of files share: errors in one sentence, records a few at a time, and digests of whole files."""

import csv
import gzip
import hashlib
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data import pictures
from fewlabel.data.raw import CHUNK

MALFORMED = (
    ValueError, KeyError, IndexError, TypeError, EOFError, zlib.error, zipfile.BadZipFile,
    tarfile.TarError, csv.Error, struct.error, AttributeError, NotImplementedError, pictures.Unreadable,
)  # fmt: skip


@contextmanager
def reading(path: Path, what: str = "") -> Iterator[None]:
    """Turn what a malformed file makes our readers raise into one sentence that names the file."""
    named = f"{what} in {path}" if what else str(path)
    try:
        yield
    except (*MALFORMED, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # a fault of the disk; those of Pillow and gzip have no number
            raise StorageError(f"{named} cannot be read: {error.strerror}") from None
        raise BadInput(f"{named} cannot be read: {error}") from None


def records(file: IO[bytes] | gzip.GzipFile, size: int) -> Iterator[np.ndarray]:
    """Read a file of records of equal size, as bytes [n, size]."""
    while block := file.read(max(1, CHUNK // size) * size):
        yield np.frombuffer(block, np.uint8).reshape(-1, size)


def digest_of(file: Path) -> str:
    """Return a text that is the same for files of the same bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
