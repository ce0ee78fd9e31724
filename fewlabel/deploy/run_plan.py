"""A run with sites on other machines as it is laid out before it starts: its experiment and its plan."""

import json
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fewlabel.core import schema, storage
from fewlabel.core.errors import BadInput
from fewlabel.core.schema import Count, Positive
from fewlabel.data.site_files import Terms
from fewlabel.deploy.site import read_json
from fewlabel.engine import record
from fewlabel.engine.run import refuse_used
from fewlabel.experiment import Experiment, dumps

FACTOR, AGAIN = 5.0, 4  # of new runs; a plan without them is an older version's and keeps to what that did
SETTLED = "settled"  # folder of a federation with the terms of its first run, if those left mean and std open


@dataclass(frozen=True)
class RunPlan:
    """What a server knows about a run before it has met a site."""

    run: str  # names the run at sites
    terms: Terms
    sites: Count  # that must be there before the first round
    data: str | None = None  # where `server`, `validation` and `test` lie, if the server has them
    patience: Positive = 600.0  # seconds to wait for sites
    deadline: Positive = 3600.0  # seconds that a site has for a task, at most
    factor: Positive | None = None  # times what the task takes that a site has for it; None: always the deadline
    least: Positive = 60.0  # seconds that a site has for a task in any case
    again: Count | None = None  # rounds until a site that was silent twice is asked again; None: it is always asked
    max_upload: Count | None = None  # bytes; by default eight models and 1 MiB
    members: str | None = None  # directory of a federation whose members alone may take part, each as itself
    federation: str | None = None  # directory of the federation that carries the run out
    settled: str | None = None  # file for mean and std, once sites have worked them out: they hold for all later runs


def prepare(experiment: Experiment, directory: Path, terms: Terms, **more: Any) -> Path:
    """Lay out a run whose clients are on other machines. `more` are fields of its plan."""
    if experiment.clients.attack is not None:
        raise BadInput("clients.attack is for simulations, and sites would refuse it; leave it out")
    if experiment.labels.file is not None:
        raise BadInput(
            "labels.file is for simulations; a site adds its own labels by `fewlabel label SITE`; leave it out"
        )
    more = {"sites": experiment.clients.count, "factor": FACTOR, "again": AGAIN} | more
    plan = RunPlan(secrets.token_hex(16), terms, **more)
    schema.check(plan)
    refuse_used(directory, experiment)
    storage.make_folder(directory)
    table = {**vars(plan), "terms": vars(terms)}
    storage.write(directory / record.FEDERATION, json.dumps(table, indent=1).encode())
    storage.write(directory / record.EXPERIMENT, dumps(experiment).encode())
    return directory


def load_plan(directory: Path) -> RunPlan:
    return schema.read(RunPlan, read_json(directory / record.FEDERATION))
