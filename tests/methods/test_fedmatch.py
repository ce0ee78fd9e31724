"""FedMatch (Jeong et al., first version, 2020), equation by equation, worked out by hand on softmax regression."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

from fewlabel.cli.main import main
from fewlabel.core import wire
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import ClientError, ClientInfo, Model, Reply, Site
from fewlabel.core.tasks import accept, tasks
from fewlabel.core.tree import Tree
from fewlabel.engine.conformance import Recorder
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import execute
from fewlabel.engine.serial import Serial
from fewlabel.learn import decomposed as decomposed_module
from fewlabel.learn.decomposed import Decomposed, Update
from fewlabel.learn.losses import inter_client
from fewlabel.learn.optim import Local
from fewlabel.learn.plateau import Rate, score
from fewlabel.learn.sparse import Packed, pack, unpack
from fewlabel.learn.thresholds import agreed, confident
from fewlabel.methods import METHODS, fedmatch
from fewlabel.methods.fedmatch import FedMatch, Helper, Message, State
from tests.hand import STEP, Sites, site, values, weights
from tests.nets import tiny

LN2, LN3 = math.log(2), math.log(3)
NOTHING = weights([0.0, 0.0])
# The bare method: a step of a tenth, and of the losses those that a test asks for.
BARE = FedMatch(weight_l2=0.0, psi_start=0.0, local=replace(STEP, lr=0.1))

# Of an image seen as x = 0 a network says no more than its biases. Where theta's are (ln 3, 0) that is (3/4, 1/4).


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def approx(*numbers: float) -> Any:
    return pytest.approx(list(numbers), abs=1e-6)


def message(sigma: Tree, psi: Tree = NOTHING, *helpers: Tree, lr: float = 0.1, epochs: int = 1) -> Message:
    return Message(sigma, pack(psi), tuple(map(pack, helpers)), lr, epochs)


def batch(*pixels: int, strong: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.tensor(pixels).float().view(-1, 1, 1, 1)
    return x, x if strong is None else torch.full_like(x, strong), torch.arange(len(pixels))


def decomposed(sigma: Tree, psi: Tree = NOTHING) -> Decomposed:
    return Decomposed(site(0, [(0, 0)]).model, sigma, psi)


def unsupervised(method: FedMatch, net: Decomposed, helpers: list[Tree], *pixels: int, strong: int | None = None):
    """The loss of these images, and the pseudo-labels that are shown."""
    one = site(0, unlabeled=pixels)
    loss = method.unsupervised(net, helpers, one, 1, batch(*pixels, strong=strong))
    [(index, label, _)] = one.audited
    return loss, dict(zip(index.tolist(), label.tolist(), strict=True))


class Few(Sites):
    """Sites, and a server that has a validation set and maybe labels; what it did is kept in order."""

    def __init__(self, *sites: Site[Any], labeled: Any = (), validation: Any = ((0, 0),), **more: Any) -> None:
        super().__init__(*sites, **more)
        set_aside = site(-1, validation).labeled if validation else None
        self.server = site(-1, labeled, validation=set_aside)
        self.done: list[str] = []

    def map(self, task: Any, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.done.append(task.__name__)
            yield task(self.server, item)

    def run(self, task: Any, jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        self.done.append("run")
        return super().run(task, jobs)


def sent(part: Tree | None, before: Tree) -> Packed | None:
    return None if part is None else pack(part, before)


class Given(Few):
    """Clients that send models given as (sigma, psi), either of which may be missing."""

    def __init__(self, state: State, *models: tuple[Tree | None, Tree | None] | None, **more: Any) -> None:
        super().__init__(*(site(number, [(0, 0)], [0, 0]) for number in range(len(models))), **more)
        self.uploads = [model and Update(*map(sent, model, (state.sigma, state.psi))) for model in models]

    def run(self, task: Any, jobs: Iterable[tuple[ClientInfo, Any]]) -> Iterator[Reply[Any]]:
        for number, (client, sent) in enumerate(jobs):
            self.sent.append((client.id, sent))
            if (upload := self.uploads[client.id]) is not None:
                yield Reply(number, client, upload)


START = State(NOTHING, NOTHING)


# Inter-client consistency


# Helpers that say (3/4, 1/4) and (1/5, 4/5) where the local network says (1/2, 1/2).
HALVES, HELPERS = torch.zeros(1, 2), [torch.tensor([[LN3, 0.0]]), torch.tensor([[0.0, math.log(4)]])]
KLS = [
    3 / 4 * math.log(3 / 2) + 1 / 4 * math.log(1 / 2),
    1 / 5 * math.log(2 / 5) + 4 / 5 * math.log(8 / 5),
]


def test_fedmatch_eq_1_adds_up_over_helpers_and_is_a_mean_over_images():
    assert inter_client(HALVES, HELPERS).item() == pytest.approx(sum(KLS))
    assert inter_client(HALVES, HELPERS[:1]).item() == pytest.approx(KLS[0])
    two = torch.tensor([[0.0, 0.0], [LN3, 0.0]])  # of the second image the local network says what its helper does
    assert inter_client(two, [HELPERS[0].expand(2, 2)]).item() == pytest.approx(KLS[0] / 2)


def test_fedmatch_eq_1_is_from_the_helpers_to_the_local_network():
    reverse = 1 / 2 * math.log(2 / 3) + 1 / 2 * math.log(2)
    assert inter_client(HALVES, HELPERS[:1]).item() != pytest.approx(reverse)
    assert inter_client(HELPERS[0], [HALVES]).item() == pytest.approx(reverse)


def test_fedmatch_eq_1_without_helpers_is_nothing():
    assert inter_client(HALVES, []).item() == 0


def test_fedmatch_eq_1_moves_the_local_network_and_no_helper():
    helpers = [weights([0, 0], [LN3, 0]), weights([0, 0], [0, math.log(4)])]
    for helper in helpers:
        helper["1.bias"].requires_grad_()
    net = decomposed(NOTHING)
    loss, _ = unsupervised(replace(BARE, confidence=1.0), net, helpers, 0)
    loss.backward()
    # Of each helper the gradient is p - p_h: (1/2 - 3/4) + (1/2 - 1/5) = 1/20.
    assert net.psi["1.bias"].grad.tolist() == approx(1 / 20, -1 / 20)
    assert all(helper["1.bias"].grad is None for helper in helpers)


def test_a_helper_is_the_receivers_sigma_with_the_helpers_psi():
    net = decomposed(weights([0, 0], [LN3, 0]), weights([0, 0], [5, 0]))
    [said] = net.with_others(batch(0)[0], [weights([0, 0], [-math.log(6), 0])])
    assert said.softmax(1)[0].tolist() == approx(
        1 / 3, 2 / 3
    )  # ln 3 - ln 6 = -ln 2; its own psi of 5 has no part in it
    assert not said.requires_grad


def test_a_helper_has_the_receivers_sigma_of_the_moment():
    net, helpers, x = decomposed(NOTHING), [weights([0, 0], [0, LN3])], batch(0)[0]
    net.with_others(x, helpers)
    by_labels = partial(FedMatch().supervised, net, site(0))
    net.train(net.optimizers(STEP, 0.1), [((x, torch.tensor([0])), None)], by_labels, by_labels)
    [said] = net.with_others(x, helpers)
    assert said[0].tolist() == approx(1 / 2, LN3 - 1 / 2)  # a step of 0.1 * 10 * 1/2 between the two


def test_helpers_speak_in_evaluation_mode_and_leave_batchnorms_statistics_alone():
    torch.manual_seed(0)
    net = tiny(1, 2, 8)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    two = Decomposed(net, state, {name: value.detach() for name, value in net.named_parameters()})
    x = torch.randn(4, 1, 8, 8)
    first, second = (two.with_others(x, [dict(two.psi)])[0] for _ in range(2))
    assert torch.equal(first, second)  # no dropout
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())
    assert net.training


# The plain image is x = 0, of which local (ln 3, 0) says (3/4, 1/4) and the helper (1/3, 2/3). The strong view is
# x = 1, of which the weight (ln 2, 0) makes (6/7, 1/7). One vote each: the local network's own label, 0.
SEEN, HELPER = weights([LN2, 0], [LN3, 0]), weights([0, 0], [-math.log(6), 0])
CROSS_ENTROPY = -math.log(6 / 7)
CONSISTENCY = 1 / 3 * math.log(1 / 3 / (3 / 4)) + 2 / 3 * math.log(2 / 3 / (1 / 4))


def test_fedmatch_eq_2_is_the_pseudo_labels_loss_on_the_strong_view_and_eq_1_on_the_plain_one():
    loss, labels = unsupervised(replace(BARE, confidence=0.7), decomposed(SEEN), [HELPER], 0, strong=1)
    assert loss.item() == pytest.approx(CROSS_ENTROPY + CONSISTENCY, rel=1e-5)
    assert labels == {0: 0}


def test_fedmatch_eq_2_has_lambda_u_for_both_parts():
    method = replace(BARE, confidence=0.7, weight_unlabeled=3.0)
    loss, _ = unsupervised(method, decomposed(SEEN), [HELPER], 0, strong=1)
    assert loss.item() == pytest.approx(3 * (CROSS_ENTROPY + CONSISTENCY), rel=1e-5)


def test_fedmatch_eq_2_without_inter_client_consistency_is_fixmatch():
    loss, _ = unsupervised(replace(BARE, confidence=0.7), decomposed(SEEN), [], 0, strong=1)
    assert loss.item() == pytest.approx(CROSS_ENTROPY, rel=1e-5)


# Pseudo-labels


def says(label: int, classes: int = 3) -> Tensor:
    return torch.nn.functional.one_hot(torch.tensor([label]), classes).float()


@pytest.mark.parametrize(
    ("local", "helpers", "label"),
    [
        (0, [1, 1], 1),  # outvoted
        (0, [0, 1], 0),
        (0, [1, 2], 0),  # one vote each: the local one's
        (2, [0, 1], 2),
        (2, [1], 2),
        (1, [], 1),
        (0, [1, 1, 2, 2], 1),  # two and two, none of them the local one's: the first
        (2, [1, 1, 2], 2),  # two and two, one of them the local one's
        (2, [1, 1, 1, 2], 1),
    ],
)
def test_fedmatch_eq_3_is_the_label_with_most_votes_and_of_ties_the_local_one(local, helpers, label):
    assert agreed(says(local), [says(helper) for helper in helpers]).tolist() == [label]


def test_fedmatch_eq_3_counts_votes_and_not_confidence():
    sure, unsure = torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[0.1, 0.0, 0.0]])
    assert agreed(unsure, [sure, unsure]).tolist() == [0]


def test_fedmatch_eq_3_below_tau_is_dropped_by_the_local_networks_confidence_alone():
    # Of x = 0 the local network says (1/2, 1/2), of x = 1 (3/4, 1/4); two helpers are sure of class 1 in both.
    net, helpers = decomposed(weights([LN3, 0])), [weights([0, 0], [0, 9])] * 2
    loss, labels = unsupervised(replace(BARE, confidence=0.7), net, helpers, 0, 1)
    assert labels == {1: 1}
    one = sigmoid(-9.0)  # what a helper gives class 0 where the local network has (1/2, 1/2); times three elsewhere
    other = sigmoid(LN3 - 9)
    drawn = one * math.log(one * 2) + (1 - one) * math.log((1 - one) * 2)
    drawn += other * math.log(other * 4 / 3) + (1 - other) * math.log((1 - other) * 4)
    # Cross-entropy with label 1 of the second image alone, in the mean over both; eq. 1 of both images.
    assert loss.item() == pytest.approx(-math.log(1 / 4) / 2 + 2 * drawn / 2, rel=1e-4)


def test_fedmatch_eq_3_tau_itself_is_enough():
    logits = torch.tensor([[LN3, 0.0]])
    exact = logits.softmax(1).max().item()
    assert confident(logits, exact)[0].tolist() == [True]
    assert confident(logits, math.nextafter(exact, 1) + 1e-7)[0].tolist() == [False]


# Reliability


# Of x = 1 and x = -1 a network of weight (a, -a), a > 0, says 0 and 1.
QUARTERS = [(1, 0), (1, 0), (1, 0), (-1, 0)]


def test_fedmatch_eq_4_weighs_by_accuracy_on_the_servers_validation_set():
    right, wrong = weights([1, -1], [2, 2]), weights([-1, 1], [6, 6])  # right in 3/4 and in 1/4
    state = BARE.round(START, Given(START, (right, weights([0, 0], [4, 4])), (wrong, NOTHING), validation=QUARTERS))
    assert values(state.sigma) == (approx(3 / 4 - 1 / 4, -3 / 4 + 1 / 4), approx(*2 * [3 / 4 * 2 + 1 / 4 * 6]))
    assert values(state.psi) == (approx(0, 0), approx(*2 * [3 / 4 * 4]))


def test_fedmatch_eq_4_scores_sigma_and_psi_together():
    fed = Given(START, (weights([-1, 1]), weights([3, -3])), (weights([-1, 1]), NOTHING), validation=[(1, 0)])
    state = BARE.round(START, fed)
    assert values(state.psi)[0] == approx(3, -3)  # accuracies 1 and 0
    assert values(state.sigma)[0] == approx(-1, 1)


def test_fedmatch_eq_4_of_models_that_are_never_right_is_the_plain_mean():
    fed = Given(START, (weights([2, -2]), None), (weights([4, -4]), None), validation=[(1, 1)])
    assert values(BARE.round(START, fed).sigma)[0] == approx(3, -3)


def test_fedmatch_eq_4_where_some_have_labels_is_among_those_who_moved_that_part():
    # Of four images psi = (-1, 1) alone is right in 1/4, sigma = (1, -1) alone in 3/4, and (2, -2) + (-4, 4) in 1/4.
    models = (weights([1, -1]), None), (None, weights([-1, 1])), (weights([2, -2]), weights([-4, 4]))
    state = BARE.round(START, Given(START, *models, validation=QUARTERS))
    sigma, psi = 3 / 4 * 1 + 1 / 4 * 2, (1 / 4 * -1 + 1 / 4 * -4) / (1 / 4 + 1 / 4)
    assert values(state.sigma)[0] == approx(sigma, -sigma)
    assert values(state.psi)[0] == approx(psi, -psi)
    assert [helper.client for helper in state.helpers] == [
        "1",
        "2",
    ]  # client 0 is more reliable, but has no psi to lend
    assert state.rates.keys() == {"0", "1", "2"}


def test_a_part_that_a_client_cannot_have_moved_does_not_count():
    fed = Given(START, (weights([1, 0]), weights([2, 0])))
    fed.clients = [ClientInfo(0, 0, 2)]
    state = BARE.round(START, fed)
    assert state.sigma is START.sigma  # it has no labels
    assert values(state.psi)[0] == approx(2, 0)
    fed.clients = [ClientInfo(0, 1, 0)]
    state = BARE.round(START, fed)
    assert values(state.sigma)[0] == approx(1, 0)
    assert (state.psi is START.psi, state.helpers) == (True, ())


def test_a_part_that_nobody_moved_stays_to_the_bit():
    state = State(SEEN, HELPER)
    fed = Given(state, (weights([1, 0]), None))
    assert BARE.round(state, fed).psi is state.psi
    assert fed.logged["psi_density"] == 0
    assert BARE.round(state, Given(state, (None, NOTHING))).sigma is state.sigma


def test_fedmatch_eq_4_among_those_who_moved_a_part_and_are_never_right_is_the_plain_mean():
    # Client 0 is right, but has moved psi alone; the sigmas of the others, (1, 0) and (3, 0), are wrong about x = 1.
    models = (None, weights([0, 5])), (weights([1, 0]), None), (weights([3, 0]), None)
    state = BARE.round(START, Given(START, *models, validation=[(1, 1)]))
    assert values(state.sigma)[0] == approx(2, 0)
    assert values(state.psi)[0] == approx(0, 5)


def test_where_some_clients_have_labels_they_move_sigma_and_the_others_psi():
    fed = Few(site(0, [(0, 0), (0, 0)]), site(1, unlabeled=[0, 0]))
    state = replace(BARE, confidence=0.0).round(START, fed)
    # One client's step is 0.1 * 10 * (1 - 1/2), the other's 0.1 * (1 - 1/2), both towards label 0.
    assert values(state.sigma)[1] == approx(1 / 2, -1 / 2)
    assert values(state.psi)[1] == approx(1 / 20, -1 / 20)


def test_a_score_is_the_share_of_right_answers_and_the_mean_cross_entropy():
    labeled = site(0, [(0, 0), (0, 0), (0, 1)]).labeled
    found = score(lambda x: torch.tensor([LN3, 0.0]).expand(len(x), 2), labeled)
    assert (found.accuracy, found.loss) == pytest.approx((2 / 3, (2 * math.log(4 / 3) + math.log(4)) / 3))


def test_a_score_is_of_a_network_with_statistics_where_they_stay_at_clients():
    network = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(1, 2))
    server = site(-1, network=network, validation=site(-1, [(4, 0), (6, 1)]).labeled, buffers="local")
    sent = {"0.weight": torch.ones(1), "0.bias": torch.zeros(1)}
    sent |= {"2.weight": torch.tensor([[-1.0], [1.0]]), "2.bias": torch.zeros(2)}
    # About their mean the pixels are -1 and 1, as they are both are positive.
    assert FedMatch().score(server, Model(sent)).accuracy == 1


def test_silence_keeps_the_state():
    state = replace(START, helpers=(Helper("1", pack(NOTHING)),))
    assert BARE.round(state, Given(START, None, None)) is state


# Helpers


def test_helpers_are_the_h_most_reliable_and_all_clients_get_them():
    # A psi of bias 1/2 - n says 0 of pixels from n on: right in 5 - n of 1, …, 4 with n = 4, 2, 1.
    models, validation = [(None, weights([1, 0], [0.5 - n, 0])) for n in (4, 2, 1)], [(n, 0) for n in (1, 2, 3, 4)]
    first = BARE.round(START, Given(START, *models, validation=validation))
    assert [helper.client for helper in first.helpers] == ["2", "1"]
    assert [values(unpack(helper.psi, NOTHING))[1][0] for helper in first.helpers] == [-0.5, -1.5]
    again = Given(first, *models, validation=validation)
    BARE.round(first, again)
    for _, sent in again.sent:
        assert [values(unpack(psi, NOTHING))[1][0] for psi in sent.helpers] == [-0.5, -1.5]
    three = replace(BARE, helpers=3).round(START, Given(START, *models, validation=validation))
    assert [helper.client for helper in three.helpers] == ["2", "1", "0"]


def test_helpers_stay_where_only_labeled_clients_replied():
    state = replace(START, helpers=(Helper("1", pack(weights([1, 1]))),))
    after = BARE.round(state, Given(state, (weights([0, 0], [3, 0]), None)))
    assert after.helpers == state.helpers
    assert not torch.equal(after.sigma["1.bias"], state.sigma["1.bias"])


def test_who_helps_need_not_be_sent_its_own_psi():
    state = replace(START, helpers=(Helper("1", pack(weights([1, 1]))), Helper("0", pack(weights([2, 2])))))
    fed = Given(state, None, None, None)
    replace(BARE, help_oneself=False).round(state, fed)
    sent = {who: [values(unpack(psi, NOTHING))[0][0] for psi in said.helpers] for who, said in fed.sent}
    assert sent == {0: [1.0], 1: [2.0], 2: [1.0, 2.0]}


def test_without_helpers_there_is_no_inter_client_consistency():
    alone = replace(BARE, helpers=0, confidence=1.0)
    state = alone.round(START, Given(START, (None, weights([0, 0], [3, 0]))))
    assert state.helpers == ()
    fed = Few(site(0, unlabeled=[0, 0]))
    after = alone.round(state, fed)
    assert fed.sent[0][1].helpers == ()
    assert torch.equal(after.psi["1.bias"], state.psi["1.bias"])  # nothing is sure, and nobody helps


def test_helpers_never_receive_data_but_weights_alone():
    """What goes to a client has no place for images, labels, predictions, or who the helpers are."""
    assert tasks(FedMatch)["local_update"].message is Message
    assert get_type_hints(Message) == {
        "sigma": Tree,
        "psi": Packed,
        "helpers": tuple[Packed, ...],
        "lr": float,
        "epochs": int,
    }
    assert get_type_hints(Update) == {"sigma": Packed | None, "psi": Packed | None}
    assert get_type_hints(Packed) == {"values": Tensor, "marked": Tensor | None}
    assert tasks(FedMatch)["local_update"].state is type(None)
    assert tasks(FedMatch)["score"].places == {"server"}


# Two sets of parameters


def test_fedmatch_eq_5_moves_sigma_by_lambda_s_and_leaves_psi_alone():
    net = decomposed(NOTHING, weights([0, 0], [LN3, 0]))
    loss = FedMatch().supervised(net, site(0), (batch(0, 0)[0], torch.tensor([0, 0])))
    assert loss.item() == pytest.approx(10 * math.log(4 / 3))
    loss.backward()
    assert net.sigma["1.bias"].grad.tolist() == approx(-10 / 4, 10 / 4)  # 10 (p - y)
    assert [value.grad for value in net.psi.values()] == [None, None]


def test_fedmatch_eq_5_at_a_client():
    one = site(0, [(0, 0), (0, 0)])
    update = BARE.local_update(one, message(NOTHING, weights([0, 0], [LN3, 0])))
    # One step of 0.1 * 10 * (1 - 3/4).
    assert values(unpack(update.sigma, NOTHING)) == (approx(0, 0), approx(1 / 4, -1 / 4))
    assert update.psi is None
    assert one.scored[0]["1.bias"].tolist() == approx(LN3 + 1 / 4, -1 / 4)


# Far from certainty (tau = 1) and without helpers, eq. 6 is its two norms.
SIGMA, PSI = weights([1, 2], [3, -1]), weights([0.5, -1], [0, 2])
FAR = 0.5**2 + 3**2 + 3**2 + 3**2
LARGE = 0.5 + 1 + 0 + 2


@pytest.mark.parametrize(("l2", "l1"), [(0.01, 0.0), (0.0, 0.1), (0.01, 0.1)])
def test_fedmatch_eq_6_has_both_norms_and_leaves_sigma_alone(l2, l1):
    method, net = replace(BARE, confidence=1.0, weight_l2=l2, weight_l1=l1), decomposed(SIGMA, PSI)
    loss, labels = unsupervised(method, net, [], 0)
    assert loss.item() == pytest.approx(l2 * FAR + l1 * LARGE)
    assert labels == {}
    loss.backward()
    # 2 l2 (psi - sigma) + l1 sign(psi)
    assert net.psi["1.weight"].grad.flatten().tolist() == approx(2 * l2 * -0.5 + l1, 2 * l2 * -3 - l1)
    assert net.psi["1.bias"].grad.tolist() == approx(2 * l2 * -3, 2 * l2 * 3 + l1)
    assert [value.grad for value in net.sigma.values()] == [None, None]


def test_fedmatch_eq_6_at_a_client():
    method = replace(BARE, confidence=1.0, weight_l2=0.01, weight_l1=0.1)
    update = method.local_update(site(0, unlabeled=[0, 0]), message(SIGMA, PSI))
    assert update.sigma is None
    weight, bias = values(unpack(update.psi, PSI))
    assert weight == approx(0.5 - 0.1 * (-0.01 + 0.1), -1 - 0.1 * (-0.06 - 0.1))
    assert bias == approx(0.1 * 0.06, 2 - 0.1 * (0.06 + 0.1))


class Watched(Decomposed):
    """The last one is kept where a test can look at it."""

    last: "Watched"

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        Watched.last = self


def steps_of(method: FedMatch, one: Site[Any], sent: Message, monkeypatch: pytest.MonkeyPatch):
    """For each step its batch's size, and whether any bit of sigma and of psi changed."""
    found = []

    def bits() -> list[bytes]:
        parts = (Watched.last.sigma, Watched.last.psi)
        return [b"".join(value.detach().numpy().tobytes() for value in part.values()) for part in parts]

    def fit(model: Any, optimizer: Any, batches: Any, *more: Any) -> None:
        before = bits()
        real(model, optimizer, batches, *more)
        found.append((len(batches[0][0]), *(a != b for a, b in zip(before, bits(), strict=True))))

    real = decomposed_module.fit
    monkeypatch.setattr(fedmatch, "Decomposed", Watched)
    monkeypatch.setattr(decomposed_module, "fit", fit)
    method.local_update(one, sent)
    return found


