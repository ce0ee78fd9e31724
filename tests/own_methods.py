"""Methods of one's own, by `tests.own_methods:NAME`."""

from dataclasses import dataclass

from fewlabel.core.federation import SERVER, Model, Site
from fewlabel.core.schema import Positive
from fewlabel.core.tasks import on_client
from tests.toys import Still


@dataclass(frozen=True)
class Steps:
    lr: Positive = 0.1
    lr_unlabeled: Positive | None = None  # by default lr


@dataclass(frozen=True)
class Idle(Still):
    """Keeps the model as it is. Its settings have a None inside, whose default here is another than in its class."""

    steps: Steps = Steps(lr=0.2, lr_unlabeled=0.05)
    warmup: int | None = None
    thresholds: tuple[float, ...] = (0.5, 0.9)

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        return None


@dataclass(frozen=True)
class ServerOnly(Idle):
    label_places = frozenset({SERVER})


class Unfrozen:
    """Nothing of a method."""


def broken() -> Idle:
    raise RuntimeError("no licence found")
