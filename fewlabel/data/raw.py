"""What the reader of a data set returns: its classes, and for each split labels and images, a few at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fewlabel.core.errors import BadInput

Scale = dict[str, tuple[float, float]]  # how more than eight bits become eight: the values or window of `pictures.read`
CHUNK = 1 << 19  # bytes of pixels at a time: little memory, and enough work for each call


@dataclass(frozen=True)
class Part:
    """Images that belong together. They are read in their order and never all at once, because they may not fit."""

    labels: np.ndarray  # [N]
    read: Callable[[int], Iterator[np.ndarray]]  # wanted size -> uint8 [n, C, H, W], of that size or any other
    groups: np.ndarray | None = None  # [N]: images of one lesion or patient, which stay in one split
    clients: np.ndarray | None = None  # [N]: who holds each image, if the data say so
    scale: Scale = field(default_factory=dict)
    names: np.ndarray | None = None  # [N]: the path of each image, or its name in an npz

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Raw:
    """A data set as its reader returns it: for each split images uint8 [N, C, H, W] and labels [N], or a Part.

    The splits are train and test, and validation if one is published. A set that is published without splits has one
    Part, named `all`.
    """

    classes: tuple[str, ...]
    splits: "dict[str, tuple[np.ndarray, np.ndarray]] | dict[str, Part]"
    notes: tuple[str, ...] = ()  # sentences about what was odd, for whoever runs something on it

    def __post_init__(self) -> None:
        if self.splits.keys() != {"all"} and not (
            {"train", "test"} <= self.splits.keys() <= {"train", "validation", "test"}
        ):
            raise BadInput(f"a data set has train, test and perhaps validation, found {', '.join(self.splits)}")
        if len(self.classes) < 2:
            raise BadInput(f"a data set has two classes or more, found {', '.join(self.classes) or 'none'}")
        for split, given in self.splits.items():
            labels = given.labels if isinstance(given, Part) else given[1]
            if not isinstance(given, Part):
                check_arrays(split, given[0], labels)
            if not len(labels):
                raise BadInput(f"there are no {split} images")
            if not np.isin(labels, np.arange(-1, len(self.classes))).all():  # -1: unknown
                raise BadInput(f"the {split} labels must be from 0 to {len(self.classes) - 1}, one for each class")

    @property
    def parts(self) -> dict[str, Part]:
        return {split: given if isinstance(given, Part) else in_memory(*given) for split, given in self.splits.items()}


def check_arrays(split: str, images: np.ndarray, labels: np.ndarray) -> None:
    if images.dtype != np.uint8 or images.ndim != 4 or labels.shape != images.shape[:1] or not len(labels):
        raise BadInput(
            f"the {split} images must be uint8 [N, C, H, W] with N labels, "
            f"found {images.dtype} {list(images.shape)} with labels {list(labels.shape)}"
        )


def in_memory(images: np.ndarray, labels: np.ndarray) -> Part:
    """Return images that are in memory already as a Part."""
    return Part(labels, lambda _: (some for some in np.array_split(images, images.nbytes // CHUNK + 1) if len(some)))
