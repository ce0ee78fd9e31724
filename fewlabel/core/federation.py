"""The contract between a method and whatever runs it: sites, replies, the federation, and the round loop.

A method is a frozen dataclass whose fields are its settings. It talks to its clients only through
`Federation.run` and `Federation.mean`, so the same file runs in one process, in many, and across hospitals. Only the
types in the annotations of its tasks (`tasks`) may leave a site. `wire` refuses everything else.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
    """The places where labels may be."""

    SOME_CLIENTS = "some-clients"
    EVERY_CLIENT = "every-client"
    SERVER = "server"


SOME_CLIENTS, EVERY_CLIENT, SERVER = LabelPlace


# The type of the field that holds a whole model of the network in a message or an upload, such as `model: Weights`.
Weights = Annotated[Tree, "weights"]


@cache
def weights_field(kind: type) -> str | None:
    """Return the name of the field of a message or an upload that is declared as `Weights`."""
    hints = get_type_hints(kind, include_extras=True)
    return next((f.name for f in fields(kind) if hints[f.name] == Weights), None)


@dataclass(frozen=True)
class ClientInfo:
    """All that a client publishes about itself: how many images it trains on."""

    id: int
    num_labeled: int
    num_unlabeled: int

    @property
    def size(self) -> int:
        return self.num_labeled + self.num_unlabeled


@dataclass(frozen=True)
class Model:
    """The state, message and upload of methods that exchange only weights."""

    model: Weights


class Site(Generic[C]):
    """A place that holds data, as one task sees it: a client, or the server.

    `labeled`, `unlabeled` and `validation` are its images, or None. `held_out` are labeled images of its own that it
    does not train on, or None; let only counts over them leave the site. `model` is the scratch network. `rng` is the
    randomness of the task. `state` is what the client keeps for itself between rounds; at first it is None. `info`,
    `round`, `rounds`, `num_classes` and `device` say where and when the task runs.
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
        held_out: Labeled | None = None,
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
        self.labeled, self.unlabeled, self.validation, self.held_out = labeled, unlabeled, validation, held_out
        self.model = model  # scratch: until `load`, it holds what another client left there
        self.device = device  # where the network, the images and the tensors of messages are
        self.rng = rng
        self.state = state  # private, kept between rounds, committed only if the task succeeds
        self._buffers, self.statistics = buffers, statistics
        # For whoever watches from outside, once the task is done. In deployment nothing is kept.
        self.audited: list[tuple[Tensor, Tensor, int]] | None = [] if watched else None
        self.scored: list[Tree] | None = [] if watched else None
        self.shown: dict[str, Tensor] | None = {} if watched else None
        self.tally = tally or Tally()

    def load(self, weights: Tree) -> nn.Module:
        """Return the scratch network with these weights, and with the statistics that the policy gives this site."""
        bare = self._buffers == "local" and self.statistics is None and not tree.statistics(weights)
        if self._buffers != "global":
            weights = tree.untrained(self.model) | weights | (self.statistics or {})
        tree.load(self.model, weights)
        if bare and tree.statistics(weights) and (self.labeled or self.unlabeled or self.validation):
            # Before a site's first training there are no statistics, and the network would label images at random.
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
        """Return a copy of the scratch network's state, without statistics if the policy keeps them at the site."""
        state = tree.of(self.model)
        if self._buffers == "global":
            return state
        if self._buffers == "local":
            self.statistics = tree.statistics(state)
        return tree.parameters(state)

    def audit(self, index: Tensor, pseudo_label: Tensor, epoch: int = 0) -> None:
        """Show pseudo-labels to whoever scores them from outside. In deployment this does nothing.

        Of a soft pseudo-label, its most likely class is scored.
        """
        if self.audited is not None:
            given = pseudo_label.argmax(1) if pseudo_label.ndim > 1 else pseudo_label.clone()
            self.audited.append((index.clone(), given, epoch))

    def score(self, weights: Tree | nn.Module) -> None:
        """Show a local model to whoever measures it in evaluated rounds. In deployment this does nothing."""
        if self.scored is not None:
            self.scored[:] = [tree.of(weights) if isinstance(weights, nn.Module) else weights]

    def show(self, **values: Tensor) -> None:
        """Show tensors to whoever watches from outside in evaluated rounds. In deployment this does nothing.

        The record of the round has their mean over clients. NaN is left out of it.
        """
        if self.shown is not None:
            self.shown |= {name: value.detach().clone() for name, value in values.items()}


