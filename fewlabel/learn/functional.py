"""Run a network with weights that are not its own: `functional_call` without a search for their places each time."""

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from fewlabel.core.tree import Tree


@runtime_checkable
class Headed(Protocol):
    """A network in two parts, like ours: `classify(features(x))` gives its logits, and dropout is in `classify`."""

    all_dropout_in_head: bool  # or passes with dropout could not share the features

    def features(self, x: Tensor) -> Tensor: ...

    def classify(self, features: Tensor) -> Tensor: ...


class Borrowed:
    """A site's network that borrows other weights for one pass."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._homes = {
            f"{prefix}.{name}".lstrip("."): (part, name)
            for prefix, module in model.named_modules(remove_duplicate=False)
            for part in (module._parameters, module._buffers)
            for name in part
        }
        self._modes = [vars(module) for module in model.modules()]

    def __call__(self, weights: Tree, x: Tensor) -> Tensor:
        """Return the logits with these weights in place of the network's own."""
        homes = [(*self._homes[name], value) for name, value in weights.items()]
        own = [part[name] for part, name, _ in homes]
        for part, name, value in homes:
            part[name] = value
        try:
            logits: Tensor = self.model(x)
        finally:
            for (part, name, _), value in zip(homes, own, strict=True):
                part[name] = value
        return logits

    def judge(self, weights: Tree, x: Tensor) -> Tensor:
        """Return the logits in evaluation mode. Afterwards the network is in training mode."""
        for mode in self._modes:
            mode["training"] = False
        try:
            return self(weights, x)
        finally:
            for mode in self._modes:
                mode["training"] = True
