"""What all networks share: a backbone and a head, so that Monte-Carlo passes repeat only the head."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_exporting
from torch.nn.functional import conv2d, max_pool2d, pad, pixel_unshuffle

Old = TypeVar("Old", bound=nn.Module)


class Network(nn.Module):
    """A network whose logits are `head(backbone(x))`. Dropout is only in the head, right before its last layer."""

    all_dropout_in_head = True

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.backbone(x))
        return logits

    def features(self, x: Tensor) -> Tensor:
        """Compute everything that comes before dropout."""
        features: Tensor = self.backbone(x)
        for name, layer in self.head.named_children():
            features = layer(features) if name == "projection" else features
        return features

    def classify(self, features: Tensor) -> Tensor:
        """Apply dropout and the classifier. `classify(features(x))` is what `forward` does."""
        for name, layer in self.head.named_children():
            features = layer(features) if name != "projection" else features
        return features


class Larger(torch.autograd.Function):
    """The larger value along a dimension of two. Of equal values the first gets the gradient, as in max-pooling."""

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
        # A mask of floats instead of `where`, which is slow on a CPU.
        torch.mul(gradient, torch.gt(second, first, out=torch.empty_like(gradient)), out=to_second)
        torch.sub(gradient, to_second, out=to_first)
        return both, None


def larger(x: Tensor, dim: int) -> Tensor:
    if torch.is_grad_enabled() and x.requires_grad:
        result: Tensor = Larger.apply(x, dim)
        return result
    return torch.maximum(*x.unbind(dim))


class HalfPool(nn.Module):
    """The same as `nn.MaxPool2d(2)`, to the bit, but faster: PyTorch's takes longer than a small convolution."""

    def forward(self, x: Tensor) -> Tensor:
        trained = torch.is_grad_enabled() and x.requires_grad
        if is_exporting() or (trained and x.numel() < 2**18):  # no gain for small inputs
            return max_pool2d(x, 2)
        height, width = (size // 2 for size in x.shape[2:])
        pairs = x[..., : 2 * height, : 2 * width].reshape(*x.shape[:2], height, 2, width, 2)
        return larger(larger(pairs, 5), 3)


PLACES = [(right, 1 - right, down, 1 - down) for down in (0, 1) for right in (0, 1)]


class PooledConv(nn.Conv2d):
    """A convolution of odd size and max-pooling by two in one. For few channels it is faster; only rounding differs.

    The four values of which pooling takes the largest are computed side by side, as channels of one convolution with
    stride 2. Its kernel is a pixel wider and holds the weights at four places. More channels use a processor's vectors
    better, and pooling only compares whole planes.
    """

    def forward(self, x: Tensor) -> Tensor:
        if is_exporting() or x.shape[0] * x.shape[2] * x.shape[3] < 2**14:  # a few images are not worth the preparation
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
    """Join projection, dropout and classifier; the first two may be left out."""
    # Layers have names, not numbers, so that weights saved with dropout load without it, and the other way round.
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if projection is not None:
        layers["projection"] = projection
    if dropout > 0:
        layers["dropout"] = nn.Dropout(dropout)
    layers["classifier"] = classifier
    return nn.Sequential(layers)


def rscfed_head(features: int, num_classes: int, dropout: float) -> nn.Sequential:
    """Make RSCFed's three layers, without an activation between the second and the third."""
    projection = nn.Sequential(nn.Linear(features, features), nn.ReLU(), nn.Linear(features, 256))
    return head(nn.Linear(256, num_classes), dropout, projection)


def replace(module: nn.Module, old: type[Old], new: Callable[[Old], nn.Module]) -> None:
    """Replace every submodule of type `old`, at any depth, by what `new` returns for it."""
    for name, child in module.named_children():
        if isinstance(child, old):
            setattr(module, name, new(child))
        else:
            replace(child, old, new)


def group_norm(batch_norm: nn.BatchNorm2d) -> nn.Module:
    """Make a GroupNorm with the same affine map and as many groups, up to 32, as divide the channels.

    A BatchNorm of timm's may include what follows it.
    """
    channels = batch_norm.num_features
    groups = max(n for n in range(1, 33) if channels % n == 0)
    norm = nn.GroupNorm(groups, channels, eps=batch_norm.eps, affine=batch_norm.affine)
    norm.weight, norm.bias = batch_norm.weight, batch_norm.bias
    after = [layer for name in ("drop", "act") if (layer := getattr(batch_norm, name, None)) is not None]
    return nn.Sequential(norm, *after) if after else norm


@torch.no_grad()
def variance_scaling(module: nn.Module) -> None:
    """Draw weights as Keras' VarianceScaling: normal, cut at two deviations, variance 1 / fan-in. Biases are zero."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            # A normal that is cut at two deviations keeps 0.8796 of its deviation.
            deviation = layer.weight[0].numel() ** -0.5 / 0.87962566103423978
            nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
