"""Who holds which image in the main tables, published: docs/results/partitions/TABLE.npz for each of them.

    python -m experiments.partitions --set a.data.path=pbc.npz     writes them; the data must be on the machine

Arrays of a file, for each seed S: `images-S` has the images that clients hold, client after client, in each one's own
order, first those with labels; an image is its place in the training split. `ends-S` says where these end: the
labeled and the unlabeled ones of client 0, those of client 1, and so on, after a 0. `classes-S` counts each client's
images of each class. `checksum-S` is that of partition.json, which the lines of docs/results/ have, too; `data` is the
checksum of the data set.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments import lines
from experiments.plan import MAIN, SEEDS, Trial, given
from experiments.study import changes_for
from fewlabel.data import partition
from fewlabel.data.partition import Holdings, Partition
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import Experiment
from fewlabel.report.runs import FLOOR


def path_of(table: str) -> Path:
    return lines.DOCS / "results" / "partitions" / f"{table}.npz"


def experiment(table: str, seed: int, changes: Sequence[str] = ()) -> Experiment:
    trial = Trial(table, "", FLOOR, seed, given(table, FLOOR))
    return trial.experiment(changes_for(trial, changes))


def restored(file: Mapping[str, np.ndarray], seed: int) -> Partition:
    """The partition that a file describes."""
    index, ends = (file[f"{key}-{seed}"].astype(np.int64) for key in ("images", "ends"))
    return Partition(Holdings(index, ends), np.zeros(0, np.int64), str(file["data"]))


def arrays(table: str, changes: Sequence[str]) -> dict[str, np.ndarray]:
    """What is published of a table, from its data."""
    dataset = dataset_of(experiment(table, SEEDS[0], changes))
    labels, found = dataset.splits["train"].labels.numpy(), {"data": np.array(dataset.digest)}
    for seed in SEEDS:
        dealt = partition.of(dataset, experiment(table, seed, changes))
        held = [part for share in dealt.shares for part in (share.labeled, share.unlabeled)]
        counts = [np.bincount(labels[share.images], minlength=len(dataset.classes)) for share in dealt.shares]
        found[f"images-{seed}"] = np.concatenate(held).astype(np.uint16)
        found[f"ends-{seed}"] = np.cumsum([0, *map(len, held)]).astype(np.uint16)
        found[f"classes-{seed}"] = np.stack(counts).astype(np.uint16)
        found[f"checksum-{seed}"] = np.array(dealt.checksum)
    return found


def write(changes: Sequence[str]) -> None:
    for table in MAIN:
        path_of(table).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(path_of(table), **arrays(table, changes))
        print(f"{path_of(table)}: {path_of(table).stat().st_size:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    write(parser.parse_args().changes)
