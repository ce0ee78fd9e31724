"""The simulator's backend: it does jobs on this machine, in this process or in a pool of processes."""

import os
from collections.abc import Callable

from fewlabel.engine import device
from fewlabel.engine.executor import Executor
from fewlabel.engine.pool import Pool
from fewlabel.engine.serial import Serial
from fewlabel.experiment import Experiment


def with_executor(experiment: Experiment, workers: int | None, body: Callable[[Executor], None]) -> None:
    """Call `body` with an executor of so many workers, by default as many as suit the device. One is this process."""
    workers = workers or device.workers(experiment.device)
    if workers == 1 or not hasattr(os, "memfd_create"):
        return body(Serial())
    with Pool(workers, "fork" if experiment.threads == 1 and experiment.device == "cpu" else "spawn") as pool:
        return body(pool)
