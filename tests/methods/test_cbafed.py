"""CBAFed (Li et al., CVPR 2023), equation by equation, with values worked out by hand on softmax regression."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewlabel.core import tree
from fewlabel.core.federation import ClientInfo
from fewlabel.core.tree import Tree
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import execute
from fewlabel.learn import residual
from fewlabel.learn.optim import Local
from fewlabel.learn.thresholds import class_shares, select, thresholds
from fewlabel.methods import METHODS
from fewlabel.methods.cbafed import CBAFed, Message, State, Update
from fewlabel.methods.fedirm import FedIRM
from fewlabel.papers import tables
from tests.hand import STEP, Sites, Uploads, passes, site, values, weights

L3 = math.log(3)
ONCE = CBAFed(local=STEP, warmup_epochs=1, residual=False)
A, B, U = ClientInfo(0, 3, 0), ClientInfo(1, 1, 0), ClientInfo(2, 0, 50)


def message(model: Tree, bounds: list[float], tail: list[bool] | None = None, warm: bool = False) -> Message:
    return Message(model, torch.tensor(bounds).double(), torch.tensor(tail or [False] * len(bounds)), warm)


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(torch.as_tensor(found).double(), torch.tensor(expected).double(), rtol=0, atol=tolerance)


# Eq. 1: residual weights among epochs


class Epochs(nn.Module):
    """Weights whose training sets them to the number of the epoch, as a unit vector, so that shares can be read off."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(12)[0])

    def train_epoch(self, number: int) -> None:
        self.load_state_dict({"w": torch.eye(12)[number]})


@pytest.mark.parametrize(
    ("first", "number", "shares"),
    [
        (0, 4, {4: 1.0}),
        (0, 5, {0: 0.8, 5: 0.2}),
        (0, 9, {9: 1.0}),
        (0, 10, {0: 0.64, 5: 0.16, 10: 0.2}),  # 0.8 of what came of epoch 5
        (0, 11, {11: 1.0}),
        (1, 5, {5: 1.0}),
        (1, 6, {1: 0.8, 6: 0.2}),
        (1, 11, {1: 0.64, 6: 0.16, 11: 0.2}),  # as in the authors' code, where that is the last epoch
    ],
)
def test_cbafed_eq1_blends_with_the_weights_of_five_epochs_ago(first, number, shares):
    model = Epochs()
    for epoch in residual.epochs(model, number, share=0.8, skip=5, first=first):
        model.train_epoch(epoch)
    close(model.w.detach(), [shares.get(epoch, 0.0) for epoch in range(12)])


# From zero, labels 0, 0, 1 of pixel 1 have the gradient (1/2 - 2/3, 1/2 - 1/3), so the first step goes to 1/6. There
# the logits are (1/3, -1/3), and the second step goes on by 2/3 - s(2/3).
LABELS = ((1, 0), (1, 0), (1, 1))
FIRST = 1 / 6
SECOND = FIRST + 2 / 3 - 1 / (1 + math.exp(-2 / 3))
ZERO = weights([0.0, 0.0])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"residual": False}, SECOND),
        ({"residual": True}, 0.2 * SECOND),
        ({"residual": True, "blend_epochs": 0.5}, 0.5 * SECOND),
        ({"residual": True, "skip": 3}, SECOND),
        ({"residual": True, "skip": 1, "blend_from_first": True}, 0.8 * FIRST + 0.2 * SECOND),
    ],
)
def test_cbafed_eq1_and_2_a_labeled_client_minimises_cross_entropy_with_residual_weights(changes, expected):
    method = replace(ONCE, warmup_epochs=2, **({"skip": 2} | changes))
    upload = method.local_update(site(0, LABELS), message(ZERO, [0.9, 0.9], warm=True))
    close(values(upload.model), [[expected, -expected]] * 2)
    assert upload.counts.tolist() == [2, 1]


# Eq. 3 and 21: residual weights among rounds


