"""The pool: worker processes on this machine that do the jobs of any number of runs.

Workers take jobs from one socket that they share, so none waits while there is work. The bytes of messages and uploads
lie in anonymous memory, and its descriptors travel with the jobs. So a crash leaves nothing behind.
"""

import ctypes
import gc
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch

from fewlabel.core.errors import RunFailed
from fewlabel.engine.executor import Job, Outcome, Tickets
from fewlabel.engine.worker import Worker

HEADER = 1 << 16  # a job is a few hundred bytes


class WorkerDied(RunFailed):
    """A worker process ended in the middle of its work."""


class Pool:
    """An executor that does jobs in worker processes."""

    def __init__(self, workers: int, start: str = "fork") -> None:
        # Like PyTorch's own data loaders, workers are forks that use one thread: they start in milliseconds and share
        # the parent's imports. More threads, or a GPU, need new processes: "spawn".
        self.window = 2 * workers
        self._jobs, job_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._replies, reply_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        context: Any = multiprocessing.get_context(start)
        mine = (self._jobs, self._replies) if start == "fork" else ()
        self._processes: list[BaseProcess] = []
        self._at = context.RawArray("q", workers)  # the ticket of each worker's present job
        self._read = context.RawArray("q", workers)  # the ticket of each worker's last outcome that was read
        give_back()
        gc.freeze()  # garbage collection would write to the memory that forks share, and so copy it
        for number in range(workers):
            arguments = (number, self._at, self._read, job_end, reply_end, mine, os.getpid(), list(sys.path))
            process = context.Process(target=serve, args=arguments, name=f"fewlabel-worker-{number}", daemon=True)
            process.start()
            self._processes.append(process)
        job_end.close()
        reply_end.close()
        self._poll = select.poll()
        for source in (self._replies.fileno(), *(process.sentinel for process in self._processes)):
            self._poll.register(source, select.POLLIN)
        self.tickets, self._messages = Tickets(), 0
        self._parcel: tuple[bytes | None, int] = (None, -1)

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        with self.tickets.opened(job) as ticket:
            parcels = [self._shared(message)] + ([] if statistics is None else [parcel(statistics)])
            header = json.dumps({"ticket": ticket, "message": self._messages, "job": vars(job)}).encode()
            try:
                socket.send_fds(self._jobs, [header], parcels)
            except OSError:
                self._died()
            finally:
                for descriptor in parcels[1:]:
                    os.close(descriptor)
        return ticket

    def wait(self) -> None:
        events: dict[int, int] = {}
        while self._processes and not events:
            events = dict(self._poll.poll(1000))  # with a timeout, so that a signal from just before is seen
        if self._replies.fileno() not in events:
            self._died()
        self._receive()

    def discard(self) -> None:
        while self.tickets.under_way:
            self.wait()
        self.tickets.clear()

    def _shared(self, message: bytes) -> int:
        """Return the descriptor of a message. A broadcast is put into memory only once."""
        if self._parcel[0] is not message:
            if self._parcel[1] >= 0:
                os.close(self._parcel[1])
            self._parcel = message, parcel(message)
            self._messages += 1
        return self._parcel[1]

    def _receive(self) -> None:
        header, descriptors, *_ = socket.recv_fds(self._replies, HEADER, 1)
        if not header:
            self._died()
        reply = json.loads(header)
        outside, *payload = contents(descriptors[0], *reply["sizes"])
        self._read[reply["worker"]] = reply["ticket"]
        self.tickets.close(reply["ticket"], Outcome(payload[0] if payload else None, **json.loads(outside)))

    def _died(self) -> None:
        """Raise an error that says which worker ended, what it was doing, and how to go on."""
        for number, process in enumerate(self._processes):
            process.join(0.1)
            if process.exitcode is not None:
                job = self.tickets.under_way.get(self._at[number])
                doing = str(job) if job else "no job was in its hands"
                how = f"killed by signal {-process.exitcode}" if process.exitcode < 0 else f"exit {process.exitcode}"
                self.close()
                raise WorkerDied(f"a worker process died ({how}) while {doing}; resume to do that round again")
        raise WorkerDied("the worker processes cannot be reached; resume to go on")

    def close(self) -> None:
        with suppress(OSError):  # a pool may be closed twice
            # This tells workers to end, even if those of a younger pool inherited a copy of the socket.
            self._jobs.shutdown(socket.SHUT_WR)
        self._jobs.close()
        for process in self._processes:
            process.join(0 if self.tickets.under_way else 5)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self._processes.clear()
        gc.unfreeze()
        self._replies.close()
        if self._parcel[1] >= 0:
            os.close(self._parcel[1])
            self._parcel = (None, -1)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()


