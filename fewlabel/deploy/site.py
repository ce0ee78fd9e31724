"""A site: what it does with an order of the server, on its own data, and what it refuses.

Nothing here knows how messages travel. A site runs tasks of methods that are installed at the site, on data that the
site names itself. It trusts nothing that a server sends before it has checked it. All that comes and leaves goes into
its log (`site_log`), and what cannot be written there does not leave.

If the experiment masks sums, a task whose upload holds weights is `hidden`, and `masked_site` plays the sum.

Beside a method's tasks a site answers four orders of the framework: `info`, with an `Introduction`; `pixels`, with sums
for the mean and std of all sites; `statistics`, with BatchNorm's; and `evaluate`, with coarse shares over images that
the site keeps to test on (`evaluation`). Those are in `test/` beside `train/` in a folder, have the split `test` in a
table, or are `test_images` in an npz. What a site lets run at all is its `policy`; what it ran is in `experiments`.
"""

import hashlib
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fewlabel.core import coarse, schedule, schema, tree, wire
from fewlabel.core.errors import BadInput, Spent, printable
from fewlabel.core.federation import ClientInfo, Model
from fewlabel.core.rng import Rng, preserved
from fewlabel.core.tasks import tasks, weights_sent
from fewlabel.data import datasets
from fewlabel.data.added import overlaid, with_labels
from fewlabel.data.images import Images
from fewlabel.data.own.listing import guess_kind
from fewlabel.data.partition import Holding, Partition, nothing
from fewlabel.data.site_files import Pixels, Terms
from fewlabel.deploy import (
    evaluation,
    experiments,
    masked_site,
    policy,
    received,
    site_labels,
    site_log,
    site_terms,
    workload,
)
from fewlabel.deploy.consent import consented
from fewlabel.deploy.messages import MAX_ORDER, MAX_WANTED, Introduction, Order, Refused
from fewlabel.deploy.site_folder import SiteConfig
from fewlabel.deploy.site_process import Parts, attempt
from fewlabel.deploy.site_terms import load_terms as load_terms
from fewlabel.deploy.site_terms import read_json as read_json
from fewlabel.engine.ledger import Ledger
from fewlabel.engine.run import versions
from fewlabel.engine.worker import Worker
from fewlabel.engine.world import World, normalised
from fewlabel.experiment import Experiment, read

MOST_THREADS = 256  # that an experiment may ask for
FRAMEWORK = {"pixels": "", "statistics": "", "evaluate": "test"}  # kinds of jobs that are no method's, and their task


# Replies


def reply(config: Mapping[str, Any], parts: Mapping[str, Any]) -> Parts:
    """Return a site's reply to a message: an `upload`, nothing, or why there is none: `refused`, `failed`.

    Both are in the site's log before the reply leaves. A site with a key adds the `log`'s line about the reply, signed.
    """

    def logged() -> Parts:
        site = schema.read(SiteConfig, config)
        given = [part for name in ("order", "message", "statistics") if isinstance(part := parts.get(name), bytes)]
        about = subject(given[0] if given else b"")
        site_log.note(Path(site.state), "in", given, *about, key=site.key)
        made = attempt(lambda: answer(site, parts))
        left = [part if isinstance(part, bytes) else part.encode() for part in made.values()]
        line = site_log.note(Path(site.state), "out", left, *about, key=site.key)
        return made | ({"log": line.text()} if site.key else {})

    return attempt(logged)


def subject(order: bytes) -> tuple[str, int, str]:
    """Return the run, the round and the task of an order for the log, whether or not it will be carried out."""
    try:
        job = wire.unpack(Order, order, max_bytes=MAX_ORDER).job
    except wire.WireError:
        return "", 0, "unreadable"
    return job.run, job.round, job.task if job.kind in ("client", "hidden") else job.kind