@dataclass(frozen=True)
class Reply(Generic[U]):
    """A client's `upload`. `job` is the number of the job that it answers, `client` the client's info at that time.

    `counts` is how much of what the client claims counts: less than 1 if `clients.largest_share` bounds it.
    """

    job: int
    client: ClientInfo
    upload: U
    counts: float = 1.0

    def part_of(self, number: Tensor) -> Tensor:
        """Return whole numbers of images, of which only a part counts if the client claims too many."""
        return number if self.counts == 1 else (self.counts * number.double()).to(number.dtype)


@dataclass(frozen=True)
class Mean(Generic[U]):
    """The result of `Federation.mean`: the average `model`, and the `replies`, without their models unless kept."""

    model: Tree
    replies: Sequence[Reply[U]]
    far: Mapping[int, float] = field(default_factory=dict)  # clients far from the others, in median distances
    others: Callable[..., Tree] | None = None  # averages another tree of the uploads

    def of(self, pick: Callable[[U], Tree], old: Tree, weight: Callable[[Reply[U]], float]) -> Tree:
        """Return the mean of another tree of the uploads, by the same rule as that of the models."""
        if self.others is None:
            raise ValueError("this mean does not know its rule; take it from Federation.mean")
        return self.others(pick, old, weight)


def by_size(reply: Reply[Any]) -> float:
    """Return the weight of a client in an average by size: its number of images."""
    return reply.client.size


class Federation(Protocol):
    """The world as a method sees it at the server while it plays one round.

    `clients` lists all clients. `round` counts from 1, and is 0 in `init`. `rounds` is the number of all rounds, and
    `num_classes` the number of classes.
    """

    clients: Sequence[ClientInfo]
    round: int  # 1, 2, …; 0 while the method is being initialised
    rounds: int
    num_classes: int
    held_out: bool  # whether labels are held out, at clients or at the server, or there is a validation set
    schedule: str  # of the learning rate over rounds, as in `train.schedule`
    shipped: Tree | None  # the model after the round before as it would be shipped: the recipe's mean over rounds

    @property
    def rate(self) -> float:
        """The schedule's factor of the learning rate in this round."""

    @property
    def server(self) -> Site[None]:
        """The server as a site: its network before any training, and its images if it has any."""

    @property
    def labeled(self) -> Sequence[ClientInfo]:
        """The clients with labeled images."""

    @property
    def unlabeled(self) -> Sequence[ClientInfo]:
        """The clients with unlabeled images. A client with both kinds of images is in both lists."""

    def drawn(self, number: int) -> Tree:
        """Return other first weights than the server's: the draw with this number. What is pretrained stays."""

    def sample(
        self, k: int | None = None, among: Sequence[ClientInfo] | None = None, *, name: str = ""
    ) -> list[ClientInfo]:
        """Draw k clients at random. By default k is the number of clients that take part in a round."""

    def run(self, task: Callable[[Any, M], U | None], jobs: Iterable[tuple[ClientInfo, M]]) -> Iterator[Reply[U]]:
        """Run an `@on_client` task for each (client, message), and yield the replies one by one, in job order.

        A client that dropped out, failed or had nothing to send has no reply. Jobs are taken ahead of replies, so
        a message must not depend on replies of the same run. To average models, use `mean`. A method that needs each
        model by itself must set `needs_each_model`.
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
        """Run a task like `run`, and return the weighted mean of the models that come back, or `old` if none does.

        The model is the field of the upload that is declared as `Weights`. Models are averaged as they arrive, so
        memory does not grow with the number of clients, unless `keep` leaves the models in the replies. With `kinds`,
        clients with labels and clients without are averaged separately. Then `kinds(weights, labeled)` returns how much
        each of the two means counts.
        """

    def map(self, task: Callable[[Any, M], R], items: Iterable[M]) -> Iterator[R]:
        """Run an `@on_server` task on the server's data for each item. Workers share the items; order is kept."""

    def rng(self, *names: int | str) -> Rng:
        """Return a random stream of this round, by names that you choose. Its `.torch` and `.numpy` are generators."""

    def log(self, **values: float | Tensor) -> None:
        """Add numbers to this round's line in rounds.jsonl."""

    def finish_round(self, weights: Tree | None) -> None:
        """Close a round. The round loop calls this with the model after the round."""