def parcel(*parts: bytes, memory: int | None = None) -> int:
    """Put bytes into anonymous memory and return its descriptor. To use `memory` again is ten times faster."""
    descriptor, at = os.memfd_create("fewlabel") if memory is None else memory, 0
    for part in parts:
        end = at + len(part)
        while at < end:
            at += os.pwrite(descriptor, memoryview(part)[at - end :], at)
    return descriptor


def contents(descriptor: int, *sizes: int) -> list[bytes]:
    """Return the parts of a parcel, and close its descriptor. Sizes are needed only if there are several parts.

    The parts are bytearrays, which `wire.unpack` takes over without a copy.
    """
    try:
        parts, at = [], 0
        for size in sizes or [os.fstat(descriptor).st_size]:
            part, got = bytearray(size), 0
            while got < size:  # beyond 2 GiB it takes several reads
                got += os.preadv(descriptor, [memoryview(part)[got:]], at + got)
            parts.append(cast(bytes, part))
            at += size
        return parts
    finally:
        os.close(descriptor)


def give_back() -> None:
    """Return free memory to the system. Reading a run's partition takes several times the memory that stays in use."""
    with suppress(AttributeError):  # other libraries than glibc return it by themselves, or cannot
        ctypes.CDLL(None).malloc_trim(0)


def end_with(parent: int) -> None:
    """Make the system end this process when its parent ends, however that happens, so that no orphan goes on."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def serve(
    number: int,
    at: Any,
    read: Any,
    jobs: socket.socket,
    replies: socket.socket,
    parents: tuple[socket.socket, ...],
    parent: int,
    path: list[str],
) -> None:
    """Do job after job in a worker process, until the parent closes its end or dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends the round first
    end_with(parent)
    for end in parents:
        end.close()
    sys.path[:] = path
    torch.set_num_threads(1)
    worker: tuple[str, Worker] | None = None
    memory, answered, message = os.memfd_create("fewlabel"), 0, (0, b"")
    while True:
        header, descriptors, *_ = socket.recv_fds(jobs, HEADER, 2)
        if not header:
            return
        request = json.loads(header)
        job, ticket = Job(**request["job"]), request["ticket"]
        if message[0] != request["message"]:
            message = request["message"], bytes(contents(descriptors[0])[0])
        else:
            os.close(descriptors[0])
        statistics = [bytes(contents(descriptor)[0]) for descriptor in descriptors[1:]]
        at[number] = ticket
        if worker is None or worker[0] != job.run:
            worker = job.run, Worker(Path(job.run), number=number)
            torch.set_num_threads(worker[1].world.experiment.threads)
            give_back()
        outcome = worker[1].attempt(job, message[1], statistics[0] if statistics else None)
        report = {"outside": outcome.outside, "failure": outcome.failure, "traceback": outcome.traceback}
        parts = [json.dumps(report).encode(), *([] if outcome.payload is None else [outcome.payload])]
        if read[number] != answered:  # the last outcome is still in this memory, unread
            os.close(memory)
            memory = os.memfd_create("fewlabel")
        answer = {"worker": number, "ticket": ticket, "sizes": [len(part) for part in parts]}
        socket.send_fds(replies, [json.dumps(answer).encode()], [parcel(*parts, memory=memory)])
        answered = ticket
