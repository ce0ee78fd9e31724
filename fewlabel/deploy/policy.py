"""A site's own policy, `policy.toml`: what it lets a coordinator run, whatever it has consented to."""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from fewlabel.core import coarse, schema, storage
from fewlabel.core.described import most_passes
from fewlabel.core.errors import BadInput, unknown
from fewlabel.core.schema import Count, Natural, Positive, Share
from fewlabel.deploy.consent import consented
from fewlabel.deploy.messages import Refused
from fewlabel.experiment import Experiment, Privacy, method_named, plain_method
from fewlabel.report.terminal import known

FILE = "policy.toml"
QUARTER = 4  # batches in a pass over few labels, by the recipe
ELSEWHERE = ("server_", "tuning_")  # settings of what the server does

FRESH = """\
# What this site lets a coordinator run. The site reads this file at every order, so a change counts at once.
# Whatever an experiment asks beyond it is refused, and both sides see why. A line that you remove is no limit.

methods = []           # such as ["fedavg", "rscfed"]; [] stands for all that you consented to
networks = []          # such as ["simple-cnn", "resnet18"]; [] stands for all
least_batch = 8        # images in a batch
least_steps = 2        # steps of training before weights leave: after one step, they show the exact gradient
most_epochs = 501      # passes over your images in all tasks of a round; CBAFed's warm-up has 501
largest_rate = 0.1     # learning rate
statistics = false     # exact BatchNorm statistics of your images (model.buffers = "recomputed") may leave
held_out = false       # exact counts over labels that you do not train on (labels.held_out) may leave
masked = false         # true: weights leave only in masked sums (clients.sums = "masked"), so nobody sees yours alone
largest_share = 0.75   # of your weights in a masked sum: with more, the sum would show nearly yours alone
most_rounds = 1000     # of a run
most_runs = 20         # in all
until = "{until}"   # the last day on which this site takes part
ask = "never"          # "once": a person here approves each experiment once; "every-run": each run

# [privacy]            # remove the first # of these lines for noise that hides single images, whatever a run asks for
# epsilon = 3.0        # that a run may spend; each further run spends it again

[evaluate]             # on images that you keep to test on
least = 50             # images that every number is about, at least
most = 500             # answers in all
"""


@dataclass(frozen=True)
class Evaluating:
    """What a site tells of models on its test images."""

    least: Count = coarse.LEAST  # images that every number is about, at least
    most: Natural = 500  # answers in all


@dataclass(frozen=True)
class Policy:
    """The file policy.toml. None is no limit."""

    methods: tuple[str, ...] = ()  # empty: all that the site has consented to
    networks: tuple[str, ...] = ()  # empty: all
    least_batch: Count | None = None  # images
    least_steps: Count | None = None  # of training, before weights leave
    most_epochs: Count | None = None  # in all tasks of a round
    largest_rate: Positive | None = None  # learning rate
    statistics: bool = True  # whether exact BatchNorm statistics may leave, where an experiment recomputes them
    held_out: bool = True  # whether exact counts over held-out labels may leave, where an experiment holds some out
    masked: bool = False  # whether weights leave only in masked sums
    largest_share: Share = 0.75  # of this site in a masked sum
    most_rounds: Count | None = None  # of a run
    most_runs: Natural | None = None  # in all
    until: str | None = None  # last day, such as 2027-12-31
    ask: Literal["never", "once", "every-run"] = "never"  # whom a person at the site must approve
    privacy: Privacy | None = None  # that this site trains with, unless a run asks for a smaller epsilon
    evaluate: Evaluating = Evaluating()

    def __post_init__(self) -> None:
        for name in self.methods:
            method_named(name)  # raises if there is none
        known_networks = [str(row["name"]) for row in known("models")] if self.networks else []
        for name in self.networks:
            if ":" not in name and name not in known_networks:
                raise BadInput(unknown("network", name, known_networks))
        self.last_day()

    def last_day(self) -> date | None:
        try:
            return None if self.until is None else date.fromisoformat(self.until)
        except (ValueError, TypeError):
            raise BadInput(f"until must be a day such as '2027-12-31', found {self.until!r}") from None


def write_fresh(folder: Path) -> None:
    """Write a policy with careful limits, which allow every method of FewLabel as the recipe trains it."""
    until = datetime.now(UTC).date() + timedelta(days=365)
    storage.write(folder / FILE, FRESH.format(until=until).encode())


