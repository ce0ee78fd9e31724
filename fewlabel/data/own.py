"""Images of one's own: a folder for each class, a table of files, an npz or DICOM, listed first and opened later.

What is listed names its label, split, client and patient as people wrote them; numbers come in with `read`.
"""

import csv
import hashlib
import io
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from fewlabel.data import pictures
from fewlabel.data.pictures import Unreadable
from fewlabel.data.published import npz_images, npz_shape, reading
from fewlabel.data.raw import CHUNK, Part, Raw, Scale
from fewlabel.errors import BadInput, StorageError

KINDS = {
    "folder": "your own images: data.path is a folder with a folder for each class, and `unlabeled` for the rest",
    "csv": "your own images: data.path is a table with columns image and label, perhaps client, patient and split",
    "npz": "your own arrays: data.path is an npz with MedMNIST's train_images, train_labels, test_images, ...",
    "dicom": "your own DICOM files: data.path is a folder or a table, as for `folder` and `csv`",
}
TABLES = ("csv", "dicom")  # kinds that may be a table
SPLITS = {"train": "train", "val": "validation", "test": "test"} | {  # as in an npz, and what others write
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "testing": "test",
}
UNLABELED = ("unlabeled", "unlabelled")
CLASSES = "classes.txt"  # beside the images: all classes in their order, also those that this site does not have
PATIENTS = "patients.csv"  # beside the images: the patient of each, where they are known
ALIEN = (".heic", ".heif", ".avif", ".jp2", ".j2k", ".jpf", ".jpx")  # images, whether or not Pillow here reads them
MADE_UP = 1000  # classes that an npz may have without naming them, however few its images are
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
    loose: tuple[str, ...] = ()  # images in no class's folder
    notes: tuple[str, ...] = ()  # what may not be as it was meant
    columns: Mapping[str, str] = field(default_factory=dict)
    scale: Scale | None = None  # a federation's, where it is one for all sites

    @property
    def splits(self) -> list[str]:
        return [split for split in ("train", "validation", "test") if any(item.split == split for item in self.items)]

    @property
    def command(self) -> str:
        """Tells all that is wrong with it."""
        told = [] if self.kind == guess(self.path) else ["--kind", self.kind]
        told += [word for role, name in self.columns.items() for word in ("--column", f"{role}={name}")]
        return shlex.join(["fewlabel", "data", "check", str(self.path), *told])


def find(
    kind: str, path: Path | str | None, columns: Mapping[str, str] | None = None, by: str = "data.columns."
) -> Found:
    """What lies at a path; no image is opened. A table's columns are named `by` this setting or option."""
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
        found = table(path, kind, columns or {}, by)
    if not found.items:
        refuse_loose(found)
        raise BadInput(f"there are no images in {path}")
    return found


def undivided(found: Found, classes: tuple[str, ...], scale: Scale | None = None) -> Found:
    """A site's images to train on as one set, in the order of their files' names whatever folder they lie in.

    A site need not have images of all classes, and may have no labels at all. Those that it keeps to test on, as its
    folders, its table or its npz say, stay apart.
    """
    known = {name: label for label, name in folders(classes).items()} | {label: label for label in ("", *classes)}
    if unknown := sorted({item.label for item in found.items} - known.keys()):
        raise BadInput(
            f"{found.path} has images of {', '.join(map(repr, unknown))}, "
            f"which {'is no class' if len(unknown) == 1 else 'are no classes'} of this federation; "
            f"it has {', '.join(classes)}"
        )
    sides = {"": "train", "train": "train", "test": "test"}
    items = [replace(i, split=sides[i.split], label=known[i.label]) for i in found.items if i.split in sides]
    if not any(item.split == "train" for item in items):
        raise BadInput(f"{found.path} has no images to train on; put some beside those to validate and test on")
    if all(item.split == "train" for item in items):
        items = [replace(item, split="") for item in items]
    if found.kind != "npz":
        items.sort(key=lambda item: (item.file.name, item.name))
    return replace(found, items=tuple(items), classes=classes, scale=scale)


def refuse_loose(found: Found) -> None:
    if found.loose:
        more = f", as {counted(len(found.loose) - 1, 'more image')}" if len(found.loose) > 1 else ""
        raise BadInput(
            f"{found.path / found.loose[0]} lies in no class's folder{more}; put it into one, or into 'unlabeled'"
        )


def guess(path: Path) -> str:
    """The kind that a path looks like."""
    return "folder" if path.expanduser().is_dir() else {".npz": "npz"}.get(path.suffix.lower(), "csv")


# A folder


