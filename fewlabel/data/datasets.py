"""Data sets by name, decoded once to uint8 arrays on disk that all processes map into memory."""

import hashlib
import importlib
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fewlabel.data.sets import Images
from fewlabel.errors import BadInput, StorageError

FORMAT = 1  # of the decoded arrays; a change here decodes anew


@dataclass(frozen=True)
class Raw:
    """A data set as its reader gives it: images uint8 [N, C, H, W] and labels [N] of each split."""

    classes: tuple[str, ...]
    splits: dict[str, tuple[np.ndarray, np.ndarray]]  # train and test; validation where one is published

    def __post_init__(self) -> None:
        if not {"train", "test"} <= self.splits.keys() <= {"train", "validation", "test"}:
            raise BadInput(f"a data set has train, test and perhaps validation, found {', '.join(self.splits)}")
        for split, (images, labels) in self.splits.items():
            if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != images.shape[:1] or not len(labels):
                raise BadInput(
                    f"the {split} images must be uint8 [N, C, H, W] with N labels, "
                    f"found {images.dtype} {list(images.shape)} with labels {list(labels.shape)}"
                )
            if not np.isin(labels, np.arange(len(self.classes))).all():
                raise BadInput(f"the {split} labels must be from 0 to {len(self.classes) - 1}, one for each class")


@dataclass(frozen=True)
class Split:
    images: Images
    labels: Tensor  # int64 [N]

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


@dataclass(frozen=True)
class Source:
    read: Callable[[], Raw]
    about: str


def digits() -> Raw:
    """scikit-learn's 1,797 digits; none published, so our splits are the first 1,197, the next 300 and the last 300."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    pixels = np.rint(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    cuts = {"train": slice(0, 1197), "validation": slice(1197, 1497), "test": slice(1497, None)}
    return Raw(tuple("0123456789"), {split: (pixels[cut], labels[cut]) for split, cut in cuts.items()})


DATASETS: dict[str, Source] = {
    "digits": Source(digits, "1,797 handwritten digits of 8x8, 10 classes, inside scikit-learn: nothing to download"),
}


def load(name: str, image_size: int, fresh: bool = False) -> Dataset:
    """The data set at this image size, where `fresh` asks a function of one's own, which may have changed, again.

    `package.module:callable` names such a function, which returns a Raw.
    """
    folder = cache_folder() / f"{name.replace(':', '-')}-{image_size}px-v{FORMAT}"
    if not (folder / "about.json").exists() or (fresh and name not in DATASETS):
        decode(name, image_size, folder)
    about = json.loads((folder / "about.json").read_text())
    splits = {}
    for split in about["splits"]:
        pixels, labels = (np.load(folder / f"{split}-{what}.npy", mmap_mode="c") for what in ("images", "labels"))
        images = Images(torch.from_numpy(pixels), tuple(about["mean"]), tuple(about["std"]))
        splits[split] = Split(images, torch.from_numpy(labels))
    return Dataset(name, about["digest"], tuple(about["classes"]), len(about["mean"]), image_size, splits)


def reader(name: str) -> Callable[[], Raw]:
    if name in DATASETS:
        return DATASETS[name].read
    if ":" in name:
        module, _, function = name.partition(":")
        try:
            found: Callable[[], Raw] = getattr(importlib.import_module(module), function)
        except Exception as error:  # what somebody else's code may raise is not ours to list
            raise BadInput(f"data set '{name}' cannot be imported: {error}") from error
        return found
    near = get_close_matches(name, DATASETS, 1)
    hint = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(DATASETS)}"
    raise BadInput(f"there is no data set '{name}'; {hint}")


def cache_folder() -> Path:
    """Where decoded arrays lie: the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewlabel" / "decoded"


def decode(name: str, image_size: int, folder: Path) -> None:
    """Reads, resizes and writes the arrays aside, and puts them in place at once."""
    raw = reader(name)()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".decoding-") as temporary:
            aside = Path(temporary) / folder.name
            aside.mkdir()
            digest = hashlib.blake2b(repr(raw.classes).encode(), digest_size=16)
            for split, (pixels, labels) in raw.splits.items():
                arrays = {"images": np.ascontiguousarray(resize(pixels, image_size)), "labels": labels.astype(np.int64)}
                for what, array in arrays.items():
                    np.save(aside / f"{split}-{what}.npy", array)
                    digest.update(repr((split, what, array.shape)).encode())
                    digest.update(array.data)
            mean, std = moments(np.load(aside / "train-images.npy", mmap_mode="r"))
            about = {"classes": raw.classes, "splits": list(raw.splits), "mean": mean.tolist(), "std": std.tolist()}
            (aside / "about.json").write_text(json.dumps(about | {"digest": digest.hexdigest()}))
            put(aside, folder)
    except OSError as error:
        raise StorageError(
            f"the decoded data set '{name}' cannot be written to {folder.parent}: {error.strerror or error}; "
            "set XDG_CACHE_HOME to a directory with room"
        ) from None


def put(aside: Path, folder: Path) -> None:
    """Puts decoded arrays in their place, unless another process was faster, or they are there already."""
    with suppress(OSError):
        if (folder / "about.json").read_bytes() == (aside / "about.json").read_bytes():
            return
        folder.rename(aside.with_name("old"))
    try:
        aside.rename(folder)
    except OSError:
        if not (folder / "about.json").exists():
            raise


def moments(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of each channel's pixels in 0..1, from how often each of the 256 values occurs."""
    counts = np.zeros((pixels.shape[1], 256))
    for some in np.array_split(pixels, len(pixels) // 1024 + 1):
        counts += [np.bincount(channel.ravel(), minlength=256) for channel in some.swapaxes(0, 1)]
    shares, value = counts / counts.sum(axis=1, keepdims=True), np.arange(256) / 255
    mean = shares @ value
    variance = (shares * (value - mean[:, None]) ** 2).sum(axis=1)
    return mean, np.maximum(np.sqrt(variance), 1e-6)


def resize(pixels: np.ndarray, size: int) -> np.ndarray:
    """Square uint8 images of this size, bilinear with antialiasing."""
    if pixels.shape[2:] == (size, size):
        return pixels
    chunks = [
        torch.nn.functional.interpolate(chunk.float(), (size, size), mode="bilinear", antialias=True)
        for chunk in torch.split(torch.from_numpy(pixels), 4096)
    ]
    return torch.cat([chunk.round().clamp(0, 255).to(torch.uint8) for chunk in chunks]).numpy()
