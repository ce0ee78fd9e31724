"""Methods without manners: what they do must not reach another client, another round, or the labels they lack."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fewlabel.core import tree, wire
from fewlabel.core.errors import FewLabelError
from fewlabel.core.federation import EVERY_CLIENT, SOME_CLIENTS, Federation, Model, Site, broadcast
from fewlabel.core.tasks import on_client, on_server
from fewlabel.engine.run import Interrupted, execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.engine.world import World
from fewlabel.experiment import Checkpoint as Every
from fewlabel.experiment import Clients, Data, Experiment, Net
from fewlabel.learn.loop import fit
from fewlabel.learn.optim import SGD, Local
from tests.toys import Echo


@dataclass(frozen=True)
class Plain(Echo):
    """What the others share: a model that each client moves a little."""

    label_places = frozenset({SOME_CLIENTS, EVERY_CLIENT})

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        return Model(tree.scale(msg.model, 0.5))


@dataclass(frozen=True)
class InPlace(Plain):
    """Changes its state in place."""

    def round(self, state: Model, fed: Federation) -> Model:
        for value in tree.parameters(state.model).values():
            value.add_(torch.randn_like(value))
        return super().round(state, fed)


@dataclass(frozen=True)
class DrawsAtServer(Plain):
    """Draws from every global generator, and from the server's images, at the server."""

    def round(self, state: Model, fed: Federation) -> Model:
        noise = float(torch.rand(())) + np.random.rand() + fed.server.rng.numpy.random()
        state = Model(tree.scale(state.model, 1 + noise / 100))
        return super().round(state, fed)


@dataclass(frozen=True)
class DrawsAtClients(Plain):
    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        return Model(tree.scale(msg.model, float(torch.rand(())) + np.random.rand()))


@dataclass(frozen=True)
class LeavesThingsBehind(Plain):
    """Even clients train everything; odd ones freeze a part, clip, and put parts of the network into eval mode."""

    local: Local = Local(batch_size=32, clip=0.01)

    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model | None:
        model = site.load(msg.model)
        if site.info.id % 2:
            model[0].requires_grad_(False)
            model[1].eval()
        x, _ = next(site.unlabeled.batches(("weak",), 32)) if site.unlabeled else next(site.labeled.batches())
        for parameter in model.parameters():
            if parameter.grad is not None:
                raise AssertionError("another client's gradient")
        fit(model, SGD(model.parameters(), self.local), [x], lambda x: model(x).square().mean(), self.local.clip)
        return Model(site.weights())


@dataclass(frozen=True)
class SendsNone(Plain):
    def init(self, fed: Federation) -> Model:
        list(fed.run(self.hello, broadcast(fed.clients, None)))
        return super().init(fed)

    @on_client
    def hello(self, site: Site[None], msg: None) -> int:
        return 1


@dataclass(frozen=True)
class ChangesItsMessage(Plain):
    """Sends one message object twice, with other numbers."""

    def round(self, state: Model, fed: Federation) -> Model:
        first = tree.mean(
            (1, reply.upload.model) for reply in fed.run(self.local_update, broadcast(fed.clients, state))
        )
        for value in tree.parameters(state.model).values():
            value.add_(1)
        second = tree.mean(
            (1, reply.upload.model) for reply in fed.run(self.local_update, broadcast(fed.clients, state))
        )
        assert tree.norm(tree.sub(first, second)) > 0
        return Model(second)


@dataclass(frozen=True)
class ForgetsToReturn(Plain):
    @on_client
    def local_update(self, site: Site[None], msg: Model) -> Model:  # type: ignore[return]
        site.load(msg.model)


@dataclass(frozen=True)
class LeavesAMapOpen(Plain):
    def round(self, state: Model, fed: Federation) -> Model:
        next(fed.map(self.think, [1, 2, 3]))
        return super().round(state, fed)

    @on_server
    def think(self, site: Site[None], msg: int) -> int:
        return msg


@dataclass(frozen=True)
class LogsARound(Plain):
    def round(self, state: Model, fed: Federation) -> Model:
        fed.log(test=0.5)
        return super().round(state, fed)


