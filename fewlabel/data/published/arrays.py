"""Read the sets that are published as arrays: Fashion-MNIST, CIFAR, SVHN and MedMNIST.

A reader gets the paths of a set's files after their checksums have matched. It returns labels at once and images a few
at a time.
"""

import gzip
import shutil
import tarfile
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np

from fewlabel.data.npz import npz_arrays, npz_images
from fewlabel.data.published.files import cache
from fewlabel.data.published.pickled import unpickle
from fewlabel.data.raw import CHUNK, Part, Raw
from fewlabel.data.reading import reading, records

FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


# Fashion-MNIST: idx


def fashion_mnist(*paths: Path) -> Raw:
    """Read images and labels to train on, then those to test on."""
    return Raw(FASHION, {"train": idx(*paths[:2]), "test": idx(*paths[2:])})


def idx(images: Path, labels: Path) -> Part:
    with reading(labels), opened(labels) as file:
        (count,) = idx_shape(file, 1)
        label = np.frombuffer(file.read(), np.uint8).reshape(count)

    def read(_: int) -> Iterator[np.ndarray]:
        with reading(images), opened(images) as file:
            _, height, width = idx_shape(file, 3)
            yield from (rows.reshape(-1, 1, height, width) for rows in records(file, height * width))

    return Part(label, read)


def opened(path: Path) -> IO[bytes] | gzip.GzipFile:
    """Open a file that is packed, or was unpacked as torchvision does it."""
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def idx_shape(file: IO[bytes] | gzip.GzipFile, dimensions: int) -> tuple[int, ...]:
    if file.read(4) != bytes([0, 0, 8, dimensions]):
        raise ValueError(f"it does not begin as an idx file of bytes in {dimensions} dimensions")
    return tuple(np.frombuffer(file.read(4 * dimensions), ">u4").tolist())


# CIFAR: rows of label bytes and 3x32x32 pixels, or the same in pickles


def cifar_binary(path: Path, *, folder: str, train: Sequence[str], test: str, names: str, coarse: int) -> Raw:
    """Read rows of a label and an image. In CIFAR-100 (`coarse` = 1) a coarser label comes first."""
    unpacked = Unpacked(path, folder, [*train, test, names])

    def rows(members: Sequence[str]) -> Iterator[np.ndarray]:
        for member in members:
            with reading(path, member), unpacked.open(member) as file:
                yield from records(file, coarse + 1 + 3 * 32 * 32)

    def part(members: Sequence[str]) -> Part:
        label = np.concatenate([some[:, coarse] for some in rows(members)])
        return Part(label, lambda _: (some[:, coarse + 1 :].reshape(-1, 3, 32, 32) for some in rows(members)))

    with unpacked.open(names) as file:
        classes = tuple(file.read().decode().split())
    return Raw(classes, {"train": part(train), "test": part([test])})


def cifar_python(path: Path, *, folder: str, train: Sequence[str], test: str, meta: str, fine: str) -> Raw:
    """Read pickled dictionaries. Keys of CIFAR-100's labels begin with `fine`."""
    unpacked = Unpacked(path, folder, [*train, test, meta])

    def content(member: str) -> dict[bytes, Any]:
        with reading(path, member), unpacked.open(member) as file:
            return unpickle(file)

    def pixels(members: Sequence[str]) -> Iterator[np.ndarray]:
        for member in members:
            with reading(path, member):
                images = content(member)[b"data"].reshape(-1, 3, 32, 32)
                yield from (some for some in np.array_split(images, images.nbytes // CHUNK + 1) if len(some))

    def part(members: Sequence[str]) -> Part:
        with reading(path):
            label = np.concatenate([np.array(content(member)[f"{fine}labels".encode()]) for member in members])
        return Part(label, lambda _: pixels(members))

    with reading(path, meta):
        classes = tuple(name.decode() for name in content(meta)[f"{fine}label_names".encode()])
    return Raw(classes, {"train": part(train), "test": part([test])})


class Unpacked:
    """Some members of an archive, unpacked into files because they come in no order. Deleted when no longer used.

    A folder is an archive that somebody has unpacked already. It is left as it is.
    """

    def __init__(self, path: Path, folder: str, members: Sequence[str]) -> None:
        if path.is_dir():
            self._folder = path
            return
        with reading(path):
            cache().mkdir(parents=True, exist_ok=True)
            self._folder = Path(tempfile.mkdtemp(dir=cache(), prefix=".unpacked-"))
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            wanted = {f"{folder}/{member}": self._folder / member for member in members}
            with tarfile.open(path, "r|*") as tar:
                for entry in tar:
                    if entry.name in wanted and (packed := tar.extractfile(entry)):
                        with wanted.pop(entry.name).open("wb") as file:
                            shutil.copyfileobj(packed, file, CHUNK)
            if wanted:
                raise ValueError(f"{', '.join(wanted)} is not in it")

    def open(self, member: str) -> IO[bytes]:
        return (self._folder / member).open("rb")


# SVHN: MATLAB arrays of 32x32x3xN


def svhn(train: Path, test: Path) -> Raw:
    """Read the cropped digits. The digit 0 is published with the label 10."""
    return Raw(tuple("0123456789"), {"train": svhn_part(train), "test": svhn_part(test)})


def svhn_part(path: Path) -> Part:
    from scipy.io import loadmat

    with reading(path):
        label = loadmat(path, variable_names=["y"])["y"].ravel() % 10

    def read(_: int) -> Iterator[np.ndarray]:
        with reading(path):
            images = loadmat(path, variable_names=["X"])["X"]
            step = max(1, CHUNK // images[..., 0].nbytes)
            for start in range(0, images.shape[3], step):
                yield images[..., start : start + step].transpose(3, 2, 0, 1)

    return Part(label, read)


# MedMNIST: npz with train, val and test


def medmnist(path: Path, *, classes: tuple[str, ...]) -> Raw:
    """Read one of MedMNIST's sets."""
    with npz_arrays(path) as arrays:
        labels = {split: arrays[f"{split}_labels"].reshape(-1) for split in ("train", "val", "test")}
    names = {"train": "train", "validation": "val", "test": "test"}
    parts = {name: Part(labels[split], partial(npz_images, path, f"{split}_images")) for name, split in names.items()}
    return Raw(classes, parts)
