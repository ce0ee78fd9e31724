"""FewLabel and plain loops of PyTorch, as contestants of the FedAvg measurements."""

import multiprocessing
import tempfile
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import Turn
from benchmarks.workload import Work, experiment
from fewlabel.core import tree
from fewlabel.engine import run
from fewlabel.learn.loop import fit
from fewlabel.learn.optim import SGD


def ours(turn: Turn, workers: int, **settings: Any) -> None:
    """What `fewlabel run` does, from the experiment on."""
    with tempfile.TemporaryDirectory() as folder:
        prepared(turn, str(run.prepare(experiment(**settings), Path(folder) / "run")), workers)


def prepared(turn: Turn, directory: str, workers: int) -> None:
    """A run that is laid out already."""
    if turn():
        try:
            run.execute(Path(directory), workers=workers, stop=lambda: not turn())
        except run.Interrupted:
            return


def bare(turn: Turn, threads: int | None = None) -> None:
    """FedAvg in one process, with nothing around it."""
    if threads:
        torch.set_num_threads(threads)
    work, rng = Work.read(), torch.Generator().manual_seed(0)
    model = work.network()
    weights, clients = tree.of(model), cycle(range(len(work.shares)))

    def trained() -> Iterator[tuple[float, tree.Tree]]:
        for client in islice(clients, work.per_round):
            model.load_state_dict(weights)
            work.train(model, work.client(client, rng))
            yield len(work.shares[client]), tree.of(model)

    while turn():
        weights = tree.mean(trained())


def limit(turn: Turn, cores: int) -> None:
    """The machine's limit: on each core one loop with one thread over its part of a round's images."""
    torch.set_num_threads(1)  # before there are forks, which would not survive a pool of threads
    work = Work.read()
    images = sum(map(len, work.shares)) * work.per_round // len(work.shares)
    parts = torch.cat(work.shares)[:images].tensor_split(cores)
    context = multiprocessing.get_context("fork")
    pipes = []
    for number, part in enumerate(parts):
        here, there = context.Pipe()
        context.Process(target=loop, args=(work, part, number, there), daemon=True).start()
        pipes.append(here)
    while turn():
        for pipe in pipes:
            pipe.send(None)
        for pipe in pipes:
            pipe.recv()


def loop(work: Work, part: torch.Tensor, seed: int, pipe: Any) -> None:
    """Each round begins anew, as a client's does."""
    model, images = work.network(), work.holding(part, torch.Generator().manual_seed(seed))
    first = tree.of(model)

    def loss(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch[0]), batch[1])

    while True:
        pipe.recv()
        model.load_state_dict(first)
        optimizer = SGD(model.parameters(), work.local)
        fit(model, optimizer, images.batches("weak", work.local.batch_size), loss, work.local.clip)
        pipe.send(None)
