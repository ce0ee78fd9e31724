"""Images in npz files, MedMNIST's or your own: read their shape, and then a few images at a time."""

import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from fewlabel.core.errors import BadInput
from fewlabel.data.reading import reading, records


@contextmanager
def npz_arrays(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open an npz. NumPy itself would take any other file for a pickle, and advise to trust it."""
    with reading(path), path.open("rb") as file:
        start = file.read(6)
        if not zipfile.is_zipfile(file):
            why = {b"": "it is empty", b"\x93NUMPY": "it is a single array (npy)"}.get(start, "it is no zip archive")
            raise BadInput(
                f"{path} is not an npz file: {why}; expected arrays as numpy.savez writes them, such as train_images "
                "and train_labels"
            )
        with np.load(path, allow_pickle=False) as arrays:
            yield arrays


@contextmanager
def npz_array(path: Path, key: str) -> Iterator[tuple[IO[bytes], tuple[int, ...]]]:
    """Open an array of images in an npz. Return a file of its pixels, and its shape [N, H, W, C]."""
    with reading(path, key), zipfile.ZipFile(path) as arrays, arrays.open(f"{key}.npy") as file:
        header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = header[np.lib.format.read_magic(file)](file)
        known = len(shape) == 3 or (len(shape) == 4 and shape[3] in (1, 3))
        if dtype != np.uint8 or fortran or not known or 0 in shape[1:]:
            raise BadInput(
                f"{key} in {path}: expected uint8 images, found {dtype} {list(shape)}{' in Fortran order' * fortran}; "
                "FewLabel reads [N, H, W], [N, H, W, 1] or [N, H, W, 3]"
            )
        yield file, (*shape, 1)[:4]


def npz_shape(path: Path, key: str) -> tuple[int, ...]:
    """Return the shape [N, H, W, C] of an array of images in an npz."""
    with npz_array(path, key) as (_, shape):
        return shape


def npz_images(path: Path, key: str, _: int) -> Iterator[np.ndarray]:
    """Read images of an npz a few at a time. NumPy itself would read all of them."""
    with npz_array(path, key) as (file, (_n, height, width, channels)):
        for rows in records(file, height * width * channels):
            yield rows.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
