"""Jobs, what comes of them, and what every executor of jobs must offer. `backends` lists the executors there are."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

SERVER_ID = -1


@dataclass(frozen=True)
class Job:
    """One piece of work: a task at a client or the server, or one of the framework's own."""

    run: str  # directory
    kind: str  # client, server, evaluate, statistics; between machines also hidden, and the steps of a masked sum
    task: str = ""
    client: int = SERVER_ID
    round: int = 0
    call: int = 0  # how often this client was asked in this round before
    checkpointed: int = 0  # the last round a resume may start from
    score: bool = False  # measure local models
    evaluated: bool = False  # the round's model is measured

    def __str__(self) -> str:
        who = "the server" if self.client == SERVER_ID else f"client {self.client}"
        return f"{who} was at '{self.task or self.kind}' of round {self.round}"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job: the bytes that leave the site, what was measured from outside it, or why it failed."""

    payload: bytes | None
    outside: dict[str, Any]
    failure: str = ""  # one sentence
    traceback: str = ""


@dataclass
class Tickets:
    """The bookkeeping of an executor: which jobs are under way, and outcomes that nobody has collected yet."""

    under_way: dict[int, Job] = field(default_factory=dict)
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    _last: int = 0

    def open(self, job: Job) -> int:
        """Return a new ticket for a job that is now under way."""
        self._last += 1
        self.under_way[self._last] = job
        return self._last

    @contextmanager
    def opened(self, job: Job) -> Iterator[int]:
        """Open a ticket while a job is handed over. If that fails, the job is not under way."""
        ticket = self.open(job)
        try:
            yield ticket
        except BaseException:
            self.under_way.pop(ticket, None)
            raise

    def close(self, ticket: int, outcome: Outcome) -> None:
        """Note the outcome of a job."""
        del self.under_way[ticket]
        self.outcomes[ticket] = outcome

    def ready(self, ticket: int) -> bool:
        return ticket in self.outcomes

    def collect(self, ticket: int) -> Outcome:
        """Take the outcome of a job that is ready."""
        return self.outcomes.pop(ticket)

    def clear(self) -> None:
        self.under_way.clear()
        self.outcomes.clear()


@dataclass(frozen=True)
class Summed:
    """A sum of models of which nobody saw a single one."""

    clients: tuple[int, ...]  # that are in it; none if there is no sum
    numbers: "Tensor"  # int64: the sum of their weights in whole steps, as core.fixed weighs and rounds them
    up: int  # bytes
    down: int  # bytes
    failures: tuple[tuple[int, str, str], ...]  # client, step and why, of those that failed on the way
    why: str = ""  # there is no sum


@runtime_checkable
class Masking(Protocol):
    """An executor whose clients can hide their models in a sum."""

    def masked_sum(self, jobs: Mapping[int, Job], shares: Mapping[int, int], length: int) -> Summed:
        """Add up the models that clients kept after these jobs, of so many numbers, each by its share."""


class Executor(Protocol):
    """An executor does jobs, here or elsewhere. Each job has a ticket. Outcomes are collected in any order."""

    window: int  # how many jobs should be under way at once
    tickets: Tickets

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        """Begin a job and return its ticket."""

    def wait(self) -> None:
        """Wait until one of the jobs under way is done."""

    def discard(self) -> None:
        """Forget all jobs under way."""
