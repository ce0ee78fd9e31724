"""Published files: where they lie on this machine, and whether their bytes are the published ones."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.raw import Raw

Sums = dict[str, tuple[int, int, str]]  # of each path its size, its time in nanoseconds, and its md5 as of then


@dataclass(frozen=True)
class File:
    name: str
    url: str = ""
    md5: tuple[str, ...] = ()  # as published, of each release; without one the first reading is the measure
    instead: tuple[str, ...] = ()  # what may lie there for it, such as the folder that the archive unpacks to


@dataclass(frozen=True)
class Form:
    """One way in which a data set is published: its files, and who reads their paths."""

    files: tuple[File, ...]
    read: Callable[..., Raw]
    kept: Callable[..., Sequence[Path]] | None = None  # of their paths: what of a folder is read, if not all of it


@dataclass(frozen=True)
class Source:
    forms: tuple[Form, ...]  # the first is the one to download
    about: str
    folders: tuple[str, ...] = ()  # where its files may lie beside a folder of the set's name
    page: str = ""  # where people get what no command can


def cache() -> Path:
    """The user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewlabel"


def roots() -> list[Path]:
    """Where data are looked for: in FEWLABEL_DATA, which may name several folders as PATH does, then in the cache."""
    named = [Path(folder).expanduser() for folder in os.environ.get("FEWLABEL_DATA", "").split(os.pathsep) if folder]
    return [*named, cache() / "data"]


def home(name: str) -> Path:
    """Where the files of a set are put when they are downloaded."""
    return roots()[0] / name


def find(name: str, source: Source) -> tuple[Form, list[Path]]:
    """The first form of a set all of whose files lie in one folder."""
    nearest: tuple[int, Path, list[str]] = (0, home(name), [])
    for folder in (root / below for root in roots() for below in (name, *source.folders, "")):
        for form in source.forms:
            found = [lying(folder, file) for file in form.files]
            paths = [path for path in found if path]
            if len(paths) == len(found):
                return form, paths
            if len(paths) > nearest[0]:
                missing = [file.name for file, path in zip(form.files, found, strict=True) if not path]
                nearest = len(paths), folder, missing
    _, folder, missing = nearest
    wanted = missing or [file.name for file in source.forms[0].files]
    others = [listed([file.name for file in form.files]) for form in source.forms[1:] if not missing]
    raise BadInput(
        f"the data set '{name}' is not here: put {listed(wanted)}{''.join(f' (or {other})' for other in others)} "
        + (f"from {source.page} " if source.page else "")
        + f"into {folder}, or name another folder by FEWLABEL_DATA"
        + (f", or run `fewlabel data get {name}`" if all(file.url for file in source.forms[0].files) else "")
    )


def lying(folder: Path, file: File) -> Path | None:
    return next((folder / name for name in (file.name, *file.instead) if (folder / name).exists()), None)


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def leaves(paths: Sequence[Path], kept: Sequence[Path] | None = None) -> Iterator[tuple[Path, os.stat_result]]:
    """All files below these paths, or those of a folder that are kept, in an order that is the same everywhere."""
    for path in paths:
        inside = (path.rglob("*") if kept is None else kept) if path.is_dir() else [path]
        yield from ((leaf, leaf.stat()) for leaf in sorted(inside) if leaf.is_file())


def fingerprint(sums: Sums) -> str:
    """One checksum of all files, wherever they lie."""
    whole = [(Path(path).name, md5) for path, (_, _, md5) in sums.items()]
    return hashlib.blake2b(repr(whole).encode(), digest_size=6).hexdigest()


def known(name: str, form: Form, paths: Sequence[Path]) -> Sums | None:
    """The checksums from when these files were last read; nothing if one has been touched since."""
    before, sums = remembered(name), Sums()
    # What is kept of a folder was worked out when it was read.
    inside = tuple(f"{path.absolute()}{os.sep}" for path in paths)
    kept = [Path(path) for path in before if path.startswith(inside)] if form.kept else None
    for path, stat in leaves(sorted(paths, key=Path.is_dir), kept):
        sums[str(path.absolute())] = entry = before.get(str(path.absolute()), (0, 0, ""))
        if entry[:2] != (stat.st_size, stat.st_mtime_ns):
            return None
    return sums


def verify(name: str, form: Form, paths: Sequence[Path]) -> Sums:
    """Reads every byte and compares with the published checksum, or where there is none with the first reading."""
    earlier, sums = remembered(name), Sums()
    for file, whole in sorted(zip(form.files, paths, strict=True), key=lambda each: each[1].is_dir()):
        kept = form.kept(*paths) if form.kept and whole.is_dir() else None  # by a table that was compared before
        for path, stat in leaves([whole], kept):
            found = md5_of(path)
            _, _, first = earlier.get(str(path.absolute()), (0, 0, found))
            if file.md5 and found not in file.md5:
                raise BadInput(
                    f"{path} is damaged or another file: its md5 is {found}, published is {' or '.join(file.md5)}; "
                    "delete it and get it anew"
                )
            if not file.md5 and found != first:
                raise BadInput(
                    f"{path} was changed: its md5 is {found}, when first read it was {first}; "
                    f"restore it, or delete {record(name)} if the change was meant"
                )
            sums[str(path.absolute())] = (stat.st_size, stat.st_mtime_ns, found)
    return sums


def md5_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from None


def record(name: str) -> Path:
    return cache() / "checksums" / f"{name}.json"


def remembered(name: str) -> Sums:
    try:
        files = json.loads(record(name).read_text())["files"]
        return {path: (int(size), int(time), str(md5)) for path, (size, time, md5) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none yet, or of no use
        return {}


def remember(name: str, sums: Sums, counts: dict[str, list[int]]) -> None:
    """Records checksums and the number of images of each class, once all of them have been read."""
    path, text = record(name), json.dumps({"files": remembered(name) | sums, "counts": counts})
    with suppress(OSError):  # without it files are hashed again, which costs time alone
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".writing-") as folder:
            aside = Path(folder) / path.name
            aside.write_text(text)
            aside.replace(path)
