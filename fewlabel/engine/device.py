"""Where workers compute: on the CPU or on GPUs. Whatever names a device asks here.

A worker's network and images lie on its device, and what it is sent is unpacked to it; all else is where these are. The
server's own arithmetic stays on the CPU, and so does chance: which images come and how views change them is the same
everywhere.
"""

import os

import torch

from fewlabel.core.errors import BadInput

PER_GPU = 2  # workers, so that one prepares while the other computes


def of(name: str, worker: int = 0) -> torch.device:
    """The device of a worker; of several GPUs each takes the next."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput(f"there is no {name} here that PyTorch can use; set device = 'cpu', or run it where there is")
    return torch.device("cuda", worker % torch.cuda.device_count())


def workers(name: str) -> int:
    """How many processes there are unless somebody says so: one per core, or a few for each GPU."""
    return os.cpu_count() or 1 if name == "cpu" else PER_GPU * torch.cuda.device_count()