def images(labeled: int, unlabeled: int, number: int = 0) -> Site[Any]:
    return site(number, [(1 + n % 5, n % 2) for n in range(labeled)], [n % 7 for n in range(unlabeled)])


def test_fedmatch_algorithm_1_labels_move_sigma_alone_images_psi_alone_in_turns(monkeypatch):
    method = FedMatch(weight_l1=0.01, local=Local(epochs=2, batch_size=10, lr=0.01, momentum=0.9, clip=None))
    sent = message(weights([0.3, -0.2], [0.1, 0.2]), weights([0.1, 0.1]), HELPER, epochs=2)
    found = steps_of(method, images(15, 120), sent, monkeypatch)
    sigma, psi = (True, False), (False, True)
    # 120 images without labels are 50, 50 and 20, beside which 15 with labels are 10 and 5, and 10 again.
    epoch = [(10, *sigma), (50, *psi), (5, *sigma), (50, *psi), (10, *sigma), (20, *psi)]
    assert found == 2 * epoch


def test_fedmatch_algorithm_2_a_client_without_labels_moves_psi_alone(monkeypatch):
    assert steps_of(FedMatch(), images(0, 70), message(SEEN, NOTHING, HELPER), monkeypatch) == [
        (50, False, True),
        (20, False, True),
    ]
    assert steps_of(FedMatch(), images(12, 0), message(SEEN), monkeypatch) == [(10, True, False), (2, True, False)]


