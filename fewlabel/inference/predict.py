"""Predictions: the classes that a run's model gives to images, prepared like those it was trained on."""

import csv
import glob
import io
import json
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from fewlabel import networks
from fewlabel.core import metrics, storage, tree
from fewlabel.core.errors import BadInput, FewLabelError, StorageError
from fewlabel.core.federation import batch_statistics
from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree
from fewlabel.data import pictures
from fewlabel.data.datasets import recolour, resize
from fewlabel.data.images import Images
from fewlabel.data.npz import npz_arrays, npz_images
from fewlabel.data.own.layouts import files_below, is_image
from fewlabel.data.own.listing import counted
from fewlabel.data.pictures import Unreadable
from fewlabel.engine import record
from fewlabel.engine.card import Card
from fewlabel.inference.prior import Prior, with_prior
from fewlabel.learn.calibration import calibrated
from fewlabel.report.runs import Run

UNSURE_BELOW = 0.8
BATCH = 64
MODELS = {"last": record.MODEL, "validation": record.CHOSEN_MODEL}  # the models of a run
Progress = Callable[[int, int], None]  # files read, and all of them


class StoredModel(NamedTuple):
    """A stored model, ready for use."""

    card: Card
    weights: Tree  # as stored
    network: nn.Module
    complete: bool  # False if BatchNorm's statistics stayed at the sites

    @classmethod
    def open(cls, run: Path, chosen: str | None = None, prior: Prior | None = None) -> Self:
        """Open a model of a run, in the directory of an export, or in a file. It may expect classes as in a prior."""
        card, weights = read_model(run, chosen)
        card = with_prior(card, prior, run)
        with Rng("scratch").scope():
            network = networks.build(
                in_channels=card.channels, num_classes=len(card.classes), image_size=card.image_size, **card.network
            )
        try:
            network.load_state_dict(tree.untrained(network) | weights)
        except RuntimeError:
            name = card.network["name"]
            raise BadInput(
                f"the weights in {run} are not of the network '{name}' as it is now; undo its change"
            ) from None
        return cls(card, weights, network.eval(), not tree.statistics(tree.of(network)).keys() - weights.keys())

    def probabilities(self, batches: Iterable[Tensor]) -> Tensor:
        """Return the probability of each class for images [N, C], calibrated and with the chosen prior."""
        shift = None if self.card.shift is None else torch.tensor(self.card.shift)
        parts = metrics.outputs(self.network, batches)
        return torch.cat([calibrated(logits, self.card.temperature, shift).softmax(1) for logits in parts])


