"""FedAvg (McMahan et al., 2017) and FedProx (Li et al., 2020), alone and with FixMatch and UDA, worked out by hand."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fewlabel.cli.main import main
from fewlabel.core import tree
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import ClientInfo, Reply, Site
from fewlabel.core.images import Labeled
from fewlabel.core.rng import Rng
from fewlabel.core.tree import Tree
from fewlabel.data.images import Images
from fewlabel.engine.record import read_rounds
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import execute
from fewlabel.engine.serial import Serial
from fewlabel.experiment import Experiment, Labels
from fewlabel.learn.losses import annealed, fixmatch, uda
from fewlabel.learn.optim import Local
from fewlabel.learn.plateau import Rate
from fewlabel.methods import METHODS, fedavg
from fewlabel.methods.fedavg import FedAvg, Message, Own, State
from fewlabel.report.comparison import Comparison
from fewlabel.report.results import Result
from tests.hand import Sites, weights
from tests.hand import site as hand_site
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

    mean = Sites.mean


START = State({"1.weight": torch.zeros(2, 1), "1.bias": torch.zeros(2)})


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
    found = method.local_update(site(1, 3.0, [1]), Message(START.model)).model
    weight, bias = second_step(mu)
    torch.testing.assert_close(found["1.weight"], torch.tensor([[weight], [-weight]]))
    torch.testing.assert_close(found["1.bias"], torch.tensor([bias, -bias]))


def test_fedprox_pulls_towards_what_was_received_and_not_towards_zero():
    received = State({"1.weight": torch.full((2, 1), 7.0), "1.bias": torch.full((2,), -3.0)})
    near = FedAvg(local=PLAIN, proximal=0.9).local_update(site(1, 3.0, [1]), Message(received.model)).model
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
    assert FedAvg().local_update(site(0, 1.0, []), Message(START.model)) is None


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
    simulation = Server(directory, Serial())
    assert len(simulation.server.labeled) == 200
    assert read_rounds(directory)[-1]["test"]["accuracy"] > 0.2


def test_the_ledger_counts_a_model_down_and_a_model_up_for_each_client(run_dir):
    directory = run_dir("model=tests.nets:tiny", "labels.clients=3", "rounds=1")
    execute(directory, workers=1)
    line = read_rounds(directory)[0]
    numbers = sum(value.nbytes for value in Server(directory, Serial()).initial.values())
    assert line["bytes_up"] == line["model_bytes"] / 2
    assert 0 < line["bytes_down"] - line["bytes_up"] <= 3 * 16  # the rate
    assert 3 * numbers < line["bytes_up"] < 3 * (numbers + 4000)  # and the names of the entries


# What a site trains with


def stepped(local: Local, epochs: int = 1) -> Tree:
    return FedAvg(local=replace(local, epochs=epochs)).local_update(site(1, 3.0, [1]), Message(START.model)).model


def test_clipping_bounds_the_step_of_a_client():
    # The gradient (3/2, -3/2, 1/2, -1/2) has the norm sqrt(5).
    found = stepped(replace(PLAIN, clip=1.0))
    assert tree.norm(found) == pytest.approx(1.0, rel=1e-5)
    assert found["1.weight"][0].item() == pytest.approx(-1.5 / math.sqrt(5), rel=1e-5)


def test_momentum_starts_anew_at_each_client_and_in_each_round():
    one = site(1, 3.0, [1])
    method = FedAvg(local=replace(PLAIN, momentum=0.9))
    first, second = (
        method.local_update(one, Message(START.model)).model,
        method.local_update(one, Message(START.model)).model,
    )
    assert torch.equal(first["1.weight"], second["1.weight"])


def test_momentum_lasts_from_epoch_to_epoch():
    p = 1 / (1 + math.exp(10))
    found = stepped(replace(PLAIN, momentum=0.9), epochs=2)
    assert found["1.bias"][0].item() == pytest.approx(-0.5 - (0.9 * 0.5 + p), rel=1e-6)


def test_batches_are_of_the_size_asked_for():
    seen: list[int] = []
    one = site(0, 1.0, [0, 1] * 8)
    one.model.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    FedAvg(local=replace(PLAIN, batch_size=5, epochs=2)).local_update(one, Message(START.model))
    assert seen == [5, 5, 6, 5, 5, 6]  # the sixteenth image is not left alone


def test_a_local_model_is_shown_to_who_measures_it():
    one = site(1, 3.0, [1], watched=True)
    upload = FedAvg(local=PLAIN).local_update(one, Message(START.model))
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


# FixMatch and UDA, by hand on a network that says (3/4, 1/4) of any image that it sees as 0; views are all alike

LN3 = math.log(3)
THREE_TO_ONE = State(weights([0.0, 0.0], [LN3, 0.0]))
FIXMATCH = FedAvg(local=PLAIN, unlabeled="fixmatch", confidence=0.7)
UDA = FedAvg(local=PLAIN, unlabeled="uda")
WEAK, STRONG = torch.tensor([[LN3, 0.0]]), torch.tensor([[math.log(6), 0.0]])  # (3/4, 1/4) and (6/7, 1/7)


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def moved(model: Tree, before: State = THREE_TO_ONE) -> float:
    """How far the first bias went; the second goes as far the other way, and of images seen as 0 no weight goes."""
    first, second = (model["1.bias"] - before.model["1.bias"]).tolist()
    assert first == pytest.approx(-second, abs=1e-6)
    assert not model["1.weight"].any()
    return pytest.approx(first, abs=1e-6)


class Few(Sites):
    """Sites, and a server that may have labels, and has a validation set."""

    def __init__(self, *sites: Site[Any], labeled: Any = (), **more: Any) -> None:
        super().__init__(*sites, **more)
        self.server, self.trained = hand_site(-1, labeled, validation=hand_site(-1, [(0, 0)]).labeled), 0

    def map(self, task: Any, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if task.__name__ == "local_update":
                assert not self.sent  # the server is first
                self.trained += 1
            yield task(self.server, item)


def test_fixmatchs_loss_is_of_sure_images_on_the_strong_view_in_the_mean_over_all():
    logits, labels, sure = STRONG.expand(3, 2), torch.tensor([0, 1, 1]), torch.tensor([True, True, False])
    assert fixmatch(logits, labels, sure).item() == pytest.approx((math.log(7 / 6) + math.log(7)) / 3)


def test_fixmatch_at_a_client_adds_both_losses():
    one = hand_site(0, [(0, 0)], [0, 0, 0])
    # Both have the gradient (p - y) = (-1/4, 1/4), since the pseudo-label is 0.
    assert moved(FIXMATCH.local_update(one, Message(THREE_TO_ONE.model)).model) == 1 / 4 + 1 / 4
    assert (
        moved(replace(FIXMATCH, weight_unlabeled=3.0).local_update(one, Message(THREE_TO_ONE.model)).model)
        == 1 / 4 + 3 / 4
    )
    assert moved(replace(FIXMATCH, confidence=0.8).local_update(one, Message(THREE_TO_ONE.model)).model) == 1 / 4


def test_fixmatch_learns_at_clients_without_labels_from_sure_images_alone():
    # Of x = 1 a weight of (-ln 3, 0) makes (1/2, 1/2), which is not sure.
    received = State(weights([-LN3, 0.0], [LN3, 0.0]))
    one = hand_site(0, unlabeled=[0, 1])
    found = FIXMATCH.local_update(one, Message(received.model)).model
    assert (found["1.bias"] - received.model["1.bias"]).tolist() == pytest.approx([1 / 8, -1 / 8], abs=1e-6)
    [(index, label, epoch)] = one.audited
    assert (index.tolist(), label.tolist(), epoch) == ([0], [0], 1)


def test_udas_loss_is_the_distance_from_the_weak_view_which_is_left_alone():
    weak, strong = WEAK.clone().requires_grad_(), STRONG.clone().requires_grad_()
    loss = uda(weak, strong)
    assert loss.item() == pytest.approx(3 / 4 * math.log(3 / 4 / (6 / 7)) + 1 / 4 * math.log(1 / 4 / (1 / 7)))
    loss.backward()
    assert strong.grad.tolist()[0] == pytest.approx([6 / 7 - 3 / 4, 1 / 7 - 1 / 4])
    assert weak.grad is None


@pytest.mark.parametrize(
    ("done", "kept"),
    [
        (0.0, [1]),  # the bound is (1 + e^-5) / 2
        (1 - math.log(2) / 5 - 1e-3, [1]),  # just below (1 + 1/2) / 2, what the network says of its label
        (1 - math.log(2) / 5 + 1e-3, [0, 1]),
        (1.0, [0, 1]),
    ],
)
def test_udas_annealing_leaves_out_what_is_learned_already_by_a_bound_that_grows_exponentially(done, kept):
    losses = [math.log(4 / 3), math.log(4)]  # of labels 0 and 1
    found = annealed(WEAK.expand(2, 2), torch.tensor([0, 1]), done)
    assert found.item() == pytest.approx(sum(losses[label] for label in kept) / len(kept))


def test_udas_annealing_begins_with_the_chance_of_a_guess():
    # Of C classes the bound begins at e^-5 (1 - 1/C) + 1/C, so that with four 1/4 is open and 3/10 is not.
    begin = math.exp(-5) * 3 / 4 + 1 / 4
    assert 1 / 4 < begin < 3 / 10
    said = torch.tensor([[1 / 4, 1 / 4, 1 / 4, 1 / 4], [3 / 10, 3 / 10, 2 / 10, 2 / 10]]).log()
    assert annealed(said, torch.tensor([0, 0]), 0.0).item() == pytest.approx(math.log(4))
    assert annealed(said[1:], torch.tensor([0]), 0.0).item() == 0  # a mean of nothing


def test_uda_at_a_client():
    # Views are alike, so that consistency has no gradient; the label 0 is learned too well for the beginning.
    assert moved(UDA.local_update(hand_site(0, [(0, 0)], [0, 0]), Message(THREE_TO_ONE.model)).model) == 0
    assert moved(UDA.local_update(hand_site(0, [(0, 1)], [0, 0]), Message(THREE_TO_ONE.model)).model) == -3 / 4
    last = hand_site(0, [(0, 0)], [0, 0], round=100, rounds=100)
    assert moved(UDA.local_update(last, Message(THREE_TO_ONE.model)).model) == 1 / 4  # the bound is (1 + e^-0.05) / 2


def test_udas_annealing_counts_steps_over_all_rounds(monkeypatch):
    seen = []
    monkeypatch.setattr(fedavg, "annealed", lambda logits, y, done, images: seen.append(done) or logits.sum())
    method = replace(UDA, local=replace(PLAIN, epochs=2))
    for round in (1, 2, 3):
        method.local_update(hand_site(0, [(0, 0)] * 3, [0] * 120, round=round, rounds=3), Message(THREE_TO_ONE.model))
    # 120 images are three batches of 50; two epochs are six steps a round, and three rounds eighteen.
    assert seen == pytest.approx([t / 18 for t in range(18)])


def test_audits_are_by_epoch():
    one = hand_site(0, unlabeled=[0] * 70)
    replace(FIXMATCH, local=replace(PLAIN, epochs=2)).local_update(one, Message(THREE_TO_ONE.model))
    assert [(len(index), epoch) for index, _, epoch in one.audited] == [(50, 1), (20, 1), (50, 2), (20, 2)]


@pytest.mark.parametrize(
    ("settings", "mean"),
    [
        ({}, (2 * 1 / 2 + 3 * 1 / 4) / 5),  # by all of their images, labeled or not
        ({"weights": "uniform"}, (1 / 2 + 1 / 4) / 2),
    ],
)
def test_with_unlabeled_images_all_clients_take_part_and_count_by_all_of_their_images(settings, mean):
    fed = Few(hand_site(0, [(0, 0)], [0]), hand_site(1, unlabeled=[0, 0, 0]))
    assert moved(replace(FIXMATCH, **settings).round(THREE_TO_ONE, fed).model) == mean
    assert sorted(client for client, _ in fed.sent) == [0, 1]
    assert fed.trained == 0


def test_fedprox_pulls_unlabeled_steps_too():
    one = hand_site(0, unlabeled=[0, 0])
    method = replace(FIXMATCH, proximal=0.5, local=replace(PLAIN, epochs=2))
    first = 1 / 4
    second = first + (1 - sigmoid(LN3 + 2 * first)) - 0.5 * first
    assert moved(method.local_update(one, Message(THREE_TO_ONE.model)).model) == second


def test_where_the_server_has_the_labels_it_trains_first_and_clients_go_on_with_unlabeled_images():
    fed = Few(hand_site(0, unlabeled=[0, 0]), labeled=[(0, 0), (0, 0)])
    state = FIXMATCH.round(THREE_TO_ONE, fed)
    assert fed.trained == 1
    [(_, sent)] = fed.sent
    assert moved(sent.model) == 1 / 4
    assert moved(state.model) == 1 / 4 + 1 - sigmoid(LN3 + 1 / 2)


# Learning rates that fall


# Of an image seen as 0 a step of rate r towards label 0 lessens the validation loss, one towards label 1 does not.
DECAY = FedAvg(local=PLAIN, patience=2, decay=4.0)


def sent_rates(fed: Few) -> dict[int, float]:
    return {client: message.rate for client, message in fed.sent}


def test_a_clients_rate_falls_when_its_model_is_no_better_on_the_servers_validation_set():
    state, found = State(weights([0.0, 0.0])), []
    for _ in range(6):
        fed = Few(hand_site(0, [(0, 0)]), hand_site(1, [(0, 1)]))
        # What is averaged is left out, so that each round of a client is as the one before.
        state = replace(DECAY.round(state, fed), model=state.model)
        found.append(sent_rates(fed))
    # The first round sets the mark, two more that do not pass it divide the rate by 4. Client 0 then makes a smaller
    # step and stays above its mark; client 1, whose step is away from label 0, gets below it by a smaller one.
    assert [one[0] for one in found] == [1, 1, 1, 0.25, 0.25, 0.0625]
    assert [one[1] for one in found] == [1, 1, 1, 0.25, 0.25, 0.25]


def test_the_rate_is_of_the_step_with_labels_and_without():
    method = FedAvg(local=replace(PLAIN, lr=0.8, lr_unlabeled=0.4), unlabeled="fixmatch", confidence=0.7)
    with_labels, without = hand_site(0, [(0, 0)]), hand_site(0, unlabeled=[0, 0])
    for one, lr in ((with_labels, 0.8), (without, 0.4)):
        for rate in (1.0, 0.25):
            found = method.local_update(one, Message(THREE_TO_ONE.model, rate)).model
            assert moved(found) == rate * lr * 1 / 4


def test_the_server_has_a_rate_too():
    state, found = State(weights([0.0, 0.0])), []
    for _ in range(4):
        fed = Few(hand_site(0, unlabeled=[0]), labeled=[(0, 1)])
        state = replace(DECAY.round(state, fed), model=state.model)
        found.append(state.rates["server"].lr)
    assert found == [1, 1, 0.25, 0.25]


def test_without_patience_nothing_is_scored_and_rates_stay():
    fed = Few(hand_site(0, [(0, 1)]))
    assert FedAvg(local=PLAIN).round(State(weights([0.0, 0.0])), fed).rates == {}
    assert sent_rates(fed) == {0: 1.0}


def test_what_falling_rates_need_is_said():
    fed = Few(hand_site(0, [(0, 0)]))
    fed.server.validation = None
    assert FedAvg().init(fed).rates == {}
    with pytest.raises(BadInput, match=r"fall by a validation set; set labels.validation, such as 0.1$"):
        DECAY.init(fed)


def test_falling_rates_are_the_same_with_any_number_of_workers_and_in_the_checkpoint(small_run, pool):
    changes = ("model=tests.nets:tiny", "labels.clients=3", "rounds=3", "method.patience=1", "method.local.lr=1.0")
    one, two = (small_run("method=fedavg", *changes) for _ in range(2))
    execute(one, workers=1)
    execute(two, executor=pool)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    constant = small_run("method=fedavg", *changes[:3], changes[-1])
    execute(constant, workers=1)
    assert (one / "model.safetensors").read_bytes() != (constant / "model.safetensors").read_bytes()


# Local-*: nothing is shared


def test_each_client_goes_on_from_its_own_model_of_the_round_before():
    fed = Few(hand_site(0, [(0, 0)]), hand_site(1, [(0, 1)]))
    method, start = FedAvg(local=PLAIN, sharing=False), State(weights([0.0, 0.0]))
    state = method.round(start, fed)
    assert [one.scored[0]["1.bias"].tolist() for one in fed.sites.values()] == [[0.5, -0.5], [-0.5, 0.5]]
    again = method.round(state, fed)
    second = 1 / 2 + 1 - sigmoid(1.0)
    for one, sign in zip(fed.sites.values(), (1, -1), strict=True):
        assert one.scored[0]["1.bias"].tolist() == pytest.approx([sign * second, -sign * second])
        assert torch.equal(one.state.model["1.bias"], one.scored[0]["1.bias"])
    assert again.model is state.model is start.model
    assert method.model(again) is None


def test_who_trains_alone_lowers_its_rate_by_its_own_held_out_labels():
    """As shared models do on the server's validation set, which a client that trains alone does not need."""
    alone, found = replace(DECAY, sharing=False), dict[int, list[float]]()
    for aside in (0, 1):  # the label held out; a step towards label 0 lessens the loss of 0 and raises that of 1
        one = hand_site(0, [(0, 0)], held_out=hand_site(0, [(0, aside)]).labeled)
        fed = Few(one)
        fed.server.validation, state = None, State(weights([0.0, 0.0]))
        assert alone.init(fed).rates == {}
        rates = found.setdefault(aside, [])
        for _ in range(5):
            state = alone.round(state, fed)
            rates.append(one.state.rate.lr)
    # Of label 1 the first round sets the mark, and each two that do not pass it divide the rate by 4.
    assert found == {0: [1, 1, 1, 1, 1], 1: [1, 1, 1 / 4, 1 / 4, 1 / 16]}