def test_fedmatch_algorithm_1_a_round_sends_back_both_and_averages_both():
    fed = Few(images(4, 30), images(4, 30, number=1))
    method = replace(BARE, confidence=0.0)
    state = method.round(State(NOTHING, weights([0, 0], [0.1, 0])), fed)
    assert fed.done == ["run", "score", "score"]  # the server trains nothing
    assert not torch.equal(state.sigma["1.bias"], NOTHING["1.bias"])
    assert state.psi["1.bias"].tolist() != approx(0.1, 0)


def test_fedmatch_algorithm_2_the_server_moves_sigma_e_g_epochs_before_clients_move_psi():
    method = replace(BARE, server_epochs=2, confidence=0.0)
    fed = Few(site(0, unlabeled=[0, 0]), site(1, unlabeled=[0, 0]), labeled=[(0, 0), (0, 0)])
    state = method.round(START, fed)
    assert fed.done == ["local_update", "score", "run", "score", "score"]
    # Steps of 0.1 * 10 * (1 - p) from 1/2, that is to the logits (1/2, -1/2), and from there.
    bias = 1 / 2 + (1 - sigmoid(1.0))
    for _, sent in fed.sent:
        assert sent.sigma["1.bias"].tolist() == approx(bias, -bias)
    assert torch.equal(state.sigma["1.bias"], fed.sent[0][1].sigma["1.bias"])  # to the bit
    # A client's step of 0.1 * (1 - p) towards its own label.
    psi = 0.1 * (1 - sigmoid(2 * bias))
    assert state.psi["1.bias"].tolist() == approx(psi, -psi)
    assert fed.sites[0].scored[0]["1.bias"].tolist() == approx(bias + psi, -bias - psi)


