"""Deal out the training images: decide who holds which image, and with or without its label."""

import hashlib
import json
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.rng import Rng
from fewlabel.data.added import Added, check_unchanged, matched, overlaid, with_labels
from fewlabel.data.labels import (
    Index,
    choose_clients,
    known,
    per_class,
    some_images,
    validation_images,
    wrong_labels,
)
from fewlabel.data.own.listing import TABLES
from fewlabel.data.settings import Clients, Data, Labels, Stream

if TYPE_CHECKING:
    from fewlabel.data.datasets import Dataset


def nothing(*shape: int) -> np.ndarray:
    return np.empty((*shape, 0), np.int64)


@dataclass(frozen=True)
class Holding:
    """The images that one client holds, in a random order, in which they also stream. Without any it is left out."""

    labeled: Index
    unlabeled: Index

    def __len__(self) -> int:
        return len(self.labeled) + len(self.unlabeled)

    @property
    def images(self) -> Index:
        return np.concatenate([self.labeled, self.unlabeled])

    def at(self, round: int, stream: Stream | None) -> "Holding":
        """Return what has arrived in a round."""
        if stream is None:
            return self
        parts = {"labeled": self.labeled, "unlabeled": self.unlabeled}
        return Holding(**parts | {name: arrived(parts[name], round, stream) for name in streamed(stream)})


def streamed(stream: Stream) -> tuple[str, ...]:
    return ("labeled", "unlabeled") if stream.data == "all" else (stream.data,)


