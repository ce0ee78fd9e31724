"""What every method must pass, in every setting that it declares. A method is covered by its line in METHODS."""

import json
import os
import shutil
import signal
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

from fewlabel.core import wire
from fewlabel.core.described import leaves, needs_each_model
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import LabelPlace, train
from fewlabel.core.tasks import state_kind, tasks
from fewlabel.data import datasets
from fewlabel.data.partition import Partition
from fewlabel.engine.executor import Job
from fewlabel.engine.pool import Pool
from fewlabel.engine.record import read_rounds
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.experiment import RECIPES, Clients, Data, Evaluate, Experiment, Labels, Net, Stream
from fewlabel.experiment import Checkpoint as Every
from fewlabel.methods import METHODS
from tests.keeper import Keeper

ROUNDS = 4
ALL = {**METHODS, "keeper": Keeper()}
FIRST = {type(method): name for name, method in reversed(ALL.items())}  # the others are rows with other settings


def cases(*parts):
    """Every method; rows that differ from another only in settings are left to `make test-all`."""
    for name, method in ALL.items():
        marks = [] if FIRST[type(method)] == name else [pytest.mark.slow]
        for part in parts[0](method) if parts else [None]:
            values = (method,) if part is None else (method, part)
            yield pytest.param(*values, id="-".join([name, *([part] if part else [])]), marks=marks)


def places(method) -> list[LabelPlace]:
    """Where its labels may be; clients that share nothing cannot have theirs at the server, and say so in `init`."""
    return sorted(s for s in method.label_places if s != LabelPlace.SERVER or getattr(method, "sharing", True))


CASES = list(cases(places))


def experiment(method, setting: LabelPlace, buffers: str = "global") -> Experiment:
    """Small but whole: BatchNorm, dropout, clients that take turns and fall silent, an evaluation every other round."""
    if hasattr(method, "local"):
        method = replace(method, local=replace(method.local, epochs=1, batch_size=32))
    if hasattr(method, "warmup_epochs"):
        method = replace(method, warmup_epochs=2, threshold=0.0, skip=2)
    if hasattr(method, "helpers") or getattr(method, "unlabeled", "none") != "none":  # sure of much, rates that fall
        patience = 1 if getattr(method, "sharing", True) else None
        method = replace(method, confidence=0.2, patience=patience, local=replace(method.local, lr=0.03))
    if hasattr(method, "helpers_every"):
        method = replace(method, helpers_every=2)
    if hasattr(method, "uncertainty"):
        method = replace(method, uncertainty=3.0)
    if hasattr(method, "warmup"):
        method = replace(method, warmup=min(method.warmup, 1))
    labels = (
        Labels(at=setting.value, clients=2)
        if setting == LabelPlace.SOME_CLIENTS
        else Labels(setting.value, per_class=4)
    )
    return Experiment(
        method=method,
        seed=5,
        rounds=ROUNDS,
        data=Data("digits", image_size=16),
        model=Net("tests.nets:tiny", buffers=buffers),
        clients=Clients(count=6, per_round=4, dropout=0.1, alpha=2.0),
        labels=labels,
        train=RECIPES["fewlabel"],
        evaluate=Evaluate(every=2, local=True),
        checkpoint=Every(rounds=2),
    )


def weights(directory: Path) -> bytes:
    """Of the shared models, last and chosen on validation; where there is none, those that clients kept last."""
    if paths := sorted(directory.glob("model*.safetensors")):
        assert len(paths) == 2
        return b"".join(path.read_bytes() for path in paths)
    return b"".join(max(client.glob("*.safetensors")).read_bytes() for client in sorted(directory.glob("clients/*")))


def lines(directory: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in read_rounds(directory)]


@pytest.fixture(scope="module")
def three():
    with Pool(3) as pool:
        yield pool


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A case's run in this process, done once for all tests."""
    done: dict[tuple, Path] = {}

    def run(method, setting: LabelPlace) -> Path:
        if (method, setting) not in done:
            directory = prepare(experiment(method, setting), tmp_path_factory.mktemp("run"))
            execute(directory, executor=Serial())
            done[method, setting] = directory
        return done[method, setting]

    return run


