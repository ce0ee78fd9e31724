"""The settings of an experiment that say what data there are: who holds what, who has labels, how images are shown.

The comment beside a setting is its help text in `fewlabel list settings`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fewlabel.core.errors import BadInput
from fewlabel.core.schema import Count, Natural, Positive, Range, Share


@dataclass(frozen=True)
class Data:
    name: str = "digits"  # a data set of `fewlabel list datasets`, or package.module:function of your own
    image_size: Count | None = None  # images are resized to it once; by default what the network prefers
    channels: Literal[1, 3] | None = None  # 1 is grey, 3 is colour; by default as published
    split: Literal["published", "80-20", "70-10-20", "fedmatch", "validation-5000"] = "published"  # how to split, if
    #   not as published; validation-5000 takes so many of the published training images
    split_seed: Natural = 0  # seed of a split that is drawn
    path: str | None = None  # where your own images are, for folder, csv, npz and dicom
    columns: dict[str, str] = field(default_factory=dict)  # csv: names of columns, such as label = 'dx'
    unreadable: Literal["fatal", "skip"] = "fatal"  # what to do about images of your own that cannot be read
    conflicting: Literal["leave-out", "fatal", "keep"] = "leave-out"  # what to do about an image of your own that is
    #   there several times, with different labels


AttackKind = Literal["scale", "sign-flip", "label-flip", "noise", "false-counts", "not-a-number", "huge"]


@dataclass(frozen=True)
class Attack:
    """What some clients of a simulation do wrong, to measure how well a federation is protected."""

    kind: AttackKind  # what they do: send their update times `strength`; the same, reversed; train on wrong labels;
    #   send noise, of `strength` times the norm of their update; claim `strength` times as many images; send NaN; send
    #   numbers of 3e38
    ids: tuple[Natural, ...]  # the clients that do it
    strength: Positive = 10.0  # how strongly: see `kind`

    def by(self, client: int, *kinds: str) -> bool:
        """Return True if this client does one of these."""
        return client in self.ids and self.kind in kinds


@dataclass(frozen=True)
class Clients:
    count: Count = 10  # number of clients that images are dealt to
    partition: str = "dirichlet"  # how images are dealt: one of `fewlabel list partitions`
    alpha: Positive = 0.8  # dirichlet: the smaller, the more clients differ
    balanced: bool = True  # dirichlet: a client that has its fair share of images gets no more
    min_size: Count = 10  # smallest number of images a client may have
    shards: Count | None = None  # shards: how many each client gets; by default 2
    column: str | None = None  # by-column: the data set's column that names the client; by default its first
    file: str | None = None  # file: a partition.json
    per_round: Count | None = None  # how many clients take part in a round; by default all
    dropout: Share = 0.0  # probability that a client does not answer when asked
    min_replies: Natural = 0  # a round with fewer replies fails the run
    # What one client may do to the model.
    clip: Positive | None = None  # largest norm of an update, which is the change of the parameters; a larger one is
    #   scaled down to it
    clip_median: Positive | None = None  # the same, as a multiple of the median norm in earlier rounds, among clients
    #   of the same kind (with labels, without); it bounds the change of BatchNorm's statistics, too
    outlier: Positive | None = None  # an update with a norm above so many times that median is left out
    exclude_after: Count | None = None  # a client whose update was left out in so many rounds is not asked again
    largest_share: Annotated[float, Range(0, 1, open_low=True)] | None = None  # largest share of one client in a mean
    #   over clients of its kind, but never less than an equal share; so many models are held: 1 / largest_share
    aggregate: Literal["mean", "trimmed-mean", "median", "geometric-median"] = "mean"  # what stands for the models of
    #   clients of one kind; all but mean hold the models of all clients in memory, and all clients count alike in them
    trim: Annotated[float, Range(0, 0.5, open_high=True)] = 0.2  # trimmed-mean: share of the values that is left out at
    #   each end; with three clients or more, at least one value
    sums: Literal["float", "fixed", "masked"] = "float"  # how models are added up: as they are; in whole numbers, which
    #   hold the models of all clients in memory; or in whole numbers that sites on other machines mask, so that the
    #   server sees only the sum
    attack: Attack | None = None  # in simulations: what some clients do wrong


def check_attack(clients: Clients) -> None:
    """Refuse attackers that are no clients, and a strength that the kind of attack does not have."""
    if (attack := clients.attack) is None:
        return
    ids = attack.ids
    if not ids or len(set(ids)) < len(ids) or max(ids) >= clients.count:
        raise BadInput(f"clients.attack.ids must be different clients from 0 to {clients.count - 1}, found {list(ids)}")
    if attack.kind in ("label-flip", "not-a-number", "huge") and attack.strength != Attack.strength:
        raise BadInput(f"clients.attack.strength would change nothing for kind = '{attack.kind}'; leave it out")


FEWEST = 3  # clients in a masked sum: of two, each would know the other's model


def check_sums(clients: Clients, name: str, each_model: bool, buffers: str, other_trees: Sequence[str]) -> None:
    """Refuse sums in whole numbers for what needs single models: a method, a median, or a bound by the others'."""
    how = f"clients.sums = '{clients.sums}'"
    if clients.sums == "float":
        return
    if each_model:
        raise BadInput(f"{how} is not for {name}, whose server needs each client's model by itself; leave it out")
    if clients.aggregate != "mean":
        raise BadInput(f"{how} adds models up, and clients.aggregate = '{clients.aggregate}' needs each; leave one out")
    if clients.sums != "masked":
        return
    if set_ := [key for key in ("clip_median", "outlier", "exclude_after") if getattr(clients, key) is not None]:
        bound = "use clients.clip, which sites obey by themselves"
        raise BadInput(f"{how} hides the updates that clients.{set_[0]} compares; leave it out, or {bound}")
    if other_trees:
        raise BadInput(f"{how} is not for {name}, whose sites also send '{other_trees[0]}', which would not be masked")
    if buffers == "recomputed":
        raise BadInput(f"{how} hides single sites, and model.buffers = 'recomputed' shows the statistics of each")
    if min(clients.count, clients.per_round or clients.count) < FEWEST:
        raise BadInput(f"{how} needs {FEWEST} clients or more in a round, as two would show each other's model")


