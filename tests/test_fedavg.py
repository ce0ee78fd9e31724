"""FedAvg (McMahan et al., 2017) and FedProx (Li et al., 2020), worked out by hand on softmax regression from zero."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fewlabel import tree
from fewlabel.data.sets import Images, Labeled
from fewlabel.federation import ClientInfo, Model, Reply, Site
from fewlabel.learn.loop import Local
from fewlabel.methods import METHODS
from fewlabel.methods.fedavg import FedAvg
from fewlabel.rng import Rng
from fewlabel.runs import execute, read_rounds
from fewlabel.simulate import Simulation
from fewlabel.tree import Tree
from fewlabel.worker import Serial
from tests.nets import linear

PLAIN = Local(epochs=1, batch_size=10, lr=1.0, momentum=0.0, weight_decay=0.0, clip=None)


def site(number: int, value: float, labels: list[int], **more: Any) -> Site[None]:
    """A client whose images are all of one pixel, which its network sees as `value`.

    The pixel is black, so shifting it changes nothing, and black is normalised to (0 - mean) / 1.
    """
    images = Images(torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8), mean=(-value,), std=(1.0,))
    rng = Rng("site", number)
    labeled = Labeled(images, torch.arange(len(labels)), torch.tensor(labels), rng.torch) if labels else None
    info = ClientInfo(number, len(labels), 0)
    return Site(info, round=1, rounds=1, num_classes=2, model=linear(1, 2, 1), rng=rng, labeled=labeled, **more)


class Two:
    """Two clients: three images seen as 1 with labels 0, 0, 1, and one image seen as 3 with label 1."""

    def __init__(self, silent: Iterable[int] = ()) -> None:
        self.sites = {0: site(0, 1.0, [0, 0, 1]), 1: site(1, 3.0, [1])}
        self.clients = self.labeled = [one.info for one in self.sites.values()]
        self.server, self.silent = SimpleNamespace(labeled=None), set(silent)

    def sample(self, among: list[ClientInfo]) -> list[ClientInfo]:
        return among

    def run(self, task: Any, jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        for number, (client, message) in enumerate(jobs):
            if client.id not in self.silent:
                yield Reply(number, client, task(self.sites[client.id], message))


START = Model({"1.weight": torch.zeros(2, 1), "1.bias": torch.zeros(2)})


def after(method: FedAvg, federation: Two) -> tuple[list[float], list[float]]:
    found = method.round(START, federation).model
    return found["1.weight"].flatten().tolist(), found["1.bias"].tolist()


# At zero the network says (1/2, 1/2), so the gradient of the bias is the mean of (1/2, 1/2) - y, and that of the
# weight x times it. Client 0: y = (2/3, 1/3) in the mean, bias and weight go to (1/6, -1/6). Client 1: y = (0, 1), the
# bias goes to (-1/2, 1/2) and the weight to (-3/2, 3/2).


def test_a_round_is_the_mean_of_one_step_at_each_client_by_its_labeled_images():
    weight, bias = after(FedAvg(local=PLAIN), Two())
    assert weight == pytest.approx([-0.25, 0.25], abs=1e-6)  # (3 * 1/6 - 1 * 3/2) / 4
    assert bias == pytest.approx([0.0, 0.0], abs=1e-6)  # (3 * 1/6 - 1 * 1/2) / 4


def test_a_uniform_round_weighs_clients_alike():
    weight, bias = after(FedAvg(local=PLAIN, weights="uniform"), Two())
    assert weight == pytest.approx([-2 / 3, 2 / 3], abs=1e-6)  # (1/6 - 3/2) / 2
    assert bias == pytest.approx([-1 / 6, 1 / 6], abs=1e-6)  # (1/6 - 1/2) / 2


def test_who_is_silent_does_not_count_and_silence_keeps_the_model():
    weight, bias = after(FedAvg(local=PLAIN), Two(silent=[0]))
    assert (weight, bias) == ([-1.5, 1.5], [-0.5, 0.5])
    assert FedAvg(local=PLAIN).round(START, Two(silent=[0, 1])).model is START.model


def test_a_round_leaves_the_state_before_it_alone():
    after(FedAvg(local=PLAIN), Two())
    assert not any(value.any() for value in START.model.values())


def second_step(mu: float) -> tuple[float, float]:
    """Client 1 after two epochs: its network then says (p, 1 - p) with logits (-3 * 3/2 - 1/2, 5) = (-5, 5)."""
    p = 1 / (1 + math.exp(10))
    weight = -1.5 - 3 * p - mu * (-1.5 - 0.0)  # the gradient of mu/2 |w - w_received|^2 is mu (w - w_received)
    bias = -0.5 - p - mu * (-0.5 - 0.0)
    return weight, bias


@pytest.mark.parametrize("mu", [0.0, 0.01, 0.5])
def test_fedprox_pulls_each_step_towards_the_model_that_was_received(mu):
    method = FedAvg(local=replace(PLAIN, epochs=2), proximal=mu)
    found = method.local_update(site(1, 3.0, [1]), START).model
    weight, bias = second_step(mu)
    torch.testing.assert_close(found["1.weight"], torch.tensor([[weight], [-weight]]))
    torch.testing.assert_close(found["1.bias"], torch.tensor([bias, -bias]))


def test_fedprox_pulls_towards_what_was_received_and_not_towards_zero():
    received = Model({"1.weight": torch.full((2, 1), 7.0), "1.bias": torch.full((2,), -3.0)})
    near = FedAvg(local=PLAIN, proximal=0.9).local_update(site(1, 3.0, [1]), received).model
    # The first step starts where the model was received, so there is nothing to pull yet; (7, 7) says (1/2, 1/2) too.
    assert near["1.weight"].flatten().tolist() == [5.5, 8.5]
    assert near["1.bias"].tolist() == [-3.5, -2.5]


def test_the_defaults_are_those_of_the_papers():
    assert METHODS["fedavg"] == FedAvg(local=Local(epochs=5, batch_size=10), weights="size", proximal=0.0)
    assert METHODS["fedprox"] == FedAvg(local=Local(epochs=5, batch_size=10), weights="uniform", proximal=0.01)


def test_fedprox_without_its_term_is_fedavg_to_the_bit(run_dir):
    changes = ("model=tests.nets:tiny", "labels.clients=3", "rounds=2")
    directories = [
        run_dir(*changes, "method=fedavg"),
        run_dir(*changes, "method=fedprox", "method.proximal=0", "method.weights=size", "name=fedavg"),
        run_dir(*changes, "method=fedprox", "method.weights=size", "name=fedavg"),
    ]
    for directory in directories:
        execute(directory, workers=1)
    plain, without, with_ = ((directory / "model.safetensors").read_bytes() for directory in directories)
    assert plain == without
    assert plain != with_


# Who takes part


def test_a_client_without_labels_sends_nothing():
    assert FedAvg().local_update(site(0, 1.0, []), START) is None


def test_only_clients_with_labels_are_asked(run_dir):
    directory = run_dir("model=tests.nets:tiny", "labels.clients=2", "rounds=2")
    execute(directory, workers=1)
    assert [(line["asked"], line["replies"]) for line in read_rounds(directory)] == [(2, 2), (2, 2)]


def test_a_round_asks_as_many_of_them_as_the_experiment_lets(run_dir):
    directory = run_dir("model=tests.nets:tiny", "labels.at=every-client", "clients.per_round=3", "rounds=2")
    execute(directory, workers=1)
    assert [line["asked"] for line in read_rounds(directory)] == [3, 3]


def test_a_server_with_labels_trains_by_itself_and_nothing_is_sent(run_dir):
    directory = run_dir("model=tests.nets:tiny", "labels.at=server", "labels.per_class=20", "rounds=3")
    execute(directory, workers=1)
    for line in read_rounds(directory):
        assert (line["bytes_up"], line["bytes_down"], line["asked"], line["replies"]) == (0, 0, 0, 0)
    simulation = Simulation(directory, Serial())
    assert len(simulation.server.labeled) == 200
    assert read_rounds(directory)[-1]["test"]["accuracy"] > 0.2


def test_the_ledger_counts_a_model_down_and_a_model_up_for_each_client(run_dir):
    directory = run_dir("model=tests.nets:tiny", "labels.clients=3", "rounds=1")
    execute(directory, workers=1)
    line = read_rounds(directory)[0]
    numbers = sum(value.nbytes for value in Simulation(directory, Serial()).initial.values())
    assert line["bytes_up"] == line["bytes_down"] == line["model_bytes"] / 2
    assert 3 * numbers < line["bytes_up"] < 3 * (numbers + 4000)  # and the names of the entries


# What a site trains with


def stepped(local: Local, epochs: int = 1) -> Tree:
    return FedAvg(local=replace(local, epochs=epochs)).local_update(site(1, 3.0, [1]), START).model


def test_clipping_bounds_the_step_of_a_client():
    # The gradient (3/2, -3/2, 1/2, -1/2) has the norm sqrt(5).
    found = stepped(replace(PLAIN, clip=1.0))
    assert tree.norm(found) == pytest.approx(1.0, rel=1e-5)
    assert found["1.weight"][0].item() == pytest.approx(-1.5 / math.sqrt(5), rel=1e-5)


def test_momentum_starts_anew_at_each_client_and_in_each_round():
    one = site(1, 3.0, [1])
    method = FedAvg(local=replace(PLAIN, momentum=0.9))
    first, second = method.local_update(one, START).model, method.local_update(one, START).model
    assert torch.equal(first["1.weight"], second["1.weight"])


def test_momentum_lasts_from_epoch_to_epoch():
    p = 1 / (1 + math.exp(10))
    found = stepped(replace(PLAIN, momentum=0.9), epochs=2)
    assert found["1.bias"][0].item() == pytest.approx(-0.5 - (0.9 * 0.5 + p), rel=1e-6)


def test_batches_are_of_the_size_asked_for():
    seen: list[int] = []
    one = site(0, 1.0, [0, 1] * 8)
    one.model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    FedAvg(local=replace(PLAIN, batch_size=5, epochs=2)).local_update(one, START)
    assert seen == [5, 5, 6, 5, 5, 6]  # the sixteenth image is not left alone


def test_a_local_model_is_shown_to_who_measures_it():
    one = site(1, 3.0, [1], watched=True)
    upload = FedAvg(local=PLAIN).local_update(one, START)
    (shown,) = one.scored
    assert torch.equal(shown["1.weight"], upload.model["1.weight"])


def test_the_first_model_is_the_networks_own():
    net = nn.Linear(2, 2)
    state = FedAvg().init(SimpleNamespace(server=SimpleNamespace(weights=lambda: tree.of(net))))
    assert torch.equal(state.model["weight"], net.weight)
    assert FedAvg().model(state) is state.model


def test_training_learns(run_dir):
    directory = run_dir("model=tests.nets:tiny", "labels.clients=5", "rounds=6", "method.local.epochs=2")
    execute(directory, workers=1)
    accuracy = [line["test"]["accuracy"] for line in read_rounds(directory) if "test" in line]
    assert accuracy[-1] > accuracy[0] > 0.1
    assert accuracy[-1] > 0.6
