"""The schedule of the learning rate: a factor for each round, which optimizers multiply their rate with.

It is set around every task, so that every method follows it without a line of its own. So are limits on the rate and on
the passes over a site's images.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fewlabel.core.errors import BadInput

_FACTOR: ContextVar[float] = ContextVar("factor", default=1.0)
_LARGEST: ContextVar[float | None] = ContextVar("largest", default=None)
_PASSES: ContextVar[int | None] = ContextVar("passes", default=None)


class TooFast(BadInput):
    """A learning rate above the largest that is allowed here."""


class TooLong(BadInput):
    """More passes over a site's images than are allowed here."""


def factor(schedule: str, round: int, rounds: int) -> float:
    """Return the factor of a round, counted from 1: always 1, or falling from 1 like a cosine."""
    return (1 + math.cos(math.pi * (max(round, 1) - 1) / rounds)) / 2 if schedule == "cosine" else 1.0


def scaled(rate: float) -> float:
    """Return a learning rate as it is in the round under way."""
    return rate * _FACTOR.get()


def allowed(rate: float) -> float:
    """Return a learning rate with which a step is made, unless it is too large here."""
    largest = _LARGEST.get()
    if largest is not None and not rate <= largest:
        raise TooFast(f"the largest learning rate here is {largest:g}, and the task asks for {rate:g} (largest_rate)")
    return rate


@contextmanager
def during(factor: float) -> Iterator[None]:
    """Scale the rates of optimizers that are made meanwhile."""
    token = _FACTOR.set(factor)
    try:
        yield
    finally:
        _FACTOR.reset(token)


def check_passes(passes: int) -> None:
    """Raise TooLong if a task has begun more passes over its images than are allowed here."""
    most = _PASSES.get()
    if most is not None and passes > most:
        raise TooLong(
            "the policy of this site does not allow it: this task passes over its images more than "
            f"{max(0, most)} times, and no more are left in this round (most_epochs)"
        )


@contextmanager
def limited(largest: float | None, passes: int | None = None) -> Iterator[None]:
    """Refuse larger rates and more passes meanwhile, wherever they come from: a message may change them, too."""
    tokens = _LARGEST.set(largest), _PASSES.set(passes)
    try:
        yield
    finally:
        _LARGEST.reset(tokens[0])
        _PASSES.reset(tokens[1])
