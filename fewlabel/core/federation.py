"""The contract between a method and whatever runs it: sites, tasks, replies, and the round loop.

A method is a frozen dataclass whose fields are its hyper-parameters. It talks to its clients through `Federation.run`
alone, so the same file runs in one process, in many, and across hospitals. The types that leave a site are those in
the annotations of its tasks, and `wire` admits nothing else.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar, Generic, Protocol, TypeVar, get_args, get_origin, get_type_hints, runtime_checkable

import torch
from torch import Tensor, nn

from fewlabel.core import tree, wire
from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.core.images import Labeled, Tally, Unlabeled
from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree

S = TypeVar("S")
C = TypeVar("C")
M = TypeVar("M")
U = TypeVar("U")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])


class Setting(StrEnum):
    """Where labels may be."""

    SOME_CLIENTS = "some-clients"
    EVERY_CLIENT = "every-client"
    SERVER = "server"


SOME_CLIENTS, EVERY_CLIENT, SERVER = Setting


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

    model: Tree


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
    ) -> None:
        self.info = info
        self.round, self.rounds, self.num_classes = round, rounds, num_classes
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


class Federation(Protocol):
    """What a method sees of the world while it plays one round at the server.

    `clients` are all of them, `round` counts from 1 and is 0 in `init`, `rounds` is how many there will be, and
    `num_classes` how many classes.
    """

    clients: Sequence[ClientInfo]
    round: int  # 1, 2, …; 0 while the method is being initialised
    rounds: int
    num_classes: int

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
        """k clients at random, without replacement; by default as many as the experiment lets take part in a round."""

    def run(self, task: Callable[[Any, M], U | None], jobs: Iterable[tuple[ClientInfo, M]]) -> Iterator[Reply[U]]:
        """Runs an `@on_client` task for each (client, message); uploads come lazily, in job order.

        A client that dropped out, failed or had nothing to send has no reply. Jobs are taken ahead of replies, so what
        they say must not depend on replies of the same run.
        """

    def map(self, task: Callable[[Any, M], R], items: Iterable[M]) -> Iterator[R]:
        """Runs an `@on_server` task on the server's own data for each item, spread over the workers, in order."""

    def rng(self, *names: int | str) -> Rng:
        """Randomness of this round by names of your own: `.torch` and `.numpy` are generators."""

    def log(self, **values: float | Tensor) -> None:
        """Numbers for this round's line in rounds.jsonl."""

    def finish_round(self, weights: Tree | None) -> None:
        """Called by the round loop with the model after the round."""


class Method(Protocol[S]):
    """A federated method: a frozen dataclass whose fields are its hyper-parameters."""

    settings: ClassVar[frozenset[Setting]]

    def init(self, fed: Federation) -> S:
        """The server's first state. May ask clients for statistics, never trains."""

    def round(self, state: S, fed: Federation) -> S:
        """One communication round, of any number of phases."""

    def model(self, state: S) -> Tree | None:
        """The weights that are evaluated and shipped; None where there is no shared model."""


@runtime_checkable
class Checked(Protocol):
    """An upload that knows of more than types and shapes what it must be to fit a network."""

    def check(self, network: Tree) -> None:
        """Raises ValueError with a sentence about what does not."""


class TooFewReplies(RunFailed):
    """A phase had fewer replies than clients.min_replies asks for, or all those who have labels have failed."""


class ClientError(RunFailed):
    """A client's task failed, or its upload was refused."""

    def __init__(self, client: int, task: str, round: int, cause: str) -> None:
        who = "the server" if client < 0 else f"client {client}"
        super().__init__(f"{who} failed in '{task}' of round {round}: {cause}")
        self.client, self.task, self.round = client, task, round


def on_client(function: F) -> F:
    """Marks a method's function as a task that runs where a client's data are."""
    return _mark(function, "client")


def on_server(function: F) -> F:
    """Marks a method's function as a task that runs on the server's own data."""
    return _mark(function, "server")


def _mark(function: F, place: str) -> F:
    function.places = getattr(function, "places", frozenset()) | {place}  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True)
class Task:
    """A marked function and the types in its annotations: all that may cross between server and site."""

    name: str
    places: frozenset[str]
    state: Any
    message: Any
    upload: Any


def tasks(method: Any) -> dict[str, Task]:
    """The tasks of a method. Nothing else of it can be called from afar."""
    return _tasks(method)


