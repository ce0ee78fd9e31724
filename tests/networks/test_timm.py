"""timm's networks must keep our cut into backbone and head, and load weights only from files that hold nothing else."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.networks import Network, build, image_size, normalisation

timm = pytest.importorskip("timm", reason="timm is not installed: pip install '.[timm]'")
hub = pytest.importorskip("huggingface_hub", reason="it comes with timm: pip install '.[timm]'")

# Small ones of several kinds: a transformer, one whose BatchNorm includes the activation, LayerNorm, BatchNorm
NAMES = ["test_vit", "test_efficientnet", "test_convnext", "test_resnet"]


def images(channels: int, size: int, number: int = 2) -> Tensor:
    return torch.randn(number, channels, size, size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_network_of_timms_is_a_backbone_and_a_linear_head(name: str, channels: int) -> None:
    net = build(f"timm:{name}", channels, 5, 64, dropout=0.3)
    assert isinstance(net, Network)
    assert net.training
    assert net.eval()(images(channels, 64)).shape == (2, 5)
    assert [type(layer) for layer in net.head] == [nn.Dropout, nn.Linear]
    random_layers = [key for key, module in net.named_modules() if "drop" in type(module).__name__.lower()]
    assert random_layers == ["head.dropout"]


def test_features_and_classify_are_forward() -> None:
    net, x = build("timm:test_vit", 3, 5, 64).eval(), images(3, 64)
    with torch.no_grad():
        assert torch.equal(net.classify(net.features(x)), net(x))


def test_attention_trains_without_its_dropout() -> None:
    net, x = build("timm:test_vit", 3, 5, 64), images(3, 64)
    torch.manual_seed(0)
    first = net(x)
    torch.manual_seed(1)
    assert torch.equal(first, net(x))


def test_vit_tiny_is_the_one_that_our_own_copies() -> None:
    net = build("timm:vit_tiny_patch16_224", 3, 1000, 224)
    assert sum(weight.numel() for weight in net.parameters()) == 5_717_416


def test_a_seed_decides_the_initial_weights_and_no_other_generator_is_touched() -> None:
    before, states = random.getstate(), []
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(3)
            states.append(build("timm:test_efficientnet", 3, 5, 64).state_dict())
    assert random.getstate() == before
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_group_norm_keeps_the_activation_that_timm_puts_into_its_batch_norm() -> None:
    net = build("timm:test_efficientnet", 3, 5, 64, norm="group")
    assert not any(isinstance(module, nn.BatchNorm2d) for module in net.modules())
    stem = net.backbone.bn1
    assert [type(layer) for layer in stem] == [nn.GroupNorm, nn.Identity, nn.SiLU]
    x = images(stem[0].num_channels, 8)
    torch.testing.assert_close(stem(x), nn.functional.silu(stem[0](x)))


def test_images_have_the_size_and_the_mean_and_std_of_the_weights() -> None:
    assert image_size("timm:vit_tiny_patch16_224") == 224
    assert normalisation("timm:vit_tiny_patch16_224", 3) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert normalisation("timm:resnet18.tv_in1k", 3) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    [mean], [std] = normalisation("timm:resnet18", 1)
    assert mean == pytest.approx((0.485 + 0.456 + 0.406) / 3)
    assert std == pytest.approx((0.229 + 0.224 + 0.225) / 3)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("timm:resnet1o1", "did you mean 'resnet101'"),
        ("timm:resnet18.tv_in2k", "set of weights for timm's resnet18 'tv_in2k'; did you mean 'tv_in1k'"),
        ("timm:", "no network of timm ''"),
        ("timm:hf-hub:somebody/something", "no network of timm 'hf-hub:somebody/something'"),
        ("timm:local-dir:/tmp", "no network of timm 'local-dir:/tmp'"),
        ("timm:test_vit", r"cannot make 'test_vit' for 3 channels and data\.image_size = 4"),
    ],
)
def test_a_network_that_timm_cannot_make_is_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(BadInput, match=sentence) as error:
        build(name, 3, 5, 4)
    assert "\n" not in str(error.value)


# Pretrained weights, from a file as the hub's that the tests make


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the Hugging Face hub, and no way to the hub itself."""
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    return tmp_path


def put(cache: Path, name: str, content: bytes | dict[str, Tensor]) -> Path:
    """Save weights where the hub's own library would have saved them."""
    folder = cache / f"models--{timm.get_pretrained_cfg(name).hf_hub_id.replace('/', '--')}"
    commit = "0" * 40
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(commit)
    path = folder / "snapshots" / commit / "model.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(content) if isinstance(content, bytes) else save_file(content, path)
    return path


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", ["test_vit", "test_resnet"])
def test_weights_in_the_hubs_cache_are_used(name: str, channels: int, cache: Path) -> None:
    torch.manual_seed(5)
    theirs = timm.create_model(name).eval()  # with its 1000 classes, as on the hub
    put(cache, name, theirs.state_dict())
    net = build(f"timm:{name}", channels, 4, 160, pretrained=True).eval()
    theirs.reset_classifier(0)
    x = images(channels, 160)
    with torch.no_grad():
        torch.testing.assert_close(net.backbone(x), theirs(x.expand(-1, 3, -1, -1)), rtol=1e-3, atol=1e-4)
        assert net(x).shape == (2, 4)


def test_positions_of_a_transformer_are_resampled_for_smaller_images(cache: Path) -> None:
    put(cache, "test_vit", timm.create_model("test_vit").state_dict())
    assert build("timm:test_vit", 3, 4, 64, pretrained=True)(images(3, 64)).shape == (2, 4)


def test_weights_that_cannot_be_downloaded_are_one_sentence_with_two_ways_out(cache: Path) -> None:
    with pytest.raises(StorageError) as error:
        build("timm:vit_tiny_patch16_224", 3, 5, 224, pretrained=True)
    sentence = str(error.value)
    assert "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k cannot be downloaded from http://127.0.0.1:9" in sentence
    assert str(cache) in sentence
    assert "model.pretrained = false" in sentence
    assert "\n" not in sentence


def test_weights_of_another_network_are_refused(cache: Path) -> None:
    put(cache, "test_vit", timm.create_model("test_resnet").state_dict())
    with pytest.raises(BadInput, match="timm cannot make 'test_vit'"):
        build("timm:test_vit", 3, 4, 160, pretrained=True)


def test_a_file_that_is_no_safetensors_is_refused(cache: Path) -> None:
    path = put(cache, "test_vit", b"\x80\x02cos\nsystem\n.")
    with pytest.raises(StorageError, match=r"damaged.*delete it, or set model\.pretrained = false") as error:
        build("timm:test_vit", 3, 4, 160, pretrained=True)
    assert str(path) in str(error.value)
