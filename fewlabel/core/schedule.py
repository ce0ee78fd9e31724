"""The schedule of the learning rate: a factor for each round, which optimizers multiply their rate with.

It is set around every task, so that every method follows it without a line of its own.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fewlabel.core.errors import BadInput

_FACTOR: ContextVar[float] = ContextVar("factor", default=1.0)
_LARGEST: ContextVar[float | None] = ContextVar("largest", default=None)


class TooFast(BadInput):
    """A learning rate above the largest that is allowed here."""


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


@contextmanager
def limited(largest: float | None) -> Iterator[None]:
    """Refuse every step with a larger rate meanwhile, wherever the rate comes from: a message may change it, too."""
    token = _LARGEST.set(largest)
    try:
        yield
    finally:
        _LARGEST.reset(token)
