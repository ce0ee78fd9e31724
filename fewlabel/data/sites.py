"""Each client's share as files of its own, with the labels that it has and no trace of the others."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewlabel.data.own import CLASSES, PATIENTS, UNLABELED, folders
from fewlabel.errors import BadInput, StorageError
from fewlabel.rng import Rng

if TYPE_CHECKING:
    from fewlabel.data.datasets import Dataset
    from fewlabel.data.partition import Partition


TERMS = "terms.json"


@dataclass(frozen=True)
class Terms:
    """What all sites of a federation must read alike, or they would not train one model."""

    classes: tuple[str, ...]  # in their order
    channels: int
    image_size: int
    mean: tuple[float, ...]  # per channel, of pixels in 0..1
    std: tuple[float, ...]

    @classmethod
    def of(cls, dataset: "Dataset") -> "Terms":
        images = dataset.splits["train"].images
        return cls(dataset.classes, dataset.channels, dataset.image_size, images.mean, images.std)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(vars(self), indent=1))


@dataclass(frozen=True)
class Written:
    """A site as it was written."""

    path: Path
    labeled: int
    unlabeled: int

    def to_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "labeled": self.labeled, "unlabeled": self.unlabeled}


def write(dataset: "Dataset", partition: "Partition", to: Path, kind: str, seed: int) -> list[Written]:
    """A folder or an npz for each client, the server, the validation and the test set; and their common terms."""
    if to.exists() and not to.is_dir():
        raise BadInput(f"{to} is a file; --to needs a directory, an empty or new one")
    try:
        to.mkdir(parents=True, exist_ok=True)
        if any(to.iterdir()):
            raise BadInput(f"{to} is not empty; choose another directory by --to")
        written = []
        for name, pixels, labels, groups in sites(dataset, partition):
            order = mixed(labels, Rng(seed, "write", name))
            path = to / (f"{name}.npz" if kind == "npz" else name)
            patients = None if groups is None else renumbered(groups[order])
            writer = write_npz if kind == "npz" else write_folder
            writer(path, pixels[order], labels[order], dataset.classes, patients)
            written.append(Written(path, int((labels >= 0).sum()), int((labels < 0).sum())))
        Terms.of(dataset).save(to / TERMS)
        return written
    except OSError as error:
        raise StorageError(f"{to} cannot be written: {error.strerror or error}") from None


def mixed(labels: np.ndarray, rng: Rng) -> np.ndarray:
    """An order in which images with and without labels come mixed, and each kind in the order of the share.

    That is a random one, so the names of files tell nothing of what is in them; and it is the one that a simulation
    trains in, so the site does too.
    """
    known, order = labels >= 0, np.empty(len(labels), np.int64)
    place = rng.numpy.permutation(known)
    order[place], order[~place] = np.flatnonzero(known), np.flatnonzero(~known)
    return order


def renumbered(groups: np.ndarray) -> np.ndarray | None:
    """Patients from 0 in the order in which they come, for their own might tell of classes; none if all have one image.

    Whoever has two copies of an image counts as one patient with two.
    """
    _, first, group = np.unique(groups, return_index=True, return_inverse=True)
    return None if len(first) == len(groups) else np.argsort(np.argsort(first))[group]


Site = tuple[str, np.ndarray, np.ndarray, np.ndarray | None]


def sites(dataset: "Dataset", partition: "Partition") -> Iterator[Site]:
    """For each site its pixels, its labels as it knows them, -1 where it does not and wrong where there is noise,
    and the groups of its images."""
    train = dataset.splits["train"]
    group = None if train.groups is None else train.groups.numpy()

    def groups(index: np.ndarray) -> np.ndarray | None:
        return None if group is None else group[index]

    pixels, told = train.images.pixels.numpy(), train.labels.numpy().copy()
    told[partition.noise[0]] = partition.noise[1]
    for client in partition.clients:
        share = partition.shares[client]
        yield (
            f"client-{client}",
            pixels[share.images],
            np.append(told[share.labeled], np.full(len(share.unlabeled), -1)),
            groups(share.images),
        )
    for name, index in (("server", partition.server), ("validation", partition.validation)):
        if len(index):
            yield name, pixels[index], told[index], groups(index)
    for name, split in dataset.splits.items():
        if name != "train":
            whole = None if split.groups is None else split.groups.numpy()
            yield name, split.images.pixels.numpy(), split.labels.numpy(), whole


def write_folder(
    path: Path, pixels: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], patients: np.ndarray | None
) -> None:
    """PNG files by class; beside them the classes, for a site may not have all, and the patients where known."""
    from PIL import Image

    names = [*folders(classes).values(), UNLABELED[0]]  # of which -1 is the last
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
    """MedMNIST's keys, classes' names, patients where known, and -1 for labels that the site does not have."""
    split = path.stem if path.stem == "test" else "val" if path.stem == "validation" else "train"
    flat = pixels[:, 0] if pixels.shape[1] == 1 else pixels.transpose(0, 2, 3, 1)
    arrays = {f"{split}_images": np.ascontiguousarray(flat), f"{split}_labels": labels, "classes": np.array(classes)}
    if patients is not None:
        arrays[f"{split}_patients"] = patients
    np.savez_compressed(path, allow_pickle=False, **arrays)
