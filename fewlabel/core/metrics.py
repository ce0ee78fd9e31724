"""Metrics of a classifier from counts that add up, so one machine and many sites measure with the same code.

A site that may not share predictions shares `Counts`. Their sum gives the metrics of all sites together. These are
exact except for the AUC, which comes from histograms and has a bound on its error. Inputs may be on any device; counts
are on the CPU.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from fewlabel.core.errors import BadInput

BINS = 4096
SITE_BINS = 64  # bins of a histogram that leaves a site: fewer, so that it reveals less about single images
MINIMUM = 20  # test images; with fewer, a site sends no counts
PER_CLASS = 5  # images of a class; with fewer, a site leaves the class out of its counts
THRESHOLD = 0.4  # FedIRM's

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """The counts from which metrics are computed. Only counts made with the same threshold may be merged."""

    confusion: Tensor  # int64 [C, C]: row = true class, column = predicted class (ties to the lowest)
    above: Tensor  # int64 [C, 2]: images with score_c >= threshold, first those not of class c, then those of class c
    histogram: Tensor | None = None  # int64 [C, 2, BINS]: scores of each class's negatives and positives, over [0, 1]


def count(scores: Tensor, y: Tensor, *, threshold: float = THRESHOLD, histogram: bool = False) -> Counts:
    """Compare the probabilities `scores` [N, C] with the classes `y` [N]. A pooled AUC needs the histogram."""
    scores, y = _checked(scores, y)
    classes = scores.shape[1]
    confusion = torch.bincount(y * classes + scores.argmax(1), minlength=classes**2).view(classes, classes)
    positive, over = y[:, None] == torch.arange(classes), scores >= threshold
    above = torch.stack([(over & ~positive).sum(0), (over & positive).sum(0)], 1)
    if not histogram:
        return Counts(confusion, above)
    # Clamping keeps the order of the scores, so a rounding error beyond [0, 1] cannot break the bound.
    bins = (scores * BINS).long().clamp(0, BINS - 1)
    cells = (2 * torch.arange(classes) + positive.long()) * BINS + bins
    return Counts(confusion, above, torch.bincount(cells.flatten(), minlength=2 * classes * BINS).view(-1, 2, BINS))


def shared(scores: Tensor, y: Tensor) -> Counts:
    """Return the counts that a site may send: without rare classes, and with scores only in coarse intervals."""
    shown = common(y, scores.shape[1])
    counts = count(scores[shown], y[shown], histogram=True)
    assert counts.histogram is not None
    return replace(counts, histogram=counts.histogram.view(-1, 2, SITE_BINS, BINS // SITE_BINS).sum(3))


def common(y: Tensor, classes: int) -> Tensor:
    """Return a mask of the images whose class has enough images."""
    return y.bincount(minlength=classes)[y] >= PER_CLASS


def check_shared(counts: Counts, classes: int) -> None:
    """Raise BadInput if these cannot be a site's counts."""
    parts = {"confusion": counts.confusion, "above": counts.above, "histogram": counts.histogram}
    shapes = {"confusion": (classes, classes), "above": (classes, 2), "histogram": (classes, 2, SITE_BINS)}
    for name, part in parts.items():
        if part is None or part.shape != shapes[name] or part.dtype != torch.int64 or not part.ge(0).all():
            raise BadInput(f"its counts are refused: {name} must be {list(shapes[name])} whole numbers, none below 0")
    true = counts.confusion.sum(1)
    rest = true.sum() - true
    sizes = torch.stack([rest, true], 1)
    assert counts.histogram is not None
    if true.sum() < MINIMUM or not counts.histogram.sum(2).equal(sizes) or not counts.above.le(sizes).all():
        raise BadInput(f"its counts are refused: they are not those of one set of {MINIMUM} images or more")


def merge(parts: Iterable[Counts]) -> Counts:
    """Add up the counts of all parts."""
    parts = list(parts)
    histograms = [part.histogram for part in parts if part.histogram is not None]
    if len(histograms) not in (0, len(parts)):
        raise BadInput("Only some of the counts to merge hold a histogram; count with histogram=True everywhere.")
    confusion, above = _total(part.confusion for part in parts), _total(part.above for part in parts)
    return Counts(confusion, above, _total(histograms) if histograms else None)


def auc(scores: Tensor, y: Tensor) -> Tensor:
    """Return the exact one-vs-rest AUC of each class, float64 [C].

    Ties count one half. A class without a positive or a negative image has NaN.
    """
    scores, y = _checked(scores, y)
    ordered = scores.T.contiguous().sort().values
    positives = y.bincount(minlength=scores.shape[1])
    own = torch.split(scores[torch.arange(len(y)), y][y.argsort()], positives.tolist())  # by class
    # An image's rank is the mean of the ranks that its ties share. Twice that is a whole number, so the sum is exact.
    twice_ranks = [
        torch.searchsorted(all_, some) + torch.searchsorted(all_, some, right=True) + 1
        for all_, some in zip(ordered, own, strict=True)
    ]
    twice_won = torch.stack([ranks.sum() for ranks in twice_ranks]) - positives * (positives + 1)
    return twice_won.double() / (2 * positives * (len(y) - positives))


def pooled_auc(counts: Counts) -> tuple[Tensor, Tensor]:
    """Return the AUC of each class from histograms, and its largest error.

    This error is half the share of (positive, negative) pairs that fall into one bin.
    """
    if counts.histogram is None:
        raise BadInput("A pooled AUC needs histograms; count with histogram=True.")
    negative, positive = counts.histogram.double().unbind(1)
    pairs = negative.sum(1) * positive.sum(1)
    halves = negative * positive / 2
    below = negative.cumsum(1) - negative
    return (positive * below + halves).sum(1) / pairs, halves.sum(1) / pairs