def rounds(method: CBAFed, number: int) -> list[float]:
    """After so many rounds, each of whose mean is its number as a unit vector, the share of each."""
    state = State({"w": torch.eye(12)[0]}, {"w": torch.eye(12)[0]}, torch.zeros(2, dtype=torch.int64))
    for round in range(1, number + 1):
        upload = Update({"w": torch.eye(12)[round]}, 2, torch.tensor([1, 1]))
        state = method.round(state, Uploads({A: upload, U: upload}, round=round))
    return state.model["w"].tolist()


@pytest.mark.parametrize(
    ("warmup", "number", "shares"),
    [
        (9, 1, {1: 1.0}),
        (9, 2, {0: 0.8, 2: 0.2}),  # eq. 3, with alpha_1
        (9, 4, {0: 0.64, 2: 0.16, 4: 0.2}),
        (1, 2, {2: 1.0}),
        (1, 3, {1: 0.5, 3: 0.5}),  # eq. 21, with alpha_2, counted from the end of the warm-up
        (1, 5, {1: 0.25, 3: 0.25, 5: 0.5}),
        (4, 5, {5: 1.0}),
        (4, 6, {0: 0.32, 2: 0.08, 4: 0.1, 6: 0.5}),
        (0, 2, {0: 0.5, 2: 0.5}),
    ],
)
def test_cbafed_eq3_and_21_blend_with_the_model_of_s_rounds_ago(warmup, number, shares):
    close(rounds(CBAFed(skip=2, warmup=warmup), number), [shares.get(round, 0.0) for round in range(12)])
    assert rounds(CBAFed(skip=2, warmup=warmup, residual=False), number)[number] == 1.0


def test_labels_alone_blend_as_in_a_warm_up_that_never_ends():
    close(rounds(CBAFed(skip=2, warmup=0, labeling="none"), 4)[:5], [0.64, 0.0, 0.16, 0.0, 0.2])
    close(rounds(CBAFed(skip=2, warmup=1, labeling="none"), 3)[:4], [0.0, 0.8, 0.0, 0.2])


def test_cbafed_eq3_a_warm_up_is_a_mean_by_size():
    # The second client's image is seen as 3, of class 1: its bias goes to (-1/2, 1/2) and its weight to (-3/2, 3/2).
    fed = Sites(site(0, LABELS), site(1, [(3, 1), (3, 1)]), site(2, unlabeled=[1, 1]))
    state = ONCE.round(State(ZERO, ZERO, torch.zeros(2, dtype=torch.int64)), fed)
    close(values(state.model), [[(3 * FIRST - 2 * 1.5) / 5, (-3 * FIRST + 2 * 1.5) / 5], [-0.1, 0.1]])
    assert [client for client, _ in fed.sent] == [0, 1]
    assert state.counts.tolist() == [2, 3]  # eq. 7, of labeled clients alone


@pytest.mark.parametrize(("warm", "labeled", "unlabeled"), [(True, 7, 0), (False, 3, 2)])
def test_epochs_are_those_of_the_warm_up_of_labeled_and_of_unlabeled_clients(warm, labeled, unlabeled):
    method = replace(ONCE, warmup_epochs=7, local=replace(STEP, epochs=3), epochs_unlabeled=2)
    for one, epochs in ((site(0, LABELS), labeled), (site(1, unlabeled=[9, 9, 9]), unlabeled)):
        seen = passes(one)
        method.local_update(one, message(weights([L3, 0.0]), [0.9, 0.9], warm=warm))
        assert [training for training, _ in seen].count(True) == epochs


# Eq. 4, 5 and 14 to 17: which images get a pseudo-label

P = torch.tensor(
    [
        [0.95, 0.03, 0.02],  # above the threshold of class 0
        [0.90, 0.04, 0.06],  # not above it; the second is class 2
        [0.55, 0.40, 0.05],  # nor this; the second is class 1
        [0.10, 0.70, 0.20],  # above that of class 1
        [0.30, 0.20, 0.50],  # not above that of class 2; the second is class 0
    ],
    dtype=torch.float64,
)
BOUNDS = torch.tensor([0.90, 0.60, 0.50], dtype=torch.float64)


