"""timm's networks by name, such as timm:vit_tiny_patch16_224, with backbone and head, and a safe way to load weights.

timm is imported inside the functions, because that takes seconds and not everybody has installed it. Weights come from
the Hugging Face hub, and only as safetensors, which cannot hold code. A name may end in timm's tag for one of several
sets of weights: resnet18.a1_in1k.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import torch
from torch import Tensor, nn

from fewlabel.core.errors import BadInput, StorageError, install, unknown
from fewlabel.networks.parts import Network, head, replace
from fewlabel.networks.vision import CONNECT_SECONDS, Normalisation

WAY_OUT = "or set model.pretrained = false"


class Unchanged(nn.Identity):
    """What stands in the place of dropout."""

    p = 0.0  # attention looks at the rate


def timm_network(
    name: str,
    in_channels: int,
    num_classes: int,
    image_size: int,
    *,
    dropout: float = 0.0,
    pretrained: bool = False,
) -> Network:
    """Build one of timm's networks. Its classifier is replaced by a linear layer for `num_classes`."""
    about = _about(name)
    options: dict[str, Any] = {"in_chans": in_channels}
    if about.fixed_input_size:  # such as transformers, which have a position for each patch
        options["img_size"] = image_size
    if pretrained:
        options |= {"pretrained": True, "pretrained_cfg_overlay": {"state_dict": _weights(name, about)}}
    import timm
    from timm.layers.drop import DropPath

    try:
        # With the classifier of the weights, because timm checks names and shapes only if that fits, too.
        net: Any = timm.create_model(name, num_classes=about.num_classes, **options)
        net.reset_classifier(0)
        # Most have rate 0, but Monte-Carlo passes repeat only the head, so nothing may be drawn before it.
        for kind in (nn.Dropout, DropPath):
            replace(net, kind, lambda _: Unchanged())
        with torch.no_grad():
            width = net.eval()(torch.zeros(1, in_channels, image_size, image_size)).shape[1]
    except Exception as error:  # 1,400 networks by many authors may raise anything
        sizes = f"{in_channels} channels and data.image_size = {image_size}"
        why = " ".join(str(error).split())
        raise BadInput(f"timm cannot make {name!r} for {sizes}: {type(error).__name__}: {why}") from error
    return Network(net.train(), head(nn.Linear(width, num_classes), dropout))


def timm_image_size(name: str) -> int:
    return int(_about(name).input_size[-1])


def timm_normalisation(name: str) -> Normalisation:
    about = _about(name)
    return tuple(about.mean), tuple(about.std)


def _about(name: str) -> Any:
    """Return what timm knows of a network: the size of its images, and its weights with their mean and std."""
    try:
        import timm
    except ImportError:
        raise BadInput(f"model 'timm:{name}' needs timm, which is not installed: {install('timm')}") from None
    architecture, _, tag = name.partition(".")
    # timm would also take the address of a folder or a repository, and download that.
    if not timm.is_model(architecture):
        raise BadInput(unknown("network of timm", architecture, timm.list_models(), "see https://huggingface.co/timm"))
    known = [full.partition(".")[2] for full in timm.list_models(f"{architecture}.*", pretrained=True)]
    if tag and tag not in known:
        raise BadInput(unknown(f"set of weights for timm's {architecture}", tag, known))
    return timm.get_pretrained_cfg(name)


def _weights(name: str, about: Any) -> dict[str, Tensor]:
    """Load weights from the cache of the Hugging Face hub, and download them first if they are not there."""
    from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
    from safetensors.torch import load_file

    repository, file = about.hf_hub_id, about.hf_hub_filename or "model.safetensors"
    if not repository or not file.endswith(".safetensors"):
        raise BadInput(f"timm has no pretrained weights for {name!r} as safetensors; set model.pretrained = false")
    path = try_to_load_from_cache(repository, file)
    if not isinstance(path, str):
        try:
            _reach(f"{constants.ENDPOINT}/{repository}")
            path = hf_hub_download(repository, file)
        except Exception as error:  # its own kinds differ between versions
            raise StorageError(
                f"the weights {repository} cannot be downloaded from {constants.ENDPOINT} ({error}): "
                f"copy {constants.HF_HUB_CACHE} from a machine that has them, {WAY_OUT}"
            ) from error
    try:
        return load_file(path)
    except Exception as error:
        raise StorageError(f"{Path(path)} is damaged ({error}): delete it, {WAY_OUT}") from error


def _reach(url: str) -> None:
    """Raise an error at once if there is no way to `url`. huggingface_hub would try again for a minute."""
    with suppress(HTTPError):  # somebody answers: what is wrong, huggingface_hub says better
        urlopen(url, timeout=CONNECT_SECONDS).close()
