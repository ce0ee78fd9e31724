"""The list of your own images, made before any of them is opened: their files, and what is known about each."""

import hashlib
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.raw import Scale

KINDS = {
    "folder": "your own images: data.path is a folder with a folder for each class, and `unlabeled` for the rest",
    "csv": "your own images: data.path is a table with columns image and label, perhaps client, patient and split",
    "npz": "your own arrays: data.path is an npz with MedMNIST's train_images, train_labels, test_images, ...",
    "dicom": "your own DICOM files: data.path is a folder or a table, as for `folder` and `csv`",
}
TABLES = ("csv", "dicom")  # kinds that may be a table
SPLITS = {"train": "train", "val": "validation", "test": "test"} | {  # MedMNIST's names, and other common ones
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "testing": "test",
}
UNLABELED = ("unlabeled", "unlabelled")
CLASSES = "classes.txt"  # beside the images: all classes in their order, even those that this site does not have
PATIENTS = "patients.csv"  # beside the images: the patient of each, where known


@dataclass(frozen=True)
class Item:
    """One image that is not opened yet. What is not known about it is empty."""

    file: Path
    name: str  # for messages
    label: str = ""
    split: str = ""
    client: str = ""
    patient: str = ""


@dataclass(frozen=True)
class Listing:
    """All images at a path, and what to tell about the other files there."""

    kind: str
    path: Path
    items: tuple[Item, ...]
    classes: tuple[str, ...]
    strays: tuple[str, ...] = ()  # files that are no images
    loose: tuple[str, ...] = ()  # images outside of every class's folder
    notes: tuple[str, ...] = ()  # what may be a mistake
    columns: Mapping[str, str] = field(default_factory=dict)
    scale: Scale | None = None  # the federation's, if all sites share one

    @property
    def splits(self) -> list[str]:
        return [split for split in ("train", "validation", "test") if any(item.split == split for item in self.items)]

    @property
    def command(self) -> str:
        """The command that lists everything that is wrong with these images."""
        options = [] if self.kind == guess_kind(self.path) else ["--kind", self.kind]
        options += [word for role, name in self.columns.items() for word in ("--column", f"{role}={name}")]
        return shlex.join(["fewlabel", "data", "check", str(self.path), *options])


def guess_kind(path: Path) -> str:
    """Guess from a path which kind of data it is."""
    return "folder" if path.expanduser().is_dir() else {".npz": "npz"}.get(path.suffix.lower(), "csv")


def counted(count: int, what: str) -> str:
    """Return a number and its noun, as in "1 image" and "2 images"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def last_answers(given: Iterable[tuple[str, str, str]]) -> dict[str, list[str]]:
    """Return the different labels of each image, from rows of image, person and label: each person's last one counts.

    An image without any label has an empty list.
    """
    last: dict[str, dict[str, str]] = {}
    for image, who, label in given:
        last.setdefault(image, {})[who] = label
    return {image: list(dict.fromkeys(filter(None, each.values()))) for image, each in last.items()}


def classes_of(items: Iterable[Item], named: tuple[str, ...], where: Path) -> tuple[str, ...]:
    """Return the classes: in the order of `named`, or else by number if all are numbers, or else by name."""
    labels = {item.label for item in items} - {""}
    if named and (unnamed := sorted(labels - set(named))):
        raise BadInput(f"there are images of '{unnamed[0]}', a class that {where} does not name")
    numbers = all(re.fullmatch(r"-?\d{1,18}", label) for label in labels)
    return named or tuple(sorted(labels, key=lambda label: (int(label) if numbers else 0, label)))


def read_classes(path: Path) -> tuple[str, ...]:
    """Read classes.txt in a folder; without that file there are none."""
    try:
        lines = (path / CLASSES).read_text("utf-8-sig").splitlines()
        named = tuple(line.strip() for line in lines if line.strip())
        refuse_repeated(named, path / CLASSES)
        return named
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path / CLASSES} cannot be read: {error}") from None


def refuse_repeated(named: Sequence[str], where: Path | str) -> None:
    if twice := [name for name in named if named.count(name) > 1]:
        raise BadInput(f"{where} names the class '{twice[0]}' {named.count(twice[0])} times; name each once")


def folder_names(classes: Sequence[str]) -> dict[str, str]:
    """Return a folder name for each class: its own name, changed if disks forbid it or it has a meaning here."""
    names: dict[str, str] = {}
    for label in classes:
        name = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "-", label).strip(". ") or "class"
        while name.lower() in {*SPLITS, *UNLABELED, *map(str.lower, names.values())}:
            name = f"{name}-"
        names[label] = name
    return names


def refuse_loose(listing: Listing) -> None:
    """Refuse images that lie outside of every class's folder."""
    if listing.loose:
        more = f", as {counted(len(listing.loose) - 1, 'more image')}" if len(listing.loose) > 1 else ""
        raise BadInput(
            f"{listing.path / listing.loose[0]} lies in no class's folder{more}; put it into one, or into 'unlabeled'"
        )


def undivided(listing: Listing, classes: tuple[str, ...], scale: Scale | None = None) -> Listing:
    """Return a site's images as one set to train on, in the order of their files' names whatever folder they lie in.

    A site need not have images of all classes, and may have no labels at all. Images that its folders, its table or its
    npz keep for testing stay apart.
    """
    known = {name: label for label, name in folder_names(classes).items()} | {label: label for label in ("", *classes)}
    if unknown := sorted({item.label for item in listing.items} - known.keys()):
        raise BadInput(
            f"{listing.path} has images of {', '.join(map(repr, unknown))}, "
            f"which {'is no class' if len(unknown) == 1 else 'are no classes'} of this federation; "
            f"it has {', '.join(classes)}"
        )
    sides = {"": "train", "train": "train", "test": "test"}
    items = [replace(i, split=sides[i.split], label=known[i.label]) for i in listing.items if i.split in sides]
    if not any(item.split == "train" for item in items):
        raise BadInput(f"{listing.path} has no images to train on; put some beside those to validate and test on")
    if all(item.split == "train" for item in items):
        items = [replace(item, split="") for item in items]
    if listing.kind != "npz":
        items.sort(key=lambda item: (item.file.name, item.name))
    return replace(listing, items=tuple(items), classes=classes, scale=scale)


def fingerprint(listing: Listing) -> str:
    """Return a text that changes with any file, its size, its time, or what is known about it."""
    whole: tuple[object, ...] = (2, listing.kind, os.path.abspath(listing.path), listing.classes, listing.loose)
    whole += (listing.scale,) if listing.scale else ()  # 2: raise it when images are read in another way
    digest = hashlib.blake2b(repr(whole).encode("utf-8", "surrogateescape"), digest_size=8)
    for item in listing.items if listing.kind != "npz" else [Item(listing.path, "")]:
        try:
            stat = item.file.stat()
            version = stat.st_size, stat.st_mtime_ns
        except OSError:
            version = -1, -1
        known = (item.name, item.label, item.split, item.client, item.patient)
        digest.update(repr((known, version)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()
