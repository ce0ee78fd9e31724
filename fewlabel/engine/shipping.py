"""The models that a run leaves behind: the last round's and the one that validation chose, each with its card."""

import json
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from fewlabel.core import metrics, tree
from fewlabel.core.federation import batch_statistics
from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree
from fewlabel.engine.card import Card
from fewlabel.engine.worker import EVALUATION_BATCH
from fewlabel.engine.world import World
from fewlabel.experiment import dumps
from fewlabel.learn import calibration


def model_file(world: World, initial: Tree, weights: Tree, chosen: str, round: int) -> bytes:
    """Return the file of a model, with its card. `chosen` says how its round was chosen: "last" or "validation"."""
    local = world.experiment.model.buffers == "local"  # then no statistics are right for everyone
    whole = tree.parameters(weights) if local else initial | weights
    card = Card.of(world.experiment, world.dataset, chosen, round, temperature(world, whole))
    about: dict[str, Any] = {"version": version("fewlabel"), "experiment": dumps(world.experiment), **asdict(card)}
    # One entry, because safetensors writes several in any order, and equal models are to be equal files.
    return save(whole, {"fewlabel": json.dumps(about)})


def temperature(world: World, weights: Tree) -> float | None:
    """Return the temperature that calibrates a model on validation labels, or None where there are none.

    It is computed in this process, so that it does not depend on workers.
    """
    if "validation" not in world.measured:
        return None
    images = world.whole("validation", Rng("calibration"))

    def batches() -> Iterator[Tensor]:
        return (x for x, _ in images.batches("plain", EVALUATION_BATCH, shuffle=False))

    network = world.network(Rng("scratch"))
    network.load_state_dict(tree.untrained(network) | weights)
    if tree.statistics(tree.of(network)).keys() - weights.keys():
        with torch.no_grad():
            batch_statistics(network, batches())
    logits = torch.cat(list(metrics.outputs(network, batches())))
    if not logits.isfinite().all():
        return None  # it has diverged
    prior = calibration.log_shares(images.y, len(world.dataset.classes)) if world.balanced else None
    found = calibration.temperature(logits, images.y, prior)
    return None if found is None else float(f"{found:.4g}")
