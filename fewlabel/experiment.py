"""The experiment: one frozen object that says everything a result depends on, read strictly from TOML.

Plain dataclasses, because methods and messages are dataclasses too: one kind of object, read by `strict`, sent by
`wire`, and nothing to learn beside it.
"""

import importlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w

from fewlabel.core import schema
from fewlabel.core.errors import BadInput, StorageError, unknown
from fewlabel.core.schema import Count, Natural, Positive, Range, Share


def said(default: Any, about: str, **more: Any) -> Any:
    """A setting's default, and what `fewlabel list settings` says of it."""
    return field(default=default, metadata={"about": about, **more})


@dataclass(frozen=True)
class Data:
    name: str = said("digits", "a data set of `fewlabel list datasets`, or package.module:function")
    image_size: Count | None = said(None, "images are resized to it once; by default what the network prefers")
    channels: Literal[1, 3] | None = said(None, "grey or colour; by default as published")
    split: Literal["published", "80-20", "70-10-20", "fedmatch"] = said(
        "published", "train-validation-test, drawn if not as published"
    )
    split_seed: Natural = said(0, "of a split that is drawn")
    path: str | None = said(None, "folder, csv, npz and dicom: where images of one's own are")
    columns: dict[str, str] = field(
        default_factory=dict, metadata={"about": "csv: such as label = 'dx', where it is not the usual name"}
    )
    unreadable: Literal["fatal", "skip"] = said("fatal", "what to do about images of one's own that cannot be read")


@dataclass(frozen=True)
class Net:
    name: str = said("simple-cnn", "a network of `fewlabel list models`, or package.module:function")
    norm: Literal["batch", "group"] = said("batch", "how its layers are normalised")
    dropout: Share | None = said(None, "before the classifier; by default the network's own")
    pretrained: bool = said(False, "begin from weights trained on ImageNet")
    buffers: Literal["global", "local", "recomputed"] = said(
        "global",
        "BatchNorm's statistics: averaged with the weights, kept at each client, or recomputed over clients' images",
    )


@dataclass(frozen=True)
class Clients:
    count: Count = said(10, "how many shares the images are dealt into")
    partition: str = said("dirichlet", "how: one of `fewlabel list partitions`")
    alpha: Positive = said(0.8, "dirichlet: smaller makes clients more different")
    balanced: bool = said(True, "dirichlet: a client with its fair share of images gets no more")
    min_size: Count = said(10, "images that each client has at least")
    shards: Count | None = said(None, "shards: how many each client gets; by default 2")
    column: str | None = said(None, "by-column: which of the data set's columns; by default its first")
    file: str | None = said(None, "file: a partition.json")
    per_round: Count | None = said(None, "how many take part in a round; by default all")
    dropout: Share = said(0.0, "chance of a client to be silent when it is asked")
    min_replies: Natural = said(0, "with fewer in a round, the run fails")


Place = Literal[
    "some-clients",
    "every-client",
    "server",
    "some-clients+every-client",  # some fully, the others in part
    "some-clients+server",
    "every-client+server",
    "some-clients+every-client+server",
]


@dataclass(frozen=True)
class Labels:
    at: Place = said("some-clients", "where labels are: some clients have all, every client has some, or the server")
    clients: Count = said(1, "some-clients: how many are fully labeled")
    fraction: Annotated[float, Range(0, 1, open_low=True)] = said(0.1, "every-client: share of each client's images")
    per_class: Count | None = said(
        None, "every-client (instead of a fraction) and server: labeled images of each class"
    )
    server_per_class: Count | None = said(None, "server: where it differs from per_class; by default that, or 50")
    which: Literal["first", "rule", "seed"] = said(
        "first",
        "some-clients: the first, those of RSCFed's rule (all classes, size nearest to the mean), or by seed",
    )
    ids: tuple[Natural, ...] | None = said(None, "some-clients: just these, in place of `clients` and `which`")
    unlabeled_clients: Count | None = said(
        None, "how many take part beside fully labeled ones, the other shares being nobody's; by default all"
    )
    validation: Annotated[float, Range(0, 1, open_high=True)] = said(
        0.0, "share of the labels that validates at the server, where no validation split is published"
    )
    noise: Share = said(0.0, "share of the labels in which each is another class than it should be")

    @property
    def full(self) -> int:
        """How many clients are fully labeled, where some are."""
        return self.clients if self.ids is None else len(self.ids)


