"""Data sets by name, decoded once to uint8 arrays on disk that all processes map into memory."""

import filecmp
import hashlib
import importlib
import json
import os
import platform
import shlex
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from fewlabel.core.errors import BadInput, FewLabelError, StorageError
from fewlabel.data import reading
from fewlabel.data.images import Images
from fewlabel.data.own.layouts import list_images
from fewlabel.data.own.listing import KINDS, fingerprint, guess_kind, undivided
from fewlabel.data.own.reader import read_images
from fewlabel.data.published import files
from fewlabel.data.published.catalogue import PUBLISHED, REFUSED
from fewlabel.data.published.files import DatasetSource, Edition
from fewlabel.data.raw import CHUNK, Part, Raw, Scale
from fewlabel.data.splits import SIDES, UNDIVIDED, groups, sides

__all__ = ["DATASETS", "Dataset", "Part", "Raw", "Split", "load"]

FORMAT = 2  # of the decoded arrays; raise it, and all sets are decoded anew
ASIDE = f".decoding-{platform.node()}-"  # a folder to write in, followed by the number of the process that writes


@dataclass(frozen=True)
class Split:
    """The images of one split, such as train, with their labels."""

    images: Images
    labels: Tensor  # int64 [N]
    groups: Tensor | None = None  # int64 [N]: the same number for all images of a lesion or patient
    clients: np.ndarray | None = None  # [N]: who holds each image, where the data say so
    names: np.ndarray | None = None  # [N]: the path of each image, or its name in an npz

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A decoded data set, mapped from disk."""

    name: str
    digest: str  # of its arrays
    classes: tuple[str, ...]
    channels: int
    image_size: int
    splits: dict[str, Split]
    scale: Scale = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # sentences about what was odd, for whoever runs something on it


def digits() -> Raw:
    """Read scikit-learn's 1,797 digits. Their splits are ours: the first 1,197, the next 300 and the last 300."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    cuts = {"train": slice(0, 1197), "validation": slice(1197, 1497), "test": slice(1497, None)}
    return Raw(tuple("0123456789"), {split: (pixels[cut], labels[cut]) for split, cut in cuts.items()})


DATASETS: dict[str, DatasetSource] = {
    "digits": DatasetSource(
        (Edition((), digits),), "1,797 handwritten digits of 8x8, 10 classes, inside scikit-learn: nothing to download"
    ),
    **PUBLISHED,
    **{kind: DatasetSource((), about) for kind, about in KINDS.items()},
}


def load(
    name: str,
    image_size: int,
    fresh: bool = False,
    *,
    channels: int | None = None,
    split: str = "published",
    split_seed: int = 0,
    path: str | None = None,
    columns: Mapping[str, str] | None = None,
    unreadable: str = "fatal",
    conflicting: str = "leave-out",
    classes: tuple[str, ...] | None = None,
    scale: Scale | None = None,
    named: bool = False,
) -> Dataset:
    """Load a data set at this image size, and decode it first if that has not been done.

    `name` is one of DATASETS or `package.module:function`, your own function, which returns a Raw. Your own images lie
    at `path`. A set is decoded again when its files or its decoded arrays have changed, by their sizes and times.
    `fresh` looks closer: it calls your own function again, and compares the bytes of all arrays but those of images.

    `named` asks for the names of your own images, which decoded arrays of FewLabel 0.1 do not have.

    A site passes the `classes` and the `scale` of its federation, and trains on all images that are not for testing.
    """
    split = split if classes is None else UNDIVIDED
    drawn = split != "published" or split_seed
    how = [f"{channels}ch"] * (channels is not None) + [f"{split}-{split_seed}"] * bool(drawn)
    if name in KINDS:
        listing = list_images(name, path, columns)
        listing = listing if classes is None else undivided(listing, classes, scale)
        skip, own_splits = unreadable == "skip", split in ("published", UNDIVIDED)
        read_own = partial(read_images, listing, skip=skip, drawn=not own_splits, conflicting=conflicting)
        edition, paths = Edition((), read_own), list[Path]()
        how += [fingerprint(listing), unreadable, *([conflicting] if conflicting != "leave-out" else [])]
    else:
        edition, paths = files.find(name, source_of(name))
        if path is not None:
            raise BadInput(f"data.path is for {', '.join(KINDS)}; '{name}' is found without it")

    def folder(sums: files.Checksums) -> Path:
        which = [name.replace(":", "-"), f"{image_size}px", *how, *([files.fingerprint(sums)] if sums else [])]
        return cache_folder() / "-".join([*which, f"v{FORMAT}"])

    sums = files.known(name, edition, paths)
    anew = fresh and name not in DATASETS
    made = None if sums is None or anew else open_decoded(name, image_size, folder(sums), fresh)
    if made is not None and named and name in KINDS and made.splits["train"].names is None:
        made, anew = None, True
    if made is None:
        sums = files.verify(name, edition, paths)
        made = None if anew else open_decoded(name, image_size, folder(sums), fresh)
        if made is None:
            read = partial(edition.read, *paths)
            decode(name, image_size, folder(sums), read, channels=channels, split=split, split_seed=split_seed)
            made = open_decoded(name, image_size, folder(sums))
        if made is None:
            raise StorageError(f"{folder(sums)} was changed while it was written; delete it and try again")
        if sums:
            files.remember(name, sums, json.loads((folder(sums) / "about.json").read_text())["counts"])
    return made


