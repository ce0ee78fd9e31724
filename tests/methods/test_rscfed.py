"""RSCFed (Liang et al., CVPR 2022), equation by equation, worked out by hand on softmax regression."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fewlabel.core.averaging import by_kind as average
from fewlabel.core.federation import ClientInfo, Model, Reply, Site
from fewlabel.engine.rounds import Server
from fewlabel.learn.consensus import by_distance, by_kind, distance, favour
from fewlabel.learn.losses import consistency
from fewlabel.learn.optim import Local
from fewlabel.learn.teacher import MeanTeacher, Teacher, sharpen
from fewlabel.methods import METHODS
from fewlabel.methods.rscfed import RSCFed
from fewlabel.papers.tables import select
from tests.hand import STEP, Sites, passes, site, weights

ONE = RSCFed(groups=1, beta=0.0, labeled_share=None, local=STEP)  # one group, averaged by size
START = Model(weights([0.0, 0.0], [math.log(3), 0.0]))

# At START the network says (3/4, 1/4) of any image, and the teacher, sharpened, (9/10, 1/10). All images here are seen
# as x = 1, so that bias and weight move alike, by (a, -a), and a network is known by its a: of both outputs together it
# moves the difference of the logits by 4a, from ln 3 to ln 3 + 4a.
#   Cross-entropy has the gradient p - y: with label 0, a = 1/4; with label 1, a = -3/4.
#   Consistency is 2 (p - t)^2 for the first output, whose gradient is 4 (p - t) p (1 - p); here 4 * -3/20 * 3/16.
SUPERVISED = 1 / 4
CONSISTENT = 9 / 80


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def pull(student: float, teacher: float) -> float:
    """What a step moves a student towards a teacher, both known by the difference of their logits; tau = 1/2."""
    p, t = sigmoid(student), sigmoid(2 * teacher)
    return 4 * (t - p) * p * (1 - p)


class Few(Sites):
    """Sites of which the groups that are named are drawn, by their numbers, and else everybody."""

    def __init__(self, *sites: Site[Any], round: int = 1, silent: Iterable[int] = (), **groups: list[int]) -> None:
        super().__init__(*sites, round=round, silent=silent)
        self.groups, self.unlabeled = groups, [client for client in self.clients if client.num_unlabeled]

    def sample(
        self, k: int | None = None, among: Sequence[ClientInfo] | None = None, *, name: str = ""
    ) -> list[ClientInfo]:
        if (group := self.groups.get(name.replace(" ", ""))) is not None:
            return [self.sites[number].info for number in group]
        return list(self.clients if among is None else among)

    @property
    def asked(self) -> list[int]:
        return [number for number, _ in self.sent]


def moved(model: Model, start: Model = START) -> float:
    """The a of a network, on condition that it is known by it."""
    bias, weight = (model.model[name].flatten() - start.model[name].flatten() for name in ("1.bias", "1.weight"))
    torch.testing.assert_close(torch.cat([bias, weight]), bias[0] * torch.tensor([1.0, -1.0, 1.0, -1.0]))
    return bias[0].item()


def approx(value: float) -> Any:
    return pytest.approx(value, abs=1e-6)


# What clients do


def test_rscfed_eq_1_a_labeled_client_minimises_cross_entropy():
    # y is (2/3, 1/3) in the mean, so p - y = (1/12, -1/12).
    assert moved(ONE.local_update(site(0, [(1, 0), (1, 0), (1, 1)]), START)) == approx(-1 / 12)


@pytest.mark.parametrize(
    ("temperature", "p", "sharp"),
    [
        (0.5, [3 / 4, 1 / 4], [9 / 10, 1 / 10]),  # 9/16 and 1/16
        (0.5, [1 / 2, 1 / 4, 1 / 4], [2 / 3, 1 / 6, 1 / 6]),  # 4/16, 1/16, 1/16
        (1.0, [3 / 4, 1 / 4], [3 / 4, 1 / 4]),
        (0.001, [1 / 2, 1 / 4, 1 / 4], [1.0, 0.0, 0.0]),  # 2^-1000 is no number of single precision
        (0.5, [1.0, 0.0], [1.0, 0.0]),
    ],
)
def test_rscfed_eq_2_sharpening_raises_to_the_power_of_one_over_tau(temperature, p, sharp):
    torch.testing.assert_close(sharpen(torch.tensor([p]), temperature), torch.tensor([sharp]))


def test_rscfed_eq_3_is_the_squared_distance_in_the_mean_over_images():
    target, p = torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    assert consistency(target, p).item() == approx((0.15**2 + 0.15**2 + 0) / 2)


def test_rscfed_eq_3_trains_the_student_towards_the_sharpened_teacher():
    one = site(0, unlabeled=[1] * 3)
    assert moved(ONE.local_update(one, START)) == approx(CONSISTENT)
    ((index, label, epoch),) = one.audited
    assert (sorted(index.tolist()), label.tolist(), epoch) == ([0, 1, 2], [0, 0, 0], 1)
    half = replace(ONE, local=replace(STEP, lr_unlabeled=0.5))
    assert moved(half.local_update(site(0, unlabeled=[1] * 3), START)) == approx(CONSISTENT / 2)


@pytest.mark.parametrize("buffers", [True, False])
def test_rscfed_eq_4_the_teacher_moves_by_alpha_towards_the_student(buffers):
    model = nn.BatchNorm1d(1)  # weight 1, bias 0, mean 0, variance 1, counter 0
    teacher = Teacher(model, MeanTeacher(decay=0.75, buffers=buffers))
    student = {"weight": 5.0, "bias": 4.0, "running_mean": 8.0, "running_var": 1.0, "num_batches_tracked": 9}
    model.load_state_dict({name: torch.tensor(v).expand_as(teacher.weights[name]) for name, v in student.items()})
    teacher.follow()
    found = {name: value.item() for name, value in teacher.weights.items()}
    mean = 2.0 if buffers else 0.0
    assert found == {"weight": 2.0, "bias": 1.0, "running_mean": mean, "running_var": 1.0, "num_batches_tracked": 0}
    assert (model.weight.item(), model.running_mean.item(), teacher.step) == (5.0, 8.0, 1)


@pytest.mark.parametrize("pause", [False, True])
def test_the_authors_ramp_makes_the_teacher_a_mean_of_its_first_students(pause):
    model = nn.Linear(1, 1, bias=False)
    teacher = Teacher(model, MeanTeacher(decay=0.6, ramp=True))
    found = []
    for weight in (1.0, 3.0, 7.0, 9.0):
        if pause:  # a new round
            teacher = Teacher(model, teacher.settings, teacher.weights, teacher.step)
        model.weight.data.fill_(weight)
        teacher.follow()
        found.append(teacher.weights["weight"].item())
    # Decays 0, 1/2, then 0.6 for 2/3 and for ever: 1, (1 + 3) / 2, 0.6*2 + 0.4*7, 0.6*4 + 0.4*9.
    assert found == pytest.approx([1.0, 2.0, 4.0, 6.0])


def test_the_teacher_begins_as_the_received_model_and_goes_on_in_later_rounds():
    method, one = replace(ONE, teacher=MeanTeacher(decay=0.75)), site(0, unlabeled=[1] * 2)
    first = method.local_update(one, START)
    assert moved(first) == approx(CONSISTENT)
    before = one.state
    assert (moved(Model(before.teacher)), before.step) == (approx(CONSISTENT / 4), 1)  # a quarter of the student's way
    # The student is at START again, the teacher is not: 4 * CONSISTENT / 4 further.
    assert moved(method.local_update(one, START)) == approx(pull(math.log(3), math.log(3) + CONSISTENT))
    assert one.state.step == 2
    assert moved(Model(before.teacher)) == approx(CONSISTENT / 4)  # what was kept is left alone


def test_the_teacher_follows_after_every_step():
    method = replace(ONE, teacher=MeanTeacher(decay=0.75), local=replace(STEP, batch_size=2))
    second = pull(math.log(3) + 4 * CONSISTENT, math.log(3) + CONSISTENT)
    one = site(0, unlabeled=[1] * 4)
    assert moved(method.local_update(one, START)) == approx(CONSISTENT + second)
    assert moved(Model(one.state.teacher)) == approx(0.75 * CONSISTENT / 4 + 0.25 * (CONSISTENT + second))


def test_a_client_with_both_kinds_adds_both_losses_at_the_rate_of_labeled_ones():
    method, one = replace(ONE, local=replace(STEP, lr_unlabeled=0.5)), site(0, [(1, 0)], [1] * 3)
    assert moved(method.local_update(one, START)) == approx(SUPERVISED + CONSISTENT)
    assert one.state.step == 1


@pytest.mark.parametrize(("epochs", "expected"), [(None, [3, 3, 3]), (1, [3, 3, 1])])
def test_clients_without_labels_may_train_for_fewer_epochs(epochs, expected):
    method = replace(ONE, local=replace(STEP, epochs=3), epochs_unlabeled=epochs)
    clients = site(0, [(1, 0)]), site(1, [(1, 0)], [1]), site(2, unlabeled=[1, 1])
    seen = [passes(one) for one in clients]
    for one in clients:
        method.local_update(one, START)
    steps = [[training for training, _ in each].count(True) for each in seen]
    assert steps == [expected[0], 2 * expected[1], expected[2]]  # both losses, at the client with both


@pytest.mark.parametrize(("persistent", "second"), [(True, 3 / 8), (False, 1 / 4)])
def test_momentum_stays_with_the_client_if_it_is_to(persistent, second):
    # Both rounds have the gradient -1/4 from START; what is left of the first is 1/2 * 1/4.
    method = replace(ONE, persistent_optimizer=persistent, local=replace(STEP, momentum=0.5))
    one = site(0, [(1, 0)])
    assert moved(method.local_update(one, START)) == approx(1 / 4)
    assert moved(method.local_update(one, START)) == approx(second)


# Consensus


def models(*values: float) -> list[dict]:
    return [{"w": torch.tensor([value])} for value in values]


# Sizes 1, 1, 2 and weights 0, 2, 5: the mean is 12/4 = 3, the distances are 3, 1, 2. With beta = ln 2 the weights are
# 1 * 2^-3, 1 * 2^-1, 2 * 2^(-2/2), that is 1/13, 4/13, 8/13, and the consensus is (0 + 8 + 40) / 13.
SIZES, VALUES, BETA, CONSENSUS = [1, 1, 2], (0.0, 2.0, 5.0), math.log(2), 48 / 13


def test_rscfed_eq_5_6_weights_fall_with_the_distance_from_the_mean():
    found = by_distance(SIZES, models(*VALUES), BETA).softmax(0).tolist()
    assert found == pytest.approx([1 / 13, 4 / 13, 8 / 13])


def test_rscfed_eq_6_is_as_printed_where_that_can_be_calculated():
    # The mean is (6621 * 1 + 4594 * 0) / 11215; beta is the paper's.
    mean = 6621 / 11215
    first = 6621 / 11215 * math.exp(-1e4 * (1 - mean) / 6621)
    second = 4594 / 11215 * math.exp(-1e4 * mean / 4594)
    found = by_distance([6621, 4594], models(1.0, 0.0), 1e4).softmax(0).tolist()
    assert found == pytest.approx([first / (first + second), second / (first + second)], rel=1e-6)


def test_rscfed_eq_6_does_not_underflow_for_few_images():
    # The mean is 1, the distances are 1, 1, 2, and exp(-1e4 * 1 / 3) is 0 in any precision.
    assert by_distance([3, 3, 3], models(0.0, 0.0, 3.0), 1e4).softmax(0).tolist() == [0.5, 0.5, 0.0]


def test_rscfed_eq_6_of_equal_models_is_by_size():
    assert by_distance([3, 5], models(0.7, 0.7), 1e4).softmax(0).tolist() == pytest.approx([3 / 8, 5 / 8])


@pytest.mark.parametrize(("kind", "far"), [("joined", 5.0), ("summed", 3.0 + 4.0 + 10.0 + 100.0)])
def test_the_distance_is_of_all_parameters_as_one_or_as_the_authors_have_it_of_all_entries_added_up(kind, far):
    a = {"w": [3.0, 0.0], "b": [4.0], "n.running_mean": [10.0], "n.num_batches_tracked": 100}
    b = {"w": [0.0, 0.0], "b": [0.0], "n.running_mean": [0.0], "n.num_batches_tracked": 0}
    a, b = ({name: torch.tensor(value) for name, value in one.items()} for one in (a, b))
    assert distance(a, b, kind) == pytest.approx(far)


def test_the_authors_take_the_mean_of_counters_too():
    # Of sizes 1 and 3 and counters 0 and 40 the mean is 30, the distances are 30 and 10: 2^-3 to 3 * 2^(-1/3).
    counters = [{"n.num_batches_tracked": torch.tensor(count)} for count in (0, 40)]
    first, second = by_distance([1, 3], counters, math.log(2) / 10, "summed").exp().tolist()
    assert (first, second) == pytest.approx((2**-3, 3 * 2 ** (-1 / 3)))


LAST_TWO = [False, False, True, True]


@pytest.mark.parametrize(
    ("sizes", "labeled", "favoured", "weights"),
    [
        ([4, 1, 2, 3, 4], [True] + [False] * 4, {"share": 0.5}, [0.5, 0.05, 0.1, 0.15, 0.2]),
        ([4, 12, 1, 3], LAST_TWO, {"share": 0.5}, [1 / 8, 3 / 8, 1 / 8, 3 / 8]),
        ([4, 12, 1, 3], LAST_TWO, {"share": 1.0}, [0, 0, 1 / 4, 3 / 4]),
        ([4, 12, 1, 3], LAST_TWO, {"share": 0.0}, [1 / 4, 3 / 4, 0, 0]),
        ([4, 12, 1, 3], LAST_TWO, {}, [4 / 20, 12 / 20, 1 / 20, 3 / 20]),
        ([4, 12, 1, 3], LAST_TWO, {"times": 6.0}, [4 / 40, 12 / 40, 6 / 40, 18 / 40]),
        ([4, 12, 1, 3], LAST_TWO, {"times": 6.0, "share": 0.5}, [4 / 40, 12 / 40, 6 / 40, 18 / 40]),
        ([1, 3], [True, True], {"share": 0.5}, [1 / 4, 3 / 4]),
        ([1, 3], [False, False], {"share": 0.5}, [1 / 4, 3 / 4]),
        ([1, 3], [True, True], {"times": 6.0}, [1 / 4, 3 / 4]),
    ],
)
def test_labeled_clients_get_their_share_or_so_many_times_their_weight(sizes, labeled, favoured, weights):
    assert favour(torch.tensor(sizes).double().log(), sizes, labeled, **favoured) == pytest.approx(weights)


def test_labeled_clients_divide_their_share_by_size_even_if_eq_6_leaves_them_next_to_nothing():
    logs = torch.tensor([-5000.0, 0.0, -5001.0], dtype=torch.float64)
    assert favour(logs, [1, 7, 3], [True, False, True], 0.5) == pytest.approx([0.5 / 4, 0.5, 0.5 * 3 / 4])


@pytest.mark.parametrize(
    ("favoured", "mean"),
    [
        ({}, (1 * 8 + 3 * 0 + 12 * 10) / 16),
        ({"share": 0.5}, (2 + 10) / 2),  # the labeled ones' mean is 8/4
        ({"share": 1.0}, 2),
        ({"times": 6.0}, (6 * 8 + 12 * 10) / (6 * 4 + 12)),
    ],
)
def test_a_stream_is_averaged_with_the_labeled_favoured(favoured, mean):
    labeled, none, other = models(8.0, 0.0, 10.0)
    stream = [(1, True, labeled), (12, False, other), (3, True, none)]
    assert average(iter(stream), partial(by_kind, **favoured), none)["w"].item() == pytest.approx(mean)
    assert average(stream[::2], partial(by_kind, **favoured), other)["w"].item() == pytest.approx(2)
    assert average([], partial(by_kind, **favoured), other) is other


def replies(*labeled: bool) -> list[Reply[Model]]:
    group = enumerate(zip(SIZES, labeled, models(*VALUES), strict=True))
    return [Reply(i, ClientInfo(i, n * has, n * (not has)), Model(tree)) for i, (n, has, tree) in group]


@pytest.mark.parametrize(
    ("options", "labeled", "consensus"),
    [
        ({}, (True, False, False), CONSENSUS),
        ({"reweighting": False}, (True, False, False), 3),
        ({"labeled_share": 0.5}, (True, False, False), 0.5 * 0 + 0.5 * (4 * 2 + 8 * 5) / 12),
        ({"labeled_share": 0.5}, (True, False, True), 0.5 * 2 + 0.5 * (1 * 0 + 2 * 5) / 3),  # by size
        ({"labeled_times": 6.0}, (False, True, False), (0 + 6 * 4 * 2 + 8 * 5) / (1 + 24 + 8)),
        ({"beta": 0.0, "beta_labeled": BETA}, (True, False, False), CONSENSUS),
        ({"beta": 0.0, "beta_labeled": BETA}, (False, False, False), 3),
        ({"beta": 0.0, "beta_labeled": BETA, "reweighting": False}, (True, False, False), 3),
        ({"beta_labeled": 0.0}, (False, False, True), 3),
    ],
)
def test_rscfed_eq_6_the_consensus_of_a_group_and_its_options(options, labeled, consensus):
    method = RSCFed(**{"beta": BETA, "labeled_share": None} | options)
    shares = defaultdict(float)
    assert method.consensus(replies(*labeled), shares)["w"].item() == pytest.approx(consensus)
    assert sum(shares[f"weight_{i}"] * value for i, value in enumerate(VALUES)) == pytest.approx(consensus)


# Rounds


@pytest.mark.parametrize(
    ("silent", "mean"),
    [
        ([], (SUPERVISED + CONSISTENT) / 2),
        ([0], CONSISTENT),  # a group of which nobody answered is left out
        ([1], SUPERVISED),
        ([0, 1], 0.0),
    ],
)
def test_rscfed_eq_7_is_the_mean_of_the_groups(silent, mean):
    fed = Few(site(0, [(1, 0)]), site(1, unlabeled=[1] * 7), silent=silent, group0=[0], group1=[1])
    assert moved(replace(ONE, groups=2).round(START, fed)) == approx(mean)


AGAIN = pull(math.log(3), math.log(3) + CONSISTENT)  # the second training, after the teacher went a quarter of the way


@pytest.mark.parametrize(
    ("reuse", "asked", "mean"),
    [
        (False, [1, 0, 1], (CONSISTENT + (AGAIN + SUPERVISED) / 2) / 2),
        (True, [0, 1], (CONSISTENT + (CONSISTENT + SUPERVISED) / 2) / 2),
    ],
)
def test_a_client_drawn_twice_trains_twice_in_sequence_or_once_for_both(reuse, asked, mean):
    method = replace(ONE, groups=2, reuse=reuse, teacher=MeanTeacher(decay=0.75))
    fed = Few(site(0, [(1, 0)]), site(1, unlabeled=[1]), group0=[1], group1=[1, 0])
    assert moved(method.round(START, fed)) == approx(mean)
    assert fed.asked == asked


def test_reuse_bears_a_client_that_is_silent():
    fed = Few(site(0, [(1, 0)]), site(1, unlabeled=[1]), silent=[1], group0=[1], group1=[1, 0])
    assert moved(replace(ONE, groups=2, reuse=True).round(START, fed)) == approx(SUPERVISED)


@pytest.mark.parametrize(
    ("options", "mean"),
    [
        ({"sub_sampling": False}, (1 * SUPERVISED + 3 * CONSISTENT) / 4),
        ({"sub_sampling": False, "labeled_share": 0.5}, (SUPERVISED + CONSISTENT) / 2),
        ({"sub_sampling": False, "reweighting": False, "beta": 1e4}, (1 * SUPERVISED + 3 * CONSISTENT) / 4),
    ],
)
def test_without_sub_sampling_all_are_one_group(options, mean):
    fed = Few(site(0, [(1, 0)]), site(1, unlabeled=[1] * 3), group0=[0])
    assert moved(replace(ONE, groups=3, **options).round(START, fed)) == approx(mean)
    assert fed.asked == [1, 0]  # the larger one first


def drawn(directory, rounds: Iterable[int]) -> list[list[int]]:
    """Who is asked in each round, in the order of jobs; nobody answers."""
    fed = Server(directory)
    state, asked = fed.method.init(fed), []

    def run(task, jobs):
        asked.append([client.id for client, _ in jobs])
        return iter(())

    fed.run = run
    for fed.round in rounds:
        assert fed.method.round(state, fed).model is state.model
    return asked


SMALL = ("method=rscfed", "model=tests.nets:tiny", "clients.count=8", "labels.clients=3", "method.group_size=3")


def test_groups_are_independent_draws_that_each_round_makes_anew_and_anyone_can_repeat(run_dir):
    directory = run_dir(*SMALL)
    rounds = drawn(directory, range(1, 7))
    groups = [tuple(asked[i : i + 3]) for asked in rounds for i in (0, 3, 6)]
    assert all(len(asked) == 9 for asked in rounds)
    assert all(len(set(group)) == 3 for group in groups)
    assert len(set(groups)) > 12  # of 18, out of 56 that there are
    assert any(set(asked[:3]) & set(asked[3:6]) for asked in rounds)  # a draw does not spare who was drawn before
    assert set().union(*groups) == set(range(8))
    assert drawn(directory, [4, 2]) == [rounds[3], rounds[1]]


def test_groups_are_drawn_among_those_who_take_part_in_the_round(run_dir):
    rounds = drawn(run_dir(*SMALL, "clients.per_round=4"), range(1, 7))
    assert all(len(set(asked)) <= 4 for asked in rounds)
    assert len(set().union(*rounds)) > 4
    assert all(len(asked) == 3 * 2 for asked in drawn(run_dir(*SMALL, "clients.per_round=2"), range(1, 7)))


@pytest.mark.parametrize(("per_round", "labeled"), [(0, 3), (2, 2)])
def test_the_warm_up_asks_labeled_clients_alone(run_dir, per_round, labeled):
    directory = run_dir(*SMALL, "method.warmup=2", *([f"clients.per_round={per_round}"] if per_round else []))
    first, second, third = drawn(directory, [1, 2, 3])
    having = {client.id for client in Server(directory).labeled}
    for asked in (first, second):
        assert len(asked) == len(set(asked)) == labeled
        assert set(asked) <= having
    assert len(third) == (6 if per_round else 9)


# Rows


def test_the_defaults_are_those_of_the_paper():
    assert METHODS["rscfed"] == RSCFed(
        groups=3,
        group_size=5,
        beta=1e4,
        labeled_share=0.5,
        teacher=MeanTeacher(decay=0.999, temperature=0.5, weight=1.0, student_view="weak", ramp=False, buffers=True),
        local=Local(epochs=1, batch_size=64, lr=0.03, lr_unlabeled=0.021),
        warmup=0,
        distance="joined",
    )


def test_the_baselines_are_the_method_without_its_parts():
    paper = METHODS["rscfed"]
    assert METHODS["fed-consist"] == replace(paper, sub_sampling=False, reweighting=False)
    strong = replace(paper.teacher, student_view="strong")
    assert METHODS["mt-wfedavg"] == replace(paper, sub_sampling=False, labeled_share=None, teacher=strong)


def test_the_authors_row_sets_what_their_code_does_on_svhn():
    paper = METHODS["rscfed"]
    assert METHODS["rscfed-authors"] == replace(
        paper,
        teacher=replace(paper.teacher, weight=0.02, ramp=True, buffers=False, nominal_batch=True),
        warmup=7,
        labeled_share=None,
        labeled_times=6.0,
        beta_labeled=100.0,
        distance="summed",
        persistent_optimizer=True,
    )


def test_a_round_of_the_authors():
    method = replace(METHODS["rscfed-authors"], groups=1, local=replace(STEP, lr=0.01, batch_size=6))
    fed = Few(site(0, [(1, 0)]), site(1, unlabeled=[1] * 3), round=8)
    # Steps of a hundredth; the consistency loss counts 0.02, and three images of a batch of six half.
    labeled, other = 0.01 * SUPERVISED, 0.01 * 0.02 * CONSISTENT / 2
    # Bias and weight move by (a, -a) each, so d is 2 sqrt(2) |a - mean|, and beta is 100 beside a labeled client.
    mean = (1 * labeled + 3 * other) / 4
    first = 6 * 1 * math.exp(-100 * math.sqrt(8) * (labeled - mean) / 1)
    second = 3 * math.exp(-100 * math.sqrt(8) * (mean - other) / 3)
    assert moved(method.round(START, fed)) == pytest.approx((first * labeled + second * other) / (first + second), 1e-3)
    assert moved(Model(fed.sites[1].state.teacher)) == approx(other)  # the ramp: its first student itself


def test_the_authors_warm_up_lasts_seven_rounds():
    fed = Few(site(0, [(1, 0)]), site(1, unlabeled=[1] * 3), round=7)
    METHODS["rscfed-authors"].round(START, fed)
    assert fed.asked == [0]
    fed.round = 8
    METHODS["rscfed-authors"].round(START, fed)
    assert fed.asked == [0] + 3 * [1, 0]


def test_a_table_tells_how_to_have_what_the_authors_code_does_on_isic():
    for table in ("rscfed-table1", "rscfed-table2"):
        [row] = select(f"{table}/isic-rscfed")
        method = row.experiment(re.findall(r"--set (\S+)", row.notes[-1])).method
        assert (method.beta, method.beta_labeled, method.labeled_times, method.warmup) == (0.01, 0.01, 200, 7)
        assert "--rounds 800;" in row.notes[-1]


def test_groups_of_table_4_are_never_all_clients():
    for row in select("rscfed-table4/*-rscfed"):
        e = row.experiment()
        assert (e.method.groups, e.method.group_size) == (3, 3 if e.clients.count == 5 else 5)
