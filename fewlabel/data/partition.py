"""Who holds which image, and with or without its label."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fewlabel.errors import BadInput, StorageError
from fewlabel.rng import Rng

if TYPE_CHECKING:
    from fewlabel.experiment import Clients, Labels

Index = np.ndarray  # int64, into the training split


@dataclass(frozen=True)
class Share:
    """One client's images."""

    labeled: Index
    unlabeled: Index


@dataclass(frozen=True)
class Partition:
    """The training split, dealt out."""

    shares: tuple[Share, ...]
    server: Index  # labeled images at the server
    data: str = ""  # digest of the data set whose images these indices count

    @cached_property
    def checksum(self) -> str:
        digest = hashlib.sha256()
        for index in (self.server, *(part for share in self.shares for part in (share.labeled, share.unlabeled))):
            digest.update(len(index).to_bytes(8, "little") + index.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path, labels: np.ndarray, classes: tuple[str, ...]) -> None:
        def histogram(index: Index) -> list[int]:
            counts: list[int] = np.bincount(labels[index], minlength=len(classes)).tolist()
            return counts

        clients = [
            {
                "id": number,
                "labeled": share.labeled.tolist(),
                "unlabeled": share.unlabeled.tolist(),
                "classes": histogram(np.concatenate([share.labeled, share.unlabeled])),
            }
            for number, share in enumerate(self.shares)
        ]
        server = {"labeled": self.server.tolist(), "classes": histogram(self.server)}
        whole = {"checksum": self.checksum, "data": self.data, "classes": classes, "server": server, "clients": clients}
        path.write_text(json.dumps(whole, separators=(",", ":")))

    @classmethod
    def load(cls, path: Path) -> "Partition":
        def index(numbers: list[int]) -> Index:
            return np.array(numbers, dtype=np.int64)

        try:
            whole: dict[str, Any] = json.loads(path.read_text())
            shares = tuple(Share(index(c["labeled"]), index(c["unlabeled"])) for c in whole["clients"])
            partition = cls(shares, index(whole["server"]["labeled"]), whole["data"])
            stored = whole["checksum"]
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
            raise StorageError(f"{path} is not a partition that can be read: {error}") from None
        if partition.checksum != stored:
            raise StorageError(f"{path} was changed: its checksum does not match the indices in it")
        return partition


def iid(y: np.ndarray, clients: "Clients", rng: Rng) -> list[Index]:
    return [np.sort(part) for part in np.array_split(rng.numpy.permutation(len(y)), clients.count)]


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
            ends = np.cumsum(shares)
            cuts = (ends[:-1] / ends[-1] * len(index)).astype(int)
            for part, piece in zip(parts, np.split(index, cuts), strict=True):
                part.append(piece)
            sizes = np.array([sum(map(len, part)) for part in parts])
        if sizes.min() >= clients.min_size:
            return [np.sort(np.concatenate(part)) for part in parts]
    raise BadInput(
        f"no Dirichlet({clients.alpha}) partition of {len(y)} images gives each of {clients.count} clients "
        f"{clients.min_size} of them; lower clients.count or clients.min_size, or raise clients.alpha"
    )


PARTITIONS: dict[str, tuple[Callable[[np.ndarray, "Clients", Rng], list[Index]], str]] = {
    "iid": (iid, "equal random parts"),
    "dirichlet": (dirichlet, "each class dealt out by Dirichlet(clients.alpha); smaller alpha, more different clients"),
}


def deal(y: np.ndarray, clients: "Clients", labels: "Labels", seed: int) -> Partition:
    """Deals out the training split with these labels; the seed alone decides how."""
    rng = Rng(seed, "partition")
    everything, server = np.arange(len(y)), np.empty(0, np.int64)
    if labels.at == "server":
        server = per_class(y, everything, labels.per_class or 50, rng.stream("server"))
    at_clients = np.setdiff1d(everything, server)
    if clients.count * clients.min_size > len(at_clients):
        raise BadInput(
            f"{clients.count} clients of at least {clients.min_size} images need more than the {len(at_clients)} "
            "there are; lower clients.count or clients.min_size"
        )
    divide, _ = PARTITIONS[clients.partition]
    parts = [at_clients[part] for part in divide(y[at_clients], clients, rng.stream("clients"))]
    shares = []
    for number, part in enumerate(parts):
        labeled = part[:0]
        if labels.at == "some-clients" and number < labels.clients:
            labeled = part
        elif labels.at == "every-client":
            stream = rng.stream("labels", number)
            if labels.per_class is not None:
                labeled = per_class(y, part, labels.per_class, stream)
            else:
                count = max(min(2, len(part)), round(labels.fraction * len(part)))
                labeled = np.sort(stream.numpy.choice(part, count, replace=False))
        shares.append(Share(labeled, np.setdiff1d(part, labeled)))
    return Partition(tuple(shares), server)


def per_class(y: np.ndarray, among: Index, count: int, rng: Rng) -> Index:
    """At most `count` images of each class that is there."""
    chosen = [rng.numpy.permutation(among[y[among] == label])[:count] for label in np.unique(y[among])]
    return np.sort(np.concatenate(chosen))
