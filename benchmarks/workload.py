"""The work that FedAvg's contestants share: the same images, clients, views, network and settings for all of them.

It is laid out in a folder, which rivals in environments of their own read, too: this needs nothing of FewLabel but its
batches, its network and its metrics.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fewlabel import networks
from fewlabel.core import metrics
from fewlabel.core.images import Labeled
from fewlabel.core.rng import Rng
from fewlabel.data.images import Images
from fewlabel.learn.optim import Local

FOLDER = "FEWLABEL_BENCH"  # the variable that says where it is


@dataclass(frozen=True)
class Work:
    """What is to be done in each round."""

    images: Images
    labels: Tensor
    shares: list[Tensor]  # which images each client has
    validation: Tensor  # which images measure the model, if any do
    classes: int
    per_round: int
    local: Local

    @classmethod
    def read(cls) -> "Work":
        folder = Path(os.environ[FOLDER])
        told = json.loads((folder / "work.json").read_text())
        pixels, labels = (
            torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in ("images", "labels")
        )
        images = Images(pixels, tuple(told["mean"]), tuple(told["std"]), weak=told["weak"])
        shares = [torch.tensor(share) for share in told["shares"]]
        validation = torch.tensor(told["validation"], dtype=torch.int64)
        return cls(images, labels, shares, validation, told["classes"], told["per_round"], Local(**told["local"]))

    def client(self, number: int, rng: torch.Generator) -> Labeled:
        return self.holding(self.shares[number], rng)

    def holding(self, where: Tensor, rng: torch.Generator) -> Labeled:
        return Labeled(self.images, where, self.labels[where], rng)

    def network(self) -> nn.Module:
        """SimpleCNN, with the weights that a run of FewLabel with seed 0 begins with."""
        _, channels, size, _ = self.images.pixels.shape
        with Rng(0, "network").scope():
            return networks.build("simple-cnn", channels, self.classes, size)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """As anyone has it; FewLabel's is the same by its own way."""
        local = self.local
        return torch.optim.SGD(model.parameters(), local.lr, local.momentum, weight_decay=local.weight_decay)

    def train(self, model: nn.Module, data: Labeled) -> None:
        """A client's epochs, as anyone would write them."""
        optimizer = self.optimizer(model)
        model.train()
        for _ in range(self.local.epochs):
            for x, y in data.batches("weak", self.local.batch_size):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                nn.utils.clip_grad_norm_(model.parameters(), self.local.clip or 0.0)
                optimizer.step()

    def score(self, model: nn.Module) -> float:
        """Balanced accuracy on the validation images."""
        data = self.holding(self.validation, torch.Generator())
        seen = metrics.predict(model, (x for x, _ in data.batches("plain", 500, shuffle=False)))
        return float(metrics.measure(seen, data.y)["balanced_accuracy"])


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
    describe(folder, wanted, dataset, partition.of(dataset, wanted))


def lay_out_experiment(folder: Path, wanted: Any) -> None:
    """Writes the work of an experiment by labels alone into a folder, with the validation images behind the others."""
    from fewlabel.data import partition
    from fewlabel.engine.world import dataset_of

    dataset = dataset_of(wanted, fresh=True)
    train, validation = (dataset.splits[name] for name in ("train", "validation"))
    np.save(folder / "images.npy", torch.cat([train.images.pixels, validation.images.pixels]).numpy())
    np.save(folder / "labels.npy", torch.cat([train.labels, validation.labels]).numpy())
    behind = range(len(train), len(train) + len(validation))
    describe(folder, wanted, dataset, partition.of(dataset, wanted), behind)


def describe(folder: Path, wanted: Any, dataset: Any, dealt: Any, validation: Sequence[int] = ()) -> None:
    """Writes down what `Work.read` reads beside the images. Clients without labels are left out."""
    shown = dataset.splits["train"].images
    shares = [share.labeled.tolist() for share in dealt.shares if len(share.labeled)]
    told = {
        "shares": shares,
        "validation": list(validation),
        "classes": len(dataset.classes),
        "mean": shown.mean,
        "std": shown.std,
        "weak": wanted.views.weak,
        "per_round": wanted.clients.per_round or len(shares),
        "local": asdict(wanted.method.local),
    }
    (folder / "work.json").write_text(json.dumps(told))
