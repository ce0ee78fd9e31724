"""Networks must be the papers' own, to the parameter, and must all keep the one cut into backbone and head."""

import hashlib
import os
import pickle
import random
import subprocess
import sys
import types
from functools import cache
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from torch import Tensor, nn

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.networks import MODELS, Network, build, image_size, vision
from fewlabel.networks.parts import HalfPool, PooledConv

NAMES = list(MODELS)


def seeded(name: str, *sizes: int, **options: object) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(name, *sizes, **options)


@cache
def network(name: str) -> nn.Module:
    """One network for all tests that only look, in eval mode; ten classes of colour images of 32 pixels."""
    return seeded(name, 3, 10, 32).eval()


def outline(name: str, *sizes: int, **options: object) -> nn.Module:
    """A network of shapes without numbers, which costs nothing to make."""
    with torch.device("meta"):
        return build(name, *sizes, **options).eval()


def parameters(network: nn.Module) -> int:
    return sum(weight.numel() for weight in network.parameters())


def images(channels: int, size: int, number: int = 2) -> Tensor:
    return torch.randn(number, channels, size, size, generator=torch.Generator().manual_seed(1))


# Counts of the papers


def test_simple_cnn_has_the_parameters_of_rscfed() -> None:
    def by_hand(classes: int, features: int = 16 * 5 * 5) -> int:
        convolutions = (3 * 25 * 6 + 6) + (6 * 25 * 16 + 16)
        body = (features * 120 + 120) + (120 * 84 + 84)
        return convolutions + body + (84 * 84 + 84) + (84 * 256 + 256) + (256 * classes + classes)

    assert parameters(network("simple-cnn")) == by_hand(10) == 92_626
    assert parameters(outline("simple-cnn", 3, 100, 32)) == by_hand(100) == 115_756
    # IsoFed's reading for images of 28 pixels, whose feature map is 16x4x4
    assert parameters(outline("simple-cnn", 3, 8, 28)) == by_hand(8, features=256) == 74_832


def test_fedmatch_net_has_8192_features_before_its_linear_layers() -> None:
    convolutions = (3 * 4 * 4 * 64 + 64) + (64 * 3 * 3 * 128 + 128)
    linear = (8192 * 2048 + 2048) + (2048 * 2048 + 2048) + (2048 * 10 + 10)
    assert parameters(network("fedmatch-net")) == convolutions + linear == 21_073_098


def test_resnet9_has_neither_bias_nor_norm() -> None:
    convolutions = 9 * (3 * 64 + 64 * 128 + 2 * 128 * 128 + 128 * 256 + 256 * 512 + 2 * 512 * 512)
    assert parameters(network("resnet9")) == convolutions + 512 * 10 == 6_568_640
    assert all(key.endswith("weight") for key in network("resnet9").state_dict())


def test_resnet18_has_the_parameters_of_cbafed() -> None:
    assert parameters(network("resnet18")) == 11_181_642
    assert parameters(outline("resnet18", 3, 100, 32)) == 11_227_812
    assert parameters(outline("resnet18", 3, 7, 32)) == 11_180_103


def test_resnet18_cifar_has_the_parameters_of_rscfed() -> None:
    assert parameters(outline("resnet18-cifar", 3, 7, 32)) == 11_564_615
    # stride 1 and no max-pool: 32 pixels are still 32 at the first stage
    assert network("resnet18-cifar").backbone.conv1(images(3, 32)).shape[-1] == 32
    assert not any(isinstance(module, nn.MaxPool2d) for module in network("resnet18-cifar").modules())


def test_densenet121_has_the_parameters_of_fedirm_and_a_classifier_bias_of_zero() -> None:
    assert parameters(outline("densenet121", 3, 5, 224)) == 6_958_981
    assert parameters(outline("densenet121", 3, 7, 224)) == 6_961_031
    assert not network("densenet121").head.classifier.bias.any()


