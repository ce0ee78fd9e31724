"""What one member can do to a federation over Flower: no more than the settings allow, and by name."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Message

from fewlabel.core import wire
from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.core.federation import ClientInfo
from fewlabel.core.rng import Rng
from fewlabel.core.tasks import tasks
from fewlabel.data.settings import Attack
from fewlabel.data.site_files import Terms
from fewlabel.deploy import keys, members, wishes
from fewlabel.deploy.messages import Introduction
from fewlabel.deploy.run_plan import RunPlan
from fewlabel.deploy.server import serve, server_world
from fewlabel.engine.attack import attacked
from fewlabel.engine.executor import Job
from fewlabel.engine.flower_messages import RECORD
from fewlabel.engine.record import read_rounds
from fewlabel.experiment import Experiment
from fewlabel.learn.evidence import Exam
from tests.deploy.federated import (
    LocalGrid,
    experiment,
    federate,
    lines,
    local_grid,
    reply_with,
    simulated,
    split,
    weights,
)

BOUNDS = (
    "clients.clip_median=1.5",
    "clients.outlier=20",
    "clients.exclude_after=2",
    "clients.largest_share=0.4",
)
CASES = {
    "fedavg": ["method=fedavg", "labels.clients=3", *BOUNDS],
    "rscfed": ["method=rscfed", *BOUNDS],
    "fedmatch": ["method=fedmatch", "labels.at=every-client", "labels.per_class=4", *BOUNDS],
    "median": ["method=fedavg", "labels.clients=3", "clients.aggregate=median", *BOUNDS],
    "geometric": ["method=fedirm", "labels.clients=3", "clients.aggregate=geometric-median"],
}


class Member(LocalGrid):
    """A grid in which some sites send what an attacker of a simulation would send."""

    def attack(self, whole: Experiment, attack: Attack) -> "Member":
        self.sent: dict[tuple[int, int, int], bytes] = {}

        def meddle(job: Job, reply: Message) -> Message:
            if job.client not in attack.ids or job.kind != "client":
                return reply
            content = reply.content[RECORD]
            if "upload" not in content:
                return reply
            rng = Rng(whole.seed, "task", job.round, job.client, job.task, job.call, "attack")
            task = tasks(type(whole.method))[job.task]
            return reply_with(reply, upload=attacked(attack, task, self.message, content["upload"], rng))

        self.meddle = meddle
        return self

    def push_messages(self, messages):
        names = []
        for message in messages:
            self.message = message.content[RECORD].get("message", b"")
            names += super().push_messages([message])
        return names


@pytest.mark.parametrize("kind", ["sign-flip", "huge"])
@pytest.mark.parametrize("name", CASES)
def test_a_protected_run_over_flower_gives_the_bits_of_the_simulator(name, kind, tmp_path):
    """With a member who attacks, as in a simulation with an attacker."""
    attack = Attack("sign-flip", (1,), 30.0) if kind == "sign-flip" else Attack("huge", (1,))
    whole = experiment(*CASES[name])
    data = split(whole, tmp_path / "sites")
    grid = Member(local_grid(data, tmp_path / "state").configs).attack(whole, attack)
    serve(grid, federate(whole, data, tmp_path / "flower"))
    simulated(replace(whole, clients=replace(whole.clients, attack=attack)), tmp_path / "simulated")
    assert lines(tmp_path / "flower") == lines(tmp_path / "simulated")
    named = {one["client"] for line in lines(tmp_path / "flower") for one in line.get("suspects", ())}
    assert 1 in named
    both = [tensors(tmp_path / place) for place in ("flower", "simulated")]
    assert both[0] == both[1]


def tensors(directory: Path) -> list[bytes]:
    """The models of a run, without their headers, which hold the settings."""
    return [data[8 + int.from_bytes(data[:8], "little") :] for data in weights(directory)]


def test_a_member_is_named_by_its_name(tmp_path):
    """And one who claims far more images than the others counts for no more than its share."""
    whole = experiment("method=fedavg", "labels.at=every-client", "labels.fraction=0.5", *BOUNDS)
    data, folder = split(whole, tmp_path / "sites"), tmp_path / "federation"
    members.create(folder, members.Federation("demo", "127.0.0.1:9443", "0.2.0"), {})
    public = [keys.public_half(keys.new_key(tmp_path / f"key {n}", ssh=True)) for n in range(4)]
    admitted = [members.Member(n, f"Klinik {'ABCD'[n]}", public[n], f"nonce {n}", "", 7000 + n) for n in range(4)]
    members.write_members(folder, tuple(admitted))

    def claims(job: Job, reply: Message) -> Message:
        if job.kind == "info":
            found = wire.unpack(Introduction, reply.content[RECORD]["upload"])
            if found.info.id == 1:
                return reply_with(reply, upload=wire.pack(replace(found, info=ClientInfo(1, 5 * 10**7, 5 * 10**7))))
        return reply

    serve(
        local_grid(data, tmp_path / "state", meddle=claims),
        federate(whole, data, tmp_path / "run", members=str(folder)),
    )
    (first, *_) = read_rounds(tmp_path / "run")
    assert first["suspects"][0]["name"] == "Klinik B"
    assert "it claims 100,000,000 images" in first["suspects"][0]["why"]


EXAMINED = (
    *("method=tutor", "method.tutors=1", "method.views=0", "labels.clients=3", "labels.held_out=0.25"),
    *("method.epochs_unlabeled=1", "evaluate.every=2", "rounds=4", "model=tests.nets:orthogonal"),
    *("method.local.lr=1e-12", "method.local.lr_unlabeled=1e-12"),  # so that both models are equally good at the server
)


@pytest.mark.parametrize("lie", ["too many", "all it has"])
def test_a_member_that_lies_in_exams_cannot_end_the_use_of_unlabeled_sites(lie, tmp_path):
    """Tutor gives unlabeled images up if labels alone are better beyond doubt, by what sites count."""
    whole = experiment(*EXAMINED)
    data = split(whole, tmp_path / "sites")

    def exams(job: Job, reply: Message) -> Message:
        if job.task != "sit_exam":
            return reply
        found = wire.unpack(Exam, reply.content[RECORD]["upload"])
        nobody = torch.zeros_like(found.first)
        if job.client != 1:  # honest ones find both models equally good
            return reply_with(reply, upload=wire.pack(Exam(found.images, nobody, nobody)))
        images = torch.full_like(found.images, 10**6) if lie == "too many" else found.images
        return reply_with(reply, upload=wire.pack(Exam(images, nobody, images)))

    serve(local_grid(data, tmp_path / "state", meddle=exams), federate(whole, data, tmp_path / "run"))
    last = read_rounds(tmp_path / "run")[-1]  # which has the exam
    assert last["given_up"] == 0.0
    if lie == "too many":  # it is left out, by name, and the others' counts say that nothing is gained or lost
        assert abs(last["gain"]) < 1e-9
        named = last["suspects"][0]
        assert (named["client"], named["task"], named["did"]) == (1, "sit_exam", "left out")
        assert "labels that it holds out" in named["why"]
    else:  # what it has counts
        assert last["gain_high"] < 0


def test_a_member_that_claims_millions_of_labels_costs_the_server_no_memory():
    whole = experiment("method=tutor", "labels.held_out=0.25")
    clients = {0: ClientInfo(0, 10**8, 0), 1: ClientInfo(1, 3, 0)}
    world = server_world(whole, RunPlan("a" * 32, Terms(("a", "b"), 1, 16, (0.5,), (0.5,)), 2), clients)
    tracemalloc.start()
    try:
        assert [world.info(client, 1).num_labeled for client in clients] == [75 * 10**6, 2]
        assert [world.num_held_out(client, 1) for client in clients] == [25 * 10**6, 1]
        assert tracemalloc.get_traced_memory()[1] < 10**6
    finally:
        tracemalloc.stop()


def test_a_member_that_reports_far_more_images_than_before_is_named(tmp_path):
    folder = tmp_path / "federation"
    members.create(folder, members.Federation("demo", "127.0.0.1:9443", "0.2.0"), {})
    members.write_members(folder, (members.Member(1, "Klinik B", "key", "nonce", ""),))
    assert members.grown(folder, {0: 100, 1: 474}) == []
    assert members.grown(folder, {0: 200, 1: 500}) == []  # data may grow
    why = "client 1 'Klinik B' reports 100,000,000 images, and reported 500 in an earlier run"
    for _ in range(2):
        assert members.grown(folder, {1: 10**8, 2: 7}) == [why]
    assert members.grown(folder, {0: 200, 1: 600}) == []


def test_a_member_that_reports_labels_for_the_first_time_is_named(tmp_path):
    folder = tmp_path / "federation"
    members.create(folder, members.Federation("demo", "127.0.0.1:9443", "0.2.0"), {})
    members.write_members(folder, (members.Member(1, "Klinik B", "key", "nonce", ""),))
    for reported, said in (
        ({0: 10, 1: 0}, []),
        ({0: 20, 1: 5}, ["'Klinik B' reports 5 labels, and had none in an earlier run"]),
        ({1: 6}, []),
    ):
        assert wishes.first_labels(folder, reported) == said
        wishes.change(folder, reported=reported)


def test_a_member_that_makes_the_model_useless_is_named_where_the_run_ends(tmp_path):
    whole = experiment(
        *("method=fedavg", "labels.at=every-client", "labels.fraction=0.5"),
        *("clients.attack.kind=scale", "clients.attack.ids=[1]", "clients.attack.strength=1e17"),
    )
    with pytest.raises(RunFailed, match=r"In round 1 these updates were odd: client 1: its update has norm .*outlier"):
        simulated(whole, tmp_path / "run")


def test_nobody_can_be_told_to_attack(tmp_path):
    whole = experiment("method=fedavg", "clients.attack.kind=huge", "clients.attack.ids=[0]")
    data = split(whole, tmp_path / "sites")
    with pytest.raises(BadInput, match=r"clients\.attack is for simulations"):
        federate(whole, data, tmp_path / "run")
