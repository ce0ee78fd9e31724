"""Images of one's own: a folder for each class, a table of files, an npz or DICOM, listed first and opened later.

What is listed names its label, split, client and patient as people wrote them; numbers come in with `read`.
"""

import csv
import hashlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fewlabel.data import pictures
from fewlabel.data.pictures import Unreadable
from fewlabel.data.published import npz_images, reading
from fewlabel.data.raw import CHUNK, Part, Raw
from fewlabel.errors import BadInput, StorageError

KINDS = {
    "folder": "your own images: data.path is a folder with a folder for each class, and `unlabeled` for the rest",
    "csv": "your own images: data.path is a table with columns image and label, perhaps client, patient and split",
    "npz": "your own arrays: data.path is an npz with MedMNIST's train_images, train_labels, test_images, ...",
    "dicom": "your own DICOM files: data.path is a folder or a table, as for `folder` and `csv`",
}
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation", "test": "test"}
UNLABELED = ("unlabeled", "unlabelled")
CLASSES = "classes.txt"  # beside the images: all classes in their order, also those that this site does not have
COLUMNS = {
    "image": ("image", "path", "file", "filename", "image_id"),
    "label": ("label", "class", "dx"),
    "client": ("client", "hospital", "site"),
    "patient": ("patient", "patient_id", "lesion_id"),
    "split": ("split",),
}


@dataclass(frozen=True)
class Item:
    """One image, not yet opened; what nobody knows of it is empty."""

    file: Path
    name: str  # as people are told it
    label: str = ""
    split: str = ""
    client: str = ""
    patient: str = ""


@dataclass(frozen=True)
class Found:
    kind: str
    path: Path
    items: tuple[Item, ...]
    classes: tuple[str, ...]
    strays: tuple[str, ...] = ()  # files that are no images

    @property
    def splits(self) -> list[str]:
        return [split for split in ("train", "validation", "test") if any(item.split == split for item in self.items)]


def find(kind: str, path: Path | str | None, columns: Mapping[str, str] | None = None) -> Found:
    """What lies at a path; no image is opened."""
    if path is None:
        raise BadInput(f"data.name = '{kind}' needs data.path, where the images are")
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInput(f"there is nothing at {path}, where data.path says that the images are")
    if kind == "folder" or (kind == "dicom" and path.is_dir()):
        found = folder(path, kind)
    elif path.is_dir():
        raise BadInput(f"{path} is a folder, and data.name = '{kind}' needs a file; did you mean 'folder'?")
    elif kind == "npz":
        found = npz(path)
    else:
        found = table(path, kind, columns or {})
    if not found.items:
        raise BadInput(f"there are no images in {path}")
    return found


def guess(path: Path) -> str:
    """The kind that a path looks like."""
    return "folder" if path.is_dir() else {".npz": "npz"}.get(path.suffix.lower(), "csv")


# A folder


def folder(path: Path, kind: str) -> Found:
    """Below an optional level of splits a folder for each class, in which images lie at any depth."""
    if not path.is_dir():
        raise BadInput(f"{path} is a file, and data.name = '{kind}' needs a folder")
    named = named_classes(path)
    known = {name: label for label, name in folders(named).items()}
    items, strays = list[Item](), list[str]()
    for split, entry in tops(path):
        for file in files_below(entry):
            name = str(file.relative_to(path))
            if not is_image(file, kind):
                strays += [name] if name != CLASSES else []
            elif file == entry:
                raise BadInput(f"{file} lies in no class's folder; put it into one, or into 'unlabeled'")
            else:
                label = "" if entry.name.lower() in UNLABELED else known.get(entry.name, entry.name)
                items.append(Item(file, name, label, split))
    return Found(kind, path, tuple(items), classes_of(items, named, path / CLASSES), tuple(strays))


def tops(path: Path) -> list[tuple[str, Path]]:
    """The folders of classes, each with its split where all lie in folders of splits."""
    entries = below(path)
    levels = {entry.name.lower() for entry in entries if entry.is_dir()}
    if "train" not in levels or not levels <= {*SPLITS, *UNLABELED}:
        return [("", entry) for entry in entries]
    inside = [
        (SPLITS[top.name.lower()], entry) for top in entries if top.name.lower() in SPLITS for entry in below(top)
    ]
    return inside + [("train", top) for top in entries if top.name.lower() not in SPLITS]


