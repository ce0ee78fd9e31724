"""FedMatch as its authors' code has it (the ICLR version), worked out by hand on softmax regression."""

import math
from dataclasses import replace

import pytest
import torch

from fewlabel.core import wire
from fewlabel.core.federation import Model
from fewlabel.engine.conformance import Recorder
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import execute
from fewlabel.learn.optim import Local
from fewlabel.learn.sparse import pack, unpack
from fewlabel.methods import METHODS
from fewlabel.methods.fedmatch import Helper, Message, State
from fewlabel.methods.fedmatch_iclr import FedMatchICLR, noise
from tests.hand import STEP, site, values, weights
from tests.methods.test_fedmatch import (
    CONSISTENCY,
    HELPER,
    LN3,
    NOTHING,
    QUARTERS,
    START,
    Given,
    approx,
    decomposed,
    images,
    message,
    sigmoid,
    steps_of,
    unsupervised,
)

# The bare method: a step of a tenth, and of the losses those that a test asks for.
BARE = FedMatchICLR(
    weight_l2=0.0, weight_l1=0.0, zero_below=0.0, keep_below=0.0, psi_start=0.0, local=replace(STEP, lr=0.1)
)


# The average


def test_clients_count_alike_however_reliable_they_are():
    right, wrong = weights([1, -1]), weights([-3, 3])  # right in 3/4 and in 1/4
    state = BARE.round(START, Given(START, (right, right), (wrong, None), validation=QUARTERS))
    assert values(state.sigma)[0] == approx(-1, 1)
    assert values(state.psi)[0] == approx(1, -1)  # of the one who moved it


# Helpers


def known(**says: tuple[float, ...]) -> State:
    """A server that knows what these clients' models say of noise; the psi of client n has the weight (n, n)."""
    helpers = (
        Helper(name[1:], pack(weights(2 * [float(name[1:])])), torch.tensor(said)) for name, said in says.items()
    )
    return replace(START, helpers=tuple(helpers))


def lent(method: FedMatchICLR, state: State, who: str, round: int = 10) -> list[str]:
    return [helper.client for helper in method.lent(state, who, round)]


# From client 1 the distances are 0.1 to client 2, 0.3 to client 3 and 0.5 to client 4, all times the root of 2.
LINE = known(c1=(0.5, 0.5), c4=(1.0, 0.0), c2=(0.4, 0.6), c3=(0.8, 0.2))


def test_helpers_are_those_whose_models_say_nearly_the_same_of_noise():
    assert lent(BARE, LINE, "1") == ["2", "3"]
    assert lent(BARE, LINE, "4") == ["3", "1"]
    assert lent(replace(BARE, helpers=1), LINE, "3") == ["4"]
    assert lent(replace(BARE, helpers=9), LINE, "1") == ["2", "3", "4"]  # and never oneself
    assert lent(replace(BARE, helpers=0), LINE, "1") == []


def test_helpers_help_in_every_tenth_round_alone():
    assert [round for round in range(1, 41) if lent(BARE, LINE, "1", round)] == [10, 20, 30, 40]
    assert [round for round in range(1, 9) if lent(replace(BARE, helpers_every=3), LINE, "1", round)] == [3, 6]


def test_who_was_never_seen_has_no_helpers():
    assert lent(BARE, LINE, "7") == []
    assert lent(BARE, START, "1") == []
    assert lent(BARE, LINE, "server") == []


def test_a_client_is_sent_the_psi_of_its_own_helpers():
    fed = Given(LINE, None, None, None, None, round=10)
    BARE.round(LINE, fed)
    sent = {who: [values(unpack(psi, NOTHING))[0][0] for psi in said.helpers] for who, said in fed.sent}
    assert sent == {0: [], 1: [2, 3], 2: [1, 3], 3: [4, 1]}


