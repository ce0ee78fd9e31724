"""Write a division of images that others made as a partition.json of FewLabel.

    python their_split.py cifar100 'cifar100_noniid_10%labeled.pth' theirs.json

Their file is what RSCFed's and CBAFed's code saves: a dictionary whose `data_partition` has, for each client, the
numbers of its training images in the order of the published files. Only numbers are loaded, never code.
"""

import sys
from pathlib import Path

import numpy as np
import torch

from fewlabel import Data, Experiment
from fewlabel.data.partition import Holding, Partition
from fewlabel.engine.world import dataset_of


def main(data: str, theirs: str, out: str) -> None:
    dataset = dataset_of(Experiment(data=Data(data)))
    found = torch.load(theirs, weights_only=True)["data_partition"]
    none = np.empty(0, np.int64)
    holdings = [Holding(none, np.array(found[client], np.int64)) for client in range(len(found))]
    train = dataset.splits["train"]
    Partition(holdings, none, dataset.digest).save(Path(out), train.labels.numpy(), dataset.classes)
    print(f"{out}: {len(holdings)} clients with {sum(map(len, holdings)):,} of {len(train.labels):,} images")


if __name__ == "__main__":
    main(*sys.argv[1:])
