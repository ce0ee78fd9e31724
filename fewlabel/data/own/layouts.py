"""The layouts that your own images may have: a folder for each class, the rows of a table, or an npz.

All functions here list what is there and open no image.
"""

import csv
import io
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data import pictures
from fewlabel.data.npz import npz_arrays, npz_shape
from fewlabel.data.own.listing import (
    CLASSES,
    PATIENTS,
    SPLITS,
    UNLABELED,
    Item,
    Listing,
    classes_of,
    folder_names,
    last_answers,
    read_classes,
    refuse_loose,
    refuse_repeated,
)

ALIEN = (".heic", ".heif", ".avif", ".jp2", ".j2k", ".jpf", ".jpx")  # images that Pillow may or may not read
COLUMNS = {
    "image": ("image", "path", "file", "filename", "image_id"),
    "label": ("label", "class", "dx"),
    "client": ("client", "hospital", "site"),
    "patient": ("patient", "patient_id", "lesion_id"),
    "split": ("split",),
}
MOST_UNNAMED = 1000  # classes that an npz may have without naming them, however few its images are


def list_images(
    kind: str, path: Path | str | None, columns: Mapping[str, str] | None = None, by: str = "data.columns."
) -> Listing:
    """List the images at a path. Messages name a table's column by the setting or option `by`."""
    if path is None:
        raise BadInput(f"data.name = '{kind}' needs data.path, where the images are")
    path = Path(path).expanduser()
    if not path.exists():
        raise BadInput(f"there is no file or folder {path}; give the place of your images (data.path in an experiment)")
    if kind == "folder" or (kind == "dicom" and path.is_dir()):
        listing = list_folder(path, kind)
    elif path.is_dir():
        raise BadInput(f"{path} is a folder, and data.name = '{kind}' needs a file; did you mean 'folder'?")
    elif kind == "npz":
        listing = list_npz(path)
    else:
        listing = list_table(path, kind, columns or {}, by)
    if not listing.items:
        refuse_loose(listing)
        raise BadInput(f"there are no images in {path}")
    return listing


# A folder


def list_folder(path: Path, kind: str) -> Listing:
    """List a folder for each class, in which images lie at any depth. Above them may be a folder for each split."""
    if not path.is_dir():
        raise BadInput(f"{path} is a file, and data.name = '{kind}' needs a folder")
    named, patients = read_classes(path), read_patients(path)
    known = {name: label for label, name in folder_names(named).items()}
    files = [file.relative_to(path) for file in files_below(path)]
    images = [file for file in files if is_image(path / file, kind)]
    no_images = set(files) - {*images, Path(CLASSES), Path(PATIENTS)}
    splits = has_splits(path, images)
    items, loose = list[Item](), list[str]()
    for file in images:
        top, *inside = file.parts
        split = SPLITS.get(top.lower(), "train") if splits else ""
        label, *inside = inside if top.lower() in SPLITS and splits else file.parts
        if inside:
            label = "" if label.lower() in UNLABELED else known.get(label, label)
            items.append(Item(path / file, str(file), label, split, patient=patients.get(file.as_posix(), "")))
        else:
            loose.append(str(file))
    return Listing(
        kind,
        path,
        tuple(items),
        classes_of(items, named, path / CLASSES),
        tuple(sorted(map(str, no_images))),
        tuple(loose),
        tuple(odd_folders(path, images, splits)),
    )


def has_splits(path: Path, images: Sequence[Path]) -> bool:
    """Return True if the folders that hold images are splits, not classes."""
    tops = {file.parts[0] for file in images if len(file.parts) > 1}
    splits = sorted(top for top in tops if top.lower() in SPLITS)
    others = sorted(top for top in tops if top.lower() not in {*SPLITS, *UNLABELED})
    if sites := [top for top in others if (path / top / CLASSES).exists()]:
        raise BadInput(
            f"{path} holds sites, not classes, because {sites[0]} has its own {CLASSES}; "
            f"give one site's folder, such as {path / sites[0]}"
        )
    if splits and others:
        raise BadInput(
            f"{path} has a folder {others[0]} beside {splits[0]}, which is the name of a split; "
            "make all folders there splits (train, validation, test), or all of them classes"
        )
    deep = {file.parts[:2] for file in images if len(file.parts) > 2 and file.parts[1].lower() in {*SPLITS, *UNLABELED}}
    if wrong := sorted(where for where in deep if where[0] in others):
        raise BadInput(
            f"{path.joinpath(*wrong[0])} lies below {wrong[0][0]}, which would be a class; "
            f"put it above the classes, or if {wrong[0][0]} is a site, give the folder of that site"
        )
    return bool(splits)


