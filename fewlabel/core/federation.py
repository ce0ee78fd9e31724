"""The contract between a method and whatever runs it: sites, replies, the federation, and the round loop.

A method is a frozen dataclass whose fields are its hyper-parameters. It talks to its clients only through
`Federation.run` and `Federation.mean`, so the same file runs in one process, in many, and across hospitals. The types
that leave a site are those in the annotations of its tasks (`tasks`), and `wire` admits nothing else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor, nn

from fewlabel.core import schedule, tree, wire
from fewlabel.core.errors import RunFailed
from fewlabel.core.images import Labeled, Tally, Unlabeled
from fewlabel.core.plots import Plot
from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree

S = TypeVar("S")
C = TypeVar("C")
M = TypeVar("M")
U = TypeVar("U")
R = TypeVar("R")


class LabelPlace(StrEnum):
    """Where labels may be."""

    SOME_CLIENTS = "some-clients"
    EVERY_CLIENT = "every-client"
    SERVER = "server"


SOME_CLIENTS, EVERY_CLIENT, SERVER = LabelPlace


# The field of a message or an upload that is a whole model of the network, such as `model: Weights`.
Weights = Annotated[Tree, "weights"]


@cache
def weights_field(kind: type) -> str | None:
    """Return the name of the field of a message or an upload that is declared as `Weights`."""
    hints = get_type_hints(kind, include_extras=True)
    return next((f.name for f in fields(kind) if hints[f.name] == Weights), None)


@dataclass(frozen=True)
class ClientInfo:
    """What a client publishes about itself, and nothing more."""

    id: int
    num_labeled: int
    num_unlabeled: int

    @property
    def size(self) -> int:
        return self.num_labeled + self.num_unlabeled


@dataclass(frozen=True)
class Model:
    """State, message and upload of methods that exchange nothing but weights: `model`."""

    model: Weights


class Site(Generic[C]):
    """A place that holds data, a client or the server, for the length of one task.

    `labeled`, `unlabeled` and `validation` are its images, or None; `model` is the scratch network, `rng` the task's
    randomness, `state` what the client keeps for itself between rounds, at first None. `info`, `round`, `rounds`,
    `num_classes` and `device` tell where one is.
    """

    def __init__(
        self,
        info: ClientInfo,
        *,
        round: int,
        rounds: int,
        num_classes: int,
        model: nn.Module,
        rng: Rng,
        labeled: Labeled | None = None,
        unlabeled: Unlabeled | None = None,
        validation: Labeled | None = None,
        state: C | None = None,
        buffers: str = "global",
        statistics: Tree | None = None,
        watched: bool = False,
        tally: Tally | None = None,
        device: torch.device = wire.CPU,
        warmup: int = 0,
    ) -> None:
        self.info = info
        self.round, self.rounds, self.num_classes = round, rounds, num_classes
        self.warmup = warmup  # rounds of the recipe's warm-up, in which nobody has unlabeled images
        self.labeled, self.unlabeled, self.validation = labeled, unlabeled, validation
        self.model = model  # scratch: whatever it holds is another client's leftover until `load`
        self.device = device  # where the network is, the images, and what messages hold
        self.rng = rng
        self.state = state  # private, kept between rounds, committed only if the task succeeds
        self._buffers, self.statistics = buffers, statistics
        # What whoever watches from outside looks at when the task is done; nothing is kept in deployment.
        self.audited: list[tuple[Tensor, Tensor, int]] | None = [] if watched else None
        self.scored: list[Tree] | None = [] if watched else None
        self.shown: dict[str, Tensor] | None = {} if watched else None
        self.tally = tally or Tally()

    def load(self, weights: Tree) -> nn.Module:
        """The scratch network with these weights, and the statistics that the experiment's policy gives this site."""
        bare = self._buffers == "local" and self.statistics is None and not tree.statistics(weights)
        if self._buffers != "global":
            weights = tree.untrained(self.model) | weights | (self.statistics or {})
        tree.load(self.model, weights)
        if bare and tree.statistics(weights) and (self.labeled or self.unlabeled or self.validation):
            # A network without statistics, as before a site's first training, would label its images at random.
            self.statistics = batch_statistics(self.model, self._images())
        return self.model

    def _images(self) -> Iterator[Tensor]:
        own = self.labeled or self.unlabeled
        for images in (self.labeled, self.unlabeled) if own else (self.validation,):
            if isinstance(images, Labeled):
                yield from (x for x, _ in images.batches("plain", 500, shuffle=False))
            elif images is not None:
                yield from (x for x, _ in images.batches(("plain",), 500, shuffle=False))

    def weights(self) -> Tree:
        """A copy of the scratch network's state, as far as the policy for statistics lets it leave the site."""
        state = tree.of(self.model)
        if self._buffers == "global":
            return state
        if self._buffers == "local":
            self.statistics = tree.statistics(state)
        return tree.parameters(state)

    def audit(self, index: Tensor, pseudo_label: Tensor, epoch: int = 0) -> None:
        """Shows pseudo-labels to whoever scores them from outside; a no-op in deployment."""
        if self.audited is not None:
            self.audited.append((index.clone(), pseudo_label.clone(), epoch))

    def score(self, weights: Tree | nn.Module) -> None:
        """Shows a local model to whoever measures it from outside, in evaluated rounds; a no-op in deployment."""
        if self.scored is not None:
            self.scored[:] = [tree.of(weights) if isinstance(weights, nn.Module) else weights]

    def show(self, **values: Tensor) -> None:
        """Shows tensors to whoever watches from outside, in evaluated rounds, as a mean over clients that leaves NaN
        out; a no-op in deployment."""
        if self.shown is not None:
            self.shown |= {name: value.detach().clone() for name, value in values.items()}


