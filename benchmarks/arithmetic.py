"""What the methods' own passes cost beside the arithmetic that they need.

The need is a bare loop over the same batches: making the views, and just the forward and backward passes and optimizer
steps that the equations ask for, on one plain network. `count` says which. One thread, so that `ratio` is that of the
processor's time; task and need in turn.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import at_most, machine, ratio, short  # noqa: E402
from fewlabel import networks  # noqa: E402
from fewlabel.core import tree  # noqa: E402
from fewlabel.core.federation import ClientInfo, Site  # noqa: E402
from fewlabel.core.images import Labeled, Unlabeled  # noqa: E402
from fewlabel.core.rng import Rng  # noqa: E402
from fewlabel.data.images import Images  # noqa: E402
from fewlabel.learn.decomposed import Decomposed, summed  # noqa: E402
from fewlabel.learn.loop import fit  # noqa: E402
from fewlabel.learn.losses import information  # noqa: E402
from fewlabel.learn.optim import optimizer  # noqa: E402
from fewlabel.learn.plateau import score  # noqa: E402
from fewlabel.learn.thresholds import predict, select  # noqa: E402
from fewlabel.methods.cbafed import CBAFed  # noqa: E402
from fewlabel.methods.fedirm import FedIRM, Relation  # noqa: E402
from fewlabel.methods.fedmatch import FedMatch  # noqa: E402
from fewlabel.methods.isofed import IsoFed  # noqa: E402

CLASSES, REPEATS, MOST = 10, 15, 1.1

Work = Callable[[], object]


def images(number: int) -> Images:
    pixels = torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Images(pixels, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))


def holding(number: int) -> Unlabeled:
    return Unlabeled(images(number), torch.arange(number), torch.Generator().manual_seed(1))


def labeled(number: int) -> Labeled:
    return Labeled(images(number), torch.arange(number), torch.arange(number) % CLASSES, torch.Generator())


def site(model: nn.Module, unlabeled: Unlabeled) -> Site[Any]:
    info = ClientInfo(0, 0, len(unlabeled))
    return Site(info, round=30, rounds=100, num_classes=CLASSES, model=model, rng=Rng("site"), unlabeled=unlabeled)


def backward(loss: Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def fedirm() -> tuple[Work, Work]:
    method, unlabeled = FedIRM(), holding(480)
    model = networks.build("simple-cnn", 3, CLASSES, 32, dropout=0.2)
    steps = optimizer(model, method.local)
    theirs = Relation(torch.full((CLASSES, CLASSES), 1 / CLASSES), torch.ones(CLASSES, dtype=torch.bool))

    def need() -> None:
        for x, other, _ in unlabeled.batches(("weak", "weak"), method.local.batch_size):
            features = model.features(x)
            with torch.no_grad():
                for _ in range(method.passes):
                    model.classify(features)
            for weight in steps.parameters:
                weight.grad = None
            backward((model.classify(features).softmax(1) - model(other).softmax(1)).square().mean())
            steps.step()

    return partial(method.unsupervised, site(model, unlabeled), unlabeled, steps, theirs, None), need


def cbafed() -> tuple[Work, Work]:
    method, unlabeled, model = CBAFed(), holding(2000), networks.build("simple-cnn", 3, CLASSES, 32)
    bounds, tail = torch.full((CLASSES,), method.threshold), torch.zeros(CLASSES, dtype=torch.bool)

    def need() -> None:
        with torch.inference_mode():
            for x, _ in unlabeled.batches(("plain",), 256, shuffle=False):
                model(x)

    return lambda: select(predict(model, unlabeled), bounds, tail), need


def fedmatch(network: str, number: int) -> tuple[Work, Work]:
    method, unlabeled, model = FedMatch(), holding(number), networks.build(network, 3, CLASSES, 32)
    sigma = tree.of(model)
    psi = {name: method.psi_start * value for name, value in sigma.items()}
    net, helpers, place = Decomposed(model, sigma, psi), [psi, psi], site(model, unlabeled)
    plain, size = optimizer(model, method.local), method.batch_unlabeled
    of_psi = net.optimizers(method.local, method.local.lr)[1]
    loss = partial(method.unsupervised, net, helpers, place, 1)
    both = [list(part.values()) for part in (net.psi, net.sigma)]

    def need() -> None:
        model.train()
        for x, strong, index in unlabeled.batches(("plain", "strong"), size):
            with torch.no_grad():
                for _ in helpers:
                    model(x)
                summed(net.sigma, net.psi)
            for weight in plain.parameters:
                weight.grad = None
            backward(cross_entropy(model(x), index % CLASSES) + cross_entropy(model(strong), index % CLASSES))
            with torch.no_grad():
                torch._foreach_add_([weight.grad for weight in plain.parameters], torch._foreach_sub(*both), alpha=0.02)
            plain.step()

    return lambda: fit(model, of_psi, unlabeled.batches(("plain", "strong"), size), loss), need


def reliability() -> tuple[Work, Work]:
    validation, model = labeled(2000), networks.build("simple-cnn", 3, CLASSES, 32).eval()

    def need() -> None:
        with torch.inference_mode():
            for x, _ in validation.batches("plain", 500, shuffle=False):
                model(x)

    return lambda: score(model, validation), need


def isofed() -> tuple[Work, Work]:
    method, unlabeled, model = IsoFed(), holding(640), networks.build("simple-cnn", 3, CLASSES, 32)
    local = method.local
    steps = optimizer(model, local)

    def task() -> None:
        fit(model, steps, unlabeled.batches(size=64), lambda batch: information(model(batch[0]).softmax(1)), local.clip)

    def need() -> None:
        for x, index in unlabeled.batches(size=64):
            for weight in steps.parameters:
                weight.grad = None
            backward(cross_entropy(model(x), index % CLASSES))
            torch.nn.utils.clip_grad_norm_(steps.parameters, local.clip or 0.0)
            steps.step()

    return task, need


TASKS: dict[str, tuple[Callable[[], tuple[Work, Work]], str]] = {
    "fedirm: T = 8 passes": (fedirm, "2 forward and backward, 8 of the last layer, a step"),
    "cbafed: labeling": (cbafed, "1 forward"),
    "fedmatch: helpers": (
        partial(fedmatch, "simple-cnn", 400),
        "2 forward and backward, H = 2 forward, sigma + psi, the gradient of their distance, a step",
    ),
    "fedmatch: helpers, its own network": (partial(fedmatch, "fedmatch-net", 50), "the same"),
    "fedmatch: reliability": (reliability, "1 forward"),
    "isofed: pretraining": (isofed, "1 forward and backward, a step"),
}


def timed(work: Work) -> tuple[float, float]:
    clock, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - clock, time.process_time() - cpu


def measured(make: Callable[[], tuple[Work, Work]], count: str) -> dict[str, Any]:
    works = make()
    for work in works:
        timed(work)
    times = np.array([[timed(work) for work in works] for _ in range(REPEATS)])  # [repeat, work, clock or cpu]
    found = {"clock": ratio(times[:, 0, 0], times[:, 1, 0]), **ratio(times[:, 0, 1], times[:, 1, 1])}
    ms = 1000 * np.median(times, axis=0)
    cpu, clock = (dict(zip(("task", "need"), ms[:, which].tolist(), strict=True)) for which in (1, 0))
    return {"count": count, **found, "cpu_ms": cpu, "ms": clock}


def main(only: str = "") -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found = {name: measured(*task) for name, task in TASKS.items() if only in name}
    finally:
        torch.set_num_threads(threads)
    targets = {f"{name} <= {MOST}": at_most(one, MOST) for name, one in found.items()}
    return dict(short({"of_need": found, "targets": targets, "machine": machine()}))


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:]), indent=1))
