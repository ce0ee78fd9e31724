"""Metrics of a classifier from counts. Inputs may be on any device; counts are on the CPU.

They are exact, and made where the test images are. What a site tells of its own test images is in `coarse`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fewlabel.core.errors import BadInput

THRESHOLD = 0.4  # FedIRM's

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Counts:
    """The counts from which metrics are computed."""

    confusion: Tensor  # int64 [C, C]: row = true class, column = predicted class (ties to the lowest)
    above: Tensor  # int64 [C, 2]: images with score_c >= threshold, first those not of class c, then those of class c


def count(scores: Tensor, y: Tensor, *, threshold: float = THRESHOLD) -> Counts:
    """Compare the probabilities `scores` [N, C] with the classes `y` [N]."""
    scores, y = _checked(scores, y)
    classes = scores.shape[1]
    confusion = torch.bincount(y * classes + scores.argmax(1), minlength=classes**2).view(classes, classes)
    positive, over = y[:, None] == torch.arange(classes), scores >= threshold
    return Counts(confusion, torch.stack([(over & ~positive).sum(0), (over & positive).sum(0)], 1))


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


def metrics(counts: Counts, class_auc: Tensor | None = None) -> Metrics:
    """Return all metrics as fractions, ready for JSON. An undefined metric is None, never NaN.

    `precision`, `recall` (also called sensitivity), `specificity` and `f1` are macro averages over the classes that
    occur in y or among the predictions. 0/0 counts as 0. This is scikit-learn's default with zero_division=0.
    `balanced_accuracy` is the mean recall over the classes that occur in y. `auc` is the mean over the classes that
    have an AUC. The `binary_` metrics are FedIRM's: each class is a separate decision, score >= threshold. Their means
    leave out classes without a positive image (sensitivity) or without a negative image (specificity).
    """
    confusion = counts.confusion.double()
    right, true, predicted = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    images = true.sum()
    rest = images - true
    false_alarms, hits = counts.above.double().unbind(1)
    occurs = true + predicted > 0

    def macro(part: Tensor, whole: Tensor) -> float | None:
        return _mean((part / whole).nan_to_num(0.0)[occurs])

    return {
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
