"""What a site counts itself: passes over its images, and how often it is asked, whatever messages and settings say."""

from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

import torch

from fewlabel.core import schedule, tree, wire
from fewlabel.core.federation import TooFewReplies
from fewlabel.core.images import Tally
from fewlabel.core.rng import Rng
from fewlabel.deploy import workload
from fewlabel.deploy.messages import Refused
from fewlabel.deploy.received import Received
from fewlabel.deploy.server import serve
from fewlabel.engine.executor import Job
from fewlabel.engine.record import read_rounds
from fewlabel.learn.sparse import pack
from fewlabel.methods.fedavg import Message as FedAvgMessage
from fewlabel.methods.fedmatch import Message
from tests.deploy.federated import experiment, federate, simulated, split, weights
from tests.deploy.test_policy import ask, grid
from tests.nets import tiny

RUN = "b" * 32
SENT = Received(5.0, "00")
TUTOR = ("method=tutor", "method.tutors=2", "method.views=0", "method.epochs_unlabeled=1", "labels.clients=1")


def network() -> tree.Tree:
    with Rng("network").scope():
        return tree.of(tiny(1, 10, 16))


def test_passes_are_those_over_the_kind_of_images_that_needs_fewer():
    """40 images in 4 batches with 3 labels: labels start again in each step, and the site's images are passed once."""
    tally = Tally()
    tally.begin(False, True)
    assert tally.passes == 1
    for _ in range(4):
        tally.begin(True, False)
    assert (tally.begun, tally.passes) == ([4, 1], 1)
    with torch.no_grad():
        tally.begin(True, True)  # who only looks does not train
    assert tally.begun == [4, 1]


def test_a_pass_too_many_is_refused_when_it_begins():
    tally = Tally()
    with schedule.limited(None, 2):
        tally.begin(True, False)
        tally.begin(True, True)  # a joined set: labels for the second time, other images for the first
        tally.begin(True, True)
        with pytest.raises(schedule.TooLong, match="passes over its images more than 2 times, and no more are left"):
            tally.begin(True, True)
    tally.begin(True, True)  # no limit any more


def test_a_message_that_asks_for_more_epochs_than_the_settings_is_refused(tmp_path):
    """FedMatch's message says how many epochs to train, so the settings alone do not bound it."""
    whole = experiment("method=fedmatch", "labels.at=every-client", "labels.per_class=4")
    data, file = split(whole, tmp_path / "sites"), tmp_path / "policy.toml"
    file.write_text("most_epochs = 3\n")
    config = grid(data, tmp_path / "state", file).configs[7000]
    sigma = network()
    for epochs, said in ((3, "upload"), (10**6, "refused")):
        sent = Message(sigma, pack(tree.parameters(sigma)), (), 0.01, epochs)
        found = ask(config, whole, data, "client", round=1, task="local_update", message=wire.pack(sent))
        assert [*found] == [said], found
    assert (
        "this task passes over its images more than 3 times, and no more are left in this round (most_epochs)"
        in found["refused"]
    )


def test_all_trainings_of_a_round_count_together(tmp_path):
    """In the first of two rounds a labeled site of Tutor trains each of two tutors for two epochs: four passes."""
    whole = experiment(*TUTOR, "rounds=2")
    data, file = split(whole, tmp_path / "sites"), tmp_path / "policy.toml"
    file.write_text("most_epochs = 4\n")
    serve(grid(data, tmp_path / "state4", file), run := federate(whole, data, tmp_path / "run4"))
    assert not any(line.get("failures") for line in read_rounds(run))
    simulated(whole, tmp_path / "simulated")
    assert weights(run) == weights(tmp_path / "simulated")  # a limit that is kept changes no bit
    file.write_text("most_epochs = 3\n")
    with pytest.raises(TooFewReplies, match=r"more than 1 times, and no more are left in this round \(most_epochs\)"):
        serve(grid(data, tmp_path / "state3", file), federate(whole, data, tmp_path / "run3"))


def test_a_round_that_is_repeated_counts_once(tmp_path):
    """A resumed run repeats rounds: whoever trains for all epochs that are allowed can do so again."""
    job = Job(RUN, "client", "local_update", 0, 1)
    assert workload.begin(tmp_path, job, 5, SENT) == 5
    workload.finish(tmp_path, job, 5)
    assert workload.begin(tmp_path, job, 5, SENT) == 5  # the same call
    assert workload.begin(tmp_path, replace(job, call=1), 5, SENT) == 0
    assert workload.begin(tmp_path, replace(job, round=2), 5, SENT) == 5
    assert workload.begin(tmp_path, job, None, SENT) is None


def test_a_coordinator_gets_no_more_replies_by_asking_again_in_one_round(tmp_path):
    """With `most_rounds` alone, it could ask for any number of calls in round 1, each for other weights."""
    whole = experiment("method=labels-only", "labels.clients=2", "rounds=1")
    data, file = split(whole, tmp_path / "sites"), tmp_path / "policy.toml"
    file.write_text("most_rounds = 1\nmost_epochs = 3\n")
    config = grid(data, tmp_path / "state", file).configs[7000]
    got = []
    for call in range(5):
        crafted = wire.pack(FedAvgMessage({n: (1 + call / 10) * v for n, v in network().items()}, 1.0))
        got += [*ask(config, whole, data, "client", round=1, call=call, task="local_update", message=crafted)]
    assert got == ["upload"] * 3 + ["refused"] * 2
    job = Job(RUN, "client", "local_update", 0, 1)
    for _ in range(workload.TIMES - 1):
        workload.begin(tmp_path / "state" / "client-0" / RUN, job, None, SENT)
    with pytest.raises(Refused, match="asked 20 times for call 0 of round 1"):
        workload.begin(tmp_path / "state" / "client-0" / RUN, job, None, SENT)


def test_weights_are_compared_with_those_of_the_round_before(tmp_path):
    job = Job(RUN, "client", "local_update", 0, 1)
    assert workload.last_norm(tmp_path, job) == 0.0
    for number, norm in ((1, 5.0), (3, 7.0), (3, 6.0)):
        call = replace(job, round=number, call=int(10 * norm))
        workload.begin(tmp_path, call, None, Received(norm, ""))
    assert [workload.last_norm(tmp_path, replace(job, round=number)) for number in (1, 2, 3, 4)] == [0.0, 5.0, 5.0, 7.0]


def test_a_round_has_so_many_tasks(tmp_path):
    job = Job(RUN, "client", "sit_exam", 0, 1)
    for call in range(workload.CALLS):
        workload.begin(tmp_path, replace(job, call=call), None, SENT)
    with pytest.raises(Refused, match="has done 100 tasks in round 1 of this run"):
        workload.begin(tmp_path, replace(job, call=workload.CALLS), None, SENT)
    workload.begin(tmp_path, replace(job, round=2), None, SENT)
