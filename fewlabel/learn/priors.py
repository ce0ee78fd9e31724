"""How frequent the classes are among images without labels, estimated from predictions."""

import torch
from torch import Tensor


def adapted(p: Tensor, steps: int = 3, smoothing: float = 0.02) -> tuple[Tensor, Tensor]:
    """Return the predictions `p` adapted to the classes of these images, and the estimated share of each class.

    This is EM (Saerens, Latinne and Decaestecker, Neural Computation 2002). A step estimates the shares from the
    predictions so far, `(1 - smoothing) * mean + smoothing / C`, and then weighs `p` by them. It takes for granted that
    the model was trained for equally frequent classes, as it is with a logit-adjusted loss.
    """
    classes = p.shape[1]
    adapted, prior = p, p.new_full((classes,), 1 / classes)
    for _ in range(steps if len(p) else 0):
        prior = (1 - smoothing) * adapted.mean(0) + smoothing / classes
        weighed = p * prior
        adapted = weighed / weighed.sum(1, keepdim=True)
    return adapted, prior


def folds(y: Tensor, number: int) -> Tensor:
    """Return the fold of each label, so that the labels of each class are spread evenly over the folds."""
    fold = torch.empty_like(y)
    fold[y.argsort(stable=True)] = torch.arange(len(y), device=y.device) % number
    return fold


def mistaken(predicted: Tensor, y: Tensor, num_classes: int) -> Tensor:
    """Count how often a label of each class (column) is predicted as each class (row)."""
    return torch.bincount(predicted * num_classes + y, minlength=num_classes**2).view(num_classes, num_classes)


def kappa(mistakes: Tensor) -> float:
    """Return Cohen's kappa of the counts of `mistaken`: how much of what chance gets wrong is right.

    Chance says each class as often as it was said, whatever the label is. Who always says the same class has 0.
    """
    labels = float(mistakes.double().sum()) or 1.0  # less than one, if little of what sites counted counts
    shares = mistakes.double() / labels
    right, chance = float(shares.diag().sum()), float(shares.sum(0) @ shares.sum(1))
    return (right - chance) / (1 - chance) if chance < 1 else 0.0


def explained(predicted: Tensor, mistakes: Tensor, steps: int = 200, smoothing: float = 2.0) -> Tensor:
    """Return the class shares that explain best how often each class is `predicted`, given the `mistakes` of models.

    A share of images with label c is predicted as each class like the labels of class c in `mistakes`, the counts of
    `mistaken`. With few labels of a class that is uncertain, so `smoothing` labels more are counted: as right as labels
    are on average, and otherwise as any class. The shares are found by EM, which makes the predicted shares as likely
    as possible (Saerens, Latinne and Decaestecker, 2002, section 2.3.1; Lipton, Wang and Smola, ICML 2018). Without any
    labels, predictions are taken as right.
    """
    classes, labels = len(predicted), mistakes.double().sum(0)
    right = float(mistakes.diag().sum() / labels.sum()) if labels.any() else 1.0
    usual = torch.full_like(mistakes, (1 - right) / max(classes - 1, 1), dtype=torch.float64).fill_diagonal_(right)
    likely = (mistakes + smoothing * usual) / (labels + smoothing)
    shares = likely.new_full((classes,), 1 / classes)
    for _ in range(steps):
        joint = likely * shares
        shares = predicted.double() @ (joint / joint.sum(1, keepdim=True).clamp_min(1e-12))
    return shares / shares.sum()