def read_model(run: Path, chosen: str | None = None) -> tuple[Card, Tree]:
    """Read the card and the weights of a model. `chosen` says which of a run's models: "last" or "validation"."""
    if chosen not in (None, *MODELS):
        raise BadInput(f"weights are {' or '.join(MODELS)}, not '{chosen}'")
    path = run if run.is_file() else run / MODELS[chosen or "last"]
    if not path.is_file():
        raise BadInput(why_no_model(run, chosen or "last"))
    try:
        with safe_open(path, "pt") as file:
            content = json.loads((file.metadata() or {}).get("fewlabel", "{}"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise StorageError(f"{path} is not a model that can be read: {error}") from None
    parts = [part for part in fields(Card) if part.name in content or part.default is MISSING]
    if missing := [part.name for part in parts if part.name not in content]:
        raise StorageError(
            f"{path} does not say its {missing[0]}, as FewLabel's models do; if an earlier version wrote it, delete "
            f"the run's {record.SUMMARY} and resume the run, which writes the model anew"
        )
    card = Card(**{part.name: content[part.name] for part in parts})
    if chosen not in (None, card.chosen):
        raise BadInput(f"{path} is the model of {about_choice(card)}; give the run's directory to choose another")
    return card, weights


def about_choice(card: Card) -> str:
    """Say whose weights a model has."""
    number = "" if card.round is None else f" {card.round}"
    if card.chosen == "last":
        return f"the last round{f' ({card.round})' if number else ''}"
    return f"round{number}, which had the best balanced accuracy on validation"


def why_no_model(run: Path, chosen: str) -> str:
    """Say why a directory has no model."""
    if not run.exists():
        return f"there is no {run}; give the directory of a run"
    if not record.is_run(run) and (several := record.runs_in(run)):
        return f"{run} holds {counted(len(several), 'run')}; give one of them, such as {several[0]}"
    found = Run(run)
    if chosen != "last" and (run / record.MODEL).exists():
        why = "it was made by FewLabel 0.1, which did not keep them" if found.chosen else "it has no validation images"
        return f"{run} has no weights that validation chose: {why}; use --weights last"
    if found.finished:
        return f"{run} has no model: {found.name} shares none, each of its clients keeps its own"
    resume = f"fewlabel run --resume {shlex.quote(str(run))}"
    return f"{run} is {found.status}, and its model comes with the last; finish it by: {resume}"


def image_files(images: Iterable[str | Path]) -> Iterator[Path]:
    """Yield the files that are named, that lie in folders at any depth, or that match a pattern such as '*.png'."""
    for given in images:
        path = Path(given).expanduser()
        if path.is_dir():
            inside = [file for file in files_below(path) if is_image(file, "folder") or is_npz(file)]
            if not inside:
                raise BadInput(f"there are no images in {path}")
            yield from inside
        elif not path.exists() and glob.has_magic(str(path)):
            matches = sorted(glob.glob(str(path), recursive=True))
            if not matches:
                raise BadInput(f"no file matches {path}")
            yield from image_files(matches)
        else:
            yield path


def is_npz(file: Path) -> bool:
    return file.suffix.lower() == ".npz"


@dataclass
class Reader:
    """Reads images for a model, some at a time. It leaves out what cannot be read, and remembers why."""

    card: Card
    files: Sequence[Path]
    progress: Progress = lambda done, total: None
    names: list[str] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    recoloured: int = 0

    def batches(self) -> Iterator[Tensor]:
        """Yield batches, normalised as in training. BatchNorm needs at least two images in each, if there are two."""
        kept: list[np.ndarray] = []
        for pixels in self.pixels():
            kept.append(pixels)
            if len(kept) >= BATCH + 2:
                yield self.normalised(kept[:BATCH])
                del kept[:BATCH]
        if kept:
            yield self.normalised(kept)

    def normalised(self, pixels: Sequence[np.ndarray]) -> Tensor:
        images = Images(torch.from_numpy(np.stack(pixels)), tuple(self.card.mean), tuple(self.card.std))
        return images.view(torch.arange(len(pixels)), "plain", torch.Generator())

    def pixels(self) -> Iterator[np.ndarray]:
        """Yield each image as uint8 [C, H, W], with the model's size and channels."""
        for number, file in enumerate(self.files, 1):
            try:
                for name, image in self.arrays(file) if is_npz(file) else [(str(file), self.picture(file))]:
                    pixels = recolour(resize(image[None], self.card.image_size), self.card.channels)[0]
                    self.names.append(name)
                    self.recoloured += len(image) != self.card.channels
                    yield pixels
            except (Unreadable, FewLabelError) as error:
                self.unreadable[str(file)] = str(error)
            self.progress(number, len(self.files))

    def picture(self, file: Path) -> np.ndarray:
        about = pictures.header(file)
        if about.values and "values" not in self.card.scale:
            raise Unreadable("it has more than eight bits, and the model was trained on images of eight")
        return pictures.read(file, about.colour, size=self.card.image_size, **self.card.scale)

    def arrays(self, file: Path) -> Iterator[tuple[str, np.ndarray]]:
        with pictures.opening(file), npz_arrays(file) as arrays:
            there = arrays.files
        keys = [key for key in there if key.endswith("images")]
        if not keys:
            raise Unreadable(f"it has no images, as in train_images, but {', '.join(there) or 'nothing'}")
        for key in keys:
            images = (image for some in npz_images(file, key, 0) for image in some)
            yield from ((f"{file}:{key}[{row}]", image) for row, image in enumerate(images))


class Answer(NamedTuple):
    """The prediction for one image."""

    file: str
    label: str
    probability: float
    unsure: bool
    second: str  # the next best class
    second_probability: float


@dataclass(frozen=True)
class Predictions:
    """Probabilities of each class for each image, in the order of the images."""

    classes: tuple[str, ...]
    files: tuple[str, ...]
    probabilities: np.ndarray  # float32 [N, C]
    unreadable: dict[str, str]  # by name, with the reason
    unsure_below: float
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.files)

    @cached_property
    def answers(self) -> list[Answer]:
        order = np.argsort(-self.probabilities, axis=1, kind="stable")[:, :2].tolist()  # ties to the lowest
        return [
            Answer(
                file, self.classes[a], float(row[a]), bool(row[a] < self.unsure_below), self.classes[b], float(row[b])
            )
            for file, row, (a, b) in zip(self.files, self.probabilities, order, strict=True)
        ]

    def to_json(self) -> dict[str, Any]:
        images = [
            {
                "file": answer.file,
                "class": answer.label,
                "probability": answer.probability,
                "unsure": answer.unsure,
                "probabilities": dict(zip(self.classes, row, strict=True)),
            }
            for answer, row in zip(self.answers, self.probabilities.tolist(), strict=True)
        ]
        found = {"classes": self.classes, "unsure_below": self.unsure_below, "images": images}
        return found | {"unreadable": self.unreadable, "notes": self.notes}

    def csv(self, path: Path | str) -> Path:
        """Write a row for each image, with a column for each class. Return the path."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", "class", "probability", "unsure", *self.classes])
        for answer, row in zip(self.answers, self.probabilities.tolist(), strict=True):
            numbers = [f"{value:.6f}" for value in row]
            writer.writerow([answer.file, answer.label, f"{answer.probability:.6f}", "yes" * answer.unsure, *numbers])
        storage.write(Path(path), text.getvalue().encode("utf-8", "surrogateescape"))
        return Path(path)


def predict_files(
    run: Path,
    images: Iterable[str | Path],
    unsure_below: float = UNSURE_BELOW,
    progress: Progress | None = None,
    *,
    weights: str | None = None,
    prior: Prior | None = None,
) -> Predictions:
    """Predict the classes of images with a run's model: the last round's, or the one that validation chose."""
    if not 0 <= unsure_below <= 1:
        raise BadInput(f"unsure_below must be a probability from 0 to 1, found {unsure_below}")
    model = StoredModel.open(run, weights, prior)
    card = model.card
    if card.channels not in (1, 3):
        raise BadInput(f"the model takes images of {card.channels} channels, and files have 1 or 3")
    files = list(dict.fromkeys(image_files(images)))
    reader, notes = Reader(card, files, progress or (lambda done, total: None)), []
    if not model.complete:
        first = Reader(card, files)
        batch_statistics(model.network, large_batches(first))
        notes.append(
            "the model has no BatchNorm statistics, which stayed at the sites (model.buffers = 'local'); those of "
            f"these {len(first.names)} images are used, so give many images of one site at a time"
        )
    found = model.probabilities(batches_of(reader))
    if not found.isfinite().all():
        raise BadInput(f"the model in {run} has diverged: its probabilities are no numbers")
    if reader.recoloured:
        notes.append(f"converted {reader.recoloured} of {len(reader.names)} images to {card.kind}, as the model needs")
    return Predictions(
        tuple(card.classes), tuple(reader.names), found.numpy(), reader.unreadable, unsure_below, tuple(notes)
    )


def batches_of(reader: Reader) -> Iterator[Tensor]:
    """Yield a reader's batches, or raise if it could read nothing."""
    yield from reader.batches()
    if not reader.names:
        (file, reason), *_ = reader.unreadable.items() or [("", "none was given")]
        raise BadInput(f"none of {counted(len(reader.files), 'file')} can be read; {file}: {reason}")


def large_batches(reader: Reader) -> Iterator[Tensor]:
    """Yield a reader's batches, or raise if there is only one image."""
    for batch in batches_of(reader):
        if len(batch) == 1:
            raise BadInput("the model needs the statistics of several images (model.buffers = 'local'); give more")
        yield batch