def metrics(counts: Counts, class_auc: Tensor | None = None, auc_bound: Tensor | None = None) -> Metrics:
    """Return all metrics as fractions, ready for JSON. An undefined metric is None, never NaN.

    `precision`, `recall` (also called sensitivity), `specificity` and `f1` are macro averages over the classes that
    occur in y or among the predictions. 0/0 counts as 0. This is scikit-learn's default with zero_division=0.
    `balanced_accuracy` is the mean recall over the classes that occur in y. `auc` is the mean over the classes that
    have an AUC. The `binary_` metrics are FedIRM's: each class is a separate decision, score >= threshold. Their means
    leave out classes without a positive image (sensitivity) or without a negative image (specificity). `auc_bound` is
    the mean of the bounds. It exists only if the AUC was pooled.
    """
    confusion = counts.confusion.double()
    right, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    images = true.sum()
    rest = images - true
    false_alarms, hits = counts.above.double().unbind(1)
    occurs = true + predicted > 0

    def macro(part: Tensor, whole: Tensor) -> float | None:
        return _mean((part / whole).nan_to_num(0.0)[occurs])

    result: Metrics = {
        "images": int(images),
        "accuracy": _mean(right.sum() / images),
        "balanced_accuracy": _mean(right / true),
        "precision": macro(right, predicted),
        "recall": macro(right, true),
        "specificity": macro(rest - (predicted - right), rest),
        "f1": macro(2 * right, true + predicted),
        "auc": None if class_auc is None else _mean(class_auc),
        "recall_per_class": _listed(right / true),
        "auc_per_class": None if class_auc is None else _listed(class_auc),
        "binary_accuracy": _mean((hits + rest - false_alarms) / images),
        "binary_sensitivity": _mean(hits / true),
        "binary_specificity": _mean((rest - false_alarms) / rest),
        "binary_f1": _mean((2 * hits / (hits + false_alarms + true))[true > 0]),
        "confusion": counts.confusion.tolist(),
    }
    return result if auc_bound is None else result | {"auc_bound": _mean(auc_bound)}


def measure(scores: Tensor, y: Tensor, threshold: float = THRESHOLD) -> Metrics:
    """Return all metrics, with the exact AUC, from predictions."""
    return metrics(count(scores, y, threshold=threshold), auc(scores, y))


def outputs(model: nn.Module, batches: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the model's logits of each batch in float32. Every module keeps its training flag."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for x in batches:
            # Only around the model: nobody could train on tensors that a loader makes in inference mode and keeps.
            with torch.inference_mode():
                found = model(x).float()
            yield found
    finally:
        for module, training in flags:
            module.training = training


def predict(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    """Return the model's probabilities [N, C] in float32. Every module keeps its training flag."""
    parts = [logits.softmax(1) for logits in outputs(model, batches)]
    if not parts:
        raise BadInput("There is no batch to predict; a set without images needs one batch of length 0.")
    return torch.cat(parts)


AUDITED = ("used", "judged", "correct")


@dataclass(frozen=True)
class Audit:
    """Counts of pseudo-labels, compared from outside with true labels that the method never sees."""

    total: int  # unlabeled images of the clients that took part
    used: Tensor  # int64 [C]: images with each pseudo-label
    judged: Tensor  # int64 [C]: those of them with a known true label
    correct: Tensor  # int64 [C]: those of them whose pseudo-label is right

    def to_json(self) -> dict[str, Any]:
        return {"total": self.total} | {part: getattr(self, part).tolist() for part in AUDITED}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        return cls(int(data["total"]), *(torch.tensor(data[part]) for part in AUDITED))


def audit_metrics(audit: Audit) -> Metrics:
    """Return the share of images with a pseudo-label, and the share of right ones among those with a known label.

    A share is None if there are no such images.
    """
    judged, correct = audit.judged.double(), audit.correct.double()
    return {
        "coverage": _mean(audit.used.double().sum() / audit.total),
        "precision": _mean(correct.sum() / judged.sum()),
        "precision_per_class": _listed(correct / judged),
        "used_per_class": audit.used.tolist(),
    }


def merge_audits(parts: Iterable[Audit]) -> Audit:
    """Add up the audits of all parts."""
    parts = list(parts)
    counts = (_total(getattr(part, name) for part in parts) for name in AUDITED)
    return Audit(sum(part.total for part in parts), *counts)


def _checked(scores: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    scores, y = scores.detach().cpu(), y.detach().cpu()
    if scores.ndim != 2 or scores.shape[1] == 0 or not scores.is_floating_point():
        raise BadInput(f"Scores must be a table of floats, images by classes, not {scores.dtype} {list(scores.shape)}.")
    if not scores.isfinite().all():
        why = "training has probably diverged; lower its learning rate, method.local.lr"
        raise BadInput(f"Scores must be finite, but some are NaN or infinite: {why}.")
    if y.shape != scores.shape[:1] or y.is_floating_point():
        raise BadInput(f"Labels must be {len(scores)} whole numbers, one per image, not {y.dtype} {list(y.shape)}.")
    if y.numel() and not 0 <= int(y.min()) <= int(y.max()) < scores.shape[1]:
        raise BadInput(f"Labels must lie in 0..{scores.shape[1] - 1}, but run from {int(y.min())} to {int(y.max())}.")
    return scores, y.long()


def _total(counts: Iterable[Tensor]) -> Tensor:
    parts = list(counts)
    if len({part.shape for part in parts}) != 1:
        raise BadInput("Counts can be merged only if there are some and all of them have the same classes.")
    return torch.stack(parts).sum(0)


def _mean(values: Tensor) -> float | None:
    return _listed(values.nanmean())[0]  # NaN means undefined, and is left out


def _listed(values: Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.double().flatten().tolist()]