def below(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from None


def files_below(path: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """All files at any depth, links followed, but never in a circle."""
    if not path.is_dir():
        yield path
    elif (real := os.path.realpath(path)) not in above:
        for entry in below(path):
            yield from files_below(entry, above | {real})


def is_image(file: Path, kind: str) -> bool:
    return (kind != "dicom" and file.suffix.lower() in pictures.SUFFIXES) or pictures.is_dicom(file)


def folders(classes: Sequence[str]) -> dict[str, str]:
    """A folder's name for each class: its own, unless a disk or the words with a meaning here forbid it."""
    names: dict[str, str] = {}
    for label in classes:
        name = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "-", label).strip(". ") or "class"
        while name.lower() in {*SPLITS, *UNLABELED, *map(str.lower, names.values())}:
            name = f"{name}-"
        names[label] = name
    return names


# A table


def table(path: Path, kind: str, columns: Mapping[str, str]) -> Found:
    """A row for each image, whose path is relative to the table's own folder."""
    try:
        text = path.read_text("utf-8-sig")
        head = text.partition("\n")[0]
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t", key=head.count), strict=True))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} is not a table in UTF-8 text: {error}") from None
    names = [name.strip() for name in rows[0]] if rows else []
    place = {role: column(path, role, names, columns.get(role)) for role in COLUMNS}
    if wrong := sorted(columns.keys() - COLUMNS.keys()):
        raise BadInput(f"there is no data.columns.{wrong[0]}; there are {', '.join(COLUMNS)}")
    items = []
    for number, row in enumerate(rows[1:], 2):
        if not any(row):
            continue
        found = {role: row[at].strip() for role, at in place.items() if at is not None and at < len(row)}
        name = found.pop("image", "")
        if not name:
            raise BadInput(f"row {number} of {path} names no image")
        if (split := found.pop("split", "").lower()) not in {"", *SPLITS}:
            raise BadInput(f"row {number} of {path} has the split '{split}'; it may be train, validation or test")
        items.append(Item(ending(path.parent / name, kind), name, split=SPLITS.get(split, ""), **found))
    unsplit = [item.name for item in items if not item.split]
    if unsplit and len(unsplit) < len(items):
        raise BadInput(
            f"{len(unsplit)} of {len(items)} rows of {path} have no split, such as {unsplit[0]}: all or none"
        )
    return Found(kind, path, tuple(items), classes_of(items, named_classes(path.parent), path.parent / CLASSES))


def column(path: Path, role: str, names: Sequence[str], wanted: str | None) -> int | None:
    """Where a table has what it says of an image: in the column that was named, or in one of the usual names."""
    lower = [name.lower() for name in names]
    for name in [wanted.strip().lower()] if wanted is not None else COLUMNS[role]:
        if name in lower:
            return lower.index(name)
    if wanted is None and role not in ("image", "label"):
        return None
    usual = f"'{wanted}'" if wanted is not None else f"named {' or '.join(COLUMNS[role])}"
    raise BadInput(
        f"{path} has no column {usual} for the {role}; there are {', '.join(names) or 'none'}, "
        f"of which data.columns.{role} may name one"
    )


def ending(file: Path, kind: str) -> Path:
    """A file; tables often leave out how its name ends."""
    if file.exists():
        return file
    endings = pictures.DICOM if kind == "dicom" else (*pictures.SUFFIXES, *pictures.DICOM)
    return next((whole for end in endings if (whole := file.with_name(file.name + end)).exists()), file)


# An npz


def npz(path: Path) -> Found:
    """MedMNIST's keys; a label below 0 is unknown, and `classes` may hold the names of the others."""
    with reading(path), np.load(path, allow_pickle=False) as arrays:
        keys = getattr(arrays, "files", [])
        labels = {name: arrays[f"{name}_labels"] for name in ("train", "val", "test") if f"{name}_images" in keys}
        named = tuple(map(str, arrays["classes"])) if "classes" in keys else ()
    if not labels:
        raise BadInput(f"{path} has no train_images and train_labels; it has {', '.join(keys) or 'a single array'}")
    for name, label in labels.items():
        if label.size != len(label) or label.dtype.kind not in "iub":
            raise BadInput(f"{name}_labels in {path} must be whole numbers, one for each image")
    count = max(int(label.max(initial=0)) for label in labels.values()) + 1
    if named and count > len(named):
        raise BadInput(f"{path} has the label {count - 1}, but names only {len(named)} classes")
    named = named or tuple(map(str, range(count)))
    items = (
        Item(path, f"{name}_images[{row}]", named[number] if number >= 0 else "", SPLITS[name])
        for name, label in labels.items()
        for row, number in enumerate(label.ravel().tolist())
    )
    return Found("npz", path, tuple(items), named)


# What is common


def named_classes(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in (path / CLASSES).read_text("utf-8-sig").splitlines() if line.strip())
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path / CLASSES} cannot be read: {error}") from None