@pytest.mark.parametrize(
    ("tail", "index", "label"),
    [
        ([False, False, False], [0, 3], [0, 1]),  # eq. 4, 14
        ([False, False, True], [0, 1, 3], [0, 2, 1]),  # eq. 15 to 17
        ([False, True, False], [0, 2, 3], [0, 1, 1]),
        ([True, True, True], [0, 1, 2, 3, 4], [0, 2, 1, 1, 0]),
    ],
)
def test_cbafed_eq14_to_17_select_sure_images_and_second_guesses_of_rare_classes(tail, index, label):
    found = select(P, BOUNDS, torch.tensor(tail))
    assert [part.tolist() for part in found] == [index, label]


def test_cbafed_eq4_and_5_with_one_threshold_for_all():
    assert [part.tolist() for part in select(P, torch.full((3,), 0.6))] == [[0, 1, 3], [0, 0, 1]]


# Eq. 6 and 18 to 20: training on them

# With weights (ln 3, 0), pixels 3, 1, -2 and -3 are of class 0 by 27/28, 3/4, 1/10 and 1/28. Thresholds 0.95 and 0.85
# take the first, the third and the fourth. p0 - [y = 0] is -1/28, 1/10 and 1/28, its mean 1/30, and the mean of x times
# it (-3/28 - 2/10 - 3/28) / 3 = -29/210. Pixel 1 as class 1 adds 3/4 to both sums.
PIXELS = (3, 1, -2, -3)


@pytest.mark.parametrize(
    ("tail", "counts", "weight", "bias"),
    [
        ([False, False], [1, 2], -29 / 210, 1 / 30),
        ([False, True], [1, 3], (-29 / 70 + 3 / 4) / 4, (1 / 10 + 3 / 4) / 4),
    ],
)
@pytest.mark.parametrize("labeling", ["fixed", "refreshed", "batch"])
def test_cbafed_eq18_and_19_train_on_the_selected_images_and_count_them(labeling, tail, counts, weight, bias):
    one = site(0, unlabeled=PIXELS)
    method = replace(ONCE, labeling=labeling, residual=True, skip=1)  # residual weights are for labeled clients
    upload = method.local_update(one, message(weights([L3, 0.0]), [0.95, 0.85], tail))
    close(values(upload.model), [[L3 - weight, weight], [-bias, bias]])
    assert upload.counts.tolist() == counts
    ((index, label, epoch),) = one.audited
    expected = [(0, 0), (1, 1), (2, 1), (3, 1)] if tail[1] else [(0, 0), (2, 1), (3, 1)]
    assert (sorted(zip(index.tolist(), label.tolist(), strict=True)), epoch) == (expected, 1)


@pytest.mark.parametrize("view", ["plain", "weak"])
def test_cbafed_eq4_labels_come_from_the_received_model_in_evaluation_mode(view, monkeypatch):
    one, views = site(0, unlabeled=PIXELS), []
    batches = one.unlabeled.batches
    monkeypatch.setattr(
        one.unlabeled, "batches", lambda names, *rest, **more: views.append(names) or batches(names, *rest, **more)
    )
    seen = passes(one)
    replace(ONCE, label_view=view, epochs_unlabeled=3).local_update(one, message(weights([L3, 0.0]), [0.95, 0.85]))
    assert views == [(view,)]  # once, and never again
    assert seen == [(False, 4)] + [(True, 3)] * 3


def test_batches_too_are_labeled_in_evaluation_mode():
    one = site(0, unlabeled=PIXELS)
    seen = passes(one)
    replace(ONCE, labeling="batch").local_update(one, message(weights([L3, 0.0]), [0.95, 0.85]))
    assert seen == [(False, 4), (True, 3)]


