"""The model card of an exported model: where it comes from, how good it is, how to use it, and its limits."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import tomli_w

from fewlabel.core.described import leaves
from fewlabel.core.errors import BadInput
from fewlabel.data.own.layouts import list_images
from fewlabel.data.own.listing import KINDS, counted
from fewlabel.data.partition import Partition
from fewlabel.data.splits import DRAWN, SPLITS
from fewlabel.engine import record
from fewlabel.engine.card import Card
from fewlabel.experiment import Data, plain_method
from fewlabel.inference.predict import StoredModel, about_choice
from fewlabel.report.runs import METRICS, Run
from fewlabel.report.tables import Table, percent

ONNX, SAFETENSORS = "model.onnx", record.MODEL  # the names of exported files
MANY = 1000  # with fewer test images, the card says what one more error means


def describe(run: Run, model: StoredModel, about: dict[str, Any], files: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the card. `files` are the model's files beside it."""
    card, experiment = model.card, run.experiment
    size, count = card.image_size, sum(value.numel() for value in model.network.parameters())
    yield f"# {run.name} on {experiment.data.name}\n"
    yield (
        f"A classifier of {card.kind} images of {size}x{size} pixels into {len(card.classes)} classes: "
        f"{', '.join(card.classes)}. Network `{card.network['name']}`, {count:,} parameters; FewLabel "
        f"{about['version']}, {record.EXPERIMENT} with SHA-256 `{about['experiment_digest']}`.\n"
    )
    yield about_model(card) + "\n"
    yield "## What it must not be used for\n"
    yield from (f"- {sentence}" for sentence in limits(run, card))
    yield "\n## How to use it\n"
    yield from (f"- {sentence}" for sentence in usage(model, files))
    yield "\n## Data and labels\n"
    yield from (f"- {sentence}" for sentence in data_and_labels(run, card))
    yield "\n## Method\n"
    yield (
        f"{run.name}, {experiment.rounds} rounds, seed {run.seed}. What leaves a site: "
        f"{leaves(experiment.method) or 'its author does not say.'}\n\n"
        f"```toml\n{tomli_w.dumps({'method': plain_method(experiment.method)})}```\n"
    )
    yield "## Results\n"
    yield from results(run, card)


def limits(run: Run, card: Card) -> Iterator[str]:
    """Yield what the model must not be used for."""
    yield "It is not a medical device. Do not base a diagnosis, a treatment or any decision about a person on it."
    yield (
        "Use it only for images like those it was trained on. Other devices, places, people or ways to take an image "
        "can make it wrong without a sign. It names one of its classes for any image, even an image of something else."
    )
    if card.temperature is None:
        yield "Its probabilities are not calibrated: 0.9 does not mean that nine of ten are right."
    test = (shipped_line(run, card) or {}).get("test")
    weak = [
        f"{name} ({'no test images' if recall is None else f'{percent(recall)}%'})"
        for name, recall in zip(card.classes, test["recall_per_class"] if test else [], strict=bool(test))
        if recall is None or recall < 0.5
    ]
    if weak:
        yield f"It misses at least half of the test images of some classes. Their recall: {', '.join(weak)}."
    if not test:
        yield "Nobody has measured it."


def about_model(card: Card) -> str:
    """Say whose weights these are, which classes the model expects, and what its probabilities mean."""
    if card.prior is not None:
        shares = ", ".join(f"{name} {percent(share)}%" for name, share in zip(card.classes, card.prior, strict=True))
        classes = f"It expects classes in these shares: {shares}."
    elif card.balanced:
        classes = (
            "It expects all classes to be equally frequent, because it was trained so (train.balance). Where they are "
            "not, export it again with --prior."
        )
    else:
        classes = "It expects classes to be as frequent as among the labels that it was trained with."
    calibrated = (
        "Its probabilities are not calibrated: no validation labels could tell how."
        if card.temperature is None
        else f"Its probabilities are calibrated on validation labels, by a temperature of {card.temperature:g}."
    )
    private = (
        f" Each image of a site is protected by differential privacy, with epsilon {card.privacy['epsilon']:g} and "
        f"delta {card.privacy['delta']:g} over all rounds."
        if card.privacy is not None
        else ""
    )
    return f"The weights are those of {about_choice(card)}. {classes} {calibrated}{private}"


def shipped_line(run: Run, card: Card) -> record.Line | None:
    """Return the line of the round whose model this is."""
    return run.last if card.chosen == "last" else run.chosen


