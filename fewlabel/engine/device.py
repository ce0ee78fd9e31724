"""Where workers compute: on the CPU or on GPUs. All code that needs a device asks here.

A worker's network and images are on its device, and messages to it are unpacked there. All other tensors follow these.
The server's own arithmetic stays on the CPU. Random numbers are drawn there, too, so the order of images and their
views are the same on every device.
"""

import os

import torch

from fewlabel.core.errors import BadInput

PER_GPU = 2  # workers for each GPU: one prepares while the other computes


def of(name: str, worker: int = 0) -> torch.device:
    """Return the device of a worker. If there are several GPUs, workers take them in turn."""
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadInput(f"there is no {name} here that PyTorch can use; set device = 'cpu', or run it where there is")
    return torch.device("cuda", worker % torch.cuda.device_count())


def workers(name: str) -> int:
    """Return the default number of worker processes: one for each core, or a few for each GPU."""
    return os.cpu_count() or 1 if name == "cpu" else PER_GPU * torch.cuda.device_count()