def test_cbafed_eq7_and_20_count_and_weigh_what_was_trained_on():
    replies = {
        A: Update(weights([4.0, 0.0]), 3, torch.tensor([2, 1])),
        U: Update(weights([0.0, 8.0]), 5, torch.tensor([0, 5])),  # 5 of its 50
        ClientInfo(3, 0, 50): None,
    }
    fed = Uploads(replies, round=2)
    state = CBAFed().round(State(ZERO, ZERO, torch.tensor([9, 9])), fed)
    close(values(state.model)[0], [4 * 3 / 8, 8 * 5 / 8])
    assert state.counts.tolist() == fed.logged["class_counts"].tolist() == [2, 6]


@pytest.mark.parametrize(
    ("changes", "share"), [({"labeled_share": 0.5}, 0.5), ({"labeled_times": 10}, 30 / 35), ({}, 3 / 8)]
)
def test_labeled_clients_may_weigh_more(changes, share):
    replies = {A: Update(weights([1.0, 0.0]), 3), U: Update(ZERO, 5)}
    state = CBAFed(**changes).round(State(ZERO, ZERO, torch.tensor([9, 9])), Uploads(replies, round=2))
    close(values(state.model)[0], [share, 0.0])


# Eq. 8 to 13: thresholds


def test_cbafed_eq8_and_13_shares_are_scaled_by_a_tenth_of_the_classes():
    close(class_shares(torch.tensor([1, 3])), [0.25 * 0.2, 0.75 * 0.2])
    close(class_shares(torch.ones(100)), [0.1] * 100)


def test_cbafed_eq9_to_11_thresholds():
    shares = class_shares(torch.tensor([6, 2, 2]))  # 0.18, 0.06, 0.06
    deviation = 0.0692820  # sqrt((0.08^2 + 0.04^2 + 0.04^2) / (3 - 1))
    expected = [0.84 + 0.18 - deviation, 0.84 + 0.06 - deviation, 0.84 + 0.06 - deviation]
    close(thresholds(shares, 0.84, 1.0), expected, 1e-6)
    close(thresholds(shares, 0.84, 0.95), [0.95, *expected[1:]], 1e-6)


SVHN = torch.tensor([15, 292, 986, 116, 63, 1285, 1352, 1438, 807, 267])  # of client 0 in the authors' partition


def sent(method: CBAFed, counts: Tensor, round: int = 2) -> Message:
    """What clients are told after a round of these counts."""
    fed = Uploads({A: None}, classes=len(counts), round=round)
    method.round(State(ZERO, ZERO, counts), fed)
    return fed.sent[0][1]


def test_a_warm_up_in_which_nobody_answers_takes_longer():
    method, nobody = CBAFed(warmup=1), torch.zeros(2, dtype=torch.int64)
    late = method.round(State(ZERO, ZERO, nobody), Uploads({A: None, U: None}, round=1))
    fed = Uploads({A: Update(weights([1.0, 0.0]), 3), U: None}, round=2)
    warmed = method.round(late, fed)
    assert [(who, told.warm) for who, told in fed.sent] == [(A.id, True)]
    fed = Uploads({A: None, U: None}, round=3)
    assert method.round(warmed, fed).lost == 1
    assert {(who, told.warm) for who, told in fed.sent} == {(A.id, False), (U.id, False)}


def test_cbafed_eq9_to_16_on_the_labeled_client_of_svhn():
    assert class_shares(SVHN).std().item() == pytest.approx(0.0866, abs=5e-5)
    told = sent(METHODS["cbafed-authors"], SVHN)
    close(told.thresholds, [0.756, 0.798, 0.90, 0.771, 0.763, 0.90, 0.90, 0.90, 0.875, 0.794], 6e-4)
    assert told.tail.nonzero().flatten().tolist() == [0, 3, 4]


