"""The client app of the Flower contestant, in a module of its own: one defined in the script is pickled by value."""

from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from benchmarks.workload import Work

app = ClientApp()


@cache
def here() -> tuple[Work, torch.nn.Module, torch.Generator]:
    """What an actor needs for any client, made once."""
    torch.set_num_threads(1)
    work = Work.read()
    return work, work.network(), torch.Generator().manual_seed(0)


@app.train()
def train(message: Message, context: Context) -> Message:
    work, model, rng = here()
    data = work.client(int(context.node_config["partition-id"]), rng)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    work.train(model, data)
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(data)})}
    return Message(content=RecordDict(content), reply_to=message)
