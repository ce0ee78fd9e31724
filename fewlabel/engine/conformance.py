"""What every method must keep: the checks behind `fewlabel check-method`, and behind the tests of our own methods.

Each check plays a small run of digits in several ways that must make no difference, and raises `Broken` if one does.
"""

import json
import os
import shutil
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from itertools import count, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

import numpy as np
from torch import Tensor, nn

from fewlabel.core import wire
from fewlabel.core.described import leaves, needs_each_model, own_warmup
from fewlabel.core.errors import BadInput, FewLabelError
from fewlabel.core.federation import ClientInfo, LabelPlace, Mean, Reply, train
from fewlabel.core.tasks import field_names, state_kind, task_of, tasks
from fewlabel.data import datasets
from fewlabel.data.partition import Partition
from fewlabel.engine import record
from fewlabel.engine.executor import Executor, Job
from fewlabel.engine.pool import Pool
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.experiment import RECIPES, Checkpoint, Clients, Data, Evaluate, Experiment, Labels, Net, dumps

ROUNDS = 4
AUDIT = ("pseudo_labels", "pseudo_labels_per_epoch")  # the part of a round's line that may depend on hidden labels


class Broken(Exception):
    """A method does not keep a promise. The text says what happened."""


def demand(kept: bool, otherwise: str) -> None:
    if not kept:
        raise Broken(otherwise)


# A small experiment, and runs of it


def small_network(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    """One of each that a federation must treat apart: weights, BatchNorm in two places, and dropout."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(64, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Linear(16, num_classes),
    )


def shortened(method: Any) -> Any:
    """Return a method with one epoch a round, and at most one round of warm-up, where it has such settings."""
    settings = {field.name: getattr(method, field.name) for field in fields(method)}
    if is_dataclass(local := settings.get("local")):
        short = {"epochs": 1, "batch_size": 32}
        local = replace(local, **{field.name: short[field.name] for field in fields(local) if field.name in short})  # type: ignore[type-var]
        method = replace(method, local=local)
    return replace(method, warmup=1) if "warmup" in settings and own_warmup(method) > 1 else method


def small_experiment(method: Any, place: LabelPlace, buffers: str = "global") -> Experiment:
    """Small but whole: BatchNorm, dropout, clients that take turns and fall silent, an evaluation every other round."""
    some = place == LabelPlace.SOME_CLIENTS
    return Experiment(
        method=shortened(method),
        seed=5,
        rounds=ROUNDS,
        data=Data("digits", image_size=16),
        model=Net(f"{__name__}:{small_network.__name__}", buffers=buffers),  # type: ignore[arg-type]
        clients=Clients(count=6, per_round=4, dropout=0.1, alpha=2.0),
        labels=Labels(place.value, clients=2) if some else Labels(place.value, per_class=4),
        train=RECIPES["fewlabel"],
        evaluate=Evaluate(every=2, local=True),
        checkpoint=Checkpoint(rounds=2),
    )


class Bench:
    """A folder for the runs of checks. Each experiment's undisturbed run is done once, for all checks to compare with.

    The executor is the one whose results must be those of one process.
    """

    def __init__(self, folder: Path, executor: Executor) -> None:
        self.folder, self.executor = folder, executor
        self._numbers, self._undisturbed = count(), dict[str, Path]()

    def laid_out(self, experiment: Experiment) -> Path:
        """Lay out a new run of an experiment."""
        return prepare(experiment, self.folder / str(next(self._numbers)))

    def undisturbed(self, experiment: Experiment) -> Path:
        """Return a whole run of an experiment in this process."""
        if (key := dumps(experiment)) not in self._undisturbed:
            directory = self.laid_out(experiment)
            execute(directory, executor=Serial())
            self._undisturbed[key] = directory
        return self._undisturbed[key]


def weights(directory: Path) -> bytes:
    """Return the weights of a run's shared models, last and chosen on validation, or those that clients kept last."""
    if paths := sorted(directory.glob("model*.safetensors")):
        demand(len(paths) == 2, "the run kept no weights that validation chose")
        return b"".join(path.read_bytes() for path in paths)
    return b"".join(max(client.glob("*.safetensors")).read_bytes() for client in sorted(directory.glob("clients/*")))


def lines(directory: Path) -> list[record.Line]:
    """Return the lines of a run's rounds, without the times."""
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in record.read_rounds(directory)]


def demand_same(one: Path, other: Path, without: Sequence[str] = ()) -> None:
    """Demand the same bits of two runs: in their weights, and in their rounds without some parts."""
    before, after = (
        [{k: v for k, v in line.items() if k not in without} for line in lines(run)] for run in (one, other)
    )
    for first, second in zip(before, after, strict=True):
        odd = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
        demand(not odd, f"from round {first['round']} on, these numbers differ: {', '.join(odd)}")
    demand(weights(one) == weights(other), "the models differ")