@pytest.mark.parametrize(("size", "patch", "tokens"), [(224, 16, 197), (32, 4, 65), (64, 4, 257)])
def test_vit_tiny_has_the_parameters_of_deit_tiny(size: int, patch: int, tokens: int) -> None:
    attention = (192 * 3 * 192 + 3 * 192) + (192 * 192 + 192)
    layer = attention + (192 * 768 + 768) + (768 * 192 + 192) + 2 * 2 * 192
    stem = (3 * patch**2 * 192 + 192) + 192 + tokens * 192
    by_hand = stem + 12 * layer + 2 * 192 + (192 * 1000 + 1000)
    assert parameters(outline("vit-tiny", 3, 1000, size)) == by_hand
    if size == 224:
        assert by_hand == 5_717_416  # timm's vit_tiny_patch16_224


def test_small_resnet_has_three_convolutions_per_block_and_groups_of_eight_channels() -> None:
    def block(inputs: int, outputs: int) -> int:
        return 9 * inputs * outputs + 9 * outputs**2 + inputs * outputs + 2 * 2 * outputs

    by_hand = (3 * 25 * 32 + 2 * 32) + block(32, 64) + block(64, 128) + (128 * 10 + 10)
    assert parameters(network("small-resnet")) == by_hand == 291_242
    norms = [module for module in network("small-resnet").modules() if isinstance(module, nn.GroupNorm)]
    assert [(norm.num_channels, norm.num_groups) for norm in norms] == [(32, 4), (64, 8), (64, 8), (128, 16), (128, 16)]


# The one convention


@pytest.mark.parametrize("name", NAMES)
def test_forward_is_the_head_of_the_backbone(name: str) -> None:
    net, x = network(name), images(3, 32)
    assert isinstance(net, Network)
    with torch.no_grad():
        logits = net(x)
        assert logits.shape == (2, 10)
        torch.testing.assert_close(logits, net.head(net.backbone(x)), rtol=0, atol=0)


SIZES = [(1, 32), (3, 40), (1, 28), (3, 64)]
FITTING = [(name, channels, size) for name in NAMES for channels, size in SIZES if size >= MODELS[name].smallest]


@pytest.mark.parametrize(("name", "channels", "size"), FITTING)
def test_channels_and_image_sizes_other_than_the_papers_work(name: str, channels: int, size: int) -> None:
    assert outline(name, channels, 4, size)(images(channels, size).to("meta")).shape == (2, 4)


@pytest.mark.parametrize("name", NAMES)
def test_the_smallest_image_size_works_and_one_less_is_refused(name: str) -> None:
    smallest = MODELS[name].smallest
    with torch.no_grad():
        assert build(name, 3, 2, smallest).eval()(images(3, smallest)).shape == (2, 2)
    with pytest.raises(BadInput, match=f"{smallest} pixels"):
        build(name, 3, 2, smallest - 1)