def folder(path: Path, kind: str) -> Found:
    """Below an optional level of splits a folder for each class, in which images lie at any depth."""
    if not path.is_dir():
        raise BadInput(f"{path} is a file, and data.name = '{kind}' needs a folder")
    named, patients = named_classes(path), named_patients(path)
    known = {name: label for label, name in folders(named).items()}
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
    return Found(
        kind,
        path,
        tuple(items),
        classes_of(items, named, path / CLASSES),
        tuple(sorted(map(str, no_images))),
        tuple(loose),
        tuple(layout(path, images, splits)),
    )


def has_splits(path: Path, images: Sequence[Path]) -> bool:
    """Whether the folders that hold images are those of splits, not of classes."""
    tops = {file.parts[0] for file in images if len(file.parts) > 1}
    splits = sorted(top for top in tops if top.lower() in SPLITS)
    others = sorted(top for top in tops if top.lower() not in {*SPLITS, *UNLABELED})
    if sites := [top for top in others if (path / top / CLASSES).exists()]:
        raise BadInput(
            f"{path} holds sites, not classes, for {sites[0]} has a {CLASSES} of its own; "
            f"give one site's folder, such as {path / sites[0]}"
        )
    if splits and others:
        raise BadInput(
            f"in {path} there is {others[0]} beside {splits[0]}, which is the name of a split; "
            "let all folders there be of splits (train, validation, test), or all of classes"
        )
    deep = {file.parts[:2] for file in images if len(file.parts) > 2 and file.parts[1].lower() in {*SPLITS, *UNLABELED}}
    if wrong := sorted(where for where in deep if where[0] in others):
        raise BadInput(
            f"{path.joinpath(*wrong[0])} lies below {wrong[0][0]}, which would be a class; "
            f"put it above the classes, or if {wrong[0][0]} is a site, give that one's folder"
        )
    return bool(splits)


def layout(path: Path, images: Sequence[Path], splits: bool) -> Iterator[str]:
    """What is odd about folders, though a run can use them."""
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
            f"give a folder in which they lie, such as {path / min(inside)}"
        )


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
    if file.name.upper() == "DICOMDIR":  # a list of the files beside it
        return False
    return (kind != "dicom" and file.suffix.lower() in (*pictures.SUFFIXES, *ALIEN)) or pictures.is_dicom(file)


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


def table(path: Path, kind: str, columns: Mapping[str, str], by: str) -> Found:
    """A row for each image, whose path is relative to the table's own folder."""
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
                "a field in which there is a separator needs quotes"
            )
        found = {role: row[at].strip() for role, at in place.items() if at is not None}
        name = found.pop("image")
        if not name:
            raise BadInput(f"line {line} of {path} names no image")
        if (split := found.pop("split", "").lower()) not in {"", *SPLITS}:
            raise BadInput(f"line {line} of {path} has the split '{split}'; it may be train, validation or test")
        if found["label"].lower() in UNLABELED:
            found["label"] = ""
        items.append(Item(ending(path.parent, name, kind), name, split=SPLITS.get(split, ""), **found))
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
    classes = classes_of(items, named_classes(path.parent), path.parent / CLASSES)
    return Found(kind, path, tuple(items), classes, columns=columns)


def rows_of(path: Path) -> list[tuple[int, list[str]]]:
    """The rows in which there is something, with their lines; fields are parted by what the first line tells."""
    try:
        text = path.read_text("utf-8-sig")
        head = text.partition("\n")[0]
        told = re.fullmatch(r'"?sep=(.)"?\s*', head, re.IGNORECASE)  # how Excel says it
        delimiter = told[1] if told else max(",;\t", key=head.count)
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
    return rows[1:] if told else rows


def column(path: Path, role: str, names: Sequence[str], wanted: str | None, by: str) -> int | None:
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
        f"of which {by}{role}=… may name one"
    )


def ending(folder: Path, name: str, kind: str) -> Path:
    """A file; tables often leave out how its name ends, and those of Windows write backslashes."""
    endings = pictures.DICOM if kind == "dicom" else (*pictures.SUFFIXES, *pictures.DICOM)
    names = dict.fromkeys([name, name.replace("\\", "/")])
    files = (folder / f"{written}{end}" for written in names for end in ("", *endings))
    return next((file for file in files if file.exists()), folder / name)


# An npz


