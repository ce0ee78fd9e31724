"""What all networks share: one cut into backbone and head, so that Monte-Carlo passes repeat only the head."""

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

Old = TypeVar("Old", bound=nn.Module)


class Network(nn.Module):
    """Logits are `head(backbone(x))`; all dropout sits in the head, directly before its last linear layer."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits

    def features(self, x: Tensor) -> Tensor:
        """All that comes before dropout."""
        features: Tensor = self.backbone(x)
        for name, layer in self.head.named_children():
            features = layer(features) if name == "projection" else features
        return features

    def classify(self, features: Tensor) -> Tensor:
        """Dropout and the classifier: with `features`, what `forward` does."""
        for name, layer in self.head.named_children():
            features = layer(features) if name != "projection" else features
        return features


def head(classifier: nn.Linear, dropout: float, projection: nn.Module | None = None) -> nn.Sequential:
    """Projection, dropout and classifier, as far as there are any."""
    # Named, not numbered: weights saved with dropout must load without it, and the other way round.
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if projection is not None:
        layers["projection"] = projection
    if dropout > 0:
        layers["dropout"] = nn.Dropout(dropout)
    layers["classifier"] = classifier
    return nn.Sequential(layers)


def rscfed_head(features: int, num_classes: int, dropout: float) -> nn.Sequential:
    """RSCFed's three layers; between the second and the third there is no activation."""
    projection = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, 256))
    return head(nn.Linear(256, num_classes), dropout, projection)


def replace(module: nn.Module, old: type[Old], new: Callable[[Old], nn.Module]) -> None:
    """Exchange every submodule of type `old`, at any depth, for what `new` makes of it."""
    for name, child in module.named_children():
        if isinstance(child, old):
            setattr(module, name, new(child))
        else:
            replace(child, old, new)


def group_norm(batch_norm: nn.BatchNorm2d) -> nn.GroupNorm:
    """The same affine map with the largest number of groups up to 32 that divides the channels."""
    channels = batch_norm.num_features
    groups = max(n for n in range(1, 33) if channels % n == 0)
    norm = nn.GroupNorm(groups, channels, eps=batch_norm.eps, affine=batch_norm.affine)
    norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    return norm


@torch.no_grad()
def variance_scaling(module: nn.Module) -> None:
    """Keras' VarianceScaling with its defaults: normal cut at two deviations, variance 1 / fan-in; biases are zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            # Cutting a normal at two deviations leaves 0.8796 of its deviation.
            deviation = layer.weight[0].numel() ** -0.5 / 0.87962566103423978
            nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