# The checks


def refuses_other_places(method: Any) -> None:
    """A place for labels that a method does not declare is refused before anything runs."""
    for place in set(LabelPlace) - method.label_places:
        try:
            small_experiment(method, place)
        except BadInput as error:
            demand(f"cannot use labels.at = '{place}'" in str(error), f"labels.at = '{place}' is refused by: {error}")
        else:
            raise Broken(f"labels.at = '{place}' is not refused")


def comes_to_its_end(bench: Bench, experiment: Experiment) -> None:
    """A run comes to its end."""
    bench.undisturbed(experiment)


def same_bits_with_workers(bench: Bench, experiment: Experiment) -> None:
    """The bench's executor gives the bits of one process."""
    directory = bench.laid_out(experiment)
    execute(directory, executor=bench.executor)
    demand_same(bench.undisturbed(experiment), directory)


class Mortal(Serial):
    """Dies by SIGKILL at the n-th job of a round."""

    def __init__(self, round: int, jobs: int) -> None:
        super().__init__()
        self.round, self.left = round, jobs

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        self.left -= job.round == self.round
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().submit(job, message, statistics)


def same_bits_after_kills(bench: Bench, experiment: Experiment) -> None:
    """A run that was killed three times and resumed gives the bits of a run never killed."""
    directory = bench.laid_out(experiment)
    for where in ((1, 2), (3, 2), (4, 1)):  # before the first checkpoint, after it, and in the last round
        process = get_context("fork").Process(target=execute, args=(directory,), kwargs={"executor": Mortal(*where)})
        process.start()
        process.join(120)
        demand(process.exitcode in (-signal.SIGKILL, 0), "a run that was killed before failed when it was resumed")
    execute(directory, executor=Serial())
    demand_same(bench.undisturbed(experiment), directory)


@contextmanager
def other_hidden_labels(directory: Path) -> Iterator[None]:
    """Give every image that a run holds as unlabeled another label than its own, meanwhile."""
    hidden = np.concatenate([share.unlabeled for share in Partition.load(directory / record.PARTITION).shares])
    before, elsewhere = os.environ.get("XDG_CACHE_HOME"), directory.parent / f"{directory.name}-cache"
    for folder in datasets.cache_folder().glob("digits-16px-v*"):
        shutil.copytree(folder, copy := elsewhere / "fewlabel" / "decoded" / folder.name)
        labels = np.load(copy / "train-labels.npy")
        labels[hidden] = (labels[hidden] + 1 + np.arange(len(hidden)) % 9) % 10  # no hidden label stays what it was
        np.save(copy / "train-labels.npy", labels)
        datasets.seal(copy, json.loads((copy / "about.json").read_text()))  # or it would be decoded anew
    os.environ["XDG_CACHE_HOME"] = str(elsewhere)
    try:
        yield
    finally:
        os.environ.pop("XDG_CACHE_HOME")
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


def hidden_labels_change_nothing(bench: Bench, experiment: Experiment) -> Path:
    """The labels of unlabeled images reach nothing but the scores of pseudo-labels. Return the run with other ones."""
    undisturbed, directory = bench.undisturbed(experiment), bench.laid_out(experiment)
    with other_hidden_labels(directory):
        execute(directory, executor=Serial())
    demand_same(undisturbed, directory, without=AUDIT)
    return directory


class Recorder(Serial):
    """Keeps what goes to clients and what they send."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[Job, bytes, bytes | None]] = []

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        ticket = super().submit(job, message, statistics)
        if job.kind == "client":
            self.sent.append((job, message, self.tickets.outcomes[ticket].payload))
        return ticket


def messages_survive(bench: Bench, experiment: Experiment) -> None:
    """Messages and uploads are the same after unpacking and packing, and exactly their bytes are counted as sent."""
    directory = bench.laid_out(replace(experiment, clients=replace(experiment.clients, dropout=0.0)))
    recorder = Recorder()
    execute(directory, executor=recorder)
    for job, message, upload in recorder.sent:
        task = tasks(type(experiment.method))[job.task]
        for what, kind, data in (("message to", task.message, message), ("upload of", task.upload, upload)):
            same = data is None or wire.pack(wire.unpack(kind, data), kind) == data
            demand(same, f"the {what} {job.task} is not the same after unpacking and packing")
    rounds = record.read_rounds(directory)
    down, up = (sum(line[way] for line in rounds) for way in ("bytes_down", "bytes_up"))
    demand(down == sum(len(message) for _, message, _ in recorder.sent), "other bytes went to clients than are counted")
    demand(up == sum(len(upload or b"") for *_, upload in recorder.sent), "other bytes came back than are counted")


def state_survives(bench: Bench, experiment: Experiment) -> None:
    """The server's state is the same after unpacking and packing, and a checkpoint of it was kept."""
    directory, kind = bench.undisturbed(experiment), state_kind(type(experiment.method))
    packed = wire.pack(experiment.method.init(Server(directory, Serial())), kind)
    demand(wire.pack(wire.unpack(kind, packed), kind) == packed, "the state is not the same after unpacking")
    kept = list((directory / record.CHECKPOINTS).glob("round-*.safetensors"))
    demand(len(kept) == 1 and bool(wire.header(kept[0].read_bytes())["version"]), "no checkpoint was kept")


