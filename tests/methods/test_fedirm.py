"""FedIRM (Liu et al., MICCAI 2021), equation by equation, with values worked out by hand on softmax regression."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewlabel import networks
from fewlabel.core import tree, wire
from fewlabel.core.errors import BadInput
from fewlabel.engine.conformance import Recorder
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import execute
from fewlabel.experiment import read
from fewlabel.learn.losses import matching
from fewlabel.learn.optim import Local
from fewlabel.learn.relation import class_sums, entropy, ramp, relation, with_dropout
from fewlabel.methods import METHODS
from fewlabel.methods.fedirm import FedIRM, Relation, State
from fewlabel.papers.tables import select
from tests.hand import STEP, Sites, passes, site, values, weights
from tests.nets import tiny

L3 = math.log(3)
STILL = replace(STEP, lr=1e-12)  # a step that changes nothing
FULL = FedIRM(local=STEP, ramp=1, passes=1, uncertainty=9.0)  # the loss has its full weight from round 1 on


def rows(*listed: list[float]) -> Relation:
    return Relation(torch.tensor(listed), torch.tensor([not math.isnan(row[0]) for row in listed]))


def softmax(*logits: float) -> list[float]:
    raised = [math.exp(logit) for logit in logits]
    return [value / sum(raised) for value in raised]


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    expected = torch.tensor(expected)
    torch.testing.assert_close(torch.as_tensor(found).float(), expected, rtol=0, atol=tolerance, equal_nan=True)


# Eq. 1: consistency


class TwoViews:
    """One image that is seen as 1 and as -1."""

    def batches(self, views: tuple[str, ...], size: int, counted: int) -> Iterator[tuple[Tensor, ...]]:
        assert views == ("weak", "weak")
        yield torch.ones(1, 1, 1, 1), -torch.ones(1, 1, 1, 1), torch.tensor([0])


# With weights (ln 3, 0) the network says p = (3/4, 1/4) of the one view and p' = (1/4, 3/4) of the other. Let z be the
# first logit less the second. The loss 2 (p0 - p0')^2 has the derivative 4 (1/2) p0 (1 - p0) = 3/8 by z of the one
# view and -3/8 by z' of the other; the weight takes in x = 1 and x' = -1, so 3/8 + 3/8, and the bias 3/8 - 3/8.
@pytest.mark.parametrize(
    ("decay", "weight", "bias"),
    [(None, 3 / 4, 0.0), (0.99, 3 / 8, 3 / 8)],  # nothing flows through a teacher
)
def test_fedirm_eq1_draws_both_predictions_together(decay, weight, bias):
    one = site(0, unlabeled=[0])
    one.unlabeled = TwoViews()
    upload = replace(FULL, teacher_decay=decay).local_update(one, State(weights([L3, 0.0])))
    found = values(upload.model)
    close(found, [[L3 - weight, weight], [-bias, bias]])
    assert upload.relation is None


# Eq. 2 and 3: relations at labeled clients

# Pixels 1 and 3 are of class 0, -1 is of class 1, and nobody is of class 2. At zero p = 1/3 for all, so the gradient of
# the bias is the mean of p - y, (-1/3, 0, 1/3), and that of the weight the mean of x (p - y): the sum is
# (1 + 3) (-2/3, 1/3, 1/3) - (1/3, -2/3, 1/3) = (-3, 2, 1). After a step the weights are (1, -2/3, -1/3) and the biases
# (1/3, 0, -1/3), so the logits are (4/3, -2/3, -2/3) for 1, (10/3, -2, -4/3) for 3, and (-2/3, 2/3, 0) for -1.
THREE = ((1, 0), (3, 0), (-1, 1))
ROW0 = softmax(7 / 6, -2 / 3, -1 / 2)  # of the mean (7/3, -4/3, -1), softened by tau = 2
ROW1 = softmax(-1 / 3, 1 / 3, 0.0)


def test_fedirm_eq2_and_3_relations_are_those_of_the_trained_model_in_evaluation_mode():
    one = site(0, THREE, classes=3)
    seen = passes(one)
    found = FedIRM(local=STEP).local_update(one, State(weights([0.0] * 3))).relation
    assert found.known.tolist() == [True, True, False]
    close(found.rows[:2], [ROW0, ROW1])
    assert seen == [(True, 3), (False, 3)]


def test_fedirm_eq2_takes_in_all_images_whatever_the_batches():
    one = site(0, [(2, 0), (4, 0), (6, 0), (8, 1)])
    seen = passes(one)
    found = FedIRM(local=replace(STILL, batch_size=2)).local_update(one, State(weights([L3, 0.0]))).relation
    assert seen == [(True, 2)] * 2 + [(False, 2)] * 2
    close(found.rows, [softmax(2 * L3, 0), softmax(4 * L3, 0)])  # (2 + 4 + 6) / 3 / 2 = 2 and 8 / 2 = 4, times ln 3


def test_fedirm_eq2_and_3_by_themselves():
    outputs, y = torch.tensor([[1.0, 0.0], [3.0, 2.0], [5.0, 7.0]]), torch.tensor([1, 1, 0])
    sums, counts = class_sums(outputs, y, 2)
    assert (sums.tolist(), counts.tolist()) == ([[5.0, 7.0], [4.0, 2.0]], [1.0, 2.0])
    close(relation(sums, counts, 2.0), [softmax(2.5, 3.5), softmax(1.0, 0.5)])


def test_relations_of_batches_have_uniform_rows_for_classes_without_images():
    one = site(0, THREE, classes=3)
    method = FedIRM(local=replace(STEP, epochs=2), per_batch=True)
    found = method.local_update(one, State(weights([0.0] * 3))).relation
    assert found.known.all()
    # The first batch is seen at zero, where every row is uniform; the second after the step above.
    close(found.rows, [[(1 / 3 + p) / 2 for p in row] for row in (ROW0, ROW1, [1 / 3] * 3)])


# Eq. 4: uncertainty


def test_fedirm_eq4_is_the_entropy_of_a_mean_of_probabilities():
    close(
        entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.25, 0.75]])), [math.log(2), 0.0, 2 * math.log(2) - 0.75 * L3]
    )


class Moody(nn.Module):
    """A network that is not one of ours: its passes, whatever it is shown, give these logits one after the other."""

    def __init__(self, *logits: list[list[float]]) -> None:
        super().__init__()
        self.logits, self.shift = list(logits), nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tensor(self.logits.pop(0)) + self.shift


def sure(method: FedIRM, network: nn.Module) -> tuple[list[int], list[int]]:
    """The two images that got a pseudo-label, and which."""
    one = site(0, unlabeled=[0, 0], network=network)
    method.local_update(one, State(tree.of(network)))
    ((index, label, epoch),) = one.audited
    assert (epoch, network.logits) == (1, [])  # T passes without gradients, one with, and one of the other view
    found = sorted(zip(index.tolist(), label.tolist(), strict=True))
    return [image for image, _ in found], [label for _, label in found]


# Passes of the first image say (6, 0) and (-2, 0): probabilities 0.9975 and 0.1192 of class 0, 0.558 in the mean, of
# entropy 0.686; but the mean of the logits, (2, 0), gives 0.881, of entropy 0.365. The second is sure of class 1: 0.02.
@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"uncertainty": 0.5}, [1]),
        ({"uncertainty": 0.7}, [0, 1]),
        ({"uncertainty": 0.5, "mean_logits": True}, [0, 1]),
        ({"uncertainty": 0.7, "confidence": 0.85}, [1]),  # the pass with gradients is sure of class 0 by 0.818
        ({"uncertainty": 0.01}, []),
    ],
)
def test_fedirm_eq4_leaves_out_who_changes_its_mind_under_dropout(changes, expected, monkeypatch):
    monkeypatch.setattr(torch, "randperm", lambda n, generator: torch.arange(n))
    other = [0.0, 6.0]
    network = Moody([[6.0, 0.0], other], [[-2.0, 0.0], other], [[1.5, 0.0], other], [[1.5, 0.0], other])
    assert sure(FedIRM(local=STEP, passes=2, **changes), network) == (expected, expected)


@pytest.mark.parametrize("name", ["simple-cnn", "densenet121", "resnet18"])
def test_fedirm_eq4_passes_that_share_features_equal_full_passes_to_the_bit(name):
    torch.manual_seed(0)
    network = networks.build(name, 3, 5, 32, dropout=0.5).train()
    x = torch.randn(3, 3, 32, 32)
    before = tree.of(network)
    torch.manual_seed(1)
    logits, again = with_dropout(network, x, 3)
    counters = [value.item() for key, value in tree.of(network).items() if key.endswith("num_batches_tracked")]
    network.load_state_dict(before)
    torch.manual_seed(1)
    full = [network(x) for _ in range(4)]
    for ours, theirs in zip([logits, *again], full, strict=True):
        assert torch.equal(ours, theirs)
    assert logits.requires_grad
    assert not again.requires_grad
    assert not torch.equal(again[0], again[1])
    assert set(counters) <= {1}  # BatchNorm saw the images once


def test_fedirm_eq4_passes_of_other_networks_are_full_ones():
    network, x = tiny(1, 5, 8).train(), torch.randn(6, 1, 8, 8)
    torch.manual_seed(1)
    logits, again = with_dropout(network, x, 2)
    assert network[1].num_batches_tracked == 1
    torch.manual_seed(1)
    for ours in (*again, logits):
        assert torch.equal(ours, network(x))


# Eq. 5: relations at unlabeled clients

# With weights (ln 3, 0) the pixels 2, 4, -2 and 0 are of class 0 by 9/10, 81/82, 1/10 and 1/2, with entropies 0.325,
# 0.066, 0.325 and ln 2. The third class is out of reach. The mean logits of class 0 are (3 ln 3, 0), of class 1
# (-2 ln 3, 0). The mean probabilities of class 0 are (9/10 + 81/82) / 2 = 0.943902 and the rest.
FAR = -60.0
MEAN = (9 / 10 + 81 / 82) / 2


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (False, [[*softmax(1.5 * L3, 0), 0.0], [*softmax(-L3, 0), 0.0], [math.nan] * 3]),
        (True, [softmax(MEAN / 2, (1 - MEAN) / 2, 0), softmax(0.05, 0.45, 0), [math.nan] * 3]),
    ],
)
def test_fedirm_eq5_groups_what_is_sure_by_its_pseudo_label(printed, expected):
    one = site(0, unlabeled=[2, 4, -2, 0], classes=3)
    method = FedIRM(local=STEP, passes=1, uncertainty=0.6, eq5_as_printed=printed)
    method.local_update(one, State(weights([L3, 0.0, 0.0], [0.0, 0.0, FAR])))
    close(one.shown["relation"], expected)
    ((index, label, _),) = one.audited
    assert sorted(zip(index.tolist(), label.tolist(), strict=True)) == [(0, 0), (1, 0), (2, 1)]


# Eq. 6: matching


def test_fedirm_eq6_is_the_divergence_both_ways_over_all_classes():
    theirs = torch.tensor([[3 / 4, 1 / 4, 0.0], [0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    ours = torch.tensor([[1 / 4, 3 / 4, 0.0], [0.2, 0.3, 0.5], [0.8, 0.1, 0.1]])
    # Row 0, one way: 3/4 ln 3 + 1/4 ln(1/3) = (ln 3)/2, and the other way as much. Row 1: nothing. Row 2: 2 * 0.7 ln 8.
    masks = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 0], [0, 0, 0]], dtype=torch.bool)
    found = [matching(theirs, ours, known) for known in masks]
    close(torch.stack(found), [(L3 + 1.4 * math.log(8)) / 3, L3 / 3, 0.0, 0.0])  # 1/C, whatever is left out


# At zero all images fall to class 0 with q = (1/2, 1/2), and the two views agree. With z the first logit less the
# second, q0 = s(z / 2), and for the labeled row (t, 1 - t) both divergences are together (t - q0)(logit t - z / 2), of
# derivative -(logit t) / 8 - (t - 1/2) / 2 by z at zero. For t = 3/4 that is -(ln 3 + 1) / 8, and eq. 6 halves it.
PULL = (L3 + 1) / 16
KNOWN = rows([3 / 4, 1 / 4], [1 / 4, 3 / 4])


@pytest.mark.parametrize(
    ("changes", "theirs", "round", "expected"),
    [
        ({}, KNOWN, 1, PULL),
        ({}, None, 1, 0.0),  # before there is a relation
        ({}, rows([math.nan] * 2, [1 / 4, 3 / 4]), 1, 0.0),  # nobody has class 0, and no image here is of class 1
        ({"relation_weight": 0.0}, KNOWN, 1, 0.0),
        ({"relation_weight": 0.5}, KNOWN, 1, PULL / 2),
        ({"scale": 15}, KNOWN, 1, 15 * PULL),
        ({"ramp": 30}, KNOWN, 15, math.exp(-2.5) * PULL),  # eq. 7
        ({"ramp": 30, "squared_ramp": True}, KNOWN, 15, math.exp(-1.25) * PULL),
        ({"per_batch": True}, KNOWN, 1, PULL),  # the row without images is uniform, and nothing moves it
        ({"uncertainty": 0.5}, KNOWN, 1, 0.0),  # no image is sure
    ],
)
def test_fedirm_eq6_and_7_a_step_draws_our_row_towards_theirs(changes, theirs, round, expected):
    one = site(0, unlabeled=[1, 1, 1], round=round)
    found = values(replace(FULL, **changes).local_update(one, State(weights([0.0, 0.0]), theirs)).model)
    close(found, [[expected, -expected]] * 2)


# Eq. 7: the weight of the unlabeled losses


@pytest.mark.parametrize(
    ("round", "squared", "expected"),
    [
        (1, False, 0.007960),  # exp(-5 * 29/30)
        (15, False, 0.082085),  # exp(-2.5)
        (30, False, 1.0),
        (100, False, 1.0),
        (21, False, 0.223130),  # exp(-1.5)
        (21, True, 0.637628),  # exp(-0.45), as in the authors' code
        (100, True, 1.0),
    ],
)
def test_fedirm_eq7_the_weight_grows_to_one(round, squared, expected):
    assert ramp(round, 30, squared) == pytest.approx(expected, abs=1e-6)


# A round

START = State(weights([0.0, 0.0]))
PULLED = 1 / 6  # labels 0, 0, 1 of pixel 1 from zero: the gradient is (1/2 - 2/3, 1/2 - 1/3)


def federation(**more: Any) -> Sites:
    """Three labeled images, and two unlabeled, which agree with themselves and move nothing."""
    return Sites(site(0, [(1, 0), (1, 0), (1, 1)]), site(1, unlabeled=[1, 1]), **more)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 3 / 5 * PULLED),
        ({"weights": "uniform"}, PULLED / 2),
        ({"labeled_share": 0.9}, 0.9 * PULLED),
        ({"warmup": 1}, PULLED),
        ({"label_smoothing": 0.3}, 3 / 5 * 0.7 * PULLED),  # y is drawn towards 1/2 by 0.3 of the way
    ],
)
def test_a_round_is_a_mean_of_all_clients(changes, expected):
    found = values(FedIRM(local=STEP, **changes).round(START, federation()).model)
    close(found, [[expected, -expected]] * 2)


def test_only_labeled_clients_are_asked_in_the_warm_up():
    for round, asked in ((1, [0]), (2, [0]), (3, [0, 1])):
        fed = federation(round=round)
        FedIRM(local=STEP, warmup=2).round(START, fed)
        assert [client for client, _ in fed.sent] == asked


# With weights (ln 3, 0) pixels 2, 4 and -2 have the softened rows (3/4, 1/4), (9/10, 1/10) and (1/4, 3/4).
FIRST = State(weights([L3, 0.0, 0.0], [0.0, 0.0, FAR]))


def labeled_pair(**more: Any) -> Sites:
    return Sites(site(0, [(2, 0), (-2, 1)], classes=3), site(1, [(4, 0), (4, 0)], classes=3), **more)


def test_relations_are_averaged_row_by_row_over_the_clients_that_have_the_class():
    fed = labeled_pair()
    found = FedIRM(local=STILL).round(FIRST, fed).relation
    assert found.known.tolist() == [True, True, False]
    close(found.rows[:2], [[0.825, 0.175, 0.0], [0.25, 0.75, 0.0]])  # (3/4 + 9/10) / 2, whatever the sizes
    close(fed.logged["relation"], [[0.825, 0.175, 0.0], [0.25, 0.75, 0.0], [math.nan] * 3])


def test_clients_get_the_relation_of_the_round_before():
    method, fed = FedIRM(local=STILL), labeled_pair()
    second = method.round(FIRST, fed)
    third = method.round(second, labeled_pair(silent=[1]))
    assert [message.relation for _, message in fed.sent] == [None, None]
    close(third.relation.rows[0], [3 / 4, 1 / 4, 0.0])  # and nothing is left of (9/10, 1/10)
    silent = labeled_pair(silent=[0, 1])
    assert method.round(third, silent).relation is third.relation
    assert all(message.relation is third.relation for _, message in silent.sent)


# What clients keep


@pytest.mark.parametrize(("persistent", "expected"), [(False, 0.01), (True, 0.01 / 19)])
def test_a_persistent_adam_goes_on_where_it_was(persistent, expected):
    one = site(0, [(1, 0), (1, 0), (1, 1)])
    method = FedIRM(local=replace(STEP, lr=0.01, momentum=0.9, optimizer="adam"), persistent_optimizer=persistent)
    method.local_update(one, START)
    # The first gradient of the biases is (-g, g), g = 1/6. A model that says 5/6 of class 0 has the gradient (g, -g).
    # Then the first moment is (0.1 - 0.9 * 0.1) g / (1 - 0.9^2) = g / 19, and the second g^2 again.
    found = method.local_update(one, State(weights([0.0, 0.0], [math.log(5), 0.0]))).model
    assert found["1.bias"].tolist() == pytest.approx([math.log(5) - expected, expected], abs=1e-6)


def test_a_teacher_persists_and_follows_the_students_of_all_rounds():
    one = site(0, unlabeled=[1, 1])
    method = FedIRM(local=STILL, teacher_decay=0.99)
    for weight in (2.0, 4.0, 9.0):
        method.local_update(one, State(weights([weight, 0.0])))
    # It begins as the mean of all students: 2, then (2 + 4) / 2, then (2 + 4 + 9) / 3.
    assert (one.state.step, one.state.teacher["1.weight"][0].item()) == (3, pytest.approx(5.0, abs=1e-6))
    assert one.state.optimizer is None


@pytest.mark.parametrize(("epochs", "expected"), [(None, (3, 3)), (1, (3, 1))])
def test_unlabeled_clients_may_train_for_fewer_epochs(epochs, expected):
    method = FedIRM(local=replace(STEP, epochs=3), passes=1, epochs_unlabeled=epochs)
    clients = site(0, [(1, 0), (1, 1)]), site(1, unlabeled=[1, 1])
    seen = passes(clients[0])
    for one in clients:
        method.local_update(one, START)
    assert ([training for training, _ in seen].count(True), len(clients[1].audited)) == expected


def test_relations_stay_where_nobody_matches_them():
    labels = [(1, 0), (1, 1)]
    assert FedIRM(local=STEP).local_update(site(0, labels), START).relation
    assert METHODS["fed-consistency"].local_update(site(0, labels), START).relation is None


def test_clients_keep_nothing_by_default():
    for one in (site(0, [(1, 0), (1, 1)]), site(1, unlabeled=[1, 1])):
        FedIRM(local=STEP).local_update(one, START)
        assert (one.state.optimizer, one.state.teacher) == (None, None)


# Rows of the table


def test_the_rows_are_what_the_paper_and_its_code_say():
    adam = Local(epochs=1, batch_size=48, lr=2e-4, optimizer="adam", momentum=0.9, weight_decay=5e-4, clip=None)
    paper, authors = METHODS["fedirm"], METHODS["fedirm-authors"]
    assert paper.local == replace(adam, second_momentum=0.99)
    assert (paper.temperature, paper.passes, paper.uncertainty, paper.ramp) == (2.0, 8, math.log(2), 30)
    assert METHODS["fed-consistency"] == replace(paper, relation_weight=0.0)
    assert authors.local == replace(adam, second_momentum=0.999)
    assert (authors.temperature, authors.passes, authors.uncertainty, authors.ramp) == (2.0, 11, 2.0, 30)
    assert (authors.warmup, authors.scale, authors.confidence, authors.label_smoothing) == (20, 15, 0.3, 0.1)
    assert (authors.relation_weight, authors.weights, authors.labeled_share) == (0.5, "uniform", None)
    assert authors.squared_ramp
    assert authors.mean_logits
    assert authors.per_batch
    assert authors.persistent_optimizer
    assert not authors.eq5_as_printed
    assert (paper.teacher_decay, authors.teacher_decay) == (None, 0.99)


@pytest.mark.parametrize("name", ["fedirm-table1/ich-fedirm", "fedirm-fig2b/2-fedirm", "fedirm-fig2c/*fedirm"])
def test_a_table_tells_how_to_have_what_the_authors_code_does(name):
    row = select(name)[0]
    assert row.experiment(re.findall(r"--set (\S+)", row.notes[0])).method == METHODS["fedirm-authors"]
    assert "--rounds 200." in row.notes[0]


def test_a_teacher_is_there_by_its_own_setting_alone():
    assert read({}, ["method=fedirm", "method.teacher_decay=0.9"]).method == FedIRM(teacher_decay=0.9)
    with pytest.raises(BadInput, match="teacher"):
        read({}, ["method=fedirm", "method.teacher.decay=0.9"])


# What a run leaves behind


def test_relations_reach_the_lines_of_a_run(run_dir):
    changes = ("model=tests.nets:tiny", "labels.clients=2", "rounds=2", "method=fedirm", "method.uncertainty=9")
    directory = run_dir(*changes, "method.local.epochs=2")
    execute(directory, workers=1)
    first, second = read_rounds(directory)
    for line in (first, second):
        assert [len(row) for row in line["relation"]] == [10] * 10
        for row in line["relation"]:
            assert row == [None] * 10 or sum(row) == pytest.approx(1.0, abs=1e-4)
        assert list(line["pseudo_labels_per_epoch"]) == ["1", "2"]
    assert "shown" not in first  # only every other round is evaluated
    shown = second["shown"]["relation"]
    assert [len(row) for row in shown] == [10] * 10
    assert any(row[0] is not None and sum(row) == pytest.approx(1.0, abs=1e-4) for row in shown)


def test_without_matching_relations_are_shown_to_the_report_and_nothing_of_them_leaves(run_dir):
    """Figure 2a draws both sides with and without L_IRM."""
    directory = run_dir("method=fed-consistency", "method.uncertainty=3.0", "labels.clients=2", "rounds=2")
    execute(directory, executor=(recorder := Recorder()))
    last = read_rounds(directory)[-1]
    assert "relation" not in last
    labeled, unlabeled = (last["shown"][key] for key in ("labeled_relation", "relation"))
    assert all(sum(row) == pytest.approx(1) for row in labeled if None not in row)
    assert len(labeled) == len(unlabeled) == 10
    uploads = [wire.unpack(State, upload) for _, _, upload in recorder.sent if upload]
    assert uploads
    assert all(upload.relation is None for upload in uploads)