def test_a_site_with_nothing_to_learn_from_sends_nothing():
    assert BARE.local_update(site(0), message(NOTHING)) is None
    assert replace(BARE, use_sigma=False).local_update(site(0, [(0, 0)]), message(NOTHING)) is None
    assert replace(BARE, use_psi=False).local_update(site(0, unlabeled=[0]), message(NOTHING)) is None


def test_without_sigma_labels_are_left_alone_at_clients_and_at_the_server():
    method = replace(BARE, use_sigma=False, confidence=0.0)
    update = method.local_update(images(4, 4), message(SEEN))
    assert (update.sigma, update.psi is None) == (None, False)
    fed = Few(site(0, unlabeled=[0, 0]), labeled=[(0, 0)])
    state = method.round(State(SEEN, NOTHING), fed)
    assert fed.done == ["run", "score"]
    assert torch.equal(state.sigma["1.bias"], SEEN["1.bias"])


def test_without_psi_images_without_labels_are_left_alone():
    update = replace(BARE, use_psi=False).local_update(images(4, 4), message(SEEN))
    assert (update.sigma is None, update.psi) == (False, None)
    fed = Few(site(0, unlabeled=[0, 0]), labeled=[(0, 0)])
    state = replace(BARE, use_psi=False).round(START, fed)
    assert state.sigma["1.bias"].tolist() == approx(1 / 2, -1 / 2)  # the server's step alone
    assert state.psi is START.psi