def frozen_net(in_channels: int, num_classes: int, image_size: int) -> nn.Module:
    net = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, 4), nn.Linear(4, num_classes))
    net[1].requires_grad_(False)
    return net


def experiment(method: Any, net: str = "tests.nets:tiny") -> Experiment:
    clients = Clients(count=4, partition="iid")
    return Experiment(method, rounds=4, data=Data("digits", 16), model=Net(net), clients=clients, checkpoint=Every(2))


@pytest.mark.parametrize(
    "method",
    [InPlace(), DrawsAtServer(), DrawsAtClients(), LeavesThingsBehind(), SendsNone(), ChangesItsMessage()],
    ids=lambda method: type(method).__name__,
)
def test_bits_depend_on_the_experiment_alone_whatever_a_method_does(method, pool, tmp_path):
    one, two, stopped = (prepare(experiment(method), tmp_path / name) for name in ("one", "two", "stopped"))
    execute(one, executor=Serial())
    torch.rand(3)
    execute(two, executor=pool)
    rounds = iter([False, False, True])
    with pytest.raises(Interrupted):
        execute(stopped, executor=Serial(), stop=lambda: next(rounds))
    execute(stopped, executor=Serial())
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "model.safetensors").read_bytes() == (stopped / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (ForgetsToReturn(), "expected Model, found NoneType"),
        (LeavesAMapOpen(), "must be consumed to their end"),
        (LogsARound(), "'test' is a name of rounds.jsonl itself"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_meant_is_said_in_a_sentence(method, words, tmp_path):
    with pytest.raises(FewLabelError, match=words):
        execute(prepare(experiment(method), tmp_path / "run"), executor=Serial())


def test_what_a_network_froze_itself_stays_frozen(tmp_path):
    plain = experiment("fedavg", "tests.engine.test_manners:frozen_net")
    directory = prepare(replace(plain, rounds=2), tmp_path / "run")
    execute(directory, executor=Serial())
    from safetensors.torch import load_file

    world = World.open(directory)
    from fewlabel.engine.rounds import Server

    before, after = Server(directory).initial, load_file(directory / "model.safetensors")
    assert torch.equal(before["1.weight"], after["1.weight"])
    assert not torch.equal(before["2.weight"], after["2.weight"])
    assert world.experiment.rounds == 2


def reachable(start: object) -> list[Tensor]:
    """Every tensor that can be walked to from an object by attributes, items and closures."""
    found, seen, todo = [], set(), [start]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, type | str | bytes | int | float):
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            found.append(thing)
            continue
        if isinstance(thing, dict):
            todo += thing.values()
        elif isinstance(thing, list | tuple | set | frozenset):
            todo += thing
        todo += [cell.cell_contents for cell in getattr(thing, "__closure__", None) or ()]
        todo += [getattr(thing, "__self__", None), *getattr(thing, "__dict__", {}).values()]
    return found


def test_no_hidden_label_can_be_walked_to_from_a_clients_site(tmp_path):
    from fewlabel.core.rng import Rng

    world = World.open(prepare(experiment("fedavg"), tmp_path / "run"))
    client = next(c for c, share in enumerate(world.partition.shares) if len(share.unlabeled))
    site = world.site(client, 1, Rng(0), world.network(Rng(1)), watched=True)
    truth = world.dataset.splits["train"].labels
    hidden = truth[torch.from_numpy(world.partition.shares[client].unlabeled)]
    tensors = reachable(site)
    assert len(tensors) > 5
    assert not any(t.data_ptr() == truth.data_ptr() or torch.equal(t, hidden) for t in tensors)


def test_a_tensor_of_absurdly_many_dimensions_is_refused_at_once():
    data = bytearray(wire.pack(Model({"w": torch.ones(1)})))
    length = int.from_bytes(data[:8], "little")
    head = bytes(data[8 : 8 + length]).replace(b'"shape":[1]', b'"shape":[' + b",".join([b"1"] * 50_000) + b"]")
    with pytest.raises(wire.WireError, match="50000 dimensions"):
        wire.unpack(Model, len(head).to_bytes(8, "little") + head + bytes(data[8 + length :]), finite=True)