@dataclass(frozen=True)
class Reply(Generic[U]):
    """An `upload`, with `job`, the number of the job that it answers, and `client`, its info as of that job."""

    job: int
    client: ClientInfo
    upload: U


@dataclass(frozen=True)
class Mean(Generic[U]):
    """What `Federation.mean` returns: the average `model`, and the `replies`, whose models are left out."""

    model: Tree
    replies: Sequence[Reply[U]]


def by_size(reply: Reply[Any]) -> float:
    """Weigh a client by its images."""
    return reply.client.size


class Federation(Protocol):
    """What a method sees of the world while it plays one round at the server.

    `clients` are all of them, `round` counts from 1 and is 0 in `init`, `rounds` is how many there will be, and
    `num_classes` how many classes.
    """

    clients: Sequence[ClientInfo]
    round: int  # 1, 2, …; 0 while the method is being initialised
    rounds: int
    num_classes: int
    shipped: Tree | None  # the model after the round before as it would be shipped: the recipe's mean over rounds

    @property
    def rate(self) -> float:
        """The schedule's factor of the learning rate in this round."""

    @property
    def server(self) -> Site[None]:
        """The server as a site: its network, as it is before training, and its images, if it has any."""

    @property
    def labeled(self) -> Sequence[ClientInfo]:
        """Clients with labeled images."""

    @property
    def unlabeled(self) -> Sequence[ClientInfo]:
        """Clients with unlabeled images; where a client has both kinds, it is in both lists."""

    def sample(
        self, k: int | None = None, among: Sequence[ClientInfo] | None = None, *, name: str = ""
    ) -> list[ClientInfo]:
        """Draw k clients at random, by default as many as the experiment lets take part in a round."""

    def run(self, task: Callable[[Any, M], U | None], jobs: Iterable[tuple[ClientInfo, M]]) -> Iterator[Reply[U]]:
        """Run an `@on_client` task for each (client, message), and yield the replies one by one, in job order.

        A client that dropped out, failed or had nothing to send has no reply. Jobs are taken ahead of replies, so
        their messages must not depend on replies of the same run. To average models, use `mean`: a method that needs
        each model by itself says so by `needs_each_model`.
        """

    def mean(
        self,
        task: Callable[[Any, M], U | None],
        jobs: Iterable[tuple[ClientInfo, M]],
        old: Tree,
        *,
        weight: Callable[[Reply[U]], float] = by_size,
        kinds: Callable[[Sequence[float], Sequence[bool]], Sequence[float]] | None = None,
        keep: bool = False,
    ) -> Mean[U]:
        """Run a task like `run` and return the weighted mean of the models that come back; of none, `old`.

        The model is the field of the upload that is declared as `Weights`. Models are folded as they arrive, so memory
        does not grow with the number of clients, unless `keep` leaves them in the replies. With `kinds`, clients with
        labels and those without are averaged apart, and `kinds(weights, labeled)` says how much the two means count.
        """

    def map(self, task: Callable[[Any, M], R], items: Iterable[M]) -> Iterator[R]:
        """Run an `@on_server` task on the server's own data for each item, spread over the workers, in order."""

    def rng(self, *names: int | str) -> Rng:
        """Randomness of this round by names of your own: `.torch` and `.numpy` are generators."""

    def log(self, **values: float | Tensor) -> None:
        """Numbers for this round's line in rounds.jsonl."""

    def finish_round(self, weights: Tree | None) -> None:
        """Called by the round loop with the model after the round."""