def answer(site: SiteConfig, parts: Mapping[str, Any]) -> Parts:
    """Carry out an order, or say why it is refused."""
    order, message, statistics = parts.get("order"), parts.get("message"), parts.get("statistics")
    try:
        if not isinstance(order, bytes) or not isinstance(message, bytes) or not isinstance(statistics, bytes | None):
            raise Refused("the message lacks an order, or is not bytes")
        known, experiment = checked(site, order)
        upload = carry_out(site, known, experiment, message, statistics)
    except Refused as error:
        what = subject(order if isinstance(order, bytes) else b"")[2]
        print(f"fewlabel: refused {printable(what, 100)}: {printable(str(error), 1000)}", file=sys.stderr, flush=True)
        return {"refused": str(error)} | ({"spent": "yes"} if isinstance(error.__cause__, Spent) else {})
    spent = experiments.epsilon(Path(site.state), known.job.run)
    return ({} if upload is None else {"upload": upload}) | ({"epsilon": f"{spent:.6g}"} if spent else {})


def carry_out(
    site: SiteConfig, order: Order, experiment: Experiment, message: bytes, statistics: bytes | None
) -> bytes | None:
    """Do what a checked order asks. Return the bytes that leave the site, or None if there are none."""
    limits, state = policy.load(site.policy), Path(site.state)
    if order.job.kind in masked_site.STEPS:  # they need no images
        made = masked_site.step(site, order, message, state / order.job.run, limits)
        experiments.note_sent(state, order, len(made))
        return made
    if order.job.kind != "info":
        site_labels.keep(site, order.job.run)
        site_labels.note_wanted(site, order.wanted)
    world = site_world(site, experiment, order.terms, order.job.run)
    share = world.partition.shares[site.client]
    policy.check(limits, experiment, len(share.labeled))
    if order.job.kind == "info":
        info = ClientInfo(site.client, len(share.labeled), len(share.unlabeled))
        return wire.pack(Introduction(info, versions(), testable(world, limits.evaluate.least)))
    site_terms.pin(site.terms, state, order.terms)
    weights = ""
    if order.job.kind == "pixels":
        found: bytes | None = wire.pack(Pixels.of(world.dataset.splits["train"].images.pixels.numpy()))
    elif order.job.kind == "evaluate":
        found, weights = measured(site, order, experiment, message, world, limits), evaluation.digest(message)
    else:
        found = worked(site, order, world, message, statistics, limits)
    spent = Ledger(state / order.job.run).epsilon(site.client, experiment.privacy.delta) if experiment.privacy else 0.0
    experiments.note_sent(state, order, len(found or b""), weights, spent)
    return found


def worked(
    site: SiteConfig, order: Order, world: World, message: bytes, statistics: bytes | None, limits: policy.Policy
) -> bytes | None:
    """Do a method's task, or compute statistics. Return the bytes that leave the site, or None if there are none."""
    directory = Path(site.state) / order.job.run
    directory.mkdir(parents=True, exist_ok=True)
    # Nothing is measured or shown at a site: its worker does not watch, whatever `score` and `evaluated` say.
    job = replace(order.job, run=str(directory), score=False, evaluated=False)
    worker, known = Worker(directory, world), tasks(type(world.experiment.method))
    sent = received.received(known[job.task].message if job.task else Model, message, statistics)
    first = tree.norm(tree.parameters(tree.of(worker.model)))  # of the network before any training
    if odd := received.oddity(sent, max(first, workload.last_norm(directory, job))):
        print(f"fewlabel: round {job.round}, {printable(job.task, 100)}: {odd}", file=sys.stderr, flush=True)
    if once := bool(job.task) and known[job.task].once:
        sent = replace(sent, sha256=hashlib.sha256(message + (statistics or b"")).hexdigest())
    left = workload.begin(directory, job, limits.most_epochs, sent, once)
    with at_work(world.experiment), schedule.limited(limits.largest_rate, left):
        outcome = worker.do(job, message, statistics)
    workload.finish(directory, job, outcome.outside.get("passes", 0))
    policy.check_steps(limits, outcome.outside.get("steps", 0))
    if order.job.kind != "hidden" or outcome.payload is None:
        return outcome.payload
    clip = world.experiment.clients.clip
    return masked_site.hide(order, known[job.task], message, statistics, outcome.payload, directory, clip)