@pytest.mark.parametrize("method", list(cases()))
def test_refuses_in_one_sentence_the_settings_it_does_not_declare(method):
    for setting in set(LabelPlace) - method.label_places:
        with pytest.raises(BadInput, match=rf"cannot use labels.at = '{setting}'"):
            experiment(method, setting)


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_two_and_three_workers_give_the_bits_of_one(method, setting, undisturbed, pool, three, tmp_path):
    one = undisturbed(method, setting)
    for number, executor in ((2, pool), (3, three)):
        directory = prepare(experiment(method, setting), tmp_path / str(number))
        execute(directory, executor=executor)
        assert weights(directory) == weights(one)
        assert lines(directory) == lines(one)


@pytest.mark.parametrize("buffers", ["local", "recomputed"])
@pytest.mark.parametrize("method", list(cases()))
def test_every_policy_for_statistics_works_with_any_number_of_workers(method, buffers, pool, tmp_path):
    setting = sorted(method.label_places)[0]
    for number, executor in ((1, Serial()), (2, pool)):
        execute(prepare(experiment(method, setting, buffers), tmp_path / str(number)), executor=executor)
    assert weights(tmp_path / "1") == weights(tmp_path / "2")
    assert lines(tmp_path / "1") == lines(tmp_path / "2")


STREAMED = list(cases(lambda method: [s for s in places(method) if s != LabelPlace.SOME_CLIENTS]))


@pytest.mark.parametrize(("method", "setting"), STREAMED)
def test_images_may_come_in_steps(method, setting, pool, tmp_path):
    whole = experiment(method, setting)
    clients, stream = replace(whole.clients, min_size=40, dropout=0.0), Stream(steps=2, rounds=1)
    for number, executor in ((1, Serial()), (2, pool)):
        directory = prepare(replace(whole, clients=clients, stream=stream, rounds=2), tmp_path / str(number))
        execute(directory, executor=executor)
    assert weights(tmp_path / "1") == weights(tmp_path / "2")
    assert lines(tmp_path / "1") == lines(tmp_path / "2")


class Mortal(Serial):
    """Dies by SIGKILL at its n-th job."""

    def __init__(self, jobs: int) -> None:
        super().__init__()
        self.left = jobs

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().submit(job, message, statistics)


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_killed_at_a_job_and_resumed_gives_the_bits_of_a_run_never_killed(method, setting, undisturbed, tmp_path):
    directory = prepare(experiment(method, setting), tmp_path / "killed")
    for jobs in (2, 3, 5):  # each life gets further, the last to the end
        process = get_context("fork").Process(target=execute, args=(directory,), kwargs={"executor": Mortal(jobs)})
        process.start()
        process.join(120)
        assert process.exitcode in (-signal.SIGKILL, 0)
    execute(directory, executor=Serial())
    assert weights(directory) == weights(undisturbed(method, setting))
    assert lines(directory) == lines(undisturbed(method, setting))


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_hidden_labels_reach_nothing_but_the_audit(method, setting, undisturbed, tmp_path, monkeypatch):
    directory = prepare(experiment(method, setting), tmp_path / "run")
    hidden = [share.unlabeled for share in Partition.load(directory / "partition.json").shares]
    elsewhere = tmp_path / "cache"
    shutil.copytree(datasets.cache_folder(), elsewhere / "fewlabel" / "decoded")
    (path,) = (elsewhere / "fewlabel" / "decoded").glob("digits-16px-v*/train-labels.npy")
    labels = np.load(path)
    index = np.concatenate(hidden)
    labels[index] = (labels[index] + 1 + np.arange(len(index)) % 9) % 10  # no hidden label stays what it was
    np.save(path, labels)
    undisturbed(method, setting)  # while its labels are the right ones
    datasets.seal(path.parent, json.loads((path.parent / "about.json").read_text()))  # or it would be decoded anew
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    execute(directory, executor=Serial())
    assert weights(directory) == weights(undisturbed(method, setting))
    before, after = lines(undisturbed(method, setting)), lines(directory)
    audits = [
        [(line.pop("pseudo_labels", None), line.pop("pseudo_labels_per_epoch", None)) for line in run]
        for run in (before, after)
    ]
    assert before == after
    if any(first and first["coverage"] for first, _ in audits[0]):
        assert audits[0] != audits[1]


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