class Method(Protocol[S]):
    """A federated method: a frozen dataclass whose fields are its settings.

    `label_places`, `init`, `round` and `model` are required. The attributes may be class variables or properties.
    """

    label_places: ClassVar[frozenset[LabelPlace]]  # where labels may be
    leaves: ClassVar[str]  # what leaves a site and what it can reveal; people at a site read it before they consent
    needs_each_model: ClassVar[bool]  # whether the server must see each client's model, because sums are not enough
    per_image: ClassVar[bool]  # whether its loss is a mean over single images, and it sends weights alone
    warms_up: ClassVar[bool]  # whether it begins with labels alone by itself, in a run of any length
    takes_turns: ClassVar[bool]  # whether clients with labels and clients without are averaged one after the other
    plots: ClassVar[tuple[Plot, ...]]  # plots of logged values, for the report

    def cautions(self, experiment: Any) -> Iterable[str]:
        """Yield warnings about settings of an experiment that run, but that the user may not have meant."""

    def most_passes(self, rounds: int) -> int:
        """Return how often a round passes over a site's images at most, if that is more than one setting says."""

    def conclusions(self, lines: Iterable[Mapping[str, Any]]) -> Iterable[str]:
        """Yield sentences that the report tells about a run, from the lines of its rounds."""

    def init(self, fed: Federation) -> S:
        """Return the server's first state. May ask clients for statistics, but never trains."""

    def round(self, state: S, fed: Federation) -> S:
        """Play one communication round, in any number of phases, and return the server's new state."""

    def model(self, state: S) -> Tree | None:
        """Return the weights to evaluate and to ship, or None if there is no shared model."""


class TooFewReplies(RunFailed):
    """A phase had fewer replies than clients.min_replies asks for, or all clients, or all with labels, have failed."""


class ClientError(RunFailed):
    """A client's task failed, or its upload was refused."""

    def __init__(self, client: int, task: str, round: int, cause: str) -> None:
        who = "the server" if client < 0 else f"client {client}"
        super().__init__(f"{who} failed in '{task}' of round {round}: {cause}")
        self.client, self.task, self.round, self.why = client, task, round, cause


def broadcast(clients: Iterable[ClientInfo], message: M) -> Iterator[tuple[ClientInfo, M]]:
    """Pair each client with the same message. The largest client comes first, so that the last to finish is small."""
    return ((client, message) for client in sorted(clients, key=lambda c: (-c.size, c.id)))


@torch.no_grad()
def batch_statistics(model: nn.Module, batches: Iterable[Tensor]) -> Tree:
    """Compute BatchNorm's statistics of these images under the model's weights, and set them in the model."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    model.eval()  # no dropout: it would blur the statistics, and its random numbers would come from no named stream
    for norm in norms:
        norm.train().reset_running_stats()
        norm.momentum = 1.0  # so that each batch leaves its own statistics

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
    """Play the rounds. Yield the number of each round and the state after it."""
    for number in range(start, fed.rounds + 1):
        fed.round = number
        with fed.rng("global").scope(), schedule.during(fed.rate):
            state = method.round(state, fed)
        fed.finish_round(method.model(state))
        yield number, state