def measured(
    site: SiteConfig, order: Order, experiment: Experiment, message: bytes, world: World, limits: policy.Policy
) -> bytes:
    """Measure a model on the site's test images, as often and as finely as it may be told."""
    state, job, least = Path(site.state), order.job, limits.evaluate.least
    if not testable(world, least):
        raise Refused(f"this site has fewer than {least} images to test on")

    def measure() -> bytes:
        directory = state / job.run
        directory.mkdir(parents=True, exist_ok=True)
        with at_work(experiment):
            model = wire.unpack(Model, message, finite=True).model
            scores, y = Worker(directory, world).scores(job, model, Rng(experiment.seed, "evaluate"))
        return wire.pack(coarse.answer(scores, y, least, evaluation.chance(state, message)))

    return evaluation.answered(state, job, experiment, message, limits.evaluate, measure)


@contextmanager
def at_work(experiment: Experiment) -> Iterator[None]:
    """Compute with the experiment's threads. What a message gets wrong is refused."""
    threads = torch.get_num_threads()
    try:
        with preserved():
            torch.set_num_threads(experiment.threads)
            yield
    except (wire.WireError, BadInput) as error:
        raise Refused(str(error)) from error
    finally:
        torch.set_num_threads(threads)


# What a site does not do


def checked(site: SiteConfig, data: bytes) -> tuple[Order, Experiment]:
    """Return an order that this site may carry out, and its experiment."""
    try:
        order = wire.unpack(Order, data, max_bytes=MAX_ORDER)
        experiment = trusted(order.experiment, [name.strip() for name in site.modules.split(",") if name.strip()])
    except (wire.WireError, BadInput) as error:
        raise Refused(str(error)) from None
    job = order.job
    if not re.fullmatch(r"[0-9a-f]{32}", job.run):  # it becomes the name of a directory
        raise Refused("the run has no proper name")
    if not consented(site.methods, experiment):
        raise Refused(f"this site takes part in {site.methods}, and {experiment.name} sends something else")
    if not 0 <= order.wanted <= MAX_WANTED:
        raise Refused(f"nobody adds {order.wanted} labels")
    if experiment.clients.attack is not None:
        raise Refused("clients.attack is for simulations, and this site trains honestly")
    site_terms.check_terms(site.terms, Path(site.state), order.terms)
    if site.client >= experiment.clients.count:
        raise Refused(f"this is client {site.client}, and clients.count = {experiment.clients.count}")
    limits = policy.load(site.policy)
    experiment = policy.protected(limits, experiment)
    policy.check(limits, experiment)
    experiments.admit(Path(site.state), order, limits)
    if job.kind == "info":
        return order, experiment
    if job.client != site.client:
        raise Refused(f"this is client {site.client}, not client {job.client}")
    if job.kind not in ("client", "hidden", *masked_site.STEPS, *FRAMEWORK):
        raise Refused(f"a client does no '{job.kind}'")
    if job.kind in FRAMEWORK and job.task != FRAMEWORK[job.kind]:
        raise Refused(f"a client does no '{job.kind}' of '{job.task}'")
    known = site_terms.own_terms(site.terms, Path(site.state), order.terms).mean is not None
    if order.terms.mean is None and job.kind != "pixels":
        raise Refused("the terms have no mean and no std yet")
    if job.kind == "pixels" and (known or order.terms.mean is not None):
        raise Refused("mean and std are known")
    if job.kind == "pixels" and experiment.privacy is not None:
        raise Refused("exact sums of pixels are not private; have the federation fix mean and std in its terms")
    if job.kind == "statistics" and (experiment.stream is not None or experiment.model.buffers != "recomputed"):
        raise Refused("statistics are those of all images at once, where model.buffers = recomputed")
    for_clients = {name: task for name, task in tasks(type(experiment.method)).items() if "client" in task.places}
    if job.kind not in FRAMEWORK and job.task not in for_clients:
        raise Refused(f"{experiment.name} has no task '{job.task}' for clients; it has {', '.join(for_clients)}")
    if job.kind not in FRAMEWORK:
        masks = experiment.clients.sums == "masked" and weights_sent(for_clients[job.task]) is not None
        if masks != (job.kind != "client"):
            how = "leave only in masked sums" if masks else "are not masked"
            raise Refused(f"the weights of '{job.task}' {how}, and clients.sums = '{experiment.clients.sums}'")
    if not 0 <= job.round <= experiment.rounds or job.call < 0 or job.checkpointed < 0:
        raise Refused(f"there is no call {job.call} in round {job.round} of {experiment.rounds}")
    return order, experiment


