"""What the tests of deployments share: small federated runs, and a Flower whose nodes are in this process."""

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from PIL import Image

from fewlabel.core import wire
from fewlabel.data import partition, site_files
from fewlabel.deploy import run_plan, site
from fewlabel.deploy.flower import client_app
from fewlabel.deploy.messages import Order
from fewlabel.engine.executor import Job
from fewlabel.engine.flower_messages import RECORD
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import Experiment, read

SMALL = (
    "data.image_size=16",
    "model=tests.nets:tiny",
    "clients.count=4",
    "clients.alpha=2.0",
    "rounds=3",
    "seed=5",
    "method.local.epochs=1",
    "method.local.batch_size=32",
    "checkpoint.rounds=1",
)


@dataclass
class LocalGrid(Grid):
    """A grid whose nodes are in this process. `meddle` changes replies, or loses them by returning None."""

    configs: dict[int, dict]
    meddle: Callable[[Job, Message], Message | None] = lambda job, reply: reply

    def __post_init__(self) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.replies: dict[str, Message] = {}
        self.asked: list[tuple[int, Order]] = []

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        names = []
        for message in messages:
            names.append(name := str(uuid.uuid4()))
            message.metadata.__dict__["_message_id"] = name
            node, order = message.metadata.dst_node_id, wire.unpack(Order, message.content[RECORD]["order"])
            self.asked.append((node, order))
            if (reply := self.meddle(order.job, client_app(message, self.context(node)))) is not None:
                self.replies[name] = reply
        return names

    def orders(self, kind: str) -> list[Order]:
        """List the orders of this kind, as they were sent."""
        return [order for _, order in self.asked if order.job.kind == kind]

    def context(self, node: int) -> Context:
        return Context(1, node, self.configs[node], RecordDict(), {})

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(name) for name in message_ids if name in self.replies]

    def get_node_ids(self) -> list[int]:
        return list(self.configs)

    def set_run(self, run): ...
    def create_message(self, *args, **more): ...
    def send_and_receive(self, messages, *, timeout=None): ...
    @property
    def run(self): ...


def local_grid(data: Path, state: Path, **more) -> LocalGrid:
    """Return a grid with a node for each client of `split`, from number 7000 on."""
    places = sorted(path for path in data.iterdir() if path.name.startswith("client-"))
    configs = {
        7000 + number: {
            "client": int(path.stem.split("-")[1]),
            "data": str(path),
            "state": str(state / path.stem),
            "modules": "tests.nets, tests.keeper, fewlabel.engine.conformance",
        }
        for number, path in enumerate(places)
    }
    return LocalGrid(configs, **more)


def reply_with(reply: Message, **entries) -> Message:
    reply.content = RecordDict({RECORD: ConfigRecord(entries)})
    return reply


def experiment(*changes: str) -> Experiment:
    return read({}, [*SMALL, *changes])


def split(experiment: Experiment, to: Path, kind: str = "npz") -> Path:
    """Write what `fewlabel data split` writes."""
    dataset = dataset_of(experiment)
    site_files.write(dataset, partition.of(dataset, experiment), to, kind, experiment.seed)
    return to


def federate(experiment: Experiment, data: Path, directory: Path, **plan) -> Path:
    return run_plan.prepare(experiment, directory, site.load_terms(data), data=str(data), **plan)


def simulated(experiment: Experiment, directory: Path) -> Path:
    execute(prepare(experiment, directory), executor=Serial())
    return directory


def weights(directory: Path) -> list[bytes]:
    """Of all models that a run left: the last, and the one that validation chose."""
    return [path.read_bytes() for path in sorted(directory.glob("model*.safetensors"))]


def lines(directory: Path) -> list[dict]:
    """Read a run's lines, without what only someone can know who sees hidden labels, or sites from inside."""
    hidden = (
        "seconds",
        "seconds_train",
        "seconds_evaluate",
        "pseudo_labels",
        "pseudo_labels_per_epoch",
        "images_labeled",
        "images_unlabeled",
        "shown",
    )
    return [{k: v for k, v in line.items() if k not in hidden} for line in read_rounds(directory)]


def grey(path: Path, value: int, mode: str = "L") -> None:
    """Write an image of one grey."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (4, 4), value).save(path)
