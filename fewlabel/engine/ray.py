"""The backend on Flower's own engine, on Ray: it spreads jobs over a cluster, and gives the simulator's bits.

Each client is a virtual node, known by its `partition-id`. A message to a node is one ConfigRecord with a `job`, the
`message` of the method and perhaps `statistics`. The reply has a `report` of what was measured from outside, and
perhaps an `upload`. Nodes read the run's directory, which all machines of a cluster must see. Flower starts the
server's part in a thread.
"""

import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from fewlabel.engine import flower_messages

# Flower and Ray look at these when they are imported, and Ray's processes inherit them. They turn off telemetry. If no
# cluster is named, they also keep Ray from anything that other machines could reach.
os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
if "RAY_ADDRESS" not in os.environ:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fewlabel.core.errors import BadInput, FewLabelError, RunFailed
from fewlabel.engine import device
from fewlabel.engine.executor import SERVER_ID, Executor, Job, Outcome, Tickets
from fewlabel.engine.serial import Serial
from fewlabel.engine.worker import Worker
from fewlabel.experiment import Experiment

POLL = 0.01  # seconds between two looks for replies
FOREVER = 1e7  # seconds that a message may take


def with_executor(experiment: Experiment, workers: int | None, body: Callable[[Executor], None]) -> None:
    """Call `body` with an executor that spreads jobs over Ray, in the thread that Flower starts for its server."""
    from flwr.simulation import run_simulation

    over, done = threading.Event(), list[Exception | None]()

    def serve(grid: Grid, context: Context) -> None:
        try:
            body(VirtualNodes(grid, experiment.clients.count, over))
            done.append(None)
        except Exception as error:  # Flower would log it and raise another
            done.append(error)

    server, client = ServerApp(), ClientApp()
    server.main()(serve)
    client.query()(introduce)
    client.train()(respond)
    try:
        with ray_running(workers, experiment):
            resources: Any = {"num_cpus": experiment.threads, "num_gpus": share_of_gpu(experiment)}
            run_simulation(server, client, experiment.clients.count, backend_config={"client_resources": resources})
    except Exception as error:  # Ray and Flower raise what they like
        done.append(
            RunFailed(
                f"Ray cannot be used: {flower_messages.printable(str(error.__cause__ or error))}; resume to go on"
            )
        )
    finally:
        over.set()
    if done[0] is not None:
        raise done[0]


def share_of_gpu(experiment: Experiment) -> float:
    return 0.0 if experiment.device == "cpu" else 1 / device.PER_GPU


