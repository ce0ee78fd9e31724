"""FedProx (Li et al., MLSys 2020), server and client in one file."""

from dataclasses import dataclass

from torch.nn.functional import cross_entropy

from fewlabel import EVERY_CLIENT, SOME_CLIENTS, Federation, Model, Site, Weights, broadcast, on_client
from fewlabel.learn.loop import fit
from fewlabel.learn.optim import Local, optimizer


@dataclass(frozen=True)
class Prox:
    mu: float = 0.01  # how strongly a client is held near the model that it received
    local: Local = Local(epochs=5, batch_size=10)
    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT})
    leaves = "The weights after training. The server needs only their sum over sites."

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> Weights:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:  # in Flower: the strategy
        return Model(fed.mean(self.local_update, broadcast(fed.sample(), state), state.model).model)

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:  # in Flower: the ClientApp
        if not site.labeled:
            return None
        model, images, steps = site.load(msg.model), site.labeled, self.local

        def loss(batch):
            away = sum((now - msg.model[name]).square().sum() for name, now in model.named_parameters())
            return cross_entropy(model(batch[0]), batch[1]) + self.mu / 2 * away

        batches = (batch for _ in range(steps.epochs) for batch in images.batches("weak", steps.batch_size))
        fit(model, optimizer(model, steps), batches, loss, steps.clip)
        return Model(site.weights())
