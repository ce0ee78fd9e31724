"""Sites and a federation small enough that a round can be worked out by hand.

An image is one pixel, which the network sees as a whole number, and views are all alike; the network is softmax
regression.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fewlabel.core.averaging import average
from fewlabel.core.federation import ClientInfo, Reply, Site, by_size
from fewlabel.core.images import Labeled, Unlabeled
from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree
from fewlabel.data.images import Images
from fewlabel.learn.optim import Local
from tests.nets import linear

STEP = Local(epochs=1, batch_size=10, lr=1.0, momentum=0.0, weight_decay=0.0, clip=None)
LOWEST = -10  # the pixel that a network sees where 0 is stored


def site(
    number: int,
    labeled: Sequence[tuple[int, int]] = (),
    unlabeled: Sequence[int] = (),
    *,
    classes: int = 2,
    network: nn.Module | None = None,
    **more: Any,
) -> Site[Any]:
    """A client with these (pixel, label) and these pixels."""
    pixels = [pixel for pixel, _ in labeled] + list(unlabeled)
    stored = torch.tensor(pixels).sub(LOWEST).to(torch.uint8).view(-1, 1, 1, 1)
    images = Images(stored, mean=(-LOWEST / 255,), std=(1 / 255,), weak="none", strong="none")
    where, rng, count = torch.arange(len(pixels)), Rng("site", number), len(labeled)
    y = torch.tensor([label for _, label in labeled], dtype=torch.int64)
    more = {"round": 1, "rounds": 100, "watched": True} | more
    return Site(
        ClientInfo(number, count, len(unlabeled)),
        num_classes=classes,
        model=network or linear(1, classes, 1),
        rng=rng,
        labeled=Labeled(images, where[:count], y, rng.torch) if labeled else None,
        unlabeled=Unlabeled(images, where[count:], rng.torch) if unlabeled else None,
        **more,
    )


def weights(weight: Sequence[float], bias: Sequence[float] | None = None) -> Tree:
    """Of the regression: one weight and one bias for each class."""
    bias = bias or [0.0] * len(weight)
    return {"1.weight": torch.tensor(weight).float().view(-1, 1), "1.bias": torch.tensor(bias).float()}


def values(tree: Tree) -> tuple[list[float], list[float]]:
    return tree["1.weight"].flatten().tolist(), tree["1.bias"].tolist()


def passes(site: Site[Any]) -> list[tuple[bool, int]]:
    """A list to which each pass of the site's network adds whether it is in training mode, and the batch's size."""
    seen: list[tuple[bool, int]] = []
    site.model.register_forward_hook(lambda module, inputs, output: seen.append((module.training, len(inputs[0]))))
    return seen


class Sites:
    """A federation of such sites, which keeps what was sent and logged."""

    rate = 1.0
    server: Any = SimpleNamespace(warmup=0)

    def __init__(self, *sites: Site[Any], round: int = 1, silent: Iterable[int] = ()) -> None:
        self.sites, self.silent = {one.info.id: one for one in sites}, set(silent)
        self.round, self.num_classes = round, sites[0].num_classes
        self.clients = [one.info for one in sites]
        self.labeled = [one for one in self.clients if one.num_labeled]
        self.sent: list[tuple[int, Any]] = []
        self.logged: dict[str, Tensor] = {}

    def sample(self, among: list[ClientInfo] | None = None) -> list[ClientInfo]:
        return self.clients if among is None else among

    def run(self, task: Callable[..., Any], jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        for number, (client, message) in enumerate(jobs):
            self.sent.append((client.id, message))
            if client.id in self.silent:
                continue
            self.sites[client.id].round = self.round
            if (upload := task(self.sites[client.id], message)) is not None:
                yield Reply(number, client, upload)

    def mean(self, task: Any, jobs: Any, old: Any, *, weight: Any = by_size, kinds: Any = None, keep: bool = False):
        return average(self.run(task, jobs), old, weight, kinds, keep)

    def log(self, **values: Tensor) -> None:
        self.logged |= values


class Uploads(Sites):
    """A federation whose clients have nothing but the uploads that they send."""

    def __init__(self, uploads: dict[ClientInfo, Any], classes: int = 2, round: int = 1) -> None:
        self.uploads, self.num_classes, self.round = uploads, classes, round
        self.clients = list(uploads)
        self.labeled = [one for one in self.clients if one.num_labeled]
        self.sent, self.logged = [], {}

    def run(self, task: Callable[..., Any], jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        for number, (client, message) in enumerate(jobs):
            self.sent.append((client.id, message))
            if self.uploads[client] is not None:
                yield Reply(number, client, self.uploads[client])
