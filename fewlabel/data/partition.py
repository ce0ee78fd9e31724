"""Who holds which image, and with or without its label."""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.rng import Rng
from fewlabel.data import labels as where
from fewlabel.data.labels import Index
from fewlabel.data.own.read import TABLES

if TYPE_CHECKING:
    from fewlabel.data.datasets import Dataset
    from fewlabel.experiment import Clients, Experiment, Labels, Stream


def nothing(*shape: int) -> np.ndarray:
    return np.empty((*shape, 0), np.int64)


@dataclass(frozen=True)
class Share:
    """One client's images in a random order, in which they come where they stream. Without any it is left out."""

    labeled: Index
    unlabeled: Index

    def __len__(self) -> int:
        return len(self.labeled) + len(self.unlabeled)

    @property
    def images(self) -> Index:
        return np.concatenate([self.labeled, self.unlabeled])

    def at(self, round: int, stream: "Stream | None") -> "Share":
        """What of it is there in a round."""
        if stream is None:
            return self
        parts = {"labeled": self.labeled, "unlabeled": self.unlabeled}
        return Share(**parts | {name: arrived(parts[name], round, stream) for name in streamed(stream)})


def streamed(stream: "Stream") -> tuple[str, ...]:
    return ("labeled", "unlabeled") if stream.data == "all" else (stream.data,)


