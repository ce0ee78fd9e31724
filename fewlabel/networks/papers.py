"""Networks that exist only in the text or the code of the papers.

simple_cnn    RSCFed's for SVHN and CIFAR-100, PyTorch's default initialisation
fedmatch_net  FedMatch's first version (AlexNet-like), with padding such that 32x32 images give 8192 features
resnet9       FedMatch's ICLR version, as in the official code: no bias and no normalisation

Both of FedMatch's networks start from Keras' VarianceScaling() with its defaults, as in the official code. The papers
have only 32x32 images. Here the first linear layer of the first two depends on the image size, and the last pooling of
ResNet-9 always covers the whole feature map (4x4 in the paper).
"""

from typing import cast

from torch import Tensor, nn

from fewlabel.networks.parts import HalfPool, Network, PooledConv, head, rscfed_head, variance_scaling


def simple_cnn(in_channels: int, num_classes: int, image_size: int, *, dropout: float = 0.0) -> Network:
    side = ((image_size - 4) // 2 - 4) // 2
    backbone = nn.Sequential(
        PooledConv(in_channels, 6, 5),
        nn.ReLU(),  # after pooling: the same result for a quarter of the work
        nn.Identity(),  # so that layers have the authors' numbers
        nn.Conv2d(6, 16, 5),
        HalfPool(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * side**2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
    )
    return Network(backbone, rscfed_head(84, num_classes, dropout))


def fedmatch_net(in_channels: int, num_classes: int, image_size: int, *, dropout: float = 0.0) -> Network:
    side = image_size // 4
    backbone = nn.Sequential(
        # TensorFlow's "same" for an even kernel; PyTorch's own padding="same" warns and copies.
        nn.ZeroPad2d((1, 2, 1, 2)),
        nn.Conv2d(in_channels, 64, 4),
        HalfPool(),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        HalfPool(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128 * side**2, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
    )
    network = Network(backbone, head(nn.Linear(2048, num_classes), dropout))
    variance_scaling(network)
    return network


class Residual(nn.Module):
    """Add `body(x)` to the input x."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast(Tensor, self.body(x))


def resnet9(in_channels: int, num_classes: int, image_size: int, *, dropout: float = 0.0) -> Network:
    def conv(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.ReLU())

    backbone = nn.Sequential(
        conv(in_channels, 64),
        conv(64, 128),
        HalfPool(),
        Residual(conv(128, 128), conv(128, 128)),
        conv(128, 256),
        HalfPool(),
        conv(256, 512),
        HalfPool(),
        Residual(conv(512, 512), conv(512, 512)),
        nn.MaxPool2d(image_size // 8),
        nn.Flatten(),
    )
    network = Network(backbone, head(nn.Linear(512, num_classes, bias=False), dropout))
    variance_scaling(network)
    return network
