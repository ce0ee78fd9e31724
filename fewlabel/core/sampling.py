"""How a site draws the batches of a pass over its images: in random order, or as differential privacy wants it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

# Takes the number of images and the size of a batch. Returns the batches of one pass, as places among the images.
Sampler = Callable[[int, int], Iterator[Tensor]]

_SAMPLER: ContextVar[Sampler | None] = ContextVar("sampler", default=None)


def sampler() -> Sampler | None:
    """Return what draws batches now, in the place of random order."""
    return _SAMPLER.get()


@contextmanager
def during(sampler: Sampler | None) -> Iterator[None]:
    """Draw the batches of all training meanwhile by this sampler."""
    token = _SAMPLER.set(sampler)
    try:
        yield
    finally:
        _SAMPLER.reset(token)
