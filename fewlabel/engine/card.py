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

    @classmethod
    def of(cls, experiment: Experiment, dataset: Dataset) -> Self:
        net, images = experiment.model, dataset.splits["train"].images
        network = {"name": net.name, "norm": net.norm, "dropout": net.dropout}
        size = dataset.image_size
        return cls(dataset.classes, network, size, dataset.channels, images.mean, images.std, dataset.scale)

    @property
    def kind(self) -> str:
        return {1: "grey", 3: "colour"}.get(self.channels, f"{self.channels}-channel")
