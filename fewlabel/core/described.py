"""How a method describes itself: what leaves a site, its warnings, its plots. It may leave out any of these."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from fewlabel.core.plots import Plot

# For methods that send weights, but whose server never needs the weights of a single site.
SUMS_DO = "A curious server can learn about training images from weights. The server needs only sums over sites."


def leaves(method: Any) -> str:
    """Return a method's own words on what leaves a site."""
    return " ".join(getattr(method, "leaves", "").split())


def cautions(method: Any, experiment: Any) -> list[str]:
    """Return a method's warnings about an experiment."""
    return list(method.cautions(experiment)) if hasattr(method, "cautions") else []


def conclusions(method: Any, lines: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what a method itself concludes from the lines of a run, in sentences."""
    return list(method.conclusions(lines)) if hasattr(method, "conclusions") else []


def own_warmup(method: Any) -> int:
    """The rounds of a method's own warm-up: its setting `warmup`, if it has one."""
    return int(getattr(method, "warmup", 0) or 0)


def needs_unlabeled(method: Any) -> bool:
    """Return True if a method learns from unlabeled images: unless its setting `unlabeled` or `labeling` is "none"."""
    return all(getattr(method, name, "") != "none" for name in ("unlabeled", "labeling"))


def kinds_apart(experiment: Any) -> Iterator[str]:
    """Yield the kinds of clients, labeled and unlabeled, that an experiment averages by themselves in some round."""
    method = experiment.method
    takes_turns = getattr(method, "takes_turns", False)
    if takes_turns or own_warmup(method) or experiment.warmup_rounds or not needs_unlabeled(method):
        yield "labeled"
    if takes_turns:
        yield "unlabeled"


def all_warmup(method: Any, experiment: Any) -> Iterator[str]:
    """Warn if all rounds of an experiment are warm-up. A method with a `warmup` uses this as its `cautions`."""
    if method.warmup >= experiment.rounds:
        yield (
            f"{experiment.name}: all of its {experiment.rounds} rounds are warm-up, in which labeled clients train "
            "alone; raise rounds, or lower method.warmup"
        )


def short_warmup(experiment: Any) -> Iterator[str]:
    """Warn if a run is so short that the recipe's warm-up is no round at all."""
    share, rounds, method = experiment.recipe.warmup, experiment.rounds, experiment.method
    own = own_warmup(method) or getattr(method, "warms_up", False)
    if experiment.warmup_rounds or not share or own or not needs_unlabeled(method):
        return
    enough = next(number for number in count(rounds) if round(share * number))
    longer = f", or train.warmup to {1 / rounds:g}" if rounds > 1 else ""
    yield (
        f"{experiment.name}: a warm-up of {share:g} of the rounds is none of {rounds}, so the model learns from "
        f"unlabeled images before it knows anything; raise rounds to {enough} or more{longer}"
    )


def for_every_client(method: Any, experiment: Any) -> Iterator[str]:
    """Warn if some clients have no labels. A method made for labels at every client uses this as its `cautions`."""
    if experiment.labels.at == "some-clients":
        yield (
            f"{experiment.name} is made for labels at every client; clients without labels train on pseudo-labels "
            "alone and count as much as the others; its paper has labels.at = 'every-client'"
        )


def most_passes(experiment: Any) -> int | None:
    """Return the most passes over a site's images that a method says a round makes. None: as its settings say."""
    method = experiment.method
    return int(method.most_passes(experiment.rounds)) if hasattr(method, "most_passes") else None


def plots(method: Any) -> tuple[Plot, ...]:
    """Return the plots that a method wants of its rounds."""
    wanted: tuple[Plot, ...] = getattr(method, "plots", ())
    return wanted


def needs_each_model(method: Any) -> bool:
    """Return True if a method's server needs each client's model by itself."""
    return bool(getattr(method, "needs_each_model", False))


def per_image(method: Any) -> bool:
    """Return True if a method trains by a mean over losses of single images, and sends nothing but weights.

    Its setting `local` says how many passes over images it plans.
    """
    return bool(getattr(method, "per_image", False)) and hasattr(method, "local")
