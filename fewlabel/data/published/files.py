"""Published files: where they lie on this machine, and whether their bytes are the published ones."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.raw import Raw

Checksums = dict[str, tuple[int, int, str]]  # by path: a file's size, its time in nanoseconds, and its md5 at that time


@dataclass(frozen=True)
class PublishedFile:
    name: str
    url: str = ""
    md5: tuple[str, ...] = ()  # one for each release; without any, later readings are compared with the first
    instead: tuple[str, ...] = ()  # other names that will do, such as the folder that the archive unpacks to
    members: tuple[tuple[str, str], ...] = ()  # of such a folder: the files that are read, each with its md5


@dataclass(frozen=True)
class Edition:
    """One way in which a data set is published: its files, and the function that reads them."""

    files: tuple[PublishedFile, ...]
    read: Callable[..., Raw]  # called with the files' paths
    kept: Callable[..., Sequence[Path]] | None = (
        None  # called with them, too: which files of a folder are read, if not all
    )


@dataclass(frozen=True)
class DatasetSource:
    """Where a data set comes from."""

    editions: tuple[Edition, ...]  # the first is the one to download
    about: str
    folders: tuple[str, ...] = ()  # where its files may lie, beside a folder of its name
    page: str = ""  # where people get files that no command can download


def cache() -> Path:
    """Return FewLabel's folder in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fewlabel"


def roots() -> list[Path]:
    """Return the folders to search: those in FEWLABEL_DATA, separated as in PATH, and then the cache."""
    named = [Path(folder).expanduser() for folder in os.environ.get("FEWLABEL_DATA", "").split(os.pathsep) if folder]
    return [*named, cache() / "data"]


def home(name: str) -> Path:
    """Return the folder into which the files of a set are downloaded."""
    return roots()[0] / name


def find(name: str, source: DatasetSource) -> tuple[Edition, list[Path]]:
    """Find the first edition of a set that lies complete in one folder, and the paths of its files."""
    nearest: tuple[int, Path, list[str]] = (0, home(name), [])
    for folder in (root / below for root in roots() for below in (name, *source.folders, "")):
        for edition in source.editions:
            found = [find_in(folder, file) for file in edition.files]
            paths = [path for path in found if path]
            if len(paths) == len(found):
                return edition, paths
            if len(paths) > nearest[0]:
                missing = [file.name for file, path in zip(edition.files, found, strict=True) if not path]
                nearest = len(paths), folder, missing
    _, folder, missing = nearest
    wanted = missing or [file.name for file in source.editions[0].files]
    others = [listed([file.name for file in edition.files]) for edition in source.editions[1:] if not missing]
    raise BadInput(
        f"the data set '{name}' is not here: put {listed(wanted)}{''.join(f' (or {other})' for other in others)} "
        + (f"from {source.page} " if source.page else "")
        + f"into {folder}, or name another folder by FEWLABEL_DATA"
        + (f", or run `fewlabel data get {name}`" if all(file.url for file in source.editions[0].files) else "")
    )


def find_in(folder: Path, file: PublishedFile) -> Path | None:
    if file.members and folder.name in file.instead and folder.is_dir():  # it was named itself
        return folder
    return next((folder / name for name in (file.name, *file.instead) if (folder / name).exists()), None)


def listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def files_in(paths: Sequence[Path], kept: Sequence[Path] | None = None) -> Iterator[tuple[Path, os.stat_result]]:
    """Find all files below these paths, or the `kept` ones of a folder, in an order that is the same everywhere."""
    for path in paths:
        inside = (path.rglob("*") if kept is None else kept) if path.is_dir() else [path]
        yield from ((file, file.stat()) for file in sorted(inside) if file.is_file())


def fingerprint(sums: Checksums) -> str:
    """Return one checksum of all files, wherever they lie."""
    whole = [(Path(path).name, md5) for path, (_, _, md5) in sums.items()]
    return hashlib.blake2b(repr(whole).encode(), digest_size=6).hexdigest()


def known(name: str, edition: Edition, paths: Sequence[Path]) -> Checksums | None:
    """Return the checksums from when these files were last read, or None if one of them was touched since."""
    before, sums = remembered(name), Checksums()
    # The files that were kept of a folder are those in the record.
    inside = tuple(f"{path.absolute()}{os.sep}" for path in paths)
    some = edition.kept or any(file.members for file in edition.files)
    kept = [Path(path) for path in before if path.startswith(inside)] if some else None
    for path, stat in files_in(sorted(paths, key=Path.is_dir), kept):
        sums[str(path.absolute())] = entry = before.get(str(path.absolute()), (0, 0, ""))
        if entry[:2] != (stat.st_size, stat.st_mtime_ns):
            return None
    return sums if sums or not paths else None


def verify(name: str, edition: Edition, paths: Sequence[Path]) -> Checksums:
    """Read every byte and compare with the published checksums, or without any, with those of the first reading."""
    earlier, sums = remembered(name), Checksums()
    for file, whole in sorted(zip(edition.files, paths, strict=True), key=lambda each: each[1].is_dir()):
        members = dict(file.members) if whole.is_dir() else {}
        if missing := [name for name in members if not (whole / name).is_file()]:
            raise BadInput(f"{whole} has no {listed(missing)}; unpack {file.name} again, or delete the folder")
        kept = edition.kept(*paths) if edition.kept and whole.is_dir() else None  # by a table that was compared before
        for path, stat in files_in([whole], [whole / name for name in members] or kept):
            found, published = md5_of(path), (members[path.name],) if members else file.md5
            _, _, first = earlier.get(str(path.absolute()), (0, 0, found))
            if published and found not in published:
                raise BadInput(
                    f"{path} is damaged or another file: its md5 is {found}, published is {' or '.join(published)}; "
                    "delete it and download it again"
                )
            if not published and found != first:
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
    """Return the file that remembers a set's checksums."""
    return cache() / "checksums" / f"{name}.json"


def remembered(name: str) -> Checksums:
    try:
        files = json.loads(record(name).read_text())["files"]
        return {path: (int(size), int(time), str(md5)) for path, (size, time, md5) in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # none yet, or of no use
        return {}


def remember(name: str, sums: Checksums, counts: dict[str, list[int]]) -> None:
    """Record checksums and the number of images of each class, once all of them have been read."""
    whole = {"files": remembered(name) | sums, "counts": counts}
    with suppress(StorageError):  # without it files are hashed again, which costs only time
        storage.make_folder(record(name).parent)
        storage.write(record(name), json.dumps(whole).encode(), durable=False)