class Method(Protocol[S]):
    """A federated method: a frozen dataclass whose fields are its hyper-parameters.

    What is not a function may be a class variable or a property. All but `label_places` may be left out.
    """

    label_places: ClassVar[frozenset[LabelPlace]]  # where it can use labels
    leaves: ClassVar[str]  # what leaves a site, and what that can betray: a site's people read it before they consent
    needs_each_model: ClassVar[bool]  # whether the server must see each client's model, so that a sum would not do
    plots: ClassVar[tuple[Plot, ...]]  # of what it logs, for the report

    def cautions(self, experiment: Any) -> Iterable[str]:
        """Sentences about what may not be meant in an experiment, though it runs."""

    def init(self, fed: Federation) -> S:
        """The server's first state. May ask clients for statistics, never trains."""

    def round(self, state: S, fed: Federation) -> S:
        """One communication round, of any number of phases."""

    def model(self, state: S) -> Tree | None:
        """The weights that are evaluated and shipped; None where there is no shared model."""


class TooFewReplies(RunFailed):
    """A phase had fewer replies than clients.min_replies asks for, or all those who have labels have failed."""


class ClientError(RunFailed):
    """A client's task failed, or its upload was refused."""

    def __init__(self, client: int, task: str, round: int, cause: str) -> None:
        who = "the server" if client < 0 else f"client {client}"
        super().__init__(f"{who} failed in '{task}' of round {round}: {cause}")
        self.client, self.task, self.round, self.why = client, task, round, cause


def broadcast(clients: Iterable[ClientInfo], message: M) -> Iterator[tuple[ClientInfo, M]]:
    """Send all of them one message, the largest client first, so that the last to finish is a small one."""
    return ((client, message) for client in sorted(clients, key=lambda c: (-c.size, c.id)))


@torch.no_grad()
def batch_statistics(model: nn.Module, batches: Iterable[Tensor]) -> Tree:
    """BatchNorm's statistics of these images under the model's weights, which the model then has."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()  # no dropout: it would blur the statistics, and draw from nobody's stream
    for norm in norms:
        norm.train().reset_running_stats()
        norm.momentum = 1.0  # each batch's own

    def parts() -> Iterator[tuple[int, Tree]]:
        for images in batches:
            model(images if len(images) > 1 else torch.cat([images, images]))  # BatchNorm needs two
            yield len(images), tree.statistics(model.state_dict())

    try:
        found = tree.pool(parts())
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    model.load_state_dict(found, strict=False)
    model.train()
    return found


def train(method: Method[S], fed: Federation, state: S, start: int = 1) -> Iterator[tuple[int, S]]:
    """Play the rounds: yield each round's number and the state after it."""
    for number in range(start, fed.rounds + 1):
        fed.round = number
        with fed.rng("global").scope(), schedule.during(fed.rate):
            state = method.round(state, fed)
        fed.finish_round(method.model(state))
        yield number, state
