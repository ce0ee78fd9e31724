"""Data sets of the tests, by `tests.owndata:NAME`."""

import numpy as np

from fewlabel.data.datasets import Raw
from fewlabel.data.raw import Part, in_memory

CALLS: list[str] = []


def two_colours() -> Raw:
    """Class 0 is red, class 1 is blue; 8 images of 4x4 to train, 4 to test, no validation."""
    CALLS.append("two_colours")

    def split(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.arange(count) % 2
        images = np.zeros((count, 3, 4, 4), np.uint8)
        images[labels == 0, 0] = 255
        images[labels == 1, 2] = 255
        return images, labels

    return Raw(("red", "blue"), {"train": split(8), "test": split(4)})


def on_and_off() -> Raw:
    """One pixel, white or black: 12 images, of which every third is white and of class 1."""
    labels = (np.arange(12) % 3 == 0).astype(np.int64)
    images = (255 * labels).astype(np.uint8).reshape(-1, 1, 1, 1)
    return Raw(("black", "white"), {"train": (images, labels), "test": (images, labels)})


def shades() -> Raw:
    """Noise of 8x8: 200 dark images of class 0 and 100 bright ones of class 1."""
    draw = np.random.Generator(np.random.PCG64(0))
    labels = np.repeat([0, 1], [200, 100])
    images = draw.integers(0, 64, (300, 1, 8, 8)) + 192 * labels.reshape(-1, 1, 1, 1)
    split = images.astype(np.uint8), labels
    return Raw(("dark", "bright"), {"train": split, "test": split})


def hospitals() -> Raw:
    """As many dark as bright images of `shades`: hospitals 0 and 1 hold one, 2 and 3 many, 4 two of one class."""
    images, labels = (values[100:] for values in shades().splits["train"])
    split = Part(labels, in_memory(images, labels).read, clients=np.array([0, 1, *[2, 3] * 98, 4, 4]))
    return Raw(("dark", "bright"), {"train": split, "validation": split, "test": split})


def half_known() -> Raw:
    """30 images of 8x8 to train on; every other has no label."""
    labels = np.where(np.arange(30) % 2, np.arange(30) // 2 % 2, -1)
    images = np.arange(30, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(8, 2).repeat(8, 3)
    return Raw(("a", "b"), {"train": (images, labels), "test": (images[1::2], labels[1::2])})


def floats() -> Raw:
    image = np.zeros((2, 1, 4, 4))
    return Raw(("a", "b"), {"train": (image, np.arange(2)), "test": (image, np.arange(2))})
