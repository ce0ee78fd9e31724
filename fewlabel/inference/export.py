"""Exports: a run's model as a file for use elsewhere, with a model card beside it."""

import hashlib
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor, nn

from fewlabel.core import storage
from fewlabel.core.errors import BadInput, install
from fewlabel.engine import record
from fewlabel.inference.model_card import ONNX, SAFETENSORS, about_model, describe
from fewlabel.inference.predict import StoredModel
from fewlabel.inference.prior import Prior
from fewlabel.learn.calibration import calibrated
from fewlabel.report.runs import Run

CARD = "MODEL_CARD.md"
OPSET = 18


class Exported(NamedTuple):
    """The files that were written."""

    model: Path
    card: Path


class PixelsToProbabilities(nn.Module):
    """A network with its preprocessing, its calibration and a softmax."""

    mean: Tensor
    std: Tensor
    shift: Tensor | None

    def __init__(self, model: StoredModel) -> None:
        super().__init__()
        self.network = model.network
        self.register_buffer("mean", torch.tensor(model.card.mean).view(-1, 1, 1))
        self.register_buffer("std", torch.tensor(model.card.std).view(-1, 1, 1))
        self.temperature = model.card.temperature
        self.register_buffer("shift", None if model.card.shift is None else torch.tensor(model.card.shift))

    def forward(self, images: Tensor) -> Tensor:
        x = (images.to(torch.float32) / 255 - self.mean) / self.std
        logits: Tensor = self.network(x)
        return calibrated(logits, self.temperature, self.shift).softmax(1)


def export_model(
    run: Path, to: str, out: Path | None = None, *, weights: str | None = None, prior: Prior | None = None
) -> Exported:
    """Write a run's model and its card, by default to RUN/export, over an earlier export."""
    if to not in FORMATS:
        raise BadInput(f"a model is exported to {' or '.join(FORMATS)}, not to '{to}'")
    model = StoredModel.open(run, weights, prior)
    folder = run / "export" if out is None else out
    if record.is_run(folder):
        raise BadInput(f"{folder} is a run, whose own files would be written over; choose another --out")
    about = asdict(model.card) | {
        "version": version("fewlabel"),
        "experiment_digest": hashlib.sha256((run / record.EXPERIMENT).read_bytes()).hexdigest(),
    }
    name, convert = FORMATS[to]
    files = [file for file, _ in FORMATS.values() if file == name or (folder / file).exists()]
    if len(files) > 1 and about_model(model.card) not in card_in(folder):
        raise BadInput(f"{folder} holds an export with other weights or another prior; choose another --out")
    data = convert(model, about)
    text = "\n".join(describe(Run(run), model, about, files))
    storage.make_folder(folder)
    written = Exported(folder / name, folder / CARD)
    storage.write(written.model, data)
    storage.write(written.card, text.encode())
    return written


def card_in(folder: Path) -> str:
    """Return the text of an earlier export's card."""
    path = folder / CARD
    return path.read_text() if path.exists() else ""


def to_onnx(model: StoredModel, about: dict[str, Any]) -> bytes:
    """Return the network as ONNX. It takes any number of uint8 images and returns probabilities."""
    try:
        import onnx
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise BadInput(f"ONNX files need {error.name}, which is not here: {install('export')}") from None
    if not model.complete:
        raise BadInput(
            "this model lacks BatchNorm's statistics, which stayed at the sites (model.buffers = 'local'), so it "
            "cannot be an ONNX file; --to safetensors exports it as it is"
        )
    card = model.card
    example = torch.zeros(2, card.channels, card.image_size, card.image_size, dtype=torch.uint8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                PixelsToProbabilities(model).eval(),
                (example,),
                input_names=["images"],
                output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim("n")},),
                opset_version=OPSET,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # an exporter may raise anything about somebody's network
        reason = str(error).strip().partition("\n")[0]
        raise BadInput(f"the network '{card.network['name']}' cannot be written as ONNX: {reason}") from error
    proto = program.model_proto
    graph = proto.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]  # they name the source files of each node
    onnx.helper.set_model_props(proto, {key: json.dumps(value) for key, value in about.items()})
    data: bytes = proto.SerializeToString()
    return data


def to_safetensors(model: StoredModel, about: dict[str, Any]) -> bytes:
    """Return the weights as safetensors, with the card in the metadata."""
    return save(model.weights, {"fewlabel": json.dumps(about)})


# The formats by name: the name of the file, and the function that writes it.
FORMATS: dict[str, tuple[str, Callable[[StoredModel, dict[str, Any]], bytes]]] = {
    "onnx": (ONNX, to_onnx),
    "safetensors": (SAFETENSORS, to_safetensors),
}