@pytest.mark.parametrize("classes", [2, 10, 100])
def test_cbafed_eq12_bounds_hold_before_clipping_and_scaling(classes):
    draw = torch.Generator().manual_seed(classes)
    one_class = torch.eye(classes, dtype=torch.int64)[0]  # where the lower bound is reached
    for counts in (one_class, *torch.randint(0, 1000, (50, classes), generator=draw) ** 3):
        p = counts / counts.sum().double()
        found = thresholds(p, 0.84, math.inf)
        assert (found <= 0.84 + p + 1e-12).all()
        assert (found >= 0.84 + p - math.sqrt(1 / classes) - 1e-12).all()
    assert thresholds(one_class.double(), 0.84, 9.0)[0].item() == pytest.approx(1.84 - math.sqrt(1 / classes))


def test_before_anything_is_known_all_classes_are_alike():
    told = sent(CBAFed(warmup=0), torch.zeros(4, dtype=torch.int64), round=1)
    close(told.thresholds, [0.94] * 4)
    assert not told.tail.any()


# At C = 100 a class is rare below 0.003 of all images. Shares as eq. 13 scales them are ten times as large.
@pytest.mark.parametrize(("changes", "rare"), [({}, [0, 1]), ({"tail_scaled": True}, [0]), ({"beta": 10}, range(100))])
def test_cbafed_eq16_a_class_is_rare_below_beta_over_c_of_all_images(changes, rare):
    counts = torch.full((100,), 10_000)
    counts[:2] = torch.tensor([200, 2_000])  # 0.002 and 0.02 of 0.1 each, nearly
    assert sent(CBAFed(**changes), counts).tail.nonzero().flatten().tolist() == list(rare)


def test_without_its_parts_it_is_fixed_labeling_with_one_threshold():  # Table 4, and residual=False above
    close(sent(CBAFed(adaptive=False), SVHN).thresholds, [0.84] * 10)
    assert not sent(CBAFed(tail=False), SVHN).tail.any()
    assert sent(CBAFed(adaptive=False), SVHN).tail.any()


# Who selects next to nothing


@pytest.mark.parametrize(
    ("labeling", "pixels"),
    [("fixed", [0, 0, 0]), ("refreshed", [0, 0, 0]), ("batch", [0, 0, 0]), ("batch", [9, 0, 0])],
)
def test_who_selects_nothing_or_one_of_a_batch_sends_nothing_and_harms_nothing(labeling, pixels):
    norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1), nn.Linear(1, 2))
    norm[2].load_state_dict({"weight": torch.tensor([[L3], [0.0]]), "bias": torch.zeros(2)})
    one = site(0, unlabeled=pixels, network=norm)  # which could not train on one image
    state = State(tree.of(norm), tree.of(norm), torch.tensor([3, 4]))
    fed = Sites(one, round=2)
    after = replace(ONCE, labeling=labeling, epochs_unlabeled=2, tail=False).round(state, fed)
    assert all(torch.equal(after.model[name], value) for name, value in state.model.items())
    assert (after.counts.tolist(), one.state) == ([3, 4], None)


@pytest.mark.parametrize("labeling", ["fixed", "refreshed"])
def test_who_selects_one_image_trains_on_it(labeling):
    norm = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1), nn.Linear(1, 2))
    norm[2].load_state_dict({"weight": torch.tensor([[L3], [0.0]]), "bias": torch.zeros(2)})
    one = site(0, unlabeled=[9, 0, 0], network=norm)
    upload = replace(ONCE, labeling=labeling).local_update(one, message(tree.of(norm), [0.9, 0.9]))
    assert (upload.used, upload.counts.tolist()) == (1, [1, 0])
    # BatchNorm makes 0 of an image seen twice, so p = (1/2, 1/2).
    assert upload.model["2.bias"].tolist() == pytest.approx([1 / 2, -1 / 2], abs=1e-4)


NOT_COUNTED = ("fed-consist-batch", "fed-consist-plus", "fed-selftraining", "fedavg-plus")


