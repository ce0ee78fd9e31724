"""The tasks of a method: functions that run where data are, and the types that may cross between server and site."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Protocol, TypeVar, cast, get_args, get_origin, get_type_hints, runtime_checkable

import torch
from torch import Tensor

from fewlabel.core import wire
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import ClientError, ClientInfo, LabelPlace, Site, weights_field
from fewlabel.core.tree import Tree
from fewlabel.core.updates import LARGEST, check_size

F = TypeVar("F", bound=Callable[..., Any])


def on_client(function: F) -> F:
    """Mark a function of a method as a task that runs where a client's data are."""
    return _mark(function, "client")


def on_server(function: F) -> F:
    """Mark a function of a method as a task that runs on the server's own data."""
    return _mark(function, "server")


def once(function: F) -> F:
    """Mark a task that a site does for one set of weights in a run, because it tells exact counts over its labels."""
    function.once = True  # type: ignore[attr-defined]
    return function


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
    once: bool = False  # a site does it for one set of weights in a run


def tasks(method: Any) -> dict[str, Task]:
    """Return the tasks of a method by name. No other function of it can be called from another machine."""
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
        once = getattr(function, "once", False)
        task = Task(name, function.places, state, hints[parameters[2]], hints["return"], once)
        for kind in (task.state, task.message, task.upload):
            _check_kind(kind, f"what {method.__name__}.{name} keeps, gets or returns")
        found[name] = task
    return found


def field_names(kind: Any) -> list[str]:
    """Return the names of the fields of what crosses between server and site, or is kept at one of them."""
    return [field.name for part in get_args(kind) or (kind,) if is_dataclass(part) for field in fields(part)]


def weights_sent(task: Task) -> str | None:
    """Return the name of the field that holds a whole model in what a task uploads, if there is one."""
    kinds = [kind for kind in get_args(task.upload) or (task.upload,) if is_dataclass(kind)]
    return next((field for kind in kinds if (field := weights_field(cast(type, kind)))), None)


def other_trees(method: Any) -> list[str]:
    """Return the names of fields with tensors by name that tasks upload beside whole models."""
    found = []
    for task in tasks(method).values():
        for kind in get_args(task.upload) or (task.upload,):
            hints = get_type_hints(kind) if is_dataclass(kind) and "client" in task.places else {}
            found += [name for name, hint in hints.items() if hint == Tree and name != weights_sent(task)]
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
    """Return the task behind a bound function, if this method has marked it for this place."""
    task = tasks(type(method)).get(getattr(function, "__name__", ""))
    if task is None or place not in task.places or getattr(function, "__self__", None) != method:
        name = getattr(function, "__qualname__", function)
        raise BadInput(f"{name} cannot be run: it is not marked @on_{place} in this {type(method).__name__}")
    return task


def state_kind(method: type) -> Any:
    """Return the type of a method's server state: what `round` is annotated to return."""
    return _hints(method, "round").get("return")


def check_method(method: Any) -> None:
    """Raise BadInput, in one sentence, if a class does not keep the contract."""
    name = method.__name__
    if not getattr(getattr(method, "__dataclass_params__", None), "frozen", False):
        raise BadInput(f"method {name} must be a frozen dataclass; its fields are its settings")
    if hasattr(method, "settings") and not hasattr(method, "label_places"):
        raise BadInput(f"method {name} must say where labels may be in `label_places`, which was `settings` before 0.2")
    if missing := [part for part in ("label_places", "init", "round", "model") if not hasattr(method, part)]:
        raise BadInput(f"method {name} lacks {', '.join(missing)}")
    if odd := sorted(set(map(str, method.label_places)) - set(LabelPlace)):
        raise BadInput(f"method {name}: label_places may hold SOME_CLIENTS, EVERY_CLIENT and SERVER, found '{odd[0]}'")
    if required := [f.name for f in fields(method) if f.default is MISSING and f.default_factory is MISSING]:
        raise BadInput(f"method {name} must have a default for {', '.join(required)}")
    if not tasks(method):
        raise BadInput(f"method {name} has no task marked @on_client or @on_server")
    if len({task.state for task in tasks(method).values() if "client" in task.places}) > 1:
        raise BadInput(f"method {name} must give the site of all its @on_client tasks one type of state: Site[…]")
    if state_kind(method) is None:
        raise BadInput(f"method {name} must say in an annotation what {name}.round returns")
    _check_kind(state_kind(method), f"what {name}.round returns")