def odd_folders(path: Path, images: Sequence[Path], splits: bool) -> Iterator[str]:
    """Describe folders that a run can use, but that may be a mistake."""
    held = {path / above for file in images for above in file.parents}
    for parent in [path, *(top for top in below(path) if splits and top in held and top.name.lower() in SPLITS)]:
        for entry in below(parent):
            if entry.is_dir() and entry not in held:
                yield f"there are no images in the folder {entry.relative_to(path)}"
    inside: dict[str, set[str]] = {file.parts[0]: set() for file in images if not splits}
    for file in images:
        if not splits and len(file.parts) > 2:
            inside[file.parts[0]].add(file.parts[1])
    first, *others = inside.values() or [set()]
    if len(first) > 1 and others and all(some == first for some in others):
        yield (
            f"all classes have the same folders, such as {min(first)}: if these are the classes, "
            f"give the folder that holds them, such as {path / min(inside)}"
        )


def below(path: Path) -> list[Path]:
    try:
        return sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from None


def files_below(path: Path, above: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Find all files at any depth. Links are followed, but never in a circle."""
    if not path.is_dir():
        yield path
    elif (real := os.path.realpath(path)) not in above:
        for entry in below(path):
            yield from files_below(entry, above | {real})


def is_image(file: Path, kind: str) -> bool:
    if file.name.upper() == "DICOMDIR":  # a list of the files beside it
        return False
    return (kind != "dicom" and file.suffix.lower() in (*pictures.SUFFIXES, *ALIEN)) or pictures.is_dicom(file)


def read_patients(path: Path) -> dict[str, str]:
    """Read patients.csv in a folder: the patient of each image by its path. Without that file there are none."""
    if not (path / PATIENTS).exists():
        return {}
    (_, names), *rows = rows_of(path / PATIENTS) or [(1, [])]
    if names[:2] != ["image", "patient"] or any(len(row) < 2 for _, row in rows):
        raise BadInput(f"{path / PATIENTS} must have the columns image and patient; correct it, or delete it")
    return {row[0]: row[1] for _, row in rows}


# A table


def list_table(path: Path, kind: str, columns: Mapping[str, str], by: str) -> Listing:
    """List the rows of a table. The path of each image is relative to the table's folder."""
    (_, head), *rows = rows_of(path) or [(1, [])]
    names = [name.strip() for name in head]
    lower = [name.lower() for name in names]
    if twice := [name for name in names if name and lower.count(name.lower()) > 1]:
        raise BadInput(f"{path} has several columns '{twice[0]}'; rename all but one")
    place = {role: column(path, role, names, columns.get(role), by) for role in COLUMNS}
    if wrong := sorted(columns.keys() - COLUMNS.keys()):
        raise BadInput(f"there is no {by}{wrong[0]}; there are {', '.join(COLUMNS)}")
    items = []
    for line, row in rows:
        if len(row) < len(names) or any(map(str.strip, row[len(names) :])):
            raise BadInput(
                f"line {line} of {path} has {len(row)} fields for {len(names)} columns; "
                "a field that contains a separator needs quotes"
            )
        found = {role: row[at].strip() for role, at in place.items() if at is not None}
        name = found.pop("image")
        if not name:
            raise BadInput(f"line {line} of {path} names no image")
        if (split := found.pop("split", "").lower()) not in {"", *SPLITS}:
            raise BadInput(f"line {line} of {path} has the split '{split}'; it may be train, validation or test")
        if found["label"].lower() in UNLABELED:
            found["label"] = ""
        items.append(Item(file_of(path.parent, name, kind), name, split=SPLITS.get(split, ""), **found))
    if {"who", "when"} <= set(lower):  # people's answers, as `fewlabel label` writes them
        items = answered(items, [row[lower.index("who")].strip() for _, row in rows])
    unsplit = [item.name for item in items if not item.split]
    if unsplit and len(unsplit) < len(items):
        raise BadInput(
            f"{len(unsplit)} of {len(items)} rows of {path} have no split, such as {unsplit[0]}: all or none"
        )
    if items and not any(item.file.exists() for item in items):
        raise BadInput(
            f"none of the {len(items)} files exist below {path.parent}, such as {items[0].name}; "
            "paths are relative to the table"
        )
    classes = classes_of(items, read_classes(path.parent), path.parent / CLASSES)
    return Listing(kind, path, tuple(items), classes, columns=columns)


def answered(items: Sequence[Item], who: Sequence[str]) -> list[Item]:
    """Return an item for each different label that people gave an image in the end, or one without a label."""
    given = [(item.name, person, item.label) for item, person in zip(items, who, strict=True)]
    about, labels = {item.name: item for item in items}, last_answers(given)
    return [replace(about[name], label=label) for name, some in labels.items() for label in some or [""]]


def rows_of(path: Path) -> list[tuple[int, list[str]]]:
    """Read the rows that are not blank, with their line numbers. The first line tells what separates fields."""
    try:
        text = path.read_text("utf-8-sig")
        head = text.partition("\n")[0]
        separator = re.fullmatch(r'"?sep=(.)"?\s*', head, re.IGNORECASE)  # as Excel writes it
        delimiter = separator[1] if separator else max(",;\t", key=head.count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        text, rows = "\0", []
    except (csv.Error, TypeError, ValueError) as error:
        raise BadInput(f"{path} is not a table of text: {error}") from None
    if "\0" in text:
        raise BadInput(f"{path} is not a table in UTF-8, but perhaps in Latin-1, UTF-16 or Excel's; save it as UTF-8")
    return rows[1:] if separator else rows


def column(path: Path, role: str, names: Sequence[str], wanted: str | None, by: str) -> int | None:
    """Find a column: the one that is `wanted`, or else one of the usual names."""
    lower = [name.lower() for name in names]
    for name in [wanted.strip().lower()] if wanted is not None else COLUMNS[role]:
        if name in lower:
            return lower.index(name)
    if wanted is None and role not in ("image", "label"):
        return None
    usual = f"'{wanted}'" if wanted is not None else f"named {' or '.join(COLUMNS[role])}"
    raise BadInput(
        f"{path} has no column {usual} for the {role}; there are {', '.join(names) or 'none'}, "
        f"of which {by}{role}=… may name one"
    )


def file_of(folder: Path, name: str, kind: str) -> Path:
    """Find the file that a table names. Tables often leave out its suffix, and those of Windows write backslashes."""
    endings = pictures.DICOM if kind == "dicom" else (*pictures.SUFFIXES, *pictures.DICOM)
    names = dict.fromkeys([name, name.replace("\\", "/")])
    files = (folder / f"{written}{end}" for written in names for end in ("", *endings))
    return next((file for file in files if file.exists()), folder / name)


# An npz


def list_npz(path: Path) -> Listing:
    """List the images of an npz with MedMNIST's keys. A label below 0 is unknown.

    It may also hold `classes`, their names, and the patients. If it has only one split, as at a site, its images count
    as not split.
    """
    with npz_arrays(path) as arrays:
        keys = arrays.files
        there = [name for name in ("train", "val", "test") if f"{name}_images" in keys]
        labels = {name: arrays[f"{name}_labels"] for name in there if f"{name}_labels" in keys}
        named = tuple(arrays["classes"].astype(str).ravel().tolist()) if "classes" in keys else ()
        patients = {n: arrays[f"{n}_patients"].astype(str).ravel() for n in there if f"{n}_patients" in keys}
    if len(labels) < max(1, len(there)):
        lacks = next((name for name in there if name not in labels), "train")
        raise BadInput(f"{path} has no {lacks}_images and {lacks}_labels; it has {', '.join(keys) or 'no array'}")
    refuse_repeated(named, f"'classes' in {path}")
    shapes = {name: npz_shape(path, f"{name}_images") for name in labels}
    for name, label in labels.items():
        if not label.ndim or label.size != len(label) or label.dtype.kind not in "iub":
            raise BadInput(f"{name}_labels in {path} must be whole numbers, one for each image")
        for what, given in (("labels", label), ("patients", patients.get(name, label))):
            if len(given) != shapes[name][0]:
                raise BadInput(f"{path} has {shapes[name][0]} {name} images, but {len(given)} {what} for them")
    if len({shape[3] for shape in shapes.values()}) > 1:
        channels = ", ".join(f"{shape[3]} in {name}_images" for name, shape in shapes.items())
        raise BadInput(f"the images in {path} differ in their channels: {channels}; make all of them 1 or 3")
    count, total = max(int(label.max(initial=0)) for label in labels.values()) + 1, sum(map(len, labels.values()))
    if named and count > len(named):
        raise BadInput(f"{path} has the label {count - 1}, but names only {len(named)} classes")
    if not named and count > max(total, MOST_UNNAMED):
        raise BadInput(
            f"{path} has the label {count - 1}, but only {total} images; labels count classes from 0, "
            "and one below 0 is unknown"
        )
    named = named or tuple(map(str, range(count)))
    items = (
        Item(
            path,
            f"{name}_images[{row}]",
            named[number] if number >= 0 else "",
            SPLITS[name] if len(labels) > 1 else "",
            patient=patients[name][row].item() if name in patients else "",
        )
        for name, label in labels.items()
        for row, number in enumerate(label.ravel().tolist())
    )
    return Listing("npz", path, tuple(items), named)