def test_the_server_keeps_the_last_psi_of_everyone_it_saw():
    first = BARE.round(START, Given(START, (None, weights([0, 0], [LN3, 0])), None, (NOTHING, None)))
    assert [helper.client for helper in first.helpers] == ["0"]  # client 2 has moved no psi
    again = BARE.round(first, Given(first, None, (None, weights([0, 0], [1, 1])), None))
    assert [helper.client for helper in again.helpers] == ["0", "1"]
    last = BARE.round(again, Given(again, (None, weights([0, 0], [0, LN3])), None, None))
    psis = {helper.client: values(unpack(helper.psi, NOTHING))[1] for helper in last.helpers}
    assert psis == {"0": approx(0, LN3), "1": approx(1, 1)}
    says = {helper.client: helper.says.tolist() for helper in last.helpers}
    assert says == {"0": approx(1 / 4, 3 / 4), "1": approx(1 / 2, 1 / 2)}  # sigma is zero, and so are all weights


def test_what_a_model_says_of_noise_is_its_softmax_for_one_image():
    server = site(-1, validation=site(-1, [(0, 0)]).labeled)
    found = BARE.score(server, Model(weights([2, -1], [0.5, 0])))
    pixel = noise(torch.Size([1, 1, 1])).item()
    share = sigmoid(3 * pixel + 0.5)
    assert found.says.tolist() == approx(share, 1 - share)
    assert (found.accuracy, found.loss) == (1, pytest.approx(-math.log(sigmoid(0.5)), rel=1e-5))


def test_noise_is_one_image_of_a_truncated_normal_distribution():
    shape = torch.Size([3, 64, 64])
    pixels = 255 * noise(shape)
    assert pixels.shape == (1, *shape)
    assert torch.equal(pixels, 255 * noise(shape))
    assert 0 <= pixels.min() < 1
    assert 254 < pixels.max() <= 255
    # Of the normal distribution [-1, 1.04] is left: mean 125 (1 + (phi(-1) - phi(1.04)) / (Phi(1.04) - Phi(-1))).
    mean = 125 * (1 + (0.24197 - 0.23230) / (0.85083 - 0.15866))
    assert pixels.mean().item() == pytest.approx(mean, abs=3)  # the mean of 12,288 pixels has a deviation of 0.6
    assert pixels.std().item() == pytest.approx(
        68.6, abs=2
    )  # 125 sqrt(1 - (phi(-1) + 1.04 phi(1.04)) / 0.692 - 0.014^2)


# The loss of unlabeled images. Of x = 0 the network says (1/2, 1/2), of x = 1 (3/4, 1/4).

NET = weights([LN3, 0])
SURE = replace(BARE, confidence=0.7)


def test_without_helpers_the_loss_is_of_the_local_label_in_the_mean_over_sure_images():
    loss, labels = unsupervised(SURE, decomposed(NET), [], 0, 1, 0)
    assert labels == {1: 0}
    assert loss.item() == pytest.approx(0.01 * -math.log(3 / 4), rel=1e-5)


def test_helpers_outvote_the_local_label_and_their_kl_is_of_sure_images_divided_by_their_number():
    # Of x = 1 a helper says (1/3, 2/3): CONSISTENCY is its divergence from (3/4, 1/4).
    method = replace(SURE, weight_unlabeled=3.0, weight_helpers=5.0)
    loss, labels = unsupervised(method, decomposed(NET), [HELPER, HELPER], 0, 1, 0)
    assert labels == {1: 1}
    assert loss.item() == pytest.approx(3 * -math.log(1 / 4) + 5 * CONSISTENCY, rel=1e-5)


def test_the_pseudo_labels_loss_is_on_the_strong_view():
    # x = 2 is shown as the strong view of x = 1: (9/10, 1/10).
    loss, _ = unsupervised(SURE, decomposed(NET), [], 1, strong=2)
    assert loss.item() == pytest.approx(0.01 * -math.log(9 / 10), rel=1e-5)