def npz(path: Path) -> Found:
    """MedMNIST's keys; a label below 0 is unknown. There may be `classes`, the names of the others, and patients.

    Where one split is all there is, as at a site, it is taken as images that are not split.
    """
    with reading(path), np.load(path, allow_pickle=False) as arrays:
        keys = getattr(arrays, "files", [])
        there = [name for name in ("train", "val", "test") if f"{name}_images" in keys]
        labels = {name: arrays[f"{name}_labels"] for name in there if f"{name}_labels" in keys}
        named = tuple(arrays["classes"].astype(str).ravel().tolist()) if "classes" in keys else ()
        patients = {n: arrays[f"{n}_patients"].astype(str).ravel() for n in there if f"{n}_patients" in keys}
    if len(labels) < max(1, len(there)):
        lacks = next((name for name in there if name not in labels), "train")
        raise BadInput(f"{path} has no {lacks}_images and {lacks}_labels; it has {', '.join(keys) or 'a single array'}")
    refuse_twice(named, f"'classes' in {path}")
    shapes = {name: npz_shape(path, f"{name}_images") for name in labels}
    for name, label in labels.items():
        if not label.ndim or label.size != len(label) or label.dtype.kind not in "iub":
            raise BadInput(f"{name}_labels in {path} must be whole numbers, one for each image")
        for what, given in (("labels", label), ("patients", patients.get(name, label))):
            if len(given) != shapes[name][0]:
                raise BadInput(f"{path} has {shapes[name][0]} {name} images, but {len(given)} {what} for them")
    if len({shape[3] for shape in shapes.values()}) > 1:
        told = ", ".join(f"{shape[3]} in {name}_images" for name, shape in shapes.items())
        raise BadInput(f"the images in {path} differ in their channels: {told}; make all of them 1 or 3")
    count, total = max(int(label.max(initial=0)) for label in labels.values()) + 1, sum(map(len, labels.values()))
    if named and count > len(named):
        raise BadInput(f"{path} has the label {count - 1}, but names only {len(named)} classes")
    if not named and count > max(total, MADE_UP):
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
    return Found("npz", path, tuple(items), named)


def arrays_of(found: Found) -> list[str]:
    """The arrays of an npz, in the order of its items."""
    return list(dict.fromkeys(item.name.partition("[")[0] for item in found.items))


# What is common


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def named_classes(path: Path) -> tuple[str, ...]:
    try:
        lines = (path / CLASSES).read_text("utf-8-sig").splitlines()
        named = tuple(line.strip() for line in lines if line.strip())
        refuse_twice(named, path / CLASSES)
        return named
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path / CLASSES} cannot be read: {error}") from None


def refuse_twice(named: Sequence[str], where: Path | str) -> None:
    if twice := [name for name in named if named.count(name) > 1]:
        raise BadInput(f"{where} names the class '{twice[0]}' {named.count(twice[0])} times; name each once")


def named_patients(path: Path) -> dict[str, str]:
    """The patient of each image by its path below a folder, where there is a table of them."""
    if not (path / PATIENTS).exists():
        return {}
    (_, names), *rows = rows_of(path / PATIENTS) or [(1, [])]
    if names[:2] != ["image", "patient"] or any(len(row) < 2 for _, row in rows):
        raise BadInput(f"{path / PATIENTS} must have the columns image and patient; mend it, or delete it")
    return {row[0]: row[1] for _, row in rows}


def classes_of(items: Iterable[Item], named: tuple[str, ...], where: Path) -> tuple[str, ...]:
    """Classes in the order that was named, or by number where they are numbers, or by name."""
    labels = {item.label for item in items} - {""}
    if named and (unnamed := sorted(labels - set(named))):
        raise BadInput(f"there are images of '{unnamed[0]}', a class that {where} does not name")
    numbers = all(re.fullmatch(r"-?\d{1,18}", label) for label in labels)
    return named or tuple(sorted(labels, key=lambda label: (int(label) if numbers else 0, label)))


def fingerprint(found: Found) -> str:
    """Another one as soon as a file, its size, its time, or what is said of it has changed."""
    whole: tuple[object, ...] = (2, found.kind, os.path.abspath(found.path), found.classes, found.loose)
    whole += (found.scale,) if found.scale else ()  # 2: how they are read here
    digest = hashlib.blake2b(repr(whole).encode("utf-8", "surrogateescape"), digest_size=8)
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


def contents(found: Found, items: Iterable[Item]) -> list[str]:
    """Of each image a text that is equal for equal ones."""
    if found.kind != "npz":
        return [content(item.file) for item in items]
    return [
        fingerprint_of(image) for name in arrays_of(found) for some in npz_images(found.path, name, 0) for image in some
    ]


def fingerprint_of(image: np.ndarray) -> str:
    return hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()


def read(found: Found, skip: bool = False, drawn: bool = False) -> Raw:
    """The data set that was found: with its own splits, or for splits to be `drawn` that part no patient's images."""
    refuse_loose(found)
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
    return Raw(found.classes, parts(found, skip, drawn))