@pytest.mark.parametrize("name", ["cbafed", *NOT_COUNTED])
def test_classes_are_counted_only_where_thresholds_or_rare_classes_need_it(name):
    method = replace(METHODS[name], local=STEP, warmup=0, warmup_epochs=1)
    upload = method.local_update(site(0, LABELS), message(ZERO, [0.9, 0.9]))
    counts = None if upload.counts is None else upload.counts.tolist()
    assert (upload.used, counts) == (3, None if name in NOT_COUNTED else [2, 1])
    fed = Uploads({A: upload}, round=1)
    method.round(State(ZERO, ZERO, torch.zeros(2, dtype=torch.int64)), fed)
    assert ("class_counts" in fed.logged) == (name not in NOT_COUNTED)


def test_an_epoch_that_selects_nothing_leaves_the_work_of_those_before(monkeypatch):
    found = iter([(torch.tensor([0, 1]), torch.tensor([0, 0])), (torch.tensor([], dtype=torch.int64),) * 2])
    monkeypatch.setattr("fewlabel.methods.cbafed.select", lambda *_: next(found))
    method = replace(ONCE, labeling="refreshed", epochs_unlabeled=2)
    upload = method.local_update(site(0, unlabeled=[1, 1]), message(ZERO, [0.9, 0.9]))
    close(values(upload.model), [[0.5, -0.5]] * 2)  # one step of two images of class 0
    assert upload.counts.tolist() == [2, 0]


# Strategies of labeling (section 4.3)

# A model (ln 3, 0) is sure of pixels 3 and -3 by 27/28 and of 2 and -2 by 9/10. A step on the former adds 3/28 to the
# first weight: it is then sure of the latter by 1 / (1 + exp(-2 ln 3 - 12/28)) = 0.932, above the threshold of 0.91.


@pytest.mark.parametrize(
    ("labeling", "epochs", "audited"),
    [
        ("fixed", 1, {1: 2}),
        ("fixed", 5, {1: 2}),
        ("refreshed", 1, {1: 2}),
        ("refreshed", 5, {1: 2, 2: 4, 3: 4, 4: 4, 5: 4}),
        ("batch", 5, {1: 2, 2: 4, 3: 4, 4: 4, 5: 4}),
    ],
)
def test_only_a_strategy_that_labels_anew_takes_in_what_is_surer_by_then(labeling, epochs, audited):
    one = site(0, unlabeled=[3, -3, 2, -2])
    method = replace(ONCE, labeling=labeling, epochs_unlabeled=epochs)
    upload = method.local_update(one, message(weights([L3, 0.0]), [0.91, 0.91]))
    assert {epoch: len(index) for index, _, epoch in one.audited} == audited
    assert upload.counts.sum() == list(audited.values())[-1]


@pytest.mark.parametrize("epochs", [1, 5])
@pytest.mark.parametrize("labeling", ["fixed", "refreshed", "batch", "none"])
def test_a_run_tells_pseudo_labels_per_epoch(labeling, epochs, run_dir):
    changes = ("model=tests.nets:tiny", "rounds=2", "method=fed-consist-plus", "method.threshold=0")
    directory = run_dir(
        *changes, f"method.labeling={labeling}", f"method.epochs_unlabeled={epochs}", "method.warmup_epochs=1"
    )
    execute(directory, workers=1)
    warm, line = read_rounds(directory)
    assert (warm["asked"], line["asked"]) == (1, 1 if labeling == "none" else 5)
    assert "pseudo_labels" not in warm
    assert ("pseudo_labels" in line) == (labeling != "none")
    anew = epochs == 5 and labeling in ("refreshed", "batch")
    assert list(line.get("pseudo_labels_per_epoch", {})) == (["1", "2", "3", "4", "5"] if anew else [])
    assert not line.keys() & {"thresholds", "class_counts"}  # one for all, which need not be counted


# Clients with labeled and unlabeled images