@contextmanager
def ray_running(workers: int | None, experiment: Experiment) -> Iterator[None]:
    """Run Ray on the cluster that RAY_ADDRESS names, or only on this machine; then nothing listens to others."""
    import ray

    path = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
    passed = {name: os.environ[name] for name in ("FEWLABEL_DATA", "XDG_CACHE_HOME") if name in os.environ}
    options: dict[str, Any] = {"runtime_env": {"env_vars": {"PYTHONPATH": path, **passed}}, "include_dashboard": False}
    options |= {"logging_level": logging.CRITICAL, "log_to_driver": False}
    noise, level = logging.getLogger("flwr"), logging.getLogger("flwr").level
    mine = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    with tempfile.TemporaryDirectory(prefix="fewlabel-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # short
        if "RAY_ADDRESS" not in os.environ:
            cores = (workers or device.workers(experiment.device)) * experiment.threads
            options |= {"address": "local", "num_cpus": cores, "_temp_dir": folder, "_node_ip_address": "127.0.0.1"}
        noise.setLevel(logging.CRITICAL + 1)
        try:
            ray.init(**options)
            if mine:
                signal.signal(signal.SIGTERM, before)  # Ray's own would end the process in mid-round
            yield
        finally:
            ray.shutdown()
            noise.setLevel(level)


# The server


class VirtualNodes:
    """An executor: virtual nodes do the jobs of clients, and this process does those of the server."""

    def __init__(self, grid: Grid, clients: int, over: threading.Event) -> None:
        import ray

        resources: Any = ray.cluster_resources  # has no types
        self.grid, self.over, self.window = grid, over, 2 * int(resources()["CPU"])
        self.tickets, self._here = Tickets(), Serial()
        self._sent: dict[str, int] = {}  # tickets
        self._nodes = self._meet(clients)

    def _meet(self, clients: int) -> dict[int, int]:
        """Return the node of each client. Nodes have random numbers, so each is asked which client it is."""
        while len(nodes := list(self.grid.get_node_ids())) < clients:
            self._rest()
        asked = {self._send(node, "query"): node for node in nodes}
        found: dict[int, int] = {}
        while asked:
            for sent, reply in flower_messages.receive(self.grid, asked):
                found[json.loads(report_of(reply))] = asked.pop(sent)
            self._rest()
        return found

    def _send(self, node: int, kind: str, group: str = "", **parts: bytes | None) -> str:
        if (sent := flower_messages.send(self.grid, node, FOREVER, kind, group, **parts)) is None:
            raise RunFailed("Flower did not take a message; resume to go on")
        return sent

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        ticket = self.tickets.open(job)
        if job.client == SERVER_ID:
            here = self._here.submit(job, message, statistics)
            self.tickets.close(ticket, self._here.tickets.collect(here))
            return ticket
        parts = {"job": json.dumps(vars(job)).encode(), "message": message, "statistics": statistics}
        try:
            self._sent[self._send(self._nodes[job.client], "train", str(job.round), **parts)] = ticket
        except RunFailed:
            del self.tickets.under_way[ticket]
            raise
        return ticket

    def wait(self) -> None:
        while not self._hear():
            self._rest()

    def _hear(self) -> bool:
        """Collect the outcomes that have come. Return True if there were any."""
        replies = flower_messages.receive(self.grid, self._sent)
        for sent, reply in replies:
            ticket = self._sent.pop(sent)
            seen = json.loads(report_of(reply, f" while {self.tickets.under_way[ticket]}"))
            record: Any = reply.content[flower_messages.RECORD]
            self.tickets.close(ticket, Outcome(record.get("upload"), **seen))
        return bool(replies)

    def _rest(self) -> None:
        if self.over.wait(POLL):
            raise RunFailed("Ray has ended; resume to go on")

    def discard(self) -> None:
        while self._sent and not self.over.is_set():
            self.wait()
        self.tickets.clear()


def report_of(reply: Message, when: str = "") -> Any:
    """Return the part of a reply that every node gives."""
    if reply.has_error():
        why = flower_messages.printable(reply.error.reason or str(reply.error.code))
        raise RunFailed(f"a process of Ray failed{when}: {why}; resume to do that round again")
    return reply.content[flower_messages.RECORD]["report"]


# A node


def introduce(message: Message, context: Context) -> Message:
    return flower_messages.answer(message, report=json.dumps(context.node_config["partition-id"]).encode())


def respond(message: Message, context: Context) -> Message:
    """Do a job of the client that this node is, and return the reply."""
    parts: Any = message.content[flower_messages.RECORD]
    job = Job(**json.loads(parts["job"]))
    if job.client != context.node_config["partition-id"]:
        raise BadInput(f"this is client {context.node_config['partition-id']}, not client {job.client}")
    try:
        outcome = worker_of(job.run).attempt(job, parts["message"], parts.get("statistics"))
    except FewLabelError as error:
        outcome = Outcome(None, {}, f"{socket.gethostname()} must see the run's directory and data, but {error}")
    seen = {"outside": outcome.outside, "failure": outcome.failure, "traceback": outcome.traceback}
    return flower_messages.answer(message, report=json.dumps(seen).encode(), upload=outcome.payload)


@lru_cache(maxsize=1)
def worker_of(run: str) -> Worker:
    """Return this process's worker, which serves every client whose job comes here."""
    worker = Worker(Path(run))
    torch.set_num_threads(worker.world.experiment.threads)
    return worker