def parts(found: Found, skip: bool = False, drawn: bool = False) -> dict[str, Part]:
    """The images by their split, or all as one; unknown labels are -1."""
    items, colour, scale = (list(found.items), False, Scale()) if found.kind == "npz" else readable(found, skip)
    same = contents(found, items)
    refuse_spoiled(found, items, same, drawn)
    group, made = together(items, same), {}
    for split in found.splits or [""]:
        rows = [row for row, item in enumerate(items) if item.split == split]
        some = [items[row] for row in rows]
        clients = np.array([item.client for item in some])
        array = some[0].name.partition("[")[0] if some else ""
        of_array, of_files = partial(npz_images, found.path, array), partial(pixels, found, some, colour, scale)
        made[split or "all"] = Part(
            numbers(found, some, split),
            of_array if found.kind == "npz" else of_files,
            groups=group[rows],
            clients=clients if clients.astype(bool).any() else None,
            scale=scale,
        )
    return made


def refuse_spoiled(found: Found, items: Sequence[Item], same: Sequence[str], drawn: bool) -> None:
    """Refuses what no result could be trusted with: an image of two classes, or one or a patient in two splits."""
    images, patients = defaultdict[str, list[Item]](list), defaultdict[str, list[Item]](list)
    for item, content in zip(items, same, strict=True):
        images[content].append(item)
        if item.patient:
            patients[item.patient].append(item)
    for what, sets, attribute, mend in (
        ("image", images, "label", "give each one label"),
        ("image", images, "split", "leave each in one, or draw splits anew by data.split = '70-10-20'"),
        ("patient", patients, "split", "leave each in one, or draw splits anew by data.split = '70-10-20'"),
    ):
        said = [{getattr(item, attribute): item for item in some if getattr(item, attribute)} for some in sets.values()]
        wrong = [list(some.items()) for some in said if len(some) > 1]
        if wrong and not (drawn and attribute == "split"):
            (one, first), (other, second), *_ = wrong[0]
            whose = f" of {first.patient}" if sets is patients else ""
            raise BadInput(
                f"different {attribute}s for {counted(len(wrong), what)}, such as {first.name} ({one}) and "
                f"{second.name} ({other}){whose}; see all by `{found.command}`, and {mend}"
            )


def together(items: Sequence[Item], same: Sequence[str]) -> np.ndarray:
    """A number for each image, the same for all of a patient and their copies, of which some may name no patient."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    first: dict[tuple[str, str], int] = {}
    links = [
        (row, first.setdefault(key, row))
        for row, (item, content) in enumerate(zip(items, same, strict=True))
        for key in (("content", content), ("patient", item.patient))
        if key[1]
    ]
    rows, firsts = np.array(links).T
    graph = coo_array((np.ones(len(links)), (rows, firsts)), shape=(len(items), len(items)))
    number: np.ndarray = connected_components(graph, directed=False)[1]
    return number


def numbers(found: Found, items: Iterable[Item], split: str) -> np.ndarray:
    number = {label: n for n, label in enumerate(found.classes)} | {"": -1}
    return np.array([number[item.label] for item in items if item.split == split], np.int64)


def readable(found: Found, skip: bool) -> tuple[list[Item], bool, Scale]:
    """The images that can be read, whether one has colours, and how those of more than eight bits become eight.

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
    wide = any(header.values for header in headers)
    scale = {"values": pictures.span(headers)} if wide else {}
    if found.scale is not None:
        if wide and "values" not in found.scale:
            raise BadInput(
                f"{found.path} has images of more than eight bits, and the federation's terms do not say what is black "
                f"and what is white; give them `values`, of which this site's need {list(scale['values'])}"
            )
        scale = found.scale
    return items, any(header.colour for header in headers), scale


def refusal(found: Found, item: Item, error: Unreadable, count: int = 1) -> BadInput:
    return BadInput(
        f"at least {count} of {len(found.items)} images cannot be read, such as {item.name} ({error}); "
        f"see all by `{found.command}`, and leave them out by data.unreadable = 'skip'"
    )


def pixels(found: Found, items: Sequence[Item], colour: bool, scale: Scale, size: int) -> Iterator[np.ndarray]:
    """Images of one size, some at a time, each resized before the next is opened."""
    step = max(1, CHUNK // ((3 if colour else 1) * size * size))
    for start in range(0, len(items), step):
        some = []
        for item in items[start : start + step]:
            try:
                some.append(pictures.read(item.file, colour, size=size, **scale))
            except Unreadable as error:
                raise refusal(found, item, error) from None
        yield np.stack(some)