class Watched(Server):
    """Remembers whether models came one by one, and not through `mean`."""

    averaging = one_by_one = False

    def mean(self, *args, **more):
        self.averaging = True
        found = super().mean(*args, **more)
        self.averaging = False
        return found

    def run(self, task, jobs):
        self.one_by_one |= not self.averaging
        return super().run(task, jobs)


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_a_method_that_takes_models_one_by_one_says_so(method, setting, undisturbed):
    fed = Watched(undisturbed(method, setting), Serial())
    fed.round, method = fed.rounds, fed.method  # after any warm-up; the method as the experiment has it
    method.round(method.init(fed), fed)
    assert fed.one_by_one <= needs_each_model(method)
    assert leaves(method)


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_messages_survive_the_wire_and_the_ledger_counts_just_their_bytes(method, setting, tmp_path):
    whole = experiment(method, setting)
    directory = prepare(replace(whole, clients=replace(whole.clients, dropout=0.0)), tmp_path / "run")
    recorder = Recorder()
    execute(directory, executor=recorder)
    for job, message, upload in recorder.sent:
        task = tasks(type(method))[job.task]
        assert wire.pack(wire.unpack(task.message, message), task.message) == message
        if upload is not None:
            assert wire.pack(wire.unpack(task.upload, upload), task.upload) == upload
    rounds = read_rounds(directory)
    assert sum(line["bytes_down"] for line in rounds) == sum(len(message) for _, message, _ in recorder.sent)
    assert sum(line["bytes_up"] for line in rounds) == sum(len(upload or b"") for _, _, upload in recorder.sent)


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_server_state_survives_the_wire(method, setting, undisturbed):
    (path,) = (undisturbed(method, setting) / "checkpoint").glob("round-*.safetensors")
    fed = Server(undisturbed(method, setting), Serial())
    state, kind = method.init(fed), state_kind(type(method))
    assert wire.pack(wire.unpack(kind, wire.pack(state, kind)), kind) == wire.pack(state, kind)
    assert wire.header(path.read_bytes())["version"]


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_any_client_and_all_labeled_ones_may_be_missing(method, setting, tmp_path):
    directory = prepare(experiment(method, setting), tmp_path / "run")
    everyone = Server(directory, Serial())
    labeled = {client.id for client in everyone.labeled}
    for absent in (*({client.id} for client in everyone.clients), labeled, {client.id for client in everyone.clients}):
        fed = Server(directory, Serial(), absent=absent)
        _, state = list(islice(train(fed.method, fed, fed.method.init(fed)), 2))[-1]
        model = fed.method.model(state)
        assert model is None or all(value.isfinite().all() for value in model.values() if value.is_floating_point())


@pytest.mark.parametrize("buffers", ["global", "local", "recomputed"])
@pytest.mark.parametrize(("method", "setting"), CASES)
def test_a_site_may_have_a_single_image_with_a_label_and_one_without(method, setting, buffers, tmp_path):
    """Which BatchNorm could not be trained on. Hospital 4 has an image of each kind where every client has some."""
    labels = Labels(at=setting.value, per_class=1)
    if setting == LabelPlace.SOME_CLIENTS:
        labels = Labels(at=setting.value, ids=(0, 2))
    whole = replace(
        experiment(method, setting, buffers),
        rounds=2,
        data=Data("tests.owndata:hospitals", image_size=8),
        clients=Clients(count=5, partition="by-column", min_size=1),
        labels=labels,
    )
    execute(prepare(whole, tmp_path), executor=Serial())
    assert len(lines(tmp_path)) == 2