def usage(model: StoredModel, files: Sequence[str]) -> Iterator[str]:
    """Yield what goes in, what comes out, and how to prepare images."""
    card = model.card
    shape = f"[N, {card.channels}, {card.image_size}, {card.image_size}]"
    channels = {1: ", grey", 3: ", red, green, blue"}.get(card.channels, "")
    mean, std = ([round(value, 6) for value in values] for values in (card.mean, card.std))
    yield f"Images are uint8 {shape}{channels}, any N, values 0 to 255."
    if ONNX in files:
        yield (
            f"`{ONNX}`: the input `images` takes such images; the output `probabilities` is float32 [N, "
            f"{len(card.classes)}], in the order of the classes above. Normalisation is inside."
        )
    if SAFETENSORS in files:
        yield (
            f"`{SAFETENSORS}`: `fewlabel predict {SAFETENSORS} images/` prepares images itself. In other programs, "
            f"give the network (x / 255 - mean) / std of such images, with mean {mean} and std {std}; it gives logits"
            f"{after_logits(card)}."
        )
    yield (
        "Images of another size are squeezed into the square, not cropped, by bilinear interpolation with "
        "antialiasing, as by Pillow's `resize`."
    )
    if card.scale:
        how, (low, high) = next(iter(card.scale.items()))
        values = f"{low:g} becomes 0 and {high:g} becomes 255"
        window = f"the window has centre {low:g} and width {high:g}"
        yield f"In images with more than eight bits, {values if how == 'values' else window}."
    if not model.complete:
        yield (
            "BatchNorm's statistics stayed at the sites (model.buffers = 'local'). Compute them over the images that "
            "the model is used on."
        )


def after_logits(card: Card) -> str:
    """Say what to do with logits before the softmax."""
    steps = [] if card.temperature is None else [f"divide them by {card.temperature:g}"]
    if card.shift is not None:
        steps.append(f"add {[round(value, 4) for value in card.shift]}")
    return f" ({', then '.join(steps)} before the softmax)" if steps else ""


def data_and_labels(run: Run, card: Card) -> Iterator[str]:
    """Yield what the model was trained on, and who had labels."""
    experiment, path = run.experiment, run.directory / record.PARTITION
    if not path.exists():
        yield "The data stayed at the sites. Who held what is not known here."
        return
    dealt, content = Partition.load(path), json.loads(path.read_text())
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
        f"{sum(sizes) - labeled:,} images of clients have none"
        f"{f'; the server has {len(dealt.server):,}' if len(dealt.server) else ''}."
    )
    if experiment.labels.noise:
        yield f"{percent(experiment.labels.noise)}% of the labels are wrong on purpose (labels.noise)."
    counts = [sum(column) for column in zip(*(client["classes"] for client in content["clients"]), strict=True)]
    yield "Clients' images by class, as far as known: " + ", ".join(
        f"{name} {count:,}" for name, count in zip(card.classes, counts, strict=True)
    )


def split_of(data: Data) -> str:
    """Say how images were split into training, validation and test."""
    split: str = data.split
    if split == "published":
        if data.name not in KINDS:
            return f"split `{split}`, or if none is published `{DRAWN}`"
        try:
            if list_images(data.name, data.path, data.columns).splits:
                return "with the split that it came with"
        except BadInput:
            return "with the split that it came with, or else a drawn one"  # the data are gone
        split = DRAWN
    train, validation, test = SPLITS[split]
    return f"split drawn: of the labeled images {train}% to train, {validation}% to validate and {test}% to test"


def results(run: Run, card: Card) -> Iterator[str]:
    """Yield the test results of the round whose model this is, of all images and by class."""
    last = shipped_line(run, card)
    if not last or "test" not in last:
        yield "None: no round was measured.\n"
        return
    test = last["test"]
    rows = tuple((words, percent(test.get(key))) for key, words in METRICS.items())
    yield Table(f"Test set, {test['images']:,} images, round {last['round']}, in percent", ("", "all"), rows).markdown()
    if card.prior is not None:
        yield "Measured without the prior that was chosen.\n"
    if 0 < test["images"] < MANY:
        points = f"{100 / test['images']:.1f} points of accuracy"
        yield f"{counted(test['images'], 'test image')}: one more error is {points}.\n"
    yield Table(
        "By class, in percent", ("class", "test images", "recall", "precision", "AUC"), by_class(test, card)
    ).markdown()
    other = run.chosen if card.chosen == "last" else run.last
    if other and other["round"] != last["round"] and "test" in other:
        name, option = ("best on validation", "validation") if card.chosen == "last" else ("last", "last")
        yield (
            f"Round {other['round']} was the {name} ({percent(other['test']['balanced_accuracy'])}% balanced accuracy "
            f"on test). `fewlabel export` takes its model with `--weights {option}`.\n"
        )


def by_class(test: dict[str, Any], card: Card) -> tuple[tuple[str, ...], ...]:
    """Return a row for each class: its name, test images, recall, precision and AUC."""
    if not test["confusion"]:  # from sites, which tell less
        counts = zip(card.classes, test["images_per_class"], test["recall_per_class"], strict=True)
        return tuple(
            (name, f"{count:,}", percent(recall), percent(None), percent(None)) for name, count, recall in counts
        )
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