def arrived(index: Index, round: int, stream: "Stream") -> Index:
    """What is there of images that come in steps; a longer array begins with all that came before it."""
    step = min(max(round - 1, 0) // stream.rounds, stream.steps - 1)
    parts = np.array_split(index, stream.steps)
    return parts[step] if stream.mode == "replace" else np.concatenate(parts[: step + 1])


class Shares(Sequence[Share]):
    """All clients' images in one array: they take memory for their images, however many clients there are."""

    def __init__(self, index: Index, ends: Index) -> None:
        self._index, self._ends = index, ends  # client c: labeled up to ends[2c + 1], unlabeled up to ends[2c + 2]

    def __len__(self) -> int:
        return len(self._ends) // 2

    def __getitem__(self, client: int) -> Share:  # type: ignore[override]
        start, middle, end = self._ends[2 * range(len(self))[client] :][:3]
        return Share(self._index[start:middle], self._index[middle:end])


@dataclass(frozen=True)
class Partition:
    """The training split, dealt out."""

    shares: Sequence[Share]
    server: Index  # labeled images at the server
    data: str = ""  # digest of the data set whose images these indices count
    validation: Index = field(default_factory=nothing)  # labeled images that the server validates on
    noise: np.ndarray = field(default_factory=lambda: nothing(2))  # images, and the wrong labels that they carry

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """Those of the federation; a share without images is left out of it."""
        return tuple(number for number, share in enumerate(self.shares) if len(share))

    @cached_property
    def checksum(self) -> str:
        digest = hashlib.sha256(self.data.encode())
        # Three more where there are any, so that an even number tells them from shares.
        more = [self.validation, *self.noise] if len(self.validation) or self.noise.size else []
        shared = (part for share in self.shares for part in (share.labeled, share.unlabeled))
        for index in chain([self.server], shared, more):
            digest.update(len(index).to_bytes(8, "little") + index.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path, labels: np.ndarray, classes: tuple[str, ...]) -> None:
        def histogram(index: Index) -> list[int]:
            counts: list[int] = np.bincount(where.known(labels, index), minlength=len(classes)).tolist()
            return counts

        clients = [
            {
                "id": number,
                "labeled": share.labeled.tolist(),
                "unlabeled": share.unlabeled.tolist(),
                "classes": histogram(share.images),
            }
            for number, share in enumerate(self.shares)
        ]
        whole = {
            "checksum": self.checksum,
            "data": self.data,
            "classes": classes,
            "server": {"labeled": self.server.tolist(), "classes": histogram(self.server)},
            "validation": {"labeled": self.validation.tolist(), "classes": histogram(self.validation)},
            "noise": self.noise.tolist(),
            "clients": clients,
        }
        path.write_text(json.dumps(whole, separators=(",", ":")))

    @classmethod
    def load(cls, path: Path) -> "Partition":
        images, ends = array("q"), array("q", [0])

        def lay(entry: dict[str, Any]) -> dict[str, Any] | None:
            """Lays a client's lists into the array as they are read, so that no two clients' are in memory."""
            if "unlabeled" not in entry:
                return entry
            if entry["id"] != (place := len(ends) // 2):
                raise ValueError(f"client {entry['id']} stands in the place of client {place}")
            for part in ("labeled", "unlabeled"):
                images.extend(entry[part])
                ends.append(len(images))
            return None

        def index(numbers: list[int]) -> Index:
            return np.array(numbers, dtype=np.int64)

        try:
            whole: dict[str, Any] = json.loads(path.read_text(), object_hook=lay)
            shares = Shares(np.array(images, np.int64), np.array(ends, np.int64))
            partition = cls(
                shares,
                index(whole["server"]["labeled"]),
                whole["data"],
                index(whole["validation"]["labeled"]),
                index(whole["noise"]).reshape(2, -1),
            )
            stored = whole["checksum"]
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise StorageError(f"{path} is not a partition that can be read: {error}") from None
        if partition.checksum != stored:
            raise StorageError(f"{path} was changed: its checksum does not match the indices in it")
        everywhere = np.concatenate([images, partition.server, partition.validation])
        if wrong := [*everywhere[everywhere < 0], *partition.noise[0][partition.noise[0] < 0]]:
            raise StorageError(f"{path} holds image {wrong[0]}, and images count from 0; correct it")
        there, times = np.unique(everywhere, return_counts=True)
        if len(twice := there[times > 1]):
            raise StorageError(f"{path} puts image {twice[0]} in several places; leave each image in one")
        return partition


def iid(y: np.ndarray, clients: "Clients", rng: Rng) -> list[Index]:
    return [np.sort(part) for part in np.array_split(rng.numpy.permutation(len(y)), clients.count)]


def iid_per_class(y: np.ndarray, clients: "Clients", rng: Rng) -> list[Index]:
    """Of each class as many to each client, as in FedMatch; what is left over goes on where the class before ended."""
    classes = [rng.numpy.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    return [np.sort(np.concatenate(classes)[first :: clients.count]) for first in range(clients.count)]


def dirichlet(y: np.ndarray, clients: "Clients", rng: Rng) -> list[Index]:
    """Each class dealt out by Dirichlet(alpha) proportions, as RSCFed and CBAFed do it.

    With `balanced`, a client that already holds its fair share of all images gets none of the next class. The draw is
    repeated until every client holds at least `min_size` images.
    """
    fair, draw = len(y) / clients.count, rng.numpy
    for _ in range(1000):
        parts: list[list[Index]] = [[] for _ in range(clients.count)]
        sizes = np.zeros(clients.count)
        for label in np.unique(y):
            index = draw.permutation(np.flatnonzero(y == label))
            open_ = sizes < fair if clients.balanced else np.full(clients.count, True)
            shares = draw.dirichlet(np.full(clients.count, clients.alpha)) * open_
            if not shares.sum() > 0:  # every open client drew a share below the smallest number
                shares = open_.astype(float)
            for part, piece in zip(parts, proportional(index, shares), strict=True):
                part.append(piece)
            sizes = np.array([sum(map(len, part)) for part in parts])
        if sizes.min() >= clients.min_size:
            return [np.sort(np.concatenate(part)) for part in parts]
    raise BadInput(
        f"no Dirichlet({clients.alpha}) partition of {len(y)} images gives each of {clients.count} clients "
        f"{clients.min_size} of them; lower clients.count or clients.min_size, or raise clients.alpha"
    )


def proportional(index: Index, shares: np.ndarray) -> list[Index]:
    """Images cut in these proportions; where the exact cut is within an image, that one is for the next."""
    ends = np.cumsum(shares)
    return np.split(index, (ends[:-1] / ends[-1] * len(index)).astype(int))


def shards(y: np.ndarray, clients: "Clients", rng: Rng) -> list[Index]:
    """Sorted by class and cut into equal shards, of which each client gets a few at random (McMahan et al., 2017)."""
    each = clients.shards or 2
    order = rng.numpy.permutation(len(y))
    pieces = np.array_split(order[np.argsort(y[order], kind="stable")], clients.count * each)
    dealt = rng.numpy.permutation(len(pieces)).reshape(clients.count, each)
    return [np.sort(np.concatenate([pieces[piece] for piece in some])) for some in dealt]


def fedmatch(y: np.ndarray, clients: "Clients", rng: Rng) -> list[Index]:
    """FedMatch's class imbalance: a client's type is its number modulo the classes, and `pattern` has a row for each.

    Each class is cut among the clients in the proportions of its column, so every image is dealt. With as many clients
    of each type and as many images of each class, a client's classes come in the very proportions of its row.
    """
    labels = np.unique(y)
    types = pattern(len(labels))[np.arange(clients.count) % len(labels)]
    cut = [
        proportional(rng.numpy.permutation(np.flatnonzero(y == label)), types[:, column])
        for column, label in enumerate(labels)
    ]
    return [np.sort(np.concatenate(pieces)) for pieces in zip(*cut, strict=True)]


def pattern(classes: int) -> np.ndarray:
    """Class probabilities by client type: 0.50 its own, 0.15 both neighbours, 0.03 elsewhere, 0.02 the one opposite.

    That is for 10 classes. More share the same 0.20 in the same proportions; fewer keep these numbers, scaled to 1.
    """
    row = np.full(classes, 0.03)
    row[classes // 2] = 0.02
    row[[0, 1 % classes, -1]] = 0
    row *= min(1, 0.20 / max(row.sum(), 0.20))
    for distance, chance in ((0, 0.50), (1, 0.15), (-1, 0.15)):
        row[distance % classes] += chance
    return np.stack([np.roll(row / row.sum(), own) for own in range(classes)])


Divide = Callable[[np.ndarray, "Clients", Rng], list[Index]]

# Without a function it is given who holds what, not drawn.
PARTITIONS: dict[str, tuple[Divide | None, str]] = {
    "iid": (iid, "equal random parts"),
    "iid-per-class": (iid_per_class, "equal random parts with equally many images of each class, as in FedMatch"),
    "dirichlet": (dirichlet, "each class dealt out by Dirichlet(clients.alpha); smaller alpha, more different clients"),
    "shards": (shards, "clients.shards pieces each (2) of the images sorted by class, as in the FedAvg paper"),
    "fedmatch": (fedmatch, "half of a client's images from one class, by FedMatch's pattern of ten client types"),
    "by-column": (None, "a client for each value of the data set's own column, such as the hospital"),
    "file": (None, "as in a partition.json saved before (clients.file); where the labels are is dealt anew"),
}


def of(dataset: "Dataset", experiment: "Experiment") -> Partition:
    """A data set dealt out as an experiment says."""
    clients, given = experiment.clients, None
    if clients.partition == "by-column":
        given = by_column(dataset, clients)
    elif clients.partition == "file":
        given = Partition.load(Path(clients.file or ""))
        if given.data != dataset.digest:
            raise BadInput(f"{clients.file} deals out other images than those of '{dataset.name}' at this image size")
        dealt, images = np.concatenate([share.images for share in given.shares]), len(dataset.splits["train"].labels)
        last = np.concatenate([dealt, given.server, given.validation, given.noise[0]]).max(initial=0)
        if last >= images:
            raise BadInput(f"{clients.file} holds image {last}, but '{dataset.name}' has {images} to train on, from 0")
    if given and len(given.shares) != clients.count:
        raise BadInput(f"{clients.partition} gives {len(given.shares)} clients; set clients.count to that number")
    partition = deal(
        dataset.splits["train"].labels.numpy(),
        clients,
        experiment.labels,
        experiment.seed,
        experiment.stream,
        given=given,
        classes=len(dataset.classes),
        published="validation" in dataset.splits,
    )
    return replace(partition, data=dataset.digest)


def by_column(dataset: "Dataset", clients: "Clients") -> Partition:
    """A client for each value of the training split's `clients`, in their order; images without one are nobody's.

    That is one array, or one by name for each column.
    """
    found: Any = getattr(dataset.splits["train"], "clients", None)
    name = clients.column or ""
    listed = {name if dataset.name in TABLES else "": found}  # a table's one is read by the name that is given
    columns: Mapping[str, Any] = found if isinstance(found, Mapping) else {} if found is None else listed
    if not columns:
        raise BadInput(f"'{dataset.name}' does not say which client an image is of; choose another clients.partition")
    name = name or next(iter(columns))
    if name not in columns:
        may = ", ".join(filter(None, columns)) or "left out"
        raise BadInput(f"'{dataset.name}' has no column '{name}'; clients.column may be {may}")
    column = np.asarray(columns[name])
    values = sorted((value for value in np.unique(column) if str(value) not in ("", "-1")), key=natural)
    return Partition(tuple(Share(nothing(), np.flatnonzero(column == value)) for value in values), nothing())


def natural(value: Any) -> list[Any]:
    """An order in which hospital 2 comes before hospital 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", str(value)))]


def deal(
    y: np.ndarray,
    clients: "Clients",
    labels: "Labels",
    seed: int,
    stream: "Stream | None" = None,
    *,
    given: Partition | None = None,
    classes: int = 0,
    published: bool = False,
) -> Partition:
    """Deals out the training split with these labels; the seed alone decides how.

    Of what is `given`, each client keeps its images, and the server those that it had where it still has any. Where a
    validation split is `published`, no label is spent on one.
    """
    rng, places = Rng(seed, "partition"), labels.at.split("+")
    everything, server, validation = np.arange(len(y)), nothing(), nothing()
    if given is not None:
        everything, server = np.concatenate([share.images for share in given.shares]), given.server
    if "server" not in places:
        server = nothing()
    elif not len(server):
        server = where.per_class(y, everything, labels.server_per_class or labels.per_class or 50, rng.stream("server"))
    parts = divide(y, np.setdiff1d(everything, server), clients, rng, given)
    full, others = where.choose(y, parts, labels, rng.stream("which"))
    shares = []
    for number, part in enumerate(parts):
        part = part if number in full or number in others else part[:0]
        labeled, able = part[:0], part[y[part] >= 0]
        if "some-clients" in places and number in full:
            labeled = able
        elif "every-client" in places and len(able):
            labeled = where.some(y, able, labels, rng.stream("labels", number))
        shares.append(Share(labeled, np.setdiff1d(part, labeled)))
    if not len(server) and not any(len(share.labeled) for share in shares):
        raise BadInput(
            f"labels.at = '{labels.at}' finds no label to train on; a run needs some, at a client or the server"
        )
    if labels.validation and published:
        raise BadInput("labels.validation is for data without a validation split, and these have one; leave it out")
    if labels.validation:
        validation = given.validation if given is not None else validation
        if not len(validation):
            sites = [server, *(share.labeled for share in shares)]
            validation = where.validation(y, sites, labels.validation, rng.stream("validation"))
        server = np.setdiff1d(server, validation)
        shares = [Share(np.setdiff1d(share.labeled, validation), share.unlabeled) for share in shares]
    spoken = np.concatenate([server, validation, *(share.labeled for share in shares)])
    noise = where.wrong(y, spoken, classes or int(y.max()) + 1, labels.noise, rng.stream("noise"))
    shares = [shuffled(n, share, stream, rng.stream("order", n)) for n, share in enumerate(shares)]
    return Partition(tuple(shares), server, validation=validation, noise=noise)


def divide(y: np.ndarray, among: Index, clients: "Clients", rng: Rng, given: Partition | None) -> list[Index]:
    """The clients' parts of these images, each in the order of the data set."""
    if given is not None:
        parts = [np.intersect1d(share.images, among) for share in given.shares]
    elif clients.count * clients.min_size > len(among):
        raise BadInput(
            f"{clients.count} clients of at least {clients.min_size} images need more than the {len(among)} "
            "there are; lower clients.count or clients.min_size"
        )
    else:
        draw, _ = PARTITIONS[clients.partition]
        if draw is None:
            raise BadInput(f"clients.partition = '{clients.partition}' needs a data set, or a file, that gives it")
        named, unnamed = among[y[among] >= 0], among[y[among] < 0]
        least = replace(clients, min_size=max(0, clients.min_size - len(unnamed) // clients.count))
        drawn = draw(y[named], least, rng.stream("clients")) if len(named) else [nothing()] * clients.count
        parts = [named[part] for part in drawn]
        if len(unnamed):  # of no class that could be dealt out: to everybody alike
            more = iid(unnamed, clients, rng.stream("unnamed"))
            parts = [np.sort(np.append(part, unnamed[some])) for part, some in zip(parts, more, strict=True)]
    for number, size in enumerate(map(len, parts)):
        if size < clients.min_size and (size or given is None):  # a given share without images was left out before
            raise BadInput(f"client {number} has {size} images and clients.min_size is {clients.min_size}; lower it")
    return parts


def shuffled(number: int, share: Share, stream: "Stream | None", rng: Rng) -> Share:
    """A share in an order that tells nothing; that of the data set often is by class."""
    parts = {"labeled": share.labeled, "unlabeled": share.unlabeled}
    for name, index in parts.items():
        if stream and name in streamed(stream) and 0 < len(index) < 2 * stream.steps:  # BatchNorm needs two
            raise BadInput(
                f"client {number} has {len(index)} {name} images, fewer than two for each of {stream.steps} steps; "
                "lower stream.steps or raise clients.min_size"
            )
    return Share(**{name: rng.stream(name).numpy.permutation(index) for name, index in parts.items()})
