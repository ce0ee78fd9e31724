"""Sites must have what was dealt out: in each round of a stream, without left-out shares, with the noise asked for."""

import json
import shutil
import signal
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from fewlabel.core.federation import LabelPlace, broadcast
from fewlabel.core.metrics import Audit
from fewlabel.core.rng import Rng
from fewlabel.data import datasets
from fewlabel.data.partition import Partition
from fewlabel.engine.conformance import Mortal, lines, weights
from fewlabel.engine.executor import SERVER_ID, Job
from fewlabel.engine.record import read_rounds, read_summary
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import Interrupted, execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.engine.worker import Worker
from fewlabel.engine.world import World
from fewlabel.experiment import Experiment, Stream
from fewlabel.methods.fedavg import Message
from tests.keeper import Keeper
from tests.methods.test_conformance import experiment

STREAMS = [Stream(steps=3, rounds=1, mode="grow", data="all"), Stream(steps=2, rounds=2)]
CASES = [
    pytest.param(stream, setting, id=f"{stream.mode}-{setting}")
    for stream in STREAMS
    for setting in sorted(Keeper().label_places)
]


def streaming(stream: Stream, setting: LabelPlace) -> Experiment:
    whole = experiment(Keeper(), setting)
    return replace(whole, stream=stream, clients=replace(whole.clients, min_size=40))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A stream's run in this process, done once for all tests."""
    done: dict[tuple, Path] = {}

    def run(stream: Stream, setting: LabelPlace) -> Path:
        if (stream, setting) not in done:
            done[stream, setting] = prepare(streaming(stream, setting), tmp_path_factory.mktemp("run"))
            execute(done[stream, setting], executor=Serial())
        return done[stream, setting]

    return run


# Streams, as all methods must bear them


@pytest.mark.parametrize(("stream", "setting"), CASES)
def test_two_workers_give_the_bits_of_one(stream, setting, undisturbed, pool, tmp_path):
    directory = prepare(streaming(stream, setting), tmp_path / "two")
    execute(directory, executor=pool)
    assert weights(directory) == weights(undisturbed(stream, setting))
    assert lines(directory) == lines(undisturbed(stream, setting))


@pytest.mark.parametrize(("stream", "setting"), CASES)
def test_killed_or_stopped_and_resumed_gives_the_bits_of_a_run_never_killed(stream, setting, undisturbed, tmp_path):
    directory = prepare(streaming(stream, setting), tmp_path / "killed")
    process = get_context("fork").Process(target=execute, args=(directory,), kwargs={"executor": Mortal(2, 2)})
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    for _ in range(2):  # after each of the next two rounds
        with pytest.raises(Interrupted):
            execute(directory, executor=Serial(), stop=lambda: True)
    execute(directory, executor=Serial())
    assert weights(directory) == weights(undisturbed(stream, setting))
    assert lines(directory) == lines(undisturbed(stream, setting))


@pytest.mark.parametrize(("stream", "setting"), CASES)
def test_hidden_labels_reach_nothing_but_the_audit(stream, setting, undisturbed, tmp_path, monkeypatch):
    directory = prepare(streaming(stream, setting), tmp_path / "run")
    index = np.concatenate([share.unlabeled for share in Partition.load(directory / "partition.json").shares])
    elsewhere = tmp_path / "cache"
    shutil.copytree(datasets.cache_folder(), elsewhere / "fewlabel" / "decoded")
    (path,) = (elsewhere / "fewlabel" / "decoded").glob("digits-16px-v*/train-labels.npy")
    labels = np.load(path)
    labels[index] = (labels[index] + 1) % 10
    np.save(path, labels)
    undisturbed(stream, setting)  # while its labels are the right ones
    datasets.seal(path.parent, json.loads((path.parent / "about.json").read_text()))  # or it would be decoded anew
    monkeypatch.setenv("XDG_CACHE_HOME", str(elsewhere))
    execute(directory, executor=Serial())
    assert weights(directory) == weights(undisturbed(stream, setting))


def test_statistics_are_recomputed_over_what_is_there(pool, run_dir):
    changes = ("model=tests.nets:tiny", "model.buffers=recomputed", "stream.steps=2", "stream.rounds=1", "rounds=3")
    one, two, still = run_dir(*changes), run_dir(*changes), run_dir(*changes[:2], "rounds=3")
    for directory, executor in ((one, Serial()), (two, pool), (still, Serial())):
        execute(directory, executor=executor)
    assert weights(one) == weights(two)
    # FedAvg trains at client 0, which does not stream: the statistics alone are of other images.
    first = [next(line["test"] for line in lines(directory) if "test" in line) for directory in (one, still)]
    assert first[0] != first[1]


# What a round sees


