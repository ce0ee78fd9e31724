"""What members and coordinators try who know the code: none of it ends a run, gains weight, or misleads people."""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Message

from fewlabel.core import coarse, wire
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.federation import ClientInfo, Model
from fewlabel.deploy import evaluation, keys, log_heads, members, received, site, site_folder, site_log
from fewlabel.deploy.log_heads import Heads
from fewlabel.deploy.messages import Introduction, Order, Refused
from fewlabel.deploy.server import serve
from fewlabel.engine.executor import Job
from fewlabel.engine.flower_messages import RECORD
from fewlabel.engine.record import read_rounds
from fewlabel.experiment import dumps
from fewlabel.learn.relation import Relation
from fewlabel.methods import cbafed, fedirm, proxyfl
from tests.deploy.federated import experiment, federate, local_grid, reply_with, split
from tests.deploy.test_log_heads import parties as parties  # a fixture
from tests.deploy.test_log_heads import reply as logged

LIAR = 1


def played(whole, tmp_path, task, lie, **plan):
    """The lines of a run in which client 1 changes its uploads of a task."""
    data = split(whole, tmp_path / "sites")

    def meddle(job: Job, reply: Message) -> Message:
        if (job.client, job.task) != (LIAR, task) or "upload" not in reply.content[RECORD]:
            return reply
        return lie(reply)

    serve(local_grid(data, tmp_path / "state", meddle=meddle), federate(whole, data, tmp_path / "run", **plan))
    return read_rounds(tmp_path / "run")


def upload_of(reply, kind):
    return wire.unpack(kind, reply.content[RECORD]["upload"])


def with_upload(reply, upload):
    return reply_with(reply, upload=wire.pack(upload))


EVERYONE = ("labels.at=every-client", "labels.fraction=0.5")


def without_statistics(reply):
    model = upload_of(reply, Model).model
    return with_upload(reply, Model({n: v for n, v in model.items() if "running" not in n and "num_b" not in n}))


def counts_of_another_type(reply):
    found = upload_of(reply, cbafed.Update)
    return with_upload(reply, replace(found, counts=found.counts.double()))


def whole_numbers(reply):
    found = upload_of(reply, proxyfl.Update)
    return with_upload(reply, replace(found, projections={n: v.long() for n, v in found.projections.items()}))


def a_relation(reply):
    found = upload_of(reply, fedirm.State)
    classes = 10
    rows = torch.zeros(classes, classes)
    rows[:, 0] = 1.0
    return with_upload(reply, replace(found, relation=Relation(rows, torch.ones(classes, dtype=torch.bool))))


LIES = {
    "without BatchNorm's statistics": (
        ("method=fedavg", *EVERYONE),
        "local_update",
        without_statistics,
        "running_mean",
    ),
    "counts that are no whole numbers": (
        ("method=cbafed", "method.warmup_epochs=1", *EVERYONE),
        "local_update",
        counts_of_another_type,
        "counts",
    ),
    "projections in whole numbers": (("method=proxyfl", *EVERYONE), "local_update", whole_numbers, "project"),
    "a relation without labels": (("method=fedirm", "labels.clients=1"), "local_update", a_relation, "relation"),
}


@pytest.mark.parametrize("name", LIES)
def test_an_upload_that_would_end_the_run_is_refused_by_name(name, tmp_path):
    settings, task, lie, word = LIES[name]
    found = played(experiment(*settings, "rounds=2"), tmp_path, task, lie)
    for line in found:
        assert [one["client"] for one in line["failures"]] == [LIAR]
        assert word in line["failures"][0]["why"]


# A member's words


def test_a_log_line_that_is_nested_or_huge_ends_no_run(parties):
    federation, place = parties
    said: list[str] = []
    heads = Heads(federation, said.append)
    for line in ("[" * 200_000, '{"number": ' + "9" * 4000 + "}", "x" * 10**6):
        heads.take(70, logged(place) | {"log": line})
    assert said == ["a reply of client 0 'north' came without a signed line of the site's log"] * 3


def test_a_file_of_heads_outlives_a_power_cut(parties):
    federation, place = parties
    Heads(federation).take(70, logged(place))
    file = federation / log_heads.FILE
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:40])
    heads = Heads(federation)
    heads.take(70, logged(place))
    assert [kept.number for kept in log_heads.read(file)] == [2, 4]
    assert [kept.fault for kept in log_heads.read(file)] == ["", ""]


def test_cbafeds_counts_of_a_false_size_count_as_little_as_its_model(tmp_path):
    """It claims 100,000,000 images and that all are of class 0. All counts together stay near the true ones."""
    whole = experiment("method=cbafed", "method.warmup_epochs=1", "clients.largest_share=0.4", "rounds=2", *EVERYONE)
    data = split(whole, tmp_path / "sites")
    size = 10**8

    def lie(job: Job, reply: Message) -> Message:
        if job.kind == "info" and (found := upload_of(reply, Introduction)).info.id == LIAR:
            return with_upload(reply, replace(found, info=ClientInfo(LIAR, size, 0)))
        if (job.client, job.task) == (LIAR, "local_update"):
            counts = torch.zeros(10, dtype=torch.int64)
            counts[0] = size
            return with_upload(reply, replace(upload_of(reply, cbafed.Update), used=size, counts=counts))
        return reply

    serve(local_grid(data, tmp_path / "state", meddle=lie), federate(whole, data, tmp_path / "run"))
    for line in read_rounds(tmp_path / "run"):
        assert line["replies"] == 4
        assert sum(line["class_counts"]) < 10_000


