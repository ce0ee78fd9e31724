"""What all networks share: one cut into backbone and head, so that Monte-Carlo passes repeat only the head."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.nn.functional import conv2d, max_pool2d, pad, pixel_unshuffle

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


class Larger(torch.autograd.Function):
    """The larger values along a dimension of two; of equals the first is the larger, as max-pooling has it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dim = dim
        return torch.maximum(*x.unbind(dim))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        [x] = ctx.saved_tensors
        (first, second), both = x.unbind(ctx.dim), torch.empty_like(x)
        to_first, to_second = both.unbind(ctx.dim)
        # A mask of floats, and no `where`, whose kernel is slow on a CPU.
        torch.mul(gradient, torch.gt(second, first, out=torch.empty_like(gradient)), out=to_second)
        torch.sub(gradient, to_second, out=to_first)
        return both, None


def larger(x: Tensor, dim: int) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = Larger.apply(x, dim)
        return result
    return torch.maximum(*x.unbind(dim))


class HalfPool(nn.Module):
    """`nn.MaxPool2d(2)` to the bit. PyTorch's looks at one value at a time, longer than a small convolution takes."""

    def forward(self, x: Tensor) -> Tensor:
        trained = torch.is_grad_enabled() and x.requires_grad
        if is_exporting() or (trained and x.numel() < 2**18):  # no gain where it is small
            return max_pool2d(x, 2)
        height, width = (size // 2 for size in x.shape[2:])
        pairs = x[..., : 2 * height, : 2 * width].reshape(*x.shape[:2], height, 2, width, 2)
        return larger(larger(pairs, 5), 3)


PLACES = [(right, 1 - right, down, 1 - down) for down in (0, 1) for right in (0, 1)]


class PooledConv(nn.Conv2d):
    """A convolution of odd size and max-pooling by two in one, for few channels: the same to rounding, and faster.

    The four results of which pooling takes the largest are made side by side, as channels of one convolution with
    stride 2. Its kernel is a pixel wider and holds the weights at four places. So many channels fill a processor's
    vectors where a few do not, and to pool them is to compare whole planes.
    """

    def forward(self, x: Tensor) -> Tensor:
        if is_exporting() or x.shape[0] * x.shape[2] * x.shape[3] < 2**14:  # a few are not worth the preparation
            return max_pool2d(super().forward(x), 2)
        kernel, stride = torch.cat([pad(self.weight, place) for place in PLACES]), 2
        if self.in_channels == 1:  # four channels of half the size
            height, width = (side // 2 * 2 for side in x.shape[2:])
            x, kernel, stride = pixel_unshuffle(x[..., :height, :width], 2), pixel_unshuffle(kernel, 2), 1
        assert self.bias is not None
        found = conv2d(x, kernel, self.bias.repeat(4), stride)
        count, _, height, width = found.shape
        return larger(larger(found.view(count, 2, 2, self.out_channels, height, width), 2), 1)


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