def load(path: str) -> Policy:
    """Read a policy. A site of before 0.2 has none, and then nothing is limited but answers about test images."""
    if not path or not Path(path).exists():
        return Policy()
    try:
        return schema.read(Policy, tomllib.loads(Path(path).read_text()))
    except (OSError, ValueError) as error:
        raise BadInput(f"{path} cannot be read: {error}") from None
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def check(policy: Policy, experiment: Experiment, labeled: int | None = None) -> None:
    """Refuse an experiment beyond a policy. `labeled` is how many images with a label the site has, once known."""
    for sentence in objections(policy, experiment, labeled):
        raise Refused(f"the policy of this site does not allow it: {sentence}")


def protected(policy: Policy, experiment: Experiment) -> Experiment:
    """Return an experiment with the site's own privacy, if that is stronger than what the experiment asks for."""
    own, asked = policy.privacy, experiment.privacy
    if own is None or (asked is not None and asked.epsilon <= own.epsilon and asked.delta <= own.delta):
        return experiment
    try:
        return replace(experiment, privacy=own)
    except BadInput as error:
        raise Refused(f"the policy of this site does not allow it: {error} (privacy)") from None


def objections(policy: Policy, experiment: Experiment, labeled: int | None = None) -> Iterator[str]:
    """Yield what a policy has against an experiment, each with the setting that would have to change."""
    last = policy.last_day()
    if last is not None and datetime.now(UTC).date() > last:
        yield f"it takes part until {policy.until}, and that day is over (until)"
    if policy.methods and not consented(", ".join(policy.methods), experiment):
        yield f"its methods are {', '.join(policy.methods)}, and this is {experiment.name} (methods)"
    if policy.networks and experiment.model.name not in policy.networks:
        yield f"its networks are {', '.join(policy.networks)}, and this is {experiment.model.name} (networks)"
    if not policy.statistics and experiment.model.buffers == "recomputed":
        yield "no exact statistics of images leave it, and model.buffers = 'recomputed' (statistics)"
    if policy.masked and experiment.clients.sums != "masked":
        yield f"its weights leave only in masked sums, and clients.sums = '{experiment.clients.sums}' (masked)"
    if not policy.held_out and experiment.labels.held_out:
        share = experiment.labels.held_out
        yield f"no exact counts over held-out labels leave it: set labels.held_out = 0, not {share:g} (held_out)"
    if policy.most_rounds is not None and experiment.rounds > policy.most_rounds:
        yield f"it takes part for {policy.most_rounds} rounds, and rounds = {experiment.rounds} (most_rounds)"
    passes = most_passes(experiment) if labeled else None  # without labels it may be fewer
    if policy.most_epochs is not None and passes is not None and passes > policy.most_epochs:
        yield (
            f"it trains for {policy.most_epochs} epochs at most, and a round of {experiment.name} may have {passes} in "
            "all (most_epochs)"
        )
    for key, value in settings_at_sites(experiment):
        name = key.rpartition(".")[2]
        if policy.most_epochs is not None and "epochs" in name and value > policy.most_epochs:
            yield f"it trains for {policy.most_epochs} epochs at most, and method.{key} = {value} (most_epochs)"
        if policy.largest_rate is not None and name.startswith("lr") and value > policy.largest_rate:
            yield f"its largest learning rate is {policy.largest_rate:g}, and method.{key} = {value:g} (largest_rate)"
        if policy.least_batch is not None and name in ("batch_size", "batch_unlabeled") and value < policy.least_batch:
            yield f"its smallest batch has {policy.least_batch} images, and method.{key} = {value} (least_batch)"
    if policy.least_batch is not None and labeled and experiment.recipe.batches > 1:
        # The recipe makes batches smaller where labels are few, but not smaller than a quarter of them.
        size = max(2, labeled // experiment.recipe.batches)
        if size < min(policy.least_batch, max(2, labeled // QUARTER)):
            yield f"with train.batches = {experiment.recipe.batches} its batches would have {size} images (least_batch)"


def settings_at_sites(experiment: Experiment) -> Iterator[tuple[str, Any]]:
    """Yield the numbers among a method's settings that are about training at sites."""
    for key, value in schema.flatten(plain_method(experiment.method)):
        if type(value) in (int, float) and not key.startswith(ELSEWHERE):
            yield key, value


def check_steps(policy: Policy, steps: int) -> None:
    """Refuse to send weights after fewer steps of training than the policy asks for. Tasks without any may send."""
    if policy.least_steps is not None and 0 < steps < policy.least_steps:
        made = f"it made {steps} step{'s' * (steps > 1)} of training"
        raise Refused(
            f"the policy of this site does not allow it: {made}, and weights leave after {policy.least_steps} or more; "
            "a smaller method.local.batch_size or more method.local.epochs give more (least_steps)"
        )
