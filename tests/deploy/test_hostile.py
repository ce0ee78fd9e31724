"""What members and coordinators try who know the code: none of it ends a run, gains weight, or misleads people."""

import json
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from flwr.app import Message

from fewlabel.core import wire
from fewlabel.core.federation import Model
from fewlabel.deploy import keys, members
from fewlabel.deploy.log_heads import FILE
from fewlabel.deploy.server import serve
from fewlabel.engine.executor import Job
from fewlabel.engine.flower_messages import RECORD
from fewlabel.engine.record import read_rounds
from fewlabel.learn.relation import Relation
from fewlabel.methods import cbafed, fedirm, proxyfl
from tests.deploy.federated import experiment, federate, local_grid, reply_with, split

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
    "without BatchNorm's statistics": (("method=fedavg", *EVERYONE), "local_update", without_statistics, "running_mean"),
    "counts that are no whole numbers": (("method=cbafed", "method.warmup_epochs=1", *EVERYONE), "local_update", counts_of_another_type, "counts"),
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
