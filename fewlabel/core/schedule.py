"""The schedule of the learning rate: a factor for each round, which optimizers multiply their rate with.

It is set around every task, so that every method follows it without a line of its own.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_FACTOR: ContextVar[float] = ContextVar("factor", default=1.0)


def factor(schedule: str, round: int, rounds: int) -> float:
    """Return the factor of a round, counted from 1: always 1, or falling from 1 like a cosine."""
    return (1 + math.cos(math.pi * (max(round, 1) - 1) / rounds)) / 2 if schedule == "cosine" else 1.0


def scaled(rate: float) -> float:
    """Return a learning rate as it is in the round under way."""
    return rate * _FACTOR.get()


@contextmanager
def during(factor: float) -> Iterator[None]:
    """Scale the rates of optimizers that are made meanwhile."""
    token = _FACTOR.set(factor)
    try:
        yield
    finally:
        _FACTOR.reset(token)
