"""Write each client's images as the files of a site, with the labels that it has and no trace of the others."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.rng import Rng
from fewlabel.data.added import overlaid
from fewlabel.data.own.listing import CLASSES, PATIENTS, UNLABELED, folder_names
from fewlabel.data.raw import CHUNK, Scale

if TYPE_CHECKING:
    from fewlabel.data.datasets import Dataset
    from fewlabel.data.partition import Partition


TERMS = "terms.json"
MAX_SIZE = 4096  # of an image's side, in pixels


@dataclass(frozen=True)
class Terms:
    """How all sites of a federation read their images. They must agree on it to train one model.

    Labels are matched by the names of classes, and a site need not have all of them. Without mean and std the server
    asks all sites for their `Pixels` before the first round. Images of more than eight bits need `values`: if each site
    took its own scale, the same brightness would mean different things. Without a `window`, each DICOM file is shown as
    a viewer shows it.
    """

    classes: tuple[str, ...]  # in their order
    channels: int
    image_size: int
    mean: tuple[float, ...] | None = None  # per channel, for pixels in 0..1
    std: tuple[float, ...] | None = None
    values: tuple[float, ...] | None = None  # that become 0 and 255, for images of more than eight bits
    window: tuple[float, ...] | None = None  # centre and width of what is shown of DICOM, in its rescaled values

    def __post_init__(self) -> None:
        if len(set(self.classes)) < max(2, len(self.classes)):
            raise BadInput(
                f"a federation has two classes or more, each once; found {', '.join(self.classes) or 'none'}"
            )
        if self.channels < 1 or not 0 < self.image_size <= MAX_SIZE:
            raise BadInput(
                f"images have a channel or more and a size up to {MAX_SIZE}, not {self.channels} and {self.image_size}"
            )
        if (self.mean is None) != (self.std is None) or {len(m) for m in (self.mean, self.std) if m} - {self.channels}:
            raise BadInput(f"mean and std are {self.channels} numbers each, one for a channel, or neither is given")
        if not all(deviation > 0 for deviation in self.std or ()):
            raise BadInput("each std must be above 0")
        if self.values is not None and not (len(self.values) == 2 and self.values[0] < self.values[1]):
            raise BadInput("values are two numbers, which become black and white, such as [0, 4095]")
        if self.window is not None and not (len(self.window) == 2 and self.window[1] > 1):
            raise BadInput("a window is two numbers, its centre and its width, such as [40, 400]")

    @classmethod
    def of(cls, dataset: "Dataset") -> "Terms":
        images = dataset.splits["train"].images
        return cls(dataset.classes, dataset.channels, dataset.image_size, images.mean, images.std, **dataset.scale)

    @property
    def scale(self) -> Scale:
        given = {"values": self.values, "window": self.window}
        return {name: (pair[0], pair[1]) for name, pair in given.items() if pair is not None}

    def settled(self, parts: "Iterable[Pixels]") -> "Terms":
        """Return these terms with the mean and std of all pixels."""
        mean, std = moments(parts)
        return replace(self, mean=mean, std=std)


@dataclass(frozen=True)
class Pixels:
    """What a site tells about its pixels, so that the server knows mean and std of all: exact sums for each channel.

    They reveal how bright its images are on average and how much that varies, so they are sent only if asked for.
    """

    count: int  # in one channel
    total: tuple[int, ...]  # of values in 0..255
    squares: tuple[int, ...]

    @classmethod
    def of(cls, pixels: np.ndarray) -> "Pixels":
        """Sum up images uint8 [N, C, H, W]."""
        count, total, squares = 0, np.zeros(pixels.shape[1], np.int64), np.zeros(pixels.shape[1], np.int64)
        for some in np.array_split(pixels, pixels.nbytes // CHUNK + 1):
            channels = some.swapaxes(0, 1).reshape(len(total), -1).astype(np.int64)
            count, total, squares = count + channels.shape[1], total + channels.sum(1), squares + (channels**2).sum(1)
        return cls(count, tuple(total.tolist()), tuple(squares.tolist()))

    def check(self, terms: Terms, images: int) -> None:
        """Raise BadInput if these cannot be the sums of so many images."""
        sums = list(zip(self.total, self.squares, strict=False))
        possible = all(s >= 0 and s * s <= self.count * q and q <= 255 * s for s, q in sums)
        if len(self.total) != terms.channels or len(self.squares) != terms.channels or not possible:
            raise BadInput(f"its sums are not those of pixels in {terms.channels} channels")
        if self.count != images * terms.image_size**2:
            raise BadInput(f"it sums {self.count} pixels, but {images} images have {images * terms.image_size**2}")


def moments(parts: Iterable[Pixels]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel over all parts, for pixels in 0..1, exact but for rounding."""
    parts = list(parts)
    count = sum(part.count for part in parts)
    total, squares = (
        [sum(of) for of in zip(*sums, strict=True)] for sums in ([p.total for p in parts], [p.squares for p in parts])
    )
    mean = tuple(s / (255 * count) for s in total)
    variance = [(count * q - s * s) / (255 * count) ** 2 for s, q in zip(total, squares, strict=True)]
    return mean, tuple(max(math.sqrt(v), 1e-6) for v in variance)


