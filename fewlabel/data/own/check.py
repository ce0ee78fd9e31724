"""Open every one of your images before anyone trains on them: count what is there, and name what would spoil a run."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fewlabel.data import pictures
from fewlabel.data.own.listing import Item, Listing, counted
from fewlabel.data.own.reader import digest_of_pixels, images_of_npz
from fewlabel.data.pictures import EMPTY, Unreadable
from fewlabel.data.reading import digest_of

UNKNOWN = ("na", "n/a", "nan", "none", "null", "unknown", "?", "-")  # labels that may mean "no label"


class OpenedImage(NamedTuple):
    """An image that was opened, or the reason why it cannot be."""

    item: Item
    digest: str = ""  # the same for the same images
    shape: tuple[int, int, int] = (0, 0, 0)  # channels, width and height
    failure: str = ""
    deep: bool = False  # more than eight bits


@dataclass(frozen=True)
class CheckReport:
    """What a check found. It names every file that is not as it should be."""

    listing: Listing
    sizes: Counter[tuple[int, int]]  # width and height
    channels: int
    classes: dict[str, Counter[str]]  # for each split, the readable images of each class; "" counts those without label
    unreadable: dict[str, str]  # by name, with the reason
    empty: tuple[str, ...]
    duplicates: tuple[tuple[Item, ...], ...]  # files of equal content
    straddling: dict[str, tuple[str, ...]]  # patients with images in several splits
    deep: Counter[str]  # the readable images of each class with more than eight bits

    @property
    def images(self) -> int:
        return self.sizes.total()

    @property
    def unlabeled(self) -> int:
        return sum(counts[""] for counts in self.classes.values())

    @property
    def conflicts(self) -> list[tuple[Item, ...]]:
        """Duplicates with different labels."""
        return [same for same in self.duplicates if len({item.label for item in same} - {""}) > 1]

    @property
    def emptied(self) -> list[str]:
        """Splits that have labeled images, but none that a run would use: all have copies with different labels."""
        odd = Counter(item.split for same in self.conflicts for item in same if item.label)
        return [split for split, counts in self.classes.items() if 0 < counts.total() - counts[""] == odd[split]]

    @property
    def leaks(self) -> list[tuple[Item, ...]]:
        """Duplicates in different splits, without those that a run leaves out because of their labels."""
        odd = self.conflicts
        return [same for same in self.duplicates if len({item.split for item in same}) > 1 and same not in odd]

    @property
    def notes(self) -> list[str]:
        """What spoils no run, but may be a mistake."""
        classes, notes = self.listing.classes, list(self.listing.notes)
        if unknown := [label for label in classes if label.lower() in UNKNOWN]:
            notes.append(f"'{unknown[0]}' is read as a class; leave the label empty where it is not known")
        alike = defaultdict[str, list[str]](list)
        for label in classes:
            alike[" ".join(label.casefold().split())].append(label)
        counts = sum(self.classes.values(), Counter[str]())
        if 0 < self.deep.total() < self.images:
            each = ", ".join(
                f"{self.deep[label]:,} of {counts[label]:,} {label or 'without label'}"
                for label in (*classes, "")
                if counts[label]
            )
            notes.append(
                f"some images have more than eight bits, others eight ({each}): this alone may make them brighter or "
                "darker, and a model may learn that instead of the classes; save all of them with the same depth"
            )
        return notes + [f"{' and '.join(some)} are read as different classes" for some in alike.values() if some[1:]]

    def problems(self, skip: bool = False) -> list[str]:
        """List what would spoil a run. `skip` says that unreadable files are left out."""
        found, splits = [], self.listing.splits
        if self.listing.loose:
            found.append(f"{counted(len(self.listing.loose), 'image')} in no class's folder")
        if (bad := len(self.unreadable) + len(self.empty)) and not skip:
            found.append(f"{counted(bad, 'file')} cannot be read (data.unreadable = 'skip' leaves them out)")
        if self.leaks:
            found.append(f"several splits with {counted(len(self.leaks), 'image')} in common")
        if self.straddling:
            found.append(f"several splits with {counted(len(self.straddling), 'patient')} in common")
        if splits and not {"train", "test"} <= set(splits):
            found.append(f"there are images for {' and '.join(splits)}, but a run needs train and test")
        if len(self.listing.classes) < 2:
            found.append(f"a run needs two classes or more, there are {len(self.listing.classes)}")
        for split in self.emptied:
            where = f" of {split}" if split else ""
            found.append(f"every labeled image{where} has a copy with another label, so a run has none left")
        asked = {label for split in splits if split != "train" for label in self.classes[split]} - {""}
        if untaught := [name for name in self.listing.classes if name in asked and not self.classes["train"][name]]:
            found.append(f"no images to train on for {', '.join(untaught)}, which other splits have")
        if blind := sum(self.classes[split][""] for split in splits if split != "train"):
            found.append(f"{counted(blind, 'image')} to validate or test on without a label")
        return found

    def to_json(self, skip: bool = False) -> dict[str, Any]:
        return {
            "path": str(self.listing.path),
            "kind": self.listing.kind,
            "images": self.images,
            "channels": self.channels,
            "sizes": {f"{width}x{height}": count for (width, height), count in self.sizes.most_common()},
            "classes": list(self.listing.classes),
            "splits": {
                split or "all": {label: counts[label] for label in self.listing.classes} | {"unlabeled": counts[""]}
                for split, counts in self.classes.items()
            },
            "unlabeled": self.unlabeled,
            "unreadable": self.unreadable,
            "empty": list(self.empty),
            "duplicates": [[item.name for item in same] for same in self.duplicates],
            "conflicts": [{item.name: item.label for item in same} for same in self.conflicts],
            "across_splits": [{item.name: item.split for item in same} for same in self.leaks],
            "patients_across_splits": {patient: list(splits) for patient, splits in self.straddling.items()},
            "in_no_class": list(self.listing.loose),
            "not_images": list(self.listing.strays),
            "notes": self.notes,
            "problems": self.problems(skip),
        }


def check_images(listing: Listing, watch: Callable[[int], None] = lambda opened: None) -> CheckReport:
    """Open every image and report. `watch` is called with the number of images opened so far."""
    sizes, classes, failed = Counter[tuple[int, int]](), defaultdict[str, Counter[str]](Counter), dict[str, str]()
    same, patients = defaultdict[str, list[Item]](list), defaultdict[str, set[str]](set)
    channels, empty, deep = 1, [], Counter[str]()
    for number, (item, digest, shape, failure, is_deep) in enumerate(opened_images(listing), 1):
        if failure == EMPTY:
            empty.append(item.name)
        elif failure:
            failed[item.name] = failure
        else:
            sizes[shape[1:]] += 1
            channels = max(channels, shape[0])
            classes[item.split][item.label] += 1
            deep[item.label] += is_deep
            same[digest].append(item)
            if item.patient:
                patients[item.patient].add(item.split)
        watch(number)
    return CheckReport(
        listing,
        sizes,
        channels,
        {split: classes[split] for split in listing.splits or [""]},
        failed,
        tuple(empty),
        tuple(tuple(equal) for equal in same.values() if len(equal) > 1),
        {patient: tuple(sorted(splits)) for patient, splits in patients.items() if len(splits) > 1},
        deep,
    )


def opened_images(listing: Listing) -> Iterator[OpenedImage]:
    """Open every image as a run would."""
    if listing.kind == "npz":
        for item, image in zip(listing.items, images_of_npz(listing), strict=True):
            channels, height, width = image.shape
            yield OpenedImage(item, digest_of_pixels(image), (channels, width, height))
        return
    for item in listing.items:
        try:
            header = pictures.header(item.file)
            channels, height, width = pictures.read(item.file, header.colour).shape
            item = replace(item, patient=item.patient or header.patient)
            deep = header.values is not None
            yield OpenedImage(item, digest_of(item.file), (channels, width, height), deep=deep)
        except Unreadable as error:
            yield OpenedImage(item, failure=str(error))
