"""torchvision's networks with backbone and head, and a safe way to load their ImageNet weights.

resnet18        CBAFed's: the stem made for ImageNet (7x7, stride 2, max-pool)
resnet18_cifar  RSCFed's for ISIC: a 3x3 stem with stride 1, no max-pool, and RSCFed's three-layer head
densenet121     FedIRM's: dropout before a classifier whose bias starts at 0
vit_tiny        CBAFed's second backbone, in DeiT's tiny size: 192 wide, 12 layers, 3 heads

torchvision is imported late, because that takes seconds and not everybody has installed it. Weights keep its names,
below `backbone.`. For three channels a seed draws the same numbers as in torchvision, except for the CIFAR stem.
"""

import hashlib
import re
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import Tensor, nn

from fewlabel.core.errors import BadInput, StorageError, install
from fewlabel.networks.parts import Network, head, replace, rscfed_head

# torch.hub waits for ever, but people who are offline should get an error at once.
CONNECT_SECONDS = 10

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std per channel, for pixels in 0..1
IMAGENET: Normalisation = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # of all weights of torchvision


def resnet18(
    in_channels: int, num_classes: int, image_size: int, *, dropout: float = 0.0, pretrained: bool = False
) -> Network:
    models = _torchvision("resnet18")
    net = models.resnet18(num_classes=num_classes)
    classifier, net.fc = net.fc, nn.Identity()
    if in_channels != 3:
        net.conv1 = _resnet_stem(nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False))
    if pretrained:
        state = imagenet_weights(models.ResNet18_Weights.IMAGENET1K_V1.url)
        _load(net, state, stem="conv1.weight", classifier="fc.", in_channels=in_channels)
    return Network(net, head(classifier, dropout))


def resnet18_cifar(in_channels: int, num_classes: int, image_size: int, *, dropout: float = 0.0) -> Network:
    net = _torchvision("resnet18-cifar").resnet18()
    net.conv1 = _resnet_stem(nn.Conv2d(in_channels, 64, 3, padding=1, bias=False))
    net.maxpool = nn.Identity()
    net.fc = nn.Identity()
    return Network(net, rscfed_head(512, num_classes, dropout))


def densenet121(
    in_channels: int, num_classes: int, image_size: int, *, dropout: float = 0.2, pretrained: bool = False
) -> Network:
    models = _torchvision("densenet121")
    net = models.densenet121(num_classes=num_classes)
    classifier, net.classifier = net.classifier, nn.Identity()
    if in_channels != 3:
        net.features.conv0 = nn.Conv2d(in_channels, 64, 7, stride=2, padding=3, bias=False)
        nn.init.kaiming_normal_(net.features.conv0.weight)
    if pretrained:
        state = imagenet_weights(models.DenseNet121_Weights.IMAGENET1K_V1.url)
        # The stored file is older than PyTorch's ban on dots in module names.
        state = {re.sub(r"(denselayer\d+\.(?:norm|conv))\.(?=[12]\.)", r"\1", key): state[key] for key in state}
        _load(net, state, stem="features.conv0.weight", classifier="classifier.", in_channels=in_channels)
    return Network(net, head(classifier, dropout))


def vit_tiny(in_channels: int, num_classes: int, image_size: int, *, dropout: float = 0.0) -> Network:
    models = _torchvision("vit-tiny")
    # At 224 pixels a patch has 16. At 32 pixels that would leave four patches, and 4 leaves 64.
    patch = 4 if image_size <= 64 else 16
    if image_size % patch:
        raise BadInput(
            f"vit-tiny cuts images into patches of {patch}, so image_size {image_size} must be a multiple of it."
        )
    net = models.VisionTransformer(
        image_size, patch, num_layers=12, num_heads=3, hidden_dim=192, mlp_dim=768, num_classes=num_classes
    )
    classifier, net.heads = net.heads.head, nn.Identity()
    if in_channels != 3:
        net.conv_proj = nn.Conv2d(in_channels, 192, patch, stride=patch)
        nn.init.trunc_normal_(net.conv_proj.weight, std=(in_channels * patch**2) ** -0.5)
        nn.init.zeros_(net.conv_proj.bias)
    # These dropouts have rate 0, but Monte-Carlo code must find dropout only in the head.
    replace(net, nn.Dropout, lambda _: nn.Identity())
    return Network(net, head(classifier, dropout))


def _torchvision(name: str) -> Any:
    try:
        from torchvision import models
    except ImportError:
        raise BadInput(f"model '{name}' needs torchvision, which is not installed: {install('vision')}") from None
    return models


def _resnet_stem(conv: nn.Conv2d) -> nn.Conv2d:
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _load(net: nn.Module, state: dict[str, Tensor], *, stem: str, classifier: str, in_channels: int) -> None:
    state = {key: value for key, value in state.items() if not key.startswith(classifier)}
    if in_channels == 1:
        # A grey image stands for three equal channels, so the kernels are added up.
        state[stem] = state[stem].sum(dim=1, keepdim=True)
    net.load_state_dict(state)


def imagenet_weights(url: str) -> dict[str, Any]:
    """Load the weights at `url` from torch.hub's directory, and download them first if they are not there.

    `load_state_dict_from_url` would not do: it checks what it downloads, but not a file that it finds.
    """
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    checksum = path.stem.rpartition("-")[2]
    way_out = "or set model.pretrained = false"
    try:
        if not path.exists():
            urlopen(Request(url, headers={"User-Agent": "torch.hub"}), timeout=CONNECT_SECONDS).close()
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(url, str(path), checksum)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, HTTPException, RuntimeError) as error:
        raise StorageError(
            f"The ImageNet weights {path.name} cannot be downloaded from {url} ({error}): "
            f"put the file into {path.parent} by hand, {way_out}."
        ) from error
    if not found.startswith(checksum):
        raise StorageError(
            f"{path} is damaged, its checksum starts with {found[:8]} instead of {checksum}: "
            f"delete it, and it is downloaded again, {way_out}."
        )
    try:
        # An attacker can match a checksum of 32 bits, so nothing but tensors may be loaded.
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # another kind of file may raise anything
        raise StorageError(f"{path} holds more or less than plain tensors: delete it, {way_out}.") from error
    return state
