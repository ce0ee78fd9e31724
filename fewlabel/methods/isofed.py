"""IsoFed: labeled and unlabeled clients apart (Saha, Mishra and Noble, MICCAI 2023).

A round has two phases. First the unlabeled clients train a student towards a mean teacher (eq. 1) that begins anew each
round, and their models alone are averaged by distance (eq. 2, 3: `learn.consensus.by_distance`); then the labeled
clients train that model, and theirs alone are averaged the same way. Before either, a client adapts the received model
to its own images by information maximisation (eq. 4).

No code of the authors can be had. Student and teacher begin as the adapted model. What the paper leaves open is
RSCFed's: learning rates, batches, sharpening, decay and beta. Adapting takes one epoch at the client's learning rate,
on weak views; N of eq. 4, "the number of classes", is the number of images, as in the loss that it cites.
"""

from dataclasses import dataclass
from typing import Literal

from fewlabel.core import tree
from fewlabel.core.federation import SOME_CLIENTS, ClientInfo, Federation, Model, Site, broadcast
from fewlabel.core.plots import CLIENT_WEIGHTS
from fewlabel.core.schema import Natural, NonNegative
from fewlabel.core.tasks import on_client
from fewlabel.core.tree import Tree
from fewlabel.learn.consensus import by_distance
from fewlabel.learn.loop import fit
from fewlabel.learn.losses import information
from fewlabel.learn.optim import Local, optimizer
from fewlabel.learn.teacher import MeanTeacher, Teacher, train


@dataclass(frozen=True)
class IsoFed:
    """Unlabeled clients first, then labeled ones, each group averaged alone; every client adapts what it receives."""

    beta: NonNegative = 1e4  # lambda_c: how fast a model's weight falls with its distance
    pretraining: Natural = 1  # epochs of information maximisation; 0 is the paper's "without PT"
    student_from: Literal["pretrained", "received"] = "pretrained"  # which weights the student begins with
    teacher: MeanTeacher = MeanTeacher(student_view="strong")
    local: Local = Local(epochs=1, batch_size=64, lr=0.03, lr_unlabeled=0.021)

    label_places = frozenset({SOME_CLIENTS})
    needs_each_model = True  # for its distance from the others
    leaves = (
        "The weights after training. A curious server can learn about training images from them. The server needs each "
        "site's weights, not only their sum, to compute distances."
    )
    plots = (CLIENT_WEIGHTS,)

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
        steps = optimizer(model, local, labels)
        for _ in range(self.pretraining):
            images = site.labeled or site.unlabeled
            batches = images.batches(size=local.batch_size) if images else ()
            fit(model, steps, batches, lambda batch: information(model(batch[0]).softmax(1)), local.clip)  # eq. 4
        teacher = Teacher(model, self.teacher)
        if self.student_from == "received" and site.unlabeled:
            site.load(msg.model)
        train(teacher, optimizer(model, local, labels), local, site.labeled, site.unlabeled, site.audit)  # eq. 1
        site.score(tree.of(model))
        return Model(site.weights())
