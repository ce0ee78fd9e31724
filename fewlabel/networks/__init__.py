"""Every network by name, so that a run's settings can say which one it trains."""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fewlabel.core.errors import BadInput
from fewlabel.networks import papers, vision
from fewlabel.networks.parts import Network, group_norm, replace

__all__ = ["MODELS", "Entry", "Network", "build", "image_size"]


@dataclass(frozen=True)
class Entry:
    build: Callable[..., nn.Module]  # (in_channels, num_classes, image_size, *, dropout[, pretrained])
    about: str
    image_size: int  # what data are resized to unless the settings say otherwise
    pretrained: bool = False  # torchvision has ImageNet weights
    smallest: int = 1  # images below this vanish in the pooling


MODELS: dict[str, Entry] = {
    "simple-cnn": Entry(papers.simple_cnn, "RSCFed's small CNN: 2 convolutions, 5 linear layers", 32, smallest=16),
    "fedmatch-net": Entry(papers.fedmatch_net, "FedMatch's AlexNet-like network, first version", 32, smallest=4),
    "resnet9": Entry(papers.resnet9, "FedMatch's ResNet-9, ICLR version: no bias, no normalisation", 32, smallest=8),
    "resnet18": Entry(vision.resnet18, "torchvision's ResNet-18 with ImageNet stem, as in CBAFed", 32, pretrained=True),
    "resnet18-cifar": Entry(vision.resnet18_cifar, "ResNet-18 with 3x3 stem and RSCFed's three-layer head", 32),
    "densenet121": Entry(
        vision.densenet121, "DenseNet-121 with dropout 0.2, as in FedIRM", 224, pretrained=True, smallest=29
    ),
    "vit-tiny": Entry(
        vision.vit_tiny, "ViT-Tiny, as in CBAFed: patches of 4 up to 64 pixels, of 16 above", 32, smallest=4
    ),
}


def build(
    name: str,
    in_channels: int,
    num_classes: int,
    image_size: int,
    *,
    norm: str = "batch",
    dropout: float | None = None,
    pretrained: bool = False,
) -> nn.Module:
    """The network `name`, or what `package.module:callable` returns, initialised from torch's global generator.

    `dropout` None is the network's own; `norm` "group" exchanges every BatchNorm2d.
    """
    if norm not in ("batch", "group"):
        raise BadInput(f"model.norm is {norm!r}, but must be 'batch' or 'group'.")
    if dropout is not None and not 0 <= dropout < 1:
        raise BadInput(f"model.dropout is {dropout}, but must be at least 0 and below 1.")
    if pretrained and norm == "group":
        raise BadInput("Pretrained weights need the batch norm they were trained with; set model.norm = 'batch'.")
    if pretrained and in_channels not in (1, 3):
        raise BadInput(f"Pretrained weights take 1 or 3 channels, not {in_channels}; set model.pretrained = false.")
    if ":" in name:
        if dropout is not None or pretrained:
            raise BadInput(f"{name!r} has its own dropout and weights; unset model.dropout and model.pretrained.")
        network = _custom(name, in_channels, num_classes, image_size)
    else:
        entry = _entry(name)
        if pretrained and not entry.pretrained:
            raise BadInput(f"There are no pretrained weights for {name!r}; set model.pretrained = false.")
        if image_size < entry.smallest:
            raise BadInput(f"{name} needs images of {entry.smallest} pixels or more, but image_size is {image_size}.")
        options: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
        if pretrained:
            options["pretrained"] = True
        network = entry.build(in_channels, num_classes, image_size, **options)
    if norm == "group":
        if not any(isinstance(module, nn.BatchNorm2d) for module in network.modules()):
            raise BadInput(f"{name} has no BatchNorm2d to exchange; set model.norm = 'batch'.")
        replace(network, nn.BatchNorm2d, group_norm)
    return network


def image_size(name: str) -> int:
    """The side that images are resized to for this network by default."""
    return 32 if ":" in name else _entry(name).image_size


def _entry(name: str) -> Entry:
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name.lower(), MODELS) or list(MODELS)
    raise BadInput(f"There is no model {name!r}; try one of {', '.join(near)}.")


def _custom(name: str, *sizes: int) -> nn.Module:
    module, _, attribute = name.partition(":")
    # What somebody else's code may raise is not ours to list; the cause stays attached.
    try:
        make = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise BadInput(f"The model {name!r} cannot be imported: {type(error).__name__}: {error}.") from error
    try:
        network = make(*sizes)
    except Exception as error:
        raise BadInput(
            f"{name!r} cannot be called with (in_channels, num_classes, image_size) = {sizes}: "
            f"{type(error).__name__}: {error}."
        ) from error
    if not isinstance(network, nn.Module):
        raise BadInput(f"{name!r} must return a torch.nn.Module, but returned {type(network).__name__}.")
    return network