def test_sizes_are_those_of_the_round(run_dir):
    directory = run_dir("stream.steps=3", "stream.rounds=2", "stream.mode=grow", "clients.partition=iid", "rounds=8")
    fed = Server(directory, Serial())
    # 1,197 digits among 5 clients: 240, 240, 239, 239, 239, of which the first is labeled and does not stream.
    # 240 = 3 x 80; 239 = 80 + 80 + 79.
    for number, sizes in {
        0: [80] * 4,
        1: [80] * 4,
        3: [160] * 4,
        5: [240, 239, 239, 239],
        8: [240, 239, 239, 239],
    }.items():
        fed.round = number
        assert [client.num_unlabeled for client in fed.unlabeled] == sizes
        assert [(client.id, client.num_labeled) for client in fed.labeled] == [(0, 240)]
        assert [client.size for client in fed.clients] == [240, *sizes]


def test_a_reply_tells_the_size_of_its_round_whenever_its_client_was_listed(run_dir):
    fed = Server(run_dir("stream.steps=3", "stream.data=labeled", "stream.rounds=1", "model=tests.nets:tiny"), Serial())
    before, state = fed.clients[:1], fed.method.init(fed)
    whole = len(fed.world.partition.shares[0].labeled)
    sizes = [len(part) for part in np.array_split(np.arange(whole), 3)]
    for fed.round in (1, 2, 3, 4):
        (reply,) = fed.run(fed.method.local_update, broadcast(before, Message(state.model)))
        assert reply.client.num_labeled == [*sizes, sizes[-1]][fed.round - 1]
        fed.finish_round(None)


def test_a_site_has_the_images_of_its_round_and_is_audited_on_them(run_dir):
    world = World.open(run_dir("stream.steps=3", "stream.rounds=2"))
    share = world.partition.shares[2]
    for number, step in {1: 0, 2: 0, 3: 1, 5: 2, 99: 2}.items():
        site = world.site(2, number, Rng(0), torch.nn.Linear(1, 1))
        assert site.unlabeled._where.tolist() == np.array_split(share.unlabeled, 3)[step].tolist()
        assert site.info == world.info(2, number)


def test_the_audit_scores_the_images_of_the_round(run_dir):
    worker = Worker(run_dir("stream.steps=3", "stream.rounds=2"))
    truth, share = worker.world.dataset.splits["train"].labels, worker.world.partition.shares[2]
    there = np.array_split(share.unlabeled, 3)[1]
    said = truth[torch.from_numpy(there)].clone()
    said[:4] = (said[:4] + 1) % 10
    site = worker.world.site(2, 3, Rng(0), worker.model, watched=True)
    site.audit(torch.arange(len(there)), said)
    found = Audit.from_json(worker.seen(Job("", "client", client=2, round=3), site)["audit"]["0"])
    assert (found.total, int(found.used.sum()), int(found.correct.sum())) == (len(there), len(there), len(there) - 4)
    truth[torch.from_numpy(there[2:])] = -1  # nobody knows any but two, both of which are wrong
    found = Audit.from_json(worker.seen(Job("", "client", client=2, round=3), site)["audit"]["0"])
    assert (found.total, int(found.used.sum()), int(found.judged.sum())) == (len(there), len(there), 2)
    assert int(found.correct.sum()) == 0


# Left-out shares, noise and validation


def test_left_out_shares_are_no_clients(run_dir):
    fed = Server(run_dir("labels.ids=[3]", "labels.unlabeled_clients=2"), Serial())
    assert [client.id for client in fed.clients] == [0, 1, 3]
    assert [client.id for client in fed.labeled] == [3]
    assert [client.id for client in fed.unlabeled] == [0, 1]
    execute(fed.directory, executor=Serial())


def test_sites_learn_the_wrong_labels_and_the_audit_knows_better(run_dir):
    world = World.open(run_dir("labels.noise=0.5", "labels.at=some-clients+server", "labels.per_class=4"))
    truth, wrong = world.dataset.splits["train"].labels, dict(world.partition.noise.T.tolist())
    total = 0
    for client in (0, SERVER_ID):
        site = world.site(client, 1, Rng(0), torch.nn.Linear(1, 1))
        where = site.labeled._where.tolist()
        assert site.labeled.y.tolist() == [wrong.get(i, int(truth[i])) for i in where]
        total += len(where)
    assert len(wrong) == round(0.5 * total)
    hidden = torch.from_numpy(world.partition.shares[1].unlabeled)
    assert not set(hidden.tolist()) & wrong.keys()
    assert torch.equal(world.known_labels[hidden], truth[hidden])


def test_labels_validate_where_no_split_is_published(run_dir):
    changes = ("data=tests.owndata:shades", "model=tests.nets:tiny", "labels.clients=2", "rounds=2", "clients.count=4")
    directory = run_dir(*changes, "labels.validation=0.1", "clients.partition=iid", "evaluate.every=1")
    fed = Server(directory, Serial())
    assert len(fed.server.validation) == 15  # a tenth of two of four clients with 75 images
    assert fed.server.validation.y.tolist().count(0) == 10  # as two thirds of all images are
    execute(directory, executor=Serial())
    assert {"test", "validation"} <= read_rounds(directory)[0].keys()
    assert read_summary(directory)["chosen_on_validation"] is not None
    plain = run_dir(*changes)
    assert Server(plain, Serial()).server.validation is None
    published = Server(run_dir(), Serial())  # digits have 300
    assert (len(published.server.validation), len(published.world.partition.validation)) == (300, 0)