@dataclass(frozen=True)
class WrittenSite:
    """Where a site was written, and how many images it has."""

    path: Path
    labeled: int
    unlabeled: int

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "labeled": self.labeled, "unlabeled": self.unlabeled}


def write(dataset: "Dataset", partition: "Partition", to: Path, kind: str, seed: int) -> list[WrittenSite]:
    """Write a folder or an npz for each client, the server, the validation and the test set, and their terms."""
    if to.exists() and not to.is_dir():
        raise BadInput(f"{to} is a file; --to needs a directory that is empty or new")
    try:
        to.mkdir(parents=True, exist_ok=True)
        if any(to.iterdir()):
            raise BadInput(f"{to} is not empty; choose another directory by --to")
        written = []
        for name, pixels, labels, groups in sites(dataset, partition):
            order = mixed_order(labels, Rng(seed, "write", name))
            path = to / (f"{name}.npz" if kind == "npz" else name)
            patients = None if groups is None else renumbered(groups[order])
            writer = write_npz if kind == "npz" else write_folder
            writer(path, pixels[order], labels[order], dataset.classes, patients)
            written.append(WrittenSite(path, int((labels >= 0).sum()), int((labels < 0).sum())))
        (to / TERMS).write_text(json.dumps(vars(Terms.of(dataset)), indent=1))
        return written
    except OSError as error:
        raise StorageError(f"{to} cannot be written: {error.strerror or error}") from None


def mixed_order(labels: np.ndarray, rng: Rng) -> np.ndarray:
    """Return an order in which images with and without labels are mixed, each kind in the order of the partition.

    The partition's order is random, so the names of files reveal nothing. A simulation trains in it, so the site does,
    too.
    """
    known, order = labels >= 0, np.empty(len(labels), np.int64)
    place = rng.numpy.permutation(known)
    order[place], order[~place] = np.flatnonzero(known), np.flatnonzero(~known)
    return order


def renumbered(groups: np.ndarray) -> np.ndarray | None:
    """Number the patients in the order of the images, because their own numbers might reveal classes.

    Return None if each has one image. Two copies of an image count as one patient with two images.
    """
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return None if len(first) == len(groups) else np.argsort(np.argsort(first))[group]


Site = tuple[str, np.ndarray, np.ndarray, np.ndarray | None]


def sites(dataset: "Dataset", partition: "Partition") -> Iterator[Site]:
    """Return each site's name, its pixels, its labels (-1: unknown) and the groups of its images."""
    train = dataset.splits["train"]
    group = None if train.groups is None else train.groups.numpy()

    def groups(index: np.ndarray) -> np.ndarray | None:
        return None if group is None else group[index]

    pixels = train.images.pixels.numpy()
    labels = overlaid(train.labels.numpy(), partition.noise, partition.added)
    for client in partition.clients:
        holding = partition.shares[client]
        yield (
            f"client-{client}",
            pixels[holding.images],
            np.append(labels[holding.labeled], np.full(len(holding.unlabeled), -1)),
            groups(holding.images),
        )
    for name, index in (("server", partition.server), ("validation", partition.validation)):
        if len(index):
            yield name, pixels[index], labels[index], groups(index)
    for name, split in dataset.splits.items():
        if name != "train":
            whole = None if split.groups is None else split.groups.numpy()
            yield name, split.images.pixels.numpy(), split.labels.numpy(), whole


def write_folder(
    path: Path, pixels: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], patients: np.ndarray | None
) -> None:
    """Write PNG files by class, with a list of all classes, of which a site may lack some, and of patients if known."""
    from PIL import Image

    names = [*folder_names(classes).values(), UNLABELED[0]]  # -1 is the last
    path.mkdir()
    (path / CLASSES).write_text("".join(f"{name}\n" for name in classes), "utf-8")
    files = [f"{names[label]}/{number:06d}.png" for number, label in enumerate(labels)]
    if patients is not None:
        rows = ["image,patient", *(f'"{file}",{patient}' for file, patient in zip(files, patients, strict=True))]
        (path / PATIENTS).write_text("".join(f"{row}\n" for row in rows), "utf-8")
    for file, image in zip(files, pixels, strict=True):
        (path / file).parent.mkdir(exist_ok=True)
        flat = image[0] if len(image) == 1 else image.transpose(1, 2, 0)
        Image.fromarray(np.ascontiguousarray(flat)).save(path / file, compress_level=1)


def write_npz(
    path: Path, pixels: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], patients: np.ndarray | None
) -> None:
    """Write MedMNIST's keys, the names of classes, and patients if known. -1 is a label that the site does not have."""
    split = path.stem if path.stem == "test" else "val" if path.stem == "validation" else "train"
    flat = pixels[:, 0] if pixels.shape[1] == 1 else pixels.transpose(0, 2, 3, 1)
    arrays = {f"{split}_images": np.ascontiguousarray(flat), f"{split}_labels": labels, "classes": np.array(classes)}
    if patients is not None:
        arrays[f"{split}_patients"] = patients
    np.savez_compressed(path, allow_pickle=False, **arrays)