@pytest.mark.parametrize("name", NAMES)
def test_weights_load_strictly_into_a_fresh_network_with_or_without_dropout(name: str) -> None:
    net, x = network(name), images(3, 32)
    other = build(name, 3, 10, 32, dropout=0.0 if name == "densenet121" else 0.5).eval()
    other.load_state_dict(net.state_dict(), strict=True)
    with torch.no_grad():
        torch.testing.assert_close(other(x), net(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_the_initial_weights_and_no_other_generator_is_touched(name: str) -> None:
    before = random.getstate()
    again = seeded(name, 3, 10, 32).state_dict()
    assert random.getstate() == before
    for key, value in network(name).state_dict().items():
        assert torch.equal(again[key], value), key


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_a_seed_draws_what_torchvision_draws(name: str) -> None:
    import torchvision.models

    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        theirs = getattr(torchvision.models, name)(num_classes=10).eval()
    x = images(3, 32)
    with torch.no_grad():
        torch.testing.assert_close(network(name)(x), theirs(x), rtol=0, atol=0)


def test_fedmatch_starts_from_keras_variance_scaling() -> None:
    for name in ("fedmatch-net", "resnet9"):
        for layer in network(name).modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                deviation = layer.weight[0].numel() ** -0.5
                assert layer.weight.abs().max() <= 2 * deviation / 0.8796
                # 1,728 numbers in the smallest layer that is checked: the estimate's own error is about 2 %
                if layer.weight.numel() > 1_000:
                    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.08)
                assert layer.bias is None or not layer.bias.any()


# Dropout


def dropouts(net: nn.Module) -> list[tuple[str, float]]:
    kinds = nn.Dropout | nn.Dropout2d | nn.AlphaDropout
    return [(name, module.p) for name, module in net.named_modules() if isinstance(module, kinds)]


@pytest.mark.parametrize("name", NAMES)
def test_dropout_stands_only_directly_before_the_last_linear_layer(name: str) -> None:
    assert dropouts(network(name)) == ([("head.dropout", 0.2)] if name == "densenet121" else [])
    assert dropouts(outline(name, 3, 10, 32, dropout=0.0)) == []
    net = outline(name, 3, 10, 32, dropout=0.3)
    assert dropouts(net) == [("head.dropout", 0.3)]
    assert [type(layer) for layer in net.head][-2:] == [nn.Dropout, nn.Linear]


@pytest.mark.parametrize("name", NAMES)
def test_monte_carlo_passes_through_the_head_equal_full_passes(name: str) -> None:
    net, x = build(name, 3, 10, 32, dropout=0.5).eval(), images(3, 32)
    nn.init.normal_(net.head.classifier.weight)  # torchvision starts a ViT's classifier at zero
    net.head.train()
    with torch.no_grad(), torch.random.fork_rng():
        features = net.backbone(x)
        passes = []
        for seed in range(3):
            torch.manual_seed(seed)
            full = net(x)
            torch.manual_seed(seed)
            passes.append(net.head(features))
            torch.testing.assert_close(passes[-1], full, rtol=0, atol=0)
    assert not torch.equal(passes[0], passes[1])


# Normalisation


@pytest.mark.parametrize("name", ["resnet18", "resnet18-cifar", "densenet121"])
def test_group_norm_leaves_no_batch_norm_and_no_buffers(name: str) -> None:
    net = seeded(name, 3, 10, 32, norm="group")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    assert list(net.buffers()) == []
    for norm in (module for module in net.modules() if isinstance(module, nn.GroupNorm)):
        assert norm.num_channels % norm.num_groups == 0
        assert not any(norm.num_channels % n == 0 for n in range(norm.num_groups + 1, 33))
    assert parameters(net) == parameters(network(name))
    logits = net.train()(images(3, 32, number=1))
    logits.sum().backward()
    assert all(weight.grad is not None for weight in net.parameters())


def test_group_norm_is_refused_where_there_is_no_batch_norm() -> None:
    with pytest.raises(
        BadInput, match=r"simple-cnn has no BatchNorm2d, so there is nothing to replace; leave model\.norm out"
    ):
        build("simple-cnn", 3, 10, 32, norm="group")


def test_small_resnet_has_group_norm_already_and_keeps_it() -> None:
    for norm in ("batch", "group"):
        net = seeded("small-resnet", 3, 10, 32, norm=norm).eval()
        assert list(net.buffers()) == []
        with torch.no_grad():
            assert torch.equal(net(images(3, 32)), network("small-resnet")(images(3, 32)))


def test_small_resnet_sees_each_image_alone_and_takes_large_ones() -> None:
    net, x = network("small-resnet").train(), images(3, 224, number=3)
    with torch.no_grad():
        torch.testing.assert_close(net(x)[:1], net(x[:1]))
    net.eval()


def test_group_norm_takes_the_most_groups_that_divide_the_channels(custom: types.ModuleType) -> None:
    custom.make = lambda *_: nn.Sequential(*(nn.BatchNorm2d(channels) for channels in (64, 48, 7, 37, 1)))
    # 48 = 2 * 24; 37 is prime and above 32
    assert [norm.num_groups for norm in build("own_models:make", 3, 2, 32, norm="group")] == [32, 24, 7, 1, 1]


# Pretrained weights, from a stand-in for torchvision's file


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub directory on a machine without a network."""

    def offline(*_: object, **__: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    monkeypatch.setattr(vision, "urlopen", offline)
    monkeypatch.setattr(torch.hub, "urlopen", offline)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path / "checkpoints"


def put(folder: Path, name: str, content: object) -> str:
    """Saved as torchvision names its files, by checksum; the address it would have."""
    draft = folder / "draft"
    torch.save(content, draft)
    path = draft.rename(folder / f"{name}-{hashlib.sha256(draft.read_bytes()).hexdigest()[:8]}.pth")
    return f"https://example.invalid/models/{path.name}"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_pretrained_weights_that_lie_in_the_hub_directory_are_used(
    name: str, channels: int, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision.models

    with torch.random.fork_rng():
        torch.manual_seed(5)
        theirs = getattr(torchvision.models, name)(num_classes=10).eval()
    # torchvision's own file for DenseNet still has the dots of PyTorch 0.3
    old = {
        key.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): v for key, v in theirs.state_dict().items()
    }
    weights = {"resnet18": "ResNet18_Weights", "densenet121": "DenseNet121_Weights"}[name]
    url = put(hub, name, theirs.state_dict() if name == "resnet18" else old)
    monkeypatch.setattr(getattr(torchvision.models, weights).IMAGENET1K_V1.value, "url", url)

    net = build(name, channels, 4, 32, pretrained=True).eval()
    x = images(channels, 32)
    setattr(theirs, {"resnet18": "fc", "densenet121": "classifier"}[name], nn.Identity())
    with torch.no_grad():
        torch.testing.assert_close(net.backbone(x), theirs(x.expand(-1, 3, -1, -1)), rtol=1e-3, atol=1e-4)
        assert net(x).shape == (2, 4)


@pytest.mark.parametrize("name", ["resnet18", "densenet121"])
def test_weights_that_cannot_be_downloaded_are_one_sentence_with_two_ways_out(name: str, hub: Path) -> None:
    with pytest.raises(StorageError) as error:
        build(name, 3, 10, 32, pretrained=True)
    sentence = str(error.value)
    assert f"{name}-" in sentence
    assert str(hub) in sentence
    assert "model.pretrained = false" in sentence
    assert "\n" not in sentence
    assert list(hub.iterdir()) == []


def test_a_download_is_checked_and_kept(hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(url: str, target: str, checksum: str) -> None:
        assert url.endswith(f"-{checksum}.pth")
        Path(target).write_bytes((tmp_path / Path(target).name).read_bytes())

    url = put(tmp_path, "tiny", {"weight": torch.ones(2)})
    monkeypatch.setattr(vision, "urlopen", lambda *_, **__: types.SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    for _ in range(2):
        assert torch.equal(vision.imagenet_weights(url)["weight"], torch.ones(2))
        monkeypatch.delattr(torch.hub, "download_url_to_file", raising=False)


def test_a_file_with_another_checksum_is_refused(hub: Path) -> None:
    url = put(hub, "tiny", {"weight": torch.ones(2)})
    with (hub / Path(url).name).open("ab") as file:
        file.write(b"more")
    with pytest.raises(StorageError, match="damaged"):
        vision.imagenet_weights(url)


class Attack:
    def __reduce__(self) -> tuple[object, ...]:
        return exec, ("import os; os.environ['FEWLABEL_ATTACKED'] = '1'",)


@pytest.mark.parametrize("plain_pickle", [True, False])
def test_a_file_with_the_right_checksum_can_still_run_no_code(plain_pickle: bool, hub: Path) -> None:
    url = put(hub, "evil", Attack())
    if plain_pickle:
        content = pickle.dumps(Attack(), protocol=2)
        path = hub / f"evil-{hashlib.sha256(content).hexdigest()[:8]}.pth"
        path.write_bytes(content)
        url = f"https://example.invalid/{path.name}"
    with pytest.raises(StorageError, match="plain tensors"):
        vision.imagenet_weights(url)
    assert "FEWLABEL_ATTACKED" not in os.environ


@pytest.mark.parametrize("name", [name for name in NAMES if not MODELS[name].pretrained])
def test_pretrained_is_refused_where_there_are_no_weights(name: str) -> None:
    with pytest.raises(BadInput, match=r"no pretrained weights.*model\.pretrained = false"):
        build(name, 3, 10, 32, pretrained=True)


def test_pretrained_is_refused_with_group_norm_or_four_channels() -> None:
    with pytest.raises(BadInput, match=r"model\.norm = 'batch'"):
        build("resnet18", 3, 10, 32, norm="group", pretrained=True)
    with pytest.raises(BadInput, match="1 or 3 channels, not 4"):
        build("resnet18", 4, 10, 32, pretrained=True)


# Names


@pytest.fixture
def custom(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module of the user's own that can be imported as `own_models`."""
    module = types.ModuleType("own_models")
    monkeypatch.setitem(sys.modules, "own_models", module)
    return module


def test_a_callable_of_ones_own_is_called_with_the_three_sizes(custom: types.ModuleType) -> None:
    custom.make = lambda channels, classes, size: nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, classes))
    assert build("own_models:make", 1, 5, 8)(images(1, 8)).shape == (2, 5)
    assert image_size("own_models:make") == 32


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("no_such_module:make", "cannot be imported"),
        ("own_models:missing", "cannot be imported"),
        (":make", "cannot be imported"),
        ("own_models:", "cannot be imported"),
        ("own_models:number", "must return a torch.nn.Module, but returned int"),
        ("own_models:none", "cannot be called with .* TypeError"),
    ],
)
def test_a_callable_that_cannot_be_used_is_refused(name: str, sentence: str, custom: types.ModuleType) -> None:
    custom.number = lambda *_: 3
    custom.none = None
    with pytest.raises(BadInput, match=sentence):
        build(name, 3, 10, 32)