def test_psi_begins_as_a_share_of_sigma():
    fed = Few(site(0, [(0, 0)]))
    fed.server.model.load_state_dict(weights([1, 2], [3, 4]))
    state = FedMatch().init(fed)
    assert values(state.sigma) == ([1, 2], [3, 4])
    assert values(state.psi) == (approx(0.2, 0.4), approx(0.6, 0.8))
    assert values(FedMatch().model(state)) == (approx(1.2, 2.4), approx(3.6, 4.8))
    assert values(replace(FedMatch(), psi_start=0.0).init(fed).psi) == ([0, 0], [0, 0])


def test_batchnorms_statistics_are_sigmas():
    fed = Few(site(0, [(0, 0)]))
    fed.server = site(-1, network=tiny(1, 2, 8), validation=site(0, [(0, 0)]).labeled)
    state = FedMatch().init(fed)
    assert state.sigma.keys() - state.psi.keys() == {
        f"{layer}.{name}" for layer in (1, 7) for name in ("running_mean", "running_var", "num_batches_tracked")
    }
    assert torch.equal(FedMatch().model(state)["1.running_var"], state.sigma["1.running_var"])


def test_entries_of_psi_near_zero_leave_as_zeros():
    still = replace(BARE, weight_unlabeled=0.0, zero_below=0.01)
    before = weights([0.004, -0.02], [-0.0099, 0.01])
    one = site(0, unlabeled=[0, 0])
    after = unpack(still.local_update(one, message(NOTHING, before)).psi, before)
    assert values(after) == (approx(0, -0.02), approx(0, 0.01))
    assert torch.equal(one.scored[0]["1.weight"], after["1.weight"])  # what is measured is what leaves
    kept = unpack(replace(still, zero_below=0.0).local_update(one, message(NOTHING, before)).psi, before)
    assert all(torch.equal(kept[name], before[name]) for name in before)


def test_entries_that_hardly_moved_leave_as_they_came():
    # The label moves biases by 0.1 * 0.1 * 1/2, and weights not at all; psi is drawn to zero by 0.1 * 0.05 each.
    method = replace(BARE, weight_labeled=0.1, weight_l1=0.05, confidence=1.0, keep_below=0.006)
    sigma, psi = weights([1, 1], [2, 2]), weights([0.5, 0.001], [0.5, 0.5])
    one = site(0, [(0, 0)], [0])
    update = method.local_update(one, message(sigma, psi))
    for part in (update.sigma, update.psi):
        assert (part.values.tolist(), part.marked.tolist()) == ([], [0])
    assert one.scored[0]["1.bias"].tolist() == approx(2.5, 2.5)  # what is measured is what leaves

    def after(**settings: float) -> list[float]:
        return values(unpack(replace(method, **settings).local_update(one, message(sigma, psi)).psi, psi))[0]

    assert after(keep_below=0.004) == approx(0.495, -0.004)
    assert after(keep_below=0.0005, zero_below=0.0045) == approx(0.495, 0)
    assert after(keep_below=0.004, zero_below=0.0045) == approx(0.495, 0.001)  # zero is as near to what came


@pytest.mark.parametrize("settings", [{}, {"zero_below": 0.01, "keep_below": 0.01}])
def test_what_has_diverged_leaves_as_it_is_and_is_refused(settings):
    one = site(0, [(0, 0)], [0])
    update = replace(BARE, **settings).local_update(one, message(weights([math.nan, 0]), PSI))
    with pytest.raises(ClientError, match=r"expected finite values, found NaN"):
        accept(tasks(FedMatch)["local_update"], one.info, 3, wire.pack(update), NOTHING)