def test_where_nothing_is_sure_the_norms_are_left():
    sigma, psi = weights([0, 0], [1, 0]), weights([0, 0], [-1, 3])
    loss, labels = unsupervised(
        replace(BARE, confidence=1.0, weight_l2=10.0, weight_l1=0.5), decomposed(sigma, psi), [HELPER], 0, 0
    )
    assert labels == {}
    assert loss.item() == pytest.approx(10 * (2**2 + 3**2) + 0.5 * (1 + 3))


# Steps


def sizes(labeled: int, unlabeled: int, method: FedMatchICLR = BARE) -> tuple[int, int]:
    return method.sizes(images(labeled, unlabeled))


def test_unlabeled_images_take_as_many_steps_as_labeled_ones():
    assert sizes(50, 490) == (10, 98)
    assert sizes(50, 491) == (10, 99)
    assert sizes(4, 30) == (10, 30)
    assert sizes(50, 4) == (10, 2)
    assert sizes(0, 490) == (10, 100)
    assert sizes(50, 490, replace(BARE, use_sigma=False)) == (10, 100)


def test_labels_move_sigma_alone_images_psi_alone_in_turns(monkeypatch: pytest.MonkeyPatch):
    method = FedMatchICLR(keep_below=0.0, local=Local(epochs=1, batch_size=10, lr=0.01, momentum=0.0, clip=None))
    found = steps_of(method, images(20, 33), message(weights([0.3, -0.2], [0.1, 0.2]), NOTHING, HELPER), monkeypatch)
    assert found == [(10, True, False), (17, False, True), (10, True, False), (16, False, True)]


def test_a_step_has_no_momentum():
    one, sent = site(0, unlabeled=[0]), message(weights([0, 0], [1, 0]), NOTHING, lr=0.001, epochs=2)
    found = unpack(FedMatchICLR(weight_l1=0.0, zero_below=0.0, keep_below=0.0).local_update(one, sent).psi, NOTHING)
    # Psi goes 2 * 10 * 0.001 of its way to sigma, and again.
    assert values(found)[1] == approx(0.02 + 0.02 * 0.98, 0)


# Whole runs


def test_helpers_go_over_the_wire_in_their_rounds_alone(run_dir):
    recorder = Recorder()
    directory = run_dir(
        "method=fedmatch-iclr", "method.helpers_every=2", "model=tests.nets:tiny", "labels.at=every-client",
        "labels.per_class=5", "clients.count=4", "rounds=4",
    )  # fmt: skip
    execute(directory, executor=recorder)
    sent: dict[int, list[Message]] = {}
    for job, data, _ in recorder.sent:
        sent.setdefault(job.round, []).append(wire.unpack(Message, data))
    assert {round: [len(one.helpers) for one in all_] for round, all_ in sent.items()} == {
        1: [0] * 4, 2: [2] * 4, 3: [0] * 4, 4: [2] * 4,
    }  # fmt: skip
    lines = read_rounds(directory)
    assert lines[1]["bytes_down"] > lines[2]["bytes_down"]
    assert 0 < lines[-1]["shown"]["labeled_accuracy"] <= 1


def test_the_rows_are_as_the_authors_code_has_them():
    clients = METHODS["fedmatch-iclr"]
    assert clients == FedMatchICLR(
        helpers=2,
        helpers_every=10,
        confidence=0.75,
        weight_labeled=10.0,
        weight_unlabeled=0.01,
        weight_helpers=0.01,
        weight_l2=10.0,
        weight_l1=1e-4,
        zero_below=5e-6,
        keep_below=5e-5,
        psi_start=0.2,
        batch_unlabeled=100,
        server_epochs=1,
        patience=5,
        decay=3.0,
        local=Local(epochs=1, batch_size=10, lr=1e-3, optimizer="sgd", momentum=0.0, weight_decay=0.0, clip=None),
    )
    assert METHODS["fedmatch-iclr-server"] == replace(
        clients,
        weight_l1=1e-5,
        zero_below=1e-5,
        keep_below=1e-5,
        patience=20,
        local=replace(clients.local, batch_size=100),
    )
