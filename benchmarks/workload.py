"""The work that FedAvg's contestants share: the same images, clients, views, network and settings for all of them.

It is laid out in a folder, which rivals in environments of their own read, too: this needs nothing of FewLabel but its
batches and its network.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewlabel import networks
from fewlabel.core.images import Labeled
from fewlabel.data.images import Images
from fewlabel.learn.optim import Local

FOLDER = "FEWLABEL_BENCH"  # the variable that says where it is


@dataclass(frozen=True)
class Work:
    """What is to be done in each round."""

    images: Images
    labels: Tensor
    shares: list[Tensor]  # which images each client has
    per_round: int
    local: Local

    @classmethod
    def read(cls) -> "Work":
        folder = Path(os.environ[FOLDER])
        told = json.loads((folder / "work.json").read_text())
        pixels, labels = (
            torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in ("images", "labels")
        )
        images = Images(pixels, tuple(told["mean"]), tuple(told["std"]))
        shares = [torch.tensor(share) for share in told["shares"]]
        return cls(images, labels, shares, told["per_round"], Local(batch_size=told["batch"]))

    def client(self, number: int, rng: torch.Generator) -> Labeled:
        return self.holding(self.shares[number], rng)

    def holding(self, where: Tensor, rng: torch.Generator) -> Labeled:
        return Labeled(self.images, where, self.labels[where], rng)

    def network(self) -> nn.Module:
        return networks.build("simple-cnn", 1, 10, self.images.pixels.shape[-1])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """As anyone has it; FewLabel's is the same by its own way."""
        local = self.local
        return torch.optim.SGD(model.parameters(), local.lr, local.momentum, weight_decay=local.weight_decay)

    def train(self, model: nn.Module, data: Labeled) -> None:
        """A client's epoch, as anyone would write it."""
        optimizer = self.optimizer(model)
        model.train()
        for x, y in data.batches("weak", self.local.batch_size):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), self.local.clip or 0.0)
            optimizer.step()


def data() -> Any:
    """The images as a data set of one's own: FewLabel reads them by this function's name."""
    from fewlabel.data.datasets import Raw

    folder = Path(os.environ[FOLDER])
    images, labels = np.load(folder / "images.npy", mmap_mode="r"), np.load(folder / "labels.npy")
    return Raw(tuple("0123456789"), {"train": (images, labels), "test": (images[:100], labels[:100])})


def experiment(clients: int, per_round: int, batch: int, alpha: float | None, rounds: int = 1_000_000) -> Any:
    """The same as an experiment; no round but the last is evaluated."""
    from fewlabel.experiment import Clients, Data, Evaluate, Experiment, Labels
    from fewlabel.methods.fedavg import FedAvg

    return Experiment(
        method=FedAvg(local=Local(batch_size=batch)),
        rounds=rounds,
        data=Data("benchmarks.workload:data"),
        clients=Clients(clients, "dirichlet" if alpha else "iid", alpha=alpha or 1.0, per_round=per_round),
        labels=Labels("every-client", fraction=1.0),
        evaluate=Evaluate(every=rounds),
    )


def lay_out(folder: Path, images: int, **settings: Any) -> None:
    """Writes the work into a folder: Fashion-MNIST's first images, dealt out as FewLabel deals them."""
    from fewlabel.data import datasets, partition
    from fewlabel.engine.world import dataset_of

    train = datasets.load("fashion-mnist", 32).splits["train"]
    os.environ |= {FOLDER: str(folder), "XDG_CACHE_HOME": str(folder / "cache")}
    np.save(folder / "images.npy", train.images.pixels[:images].numpy())
    np.save(folder / "labels.npy", train.labels[:images].numpy())
    wanted = experiment(**settings)
    dataset = dataset_of(wanted, fresh=True)
    shown = dataset.splits["train"].images
    told = {
        "shares": [share.images.tolist() for share in partition.of(dataset, wanted).shares],
        "mean": shown.mean,
        "std": shown.std,
        "per_round": settings["per_round"],
        "batch": settings["batch"],
    }
    (folder / "work.json").write_text(json.dumps(told))