def open_decoded(name: str, image_size: int, folder: Path, thorough: bool = False) -> Dataset | None:
    """Map decoded arrays into memory. Return None if one is missing or has changed."""
    try:
        about = json.loads((folder / "about.json").read_text())
        for array, (size, time, digest) in about["arrays"].items():
            stat = (folder / array).stat()
            if (stat.st_size, stat.st_mtime_ns) != (size, time):
                return None
            if thorough and not array.endswith("-images.npy") and reading.digest_of(folder / array) != digest:
                return None  # images are left out, because reading all of them would take too long
        splits = {}
        for split in about["splits"]:
            pixels, labels = (np.load(folder / f"{split}-{what}.npy", mmap_mode="c") for what in ("images", "labels"))
            images = Images(torch.from_numpy(pixels), tuple(about["mean"]), tuple(about["std"]))
            grouped = torch.from_numpy(np.load(folder / f"{split}-groups.npy")) if about.get("groups") else None
            clients = np.load(folder / f"{split}-clients.npy") if about.get("clients") else None
            names = np.load(folder / f"{split}-names.npy") if about.get("names") else None
            splits[split] = Split(images, torch.from_numpy(labels), grouped, clients, names)
        scale = {key: (low, high) for key, (low, high) in about["scale"].items()}
        classes, notes, channels = tuple(about["classes"]), tuple(about.get("notes", ())), len(about["mean"])
        return Dataset(name, about["digest"], classes, channels, image_size, splits, scale, notes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError):
        return None


def source_of(name: str) -> DatasetSource:
    """Return where a data set comes from, or say which name may have been meant."""
    if name in DATASETS:
        return DATASETS[name]
    if ":" in name:
        return DatasetSource((Edition((), partial(call_own, name)),), "your own function")
    if name in REFUSED:
        raise BadInput(f"the data set '{name}' cannot be used: {REFUSED[name]}")
    if Path(name).exists():
        kind, path = guess_kind(Path(name)), shlex.quote(name)
        raise BadInput(
            f"there is no data set '{name}', but a {'folder' if kind == 'folder' else 'file'} of that name; "
            f"for your own images: --data {kind} --set data.path={path}"
        )
    near = [known for known, one in DATASETS.items() if name.lower() in one.folders]
    near = near or get_close_matches(name, DATASETS, 1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(DATASETS)}"
    raise BadInput(f"there is no data set '{name}'; {hint}")


def call_own(name: str) -> Raw:
    """Call your own function, named `package.module:function`."""
    module, _, function = name.partition(":")
    try:
        found: Callable[[], Raw] = getattr(importlib.import_module(module), function)
    except Exception as error:  # other people's code may raise anything
        raise BadInput(f"data set '{name}' cannot be imported: {error}") from error
    try:
        raw = found()
    except FewLabelError:
        raise
    except Exception as error:
        raise BadInput(f"data set '{name}' failed: {type(error).__name__}: {error}") from error
    if not isinstance(raw, Raw):
        raise BadInput(f"data set '{name}' must return a fewlabel.data.datasets.Raw, returned {type(raw).__name__}")
    return raw


