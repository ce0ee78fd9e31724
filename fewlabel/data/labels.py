"""Decide where labels are: which clients have them, which images validate at the server, which labels are wrong."""

from collections.abc import Sequence

import numpy as np

from fewlabel.core.errors import BadInput
from fewlabel.core.rng import Rng
from fewlabel.data.settings import Labels

Index = np.ndarray  # int64, into the training split


def choose_clients(y: np.ndarray, parts: Sequence[Index], labels: Labels, rng: Rng) -> tuple[list[int], list[int]]:
    """Return the fully labeled clients, if there are to be any, and the others that take part.

    A part without images is no client. A client without any known label can only be one of the others.
    """
    able = {client: bool(len(known(y, part))) for client, part in enumerate(parts) if len(part)}
    there = list(able)
    order, asked = there, labels.full if "some-clients" in labels.at else 0
    if labels.which == "rule":
        order = by_rule(y, parts)
    elif labels.which == "seed":
        order = [there[i] for i in rng.numpy.permutation(len(there))]
    wanted = [client for client in (order if labels.ids is None else labels.ids) if client in able]
    chosen = [client for client in wanted if able[client]][:asked]
    rest = [client for client in (order if labels.which == "seed" else there) if client not in chosen]
    others = rest[: labels.unlabeled_clients]
    if not there or len(wanted) < asked or len(others) < (labels.unlabeled_clients or 0):
        holders = ", ".join(map(str, there)) or "nobody"
        raise BadInput(f"labels.clients, ids or unlabeled_clients ask for more than those who hold images: {holders}")
    if len(chosen) < asked:
        asks = f"labels.clients = {asked}" if labels.ids is None else f"labels.ids = {list(labels.ids)}"
        having = [str(client) for client in there if able[client]]
        some = f"{len(having)} of {len(there)} clients {'has' if len(having) == 1 else 'have'} labels"
        raise BadInput(f"{asks}, but only {some}: {', '.join(having) or 'nobody'}")
    return chosen, others


def by_rule(y: np.ndarray, parts: Sequence[Index]) -> list[int]:
    """Sort clients as RSCFed's authors choose the labeled one: most classes first, then sizes nearest to the mean."""
    sizes = {client: len(part) for client, part in enumerate(parts) if len(part)}
    mean = sum(sizes.values()) / max(1, len(sizes))
    held = {client: len(np.unique(known(y, parts[client]))) for client in sizes}
    return sorted(sizes, key=lambda client: (-held[client], abs(sizes[client] - mean), client))


def known(y: np.ndarray, among: Index) -> np.ndarray:
    """Return the known labels of these images. A label below 0 is unknown."""
    found: np.ndarray = y[among]
    return found[found >= 0]


def per_class(y: np.ndarray, among: Index, count: int, rng: Rng) -> Index:
    """Draw at most `count` images of each class."""
    chosen = [rng.numpy.permutation(among[y[among] == label])[:count] for label in np.unique(known(y, among))]
    return np.sort(np.concatenate([among[:0], *chosen]))


def some_images(y: np.ndarray, among: Index, labels: Labels, rng: Rng) -> Index:
    """Draw the labeled images of a client where every client has some: so many of each class, or a fraction of all."""
    if labels.per_class is not None:
        return per_class(y, among, labels.per_class, rng)
    count = max(min(2, len(among)), round(labels.fraction * len(among)))  # BatchNorm needs two
    return np.sort(rng.numpy.choice(among, count, replace=False))


def validation_images(y: np.ndarray, sites: Sequence[Index], share: float, rng: Rng) -> Index:
    """Draw a share of all sites' labeled images, with the same mixture of classes. Every site keeps two."""
    labeled = sum(map(len, sites))
    spare = np.concatenate([rng.numpy.permutation(site)[2:] for site in sites])
    count = min(round(share * labeled), len(spare))
    if not count:
        raise BadInput(f"labels.validation = {share} of {labeled} labeled images is no image; raise it")
    return spread(y, spare, count)


def held_out(y: np.ndarray, share: float, rng: Rng) -> Index:
    """Draw a share of a site's labels `y`, with the same mixture of classes, and return their places. Two are kept.

    How many are drawn depends only on how many there are, so a server knows it without seeing them.
    """
    spare = rng.numpy.permutation(len(y))[2:]
    return spread(y, spare, num_held_out(len(y), share))


def num_held_out(labels: int, share: float) -> int:
    return min(round(share * labels), max(0, labels - 2))


def spread(y: np.ndarray, among: Index, count: int) -> Index:
    """Return so many of these images, evenly spaced over the classes."""
    ordered = among[np.argsort(y[among], kind="stable")]
    return np.sort(ordered[((np.arange(count) + 0.5) * len(ordered) / max(1, count)).astype(int)])


def wrong_labels(y: np.ndarray, labeled: Index, classes: int, share: float, rng: Rng) -> np.ndarray:
    """Draw a share of the labeled images, and for each a wrong class, all with the same chance. Return two rows."""
    images = np.sort(rng.numpy.choice(labeled, round(share * len(labeled)), replace=False))
    return np.stack([images, (y[images] + rng.numpy.integers(1, classes, len(images))) % classes])
