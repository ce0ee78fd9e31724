"""RSCFed: random sampling consensus (Liang et al., CVPR 2022).

Labeled clients minimise cross-entropy (eq. 1). An unlabeled client trains a student towards the sharpened predictions
of a mean teacher (eq. 2 to 4: `learn.teacher`, `learn.losses.consistency`). It keeps the teacher between rounds. The
server draws M groups of K clients. In each group it averages the models, and a model counts less the further it is from
the mean of the group (eq. 5, 6: `learn.consensus.by_distance`). Labeled clients get about half of the weight
(`learn.consensus.favour`). The new model is the mean of the M averages (eq. 7).

Departures from the paper, and decisions where it is silent:

- Eq. 6 is computed with logarithms, because its exponential underflows for small clients. Its distance covers all
  parameters as one vector. `distance = "summed"` is the distance of the authors' code.
- Beta is the paper's for SVHN and CIFAR-100. For ISIC the paper has 0.01. For other data there is no value; choose it
  on validation. One beta serves all groups, as printed. The authors' code has another one for groups with a labeled
  client (`beta_labeled`).
- The labeled clients' "about 50 %" is `labeled_share = 0.5`. It is applied after eq. 6, and the labeled clients of a
  group divide it by size. A group with only one kind of client is left as it is. The authors' code has a factor instead
  (`labeled_times`).
- Eq. 3 is a mean over images with weight 1. The authors' code gives it the weight 0.02 (`teacher.weight`).
- A client with labeled and unlabeled images adds both losses.
- The paper does not mention a warm-up. The authors' code starts from a model that was trained on labels for seven
  rounds (`warmup`).
- A teacher starts as the model that its client receives first, as in the authors' code. In the paper it starts as the
  initial model. In round 1 both are the same.
- Eq. 4: alpha is the same in every step. In the authors' code the teacher follows faster at first (`teacher.ramp`).
- The teacher's BatchNorm statistics follow the student's. In the authors' code they stay as they were at first
  (`teacher.buffers`).
- A client that is drawn by two groups trains twice in sequence, as in the authors' code. With `reuse` it trains once
  for both, as the paper remarks.
- Momentum starts anew in each round. The authors' code keeps it (`persistent_optimizer`).
- Tables 4 and 6 of the paper name neither M nor K. `fewlabel reproduce` says which ones it uses.
- The paper gives no momentum, weight decay or clipping of gradients. They are from the authors' code.
- `rscfed-authors` sets what the authors' code does on SVHN. It applies the labeled client's factor once, as in the
  first version of that code.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from fewlabel.core import tree
from fewlabel.core.described import all_warmup
from fewlabel.core.federation import EVERY_CLIENT, SOME_CLIENTS, ClientInfo, Federation, Model, Reply, Site, broadcast
from fewlabel.core.plots import CLIENT_WEIGHTS
from fewlabel.core.schema import Count, Natural, NonNegative, Positive, Share
from fewlabel.core.tasks import on_client
from fewlabel.core.tree import Tree
from fewlabel.learn.consensus import Distance, by_distance, favour
from fewlabel.learn.optim import Local, memory_of, optimizer
from fewlabel.learn.teacher import MeanTeacher, Memory, Teacher, train


@dataclass(frozen=True)
class RSCFed:
    """Mean teachers at unlabeled clients; in random groups of clients, models far from the mean count less."""

    groups: Count = 3  # M: groups of clients in a round
    group_size: Count = 5  # K: clients in a group
    beta: NonNegative = 1e4  # how fast a model's weight falls with its distance from the mean; 0.01 for ISIC
    labeled_share: Share | None = 0.5  # weight of the labeled clients in a group that has both kinds of clients
    epochs_unlabeled: Count | None = None  # epochs of a round at clients without labels; by default the same
    teacher: MeanTeacher = MeanTeacher()
    local: Local = Local(epochs=1, batch_size=64, lr=0.03, lr_unlabeled=0.021)
    # The paper's ablations.
    sub_sampling: bool = True  # SSO: draw groups; if false, all clients are one group
    reweighting: bool = True  # DMA: weights by distance; if false, weights by size
    # What the authors' code does beyond the paper.
    warmup: Natural = 0  # rounds at the start in which only labeled clients train
    labeled_times: Positive | None = None  # factor for the weight of each labeled client, in place of labeled_share
    beta_labeled: NonNegative | None = None  # beta in groups with a labeled client
    distance: Distance = "joined"  # distance of models: over all parameters at once, or summed over their tensors
    persistent_optimizer: bool = False  # each client keeps its momentum between rounds
    reuse: bool = False  # a client drawn by several groups trains once, as the paper remarks

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT})
    needs_each_model = True  # to compute its distance from the mean
    leaves = (
        "The weights after training. A curious server can learn about training images from them. The server needs each "
        "site's weights, not only their sum, to compute distances."
    )
    plots = (CLIENT_WEIGHTS,)

    def cautions(self, experiment: Any) -> Iterable[str]:
        yield from all_warmup(self, experiment)
        if self.sub_sampling and self.group_size > experiment.clients.count:
            yield (
                f"{experiment.name}: its groups of method.group_size = {self.group_size} are all alike, as there are "
                f"{experiment.clients.count} clients"
            )

    def most_passes(self, rounds: int) -> int:
        times = self.groups if self.sub_sampling and not self.reuse else 1  # that a site is drawn
        return times * max(self.local.epochs, self.epochs_unlabeled or 1)

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> Tree:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        present = fed.sample()
        if fed.round <= (self.warmup or fed.server.warmup):
            groups = [fed.sample(among=fed.labeled)]
        elif self.sub_sampling:
            groups = [fed.sample(self.group_size, among=present, name=f"group {m}") for m in range(self.groups)]
        else:
            groups = [present]
        shares: dict[str, float] = defaultdict(float)
        found = [self.consensus(group, shares) for group in self.replies(groups, state, fed)]
        fed.log(**{name: share / len(found) for name, share in shares.items()})
        return Model(tree.mean(((1.0, sub) for sub in found), default=state.model))  # eq. 7

    def replies(self, groups: list[list[ClientInfo]], state: Model, fed: Federation) -> Iterator[list[Reply[Model]]]:
        """Yield the replies of each group. Groups in which nobody answered are left out."""
        if self.reuse:
            everyone = {client for group in groups for client in group}
            found = {r.client.id: r for r in fed.run(self.local_update, broadcast(everyone, state))}
            answered = ([found[client.id] for client in group if client.id in found] for group in groups)
            yield from (group for group in answered if group)
        else:
            # One stream for all groups, so that no group waits for another.
            jobs = [(number, job) for number, group in enumerate(groups) for job in broadcast(group, state)]
            stream = fed.run(self.local_update, (job for _, job in jobs))
            yield from (list(group) for _, group in groupby(stream, key=lambda reply: jobs[reply.job][0]))

    def consensus(self, group: list[Reply[Model]], shares: dict[str, float]) -> Tree:
        """Return the model of a group, and add each client's weight in it to `shares`."""
        sizes, models = [reply.client.size for reply in group], [reply.upload.model for reply in group]
        labeled = [reply.client.num_labeled > 0 for reply in group]
        beta = self.beta_labeled if self.beta_labeled is not None and any(labeled) else self.beta
        logs = by_distance(sizes, models, beta if self.reweighting else 0.0, self.distance)  # eq. 5, 6
        weights = favour(logs, sizes, labeled, self.labeled_share, self.labeled_times)
        for reply, weight in zip(group, weights, strict=True):
            shares[f"weight_{reply.client.id}"] += weight
        return tree.mean(zip(weights, models, strict=True))

    @on_client
    def local_update(self, site: Site[Memory], msg: Model) -> Model:
        model, memory = site.load(msg.model), site.state or Memory()
        teacher = Teacher(model, self.teacher, memory.teacher, memory.step)
        steps = optimizer(model, self.local, site.labeled is not None, memory.optimizer)
        local = self.local if site.labeled else replace(self.local, epochs=self.epochs_unlabeled or self.local.epochs)
        train(teacher, steps, local, site.labeled, site.unlabeled, site.audit)  # eq. 1 to 4
        kept = memory_of(steps) if self.persistent_optimizer else None
        site.state = Memory(kept, teacher.weights if site.unlabeled else None, teacher.step)
        site.score(tree.of(model))
        return Model(site.weights())