def test_nothing_of_the_received_message_is_changed():
    sigma, psi = weights([0.3, -0.2]), weights([0.1, 0.1])
    sent = message(sigma, psi, HELPER)
    before = wire.pack(sent)
    FedMatch(confidence=0.0).local_update(images(4, 4), sent)
    assert wire.pack(sent) == before


def test_what_is_not_forgotten_of_the_labels_is_shown():
    one = site(0, [(1, 0), (1, 0), (1, 1), (-1, 1)])
    replace(BARE, weight_labeled=0.0).local_update(one, message(weights([-1, 1]), weights([2, -2])))
    assert one.shown["labeled_accuracy"].item() == 3 / 4  # by theta = (1, -1)
    blind = site(0, unlabeled=[1])
    BARE.local_update(blind, message(NOTHING))
    assert blind.shown == {}


def test_pseudo_labels_are_audited_epoch_by_epoch():
    one = site(0, unlabeled=[0, 0])
    replace(BARE, confidence=0.0).local_update(one, message(SEEN, epochs=3))
    assert [epoch for _, _, epoch in one.audited] == [1, 2, 3]


# Learning rates


def test_a_rate_falls_after_three_rounds_without_a_lower_loss():
    rate, found = Rate(0.9), []
    for loss in (2.0, 1.0, 1.0, 1.5, 0.9, 1.0, 1.0, 0.95, 0.9, 0.9, 0.9, 0.8):
        rate = rate.after(loss, 3, 3.0)
        found.append((round(rate.lr, 6), rate.best, rate.worse))
    assert found == [
        (0.9, 2.0, 0),
        (0.9, 1.0, 0),
        (0.9, 1.0, 1),  # as low is not lower
        (0.9, 1.0, 2),
        (0.9, 0.9, 0),  # in time
        (0.9, 0.9, 1),
        (0.9, 0.9, 2),
        (0.3, 0.9, 0),  # three rounds: a third, and three more are counted anew
        (0.3, 0.9, 1),
        (0.3, 0.9, 2),
        (0.1, 0.9, 0),
        (0.1, 0.8, 0),
    ]


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_not_lower_and_the_next_one_is(odd):
    rate = Rate(0.9).after(odd, 3, 3.0)
    assert (rate.best, rate.worse) == (None, 1)
    assert rate.after(5.0, 3, 3.0) == Rate(0.9, 5.0)


def test_each_client_has_a_rate_of_its_own_which_the_server_sends():
    method = replace(BARE, patience=1, decay=2.0, local=replace(STEP, lr=0.8))
    state, better = START, [weights([0, 0], [n, 0]) for n in (1, 2, 3)]
    for n in range(3):  # client 0 is as before in each round, client 1 better, client 2 silent at first
        fed = Given(state, (better[0], None), (better[n], None), None if n == 0 else (better[0], None))
        state = method.round(state, fed)
    assert {who: rate.lr for who, rate in state.rates.items()} == {"0": 0.2, "1": 0.8, "2": 0.4}
    fed = Given(state, None, None, None, None)
    method.round(state, fed)
    assert {who: sent.lr for who, sent in fed.sent} == {0: 0.2, 1: 0.8, 2: 0.4, 3: 0.8}


def test_the_server_has_a_rate_too():
    method = replace(BARE, patience=1, decay=2.0, weight_labeled=0.0, local=replace(STEP, lr=0.8))
    state, found = START, []
    for _ in range(3):
        state = method.round(state, Few(site(0, unlabeled=[0, 0]), silent=[0], labeled=[(0, 0)]))
        found.append(state.rates["server"].lr)
    assert found == [0.8, 0.4, 0.2]
    assert state.rates.keys() == {"server"}
    sent = method.message(state, pack(state.psi), "server", 1)
    assert (sent.lr, sent.epochs) == (0.2, 1)


def test_the_rate_that_is_sent_is_the_one_of_the_step():
    found = BARE.local_update(site(0, [(0, 0)]), message(NOTHING, lr=0.02))
    assert values(unpack(found.sigma, NOTHING))[1] == approx(0.1, -0.1)  # 0.02 * 10 * 1/2


def test_adam_is_adam():
    method = replace(BARE, local=replace(STEP, optimizer="adam", momentum=0.9))
    found = method.local_update(site(0, [(0, 0)]), message(NOTHING, lr=0.02))
    assert values(unpack(found.sigma, NOTHING))[1] == approx(0.02, -0.02)  # the first step is of the rate


def test_without_a_validation_set_it_says_what_to_set():
    with pytest.raises(BadInput, match=r"^fedmatch scores models on a validation set; set labels.validation, such as"):
        FedMatch().init(Few(site(0, [(0, 0)]), validation=()))


# The sparse wire


def tree_of(numbers: list[float]) -> Tree:
    """Numbers as a network: two parts whose names are not in the order of their making."""
    middle = len(numbers) // 3
    return {"b": torch.tensor(numbers[middle:], dtype=torch.float32), "a": torch.tensor(numbers[:middle])}


def same_bits(a: Tree, b: Tree) -> bool:
    return a.keys() == b.keys() and all(a[n].numpy().tobytes() == b[n].numpy().tobytes() for n in a)


number = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 1.0])
pairs = st.lists(st.tuples(number, number) | number.map(lambda n: (n, n)), min_size=1, max_size=70)


@given(pairs)
def test_what_is_packed_comes_back_to_the_bit(pairs):
    old, new = (tree_of([float(pair[i]) for pair in pairs]) for i in (0, 1))
    before = {name: value.clone() for name, value in old.items()}
    packed = wire.unpack(Packed, wire.pack(pack(new, old)))
    assert same_bits(unpack(packed, old), new)
    assert same_bits(old, before)
    against_zero = wire.unpack(Packed, wire.pack(pack(new)))
    assert same_bits(unpack(against_zero, {name: torch.zeros_like(value) for name, value in new.items()}), new)
    size = sum(part.nbytes for part in (packed.values, packed.marked) if part is not None)
    assert size <= 4 * len(pairs)
    changed = sum(torch.tensor(a).numpy().tobytes() != torch.tensor(b).numpy().tobytes() for a, b in pairs)
    assert len(packed.values) == (len(pairs) if packed.marked is None else changed)


def flat(*numbers: float) -> Tree:
    return {"w": torch.tensor(numbers).float()}


