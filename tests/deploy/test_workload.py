"""What a site counts itself: passes over its images, and how often it is asked, whatever messages and settings say."""

from dataclasses import replace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

import torch

from fewlabel.core import schedule, tree, wire
from fewlabel.core.described import most_passes
from fewlabel.core.errors import RunFailed
from fewlabel.core.images import Tally
from fewlabel.core.rng import Rng
from fewlabel.core.schema import plain
from fewlabel.core.tasks import tasks
from fewlabel.data.site_files import Terms
from fewlabel.deploy import experiments, policy, workload
from fewlabel.deploy.messages import Refused
from fewlabel.deploy.received import Received
from fewlabel.deploy.server import serve
from fewlabel.engine.executor import Job
from fewlabel.engine.record import read_rounds
from fewlabel.experiment import Experiment
from fewlabel.learn.sparse import pack
from fewlabel.methods.fedavg import Message as FedAvgMessage
from fewlabel.methods.fedmatch import Message
from fewlabel.methods.tutor import Tutor, Tutors
from tests.deploy.federated import experiment, federate, local_grid, simulated, split, weights
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
    why = r"3 of 4 sites .* for 3 epochs at most, and a round of tutor may have 4 in all \(most_epochs\)"
    with pytest.raises(RunFailed, match=why):  # before anything is trained
        serve(grid(data, tmp_path / "state3", file), federate(whole, data, tmp_path / "run3", patience=0.5))


# Epochs of a round at sites with labels and without, and what a round makes of them.
BOTH = ("method.local.epochs=2", "method.epochs_unlabeled=1")
MOST = {
    "tutor": ("labels.at=every-client", 5 * 6),  # 5 tutors; 2 epochs in each of 3 rounds are 6 in the first
    "semifl": ("labels.at=every-client", 1 + 1 + 2),  # fix set, mix set, labels
    "fl2": ("labels.at=every-client", 1 + 2),
    "rscfed": ("labels.clients=2", 3 * 2),  # 3 groups of 5, so that each of 4 sites is in all
    "isofed": ("labels.clients=2", 1 + 2),  # one to adapt; of a site without labels, whose adapting counts as well
}


@pytest.mark.parametrize("name", MOST)
def test_a_method_says_how_often_a_round_passes_over_images_and_sites_count_as_many(name, tmp_path):
    at, most = MOST[name]
    more = {"semifl": ["method.threshold=0"], "fl2": ["method.threshold=0"], "isofed": ["method.epochs_unlabeled=2"]}
    whole = experiment(f"method={name}", at, *BOTH, *more.get(name, ()))
    assert most_passes(whole) == most
    data = split(whole, tmp_path / "sites")
    serve(local_grid(data, tmp_path / "state"), federate(whole, data, tmp_path / "run"))
    rounds = [calls for path in tmp_path.rglob(workload.FILE) for calls in workload.read(path.parent).values()]
    assert max(sum(done.passes for done in calls.values()) for calls in rounds) == most


def test_a_site_reads_and_limits_the_passes_of_a_round_and_not_the_epochs_of_one_task():
    """Tutor's default: 5 epochs in each of 30 rounds are 19 in each of the first 8, for each of 5 tutors."""
    whole = Experiment(method="tutor")
    assert whole.method.local.epochs == 5
    record = experiments.Record(RUN, "", "", plain(whole), plain(Terms(("cat", "dog"), 1, 28)))
    assert "epochs 5" in experiments.summary(record)
    assert "; all tasks of a round together pass over your images 95 times at most\n" in experiments.summary(record)
    sentence = "it trains for 94 epochs at most, and a round of tutor may have 95 in all (most_epochs)"
    assert list(policy.objections(policy.Policy(most_epochs=94), whole, labeled=20)) == [sentence]
    assert list(policy.objections(policy.Policy(most_epochs=94), whole, labeled=0)) == []
    assert list(policy.objections(policy.Policy(most_epochs=95), whole, labeled=20)) == []


def test_exact_counts_over_labels_are_told_once_in_a_run(tmp_path):
    """For other weights, in the same round or in another, a coordinator could put many answers together."""
    job = Job(RUN, "client", "mark", 0, 31)
    for _ in range(2):  # a run that is resumed repeats rounds
        workload.begin(tmp_path, job, None, SENT, once=True)
    other = Received(5.0, "01")
    workload.begin(tmp_path, replace(job, task="correct", call=1), None, other)
    for again, sent in ((job, other), (replace(job, call=2), other), (replace(job, round=32), SENT)):
        with pytest.raises(Refused, match="has done 'mark' for other weights or in another round of this run"):
            workload.begin(tmp_path, again, None, sent, once=True)
    with pytest.raises(Refused, match="call 1 of round 31 was 'correct', and is not 'mark'"):  # not under its name
        workload.begin(tmp_path, replace(job, call=1), None, other, once=True)
    assert {name for name, task in tasks(Tutor).items() if task.once} == {"mark", "sit_exam"}


def test_a_site_counts_mistakes_for_one_panel_of_tutors(tmp_path):
    """Orders to a site: the same tutors again are answered, in a round that is repeated; made-up ones are not."""
    whole = experiment(*TUTOR[:-1], "labels.clients=4", "rounds=2")
    data, file = split(whole, tmp_path / "sites"), tmp_path / "policy.toml"
    config = grid(data, tmp_path / "state", file).configs[7000]
    got = []
    for factor, number in ((1.0, 2), (1.0, 2), (1.1, 2), (1.0, 3)):
        sent = wire.pack(Tutors((network(), *[tree.scale(network(), factor)] * (number - 1))))
        got += [*ask(config, whole, data, "client", round=2, task="mark", message=sent)]
    assert got == ["upload", "upload", "refused", "refused"]


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