@cache
def _tasks(method: Any) -> dict[str, Task]:
    found = {}
    for name, function in inspect.getmembers(method, inspect.isfunction):
        if not hasattr(function, "places"):
            continue
        hints, parameters = _hints(method, name), list(inspect.signature(function).parameters)
        missing = [p for p in [*parameters[1:], "return"] if p not in hints]
        if len(parameters) != 3 or missing:
            raise BadInput(f"{method.__name__}.{name} must be (self, site: Site[…], message: …) -> …, all annotated")
        site = hints[parameters[1]]
        state = get_args(site)[0] if get_origin(site) is Site else type(None)
        task = Task(name, function.places, state, hints[parameters[2]], hints["return"])
        for kind in (task.state, task.message, task.upload):
            _check_kind(kind, f"what {method.__name__}.{name} keeps, gets or returns")
        found[name] = task
    return found


def _hints(method: Any, function: str) -> dict[str, Any]:
    try:
        return get_type_hints(getattr(method, function))
    except NameError as error:
        raise BadInput(f"an annotation of {method.__name__}.{function} cannot be resolved: {error}") from None


def _check_kind(kind: Any, what: str) -> None:
    try:
        wire.check_kind(kind)
    except TypeError as error:
        raise BadInput(f"{what} cannot be sent or stored: {error}") from None


def task_of(method: Any, function: Callable[..., Any], place: str) -> Task:
    """The task behind a bound method, if it is one of this method's own for this place."""
    task = tasks(type(method)).get(getattr(function, "__name__", ""))
    if task is None or place not in task.places or getattr(function, "__self__", None) != method:
        name = getattr(function, "__qualname__", function)
        raise BadInput(f"{name} cannot be run: it is not marked @on_{place} in this {type(method).__name__}")
    return task


def state_kind(method: type) -> Any:
    """The type of a method's server state: what `round` says it returns."""
    return _hints(method, "round").get("return")


def check_method(method: Any) -> None:
    """Says in one sentence where a class does not keep the contract."""
    name = method.__name__
    if not getattr(getattr(method, "__dataclass_params__", None), "frozen", False):
        raise BadInput(f"method {name} must be a frozen dataclass, its fields the hyper-parameters")
    if missing := [part for part in ("settings", "init", "round", "model") if not hasattr(method, part)]:
        raise BadInput(f"method {name} lacks {', '.join(missing)}")
    if required := [f.name for f in fields(method) if f.default is MISSING and f.default_factory is MISSING]:
        raise BadInput(f"method {name} must have a default for {', '.join(required)}")
    if not tasks(method):
        raise BadInput(f"method {name} has no task marked @on_client or @on_server")
    if len({task.state for task in tasks(method).values() if "client" in task.places}) > 1:
        raise BadInput(f"method {name} must give the site of all its @on_client tasks one type of state: Site[…]")
    if state_kind(method) is None:
        raise BadInput(f"method {name} must say in an annotation what {name}.round returns")
    _check_kind(state_kind(method), f"what {name}.round returns")


def broadcast(clients: Iterable[ClientInfo], message: M) -> Iterator[tuple[ClientInfo, M]]:
    """One message to all of them, the largest client first, so that the last to finish is a small one."""
    return ((client, message) for client in sorted(clients, key=lambda c: (-c.size, c.id)))


def perform(method: Any, task: Task, site: Site[Any], message: bytes) -> bytes | None:
    """Runs one task at a site, from the bytes of its message to those of its upload; global generators are seeded."""
    site.rng.stream("global").seed_globals()
    upload = getattr(method, task.name)(site, wire.unpack(task.message, message, device=site.device))
    packed = wire.pack(upload, task.upload)  # which refuses None, a forgotten return, unless the task declares it
    return None if upload is None else packed


def accept(task: Task, client: ClientInfo, round: int, data: bytes, network: Tree) -> Any:
    """An upload as the method sees it: of the declared type, finite, and of the network's own shapes."""
    try:
        upload = wire.unpack(task.upload, data, finite=True)
        wire.check_like(upload, network)
        if isinstance(upload, Checked):
            upload.check(network)
    except (wire.WireError, ValueError) as error:
        raise ClientError(client.id, task.name, round, f"its upload is refused: {error}") from None
    return upload


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
    """The round loop: yields each round's number and the state after it."""
    for number in range(start, fed.rounds + 1):
        fed.round = number
        with fed.rng("global").scope():
            state = method.round(state, fed)
        fed.finish_round(method.model(state))
        yield number, state
