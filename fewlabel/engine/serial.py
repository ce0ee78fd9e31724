"""The simplest executor: it does each job at once, in this process."""

from pathlib import Path

from fewlabel.core.rng import preserved
from fewlabel.engine.executor import Job, Tickets
from fewlabel.engine.worker import Worker


class Serial:
    """An executor that does each job at once, in this process."""

    window = 1

    def __init__(self) -> None:
        self.tickets = Tickets()
        self._worker: tuple[str, Worker] | None = None

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        if self._worker is None or self._worker[0] != job.run:
            self._worker = job.run, Worker(Path(job.run))
        ticket = self.tickets.open(job)
        with preserved():
            self.tickets.close(ticket, self._worker[1].attempt(job, message, statistics))
        return ticket

    def wait(self) -> None:
        raise RuntimeError("a job of this process is ready as soon as it is submitted")

    def discard(self) -> None:
        self.tickets.clear()
        self._worker = None