@dataclass(frozen=True)
class Stream:
    """Each client's images come in steps. The defaults are FedMatch's."""

    steps: Count = said(10, "in how many steps a client's images come")
    rounds: Count = said(10, "of each step; the last lasts")
    mode: Literal["grow", "replace"] = said("replace", "a step's images join those before, or take their place")
    data: Literal["unlabeled", "labeled", "all"] = said("unlabeled", "which of a client's images come in steps")


def read_view(name: Any, where: str) -> Any:
    return "none" if name is None else name  # `strict.parse` cannot know that "none" is a name here


@dataclass(frozen=True)
class Views:
    """How images are shown to methods that ask for these views: names of recipes in `fewlabel.data.views`."""

    weak: str = said("shift", "what methods call weak: one of `fewlabel list views`", read=read_view)
    strong: str = said("randaugment", "what methods call strong: one of `fewlabel list views`", read=read_view)


@dataclass(frozen=True)
class Evaluate:
    every: Count = said(1, "rounds between two measurements of the model")
    local: bool = said(False, "also the clients' own models, on the test set, where a method shows them")


@dataclass(frozen=True)
class Checkpoint:
    rounds: Count = said(10, "at most so many rounds are lost by a kill")
    seconds: Positive = said(60.0, "and at most so much time")


PATHS = (("data", "path"), ("clients", "file"))
NAMED = ("method", "data", "model")  # tables that their name alone can stand for

# Rows of every table in an experiment of their own: name -> (method, whether it has every label, explanation).
ROWS: dict[str, tuple[str, bool, str]] = {
    "labels-only": ("fedavg", False, "FedAvg among the labeled clients: the floor of every table."),
    "all-labels": ("fedavg", True, "FedAvg in the same experiment with every label: the ceiling of every table."),
    "wfedavg": ("mt-wfedavg", True, "With every label and averages by distance: the ceiling of IsoFed's paper."),
}


def with_every_label(labels: Mapping[str, Any], stream: bool) -> dict[str, dict[str, Any]]:
    """What changes where every image has its label; where shares are left out, the same clients stay."""
    both = "some-clients" in str(labels.get("at", Labels.at)) and labels.get("unlabeled_clients") not in (None, "none")
    at = "some-clients+every-client" if both else "every-client"
    changed = {"at": at, "fraction": 1.0, "per_class": None, "server_per_class": None}
    return {"labels": changed} | ({"stream": {"data": "all"}} if stream else {})


def read_method(table: Any, where: str = "method") -> Any:
    """A method from its table: its name, and whatever of its settings differs from the defaults of that name."""
    from fewlabel.core.tasks import check_method
    from fewlabel.methods import METHODS

    if not isinstance(table, str | Mapping):
        raise BadInput(f"{where} must be a name or a table, found {table!r}")
    table = {"name": table} if isinstance(table, str) else dict(table)
    name = str(table.pop("name", "fedavg"))
    if name in METHODS:
        base = METHODS[name]
    elif ":" in name:
        module, _, attribute = name.partition(":")
        try:
            base = getattr(importlib.import_module(module), attribute)()
        except Exception as error:  # what somebody else's code may raise is not ours to list
            if module == "__main__":
                why = "is of a script or notebook, so only there its run can go on; move it into a module of its own"
                raise BadInput(f"method '{name}' {why}") from error
            raise BadInput(f"method '{name}' cannot be imported: {error}") from error
    else:
        raise BadInput(unknown("method", name, [*METHODS, *ROWS], "see `fewlabel list methods`"))
    check_method(type(base))
    return schema.read(type(base), overlay(schema.plain(base), table), where)


