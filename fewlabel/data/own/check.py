"""Looks at every image before anyone trains on it: what is there, and what of it would spoil a run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fewlabel.data import pictures, reading
from fewlabel.data.own import read
from fewlabel.data.own.listing import Found, Item, counted
from fewlabel.data.pictures import EMPTY, Unreadable

UNKNOWN = ("na", "n/a", "nan", "none", "null", "unknown", "?", "-")  # labels that people may mean by none


class Look(NamedTuple):
    """What is seen when an image is opened: its content, channels, width and height, or why it cannot be."""

    item: Item
    content: str = ""
    shape: tuple[int, int, int] = (0, 0, 0)
    failure: str = ""


@dataclass(frozen=True)
class Report:
    """What was found; every file that is not as it should be is named."""

    found: Found
    sizes: Counter[tuple[int, int]]  # width and height
    channels: int
    classes: dict[str, Counter[str]]  # of each split, the readable images of each class, and of none: ""
    unreadable: dict[str, str]  # by name, with the reason
    empty: tuple[str, ...]
    duplicates: tuple[tuple[Item, ...], ...]  # files of equal content
    straddling: dict[str, tuple[str, ...]]  # patients with images in several splits

    @property
    def images(self) -> int:
        return self.sizes.total()

    @property
    def unlabeled(self) -> int:
        return sum(counts[""] for counts in self.classes.values())

    @property
    def conflicts(self) -> list[tuple[Item, ...]]:
        """Duplicates whose labels contradict each other."""
        return [same for same in self.duplicates if len({item.label for item in same} - {""}) > 1]

    @property
    def leaks(self) -> list[tuple[Item, ...]]:
        """Duplicates of which one is trained on and another tested."""
        return [same for same in self.duplicates if len({item.split for item in same}) > 1]

    @property
    def notes(self) -> list[str]:
        """What spoils no run, but may not have been meant."""
        classes, told = self.found.classes, list(self.found.notes)
        if unknown := [label for label in classes if label.lower() in UNKNOWN]:
            told.append(f"'{unknown[0]}' is read as a class; leave the label empty where it is not known")
        alike = defaultdict[str, list[str]](list)
        for label in classes:
            alike[" ".join(label.casefold().split())].append(label)
        told += [f"{' and '.join(some)} are read as different classes" for some in alike.values() if len(some) > 1]
        return told

    def problems(self, skip: bool = False) -> list[str]:
        """What would spoil a run; unreadable files would not where they are left out."""
        told = []
        if self.found.loose:
            told.append(f"{counted(len(self.found.loose), 'image')} in no class's folder")
        if (bad := len(self.unreadable) + len(self.empty)) and not skip:
            told.append(f"{counted(bad, 'file')} cannot be read (data.unreadable = 'skip' leaves them out)")
        if self.conflicts:
            told.append(f"different labels for {counted(len(self.conflicts), 'image')}")
        if self.leaks:
            told.append(f"several splits with {counted(len(self.leaks), 'image')} in common")
        if self.straddling:
            told.append(f"several splits with {counted(len(self.straddling), 'patient')} in common")
        splits = self.found.splits
        if splits and not {"train", "test"} <= set(splits):
            told.append(f"there are images for {' and '.join(splits)}, but a run needs train and test")
        if len(self.found.classes) < 2:
            told.append(f"a run needs two classes or more, there are {len(self.found.classes)}")
        asked = {label for split in splits if split != "train" for label in self.classes[split]} - {""}
        if untaught := [label for label in self.found.classes if label in asked and not self.classes["train"][label]]:
            told.append(f"nothing to train on of {', '.join(untaught)}, which the other splits have")
        if blind := sum(self.classes[split][""] for split in splits if split != "train"):
            told.append(f"{counted(blind, 'image')} to validate or test on without a label")
        return told

    def to_json(self, skip: bool = False) -> dict[str, Any]:
        return {
            "path": str(self.found.path),
            "kind": self.found.kind,
            "images": self.images,
            "channels": self.channels,
            "sizes": {f"{width}x{height}": count for (width, height), count in self.sizes.most_common()},
            "classes": list(self.found.classes),
            "splits": {
                split or "all": {label: counts[label] for label in self.found.classes} | {"unlabeled": counts[""]}
                for split, counts in self.classes.items()
            },
            "unlabeled": self.unlabeled,
            "unreadable": self.unreadable,
            "empty": list(self.empty),
            "duplicates": [[item.name for item in same] for same in self.duplicates],
            "conflicts": [{item.name: item.label for item in same} for same in self.conflicts],
            "across_splits": [{item.name: item.split for item in same} for same in self.leaks],
            "patients_across_splits": {patient: list(splits) for patient, splits in self.straddling.items()},
            "in_no_class": list(self.found.loose),
            "not_images": list(self.found.strays),
            "notes": self.notes,
            "problems": self.problems(skip),
        }


def check(found: Found, watch: Callable[[int], None] = lambda seen: None) -> Report:
    """Opens every image; `watch` is told how many have been seen."""
    sizes, classes, failed = Counter[tuple[int, int]](), defaultdict[str, Counter[str]](Counter), dict[str, str]()
    same, patients = defaultdict[str, list[Item]](list), defaultdict[str, set[str]](set)
    channels, empty = 1, []
    for seen, (item, content, shape, failure) in enumerate(looks(found), 1):
        if failure == EMPTY:
            empty.append(item.name)
        elif failure:
            failed[item.name] = failure
        else:
            sizes[shape[1:]] += 1
            channels = max(channels, shape[0])
            classes[item.split][item.label] += 1
            same[content].append(item)
            if item.patient:
                patients[item.patient].add(item.split)
        watch(seen)
    return Report(
        found,
        sizes,
        channels,
        {split: classes[split] for split in found.splits or [""]},
        failed,
        tuple(empty),
        tuple(tuple(equal) for equal in same.values() if len(equal) > 1),
        {patient: tuple(sorted(splits)) for patient, splits in patients.items() if len(splits) > 1},
    )


def looks(found: Found) -> Iterator[Look]:
    """Every image, opened as a run would open it."""
    if found.kind == "npz":
        yield from looks_at_arrays(found)
        return
    for item in found.items:
        try:
            header = pictures.header(item.file)
            channels, height, width = pictures.read(item.file, header.colour).shape
            item = replace(item, patient=item.patient or header.patient)
            yield Look(item, reading.digest_of(item.file), (channels, width, height))
        except Unreadable as error:
            yield Look(item, failure=str(error))


def looks_at_arrays(found: Found) -> Iterator[Look]:
    for item, image in zip(found.items, read.stored(found), strict=True):
        channels, height, width = image.shape
        yield Look(item, read.fingerprint_of(image), (channels, width, height))
