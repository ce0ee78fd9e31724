"""The experiment: one frozen object that holds everything a result depends on, read strictly from TOML.

The comment beside a setting is its help text in `fewlabel list settings`.
"""

import importlib
import os
import tomllib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import tomli_w

from fewlabel.core import schema
from fewlabel.core.described import cautions, needs_each_model, own_warmup, per_image, short_warmup
from fewlabel.core.errors import BadInput, StorageError, unknown
from fewlabel.core.schema import Count, Natural, Positive, Share
from fewlabel.data.settings import Clients as Clients
from fewlabel.data.settings import Data as Data
from fewlabel.data.settings import Labels as Labels
from fewlabel.data.settings import Stream as Stream
from fewlabel.data.settings import Views as Views
from fewlabel.data.settings import check_attack, check_sums, labels_of_own_data, with_every_label
from fewlabel.data.settings import is_own as is_own
from fewlabel.learn.budget import Privacy as Privacy
from fewlabel.learn.budget import check as check_privacy
from fewlabel.learn.recipe import RECIPES as RECIPES
from fewlabel.learn.recipe import USUAL as USUAL
from fewlabel.learn.recipe import Train as Train
from fewlabel.learn.recipe import recipe_named


@dataclass(frozen=True)
class Net:
    name: str = "simple-cnn"  # a network of `fewlabel list models`, timm:NAME, or package.module:function of your own
    norm: Literal["batch", "group"] = "batch"  # group: GroupNorm in the place of every BatchNorm
    dropout: Share | None = None  # before the classifier; by default the network's own
    pretrained: bool = False  # start from weights trained on ImageNet or the like, with their mean and std
    buffers: Literal["global", "local", "recomputed"] = "global"  # BatchNorm statistics: averaged like weights, kept at
    #   each client, or recomputed over all clients' images


@dataclass(frozen=True)
class Evaluate:
    every: Count = 1  # rounds between two measurements of the model
    local: bool = False  # also measure the clients' own models on the test set, if the method shows them


@dataclass(frozen=True)
class Checkpoint:
    rounds: Count = 10  # a kill loses at most so many rounds
    seconds: Positive = 60.0  # a kill loses at most so many seconds of work


PATHS = (("data", "path"), ("clients", "file"), ("labels", "file"))
# The tables and settings that every stored run has.
STORED = {"method", "seed", "rounds", "data", "model", "clients", "labels", "views", "evaluate", "checkpoint"}
NAMED = ("method", "data", "model")  # tables that their name alone can stand for

# Rows of every table in an experiment of their own: name -> (method, whether it has every label, explanation).
ROWS: dict[str, tuple[str, bool, str]] = {
    "labels-only": ("fedavg", False, "FedAvg among the labeled clients: the floor of every table."),
    "all-labels": ("fedavg", True, "FedAvg in the same experiment with every label: the ceiling of every table."),
    "wfedavg": ("mt-wfedavg", True, "With every label and averages by distance: the ceiling of IsoFed's paper."),
}


def sites_by_recipe(recipe: str, name: str) -> dict[str, Any]:
    """Return the settings of a method that a recipe changes. A method of your own keeps its own."""
    from fewlabel.methods import METHODS
    from fewlabel.methods.recipe import by_recipe

    method = ROWS[name][0] if name in ROWS else name
    return by_recipe(method) if recipe == USUAL and method in METHODS else {}


def method_by_recipe(method: Any, recipe: str) -> Any:
    """Return a method as a recipe trains its sites. Settings that are not the method's own stay: someone set them."""
    from fewlabel.methods.recipe import changed_sites

    changed = changed_sites(method, "printed", recipe)
    if not changed:  # among others, a method of your own, which may be no dataclass
        return method
    table = schema.plain(method)
    for key, value in changed.items():
        schema.assign(table, key, as_text(value))
    return schema.read(type(method), table, "method")


def by_another_recipe(table: Mapping[str, Any], recipe: Any) -> dict[str, Any]:
    """Return an experiment's table with another recipe in the place of what it says about training.

    A stored run says everything. So what its recipe had set for its sites changes, and what the user had set stays.
    """
    from fewlabel.methods.recipe import changed_sites, recipe_of_sites

    data = {**deepcopy(dict(table)), "recipe": recipe}
    usual = "printed" if data.pop("train", None) in (None, schema.plain(RECIPES["printed"])) else USUAL
    method = data.get("method")
    if isinstance(method, dict) and data.keys() >= STORED and recipe in RECIPES:
        found = method_named(str(method.get("name", "fedavg")), {k: v for k, v in method.items() if k != "name"})
        for key, value in changed_sites(found, recipe_of_sites(found, usual), recipe).items():
            schema.assign(data, f"method.{key}", as_text(value))
    return data