def test_a_callable_of_ones_own_takes_neither_dropout_nor_pretrained_weights(custom: types.ModuleType) -> None:
    custom.make = lambda *_: nn.Flatten()
    with pytest.raises(BadInput, match="unset"):
        build("own_models:make", 3, 10, 32, dropout=0.1)
    with pytest.raises(BadInput, match="unset"):
        build("own_models:make", 3, 10, 32, pretrained=True)


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(BadInput, match=r"'ResNet_18'.*resnet18, "):
        build("ResNet_18", 3, 10, 32)
    with pytest.raises(BadInput, match="simple-cnn"):
        image_size("simplecnn")
    with pytest.raises(BadInput, match=", ".join(NAMES)):
        image_size("§")


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(BadInput, match=r"'layer'.*'batch' or 'group'"):
        build("simple-cnn", 3, 10, 32, norm="layer")
    for dropout in (-0.1, 1.0, float("nan")):
        with pytest.raises(BadInput, match="dropout"):
            build("simple-cnn", 3, 10, 32, dropout=dropout)
    with pytest.raises(BadInput, match="patches of 16"):
        build("vit-tiny", 3, 10, 100)


def test_the_default_image_sizes_suit_their_networks() -> None:
    assert {name: image_size(name) for name in NAMES} == dict.fromkeys(NAMES, 32) | {"densenet121": 224}
    assert all(entry.about and "\n" not in entry.about for entry in MODELS.values())


