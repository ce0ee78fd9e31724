"""What views cost beside the training step they are made for, and beside a loop over images.

Run `fewlabel bench views`, or `python benchmarks/views.py`. One thread; 64 images of 3x32x32, normalised; a step is
forward, backward and SGD of the SimpleCNN on them. All are timed in turn, round after round in one process, so that
what else the machine does falls on all alike. Intervals are of the median ratio, rounds drawn again 2,000 times.
`cpu_ms` is the process's own time, which is that of the clock where nobody else computes.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.measure import machine  # noqa: E402
from fewlabel import networks  # noqa: E402
from fewlabel.data.images import Images  # noqa: E402
from fewlabel.learn.loop import fit  # noqa: E402
from fewlabel.learn.optim import SGD, Local  # noqa: E402

BATCH, SIZE, ROUNDS = 64, 32, 31
SECONDS = 0.05  # that one timing should last at least
TARGETS = {"weak: shift": 0.1, "strong: randaugment": 0.7}  # of a step

MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)


def photos() -> Images:
    """Blots, some of them for each channel: no operation finds them easier than a photograph."""
    coarse = torch.rand(BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    pixels = torch.nn.functional.interpolate(coarse, (SIZE, SIZE), mode="bicubic").clamp(0, 1) * 255
    return Images(pixels.to(torch.uint8), MEAN, STD)


def ours(images: Images) -> dict[str, Callable[[], object]]:
    rng, index = torch.Generator().manual_seed(1), torch.arange(BATCH)

    def show(name: str, recipe: str) -> Callable[[], Tensor]:
        told = replace(images, **{name: recipe})
        return lambda: told.view(index, name, rng)

    wanted = {"weak": ("shift", "rscfed", "fixmatch-weak", "fedirm")}
    wanted["strong"] = ("randaugment", "fixmatch-strong", "fedmatch", "kornia-like")
    return {f"{name}: {recipe}": show(name, recipe) for name, recipes in wanted.items() for recipe in recipes}


def step(images: Images) -> Callable[[], object]:
    model = networks.build("simple-cnn", 3, 10, SIZE)
    batch = images.view(torch.arange(BATCH), "plain", torch.Generator()), torch.arange(BATCH) % 10
    local = Local()
    optimizer = SGD(model.parameters(), local)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return lambda: fit(model, optimizer, [batch], loss, local.clip)


def others(images: Images) -> dict[str, Callable[[], object]]:
    """Two operations without cutout, so a little less than ours; drawn for each image unless it says otherwise."""
    from PIL import Image
    from torchvision.transforms import v2

    normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    strong = v2.Compose([v2.RandAugment(2), *normalise])
    pillow_strong = v2.Compose([v2.RandAugment(2), v2.ToImage(), *normalise])
    crop = [v2.Resize(SIZE * 5 // 4), v2.RandomCrop(SIZE), v2.RandomHorizontalFlip()]
    pillow_crop = v2.Compose([*crop, v2.ToImage(), *normalise])
    arrays = images.pixels.permute(0, 2, 3, 1).contiguous().numpy()

    def pillow(transform: Callable[[Any], Tensor]) -> Tensor:
        return torch.stack([transform(Image.fromarray(array)) for array in arrays])

    return {
        "torchvision v2 RandAugment, each image": lambda: torch.stack([strong(image) for image in images.pixels]),
        "torchvision v2 RandAugment, one draw for the batch": lambda: strong(images.pixels),
        "Pillow RandAugment, each image": lambda: pillow(pillow_strong),
        "Pillow resize, crop and flip, each image": lambda: pillow(pillow_crop),
    }


def timed(task: Callable[[], object], calls: int) -> tuple[float, float]:
    """Milliseconds of the clock and of the processor."""
    clock, cpu = time.perf_counter(), time.process_time()
    for _ in range(calls):
        task()
    return 1000 * (time.perf_counter() - clock) / calls, 1000 * (time.process_time() - cpu) / calls


def ratio(above: np.ndarray, below: np.ndarray) -> dict[str, Any]:
    """Median over median, and where it would be had other rounds been timed."""
    drawn = np.random.default_rng(0).integers(0, len(above), (2000, len(above)))
    again = np.median(above[drawn], axis=1) / np.median(below[drawn], axis=1)
    return {"ratio": np.median(above) / np.median(below), "interval_95": np.quantile(again, [0.025, 0.975]).tolist()}


def main() -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            images = photos()
            tasks = {"step": step(images), **ours(images), **others(images)}
            calls = {name: max(1, int(1000 * SECONDS / timed(task, 3)[0])) for name, task in tasks.items()}
            rounds = [{name: timed(task, calls[name]) for name, task in tasks.items()} for _ in range(ROUNDS)]
    finally:
        torch.set_num_threads(threads)
    ms, cpu_ms = ({name: np.array([one[name][which] for one in rounds]) for name in tasks} for which in (0, 1))
    of_a_step = {name: ratio(ms[name], ms["step"]) for name in tasks if name != "step"}
    pairs = {name: "strong: randaugment" for name in ms if "RandAugment, each image" in name}
    pairs["Pillow resize, crop and flip, each image"] = "weak: rscfed"
    found = {
        "ms": {name: np.median(values) for name, values in ms.items()},
        "cpu_ms": {name: np.median(values) for name, values in cpu_ms.items()},
        "of_a_step": of_a_step,
        "times_ours": {name: {"ours": own} | ratio(ms[name], ms[own]) for name, own in pairs.items()},
        "rounds": ROUNDS,
        "targets": {f"{name} <= {most} of a step": of_a_step[name]["ratio"] <= most for name, most in TARGETS.items()},
        "machine": machine(),
    }
    short: dict[str, Any] = json.loads(json.dumps(found, default=bool), parse_float=lambda text: round(float(text), 3))
    return short


if __name__ == "__main__":
    print(json.dumps(main(), indent=1))
