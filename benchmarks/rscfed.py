"""A whole RSCFed round beside the machine's limit for the same passes.

Images of CIFAR's size, 10,000 of them at ten clients by Dirichlet(0.8), one of which has labels; SimpleCNN, three
groups of five clients, two views, evaluation on 2,000 images every five rounds. The limit is one loop with one thread
on each core, over half of a round's images each: views, the teacher's forward pass, the student's forward and backward
pass, the optimizer's step, the teacher's, the evaluation's forward passes, and nothing else. `plain` is that limit for
the same network made of PyTorch's own layers, as anyone would write it.
"""

import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import Contestant, Turn, at_least, race, ratio, short  # noqa: E402

CORES = os.cpu_count() or 1
TRAIN, TEST, CLASSES, EVERY = 10_000, 2_000, 100, 5
AHEAD = 2  # rounds played before the first that is asked for, so that evaluations end within a repeat


def photos() -> Any:
    """Blots of colour, as a data set of one's own."""
    import numpy as np
    import torch

    from fewlabel.data.datasets import Raw

    def split(size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        coarse = torch.rand(size, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        pixels = torch.nn.functional.interpolate(coarse, (32, 32), mode="bicubic").clamp(0, 1) * 255
        return pixels.to(torch.uint8).numpy(), np.arange(size) % CLASSES

    return Raw(tuple(map(str, range(CLASSES))), {"train": split(TRAIN, 0), "test": split(TEST, 1)})


def prepared(folder: str) -> Path:
    from fewlabel.engine import run as runs
    from fewlabel.experiment import Data, Evaluate, Experiment, Views
    from fewlabel.methods.rscfed import RSCFed

    os.environ["XDG_CACHE_HOME"] = folder
    experiment = Experiment(
        method=RSCFed(),
        rounds=1_000_000,
        data=Data("benchmarks.rscfed:photos"),
        views=Views("rscfed", "rscfed"),
        evaluate=Evaluate(EVERY),
    )
    return runs.prepare(experiment, Path(folder) / "run")


def ours(turn: Turn) -> None:
    from fewlabel.engine import run as runs

    played = 0

    def stop() -> bool:
        nonlocal played
        played += 1
        return played >= AHEAD and not turn()

    with tempfile.TemporaryDirectory() as folder:
        try:
            runs.execute(prepared(folder), workers=CORES, stop=stop)
        except runs.Interrupted:
            return


def limit(turn: Turn, plain: bool = False) -> None:
    import torch

    from fewlabel.engine.rounds import Server

    torch.set_num_threads(1)  # before there are forks, which would not survive a pool of threads
    context, pipes, number = multiprocessing.get_context("fork"), [], AHEAD
    with tempfile.TemporaryDirectory() as folder:
        fed = Server(prepared(folder))
        for core in range(CORES):
            here, there = context.Pipe()
            context.Process(target=loop, args=(fed, core, plain, there), daemon=True).start()
            pipes.append(here)
        while turn():
            number += 1
            for pipe in pipes:
                pipe.send(number)
            for pipe in pipes:
                pipe.recv()


def loop(fed: Any, core: int, plain: bool, pipe: Any) -> None:
    """One core's part of each round."""
    import torch
    from torch import Tensor
    from torch.nn.functional import cross_entropy

    from fewlabel.core.rng import Rng
    from fewlabel.learn.loop import shorten
    from fewlabel.learn.optim import SGD

    world, method, rng = fed.world, fed.method, torch.Generator().manual_seed(core)
    student = as_anyone(world.network(Rng("network"))) if plain else world.network(Rng("network"))
    teacher = deepcopy(student).eval()
    local, weights = method.local, list(student.parameters())
    first, slow = deepcopy(student.state_dict()), list(teacher.parameters())
    images, test = world.dataset.splits["train"].images, world.dataset.splits["test"].images
    labels, sharpness = world.dataset.splits["train"].labels, 1 / method.teacher.temperature

    def batches(which: Tensor) -> Iterator[Tensor]:
        part = which.tensor_split(CORES)[core]
        return iter(part.split(local.batch_size) if len(part) else ())

    def step(loss: Tensor) -> None:
        for weight in weights:
            weight.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        shorten([weight.grad for weight in weights], local.clip)
        optimizer.step()

    while True:
        number = pipe.recv()
        for network in (student, teacher):  # each round begins anew, as a client's does
            network.load_state_dict(first)
        optimizer = SGD(weights, local)
        fed.round = number
        groups = [fed.sample(method.group_size, name=f"group {m}") for m in range(method.groups)]
        shares = [world.share(client.id, number) for group in groups for client in group]
        for index in batches(torch.cat([torch.from_numpy(share.labeled) for share in shares])):
            step(cross_entropy(student(images.view(index, "weak", rng)), labels[index]))
        for index in batches(torch.cat([torch.from_numpy(share.unlabeled) for share in shares])):
            x, y = images.views(index, ("weak", "weak"), rng)
            with torch.inference_mode():
                said = teacher(x).softmax(1) ** sharpness
                target = said / said.sum(1, keepdim=True)
            step((target - student(y).softmax(1)).square().sum(1).mean())
            with torch.no_grad():
                torch._foreach_lerp_(slow, weights, 1 - method.teacher.decay)
        if number % EVERY == 0:
            with torch.inference_mode():
                for index in torch.arange(len(test.pixels)).tensor_split(CORES)[core].split(500):
                    teacher(test.view(index, "plain", rng)).softmax(1)
        pipe.send(None)


def as_anyone(network: Any) -> Any:
    """The SimpleCNN of PyTorch's own layers."""
    from torch import nn

    first, second, *rest = (layer for layer in network.backbone if isinstance(layer, nn.Conv2d | nn.Linear))
    small = nn.Conv2d(first.in_channels, 6, 5), nn.ReLU(), nn.MaxPool2d(2), second, nn.ReLU(), nn.MaxPool2d(2)
    network.backbone = nn.Sequential(*small, nn.Flatten(), *(part for one in rest for part in (one, nn.ReLU())))
    return network


def main() -> dict[str, Any]:
    played = race(
        [
            Contestant("fewlabel", "benchmarks.rscfed:ours"),
            Contestant("limit", "benchmarks.rscfed:limit"),
            Contestant("plain", "benchmarks.rscfed:limit", {"plain": True}),
        ],
        rounds=EVERY,
        warm_up=1,
    )
    found = {f"of_{name}": ratio(played["each"][name], played["each"]["fewlabel"]) for name in ("limit", "plain")}
    return short({"ratios": found, "targets": {"of_limit >= 0.9": at_least(found["of_limit"], 0.9)}, "rounds": played})


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
