"""The recipe: how models are trained, whatever the method.

The comment beside a setting is its help text in `fewlabel list settings`.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from fewlabel.core.errors import BadInput, unknown
from fewlabel.core.schema import Count, Range, Share

LEAST_ALPHA = 0.05  # of mixup; below, shares are 0 or 1


@dataclass(frozen=True)
class Train:
    """The recipe: how models are trained, whatever the method. The defaults are the papers', who have none of it."""

    schedule: Literal["constant", "cosine"] = "constant"  # how the learning rate changes over the rounds of the run
    average: Annotated[float, Range(0, 1, open_high=True)] = 0.0  # decay of the mean over rounds that is shipped; 0
    #   ships the last round's model
    balance: Literal["none", "logit-adjusted"] = "none"  # logit-adjusted: rare classes of a site's labels count more
    warmup: Annotated[float, Range(0, 1, open_high=True)] = 0.0  # share of the rounds without unlabeled images, for
    #   methods that have no warm-up of their own
    batches: Count = 1  # batches in a pass over labels, at least; batches are smaller where there are few labels
    mixup: Share = 0.0  # alpha of mixup: images of labels are blended in pairs, by shares from Beta(alpha, alpha); 0
    #   does not blend

    def __post_init__(self) -> None:
        if isinstance(self.mixup, float | int) and 0 < self.mixup < LEAST_ALPHA:
            raise BadInput(f"train.mixup must be 0, or from {LEAST_ALPHA} to 1, found {self.mixup}")

    @property
    def words(self) -> str:
        """What it adds to the papers' training, for the note below a table."""
        parts = {
            f"{self.schedule} schedule": self.schedule != "constant",
            "average over rounds": self.average > 0,
            "balanced classes": self.balance != "none",
            "warm-up on labels alone": self.warmup > 0,
            "mixed images": self.mixup > 0,
        }
        return ", ".join(part for part, used in parts.items() if used) or "trained as the papers print it"


RECIPES = {"printed": Train(), "fewlabel": Train("cosine", 0.8, "logit-adjusted", 0.25, 4, 0.4)}
USUAL = "fewlabel"  # the recipe of commands and of `fl.run`; a stored run without one is as printed


def recipe_named(name: str) -> Train:
    if name not in RECIPES:
        raise BadInput(unknown("recipe", name, RECIPES))
    return RECIPES[name]