def classes_of(items: Iterable[Item], named: tuple[str, ...], where: Path) -> tuple[str, ...]:
    """Classes in the order that was named, or by number where they are numbers, or by name."""
    labels = {item.label for item in items} - {""}
    if named and (unnamed := sorted(labels - set(named))):
        raise BadInput(f"there are images of '{unnamed[0]}', a class that {where} does not name")
    numbers = all(re.fullmatch(r"-?\d{1,18}", label) for label in labels)
    return named or tuple(sorted(labels, key=lambda label: (int(label) if numbers else 0, label)))


def fingerprint(found: Found) -> str:
    """Another one as soon as a file, its size, its time, or what is said of it has changed."""
    digest = hashlib.blake2b(repr((found.kind, os.path.abspath(found.path), found.classes)).encode(), digest_size=8)
    for item in found.items if found.kind != "npz" else [Item(found.path, "")]:
        try:
            stat = item.file.stat()
            version = stat.st_size, stat.st_mtime_ns
        except OSError:
            version = -1, -1
        said = (item.name, item.label, item.split, item.client, item.patient)
        digest.update(repr((said, version)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def content(file: Path) -> str:
    """Equal for files of equal bytes."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def read(found: Found, skip: bool = False) -> Raw:
    """The data set that was found: with its own splits, or for splits to be drawn that part no patient's images."""
    if len(found.classes) < 2:
        names = ", ".join(found.classes) or "none"
        raise BadInput(f"a run needs two classes or more; the labels in {found.path} name {names}")
    if found.splits and not {"train", "test"} <= set(found.splits):
        raise BadInput(
            f"{found.path} has {' and '.join(found.splits)} images, but a run needs train and test; "
            "without any splits they are drawn"
        )
    blind = [item.name for item in found.items if item.split in ("validation", "test") and not item.label]
    if blind:
        raise BadInput(
            f"{len(blind)} images to validate or test on have no label, such as {blind[0]}; "
            "give them one, or put them among those to train on"
        )
    return Raw(found.classes, parts(found, skip))


def parts(found: Found, skip: bool = False) -> dict[str, Part]:
    """The images by their split, or all as one; unknown labels are -1."""
    if found.kind == "npz":
        keys = {split: name for name, split in SPLITS.items() if name in ("train", "val", "test")}
        return {
            split: Part(numbers(found, found.items, split), partial(npz_images, found.path, f"{keys[split]}_images"))
            for split in found.splits
        }
    items, colour, values = readable(found, skip)
    made = {}
    for split in found.splits or [""]:
        some = [item for item in items if item.split == split]
        clients = np.array([item.client for item in some])
        made[split or "all"] = Part(
            numbers(found, some, split),
            partial(pixels, found, some, colour, values),
            groups=np.array([f"patient {item.patient}" if item.patient else content(item.file) for item in some]),
            clients=clients if clients.astype(bool).any() else None,
        )
    return made


def numbers(found: Found, items: Iterable[Item], split: str) -> np.ndarray:
    number = {label: n for n, label in enumerate(found.classes)} | {"": -1}
    return np.array([number[item.label] for item in items if item.split == split], np.int64)


def readable(found: Found, skip: bool) -> tuple[list[Item], bool, tuple[float, float]]:
    """The images that can be read, whether one of them has colours, and the values that become black and white.

    Where unreadable ones are to be left out, each must be decoded to know; else headers will do.
    """
    items, headers, failed = [], [], []
    for item in found.items:
        try:
            headers.append(header := pictures.header(item.file))
            if skip:
                pictures.read(item.file, header.colour)
            items.append(replace(item, patient=item.patient or header.patient))
        except Unreadable as error:
            del headers[len(items) :]
            failed.append((item, error))
    if failed and not skip:
        raise refusal(found, *failed[0], count=len(failed))
    if not items:
        raise BadInput(
            f"none of the {len(failed)} images in {found.path} can be read; {failed[0][0].name}: {failed[0][1]}"
        )
    return items, any(header.colour for header in headers), pictures.span(headers)


def refusal(found: Found, item: Item, error: Unreadable, count: int = 1) -> BadInput:
    many = f"{count} of {len(found.items)} images cannot be read, such as" if count > 1 else "an image cannot be read:"
    return BadInput(
        f"{many} {item.name} ({error}); see all by `fewlabel data check {found.path}`, "
        "and leave them out by data.unreadable = 'skip'"
    )


def pixels(
    found: Found, items: Sequence[Item], colour: bool, values: tuple[float, float], size: int
) -> Iterator[np.ndarray]:
    """Images of one size, some at a time, each resized before the next is opened."""
    step = max(1, CHUNK // ((3 if colour else 1) * size * size))
    for start in range(0, len(items), step):
        some = []
        for item in items[start : start + step]:
            try:
                some.append(pictures.read(item.file, colour, values, size))
            except Unreadable as error:
                raise refusal(found, item, error) from None
        yield np.stack(some)