def as_text(value: Any) -> Any:
    return "none" if value is None else value


UNSAID = Labels()  # the very object that an experiment has if nobody said anything about labels


def read_method(table: Any, where: str = "method") -> Any:
    """Read a method from its table: a name, and the settings that differ from the defaults of that name."""
    from fewlabel.core.tasks import check_method
    from fewlabel.methods import METHODS

    if not isinstance(table, str | Mapping):
        several = "; settings of several methods go into tables such as [methods.fedprox]"
        found = f"a list{several}" if isinstance(table, list) else repr(table)
        raise BadInput(f"{where} must be a name or a table, found {found}")
    table = {"name": table} if isinstance(table, str) else dict(table)
    name = str(table.pop("name", "fedavg"))
    if name in METHODS:
        base = METHODS[name]
    elif ":" in name:
        module, _, attribute = name.partition(":")
        try:
            made = getattr(importlib.import_module(module), attribute)
            if isinstance(made, type):
                check_method(made)  # before it is called, or Python would say what it lacks
            base = made()
        except BadInput:
            raise
        except Exception as error:  # what somebody else's code may raise is not ours to list
            if module == "__main__":
                why = "is of a script or notebook, so only there its run can go on; move it into a module of its own"
                raise BadInput(f"method '{name}' {why}") from error
            raise BadInput(f"method '{name}' cannot be imported: {error}") from error
    else:
        raise BadInput(unknown("method", name, [*METHODS, *ROWS], "see `fewlabel list methods`"))
    check_method(type(base))
    return schema.read(type(base), overlay(schema.plain(base), table), where)


def method_named(name: str, settings: Mapping[str, Any] = MappingProxyType({}), where: str = "method") -> Any:
    """Return the method of this name, or the one behind a row such as labels-only, with these settings."""
    return read_method({**settings, "name": ROWS[name][0] if name in ROWS else name}, where)