def anyone_may_be_missing(bench: Bench, experiment: Experiment) -> None:
    """Any client, all labeled ones, or everyone may be silent for two rounds, and the model stays finite."""
    directory = bench.laid_out(experiment)
    everyone = Server(directory, Serial())
    for absent in (*([client] for client in everyone.clients), everyone.labeled, everyone.clients):
        fed = Server(directory, Serial(), absent={client.id for client in absent})
        _, state = list(islice(train(fed.method, fed, fed.method.init(fed)), 2))[-1]
        model = fed.method.model(state) or {}
        odd = [name for name, value in model.items() if value.is_floating_point() and not value.isfinite().all()]
        who = f"clients {', '.join(str(client.id) for client in absent)}"
        demand(not odd, f"without {who}, the weights {', '.join(odd)} are not finite")


class Watched(Server):
    """Remembers whether models came one by one, and not through `mean`."""

    averaging = one_by_one = False

    def mean(self, *args: Any, **more: Any) -> Mean[Any]:
        self.averaging = True
        found = super().mean(*args, **more)
        self.averaging = False
        return found

    def run(self, task: Callable[..., Any], jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        self.one_by_one |= not (self.averaging or only_numbers(task_of(self.method, task, "client").upload))
        return super().run(task, jobs)


def only_numbers(kind: Any) -> bool:
    """Return True if an upload has no room for a model: its fields are numbers, or tensors such as counts."""
    parts = [part for part in get_args(kind) or (kind,) if is_dataclass(part)]
    types = [hint for part in parts for hint in get_type_hints(part).values()]
    return bool(types) and all(hint in (int, float, bool, Tensor) for hint in types)


def tells_what_leaves(bench: Bench, experiment: Experiment) -> None:
    """A method says what leaves a site, and whether its server takes models one by one."""
    demand(bool(leaves(experiment.method)), "its class variable `leaves` is missing or empty; people at sites read it")
    fed = Watched(bench.undisturbed(experiment), Serial())
    fed.round, method = fed.rounds, fed.method  # after any warm-up
    method.round(method.init(fed), fed)
    demand(
        fed.one_by_one <= needs_each_model(method),
        "its server takes uploads one by one by fed.run; use fed.mean, or set needs_each_model = True",
    )


CHECKS: dict[str, Callable[[Bench, Experiment], Any]] = {
    "a run comes to its end": comes_to_its_end,
    "two workers give the bits of one": same_bits_with_workers,
    "killed and resumed gives the bits of a run never killed": same_bits_after_kills,
    "hidden labels change nothing": hidden_labels_change_nothing,
    "messages and uploads survive packing": messages_survive,
    "the server's state survives packing": state_survives,
    "any client may be missing": anyone_may_be_missing,
    "it tells what leaves a site": tells_what_leaves,
}


class Finding(NamedTuple):
    """What came of a check: the promise, where labels were, and why it is not kept, or nothing."""

    promise: str
    place: str
    why: str = ""


def check(method: Any, folder: Path) -> Iterator[Finding]:
    """Check a method in every place for labels that it declares. Runs go to a folder."""
    for task in tasks(type(method)).values():
        gets, sends, keeps = (
            ", ".join(field_names(kind)) or "nothing" for kind in (task.message, task.upload, task.state)
        )
        yield Finding(f"{task.name} declares what it gets ({gets}), sends ({sends}) and keeps ({keeps})", "")
    yield Finding("it refuses other places for labels", "", failure(refuses_other_places, method))
    with Pool(2) as pool:
        bench = Bench(folder, pool)
        for place in sorted(method.label_places):
            for promise, kept in CHECKS.items():
                yield Finding(promise, place, why := failure(kept, bench, small_experiment(method, place)))
                if why and kept is comes_to_its_end:
                    break  # what cannot run cannot be compared


def failure(check: Callable[..., Any], *subject: Any) -> str:
    """Return why a check fails, or nothing."""
    try:
        check(*subject)
    except (Broken, FewLabelError) as error:
        return str(error)
    except Exception as error:  # what somebody else's code may raise is not ours to list
        return f"{type(error).__name__}: {error}"
    return ""
