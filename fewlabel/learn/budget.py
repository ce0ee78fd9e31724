"""How much differential privacy an experiment asks for, and what it cannot go with. `private` trains by it.

The comment beside a setting is its help text in `fewlabel list settings`.
"""

from dataclasses import dataclass
from typing import Annotated, Any

from fewlabel.core.errors import BadInput
from fewlabel.core.schema import Positive, Range


@dataclass(frozen=True)
class Privacy:
    """Differential privacy for the images of each site, by DP-SGD."""

    epsilon: Positive  # that a site spends in all rounds of a run together
    delta: Annotated[float, Range(0, 1, open_low=True, open_high=True)] = 1e-5  # should be far below 1 / images
    clip: Positive = 1.0  # the gradient of each image is shortened to this norm


def check(experiment: Any, per_image: bool) -> None:
    """Refuse an experiment whose losses, or whatever else leaves a site, are about several images at once."""
    if experiment.privacy is None:
        return
    why = {
        f"{experiment.name} is not for it: its loss compares images with each other, or it sends more than weights": (
            not per_image
        ),
        "train.balance uses how frequent a site's classes are; set train.balance = 'none'": (
            experiment.recipe.balance != "none"
        ),
        "train.mixup blends images; set train.mixup = 0": experiment.recipe.mixup > 0,
        "labels.held_out lets exact counts leave; leave it out": experiment.labels.held_out > 0,
        "a stream changes how many images a site has; leave it out": experiment.stream is not None,
    }
    if found := [sentence for sentence, wrong in why.items() if wrong]:
        raise BadInput(f"privacy.epsilon = {experiment.privacy.epsilon:g}: {'; '.join(found)}")
