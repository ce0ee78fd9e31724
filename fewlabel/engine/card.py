"""The card of a model: all that one needs to build its network and to prepare images for it."""

from dataclasses import dataclass
from typing import Any, Self

from fewlabel.data.datasets import Dataset
from fewlabel.data.raw import Scale
from fewlabel.experiment import Experiment


@dataclass(frozen=True)
class Card:
    """The description that is stored with a model: how to build its network, and how to prepare images for it."""

    classes: tuple[str, ...]
    network: dict[str, Any]  # the arguments of `networks.build`, except for the three numbers of the data
    image_size: int
    channels: int
    mean: tuple[float, ...]  # per channel, of pixels in 0..1
    std: tuple[float, ...]
    scale: Scale
    # What follows is not in models of FewLabel 0.1.
    chosen: str = "last"  # how its round was chosen: the last one, or by validation
    round: int | None = None
    balanced: bool = False  # True if its logits stand for classes that are equally frequent
    temperature: float | None = None  # which calibrates its probabilities, if there were validation labels
    prior: tuple[float, ...] | None = None  # the share of each class that it expects, if someone chose it
    shift: tuple[float, ...] | None = None  # what that adds to the logits
    privacy: dict[str, float] | None = None  # epsilon and delta by which each site's images are private

    @classmethod
    def of(
        cls, experiment: Experiment, dataset: Dataset, chosen: str, round: int | None, temperature: float | None
    ) -> Self:
        net, images, private = experiment.model, dataset.splits["train"].images, experiment.privacy
        network = {"name": net.name, "norm": net.norm, "dropout": net.dropout}
        return cls(
            classes=dataset.classes,
            network=network,
            image_size=dataset.image_size,
            channels=dataset.channels,
            mean=images.mean,
            std=images.std,
            scale=dataset.scale,
            chosen=chosen,
            round=round,
            balanced=experiment.recipe.balance != "none",
            temperature=temperature,
            privacy=None if private is None else {"epsilon": private.epsilon, "delta": private.delta},
        )

    @property
    def kind(self) -> str:
        return {1: "grey", 3: "colour"}.get(self.channels, f"{self.channels}-channel")