def plain_method(method: Any) -> dict[str, Any]:
    from fewlabel.methods import METHODS

    known = [name for name, base in METHODS.items() if type(base) is type(method)]
    name = known[0] if known else f"{type(method).__module__}:{type(method).__qualname__}"
    base = METHODS[name] if known else type(method)()
    # A value that is None here but not in what reading starts from must be written, or reading would bring it back.
    return {"name": name, **overlay(blank(schema.plain(base)), schema.plain(method))}


def blank(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: blank(value) if isinstance(value, Mapping) else "none" for key, value in table.items()}


def overlay(base: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of nested tables with some entries changed."""
    result = dict(base)
    for key, value in changes.items():
        under = result.get(key)
        result[key] = overlay(under, value) if isinstance(under, dict) and isinstance(value, Mapping) else value
    return result


@dataclass(frozen=True)
class Experiment:
    """Everything a result depends on. Two runs of equal experiments give the same bits."""

    method: Any = field(default="fedavg", metadata={"read": read_method, "plain": plain_method})
    name: str = said("", "the row's name in tables; by default the method's")
    seed: Natural = said(0, "of everything that is drawn")
    rounds: Count = said(30, "of communication between server and clients")
    threads: Count = said(1, "of PyTorch, per worker: part of the experiment, because sums depend on it")
    device: Literal["cpu", "cuda"] = said("cpu", "where workers compute; part of the experiment for the same reason")
    data: Data = Data()
    model: Net = Net()
    clients: Clients = Clients()
    labels: Labels = Labels()
    stream: Stream | None = None  # by default all images are there from the beginning
    views: Views = Views()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()

    def __post_init__(self) -> None:
        from fewlabel.core.tasks import check_method
        from fewlabel.data.partition import PARTITIONS
        from fewlabel.data.views import VIEWS

        if isinstance(self.method, str):
            row = ROWS.get(self.method)
            object.__setattr__(self, "name", self.name or self.method)
            object.__setattr__(self, "method", read_method(row[0] if row else self.method))
            if row and row[1] and isinstance(self.labels, Labels):
                changes = with_every_label(vars(self.labels), isinstance(self.stream, Stream))
                for part_name, changed in changes.items():
                    object.__setattr__(self, part_name, replace(getattr(self, part_name), **changed))
        else:
            check_method(type(self.method))
        if not self.name:
            object.__setattr__(self, "name", plain_method(self.method)["name"])
        for part in fields(Experiment):
            given, default = getattr(self, part.name), part.default
            if isinstance(given, str) and isinstance(default, Data | Net):  # data="digits" is data=Data(name="digits")
                object.__setattr__(self, part.name, replace(default, name=given))
        schema.check(self)
        for table, key in PATHS:  # absolute, or a run could be resumed only from where it was begun
            if (path := getattr(getattr(self, table), key)) is not None:
                absolute = os.path.abspath(os.path.expanduser(path))
                object.__setattr__(self, table, replace(getattr(self, table), **{key: absolute}))
        if self.clients.partition not in PARTITIONS:
            raise BadInput(unknown("clients.partition", self.clients.partition, PARTITIONS))
        for view in fields(Views):
            name = str(getattr(self.views, view.name))
            if name not in VIEWS:
                raise BadInput(unknown(f"views.{view.name}", name, VIEWS))
        if self.clients.partition == "file" and self.clients.file is None:
            raise BadInput("clients.partition = 'file' needs clients.file, the path of a partition.json")
        self._refuse_unused()
        if not set(self.labels.at.split("+")) <= self.method.label_places:
            places = ", ".join(sorted(self.method.label_places))
            raise BadInput(f"{self.name} cannot use labels.at = '{self.labels.at}'; it is made for {places}")
        full = self.labels.full if "some-clients" in self.labels.at else 0
        more, count = self.labels.unlabeled_clients, self.clients.count
        if full > count:
            raise BadInput(
                f"labels.clients = {full} is more than clients.count = {count}; lower the first or raise the second"
            )
        if more is not None and full + more > count:
            raise BadInput(
                f"labels.clients = {full} and labels.unlabeled_clients = {more} are together more than clients.count = "
                f"{count}; lower the first two or raise the last"
            )
        if (ids := self.labels.ids) is not None and (not ids or len(set(ids)) < len(ids) or max(ids) >= count):
            raise BadInput(f"labels.ids must be different clients from 0 to {count - 1}, found {list(ids)}")
        if self.clients.min_replies > (self.clients.per_round or self.clients.count):
            raise BadInput("clients.min_replies is more than the clients that take part in a round; lower it")

    @property
    def cautions(self) -> list[str]:
        """What may not be meant, though it runs."""
        from fewlabel.core.federation import cautions

        found = []
        if self.stream and (step := (self.rounds - 1) // self.stream.rounds + 1) < self.stream.steps:
            found.append(
                f"after {self.rounds} rounds the stream is at step {step} of {self.stream.steps}, and no client gets "
                "the images of later ones; raise rounds, or lower stream.steps or stream.rounds"
            )
        return found + cautions(self.method, self)

    def _refuse_unused(self) -> None:
        """Refuses settings that would change nothing: whoever set them expects something else."""
        from fewlabel.data.own.listing import KINDS, TABLES

        how, at = self.clients.partition, self.labels.at
        belongs = {
            "clients.shards": (how == "shards", "clients.partition = 'shards'"),
            "clients.column": (how == "by-column", "clients.partition = 'by-column'"),
            "clients.file": (how == "file", "clients.partition = 'file'"),
            "labels.per_class": ("every-client" in at or "server" in at, "labels.at with every-client or server"),
            "labels.server_per_class": ("server" in at, "labels.at with server"),
            # At every-client they do no harm, and the ceilings of earlier tables have them there.
            **{f"labels.{key}": (at != "server", "labels.at with some-clients") for key in ("clients", "which", "ids")},
            "data.columns": (self.data.name in TABLES, f"data.name = {' or '.join(map(repr, TABLES))}"),
            "data.unreadable": (self.data.name in KINDS, f"data.name = {' or '.join(map(repr, KINDS))}"),
        }
        for key, (used, where) in belongs.items():
            table, name = key.split(".")
            value, usual = getattr(getattr(self, table), name), getattr(type(getattr(self, table))(), name)
            if value != usual and not used:
                raise BadInput(f"{key} is for {where} and would change nothing here; leave it out")


def read(table: Mapping[str, Any], changes: Sequence[str] = ()) -> Experiment:
    """An experiment from a TOML table and `a.b=c` overrides, which win."""
    data = deepcopy(dict(table))
    for key in NAMED:
        if isinstance(data.get(key), str):
            data[key] = {"name": data[key]}
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise BadInput(f"--set takes a.b=c, found '{change}'")
        key = key.strip()
        schema.assign(data, f"{key}.name" if key in NAMED else key, schema.parse(value.strip()))
    method = data.get("method", {})
    name = str(method.get("name", "fedavg") if isinstance(method, dict) else method)
    data.setdefault("name", name)
    if row := ROWS.get(name):
        labels = given if isinstance(given := data.get("labels"), Mapping) else {}
        more = with_every_label(labels, isinstance(data.get("stream"), Mapping)) if row[1] else {}
        data = overlay(data, {"method": {"name": row[0]}, **more})
    return schema.read(Experiment, data)


def rooted(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A file's table, whose relative paths are from its own folder where there is something, else from the current."""
    for part, key in PATHS:
        given = table.get(part, {})
        if isinstance(given, dict) and isinstance(path := given.get(key), str) and (folder / path).exists():
            table = table | {part: given | {key: str(folder / path)}}
    return table


def load(path: Path, changes: Sequence[str] = ()) -> Experiment:
    try:
        table = rooted(tomllib.loads(path.read_text()), path.parent)
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except IsADirectoryError:
        raise BadInput(f"{path} is a directory; give a TOML file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"{path} cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"{path} is not valid TOML: {error}") from None
    return read(table, changes)


def dumps(experiment: Experiment) -> str:
    """The resolved experiment; reading it gives an equal one."""
    return tomli_w.dumps(schema.plain(experiment))