def test_a_rate_that_has_fallen_is_used_and_without_held_out_labels_none_falls():
    alone, start = FedAvg(local=PLAIN, sharing=False, patience=1, decay=4.0), weights([0.0, 0.0])
    one = hand_site(0, [(0, 0)])
    one.state = Own(start, Rate(0.25))
    alone.local_update(one, Message(start))
    assert one.state.model["1.bias"].tolist() == [0.25 * 1 / 2, -0.25 * 1 / 2]  # the gradient is (-1/2, 1/2)
    assert one.state.rate == Rate(0.25)
    [sentence] = alone.cautions(Experiment(method="local-sl"))
    assert sentence == "local-sl: learning rates fall by held-out labels; set labels.held_out, such as 0.1"
    assert not list(alone.cautions(Experiment(labels=Labels(held_out=0.1))))


def test_local_fixmatch_goes_on_from_its_own_model_too():
    fed = Few(hand_site(0, [(0, 0)], [0, 0]))
    method = replace(FIXMATCH, sharing=False)
    method.round(method.round(THREE_TO_ONE, fed), fed)
    first = 1 / 2
    assert moved(fed.sites[0].state.model) == first + 2 * (1 - sigmoid(LN3 + 2 * first))


@pytest.fixture(scope="module")
def alone(small_run):
    directory = small_run(
        "method=local-fixmatch",
        "model=tests.nets:tiny",
        "labels.at=every-client",
        "labels.per_class=4",
        "method.local.lr=0.05",
        "rounds=4",
        "evaluate.local=true",
        "clients.count=3",
    )
    execute(directory, workers=1)
    return directory