def trusted(text: str, modules: list[str]) -> Experiment:
    """Read an experiment. Refuse one that names code, unless it is FewLabel's or in a module that this site trusts."""
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise BadInput(f"the experiment is not TOML: {error}") from None
    if not all(map(str.isprintable, texts_in(table))):
        raise BadInput("a text in the experiment has characters that would mislead whoever reads it")
    for part in ("method", "model", "data"):
        given = table.get(part)
        name = given.get("name") if isinstance(given, Mapping) else given
        if not isinstance(name, str | None):
            raise BadInput(f"the name of the {part} is no text")
        trusts = [*modules, "timm"] if part == "model" else modules  # FewLabel builds timm's networks itself
        if name and ":" in name and name.partition(":")[0] not in trusts:
            raise BadInput(f"{part} '{name}' is not FewLabel's, and this site trusts no module of that name")
    if isinstance(labels := table.get("labels"), Mapping) and labels.keys() & {"file", "sha256"}:
        raise BadInput("labels.file is for simulations: a site adds its own labels, and opens no file that others name")
    whole = read(table)
    if whole.threads > MOST_THREADS:
        raise BadInput(f"threads = {whole.threads}, and a site starts {MOST_THREADS} at most")
    return whole


def texts_in(value: Any) -> Iterator[str]:
    """Yield all texts in a table, with its keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from value
        for part in value.values():
            yield from texts_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from texts_in(part)


# Images


def site_world(site: SiteConfig, experiment: Experiment, terms: Terms, run: str = "") -> World:
    """Return the world as a site knows it: its own images, with the labels that a run uses, and nobody else's."""
    table = site_labels.table_for(site, run)
    splits, notes = images(Path(site.data), site.kind, experiment, terms, site.unreadable, table is not None)
    labels = splits["train"].labels.numpy()
    own = Holding(np.flatnonzero(labels >= 0), np.flatnonzero(labels < 0))
    if table is not None:
        added = site_labels.added_to(splits["train"], site, terms, table)
        own, notes = with_labels(own, added.images), (*notes, *added.notes)
        whole = torch.from_numpy(overlaid(labels, np.stack([added.images, added.labels])))
        splits = {**splits, "train": replace(splits["train"], labels=whole)}
    others = (Holding(nothing(), nothing()),) * site.client
    found = world(experiment, terms, splits, Partition((*others, own), nothing()))
    return replace(found, dataset=replace(found.dataset, notes=notes))


def testable(world: World, least: int) -> int:
    """Return how many images a site tests on, in whole multiples of `least`, as it may be told. 0 is too few."""
    split = world.dataset.splits.get("test")
    return 0 if split is None else coarse.rounded(len(split), least)


def images(
    path: Path, kind: str, experiment: Experiment, terms: Terms, unreadable: str = "fatal", named: bool = False
) -> tuple[dict[str, datasets.Split], tuple[str, ...]]:
    """Read images from this machine as the federation's terms say. Return them, and what to know about them."""
    found = datasets.load(
        kind or guess_kind(path),
        terms.image_size,
        channels=terms.channels,
        path=str(path),
        classes=terms.classes,
        scale=terms.scale,
        unreadable=unreadable,
        named=named,
    )
    splits = {
        name: replace(split, images=viewed(split.images.pixels, experiment, terms))
        for name, split in found.splits.items()
    }
    return splits, found.notes


def viewed(pixels: torch.Tensor, experiment: Experiment, terms: Terms) -> Images:
    """Return images as all sites see them. While mean and std are open, nobody looks at them."""
    images = Images(pixels, terms.mean or (), terms.std or (), experiment.views.weak, experiment.views.strong)
    return normalised(experiment, images)


def world(
    experiment: Experiment,
    terms: Terms,
    splits: dict[str, datasets.Split],
    partition: Partition,
    tested: tuple[int, ...] = (),
) -> World:
    dataset = datasets.Dataset("", "", terms.classes, terms.channels, terms.image_size, splits, terms.scale)
    return World(experiment, dataset, partition, tested)
