"""What is listed of images of one's own before any is opened: their files, and what people say of them."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.raw import Scale

SPLITS = {"train": "train", "val": "validation", "test": "test"} | {  # as in an npz, and what others write
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "testing": "test",
}
UNLABELED = ("unlabeled", "unlabelled")
CLASSES = "classes.txt"  # beside the images: all classes in their order, also those that this site does not have
PATIENTS = "patients.csv"  # beside the images: the patient of each, where they are known


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


def guess(path: Path) -> str:
    """The kind that a path looks like."""
    return "folder" if path.expanduser().is_dir() else {".npz": "npz"}.get(path.suffix.lower(), "csv")


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def classes_of(items: Iterable[Item], named: tuple[str, ...], where: Path) -> tuple[str, ...]:
    """Classes in the order that was named, or by number where they are numbers, or by name."""
    labels = {item.label for item in items} - {""}
    if named and (unnamed := sorted(labels - set(named))):
        raise BadInput(f"there are images of '{unnamed[0]}', a class that {where} does not name")
    numbers = all(re.fullmatch(r"-?\d{1,18}", label) for label in labels)
    return named or tuple(sorted(labels, key=lambda label: (int(label) if numbers else 0, label)))


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


def folders(classes: Sequence[str]) -> dict[str, str]:
    """A folder's name for each class: its own, unless a disk or the words with a meaning here forbid it."""
    names: dict[str, str] = {}
    for label in classes:
        name = re.sub(r'[/\\:*?"<>|\x00-\x1f]', "-", label).strip(". ") or "class"
        while name.lower() in {*SPLITS, *UNLABELED, *map(str.lower, names.values())}:
            name = f"{name}-"
        names[label] = name
    return names