LabelsAt = Literal[
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
    at: LabelsAt = "some-clients"  # who has labels: some clients have all, every client has some, or the server;
    #   with your own data, by default every client has all
    clients: Count = 1  # some-clients: number of fully labeled clients
    fraction: Annotated[float, Range(0, 1, open_low=True)] = 0.1  # every-client: share of each client's images
    per_class: Count | None = None  # every-client and server: labeled images of each class, instead of a fraction
    server_per_class: Count | None = None  # labeled images of each class at the server; by default
    #   labels.per_class, or 50 if that is none
    which: Literal["first", "rule", "seed"] = "first"  # some-clients: the first ones, those that RSCFed's rule picks
    #   (all classes, size nearest to the mean), or drawn by seed
    ids: tuple[Natural, ...] | None = None  # some-clients: exactly these, instead of `clients` and `which`
    unlabeled_clients: Count | None = None  # how many clients without labels take part; by default all others
    validation: Annotated[float, Range(0, 1, open_high=True)] = 0.0  # share of the labels that the server keeps for
    #   validation, if no validation split is published
    held_out: Annotated[float, Range(0, 1, open_high=True)] = 0.0  # share of its own labels that each site keeps out of
    #   training, to calibrate or to check a model on
    noise: Share = 0.0  # share of the labels that are replaced by a wrong class
    file: str | None = None  # a table of labels to add to those that clients have, as `fewlabel label` writes it
    sha256: str | None = None  # of labels.file; by default of the file as it is now

    @property
    def full(self) -> int:
        """Number of fully labeled clients, where some are."""
        return self.clients if self.ids is None else len(self.ids)


@dataclass(frozen=True)
class Stream:
    """Each client's images come in steps. The defaults are FedMatch's."""

    steps: Count = 10  # number of steps in which a client's images come
    rounds: Count = 10  # rounds that a step lasts; the last one lasts to the end
    mode: Literal["grow", "replace"] = "replace"  # a step's images join the earlier ones, or replace them
    data: Literal["unlabeled", "labeled", "all"] = "unlabeled"  # which of a client's images come in steps


def read_view(name: Any, where: str) -> Any:
    return "none" if name is None else name  # `schema.parse` cannot know that "none" is a name here


@dataclass(frozen=True)
class Views:
    """How images look in the views that methods ask for: names of `fewlabel list views`."""

    weak: str = field(default="shift", metadata={"read": read_view})  # the weak view: one of `fewlabel list views`
    strong: str = field(default="randaugment", metadata={"read": read_view})  # the strong view, likewise
    test: str = field(default="none", metadata={"read": read_view})  # how images look that a model is measured on, in
    #   simulations; FedMatch's paper has flip-shift


def is_own(name: str) -> bool:
    """Return True if the data set of this name is the user's own: images at data.path, or a function."""
    from fewlabel.data.own.listing import KINDS

    return name in KINDS or ":" in name


def labels_of_own_data(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of labels for a user's own data: every label counts, unless what is given says otherwise."""
    some = given.keys() & {"clients", "which", "ids", "unlabeled_clients"}
    at = given.get("at", "some-clients" if some else "every-client")
    whole = "every-client" in str(at) and not given.keys() & {"fraction", "per_class"}
    return {**given, "at": at} | ({"fraction": 1.0} if whole else {})


def with_every_label(labels: Mapping[str, Any], stream: bool) -> dict[str, dict[str, Any]]:
    """Return the settings that give every image its label. Clients that take no part still take none."""
    both = "some-clients" in str(labels.get("at", Labels.at)) and labels.get("unlabeled_clients") not in (None, "none")
    at = "some-clients+every-client" if both else "every-client"
    changed = {"at": at, "fraction": 1.0, "per_class": None, "server_per_class": None}
    return {"labels": changed} | ({"stream": {"data": "all"}} if stream else {})