def method_table(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the table [method] for one method: a file's own if it names this method or none, else the name alone."""
    from fewlabel.methods import METHODS

    given = table.get("method", {})
    given = {"name": given} if isinstance(given, str) else given
    if not isinstance(given, Mapping):
        read_method(given)  # refuses it
    if "name" in given:
        method_named(str(given["name"]), given)  # whichever it names: nobody means a method that does not exist
    row = table.get("name")
    named = row if row in METHODS or row in ROWS else given.get("name")
    return {**given, "name": name} if named in (None, name) else {"name": name}


def settings_by_method(tables: Any) -> dict[str, dict[str, Any]]:
    """Check a file's tables [methods.NAME], and return the settings in them for each name."""
    from fewlabel.methods import METHODS

    if not isinstance(tables, Mapping):
        raise BadInput(f"methods must have a table for each method, such as [methods.fedprox], found {tables!r}")
    for name, settings in tables.items():
        where = f"methods.{name}"
        if not isinstance(settings, Mapping) or "name" in settings:
            raise BadInput(f"{where} must be a table of settings of the method '{name}', without a name in it")
        if ":" not in name or name in METHODS:  # code of others is imported only by who uses it
            method_named(name, settings, where)
    return {name: dict(settings) for name, settings in tables.items()}


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
    """Return a copy of nested tables with some entries changed."""
    result = dict(base)
    for key, value in changes.items():
        under = result.get(key)
        result[key] = overlay(under, value) if isinstance(under, dict) and isinstance(value, Mapping) else value
    return result


@dataclass(frozen=True)
class Experiment:
    """Everything a result depends on. Two runs of equal experiments give the same bits."""

    method: Any = field(default="fedavg", metadata={"read": read_method, "plain": plain_method})
    name: str = ""  # the row's name in tables; by default the method's
    seed: Natural = 0  # seed of all random numbers
    rounds: Count = 30  # number of rounds between server and clients
    threads: Count = 1  # PyTorch threads of each worker; they change the bits of a result
    device: Literal["cpu", "cuda"] = "cpu"  # where workers compute; it changes the bits of a result
    data: Data = Data()
    model: Net = Net()
    clients: Clients = Clients()
    labels: Labels = UNSAID
    stream: Stream | None = None  # by default all images are there from the beginning
    train: Train | None = None  # the recipe; where none is given, as printed in the papers
    privacy: Privacy | None = None  # by default, nothing protects single images from whoever sees weights
    views: Views = Views()
    evaluate: Evaluate = Evaluate()
    checkpoint: Checkpoint = Checkpoint()

    def __post_init__(self) -> None:
        from fewlabel.core.tasks import check_method, other_trees
        from fewlabel.data.partition import PARTITIONS
        from fewlabel.data.views import VIEWS

        data = self.data if isinstance(self.data, str) else getattr(self.data, "name", "")
        if self.labels is UNSAID and isinstance(data, str) and is_own(data):
            object.__setattr__(self, "labels", Labels(**labels_of_own_data({})))
        if isinstance(self.method, str):
            row = ROWS.get(self.method)
            object.__setattr__(self, "name", self.name or self.method)
            recipe = self.train if isinstance(self.train, str) else "printed" if self.recipe == Train() else USUAL
            object.__setattr__(self, "method", method_named(self.method, sites_by_recipe(recipe, self.method)))
            if row and row[1] and isinstance(self.labels, Labels):
                changes = with_every_label(vars(self.labels), isinstance(self.stream, Stream))
                for part_name, changed in changes.items():
                    object.__setattr__(self, part_name, replace(getattr(self, part_name), **changed))
        else:
            check_method(type(self.method))
            if isinstance(self.train, str):
                object.__setattr__(self, "method", method_by_recipe(self.method, self.train))
        if not self.name:
            object.__setattr__(self, "name", plain_method(self.method)["name"])
        for part in fields(Experiment):
            given, default = getattr(self, part.name), part.default
            if isinstance(given, str) and isinstance(default, Data | Net):  # data="digits" is data=Data(name="digits")
                object.__setattr__(self, part.name, replace(default, name=given))
        if isinstance(self.train, str):  # train="fewlabel"
            object.__setattr__(self, "train", recipe_named(self.train))
        schema.check(self)
        for table, key in PATHS:  # absolute, or a run could be resumed only from where it was begun
            if (path := getattr(getattr(self, table), key)) is not None:
                absolute = os.path.abspath(os.path.expanduser(path))
                object.__setattr__(self, table, replace(getattr(self, table), **{key: absolute}))
        self._add_labels()
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
            usual = ", the default for your own data" if self.labels.at == "every-client" and is_own(data) else ""
            mend = ": set labels.clients, the number of clients that keep their labels" if usual else ""
            raise BadInput(
                f"{self.name} cannot use labels.at = '{self.labels.at}'{usual}; it is made for {places}{mend}"
            )
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
        check_attack(self.clients)
        needs_each, others = needs_each_model(self.method), other_trees(type(self.method))
        check_sums(self.clients, self.name, needs_each, self.model.buffers, others)
        check_privacy(self, per_image(self.method))
        if (how := self.clients.aggregate) != "mean" and needs_each_model(self.method):
            raise BadInput(
                f"clients.aggregate = '{how}' is not for {self.name}, which weighs each client's model by itself; "
                "leave it out, or bound updates by clients.clip_median and clients.outlier"
            )

    def _add_labels(self) -> None:
        """Keep the hash of labels.file, and refuse what cannot be together with it."""
        from fewlabel.data.added import sha256

        if self.labels.file is None:
            return
        if self.labels.sha256 is None:
            object.__setattr__(self, "labels", replace(self.labels, sha256=sha256(self.labels.file)))
        if "every-client" not in self.method.label_places:
            raise BadInput(
                f"labels.file gives clients labels for some of their images, and {self.name} is made for clients that "
                "have all labels or none; leave it out, or choose another method"
            )
        if self.stream is not None:
            raise BadInput("labels.file is for images that are there from the first round on; leave out it or stream")

    @property
    def recipe(self) -> Train:
        """How models are trained, whatever the method."""
        return self.train or RECIPES["printed"]

    @property
    def recipe_name(self) -> str:
        """The name of the recipe, or "own" if it is none of ours."""
        return next((name for name, recipe in RECIPES.items() if recipe == self.recipe), "own")

    @property
    def resolved(self) -> "Experiment":
        """The same experiment, which says how it is trained."""
        return replace(self, train=self.recipe)

    @property
    def warmup_rounds(self) -> int:
        """The rounds at the start in which nobody has unlabeled images; none if the method has a warm-up of its own."""
        return 0 if own_warmup(self.method) else round(self.recipe.warmup * self.rounds)

    @property
    def cautions(self) -> list[str]:
        """Sentences about what you may not have meant, though it runs."""
        found = []
        if self.stream and (step := (self.rounds - 1) // self.stream.rounds + 1) < self.stream.steps:
            found.append(
                f"after {self.rounds} rounds the stream is at step {step} of {self.stream.steps}, and no client gets "
                "the images of later ones; raise rounds, or lower stream.steps or stream.rounds"
            )
        if self.privacy is not None:
            found.append(
                f"{self.name}: its noise comes from the operating system, so no two runs are the same to the bit"
            )
        return [*found, *short_warmup(self), *cautions(self.method, self)]

    def _refuse_unused(self) -> None:
        """Refuse settings that would change nothing: whoever set them expects something else."""
        from fewlabel.data.own.listing import KINDS, TABLES

        how, at = self.clients.partition, self.labels.at
        belongs = {
            "clients.shards": (how == "shards", "clients.partition = 'shards'"),
            "clients.column": (how == "by-column", "clients.partition = 'by-column'"),
            "clients.file": (how == "file", "clients.partition = 'file'"),
            "clients.trim": (self.clients.aggregate == "trimmed-mean", "clients.aggregate = 'trimmed-mean'"),
            "labels.per_class": ("every-client" in at or "server" in at, "labels.at with every-client or server"),
            "labels.server_per_class": ("server" in at, "labels.at with server"),
            "labels.sha256": (self.labels.file is not None, "labels.file"),
            # At every-client they do no harm, and the ceilings of earlier tables have them there.
            **{f"labels.{key}": (at != "server", "labels.at with some-clients") for key in ("clients", "which", "ids")},
            "data.columns": (self.data.name in TABLES, f"data.name = {' or '.join(map(repr, TABLES))}"),
            **{
                f"data.{key}": (self.data.name in KINDS, f"data.name = {' or '.join(map(repr, KINDS))}")
                for key in ("unreadable", "conflicting")
            },
        }
        for key, (used, where) in belongs.items():
            table, name = key.split(".")
            value, usual = getattr(getattr(self, table), name), getattr(type(getattr(self, table))(), name)
            if value != usual and not used:
                raise BadInput(f"{key} is for {where} and would change nothing here; leave it out")


def read(table: Mapping[str, Any], changes: Sequence[str] = ()) -> Experiment:
    """Read an experiment from a TOML table and `a.b=c` changes, which win."""
    data = deepcopy(dict(table))
    for key in NAMED:
        if isinstance(data.get(key), str):
            data[key] = {"name": data[key]}
    for change in changes:
        if change.partition("=")[0].strip() == "recipe":  # it wins over the table, whatever that says about training
            data = by_another_recipe(data, schema.parse(change.partition("=")[2].strip()))
    for change in changes:
        key, sign, value = change.partition("=")
        if not sign:
            raise BadInput(f"--set takes a.b=c, found '{change}'")
        key = key.strip()
        schema.assign(data, f"{key}.name" if key in NAMED else key, schema.parse(value.strip()))
    method, by_method = data.get("method", {}), settings_by_method(data.pop("methods", {}))
    name = str(method.get("name", "fedavg") if isinstance(method, dict) else method)
    if name in by_method:
        data["method"] = overlay(by_method[name], method)
    data.setdefault("name", name)
    if (recipe := data.pop("recipe", None)) is not None:  # which `train` and `method` may change in part
        given = data.get("train", {})
        data["train"] = overlay(schema.plain(recipe_named(str(recipe))), given) if isinstance(given, Mapping) else given
    elif data.get("train") == schema.plain(RECIPES[USUAL]) and method == {"name": name}:
        recipe = USUAL  # a stored run's training, with another method by its name alone
    if isinstance(method, dict):
        data["method"] = overlay(sites_by_recipe(str(recipe), name), data.get("method", {}))
    source, labels = data.get("data"), data.get("labels", {})
    if isinstance(source, dict) and is_own(str(source.get("name"))) and isinstance(labels, Mapping):
        data["labels"] = labels_of_own_data(labels)
    if row := ROWS.get(name):
        labels = given if isinstance(given := data.get("labels"), Mapping) else {}
        more = with_every_label(labels, isinstance(data.get("stream"), Mapping)) if row[1] else {}
        data = overlay(data, {"method": {"name": row[0]}, **more})
    return schema.read(Experiment, data)


def rooted(table: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve a file's relative paths: from its own folder if that exists there, else from the current one."""
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
    """Write the resolved experiment as TOML. Reading it gives an equal one."""
    return tomli_w.dumps(schema.plain(experiment))