def test_who_trains_alone_sends_nothing_and_is_measured_where_it_is(alone):
    lines = read_rounds(alone)
    assert [(line["bytes_up"], line["asked"], line["replies"]) for line in lines] == [(0, 3, 0)] * 4
    assert not any("test" in line for line in lines)
    assert [line["round"] for line in lines if "local_accuracy" in line] == [2, 4]
    assert lines[-1]["local_accuracy"] > 0.1
    assert not (alone / "model.safetensors").exists()


def test_results_without_a_shared_model_can_be_shown_and_compared(alone, small_run, capsys):
    result = Result(alone)
    accuracy = f"{100 * read_rounds(alone)[-1]['local_accuracy']:.1f}"
    assert ("clients' own models: accuracy", accuracy) in result.table().rows
    assert result.report().exists()
    shared = small_run("model=tests.nets:tiny", "rounds=2")
    execute(shared, workers=1)
    both = Comparison([result, Result(shared)])
    assert "local-fixmatch" in str(both)
    assert both.report(alone / "both.html").exists()
    assert main(["show", str(alone)]) == 0
    assert accuracy in capsys.readouterr().out


def test_run_and_compare_work_without_a_shared_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    few = ["model=tests.nets:tiny", "data.image_size=16", "rounds=1", "clients.count=3", "labels.at=every-client"]
    few = [word for setting in few for word in ("--set", setting)]
    assert main(["run", "--method", "local-sl", *few, "--workers", "1"]) == 0
    assert main(["compare", "--methods", "local-sl", *few, "--workers", "1", "--out", "both"]) == 0
    assert "local-sl" in capsys.readouterr().out


# Rows of FedMatch's paper


def test_fedmatchs_baselines_are_as_its_paper_has_them():
    local = Local(epochs=1, batch_size=10, lr=1e-4, optimizer="sgd", momentum=0.9, weight_decay=0.0, clip=None)
    sharing = {"fedavg": {}, "fedprox": {"proximal": 0.01, "weights": "uniform"}, "local": {"sharing": False}}
    for name, settings in sharing.items():
        for loss in ("fixmatch", "uda"):
            assert METHODS[f"{name}-{loss}"] == FedAvg(
                local=local, unlabeled=loss, weight_unlabeled=1.0, confidence=0.75, batch_unlabeled=50, **settings
            )
    assert METHODS["local-sl"] == FedAvg(local=local, sharing=False)