@runtime_checkable
class Checked(Protocol):
    """An upload that checks more than types and shapes."""

    def check(self, network: Tree) -> None:
        """Raise ValueError with one sentence if the upload does not fit this network."""


@dataclass(frozen=True)
class Asked:
    """Who was asked: the client, with the images that it says it has, the number of classes, the largest number.

    `held_out` is how many labeled images the client keeps out of training at most, beside those of `client`.
    """

    client: ClientInfo
    classes: int
    most: float = LARGEST
    held_out: int = 0

    def check_images(self, number: int, counts: Tensor | None = None) -> None:
        """Raise ValueError if the client does not have so many images, or if counts by class do not add up to them."""
        if not 0 <= number <= self.client.size:
            raise ValueError(f"it says that it trained on {number} images, and it has {self.client.size}")
        if counts is None:
            return
        fits = counts.shape == (self.classes,) and counts.dtype == torch.int64
        if not fits or (counts < 0).any() or float(counts.double().sum()) != number:
            raise ValueError(
                f"its counts of images must be {self.classes} whole numbers, none negative, and add up to {number}"
            )


@runtime_checkable
class Answer(Protocol):
    """An upload that checks whether it can be an answer of its client, such as a count of the client's images."""

    def check_answer(self, asked: Asked) -> None:
        """Raise ValueError with one sentence if it cannot."""


def perform(method: Any, task: Task, site: Site[Any], message: bytes) -> bytes | None:
    """Run a task at a site, from the bytes of its message to those of its upload. Seeds the global generators."""
    site.rng.stream("global").seed_globals()
    upload = getattr(method, task.name)(site, wire.unpack(task.message, message, device=site.device))
    packed = wire.pack(upload, task.upload)  # refuses None, a forgotten return, unless the task declares it
    return None if upload is None else packed


def accept(task: Task, client: ClientInfo, round: int, data: bytes, network: Tree, asked: Asked | None = None) -> Any:
    """Unpack an upload. It must have the declared type, finite numbers and the network's own shapes.

    No number may make an average overflow. Where it is known who was `asked`, the upload must be a possible answer.
    """
    try:
        upload = wire.unpack(task.upload, data, finite=True)
        wire.check_like(upload, network)
        check_whole(upload, network)
        if isinstance(upload, Checked):
            upload.check(network)
        check_size(upload, LARGEST if asked is None else asked.most)
        if asked is not None and isinstance(upload, Answer):
            upload.check_answer(asked)
    except Exception as error:  # also where a check of a method trips over tensors of types that it does not expect
        more = "; if its training has diverged, lower method.local.lr or set method.local.clip"
        why = f"its upload is refused: {error}{more if only_numbers_wrong(task, data) else ''}"
        raise ClientError(client.id, task.name, round, why) from None
    return upload


def check_whole(upload: Any, network: Tree) -> None:
    """Raise ValueError if a whole model in an upload lacks a part of the network: it could not be averaged."""
    field = weights_field(cast(type, type(upload))) if is_dataclass(upload) else None
    if field and (lacking := sorted(network.keys() - getattr(upload, field).keys())):
        raise ValueError(f"its model lacks {', '.join(lacking[:3])}")


def only_numbers_wrong(task: Task, data: bytes) -> bool:
    """Return True if nothing is wrong with the form of an upload, but it holds NaN or infinity."""
    try:
        wire.unpack(task.upload, data)
    except wire.WireError:
        return False
    try:
        wire.unpack(task.upload, data, finite=True)
    except wire.WireError:
        return True
    return False
