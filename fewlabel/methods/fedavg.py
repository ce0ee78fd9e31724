"""FedAvg (McMahan et al., AISTATS 2017) and FedProx (Li et al., MLSys 2020), supervised, among those who hold labels.

In a federation where few have labels this is the floor of every table (`labels-only`), and with all labels its
ceiling (`all-labels`). Where the server holds labels, it trains on them first, alone if no client has any.
FedProx adds mu/2 |w - w_received|^2 to the loss; its weights in the average are equal, as in the FedMatch paper.

What leaves a site: its weights after training. They can betray training images to a curious server; sums would do.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.nn.functional import cross_entropy

from fewlabel import tree
from fewlabel.federation import (
    EVERY_CLIENT,
    SERVER,
    SOME_CLIENTS,
    Federation,
    Model,
    Site,
    broadcast,
    on_client,
    on_server,
)
from fewlabel.learn.loop import Local, fit, optimizer
from fewlabel.learn.losses import proximal
from fewlabel.strict import NonNegative
from fewlabel.tree import Tree


@dataclass(frozen=True)
class FedAvg:
    """Supervised federated averaging among the clients that hold labels."""

    local: Local = Local(epochs=5, batch_size=10)  # E and B of the FedAvg paper
    weights: Literal["size", "uniform"] = "size"  # of a client in the average: its labeled images, or all alike
    proximal: NonNegative = 0.0  # mu of FedProx

    settings = frozenset({SOME_CLIENTS, EVERY_CLIENT, SERVER})

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> Tree:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        if fed.server.labeled:
            [trained] = fed.map(self.local_update, [state])
            state = trained or state
        replies = fed.run(self.local_update, broadcast(fed.sample(among=fed.labeled), state))
        weighted = ((r.client.num_labeled if self.weights == "size" else 1, r.upload.model) for r in replies)
        return Model(tree.mean(weighted, default=state.model))

    @on_client
    @on_server
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        if site.labeled is None:
            return None
        model = site.load(msg.model)

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            supervised = cross_entropy(model(x), y)
            return supervised + self.proximal * proximal(model, msg.model) if self.proximal else supervised

        steps = optimizer(model, self.local)
        for _ in range(self.local.epochs):
            fit(model, steps, site.labeled.batches("weak", self.local.batch_size), loss, self.local.clip)
        site.score(tree.of(model))
        return Model(site.weights())