def test_a_bitmap_marks_what_changed_the_first_in_the_lowest_bit():
    packed = pack(flat(1, 0, 7, 0, 0, 0, 0, 0, 0, 5), flat(1, 0, 2, 0, 0, 0, 0, 0, 0, 0))
    assert packed.values.tolist() == [7, 5]
    assert packed.marked.tolist() == [0b100, 0b10]


def test_entries_are_in_the_order_of_their_names():
    assert pack({"b": torch.tensor([3.0]), "a": torch.tensor([[1.0], [2.0]])}).values.tolist() == [1, 2, 3]


def test_nothing_that_differs_is_a_bitmap_of_zeros():
    packed = pack(flat(*[1] * 9), flat(*[1] * 9))
    assert (packed.values.tolist(), packed.marked.tolist()) == ([], [0, 0])
    assert unpack(packed, flat(*[1] * 9))["w"].tolist() == [1] * 9


@pytest.mark.parametrize(
    ("count", "changed", "size"),
    [
        (32, 32, 128),  # all of it
        (32, 31, 128),  # 124 bytes and 4 of the bitmap are no less than 128
        (32, 30, 124),  # 120 and 4
        (33, 32, 132),  # 128 and 5 are more than 132
        (33, 31, 129),  # 124 and 5
        (8, 0, 1),
        (9, 1, 6),
        (1, 0, 1),
        (1, 1, 4),
    ],
)
def test_a_bitmap_is_sent_only_where_it_saves_something(count, changed, size):
    packed = pack(flat(*[1] * changed, *[0] * (count - changed)))
    assert sum(part.nbytes for part in (packed.values, packed.marked) if part is not None) == size
    assert (packed.marked is None) == (size == 4 * count)


def test_minus_zero_is_not_zero():
    packed = pack(flat(*[-0.0], *[0.0] * 15), flat(*[0.0] * 16))
    assert math.copysign(1, packed.values.item()) == -1


MALFORMED = [
    (Packed(torch.ones(9)), r"9 packed numbers do not fit where 10 are expected"),
    (Packed(torch.ones(11)), r"11 packed numbers do not fit where 10 are expected"),
    (Packed(torch.ones(2, 5)), r"packed numbers must be a vector of torch.float32, found torch.float32 \[2, 5\]"),
    (Packed(torch.ones(10).double()), r"must be a vector of torch.float32, found torch.float64 \[10\]"),
    (Packed(torch.ones(10, dtype=torch.int64)), r"must be a vector of torch.float32, found torch.int64 \[10\]"),
    (Packed(torch.ones(())), r"must be a vector of torch.float32, found torch.float32 \[\]"),
    (Packed(torch.ones(1), torch.tensor([3, 0], dtype=torch.uint8)), r"1 packed numbers do not fit where 2 are"),
    (Packed(torch.ones(2), torch.tensor([1, 0], dtype=torch.uint8)), r"2 packed numbers do not fit where 1 are"),
    (Packed(torch.ones(1), torch.tensor([0, 4], dtype=torch.uint8)), r"the bitmap marks more than the 10 numbers"),
    (Packed(torch.ones(2), torch.tensor([1, 4], dtype=torch.uint8)), r"the bitmap marks more than the 10 numbers"),
    (
        Packed(torch.ones(1), torch.tensor([1], dtype=torch.uint8)),
        r"must be torch.uint8 \[2\], found torch.uint8 \[1\]",
    ),
    (Packed(torch.ones(1), torch.tensor([1, 0, 0], dtype=torch.uint8)), r"found torch.uint8 \[3\]"),
    (Packed(torch.ones(1), torch.tensor([1, 0])), r"found torch.int64 \[2\]"),
    (Packed(torch.ones(1), torch.tensor([[1, 0]], dtype=torch.uint8)), r"found torch.uint8 \[1, 2\]"),
    (Packed(torch.ones(1), torch.tensor([True] + [False] * 9)), r"found torch.bool \[10\]"),
]


@pytest.mark.parametrize(("packed", "sentence"), MALFORMED, ids=range(len(MALFORMED)))
def test_what_does_not_fit_the_network_is_refused_in_a_sentence(packed, sentence):
    with pytest.raises(ValueError, match=sentence):
        unpack(packed, flat(*range(10)))


@pytest.mark.parametrize(("packed", "sentence"), MALFORMED, ids=range(len(MALFORMED)))
@pytest.mark.parametrize("part", ["sigma", "psi"])
def test_what_does_not_fit_the_network_is_refused_where_uploads_are_accepted(part, packed, sentence):
    data, task = wire.pack(Update(**{part: packed})), tasks(FedMatch)["local_update"]
    with pytest.raises(ClientError, match=rf"^client 7 failed .* of round 3: its upload is refused: .*{sentence}"):
        accept(task, ClientInfo(7, 1, 1), 3, data, flat(*range(10)))


def test_sigma_comes_with_batchnorms_statistics_and_psi_without():
    network, task = {name: value.clone() for name, value in tiny(1, 10, 8).state_dict().items()}, "local_update"
    every = {name: value for name, value in network.items() if value.is_floating_point()}
    bare = {name: value for name, value in every.items() if "running" not in name}

    def accepted(update: Update) -> bool:
        try:
            return accept(tasks(FedMatch)[task], ClientInfo(7, 1, 1), 3, wire.pack(update), network) is not None
        except ClientError:
            return False

    assert accepted(Update(pack(every), pack(bare)))
    assert not accepted(Update(pack(bare), pack(bare)))
    assert not accepted(Update(pack(every), pack(every)))


# Whole runs: digits, SimpleCNN, labels at the server, images that come in steps

DISJOINT = (
    "model=simple-cnn",
    "clients.count=3",
    "labels.at=server",
    "labels.per_class=10",
    "stream.steps=2",
    "stream.rounds=2",
    "rounds=4",
    "method.local.lr=0.01",
    "method.local.epochs=3",
    "evaluate.local=true",
)
SPARSE = ("method=fedmatch-sparse", "method.weight_l1=0.1", "method.zero_below=0.002")  # few steps need a strong pull


class Forger(Recorder):
    """A client sends something else in its third upload."""

    def __init__(self, upload: Update) -> None:
        super().__init__()
        self.upload = wire.pack(upload)

    def submit(self, *job: Any) -> int:
        ticket = super().submit(*job)
        if len(self.sent) == 3:
            self.tickets.outcomes[ticket] = replace(self.tickets.outcomes[ticket], payload=self.upload)
        return ticket


