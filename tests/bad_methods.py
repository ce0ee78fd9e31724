"""Methods that go wrong on purpose, for the sentences that users then read."""

import time
from dataclasses import dataclass

import torch

from fewlabel.core.federation import Federation, Model, Site, broadcast
from fewlabel.core.tasks import on_client
from fewlabel.learn.optim import Local
from tests.toys import Echo


@dataclass(frozen=True)
class Whole(Echo):
    """What the bad ones share: nobody trains, everybody sends the model back."""

    local: Local = Local()  # the settings of small runs


@dataclass(frozen=True)
class NotANumber(Whole):
    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model:
        return Model({name: torch.full_like(value, torch.nan) for name, value in msg.model.items()})


@dataclass(frozen=True)
class Raises(Whole):
    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model:
        raise ValueError("the scanner is\nbroken")


@dataclass(frozen=True)
class Stumbles(Whole):
    """Raises at the server, where no client is to blame."""

    def round(self, state: Model, fed: Federation) -> Model:
        raise ZeroDivisionError("nothing to share")


@dataclass(frozen=True)
class Bare(Whole):
    """Sends weights where its task is annotated to get a Model."""

    def round(self, state: Model, fed: Federation) -> Model:
        list(fed.run(self.local_update, broadcast(fed.clients, state.model)))  # type: ignore[arg-type]
        return state


@dataclass(frozen=True)
class Sleeps(Whole):
    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model:
        time.sleep(600)
        return msg


class NoDataclass:
    """Has nothing of the contract."""
