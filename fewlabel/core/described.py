"""What a method says of itself: what leaves a site, what it cautions about, what it plots. Each may be left out."""

from collections.abc import Iterator
from typing import Any

from fewlabel.core.plots import Plot

# What to say of weights that leave a site, where the server needs no site's by themselves.
SUMS_DO = "A curious server can learn about training images from weights. The server needs only sums over sites."


def leaves(method: Any) -> str:
    """What a method says leaves a site."""
    return " ".join(getattr(method, "leaves", "").split())


def cautions(method: Any, experiment: Any) -> list[str]:
    """What a method cautions about in an experiment."""
    return list(method.cautions(experiment)) if hasattr(method, "cautions") else []


def own_warmup(method: Any) -> int:
    """The rounds of a method's own warm-up: its setting `warmup`, if it has one."""
    return int(getattr(method, "warmup", 0) or 0)


def all_warmup(method: Any, experiment: Any) -> Iterator[str]:
    """Caution about an experiment that ends with its warm-up: `cautions` of a method that has a `warmup`."""
    if method.warmup >= experiment.rounds:
        yield (
            f"{experiment.name}: all of its {experiment.rounds} rounds are warm-up, in which labeled clients train "
            "alone; raise rounds, or lower method.warmup"
        )


def plots(method: Any) -> tuple[Plot, ...]:
    """What a method wants drawn of its rounds."""
    wanted: tuple[Plot, ...] = getattr(method, "plots", ())
    return wanted


def needs_each_model(method: Any) -> bool:
    """Whether a method needs each client's model by itself."""
    return bool(getattr(method, "needs_each_model", False))
