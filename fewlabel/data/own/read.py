"""Images of one's own: a folder for each class, a table of files, an npz or DICOM, found first and read later.

What is found names its label, split, client and patient as people wrote them; numbers come in with `read`.
"""

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from fewlabel.core.errors import BadInput
from fewlabel.data import pictures
from fewlabel.data.npz import npz_images
from fewlabel.data.own import layouts
from fewlabel.data.own.listing import Found, Item, counted, folders
from fewlabel.data.pictures import Unreadable
from fewlabel.data.raw import CHUNK, Part, Raw, Scale
from fewlabel.data.reading import digest_of

KINDS = {
    "folder": "your own images: data.path is a folder with a folder for each class, and `unlabeled` for the rest",
    "csv": "your own images: data.path is a table with columns image and label, perhaps client, patient and split",
    "npz": "your own arrays: data.path is an npz with MedMNIST's train_images, train_labels, test_images, ...",
    "dicom": "your own DICOM files: data.path is a folder or a table, as for `folder` and `csv`",
}
TABLES = ("csv", "dicom")  # kinds that may be a table


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
        found = layouts.folder(path, kind)
    elif path.is_dir():
        raise BadInput(f"{path} is a folder, and data.name = '{kind}' needs a file; did you mean 'folder'?")
    elif kind == "npz":
        found = layouts.npz(path)
    else:
        found = layouts.table(path, kind, columns or {}, by)
    if not found.items:
        refuse_loose(found)
        raise BadInput(f"there are no images in {path}")
    return found


def refuse_loose(found: Found) -> None:
    if found.loose:
        more = f", as {counted(len(found.loose) - 1, 'more image')}" if len(found.loose) > 1 else ""
        raise BadInput(
            f"{found.path / found.loose[0]} lies in no class's folder{more}; put it into one, or into 'unlabeled'"
        )


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


def contents(found: Found, items: Iterable[Item]) -> list[str]:
    """Of each image a text that is equal for equal ones."""
    if found.kind != "npz":
        return [digest_of(item.file) for item in items]
    return list(map(fingerprint_of, stored(found)))


def fingerprint_of(image: np.ndarray) -> str:
    return hashlib.blake2b(image.tobytes(), digest_size=16).hexdigest()


def stored(found: Found) -> Iterator[np.ndarray]:
    """The images of an npz, in the order of its items."""
    for name in dict.fromkeys(map(array_of, found.items)):
        for some in npz_images(found.path, name, 0):
            yield from some


def array_of(item: Item) -> str:
    return item.name.partition("[")[0]


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
        in_files = partial(pixels, found, some, colour, scale)
        made[split or "all"] = Part(
            numbers(found, some),
            partial(npz_images, found.path, array_of(some[0])) if found.kind == "npz" else in_files,
            groups=group[rows],
            clients=clients if clients.astype(bool).any() else None,
            scale=scale,
        )
    return made


def numbers(found: Found, items: Iterable[Item]) -> np.ndarray:
    number = {label: n for n, label in enumerate(found.classes)} | {"": -1}
    return np.array([number[item.label] for item in items], np.int64)


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
