"""Methods over Flower give the simulator's bits, and whatever a site or a server does wrong is refused by name."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import ConfigRecord, Message, RecordDict

from fewlabel.core import tree, wire
from fewlabel.core.errors import RunFailed
from fewlabel.core.federation import Model, TooFewReplies, train
from fewlabel.core.rng import Rng
from fewlabel.core.tasks import tasks
from fewlabel.data import partition
from fewlabel.deploy import flower, keys, members, site
from fewlabel.deploy.flower import client_app
from fewlabel.deploy.messages import Introduction, Order
from fewlabel.deploy.nodes import Absent
from fewlabel.deploy.server import serve
from fewlabel.engine.executor import Job
from fewlabel.engine.flower_messages import RECORD
from fewlabel.engine.record import read_rounds
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import prepare
from fewlabel.engine.world import World, dataset_of
from fewlabel.experiment import Experiment, dumps
from fewlabel.methods import fedavg as fedavg_module
from fewlabel.report.comparison import Comparison
from fewlabel.report.results import Result
from fewlabel.report.runs import Row
from tests.deploy.federated import (
    experiment,
    federate,
    lines,
    local_grid,
    reply_with,
    simulated,
    split,
    weights,
)
from tests.flower_processes import Processes
from tests.methods import test_conformance
from tests.nets import tiny

CASES = {
    "rscfed": ["method=rscfed", "clients.dropout=0.2"],
    "isofed": ["method=isofed"],
    "fed-consist": ["method=fed-consist"],
    "labels-only": ["method=labels-only", "labels.clients=2"],
    "fedmatch": ["method=fedmatch", "labels.at=every-client", "labels.per_class=4"],
    "fedmatch-server": ["method=fedmatch", "labels.at=server", "labels.per_class=4"],
    "stream": ["method=fedmatch", "labels.at=server", "labels.per_class=4", "stream.steps=2", "stream.rounds=1"],
    "held-out": ["method=tests.keeper:Keeper", "labels.clients=2", "labels.held_out=0.3", "labels.noise=0.2"],
    "held-out-server": [
        *("method=fedavg", "labels.at=every-client+server", "labels.per_class=8", "labels.held_out=0.3"),
        *("stream.data=all", "stream.steps=2", "stream.rounds=1"),
    ],
    "local": ["method=rscfed", "model.buffers=local"],
    "recomputed": ["method=fedavg", "model.buffers=recomputed", "labels.noise=0.2", "labels.validation=0.1"],
}


@pytest.mark.parametrize("name", CASES)
def test_methods_over_flower_give_the_bits_of_the_simulator(name, tmp_path):
    changes = CASES[name] if name != "recomputed" else [*CASES[name], "data.split=80-20"]
    whole = experiment(*changes)
    data = split(whole, tmp_path / "sites", "folder" if name == "rscfed" else "npz")
    serve(local_grid(data, tmp_path / "state"), federate(whole, data, tmp_path / "flower"))
    simulated(whole, tmp_path / "simulated")
    assert weights(tmp_path / "flower") == weights(tmp_path / "simulated")
    assert lines(tmp_path / "flower") == lines(tmp_path / "simulated")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "setting"), test_conformance.CASES)
def test_every_method_over_flower_gives_the_bits_of_the_simulator_in_every_setting(method, setting, tmp_path):
    whole = test_conformance.experiment(method, setting)
    whole = replace(whole, evaluate=replace(whole.evaluate, local=False))  # of which a server knows nothing
    data = split(whole, tmp_path / "sites")
    serve(local_grid(data, tmp_path / "state"), federate(whole, data, tmp_path / "flower"))
    simulated(whole, tmp_path / "simulated")
    assert lines(tmp_path / "flower") == lines(tmp_path / "simulated")
    if (tmp_path / "simulated" / "model.safetensors").exists():
        assert weights(tmp_path / "flower") == weights(tmp_path / "simulated")


REAL = {
    "rscfed": ["method=rscfed", "method.groups=2", "method.group_size=2"],
    "isofed": ["method=isofed"],
    "labels-only": ["method=labels-only"],
    "fedmatch": ["method=fedmatch", "labels.at=every-client", "labels.per_class=8"],
    "fedmatch-server": ["method=fedmatch", "labels.at=server", "labels.per_class=8"],
}
SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.slow
def test_a_real_federation_with_tls_and_keys_gives_the_bits_of_the_simulator(tmp_path, monkeypatch):
    """One federation, five runs: of PneumoniaMNIST where it is at hand, one site with labels and three without."""
    there = SHARED.exists()
    if there:
        monkeypatch.setenv("FEWLABEL_DATA", str(SHARED))
    name = f"data.name={'pneumoniamnist' if there else 'digits'}"
    whole = {run: experiment(name, *changes) for run, changes in REAL.items()}
    data = {run: split(whole[run], tmp_path / f"sites-{run}") for run in whole}
    # Each run deals the images in its own way, so what a site has is put in its place before the run.
    places = [tmp_path / f"client-{number}.npz" for number in range(4)]
    more = {"modules": "tests.nets", "state": str(tmp_path / "state")}
    configs = [{"client": number, "data": str(place), **more} for number, place in enumerate(places)]
    with Processes(tmp_path / "processes", configs) as processes:
        for run in whole:
            for place in places:
                shutil.copy(data[run] / place.name, place)
            told = processes.run(federate(whole[run], data[run], tmp_path / run, patience=300.0, deadline=300.0))
            assert (tmp_path / run / "model.safetensors").exists(), told
            print(f"{run}: {[line['seconds'] for line in read_rounds(tmp_path / run)]} s")
    for run in whole:
        simulated(whole[run], tmp_path / f"simulated-{run}")
        assert lines(tmp_path / run) == lines(tmp_path / f"simulated-{run}"), run
        assert weights(tmp_path / run) == weights(tmp_path / f"simulated-{run}"), run


def test_what_flower_starts_for_each_message_loads_no_pytorch():
    code = "import sys, fewlabel.deploy.flower; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


# What a site sends


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory) -> tuple[Experiment, Path]:
    """FedAvg with labels at every client, and its sites."""
    whole = experiment("method=fedavg", "labels.at=every-client", "labels.fraction=0.5")
    return whole, split(whole, tmp_path_factory.mktemp("data") / "sites")


def changed(change: Callable[[dict], dict]) -> Callable[[Message], Message]:
    def apply(reply: Message) -> Message:
        upload = wire.unpack(Model, reply.content[RECORD]["upload"])
        return reply_with(reply, upload=wire.pack(Model(change(upload.model))))

    return apply


def first(model: dict, value: torch.Tensor) -> dict:
    return model | {next(iter(model)): value}


WRONG = {
    "NaN": (
        changed(lambda m: first(m, next(iter(m.values())) * torch.nan)),
        "expected finite values, found NaN or Inf",
    ),
    "shape": (changed(lambda m: first(m, torch.zeros(3))), r"expected torch.float32 \[4, 1, 3, 3\], found .* \[3\]"),
    "missing": (changed(lambda m: dict(list(m.items())[1:])), "found no such entry"),
    "oversized": (lambda reply: reply_with(reply, upload=bytes(3_000_000)), "it has 3000000 bytes, more than"),
    "mangled": (lambda reply: reply_with(reply, upload=b"\xff" * 100), "the buffer is cut short"),
    "no bytes": (lambda reply: reply_with(reply, upload="text"), "it is not bytes"),
    "other record": (lambda reply: setattr(reply, "content", RecordDict()) or reply, "not one of fewlabel's"),
    "refusal": (lambda reply: reply_with(reply, refused="no\x1b[31m\n" * 200), r"it refused: no\?\[31m no\?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_upload_is_refused_by_name_and_the_round_goes_on(name, fedavg, tmp_path):
    (whole, data), (spoil, why) = fedavg, WRONG[name]

    def meddle(job, reply):
        return spoil(reply) if (job.client, job.round) == (2, 2) else reply

    serve(local_grid(data, tmp_path / "state", meddle=meddle), federate(whole, data, tmp_path / "run"))
    told = [line.get("failures") for line in read_rounds(tmp_path / "run")]
    assert told[0] is None
    assert told[2] is None
    ((client, task, found),) = (failure.values() for failure in told[1])
    assert (client, task) == (2, "local_update")
    assert re.search(why, found)
    assert len(found) < 500
    assert [line["replies"] for line in read_rounds(tmp_path / "run")] == [4, 3, 4]


def test_a_site_that_always_fails_is_to_the_method_one_that_is_absent(fedavg, tmp_path):
    whole, data = fedavg
    lost = local_grid(data, tmp_path / "state", meddle=lambda job, reply: None if job.client == 1 else reply)
    serve(lost, federate(whole, data, tmp_path / "run", deadline=0.3))
    fed = Server(prepare(whole, tmp_path / "simulated"), absent={1})
    *_, (_, state) = train(fed.method, fed, fed.method.init(fed))
    with safe_open(tmp_path / "run" / "model.safetensors", "pt") as file:
        assert all(torch.equal(file.get_tensor(name), value) for name, value in state.model.items())
    silent = {"client": 1, "task": "local_update", "why": "it was silent for 0.3 s"}
    assert silent in read_rounds(tmp_path / "run")[0]["failures"]


def test_too_few_replies_end_the_run_after_a_checkpoint_and_it_resumes_to_the_bits_of_one_undisturbed(fedavg, tmp_path):
    whole, data = fedavg
    strict = replace(whole, clients=replace(whole.clients, min_replies=4))
    run = federate(strict, data, tmp_path / "run")

    def meddle(job, reply):
        return reply_with(reply, failed="OSError") if (job.client, job.round) == (0, 3) else reply

    with pytest.raises(TooFewReplies, match=r"round 3 had 3 replies to 'local_update' and needs 4"):
        serve(local_grid(data, tmp_path / "state", meddle=meddle), run)
    assert [path.name[:12] for path in (run / "checkpoint").glob("round-*")] == ["round-000002"]
    serve(local_grid(data, tmp_path / "state"), run)
    assert weights(run) == weights(simulated(strict, tmp_path / "simulated"))
    assert lines(run) == lines(tmp_path / "simulated")


LABELS = {
    "some": (["method=fed-consist", "labels.clients=2"], {0, 1}, "with labels "),
    "phases": (["method=isofed", "labels.clients=2"], {0, 1}, "with labels "),
    "server": (["method=fedmatch", "labels.at=server", "labels.per_class=4"], {0, 1, 2, 3}, ""),
}


@pytest.mark.parametrize("where", LABELS)
def test_a_round_without_any_site_that_has_labels_ends_the_run_and_it_resumes(where, tmp_path):
    """While one of them replies it goes on; where none has labels, while any does."""
    changes, needed, who = LABELS[where]
    whole = experiment(*changes)
    data = split(whole, tmp_path / "sites")
    run = federate(whole, data, tmp_path / "run")
    away = {2: needed - {1}, 3: needed}

    def meddle(job, reply):
        gone = job.kind == "client" and job.client in away.get(job.round, ())
        return reply_with(reply, failed="OSError") if gone else reply

    why = rf"in round 3 the last site {who}was lost \(client 0: its task failed: OSError\); have one join, then resume"
    with pytest.raises(TooFewReplies, match=why):
        serve(local_grid(data, tmp_path / "state", meddle=meddle), run)
    assert [line["replies"] for line in read_rounds(run)] == [4, 5 - len(needed)]
    serve(local_grid(data, tmp_path / "state"), run)
    assert [line["replies"] for line in read_rounds(run)] == [4, 5 - len(needed), 4]


AWAY = {
    "labels of one": (["method=fed-consist", "labels.clients=2", "clients.per_round=2", "rounds=6"], 0),
    "a whole phase": (["method=isofed", "labels.clients=3", "rounds=2"], 3),
    "labels at the server": (
        ["method=fedmatch", "labels.at=server", "labels.per_class=4", "clients.per_round=1", "rounds=6"],
        2,
    ),
}


@pytest.mark.parametrize("name", AWAY)
def test_a_run_goes_on_without_a_site_as_long_as_others_can_do_its_part(name, tmp_path):
    """Also through rounds and phases that ask nobody else, or nobody else with labels."""
    changes, away = AWAY[name]
    whole = experiment(*changes)
    data = split(whole, tmp_path / "sites")

    def meddle(job, reply):
        return reply_with(reply, failed="OSError") if (job.kind, job.client) == ("client", away) else reply

    serve(local_grid(data, tmp_path / "state", meddle=meddle), federate(whole, data, tmp_path / "run"))
    told = read_rounds(tmp_path / "run")
    assert len(told) == whole.rounds
    assert any("failures" in line for line in told)


def test_sites_that_fail_one_after_the_other_end_a_run_that_asks_one_in_a_round(tmp_path):
    changes = ["method=fedmatch", "labels.at=server", "labels.per_class=4", "clients.per_round=1", "rounds=40"]
    whole = experiment(*changes)
    data = split(whole, tmp_path / "sites")
    run = federate(whole, data, tmp_path / "run")
    asked = []

    def meddle(job, reply):
        if job.kind != "client":
            return reply
        asked.append(job.client)
        return reply_with(reply, failed="OSError") if job.round > 1 else reply

    with pytest.raises(TooFewReplies, match=r"the last site was lost \(client 0: its task failed: OSError\)"):
        serve(local_grid(data, tmp_path / "state", meddle=meddle), run)
    assert set(asked[1:]) == {0, 1, 2, 3}
    assert len(set(asked[1:-1])) == 3  # with the last of them, and no sooner


def test_whoever_waits_is_told_which_sites_are_there(fedavg, tmp_path):
    whole, data = fedavg
    here, said = local_grid(data, tmp_path / "state"), []
    here.configs[7003] = here.configs[7003] | {"methods": "fedirm"}
    with pytest.raises(RunFailed, match=r"3 of 4 sites were there after 0\.5 s; a site .* refuses: this site"):
        serve(here, federate(whole, data, tmp_path / "run", patience=0.5), say=said.append)
    assert said == [
        "3 of 4 sites are there; waiting for client 3; a site without a member's key (Flower's node 7003) refuses: "
        "this site takes part in fedirm, and fedavg sends something else"
    ]


def test_what_sites_do_not_tell_is_not_shown_as_nothing(fedavg, tmp_path):
    whole, data = fedavg
    serve(local_grid(data, tmp_path / "state"), federate(whole, data, tmp_path / "run"))
    found, known = Result(tmp_path / "run"), Result(simulated(whole, tmp_path / "simulated"))
    assert "images trained on" not in str(found)
    assert "images trained on" in str(known)
    assert found.spent().keys() == known.spent().keys() - {"images_labeled", "images_unlabeled"}
    assert found.summary.keys() == known.summary.keys() - {"images_labeled", "images_unlabeled"}
    assert "images, thousands" not in str(Comparison([found]))
    assert Row("both", (found, known)).spent.keys() == found.spent().keys()


def test_a_site_may_go_and_come_back_as_another_node(fedavg, tmp_path, monkeypatch):
    monkeypatch.setattr("fewlabel.deploy.nodes.LOOK", 0.0)
    whole, data = fedavg

    def meddle(job, reply):
        if (job.client, job.round) == (0, 1):
            here.gone = here.configs.pop(7003)
        if (job.client, job.round) == (0, 2):
            here.configs[9000] = here.gone
        return reply

    here = local_grid(data, tmp_path / "state", meddle=meddle)
    serve(here, federate(whole, data, tmp_path / "run"))
    told = read_rounds(tmp_path / "run")
    assert [line["replies"] for line in told][2] == 4
    assert told[1]["failures"] == [{"client": 3, "task": "local_update", "why": "it is not connected"}]


# Who is there


def test_two_nodes_of_one_identity_are_refused(fedavg, tmp_path):
    whole, data = fedavg
    twins = local_grid(data, tmp_path / "state")
    twins.configs[8000] = twins.configs[7001]
    with pytest.raises(Absent, match="2 sites say that they are client 1; stop all but one of them"):
        serve(twins, federate(whole, data, tmp_path / "run", patience=0.5))


@pytest.fixture
def four(tmp_path) -> Path:
    """A federation that has enrolled nodes 7000 to 7003 as clients 0 to 3."""
    folder = tmp_path / "federation"
    members.create(folder, members.Federation("four", "127.0.0.1:1", version("fewlabel")), {})
    public = [keys.public_half(keys.new_key(folder / f"key{n}", ssh=True)) for n in range(4)]
    enrolled = (members.Member(n, f"site {n}", public[n], str(n), "2026-01-01", 7000 + n) for n in range(4))
    members.write_members(folder, tuple(enrolled))
    return folder


def test_a_node_is_no_other_client_than_the_one_that_its_key_was_enrolled_for(fedavg, four, tmp_path):
    whole, data = fedavg
    here = local_grid(data, tmp_path / "state")
    here.configs[7001] = here.configs[7003]
    why = r"3 of 4 sites .*; 'site 1' is refused: it claims to be client 3, and its key is that of 'site 1'; start"
    with pytest.raises(RunFailed, match=why):
        serve(here, federate(whole, data, tmp_path / "run", patience=0.5, members=str(four)))


def test_a_stranger_who_claims_to_be_a_client_is_told_nothing_and_disturbs_nobody(fedavg, four, tmp_path):
    whole, data = fedavg
    here = local_grid(data, tmp_path / "state")
    here.configs[8000] = here.configs[7001]
    serve(here, federate(whole, data, tmp_path / "run", members=str(four)))
    assert [line["replies"] for line in read_rounds(tmp_path / "run")] == [4, 4, 4]
    assert {order.job.kind for node, order in here.asked if node == 8000} == {"info"}


def test_a_site_that_was_refused_is_asked_again_and_takes_part_once_it_is_mended(fedavg, tmp_path, monkeypatch):
    monkeypatch.setattr("fewlabel.deploy.nodes.LOOK", 0.0)
    monkeypatch.setattr("fewlabel.deploy.nodes.AGAIN", 0.0)
    whole, data = fedavg

    def meddle(job, reply):
        if job.kind == "info" and reply.content[RECORD].get("failed"):
            here.configs[7002] = good  # for the next time
        return reply

    here = local_grid(data, tmp_path / "state", meddle=meddle)
    good = here.configs[7002]
    here.configs[7002] = good | {"data": "/nothing/here"}
    serve(here, federate(whole, data, tmp_path / "run"))
    assert [line["replies"] for line in read_rounds(tmp_path / "run")] == [4, 4, 4]


def test_a_site_that_cannot_take_part_is_named_and_its_paths_stay_its_own(fedavg, tmp_path, capfd):
    whole, data = fedavg
    here = local_grid(data, tmp_path / "state")
    here.configs[7002] = here.configs[7002] | {"data": "/secret/path"}
    with pytest.raises(
        RunFailed,
        match=r"3 of 4 sites were there after 0.5 s; a site .* is refused: its task",
    ) as told:
        serve(here, federate(whole, data, tmp_path / "run", patience=0.5))
    assert "secret" not in str(told.value)
    assert "there is no file or folder /secret/path" in capfd.readouterr().err


def test_a_site_tells_its_counts_and_versions_and_nothing_else(fedavg, tmp_path):
    whole, data = fedavg
    seen = []

    def meddle(job, reply):
        seen.append((job.kind, job.client, {name: dict(record) for name, record in reply.content.items()}))
        return reply

    serve(local_grid(data, tmp_path / "state", meddle=meddle), federate(whole, data, tmp_path / "run"))
    assert {(kind, *record, *record[RECORD]) for kind, _, record in seen} == {
        ("info", RECORD, "upload"),
        ("client", RECORD, "upload"),
    }
    infos = [wire.unpack(Introduction, record[RECORD]["upload"]) for kind, _, record in seen if kind == "info"]
    shares = partition.of(dataset_of(whole), whole).shares
    assert [(i.info.num_labeled, i.info.num_unlabeled) for i in infos] == [
        (len(share.labeled), len(share.unlabeled)) for share in shares
    ]
    assert {name for i in infos for name in i.versions} == {"python", "fewlabel", "torch", "numpy", "cpu"}


# What a site is asked


def replied(fedavg, tmp_path, **changes) -> dict:
    """What a site replies to an order that is as it should be, but for these changes of the order or its job."""
    whole, data = fedavg
    of_job = {name: changes.pop(name) for name in {field.name for field in fields(Job)} & changes.keys()}
    job = replace(Job("0" * 32, "client", "local_update", client=1, round=1), **of_job)
    with Rng(0).scope():
        message = wire.pack(fedavg_module.Message(tree.of(tiny(1, 10, 16)), 0.1))
    here = local_grid(data, tmp_path / "state")
    packed = changes.pop("packed", None) or wire.pack(
        replace(Order(dumps(whole), site.load_terms(data), job), **changes)
    )
    record = ConfigRecord({"order": packed, "message": message})
    return dict(client_app(Message(RecordDict({RECORD: record}), 7001, "train"), here.context(7001)).content[RECORD])


def asked(fedavg, tmp_path, **changes) -> str:
    found = replied(fedavg, tmp_path, **changes)
    return "carried out" if "upload" in found else str(found["refused"])


@pytest.mark.parametrize("task", ["init", "round", "model", "__init__", "weights", "no_such", "local_update "])
def test_nothing_but_a_task_for_clients_can_be_called(task, fedavg, tmp_path):
    assert asked(fedavg, tmp_path, task=task) == f"fedavg has no task '{task}' for clients; it has local_update"
    assert [path.name for path in (tmp_path / "state").rglob("*") if path.is_file()] == ["audit.jsonl"]


def test_a_task_for_servers_cannot_be_called_at_a_client(tmp_path):
    whole = experiment("method=fedmatch", "labels.at=server", "labels.per_class=4")
    data = split(whole, tmp_path / "sites")
    servers = [name for name, task in tasks(type(whole.method)).items() if task.places == {"server"}]
    for task in servers:
        assert "has no task" in asked((whole, data), tmp_path / task, task=task)
    assert servers


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client": 2}, "this is client 1, not client 2"),
        ({"kind": "server"}, "a client does no 'server'"),
        ({"kind": "evaluate"}, "a client does no 'evaluate'"),
        ({"run": "../../elsewhere"}, "the run has no proper name"),
        ({"round": 99}, "there is no call 0 in round 99 of 3"),
        ({"call": -1}, "there is no call -1"),
        ({"packed": b"\0" * 20}, "Order: "),
        ({"experiment": "]["}, "the experiment is not TOML"),
        ({"experiment": "[method]\nname = 'os:getpid'"}, "method 'os:getpid' is not FewLabel's"),
        ({"experiment": "method = 'os:getpid'"}, "method 'os:getpid' is not FewLabel's"),
        ({"experiment": "model = 'os:getpid'"}, "model 'os:getpid' is not FewLabel's"),
        ({"experiment": "[clients]\ncount = 1"}, "this is client 1, and clients.count = 1"),
    ],
)
def test_a_site_refuses_what_it_should_not_do_and_says_why(changes, said, fedavg, tmp_path):
    assert said in asked(fedavg, tmp_path, **changes)
    assert [path.name for path in (tmp_path / "state").rglob("*") if path.is_file()] == ["audit.jsonl"]


def test_an_order_as_it_should_be_is_carried_out(fedavg, tmp_path):
    assert asked(fedavg, tmp_path) == "carried out"


def test_no_server_can_have_a_site_measure_or_show_anything(fedavg, tmp_path, monkeypatch):
    """By the two words of a job that have the simulator do so, `score` and `evaluated`."""
    sites, make = [], World.site
    monkeypatch.setattr(World, "site", lambda *args, **more: sites.append(make(*args, **more)) or sites[-1])
    plain = replied(fedavg, tmp_path / "plain")
    assert plain.keys() == {"upload"}
    assert replied(fedavg, tmp_path / "watched", score=True, evaluated=True) == plain
    assert [(site.audited, site.scored, site.shown) for site in sites] == [(None, None, None)] * 2


def test_an_error_at_a_site_leaves_it_by_its_name_alone(fedavg, tmp_path, monkeypatch, capfd):
    def broken(*_):
        raise ValueError("/secret/path")

    for owner, name in ((site, "carry_out"), (site, "reply"), (flower, "ask")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken)
            here = local_grid(fedavg[1], tmp_path / "state")
            here.configs[7001] |= {"socket": "there"} if name == "ask" else {}
            order = Order(dumps(fedavg[0]), site.load_terms(fedavg[1]), Job("0" * 32, "info"))
            record = ConfigRecord({"order": wire.pack(order), "message": b""})
            reply = client_app(Message(RecordDict({RECORD: record}), 7001, "query"), here.context(7001))
        assert dict(reply.content[RECORD]) == {"failed": "ValueError; the site's own log says more"}
        assert "/secret/path" in capfd.readouterr().err
