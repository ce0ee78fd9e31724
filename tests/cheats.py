"""Methods that break a promise each, for the checks that must find it, by `tests.cheats:NAME`."""

import os
from dataclasses import dataclass
from itertools import count

import numpy as np

from fewlabel.core import tree
from fewlabel.core.federation import Federation, Model, Site, broadcast
from fewlabel.core.tasks import on_client
from fewlabel.core.tree import Tree
from fewlabel.data import datasets
from tests.toys import Echo

CALLS = count(1)


@dataclass(frozen=True)
class Honest(Echo):
    """Breaks none, and trains nothing."""

    leaves = "The weights that came."


def moved(model: Tree, by: float) -> Model:
    return Model({name: value + by if value.is_floating_point() else value for name, value in model.items()})


@dataclass(frozen=True)
class AsksTheProcess(Honest):
    """Its result depends on which process does the work."""

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        return moved(msg.model, os.getpid() % 1000 / 1000)


@dataclass(frozen=True)
class CountsAtHome(Honest):
    """Keeps a count beside the state, which a kill loses."""

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        return moved(msg.model, next(CALLS) / 1000)


@dataclass(frozen=True)
class Peeks(Honest):
    """Reads the labels that it must not see from the disk."""

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        [path] = datasets.cache_folder().glob("digits-16px-v*/train-labels.npy")
        return moved(msg.model, float(np.load(path)[:100].mean()))


@dataclass(frozen=True)
class NeedsSomeone(Honest):
    """Counts on a first reply, and takes replies one by one without a word about it."""

    def round(self, state: Model, fed: Federation) -> Model:
        replies = list(fed.run(self.local_update, broadcast(fed.clients, state)))
        return Model(tree.mean((1, reply.upload.model) for reply in (replies[0], *replies)))


@dataclass(frozen=True)
class Silent(Honest):
    """Does not say what leaves a site."""

    leaves = " "
