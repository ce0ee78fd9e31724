"""Exports: a run's model for use elsewhere, with a card that says what it was made from and what it is not for."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w
import torch
from safetensors.torch import save
from torch import Tensor, nn

from fewlabel.core import storage
from fewlabel.core.described import leaves
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data.own import listing
from fewlabel.data.own.layouts import list_images
from fewlabel.data.own.listing import counted
from fewlabel.data.partition import Partition
from fewlabel.data.splits import DRAWN, SPLITS
from fewlabel.engine.card import Card
from fewlabel.experiment import Data, plain_method
from fewlabel.inference.predict import FILE, Model, stored
from fewlabel.report.results import METRICS, Result
from fewlabel.report.tables import Table, percent

ONNX = "model.onnx"
CARD = "MODEL_CARD.md"
KINDS = ("onnx", "safetensors")
OPSET = 18
MANY = 1000  # test images, of which one decides nothing


class Exported(NamedTuple):
    model: Path
    card: Path


class Whole(nn.Module):
    """A network from pixels to probabilities."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.network = model.network
        self.register_buffer("mean", torch.tensor(model.card.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(model.card.std).view(-1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        x = (images.to(torch.float32) / 255 - self.mean) / self.std
        logits: Tensor = self.network(x)
        return logits.softmax(1)


def export(run: Path, to: str, out: Path | None = None) -> Exported:
    """Writes the last round's model and its card into a directory, by default RUN/export, over an earlier export."""
    if to not in KINDS:
        raise BadInput(f"a model is exported to {' or '.join(KINDS)}, not to '{to}'")
    card, weights = stored(run)
    result = Result(run)
    folder = run / "export" if out is None else out
    if (folder / "experiment.toml").exists():
        raise BadInput(f"{folder} is a run, whose own files would be written over; choose another --out")
    about = asdict(card) | {
        "version": version("fewlabel"),
        "experiment_digest": hashlib.sha256((run / "experiment.toml").read_bytes()).hexdigest(),
    }
    model = Model.open(run)
    data = to_onnx(model, about) if to == "onnx" else save(weights, {"fewlabel": json.dumps(about)})
    name = ONNX if to == "onnx" else FILE
    there = [kind for kind in (ONNX, FILE) if kind == name or (folder / kind).exists()]
    told = "\n".join(described(result, model, about, there))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{folder} cannot be made: {error.strerror}") from None
    written = Exported(folder / name, folder / CARD)
    storage.write(written.model, data)
    storage.write(written.card, told.encode())
    return written


def to_onnx(model: Model, about: dict[str, Any]) -> bytes:
    """The network with its preprocessing: uint8 images in any number to probabilities."""
    try:
        import onnx
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise BadInput(f"ONNX files need {error.name}, which is not here: pip install 'fewlabel[export]'") from None
    if not model.complete:
        raise BadInput(
            "this model lacks BatchNorm's statistics, which stayed at the sites (model.buffers = 'local'), so it makes "
            "no ONNX file; --to safetensors exports it as it is"
        )
    card = model.card
    example = torch.zeros(2, card.channels, card.image_size, card.image_size, dtype=torch.uint8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                Whole(model).eval(),
                (example,),
                input_names=["images"],
                output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim("n")},),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # what an exporter makes of somebody's network is not ours to list
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(f"the network '{card.network['name']}' cannot be written as ONNX: {reason}") from error
    proto = program.model_proto
    graph = proto.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]  # where in whose files each node came from
    onnx.helper.set_model_props(proto, {key: json.dumps(value) for key, value in about.items()})
    data: bytes = proto.SerializeToString()
    return data


# The card


def described(result: Result, model: Model, about: dict[str, Any], there: Sequence[str]) -> Iterator[str]:
    """The card's lines, of the files that are `there` beside it."""
    card, experiment = model.card, result.experiment
    size, count = card.image_size, sum(value.numel() for value in model.network.parameters())
    yield f"# {result.name} on {experiment.data.name}\n"
    yield (
        f"A classifier of {card.kind} images of {size}x{size} pixels into {len(card.classes)} classes: "
        f"{', '.join(card.classes)}. Network `{card.network['name']}`, {count:,} parameters; FewLabel "
        f"{about['version']}, experiment.toml with SHA-256 `{about['experiment_digest']}`.\n"
    )
    yield "## What it must not be used for\n"
    yield from (f"- {sentence}" for sentence in limits(result, card))
    yield "\n## How it is used\n"
    yield from (f"- {sentence}" for sentence in usage(model, there))
    yield "\n## Data and labels\n"
    yield from (f"- {sentence}" for sentence in origin(result, card))
    yield "\n## Method\n"
    yield (
        f"{result.name}, {experiment.rounds} rounds, seed {result.seed}. What leaves a site: "
        f"{leaves(experiment.method) or UNSAID}\n\n"
        f"```toml\n{tomli_w.dumps({'method': plain_method(experiment.method)})}```\n"
    )
    yield "## Results\n"
    yield from measured(result, card)


UNSAID = "its author does not say."


def limits(result: Result, card: Card) -> Iterator[str]:
    yield "It is not a medical device: no diagnosis, treatment or decision about a person may rest on it."
    yield (
        "It is for images like those it was trained on alone: other devices, places, people or ways to take an image "
        "can make it wrong without a sign. It names one of its classes for any image, even one of something else."
    )
    yield "Its probabilities are not calibrated: 0.9 does not mean that nine of ten are right."
    test = (result.last or {}).get("test")
    weak = [
        f"{name} ({'no test images' if recall is None else f'{percent(recall)}%'})"
        for name, recall in zip(card.classes, test["recall_per_class"] if test else [], strict=bool(test))
        if recall is None or recall < 0.5
    ]
    if weak:
        yield f"It misses half of the test images, or more, of some classes; recall: {', '.join(weak)}."
    if not test:
        yield "Nobody has measured it."


def usage(model: Model, there: Sequence[str]) -> Iterator[str]:
    card = model.card
    shape = f"[N, {card.channels}, {card.image_size}, {card.image_size}]"
    channels = {1: ", grey", 3: ", red, green, blue"}.get(card.channels, "")
    mean, std = ([round(value, 6) for value in values] for values in (card.mean, card.std))
    yield f"Images are uint8 {shape}{channels}, any N, values 0 to 255."
    if ONNX in there:
        yield (
            f"`{ONNX}`: input `images`, such images; output `probabilities`, float32 [N, {len(card.classes)}], in the "
            "order of the classes above. Normalisation is inside."
        )
    if FILE in there:
        yield (
            f"`{FILE}`: `fewlabel predict {FILE} images/` prepares images by itself. Elsewhere, the network takes "
            f"(x / 255 - mean) / std of such images, with mean {mean} and std {std}, and gives logits."
        )
    yield (
        "Images of another size are squeezed into the square by bilinear interpolation with antialiasing, as by "
        "Pillow's `resize`, not cropped."
    )
    if card.scale:
        how, (low, high) = next(iter(card.scale.items()))
        told = (
            f"{low:g} is 0 and {high:g} is 255" if how == "values" else f"the window has centre {low:g}, width {high:g}"
        )
        yield f"Of images with more than eight bits, {told}."
    if not model.complete:
        yield (
            "BatchNorm's statistics stayed at the sites (model.buffers = 'local'): they are to be computed over the "
            "images that the model is used on."
        )


def origin(result: Result, card: Card) -> Iterator[str]:
    experiment, path = result.experiment, result.directory / "partition.json"
    if not path.exists():
        yield "Data lay at the sites, and who held what is not known here."
        return
    dealt, told = Partition.load(path), json.loads(path.read_text())
    yield f"Data set `{experiment.data.name}`, digest `{dealt.data}`, {split_of(experiment.data)}."
    sizes = [len(share.images) for share in dealt.shares]
    yield (
        f"{len(sizes)} clients with {min(sizes):,} to {max(sizes):,} images each, dealt out by "
        f"`{experiment.clients.partition}`; partition `{dealt.checksum}`."
    )
    having = [share for share in dealt.shares if len(share.labeled)]
    labeled = sum(len(share.labeled) for share in having)
    yield (
        f"Labels at {experiment.labels.at}: {len(having)} of {len(sizes)} clients have labels, {labeled:,} in all; "
        f"{sum(sizes) - labeled:,} images of clients are without"
        f"{f'; the server has {len(dealt.server):,}' if len(dealt.server) else ''}."
    )
    if experiment.labels.noise:
        yield f"{percent(experiment.labels.noise)}% of the labels are wrong on purpose (labels.noise)."
    counts = [sum(column) for column in zip(*(client["classes"] for client in told["clients"]), strict=True)]
    yield "Clients' images by class, as far as known: " + ", ".join(
        f"{name} {count:,}" for name, count in zip(card.classes, counts, strict=True)
    )


def split_of(data: Data) -> str:
    """How it was decided which images train, validate and test."""
    split: str = data.split
    if split == "published":
        if data.name not in listing.KINDS:
            return f"split `{split}`, or where none is published `{DRAWN}`"
        try:
            if list_images(data.name, data.path, data.columns).splits:
                return "with the split that it came with"
        except BadInput:
            return "with the split that it came with, or else a drawn one"  # it is no longer there to be asked
        split = DRAWN
    train, validation, test = SPLITS[split]
    return f"split drawn: of the labeled images {train}% to train, {validation}% to validate and {test}% to test"


def measured(result: Result, card: Card) -> Iterator[str]:
    last, chosen = result.last, result.chosen
    if not last or "test" not in last:
        yield "None: no round was measured.\n"
        return
    test = last["test"]
    rows = tuple((words, percent(test.get(key))) for key, words in METRICS.items())
    yield Table(f"Test set, {test['images']:,} images, round {last['round']}, in percent", ("", "all"), rows).markdown()
    if 0 < test["images"] < MANY:
        points = f"{100 / test['images']:.1f} points of accuracy"
        yield f"{counted(test['images'], 'test image')}: one more error is {points}.\n"
    yield Table(
        "By class, in percent", ("class", "test images", "recall", "precision", "AUC"), by_class(test, card)
    ).markdown()
    if chosen and chosen["round"] != last["round"]:
        yield (
            f"On validation, round {chosen['round']} was the best ({percent(chosen['test']['accuracy'])}% accuracy on "
            "test); this is the model of the last round, the only one that a run keeps.\n"
        )


def by_class(test: dict[str, Any], card: Card) -> tuple[tuple[str, ...], ...]:
    confusion: Sequence[Sequence[int]] = test["confusion"]
    named = [sum(column) for column in zip(*confusion, strict=True)]
    aucs = test["auc_per_class"] or [None] * len(card.classes)
    return tuple(
        (
            name,
            f"{sum(confusion[n]):,}",
            percent(test["recall_per_class"][n]),
            percent(confusion[n][n] / named[n] if named[n] else None),
            percent(aucs[n]),
        )
        for n, name in enumerate(card.classes)
    )
