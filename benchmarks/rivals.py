"""Flower's simulation on Ray and pfl, as contestants of the FedAvg measurements, in the rivals' environment."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from benchmarks.measure import Turn
from benchmarks.workload import FOLDER, Work

ENDLESS = 1_000_000


def flower(turn: Turn, actors: int, measured_in: str | None = None) -> None:
    """FedAvg by the Message API. If a folder of work is named, its model is measured there after each round."""
    from flwr.app import ArrayRecord, Context
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from benchmarks import flower_client

    if measured_in:
        os.environ[FOLDER] = measured_in  # actors inherit it
    work, server = Work.read(), ServerApp()
    model = work.network()

    class Watched(FedAvg):
        def configure_train(self, *arguments: Any, **named: Any) -> Any:
            if not turn():
                os._exit(0)
            return super().configure_train(*arguments, **named)

    def measured(number: int, arrays: ArrayRecord) -> None:
        if measured_in is None or number == 0:
            return
        began = time.monotonic()
        model.load_state_dict(arrays.to_torch_state_dict())
        line = {"round": number, "validation": {"balanced_accuracy": work.score(model)}}
        with (Path(measured_in) / "rounds.jsonl").open("a") as file:
            print(json.dumps(line | {"seconds_evaluate": time.monotonic() - began}), file=file)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        share = work.per_round / len(work.shares)
        strategy = Watched(share, 0.0, min_train_nodes=work.per_round, min_available_nodes=len(work.shares))
        strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=ENDLESS, evaluate_fn=measured)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    init = {"num_cpus": actors, "num_gpus": 0, "include_dashboard": False}
    run_simulation(server, flower_client.app, len(work.shares), backend_config=resources | {"init_args": init})


def pfl(turn: Turn, processes: int, threads: int | None = None) -> None:
    """FedAvg in one process, or in two that speak by torch.distributed."""
    if processes == 1:
        return pfl_rank(turn, 1, threads)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    addresses = ",".join(f"127.0.0.1:{port + rank}" for rank in range(processes))
    os.environ |= {"PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": "0"}
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.rivals", str(processes)],
            env=os.environ | {"PFL_WORKER_RANK": str(rank)},
            stdin=subprocess.PIPE,
            text=True,
        )
        for rank in range(1, processes)
    ]

    def everyone() -> bool:
        more = turn()
        for other in others:
            assert other.stdin is not None
            print("round" if more else "end", file=other.stdin, flush=True)
        return more

    return pfl_rank(everyone, processes, 1)


def pfl_rank(turn: Turn, processes: int, threads: int | None) -> None:
    if threads:
        torch.set_num_threads(threads)
    import numpy as np
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import MinimizeReuseUserSampler
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel

    np.random.seed(0)  # all processes must draw the same clients
    torch.manual_seed(0)
    work, rng = Work.read(), torch.Generator().manual_seed(0)

    class Shown(Dataset):  # type: ignore[misc]
        """A client's images, shown as to everyone else."""

        def __init__(self, client: int) -> None:
            super().__init__((), user_id=str(client))
            self._client = client

        def __len__(self) -> int:
            return len(work.shares[self._client])

        def iter(self, batch_size: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            return work.client(self._client, rng).batches("weak", batch_size or len(self))

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = work.network()

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.train()
            return cross_entropy(self.inner(x), y)

        @torch.no_grad()
        def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
            return {"loss": Weighted(float(cross_entropy(self.inner(x), y)) * len(y), len(y))}

    class Watched(TrainingProcessCallback):  # type: ignore[misc]
        def on_train_begin(self, *, model: Any) -> Any:
            turn()
            return Metrics()

        def after_central_iteration(self, metrics: Any, model: Any, *, central_iteration: int) -> Any:
            return not turn(), Metrics()

    net = Net()
    local = work.local
    clients = list(range(len(work.shares)))
    users = FederatedDataset(
        Shown,
        MinimizeReuseUserSampler(clients),
        {client: len(work.shares[client]) for client in clients} if processes > 1 else None,
    )
    model = PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr, local.momentum, weight_decay=local.weight_decay),
        torch.optim.SGD(net.parameters(), 1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(ENDLESS, ENDLESS, work.per_round, 0),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=local.lr,
            local_batch_size=local.batch_size,
            local_max_grad_norm=local.clip,
        ),
        callbacks=[Watched()],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    pfl_rank(lambda: sys.stdin.readline() == "round\n", int(sys.argv[1]), 1)