def arrived(index: Index, round: int, stream: Stream) -> Index:
    """Return the images that are there in a round, if they arrive in steps and in this order."""
    step = min(max(round - 1, 0) // stream.rounds, stream.steps - 1)
    parts = np.array_split(index, stream.steps)
    return parts[step] if stream.mode == "replace" else np.concatenate(parts[: step + 1])


class Holdings(Sequence[Holding]):
    """The holdings of all clients in one array, so that memory grows with the images and not with the clients."""

    def __init__(self, index: Index, ends: Index) -> None:
        self._index, self._ends = index, ends  # client c: labeled up to ends[2c + 1], unlabeled up to ends[2c + 2]

    def __len__(self) -> int:
        return len(self._ends) // 2

    def __getitem__(self, client: int) -> Holding:  # type: ignore[override]
        start, middle, end = self._ends[2 * range(len(self))[client] :][:3]
        return Holding(self._index[start:middle], self._index[middle:end])


@dataclass(frozen=True)
class Partition:
    """The training split, dealt out. An index counts its images from 0."""

    shares: Sequence[Holding]  # of each client
    server: Index  # labeled images at the server
    data: str = ""  # digest of the data set
    validation: Index = field(default_factory=nothing)  # labeled images that the server validates on
    noise: np.ndarray = field(default_factory=lambda: nothing(2))  # images, and their wrong labels
    added: np.ndarray = field(default_factory=lambda: nothing(2))  # images with a label from labels.file, and labels
    notes: tuple[str, ...] = ()  # about labels.file, for whoever lays out a run

    @cached_property
    def clients(self) -> tuple[int, ...]:
        """The clients of the federation: those that hold images."""
        return tuple(number for number, holding in enumerate(self.shares) if len(holding))

    @cached_property
    def checksum(self) -> str:
        digest = hashlib.sha256(self.data.encode())
        # Three more arrays, if there are any: an even number of arrays in all tells them from a client's two.
        more = [self.validation, *self.noise] if len(self.validation) or self.noise.size else []
        held = (part for holding in self.shares for part in (holding.labeled, holding.unlabeled))
        for index in chain([self.server], held, more):
            digest.update(len(index).to_bytes(8, "little") + index.astype("<i8").tobytes())
        if self.added.size:
            digest.update(b"added" + self.added.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path, labels: np.ndarray, classes: tuple[str, ...]) -> None:
        def histogram(index: Index) -> list[int]:
            counts: list[int] = np.bincount(known(labels, index), minlength=len(classes)).tolist()
            return counts

        labels = overlaid(labels, self.added)
        clients = [
            {
                "id": number,
                "labeled": holding.labeled.tolist(),
                "unlabeled": holding.unlabeled.tolist(),
                "classes": histogram(holding.images),
            }
            for number, holding in enumerate(self.shares)
        ]
        whole = {
            "checksum": self.checksum,
            "data": self.data,
            "classes": classes,
            "server": {"labeled": self.server.tolist(), "classes": histogram(self.server)},
            "validation": {"labeled": self.validation.tolist(), "classes": histogram(self.validation)},
            "noise": self.noise.tolist(),
            **({"added": self.added.tolist()} if self.added.size else {}),
            "clients": clients,
        }
        path.write_text(json.dumps(whole, separators=(",", ":")))

    @classmethod
    def load(cls, path: Path) -> "Partition":
        images, ends = array("q"), array("q", [0])

        def lay(entry: dict[str, Any]) -> dict[str, Any] | None:
            """Move a client's lists into the array as soon as they are read, to hold one client's at a time."""
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
            partition = cls(
                Holdings(np.array(images, np.int64), np.array(ends, np.int64)),
                index(whole["server"]["labeled"]),
                whole["data"],
                index(whole["validation"]["labeled"]),
                index(whole["noise"]).reshape(2, -1),
                index(whole.get("added", [])).reshape(2, -1),
            )
            stored = whole["checksum"]
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise StorageError(f"{path} is not a partition that can be read: {error}") from None
        if partition.checksum != stored:
            raise StorageError(f"{path} was changed: its checksum does not match the indices in it")
        everywhere = np.concatenate([images, partition.server, partition.validation])
        if wrong := [*everywhere[everywhere < 0], *partition.noise[0][partition.noise[0] < 0]]:
            raise StorageError(f"{path} holds image {wrong[0]}, and images count from 0; correct it")
        held, times = np.unique(everywhere, return_counts=True)
        if len(twice := held[times > 1]):
            raise StorageError(f"{path} puts image {twice[0]} in several places; leave each image in one")
        return partition


def iid(y: np.ndarray, clients: Clients, rng: Rng) -> list[Index]:
    """Deal out equal random parts."""
    return [np.sort(part) for part in np.array_split(rng.numpy.permutation(len(y)), clients.count)]


def iid_per_class(y: np.ndarray, clients: Clients, rng: Rng) -> list[Index]:
    """Deal out each class equally, as in FedMatch. What is left over goes on where the class before ended."""
    classes = [rng.numpy.permutation(np.flatnonzero(y == label)) for label in np.unique(y)]
    return [np.sort(np.concatenate(classes)[first :: clients.count]) for first in range(clients.count)]


def dirichlet(y: np.ndarray, clients: Clients, rng: Rng) -> list[Index]:
    """Deal out each class by Dirichlet(alpha) proportions, as RSCFed and CBAFed do.

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
    """Cut images in these proportions. If the exact cut is within an image, that image goes to the next part."""
    ends = np.cumsum(shares)
    return np.split(index, (ends[:-1] / ends[-1] * len(index)).astype(int))


def shards(y: np.ndarray, clients: Clients, rng: Rng) -> list[Index]:
    """Sort by class, cut into equal shards and give each client a few at random (McMahan et al., 2017)."""
    each = clients.shards or 2
    order = rng.numpy.permutation(len(y))
    pieces = np.array_split(order[np.argsort(y[order], kind="stable")], clients.count * each)
    dealt = rng.numpy.permutation(len(pieces)).reshape(clients.count, each)
    return [np.sort(np.concatenate([pieces[piece] for piece in some])) for some in dealt]


def fedmatch(y: np.ndarray, clients: Clients, rng: Rng) -> list[Index]:
    """Deal out FedMatch's class imbalance. A client's type is its number modulo the classes; see `pattern`.

    Each class is cut among the clients in the proportions of its column, so every image is dealt out. With equally many
    clients of each type and images of each class, a client's classes have exactly the proportions of its row.
    """
    labels = np.unique(y)
    types = pattern(len(labels))[np.arange(clients.count) % len(labels)]
    cut = [
        proportional(rng.numpy.permutation(np.flatnonzero(y == label)), types[:, column])
        for column, label in enumerate(labels)
    ]
    return [np.sort(np.concatenate(pieces)) for pieces in zip(*cut, strict=True)]


def pattern(classes: int) -> np.ndarray:
    """Return class probabilities by client type: 0.50 its own, 0.15 each neighbour, 0.02 the opposite, 0.03 the rest.

    This is for 10 classes. If there are more, all but three share the same 0.20 in the same proportions. If there are
    fewer, the numbers are scaled to a sum of 1.
    """
    row = np.full(classes, 0.03)
    row[classes // 2] = 0.02
    row[[0, 1 % classes, -1]] = 0
    row *= min(1, 0.20 / max(row.sum(), 0.20))
    for distance, chance in ((0, 0.50), (1, 0.15), (-1, 0.15)):
        row[distance % classes] += chance
    return np.stack([np.roll(row / row.sum(), own) for own in range(classes)])


Divide = Callable[[np.ndarray, Clients, Rng], list[Index]]

# Without a function, who holds what is not drawn but given.
PARTITIONS: dict[str, tuple[Divide | None, str]] = {
    "iid": (iid, "equal random parts"),
    "iid-per-class": (iid_per_class, "equal random parts with equally many images of each class, as in FedMatch"),
    "dirichlet": (dirichlet, "each class dealt out by Dirichlet(clients.alpha); smaller alpha, more different clients"),
    "shards": (shards, "clients.shards pieces each (2) of the images sorted by class, as in the FedAvg paper"),
    "fedmatch": (fedmatch, "half of a client's images from one class, by FedMatch's pattern of ten client types"),
    "by-column": (None, "a client for each value of the data set's own column, such as the hospital"),
    "file": (None, "as in an earlier partition.json (clients.file); which of the images have labels is drawn anew"),
}


class Dealt(Protocol):
    """The settings that say how images are dealt out: those of an experiment."""

    @property
    def clients(self) -> Clients: ...

    @property
    def labels(self) -> Labels: ...

    @property
    def data(self) -> Data: ...

    @property
    def seed(self) -> int: ...

    @property
    def stream(self) -> Stream | None: ...


def of(dataset: "Dataset", experiment: Dealt) -> Partition:
    """Deal out a data set as an experiment says."""
    clients, given = experiment.clients, None
    if clients.partition == "by-column":
        given = by_column(dataset, clients)
    elif clients.partition == "file":
        given = Partition.load(Path(clients.file or ""))
        if given.data != dataset.digest:
            raise BadInput(f"{clients.file} deals out other images than those of '{dataset.name}' at this image size")
        dealt, images = np.concatenate([one.images for one in given.shares]), len(dataset.splits["train"].labels)
        last = np.concatenate([dealt, given.server, given.validation, given.noise[0]]).max(initial=0)
        if last >= images:
            raise BadInput(f"{clients.file} holds image {last}, but '{dataset.name}' has {images} to train on, from 0")
    if given and len(given.shares) != clients.count:
        raise BadInput(f"{clients.partition} gives {len(given.shares)} clients; set clients.count to that number")
    file = check_unchanged(experiment.labels.file, experiment.labels.sha256)
    partition = deal(
        dataset.splits["train"].labels.numpy(),
        clients,
        experiment.labels,
        experiment.seed,
        experiment.stream,
        given=given,
        classes=len(dataset.classes),
        published="validation" in dataset.splits,
        add=partial(matched, file, dataset.splits["train"], dataset.classes, experiment.data.path) if file else None,
    )
    return replace(partition, data=dataset.digest)


def by_column(dataset: "Dataset", clients: Clients) -> Partition:
    """Make a client of each value of the training split's `clients`, in their order. Images without one are left out.

    `clients` is one array, or an array for each column by its name.
    """
    found: Any = getattr(dataset.splits["train"], "clients", None)
    name = clients.column or ""
    listed = {name if dataset.name in TABLES else "": found}  # of a table, the column of this name was read
    columns: Mapping[str, Any] = found if isinstance(found, Mapping) else {} if found is None else listed
    if not columns:
        raise BadInput(f"'{dataset.name}' does not say which client holds an image; choose another clients.partition")
    name = name or next(iter(columns))
    if name not in columns:
        may = ", ".join(filter(None, columns)) or "left out"
        raise BadInput(f"'{dataset.name}' has no column '{name}'; clients.column may be {may}")
    column = np.asarray(columns[name])
    values = sorted((value for value in np.unique(column) if str(value) not in ("", "-1")), key=natural)
    return Partition(tuple(Holding(nothing(), np.flatnonzero(column == value)) for value in values), nothing())


def natural(value: Any) -> list[Any]:
    """Return a sort key by which hospital 2 comes before hospital 10."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"(\d+)", str(value)))]


def deal(
    y: np.ndarray,
    clients: Clients,
    labels: Labels,
    seed: int,
    stream: Stream | None = None,
    *,
    given: Partition | None = None,
    classes: int = 0,
    published: bool = False,
    add: Callable[[Index], Added] | None = None,
) -> Partition:
    """Deal out the training split with these labels. Only the seed decides how.

    With a `given` partition, each client keeps its images, and so does the server if it is still to have any. If a
    validation split is `published`, no labels are set aside for one. `add` takes the images with labels, and returns
    labels for others. No draw depends on these.
    """
    rng, places = Rng(seed, "partition"), labels.at.split("+")
    everything, server, validation = np.arange(len(y)), nothing(), nothing()
    if given is not None:
        everything, server = np.concatenate([holding.images for holding in given.shares]), given.server
    if "server" not in places:
        server = nothing()
    elif not len(server):
        server = per_class(y, everything, labels.server_per_class or labels.per_class or 50, rng.stream("server"))
    parts = divide(y, np.setdiff1d(everything, server), clients, rng, given)
    full, others = choose_clients(y, parts, labels, rng.stream("which"))
    holdings = []
    for number, part in enumerate(parts):
        part = part if number in full or number in others else part[:0]
        labeled, able = part[:0], part[y[part] >= 0]
        if "some-clients" in places and number in full:
            labeled = able
        elif "every-client" in places and len(able):
            labeled = some_images(y, able, labels, rng.stream("labels", number))
        holdings.append(Holding(labeled, np.setdiff1d(part, labeled)))
    added = add(np.concatenate([server, *(holding.labeled for holding in holdings)])) if add else Added()
    held = np.isin(added.images, np.concatenate([holding.unlabeled for holding in holdings]))
    if not len(server) and not any(len(holding.labeled) for holding in holdings) and not held.any():
        raise BadInput(
            f"labels.at = '{labels.at}' finds no label to train on; a run needs some, at a client or the server"
        )
    if labels.validation and published:
        raise BadInput("labels.validation is for data without a validation split, and these have one; leave it out")
    if labels.validation:
        validation = given.validation if given is not None else validation
        if not len(validation):
            sites = [server, *(holding.labeled for holding in holdings)]
            validation = validation_images(y, sites, labels.validation, rng.stream("validation"))
        server = np.setdiff1d(server, validation)
        holdings = [Holding(np.setdiff1d(one.labeled, validation), one.unlabeled) for one in holdings]
    labeled = np.concatenate([server, validation, *(holding.labeled for holding in holdings)])
    noise = wrong_labels(y, labeled, classes or int(y.max()) + 1, labels.noise, rng.stream("noise"))
    holdings = [shuffled(n, holding, stream, rng.stream("order", n)) for n, holding in enumerate(holdings)]
    more = np.stack([added.images[held], added.labels[held]])
    holdings = [with_labels(holding, more[0]) for holding in holdings]
    return Partition(tuple(holdings), server, validation=validation, noise=noise, added=more, notes=added.notes)


def divide(y: np.ndarray, among: Index, clients: Clients, rng: Rng, given: Partition | None) -> list[Index]:
    """Divide these images among the clients. Each part is in the order of the data set."""
    if given is not None:
        parts = [np.intersect1d(holding.images, among) for holding in given.shares]
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
        if len(unnamed):  # without a class, they are dealt out to everybody alike
            more = iid(unnamed, clients, rng.stream("unnamed"))
            parts = [np.sort(np.append(part, unnamed[some])) for part, some in zip(parts, more, strict=True)]
    for number, size in enumerate(map(len, parts)):
        if size < clients.min_size and (size or given is None):  # a given client without images was left out before
            raise BadInput(f"client {number} has {size} images and clients.min_size is {clients.min_size}; lower it")
    return parts


def shuffled(number: int, holding: Holding, stream: Stream | None, rng: Rng) -> Holding:
    """Shuffle a client's images, because the order of a data set often tells their classes."""
    parts = {"labeled": holding.labeled, "unlabeled": holding.unlabeled}
    for name, index in parts.items():
        if stream and name in streamed(stream) and 0 < len(index) < 2 * stream.steps:  # BatchNorm needs two
            raise BadInput(
                f"client {number} has {len(index)} {name} images, fewer than two for each of {stream.steps} steps; "
                "lower stream.steps or raise clients.min_size"
            )
    return Holding(**{name: rng.stream(name).numpy.permutation(index) for name, index in parts.items()})