def cache_folder() -> Path:
    """Return the folder of decoded arrays, in the user's cache directory."""
    return files.cache() / "decoded"


def decode(
    name: str,
    image_size: int,
    folder: Path,
    read: Callable[[], Raw],
    *,
    channels: int | None = None,
    split: str = "published",
    split_seed: int = 0,
) -> None:
    """Read, split and resize images, write them as arrays aside, and then move all of them into place at once."""
    raw = read()
    where = sides(raw.parts, split, split_seed)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        clear(folder.parent)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{ASIDE}{os.getpid()}-") as temporary:
            aside = Path(temporary) / folder.name
            aside.mkdir()
            about = write_labels(raw, where, aside, split == UNDIVIDED)
            write_images(raw, where, image_size, channels, aside)
            digest = hashlib.blake2b(repr(raw.classes).encode(), digest_size=16)
            for side in about["splits"]:
                for what in ("images", "labels", *(more for more in ("groups", "clients") if about[more])):
                    array = np.load(aside / f"{side}-{what}.npy", mmap_mode="r")
                    digest.update(repr((side, what, array.shape)).encode())
                    digest.update(array.data)
            mean, std = moments(np.load(aside / "train-images.npy", mmap_mode="r"))
            about |= {"mean": mean.tolist(), "std": std.tolist(), "digest": digest.hexdigest()}
            seal(aside, about)
            move_into_place(aside, folder)
    except OSError as error:
        raise StorageError(
            f"the decoded data set '{name}' cannot be written to {folder.parent}: {error.strerror or error}; "
            "set XDG_CACHE_HOME to a directory with room"
        ) from None


def write_labels(raw: Raw, where: dict[str, np.ndarray], aside: Path, undivided: bool = False) -> dict[str, Any]:
    """Write labels, groups and clients. Return a description of the splits, for about.json."""
    side = np.concatenate(list(where.values()))
    label = np.concatenate([part.labels for part in raw.parts.values()]).astype(np.int64)
    grouped = all(part.groups is not None for part in raw.parts.values())
    held = [part.clients for part in raw.parts.values() if part.clients is not None]
    named = [part.names for part in raw.parts.values() if part.names is not None]
    known = {name: label[(side == name) & (label >= 0)] for name in SIDES}
    counts = {name: np.bincount(some, minlength=len(raw.classes)).tolist() for name, some in known.items()}
    splits = [name for name in SIDES if any(counts[name]) or (name == "train" and (undivided or name in side))]
    if not undivided and not {"train", "test"} <= set(splits):
        raise BadInput(f"{len(label)} images are too few for this data.split: it leaves none for training or the test")
    for name in splits:
        np.save(aside / f"{name}-labels.npy", label[side == name])
        if grouped:
            np.save(aside / f"{name}-groups.npy", groups(raw.parts)[side == name])
        if len(held) == len(raw.parts):
            np.save(aside / f"{name}-clients.npy", np.concatenate(held)[side == name])
        if len(named) == len(raw.parts):
            np.save(aside / f"{name}-names.npy", np.concatenate(named)[side == name])
    kept = {name: counts[name] for name in splits}
    clients, scale = len(held) == len(raw.parts), next(iter(raw.parts.values())).scale
    about = {"classes": raw.classes, "splits": splits, "counts": kept, "groups": grouped, "clients": clients}
    return about | {"scale": scale, "notes": raw.notes, "names": len(named) == len(raw.parts)}


