"""All networks by name, so that an experiment can say which one it trains."""

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from fewlabel.core.errors import BadInput
from fewlabel.networks import papers, small, vision
from fewlabel.networks.parts import Network, group_norm, replace
from fewlabel.networks.timm import timm_image_size, timm_network, timm_normalisation
from fewlabel.networks.vision import IMAGENET, Normalisation

__all__ = ["MODELS", "Architecture", "Network", "build", "image_size", "normalisation"]

TIMM = "timm:"


@dataclass(frozen=True)
class Architecture:
    """A network that can be built for any number of channels, classes and pixels."""

    build: Callable[..., nn.Module]  # (in_channels, num_classes, image_size, *, dropout[, pretrained])
    about: str
    image_size: int  # images are resized to it, unless the settings say otherwise
    pretrained: bool = False  # torchvision has ImageNet weights
    smallest: int = 1  # smaller images vanish in the pooling


MODELS: dict[str, Architecture] = {
    "small-resnet": Architecture(
        small.small_resnet, "small residual network with GroupNorm, for 28 to 64 pixels: fast on a CPU", 32
    ),
    "simple-cnn": Architecture(
        papers.simple_cnn, "RSCFed's small CNN: 2 convolutions, 5 linear layers", 32, smallest=16
    ),
    "fedmatch-net": Architecture(papers.fedmatch_net, "FedMatch's AlexNet-like network, first version", 32, smallest=4),
    "resnet9": Architecture(
        papers.resnet9, "FedMatch's ResNet-9, ICLR version: no bias, no normalisation", 32, smallest=8
    ),
    "resnet18": Architecture(
        vision.resnet18, "torchvision's ResNet-18 with ImageNet stem, as in CBAFed", 32, pretrained=True
    ),
    "resnet18-cifar": Architecture(vision.resnet18_cifar, "ResNet-18 with 3x3 stem and RSCFed's three-layer head", 32),
    "densenet121": Architecture(
        vision.densenet121, "DenseNet-121 with dropout 0.2, as in FedIRM", 224, pretrained=True, smallest=29
    ),
    "vit-tiny": Architecture(
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
    """Build the network `name`, or timm's `timm:name`, or call `package.module:callable`.

    Weights are drawn from torch's global generator.

    `dropout` None means the network's own. `norm` "group" replaces every BatchNorm2d by GroupNorm.
    """
    if norm not in ("batch", "group"):
        raise BadInput(f"model.norm is {norm!r}, but must be 'batch' or 'group'.")
    if dropout is not None and not 0 <= dropout < 1:
        raise BadInput(f"model.dropout is {dropout}, but must be at least 0 and below 1.")
    if pretrained and norm == "group":
        raise BadInput("Pretrained weights need the batch norm they were trained with; set model.norm = 'batch'.")
    if pretrained and in_channels not in (1, 3):
        raise BadInput(f"Pretrained weights take 1 or 3 channels, not {in_channels}; set model.pretrained = false.")
    options: dict[str, Any] = {} if dropout is None else {"dropout": dropout}
    if pretrained:
        options["pretrained"] = True
    if name.startswith(TIMM):
        network: nn.Module = timm_network(name.removeprefix(TIMM), in_channels, num_classes, image_size, **options)
    elif ":" in name:
        if options:
            raise BadInput(f"{name!r} has its own dropout and weights; unset model.dropout and model.pretrained.")
        network = _custom(name, in_channels, num_classes, image_size)
    else:
        architecture = _architecture(name)
        if pretrained and not architecture.pretrained:
            raise BadInput(f"There are no pretrained weights for {name!r}; set model.pretrained = false.")
        if image_size < (smallest := architecture.smallest):
            raise BadInput(f"{name} needs images of {smallest} pixels or more; raise data.image_size from {image_size}")
        network = architecture.build(in_channels, num_classes, image_size, **options)
    if norm == "group":
        if not any(isinstance(module, nn.BatchNorm2d | nn.GroupNorm) for module in network.modules()):
            raise BadInput(f"{name} has no BatchNorm2d, so there is nothing to replace; leave model.norm out.")
        replace(network, nn.BatchNorm2d, group_norm)
    return network


def image_size(name: str) -> int:
    """Return the size to which images are resized for this network by default."""
    if name.startswith(TIMM):
        return timm_image_size(name.removeprefix(TIMM))
    return 32 if ":" in name else _architecture(name).image_size


def normalisation(name: str, channels: int) -> Normalisation:
    """Return the mean and std with which the pretrained weights of this network were trained."""
    mean, std = timm_normalisation(name.removeprefix(TIMM)) if name.startswith(TIMM) else IMAGENET
    if channels == 1:  # a grey image stands for three equal channels
        return (sum(mean) / len(mean),), (sum(std) / len(std),)
    return mean, std


def _architecture(name: str) -> Architecture:
    if name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(name.lower(), MODELS) or list(MODELS)
    raise BadInput(f"There is no model {name!r}; try one of {', '.join(near)}.")


def _custom(name: str, *sizes: int) -> nn.Module:
    module, _, attribute = name.partition(":")
    # Other people's code may raise anything; the cause stays attached.
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