@pytest.mark.parametrize(
    ("upload", "sentence"),
    [
        (Update(psi=Packed(torch.ones(7))), r"7 packed numbers do not fit where \d+ are expected"),
        (Update(sigma=Packed(torch.ones(7))), r"7 packed numbers do not fit where \d+ are expected"),
        (Update(psi=Packed(torch.ones(1), torch.ones(3, dtype=torch.uint8))), r"the bitmap of \d+ numbers must be"),
        (Update(psi=Packed(torch.full((7,), math.nan))), r"value.psi.values: expected finite values, found NaN"),
    ],
)
def test_a_malformed_upload_is_the_clients_failure(upload, sentence, run_dir):
    directory = run_dir("method=fedmatch", *DISJOINT)
    with pytest.raises(
        ClientError, match=rf"^client \d failed in 'local_update' of round 1: its upload is refused: {sentence}"
    ):
        execute(directory, executor=Forger(upload))


@pytest.fixture(scope="module")
def disjoint(small_run):
    """The lines of a dense and of a sparse run, with what was sent in them."""
    found = []
    for changes in (("method=fedmatch",), SPARSE):
        recorder = Recorder()
        directory = small_run(*changes, *DISJOINT)
        execute(directory, executor=recorder)
        found.append((read_rounds(directory), recorder.sent))
    return found


def test_a_sparse_psi_costs_less_to_send_and_the_ledger_has_just_its_bytes(disjoint):
    (dense, _), (sparse, sent) = disjoint
    # SimpleCNN for one channel and 16x16 pixels, of which two convolutions and two poolings leave one.
    count = 6 * 26 + 16 * 151 + 120 * 17 + 84 * 121 + 84 * 85 + 256 * 85 + 10 * 257
    for line in dense:
        assert line["sent"] == line["psi_density"] == 1
        assert 3 * 4 * count < line["bytes_up"] < 3 * (4 * count + 500)
    for line in sparse:
        ours = [payload for job, _, payload in sent if job.round == line["round"]]
        assert line["bytes_up"] == sum(map(len, ours))
        updates = [wire.unpack(Update, payload) for payload in ours]
        assert all(update.sigma is None for update in updates)
        numbers = sum(len(update.psi.values) for update in updates)
        assert line["sent"] == pytest.approx(numbers / (3 * count))
        bitmaps = sum(len(update.psi.marked) for update in updates if update.psi.marked is not None)
        assert 0 < line["bytes_up"] - 4 * numbers - bitmaps < 3 * 500  # and the names of two tensors
    # Psi begins dense, and no number of it stays as it was; later what is zero stays zero, and is not sent.
    assert [line["sent"] < 0.6 for line in sparse] == [False, True, True, True]
    assert sum(line["bytes_up"] for line in sparse) < 0.7 * sum(line["bytes_up"] for line in dense)
    assert sparse[-1]["bytes_up"] < 0.25 * dense[-1]["bytes_up"]
    assert sparse[-1]["psi_density"] < 0.1
    assert sparse[-1]["bytes_down"] < 0.6 * dense[-1]["bytes_down"]  # and so do psi and helpers on their way down


def test_local_and_global_accuracy_are_both_measured(disjoint):
    for lines, _ in disjoint:
        measured = [line for line in lines if "test" in line]
        assert [line["round"] for line in measured] == [2, 4]
        assert all(0 < line["local_accuracy"] <= 1 and "shown" not in line for line in measured)


def test_where_clients_have_labels_both_parts_are_sent_and_what_is_not_forgotten_is_in_the_lines(run_dir):
    directory = run_dir(
        "method=fedmatch", "model=tests.nets:tiny", "labels.at=every-client", "labels.per_class=5", "rounds=2"
    )
    execute(directory, workers=1)
    last = read_rounds(directory)[-1]
    parameters = 4 * 9 + 2 * 4 + 16 * 65 + 2 * 16 + 10 * 17
    statistics = 2 * (4 + 16)
    assert last["sent"] == pytest.approx((2 * parameters + statistics) / parameters)
    assert 0 < last["shown"]["labeled_accuracy"] <= 1


def test_what_a_single_model_forgets_of_its_labels_is_in_the_lines_and_reproduced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    changes = ["data=digits", "data.image_size=16", "model=tests.nets:tiny", "stream.steps=10", "evaluate.every=1"]
    words = [word for change in changes for word in ("--set", change)]
    rows = ["reproduce", "fedmatch-fig5c/batch-*", "--rounds", "2", "--workers", "1", "--out", "here", *words]
    assert main(rows) == 0
    told = capsys.readouterr().out
    assert main([*rows, "--format", "json"]) == 0
    for row in json.loads(capsys.readouterr().out)["rows"]:
        last = read_rounds(Path(row["directories"][0]))[-1]
        kept = last["shown"]["labeled_accuracy"]
        assert 0 < kept < 1
        assert row["ours"]["labeled_accuracy"]["mean"] == pytest.approx(100 * kept)
        assert last["images_unlabeled"] <= 2 * (1197 - 50) // 10  # of a step
    assert told.count("accuracy on own labels") == 3


# Rows


def test_the_defaults_are_those_of_the_paper():
    assert METHODS["fedmatch"] == FedMatch(
        helpers=2,
        confidence=0.75,
        weight_labeled=10.0,
        weight_unlabeled=1.0,
        weight_l2=0.01,
        weight_l1=0.0,
        zero_below=0.0,
        keep_below=0.0,
        psi_start=0.2,
        batch_unlabeled=50,
        server_epochs=1,
        patience=3,
        decay=3.0,
        local=Local(epochs=1, batch_size=10, lr=1e-4, optimizer="sgd", momentum=0.9, weight_decay=0.0, clip=None),
    )
    assert METHODS["fedmatch-sparse"] == replace(METHODS["fedmatch"], weight_l1=0.01, zero_below=1e-5)


def test_test_images_may_be_mirrored_and_shifted_as_in_the_paper(run_dir, pool):
    """It changes what is measured, and nothing that is trained; the same for any number of workers."""
    changes = ("labels.at=every-client", "labels.per_class=5", "rounds=2", "evaluate.local=true")
    shift = ["views.test=flip-shift"]
    plain, shifted, again = (run_dir(*changes, *more) for more in ([], shift, shift))
    for directory, executor in ((plain, Serial()), (shifted, Serial()), (again, pool)):
        execute(directory, executor=executor)
    first, second, third = (read_rounds(directory)[-1] for directory in (plain, shifted, again))
    before, after = (load_file(directory / "model.safetensors") for directory in (plain, shifted))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert first["test"] != second["test"] == third["test"]
    assert first["local_accuracy"] != second["local_accuracy"] == third["local_accuracy"]
