"""FedIRM's relations among classes, and how sure a network is of what it says."""

import math

import torch
from torch import Tensor, nn

from fewlabel.learn.functional import Headed


def class_sums(outputs: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """The sums of a network's outputs over the images of each class, and how many images that are."""
    members = torch.nn.functional.one_hot(y, num_classes).to(outputs.dtype)
    return members.T @ outputs, members.sum(0)


def relation(sums: Tensor, counts: Tensor, temperature: float) -> Tensor:
    """FedIRM eq. 2 (5 at unlabeled clients) and 3: the softened mean output per class; uniform without images."""
    return (sums / counts.clamp(min=1)[:, None] / temperature).softmax(1)


def entropy(p: Tensor) -> Tensor:
    """FedIRM eq. 4, of probabilities."""
    return -(p * p.clamp(min=1e-12).log()).sum(1)


def ramp(round: int, length: int, squared: bool = False) -> float:
    """FedIRM's warming up: exp(-5 (1 - round/length)), 1 from round `length` on; the authors square the bracket."""
    left = 1 - min(round / length, 1)
    return math.exp(-5 * (left**2 if squared else left))


def with_dropout(model: nn.Module, x: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """The network's logits, and without gradients those of `times` more passes, each with dropout of its own.

    In our networks dropout sits directly before the classifier, so that these passes share the features before it.
    """
    if not isinstance(model, Headed):
        with torch.no_grad():
            kept = {name: value.clone() for name, value in model.named_buffers()}
            more = torch.stack([model(x) for _ in range(times)])
            model.load_state_dict(kept, strict=False)  # BatchNorm shall see these images once
        return model(x), more
    features = model.features(x)
    logits = model.classify(features)
    with torch.no_grad():
        return logits, torch.stack([model.classify(features) for _ in range(times)])
