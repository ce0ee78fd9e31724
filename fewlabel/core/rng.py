"""Random streams with names, so that a draw depends on what it is for and never on who draws it, or when."""

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TypeVar

import numpy as np
import torch

T = TypeVar("T")


class Rng:
    """A stream of random numbers named by its key, such as (seed, "client", round, client, task, call)."""

    def __init__(self, *key: int | str) -> None:
        self.key = key

    def stream(self, *names: int | str) -> "Rng":
        """An independent stream below this one."""
        return Rng(*self.key, *names)

    @cached_property
    def seed(self) -> int:
        text = repr(self.key)  # in which the name "1" is not the number 1, and no two keys look alike
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    @cached_property
    def torch(self) -> torch.Generator:
        """For everything that is drawn on tensors."""
        return torch.Generator().manual_seed(self.seed)

    @cached_property
    def numpy(self) -> np.random.Generator:
        """For partitions and samples of clients."""
        return np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """k of the items without replacement, in their own order."""
        return [items[i] for i in sorted(self.numpy.choice(len(items), size=k, replace=False))]

    def seed_globals(self) -> None:
        """Seeds the generators that dropout, initializers and many libraries draw from, as they know no others."""
        torch.default_generator.manual_seed(self.seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a GPU's dropout draws there
            torch.cuda.manual_seed_all(self.seed)
        np.random.seed(self.seed & 0xFFFFFFFF)
        random.seed(self.seed)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Seeds the global generators for a while, and leaves them as they were."""
        with preserved():
            self.seed_globals()
            yield


@contextmanager
def preserved() -> Iterator[None]:
    """Leaves the global generators as they were."""
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
