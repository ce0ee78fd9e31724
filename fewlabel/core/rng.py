"""Random streams with names: a draw depends on its purpose, never on who draws it or when."""

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
        """Return an independent stream below this one."""
        return Rng(*self.key, *names)

    @cached_property
    def seed(self) -> int:
        text = repr(self.key)  # tells the name "1" from the number 1, so that no two keys look alike
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1

    @cached_property
    def torch(self) -> torch.Generator:
        """The generator for everything that is drawn on tensors."""
        return torch.Generator().manual_seed(self.seed)

    @cached_property
    def numpy(self) -> np.random.Generator:
        """The generator for partitions and samples of clients."""
        return np.random.Generator(np.random.PCG64(self.seed))

    def sample(self, items: Sequence[T], k: int) -> list[T]:
        """Draw k of the items without replacement, and keep their order."""
        return [items[i] for i in sorted(self.numpy.choice(len(items), size=k, replace=False))]

    def seed_globals(self) -> None:
        """Seed the global generators. Dropout, initializers and many libraries draw from them and from no others."""
        torch.default_generator.manual_seed(self.seed)
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # a GPU's dropout draws there
            torch.cuda.manual_seed_all(self.seed)
        np.random.seed(self.seed & 0xFFFFFFFF)
        random.seed(self.seed)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Seed the global generators, and restore them at the end."""
        with preserved():
            self.seed_globals()
            yield


@contextmanager
def preserved() -> Iterator[None]:
    """Restore the global generators at the end."""
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.random.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