def test_who_claims_more_test_images_decides_no_more_of_the_result_than_its_share():
    """Two of 100 images with accuracy 0.2, and one that claims 100,000,000 with 1: of 2 + 2 + x, x is 0.4 at most."""

    def told(images: int, accuracy: float) -> coarse.Answer:
        return coarse.Answer(
            50, images, torch.tensor([images, 0]), accuracy, torch.tensor([accuracy, 0.0]).double(), None
        )

    answers = [told(100, 0.2), told(100, 0.2), told(10**8, 1.0)]
    assert coarse.pooled(answers)["accuracy"] > 0.99
    found = coarse.pooled(answers, largest_share=0.4)
    assert found["accuracy"] == pytest.approx(0.6 * 0.2 + 0.4 * 1.0)
    assert found["recall_per_class"][0] == pytest.approx(0.52)
    with pytest.raises(BadInput):
        coarse.check(told(10**9, 1.0), 2)


# A coordinator's words and weights


MISLEADING = {
    "a cleared screen": 'method = "fedavg"\n[model]\nname = "timm:a\\u001b[2J"\n',
    "another line": 'method = "fedavg"\n[model]\nname = "timm:a\\n  training  none"\n',
    "a key": 'method = "fedavg"\n[data.columns]\n"a\\u0007" = "b"\n',
    "a million threads": 'method = "fedavg"\nthreads = 1000000\n',
}


@pytest.mark.parametrize("name", MISLEADING)
def test_an_experiment_that_misleads_who_approves_it_or_exhausts_a_machine_is_refused(name):
    with pytest.raises(BadInput, match=r"would mislead|a site starts"):
        site.trusted(MISLEADING[name], [])


def test_a_refused_task_cannot_write_lines_at_a_sites_terminal(tmp_path, capsys):
    whole = experiment("method=fedavg", "labels.at=every-client")
    data = split(whole, tmp_path / "sites")
    grid = local_grid(data, tmp_path / "state")
    job = Job("a" * 32, "client", "x\nfewlabel: joined\x1b[2J", client=0, round=1)
    order = wire.pack(Order(dumps(whole), site.load_terms(data), job))
    made = site.reply(grid.configs[7000], {"order": order, "message": b""})
    assert "has no task" in made["refused"]
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "\x1b" not in shown


def test_statistics_that_came_with_weights_are_part_of_their_hash_and_are_numbers():
    """So sites that compare hashes notice if one of them got other statistics."""
    weights = wire.pack(Model({"w": torch.ones(2)}))
    found = [
        received.received(Model, weights, wire.pack(Model({"1.running_mean": torch.full((2,), value)}))).sha256
        for value in (0.0, 1.0, 1.0)
    ]
    assert found[0] != found[1] == found[2]
    assert received.received(Model, weights).sha256 not in found
    with pytest.raises(Refused, match="finite"):
        received.received(Model, weights, wire.pack(Model({"1.running_mean": torch.full((2,), torch.nan)})))


# Files


def test_the_secret_behind_coarse_answers_is_never_empty(tmp_path):
    """A power cut may leave the file empty, and then anyone could compute how answers are rounded."""
    (tmp_path / evaluation.SECRET).write_bytes(b"")
    first = evaluation.chance(tmp_path, b"weights")("accuracy")
    kept = (tmp_path / evaluation.SECRET).read_bytes()
    assert len(kept) == 32
    assert (tmp_path / evaluation.SECRET).stat().st_mode & 0o777 == 0o600
    assert evaluation.chance(tmp_path, b"weights")("accuracy") == first
    assert (tmp_path / evaluation.SECRET).read_bytes() == kept


def test_a_policy_that_is_named_must_be_there(tmp_path):
    place = site_folder.SiteConfig(0, "images", str(tmp_path), policy=str(tmp_path / "polcy.toml"))
    with pytest.raises(BadInput, match="there is no such file"):
        site_folder.completed(tmp_path, site_folder.SiteFile("north", "trust", "key", place))


def test_of_the_coordinators_folder_a_site_keeps_nothing_but_three_files(tmp_path):
    federation, given = tmp_path / "federation", tmp_path / "given"
    members.create(federation, members.Federation("demo", "127.0.0.1:9443", "0.2.0"), {})
    given.mkdir()
    for part in (federation / members.TRUST).iterdir():
        (given / part.name).write_bytes(part.read_bytes())
    (tmp_path / "elsewhere").mkdir()
    os.symlink(tmp_path / "elsewhere", given / "linked")
    config = site_folder.SiteConfig(0, "images", str(tmp_path / "site" / "state"))
    site_folder.create(tmp_path / "site", "north", given, config)
    there = {path.name for path in (tmp_path / "site" / members.TRUST).iterdir()}
    assert there == {f"{keys.CA}.pem", members.ABOUT, members.TERMS}


def test_json_of_a_coordinator_that_is_nested_deeply_is_refused(tmp_path):
    (tmp_path / "terms.json").write_text("[" * 200_000)
    with pytest.raises(StorageError, match="cannot be read"):
        site.load_terms(tmp_path)
    assert site_log.entry_of(b"[" * 10_000) is None
