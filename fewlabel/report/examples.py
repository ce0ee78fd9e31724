"""Test images beside what a model says about them: some of each class, its surest mistakes, and where it is least sure.

A model is asked again, so this needs the run's model and its data on this machine. A federation's images are at its
sites, and its report never shows any.
"""

import base64
import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fewlabel.core.errors import FewLabelError
from fewlabel.engine import record
from fewlabel.report.runs import Run

if TYPE_CHECKING:
    from torch import Tensor

    from fewlabel.engine.world import World

PER_CLASS = 5  # images of each class
MOST_CLASSES = 12  # to show images of
MOST_SHOWN = 10  # mistakes, and images of which the model is least sure
MOST_TESTED = 2000  # images to ask the model about, of 64 x 64 or smaller: a page must not take minutes
LARGEST = 96  # pixels of a picture's side; more would only make the page larger
BATCH = 100
SHARP = 48  # up to this size, a picture is stored without loss


@dataclass(frozen=True)
class Example:
    """A test image, its class, and what the model says."""

    picture: str  # as a data: address
    truth: str
    said: str
    probability: float
    second: str  # the next best class
    second_probability: float

    @property
    def right(self) -> bool:
        return self.truth == self.said


@dataclass(frozen=True)
class Examples:
    """The images to show for one model."""

    label: str
    per_class: tuple[tuple[Example, ...], ...]  # the first ones of each class, so that nobody chose them
    mistakes: tuple[Example, ...]  # the surest first
    unsure: tuple[Example, ...]  # those first whose two best classes are closest
    tested: int  # images that the model was asked about
    images: int  # test images in all
    classes: int


def examples_of(run: Run, label: str) -> Examples | None:
    """Ask a run's last model about its test images. Return None if its model or its data are not here."""
    if (run.directory / record.FEDERATION).exists() or not (run.directory / record.MODEL).exists():
        return None
    from fewlabel.engine.world import World

    try:
        world = World.open(run.directory)
    except (FewLabelError, OSError):
        return None  # the data have moved or changed since
    if "test" not in world.dataset.splits or (found := asked(run, world)) is None:
        return None
    index, scores = found
    return chosen(world, index, scores, label)


def asked(run: Run, world: "World") -> "tuple[Tensor, Tensor] | None":
    """Return test images and the probabilities that the model gives them, if it can be read and is complete."""
    import torch
    from safetensors import SafetensorError, safe_open

    from fewlabel.core import metrics, tree
    from fewlabel.core.rng import Rng

    network = world.network(Rng("scratch"))
    try:
        with safe_open(run.directory / record.MODEL, "pt") as file:
            card = json.loads((file.metadata() or {}).get("fewlabel", "{}"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        network.load_state_dict(tree.untrained(network) | weights)
    except (SafetensorError, OSError, ValueError, RuntimeError):
        return None  # the file is damaged, or the network's code has changed since
    if tree.statistics(tree.of(network)).keys() - weights.keys():
        return None
    images, size = world.dataset.splits["test"].images, world.dataset.image_size
    most = min(len(images.pixels), MOST_TESTED, max(1, MOST_TESTED * 64**2 // size**2))
    index = torch.linspace(0, len(images.pixels) - 1, most).round().long()
    batches = (images.view(some, "plain", torch.Generator()) for some in torch.split(index, BATCH))
    logits = torch.cat(list(metrics.outputs(network, batches))) / (card.get("temperature") or 1.0)
    return (index, logits.softmax(1)) if logits.isfinite().all() else None


def chosen(world: "World", index: "Tensor", scores: "Tensor", label: str) -> Examples:
    """Choose the images to show."""
    import torch

    test, classes = world.dataset.splits["test"], world.dataset.classes
    truth = test.labels[index]
    top = scores.topk(min(2, len(classes)), 1)
    sure, said = top.values[:, 0], top.indices[:, 0]

    def shown(places: Sequence[int]) -> Iterator[Example]:
        for n in places:
            (first, *rest), (best, *next_) = top.values[n].tolist(), top.indices[n].tolist()
            second = (classes[next_[0]], rest[0]) if rest else ("", 0.0)
            yield Example(picture(test.images.pixels[index[n]]), classes[truth[n]], classes[best], first, *second)

    def first(where: "Tensor", order: "Tensor", most: int) -> tuple[Example, ...]:
        places = where.nonzero().flatten()
        return tuple(shown(places[order[places].argsort(stable=True)][:most].tolist()))

    per_class = [first(truth == c, torch.arange(len(truth)), PER_CLASS) for c in range(len(classes))[:MOST_CLASSES]]
    margins = top.values[:, 0] - top.values[:, -1]
    return Examples(
        label,
        tuple(filter(None, per_class)),
        first((said != truth) & (truth >= 0), -sure, MOST_SHOWN),
        first(truth >= 0, margins, MOST_SHOWN),
        len(index),
        len(test.labels),
        len(classes),
    )


def picture(pixels: "Tensor") -> str:
    """Return an image [C, H, W] as an address that holds it whole."""
    from PIL import Image

    channels = pixels if len(pixels) == 3 else pixels[:1].expand(3, -1, -1)
    image = Image.fromarray(channels.permute(1, 2, 0).cpu().contiguous().numpy())
    image = image if len(pixels) == 3 else image.convert("L")
    image.thumbnail((LARGEST, LARGEST))
    kind, file = "png" if max(image.size) <= SHARP else "jpeg", io.BytesIO()
    image.save(file, kind, **({"quality": 85} if kind == "jpeg" else {"optimize": True}))
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