def write_images(raw: Raw, where: dict[str, np.ndarray], image_size: int, channels: int | None, aside: Path) -> None:
    """Append each image to the array of its split as it is read, so that memory holds a few of them at a time."""
    shapes: dict[str, tuple[int, ...]] = {}
    with ExitStack() as stack:
        arrays: dict[str, BinaryIO] = {}
        for name, part in raw.parts.items():
            read = 0
            for some in part.read(image_size):
                pixels = recolour(resize(some, image_size), channels)
                side = where[name][read : read + len(pixels)]
                read += len(pixels)
                if len(side) < len(pixels):
                    raise BadInput(f"there are more {name} images than their {len(part)} labels")
                for which in np.intersect1d(side, SIDES):
                    if which not in arrays:
                        total = sum(int((every == which).sum()) for every in where.values())
                        shapes[which] = (total, *pixels.shape[1:])
                        arrays[which] = stack.enter_context((aside / f"{which}-images.npy").open("wb"))
                        header = {"descr": "|u1", "fortran_order": False, "shape": shapes[which]}
                        np.lib.format.write_array_header_1_0(arrays[which], header)
                    if pixels.shape[1:] != shapes[which][1:]:
                        raise BadInput(f"the {name} images differ in their channels; set data.channels to 1 or 3")
                    arrays[which].write(np.ascontiguousarray(pixels[side == which]).data)
            if read != len(part):
                raise BadInput(f"there are {read} {name} images, but {len(part)} labels")


def clear(where: Path) -> None:
    """Delete what killed processes left behind."""
    for left in where.glob(f"{ASIDE}*"):
        try:
            os.kill(int(left.name.removeprefix(ASIDE).split("-")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (OSError, ValueError, OverflowError):  # another user's, or not from us
            continue


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Write about.json, with the size, time and digest of each array, so that later changes are noticed."""
    arrays = {file.name: (file.stat(), reading.digest_of(file)) for file in sorted(folder.glob("*.npy"))}
    states = {name: (stat.st_size, stat.st_mtime_ns, digest) for name, (stat, digest) in arrays.items()}
    (folder / "about.json").write_text(json.dumps(about | {"arrays": states}))


def move_into_place(aside: Path, folder: Path) -> None:
    """Move decoded arrays to their folder, unless the same bytes are there already."""
    there, arrays = open_decoded("", 0, folder), [array.name for array in aside.glob("*.npy")]
    if there and there.digest == json.loads((aside / "about.json").read_text())["digest"]:
        equal, _, _ = filecmp.cmpfiles(aside, folder, arrays, shallow=False)
        if len(equal) == len(arrays):
            return
    with suppress(OSError):
        folder.rename(aside.with_name("old"))
    try:
        aside.rename(folder)
    except OSError:
        if not open_decoded("", 0, folder):  # another process was not faster, either
            raise


def moments(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation of each channel's pixels in 0..1, by counting each of the 256 values."""
    counts = np.zeros((pixels.shape[1], 256))
    for some in np.array_split(pixels, pixels.nbytes // CHUNK + 1):
        counts += [np.bincount(channel.ravel(), minlength=256) for channel in some.swapaxes(0, 1)]
    shares, value = counts / counts.sum(axis=1, keepdims=True), np.arange(256) / 255
    mean = shares @ value
    variance = (shares * (value - mean[:, None]) ** 2).sum(axis=1)
    return mean, np.maximum(np.sqrt(variance), 1e-6)


def resize(pixels: np.ndarray, size: int) -> np.ndarray:
    """Resize uint8 images to squares, bilinear with antialiasing."""
    if pixels.shape[2:] == (size, size):
        return pixels
    given = torch.from_numpy(pixels.astype(np.float32))
    resized = torch.nn.functional.interpolate(given, (size, size), mode="bilinear", antialias=True)
    return resized.round_().clamp_(0, 255).to(torch.uint8).numpy()


def recolour(pixels: np.ndarray, channels: int | None) -> np.ndarray:
    """Turn grey images into three equal channels, or colours into grey, weighted as in JPEG."""
    if channels is None or channels == pixels.shape[1]:
        return pixels
    if channels == 3 and pixels.shape[1] == 1:
        return pixels.repeat(3, axis=1)
    if channels == 1 and pixels.shape[1] == 3:
        luma = np.tensordot(np.array([0.299, 0.587, 0.114], np.float32), pixels, axes=(0, 1))
        return np.rint(luma).astype(np.uint8)[:, None]
    raise BadInput(f"images of {pixels.shape[1]} channels cannot be given {channels}; data.channels is 1 or 3")