def test_importing_the_models_imports_neither_torchvision_nor_timm() -> None:
    code = "import sys, fewlabel.networks; sys.exit('torchvision' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0


# Layers of our own


@pytest.mark.parametrize("size", [8, 9, 64])  # the last is large enough for the way of our own while training, too
def test_half_pool_is_max_pooling_to_the_bit_with_its_gradient(size: int) -> None:
    x = images(3, size, 64).mul(4).round()  # so that many values are equal: the first of them has the gradient
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = HalfPool()(ours), nn.functional.max_pool2d(theirs, 2)
    gradient = torch.randn(expected.shape, generator=torch.Generator().manual_seed(2))
    found.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(found, expected)
    assert torch.equal(ours.grad, theirs.grad)
    with torch.no_grad():
        assert torch.equal(HalfPool()(x), expected)


@pytest.mark.parametrize(
    ("channels", "size", "number"), [(1, 16, 64), (1, 17, 64), (3, 16, 64), (3, 17, 64), (3, 16, 2)]
)
def test_a_pooled_convolution_is_a_convolution_and_max_pooling(channels: int, size: int, number: int) -> None:
    ours, theirs = PooledConv(channels, 6, 5), nn.Conv2d(channels, 6, 5)
    theirs.load_state_dict(ours.state_dict())  # strictly: it has no state of its own
    x, theirs_x = (images(channels, size, number).requires_grad_() for _ in range(2))
    found, expected = ours(x), nn.functional.max_pool2d(theirs(theirs_x), 2)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for ours_grad, grad in zip((x, *ours.parameters()), (theirs_x, *theirs.parameters()), strict=True):
        torch.testing.assert_close(ours_grad.grad, grad.grad, rtol=1e-4, atol=1e-4)
