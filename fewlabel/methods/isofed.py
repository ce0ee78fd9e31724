"""IsoFed: labeled and unlabeled clients apart (Saha, Mishra and Noble, MICCAI 2023).

A round has two phases. In the first, each unlabeled client trains a student towards a mean teacher, which starts anew
in each round (eq. 1: `learn.teacher`). Only the models of unlabeled clients are averaged, by their distance from the
mean (eq. 2, 3: `learn.consensus.by_distance`). In the second phase the labeled clients train this average, and only
their models are averaged in the same way. Before it trains, every client adapts the model that it received to its own
images, by information maximisation (eq. 4: `learn.losses.information`).

Departures from the paper, and decisions where it is silent:

- We found no public code of the authors. What the paper leaves open is taken from RSCFed: learning rates, batch size,
  sharpening, decay and beta, the paper's lambda_c.
- The model after the labeled clients' phase is measured and shipped. The paper does not say which one is.
- Eq. 3 is computed with logarithms, because its exponential underflows for small clients.
- Eq. 4: the paper calls N the number of classes. Here it is the number of images in a batch, as in the loss that the
  paper cites.
- Adapting takes one epoch on weak views. Labeled clients adapt, too. The paper gives no learning rate for it; it is a
  tenth of the client's (`pretraining_rate`), because at the full rate it undoes what the model has learned.
- Student and teacher both start as the adapted model. With `student_from = "received"`, the student starts as the model
  that the client received.
"""

from dataclasses import dataclass, replace
from typing import Literal

from fewlabel.core import tree
from fewlabel.core.federation import SOME_CLIENTS, ClientInfo, Federation, Model, Site, broadcast
from fewlabel.core.plots import CLIENT_WEIGHTS
from fewlabel.core.schema import Count, Natural, NonNegative, Positive
from fewlabel.core.tasks import on_client
from fewlabel.core.tree import Tree
from fewlabel.learn.consensus import by_distance
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import information
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.teacher import MeanTeacher, Teacher, train


@dataclass(frozen=True)
class IsoFed:
    """Unlabeled clients train first, then labeled ones; each group is averaged alone. All adapt the received model."""

    beta: NonNegative = 1e4  # lambda_c: how fast a model's weight falls with its distance from the mean
    pretraining: Natural = 1  # epochs of information maximisation; 0 is the paper's "without PT"
    pretraining_rate: Positive = 0.1  # learning rate of information maximisation, as a share of the client's
    student_from: Literal["pretrained", "received"] = "pretrained"  # the weights that the student starts with
    teacher: MeanTeacher = MeanTeacher(student_view="strong")
    local: Local = Local(epochs=1, batch_size=64, lr=0.03, lr_unlabeled=0.021)
    epochs_unlabeled: Count | None = None  # epochs of a round at clients without labels; by default the same

    label_places = frozenset({SOME_CLIENTS})
    needs_each_model = True  # to compute its distance from the mean
    leaves = (
        "The weights after training. A curious server can learn about training images from them. The server needs each "
        "site's weights, not only their sum, to compute distances."
    )
    plots = (CLIENT_WEIGHTS,)

    def most_passes(self, rounds: int) -> int:
        return self.pretraining + max(self.local.epochs, self.epochs_unlabeled or 1)

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> Tree:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        for name, group in (("unlabeled", fed.unlabeled), ("labeled", fed.labeled)):
            state = self.phase(state, fed, fed.sample(among=group, name=name))
        return state

    def phase(self, state: Model, fed: Federation, clients: list[ClientInfo]) -> Model:
        replies = list(fed.run(self.local_update, broadcast(clients, state)))
        sizes, models = [reply.client.size for reply in replies], [reply.upload.model for reply in replies]
        weights = by_distance(sizes, models, self.beta).softmax(0).tolist() if replies else []  # eq. 2, 3
        fed.log(**{f"weight_{reply.client.id}": weight for reply, weight in zip(replies, weights, strict=True)})
        return Model(tree.mean(zip(weights, models, strict=True), default=state.model))

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model:
        model, local, labels = site.load(msg.model), self.local, site.labeled is not None
        if not labels:
            local = replace(local, epochs=self.epochs_unlabeled or local.epochs)
        steps = optimizer(model, local, labels)
        steps.lr *= self.pretraining_rate
        for _ in range(self.pretraining):
            images = site.labeled.without_labels() if site.labeled else site.unlabeled
            batches = images.batches(size=local.batch_size) if images else ()
            fit(model, steps, batches, lambda batch: information(model(batch[0]).softmax(1)), local.clip)  # eq. 4
        teacher = Teacher(model, self.teacher)
        if self.student_from == "received" and site.unlabeled:
            site.load(msg.model)
        train(teacher, optimizer(model, local, labels), local, site.labeled, site.unlabeled, site.audit)  # eq. 1
        site.score(tree.of(model))
        return Model(site.weights())
