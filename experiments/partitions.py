"""Who holds which image in the main tables, published: docs/results/partitions/TABLE.npz for each of them.

    python -m experiments.partitions --set a.data.path=pbc.npz     writes them; the data must be on the machine

Arrays of a file: `labels` has the class of each image of the training split, in its order; `clients` has
for each seed the client that holds the image, or -1 if nobody does; `labeled` has for each seed the clients with labels.
`checksums` are those of partition.json, which the lines of docs/results/ have, too. Clients are dealt from labels and
seed alone, so that anybody can draw them again without the images.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments import lines
from experiments.plan import MAIN, SEEDS, Trial, given
from experiments.study import changes_for
from fewlabel.data import partition
from fewlabel.data.partition import Partition
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import Experiment
from fewlabel.report.runs import FLOOR


def path_of(table: str) -> Path:
    return lines.DOCS / "results" / "partitions" / f"{table}.npz"


def experiment(table: str, seed: int, changes: Sequence[str] = ()) -> Experiment:
    trial = Trial(table, "", FLOOR, seed, given(table, FLOOR))
    return trial.experiment(changes_for(trial, changes))


def holders(dealt: Partition, images: int) -> np.ndarray:
    """The client that holds each image, or -1."""
    found = np.full(images, -1, np.int8)
    for client in dealt.clients:
        found[dealt.shares[client].images] = client
    return found


def labeled(dealt: Partition) -> list[int]:
    return [client for client in dealt.clients if len(dealt.shares[client].labeled)]


def write(changes: Sequence[str]) -> None:
    for table in MAIN:
        every = [experiment(table, seed, changes) for seed in SEEDS]
        dataset = dataset_of(every[0])
        dealt = [partition.of(dataset, one) for one in every]
        labels = dataset.splits["train"].labels.numpy().astype(np.int8)
        path_of(table).parent.mkdir(parents=True, exist_ok=True)
        np.savez_compressed(
            path_of(table),
            labels=labels,
            clients=np.stack([holders(one, len(labels)) for one in dealt]),
            labeled=np.array([labeled(one) for one in dealt], np.int8),
            checksums=np.array([one.checksum for one in dealt]),
            data=np.array(dataset.digest),
        )
        print(f"{path_of(table)}: {path_of(table).stat().st_size:,} bytes")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--set", action="append", default=[], dest="changes")
    write(parser.parse_args().changes)
