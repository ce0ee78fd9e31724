"""FedIRM's relations among classes, and how sure a network is of its predictions."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fewlabel.core.mixing import soft
from fewlabel.core.tasks import Asked
from fewlabel.learn.functional import Headed


@dataclass(frozen=True)
class Relation:
    """What a network says of images of each class, on average."""

    rows: Tensor  # [C, C]
    known: Tensor  # bool [C]: classes with images

    def check(self, asked: Asked) -> None:
        """Raise ValueError unless these are probabilities of all classes, by a client that has labels."""
        classes = asked.classes
        if not asked.client.num_labeled:
            raise ValueError("it sends a relation, and has no labels to make one from")
        fits = self.rows.shape == (classes, classes) and self.known.shape == (classes,)
        fits = fits and self.rows.dtype == torch.float32 and self.known.dtype == torch.bool
        if not fits or self.rows.min() < 0 or self.rows.max() > 1:
            raise ValueError(f"its relation must be {classes} rows of probabilities, and which of them it knows")


def class_sums(outputs: Tensor, y: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the sum of a network's outputs over the images of each class, and the number of these images.

    An image with a soft label is of several classes in part.
    """
    members = soft(y, num_classes, outputs.dtype)
    return members.T @ outputs, members.sum(0)


def relation(sums: Tensor, counts: Tensor, temperature: float) -> Tensor:
    """Return the softened mean output of each class: FedIRM eq. 2 and 3, or eq. 5 and 3 at unlabeled clients.

    The row of a class without images is uniform.
    """
    return (sums / counts.clamp(min=1)[:, None] / temperature).softmax(1)


def entropy(p: Tensor) -> Tensor:
    """Return the entropy of probabilities, FedIRM eq. 4."""
    return -(p * p.clamp(min=1e-12).log()).sum(1)


def ramp(round: int, length: int, squared: bool = False) -> float:
    """Return FedIRM's growing weight: exp(-5 (1 - round/length)), and 1 from round `length` on.

    `squared` is the version of the authors' code: it squares the bracket.
    """
    left = 1 - min(round / length, 1)
    return math.exp(-5 * (left**2 if squared else left))


def with_dropout(model: nn.Module, x: Tensor, times: int) -> tuple[Tensor, Tensor]:
    """Return the network's logits, and those of `times` more passes without gradients, each with its own dropout.

    In our networks dropout is directly before the classifier, so these passes share the features before it.
    """
    if not isinstance(model, Headed):
        with torch.no_grad():
            kept = {name: value.clone() for name, value in model.named_buffers()}
            more = torch.stack([model(x) for _ in range(times)])
            model.load_state_dict(kept, strict=False)  # so that BatchNorm sees these images only once
        return model(x), more
    features = model.features(x)
    logits = model.classify(features)
    with torch.no_grad():
        return logits, torch.stack([model.classify(features) for _ in range(times)])