@pytest.mark.parametrize(
    ("labeling", "warm", "counts"), [("fixed", False, [12, 11]), ("batch", False, [12, 11]), ("batch", True, [2, 1])]
)
def test_a_partly_labeled_client_counts_each_of_its_images_once(labeling, warm, counts):
    one = site(0, LABELS, [3, -3] * 10)  # five batches, which the labeled ones go along with
    method = replace(ONCE, labeling=labeling, local=replace(STEP, batch_size=4, lr=1e-12))
    assert method.local_update(one, message(weights([L3, 0.0]), [0.9, 0.9], warm=warm)).counts.tolist() == counts


# With weights (ln 3, 0), the labels 0, 0, 1 of pixel 1 give p0 - [y = 0] = -1/4, -1/4, 3/4, and those of above -1/28,
# 1/10 and 1/28. As one set of six, bias: (1/4 + 1/10) / 6; weight: (1/4 - 29/70) / 6. In batches two means are added.
@pytest.mark.parametrize(
    ("labeling", "weight", "bias"),
    [("fixed", (1 / 4 - 29 / 70) / 6, 0.35 / 6), ("batch", (1 / 4 - 29 / 70) / 3, 0.35 / 3)],
)
def test_a_partly_labeled_client_trains_on_both_together(labeling, weight, bias):
    one = site(0, LABELS, PIXELS)
    upload = replace(ONCE, labeling=labeling).local_update(one, message(weights([L3, 0.0]), [0.95, 0.85]))
    close(values(upload.model), [[L3 - weight, weight], [-bias, bias]])
    assert upload.counts.tolist() == [3, 3]


# What clients keep


@pytest.mark.parametrize(("persistent", "expected"), [(False, FIRST), (True, 1.9 * FIRST)])
def test_a_persistent_optimizer_keeps_its_momentum(persistent, expected):
    one = site(0, LABELS)
    method = replace(ONCE, local=replace(STEP, momentum=0.9), persistent_optimizer=persistent)
    for _ in range(2):
        upload = method.local_update(one, message(ZERO, [0.9, 0.9], warm=True))
    close(values(upload.model), [[expected, -expected]] * 2)


# Rows of the table


def test_the_rows_are_what_the_paper_and_its_code_say():
    paper, plain = METHODS["cbafed"], {"adaptive": False, "tail": False, "residual": False}
    sgd = Local(11, batch_size=64, lr=0.03, lr_unlabeled=0.02, optimizer="sgd", momentum=0.9, weight_decay=5e-4, clip=5)
    assert (paper.local, paper.epochs_unlabeled, paper.warmup, paper.warmup_epochs) == (sgd, 1, 1, 501)
    assert (paper.threshold, paper.highest, paper.beta, paper.tail_scaled) == (0.84, 0.95, 0.3, False)
    assert (paper.skip, paper.blend_epochs, paper.blend_rounds) == (5, 0.8, 0.5)
    assert (paper.labeling, paper.labeled_share, paper.labeled_times) == ("fixed", None, None)
    authors = {"highest": 0.9, "blend_from_first": True, "label_view": "weak"}
    assert METHODS["cbafed-authors"] == replace(paper, **authors, persistent_optimizer=True)
    assert METHODS["fed-consist-batch"] == replace(paper, labeling="batch", labeled_share=0.5, **plain)
    assert METHODS["fed-consist-plus"] == replace(paper, **plain)
    assert METHODS["fedavg-plus"] == replace(paper, labeling="none", warmup=0)
    training = {"labeling": "refreshed", "threshold": 0.0, "warmup": 20, "warmup_epochs": 1, "local": FedIRM().local}
    assert METHODS["fed-selftraining"] == replace(paper, **training, **plain)


def test_in_its_tables_all_methods_train_11_epochs_on_labels_and_1_without():
    names = "fedirm", "rscfed", "fed-consist", "fed-consist-plus", "cbafed"
    rows = [row for n in (1, 2, 3) for row in tables.select(f"cbafed-table{n}") if row.name.endswith(names)]
    methods = [row.experiment().method for row in rows]
    assert len(methods) == 35
    assert {(m.local.epochs, m.epochs_unlabeled) for m in methods} == {(11, 1)}
