"""The smallest methods, which those of the tests are built on."""

from dataclasses import dataclass

from fewlabel.core.federation import SOME_CLIENTS, Federation, Model, Site, broadcast
from fewlabel.core.tasks import on_client
from fewlabel.core.tree import Tree


@dataclass(frozen=True)
class Still:
    """Keeps the model as it is, and asks nobody."""

    label_places = frozenset({SOME_CLIENTS})

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def round(self, state: Model, fed: Federation) -> Model:
        return state

    def model(self, state: Model) -> Tree:
        return state.model


@dataclass(frozen=True)
class Echo(Still):
    """Everybody sends the model back, and the server averages what comes."""

    def round(self, state: Model, fed: Federation) -> Model:
        return Model(fed.mean(self.local_update, broadcast(fed.clients, state), state.model, weight=lambda _: 1).model)

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        return msg
