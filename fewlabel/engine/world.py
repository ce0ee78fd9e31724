"""A run's experiment, data and partition, as every process that takes part in the run sees them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fewlabel import networks
from fewlabel.core.errors import StorageError
from fewlabel.core.federation import ClientInfo, Site
from fewlabel.core.images import Labeled, Mixup, Tally, Unlabeled
from fewlabel.core.rng import Rng
from fewlabel.data import datasets
from fewlabel.data.images import Images
from fewlabel.data.labels import Index, held_out, num_held_out
from fewlabel.data.own.listing import TABLES
from fewlabel.data.partition import Holding, Partition
from fewlabel.engine import record
from fewlabel.engine.executor import SERVER_ID
from fewlabel.experiment import Experiment, load


@dataclass(frozen=True)
class World:
    """A run's experiment and data, as every process that takes part reads them from the run's directory."""

    experiment: Experiment
    dataset: datasets.Dataset
    partition: Partition
    tested: tuple[int, ...] = ()  # clients on other machines that have test images
    names: Mapping[int, str] = field(default_factory=dict)  # what people call clients on other machines

    @classmethod
    def open(cls, directory: Path) -> "World":
        experiment = load(directory / record.EXPERIMENT)
        dataset = dataset_of(experiment)
        partition = Partition.load(directory / record.PARTITION)
        if partition.data != dataset.digest:
            raise StorageError(f"the data set '{dataset.name}' is not the one that {directory} began with; start anew")
        train = dataset.splits["train"]
        images = replace(train.images, weak=experiment.views.weak, strong=experiment.views.strong)
        splits = {
            name: replace(split, images=replace(split.images, weak=experiment.views.test))
            for name, split in dataset.splits.items()
        } | {"train": replace(train, images=images)}
        return cls(experiment, replace(dataset, splits=splits), partition)

    def on(self, place: torch.device) -> "World":
        """Return the same world with its images on a device. What sites make of them is then there, too."""
        splits = {
            name: replace(split, images=replace(split.images, pixels=split.images.pixels.to(place)))
            for name, split in self.dataset.splits.items()
        }
        return replace(self, dataset=replace(self.dataset, splits=splits))

    def network(self, rng: Rng, pretrained: bool = False) -> torch.nn.Module:
        net = self.experiment.model
        with rng.scope():
            return networks.build(
                net.name,
                self.dataset.channels,
                len(self.dataset.classes),
                self.dataset.image_size,
                norm=net.norm,
                dropout=net.dropout,
                pretrained=pretrained,
            )

    def share(self, client: int, round: int) -> Holding:
        """Return the images that a client trains on in a round. In the recipe's warm-up nobody has unlabeled ones."""
        whole = Holding(self.divided(client)[0], self.partition.shares[client].unlabeled)
        share = whole.at(round, self.experiment.stream)
        return Holding(share.labeled, share.unlabeled[:0]) if 0 < round <= self.experiment.warmup_rounds else share

    def divided(self, client: int) -> tuple[Index, Index]:
        """Return a site's labeled images: those that it trains on, and those that it holds out.

        No image is held out if one of the same patient is trained on with its label. Such images are left out.
        """
        index = self.partition.server if client == SERVER_ID else self.partition.shares[client].labeled
        if not self.experiment.labels.held_out:
            return index, index[:0]
        if len(index) and index[0] < 0:  # they are elsewhere, and only their number is known here: a claim of any size
            number = num_held_out(len(index), self.experiment.labels.held_out)
            return index[number:], index[:number]
        rng = Rng(self.experiment.seed, "held-out", client)
        places = held_out(self.known_labels.numpy()[index], self.experiment.labels.held_out, rng)
        kept, aside, groups = np.delete(index, places), index[places], self.dataset.splits["train"].groups
        if groups is not None:
            aside = aside[~np.isin(groups.numpy()[aside], groups.numpy()[kept])]
        return kept, aside

    def aside(self, client: int, round: int) -> Index:
        """Return the labeled images that a site holds out in a round."""
        aside = self.divided(client)[1]
        return Holding(aside, aside[:0]).at(round, self.experiment.stream).labeled

    def num_held_out(self, client: int, round: int) -> int:
        return len(self.aside(client, round))

    def info(self, client: int, round: int) -> ClientInfo:
        share = self.share(client, round)
        return ClientInfo(client, len(share.labeled), len(share.unlabeled))

    @cached_property
    def known_labels(self) -> Tensor:
        """The training labels that sites have. Some are wrong, if the experiment asks for it; some may be added."""
        labels = self.dataset.splits["train"].labels
        for changed in (self.partition.noise, self.partition.added):
            if changed.size:
                labels = labels.index_copy(0, *torch.from_numpy(changed))
        return labels

    def flips(self, client: int) -> bool:
        """Return True if a client of a simulation trains on wrong labels: the last class for the first, and so on."""
        attack = self.experiment.clients.attack
        return attack is not None and attack.by(client, "label-flip")

    def training(self, index: Any, rng: torch.Generator, tally: Tally | None = None, flip: bool = False) -> Labeled:
        """Return labeled images. Those that a site trains on have a tally, and are mixed if the recipe says so."""
        where = torch.from_numpy(index)
        labels, images = self.known_labels[where], self.dataset.splits["train"].images
        labels, least = len(self.dataset.classes) - 1 - labels if flip else labels, self.experiment.recipe.batches
        mixup = self.mixup if tally else None
        return Labeled(images, where, labels, rng, tally, balanced=self.balanced, least=least, mixup=mixup)

    @property
    def balanced(self) -> int | None:
        """The number of classes, if losses on labels treat all classes alike."""
        return len(self.dataset.classes) if self.experiment.recipe.balance == "logit-adjusted" else None

    @property
    def mixup(self) -> Mixup | None:
        """How sites mix the images that they train on with labels, if they do."""
        alpha = self.experiment.recipe.mixup
        return Mixup(alpha, len(self.dataset.classes)) if alpha else None

    @property
    def labels_per_class(self) -> list[int] | None:
        """How many images of each class have a label to train with, or None if sites keep that to themselves."""
        sites = SERVER_ID, *range(len(self.partition.shares))
        held = torch.from_numpy(np.concatenate([self.divided(site)[0] for site in sites]))
        if (held < 0).any():
            return None
        counts: list[int] = self.known_labels[held].bincount(minlength=len(self.dataset.classes)).tolist()
        return counts

    @property
    def measured(self) -> tuple[str, ...]:
        """The splits to measure on. If no validation is published, it is the labeled images set aside for it."""
        there = {*self.dataset.splits, *(["validation"] if len(self.partition.validation) else [])}
        return tuple(split for split in ("test", "validation") if split in there)

    def whole(self, split: str, rng: Rng) -> Labeled:
        if split in self.dataset.splits:
            data = self.dataset.splits[split]
            return Labeled(data.images, torch.arange(len(data)), data.labels, rng.torch)
        return self.training(self.partition.validation, rng.torch)

    def view(self, split: str) -> str:
        """Return the view in which a model is measured on a split."""
        return "weak" if self.experiment.views.test != "none" and split in self.dataset.splits else "plain"

    def site(self, client: int, round: int, rng: Rng, model: torch.nn.Module, **more: Any) -> Site[Any]:
        """Return a client's site, or the server's."""
        if client == SERVER_ID:
            share = Holding(self.divided(client)[0], self.partition.server[:0])
            validation = self.whole("validation", rng) if "validation" in self.measured else None
        else:
            share, validation = self.share(client, round), None
        aside = self.aside(client, round)
        tally, images = Tally(), self.dataset.splits["train"].images
        labeled = unlabeled = None
        if len(share.labeled):
            labeled = self.training(share.labeled, rng.stream("labeled").torch, tally, self.flips(client))
        if len(share.unlabeled):
            where = torch.from_numpy(share.unlabeled)
            how = self.balanced, self.experiment.recipe.batches, self.mixup
            unlabeled = Unlabeled(images, where, rng.stream("unlabeled").torch, tally, *how)
        return Site(
            ClientInfo(client, len(share.labeled), len(share.unlabeled)),
            round=round,
            rounds=self.experiment.rounds,
            num_classes=len(self.dataset.classes),
            model=model,
            rng=rng,
            labeled=labeled,
            unlabeled=unlabeled,
            validation=validation,
            held_out=self.training(aside, rng.stream("held-out").torch) if len(aside) else None,
            buffers=self.experiment.model.buffers,
            tally=tally,
            device=images.pixels.device,
            warmup=self.experiment.warmup_rounds,
            **more,
        )


def dataset_of(experiment: Experiment, fresh: bool = False) -> datasets.Dataset:
    """Load the data set as an experiment asks for it."""
    wanted = {f.name: getattr(experiment.data, f.name) for f in fields(experiment.data)}
    if experiment.clients.column and experiment.data.name in TABLES:  # any column of the table may name the clients
        wanted["columns"] = {**experiment.data.columns, "client": experiment.clients.column}
    named = experiment.labels.file is not None
    dataset = datasets.load(**wanted | {"image_size": image_size(experiment), "fresh": fresh, "named": named})
    splits = {
        name: replace(split, images=normalised(experiment, split.images)) for name, split in dataset.splits.items()
    }
    return replace(dataset, splits=splits)


def normalised(experiment: Experiment, images: Images) -> Images:
    """Return the same images with the mean and std that pretrained weights want, if the experiment has such weights."""
    if not experiment.model.pretrained:
        return images
    mean, std = networks.normalisation(experiment.model.name, images.pixels.shape[1])
    return replace(images, mean=mean, std=std)


def image_size(experiment: Experiment) -> int:
    return experiment.data.image_size or networks.image_size(experiment.model.name)
