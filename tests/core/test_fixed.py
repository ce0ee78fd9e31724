"""Means in whole numbers: exact, in any order, and as near to the exact mean as the module says."""

import random
from fractions import Fraction
from functools import partial

import pytest
import torch

from fewlabel.core import fixed, tree
from fewlabel.core.averaging import Rule, average
from fewlabel.core.errors import BadInput
from fewlabel.core.federation import ClientInfo, Model, Reply
from fewlabel.experiment import read
from fewlabel.learn.consensus import by_kind

STEP = 2.0**-24


def mean(models: list[tree.Tree], weights: list[float], old: tree.Tree, labeled: list[bool] | None = None, **more):
    infos = [ClientInfo(i, int(has), 1) for i, has in enumerate(labeled or [True] * len(models))]
    replies = [Reply(i, info, Model(model)) for i, (info, model) in enumerate(zip(infos, models, strict=True))]
    rule = Rule(fixed=True, share=more.pop("share", None))
    return average(replies, old, lambda reply: weights[reply.job], rule=rule, **more)


def test_numbers_become_steps_of_2_to_the_minus_24_and_a_half_goes_to_the_even_one():
    # 1 is 2^24 steps; 1.5 steps and 2.5 steps are both 2; -0.75 of a step is -1. Names are in alphabetical order.
    model = {"b": torch.tensor([1.0, -0.75 * STEP]), "a": torch.tensor([1.5 * STEP, 2.5 * STEP]), "n": torch.tensor(7)}
    assert fixed.units(model, 2**28).tolist() == [2, 2, 16777216, -1]
    # With a quarter of the weight: 0.375 and 0.625 steps are 0 and 1, and 1 is 2^22.
    assert fixed.units(model, 2**26).tolist() == [0, 1, 4194304, 0]


def test_shares_with_a_common_factor_leave_no_pattern_that_shows_the_number_of_another():
    """If two shares are multiples of 2^20, the sum's remainder by that must not be the third client's number."""
    draw = torch.Generator().manual_seed(3)
    for share in (2**27, 2**26, 2**20 * 77):
        numbers = fixed.units({"w": torch.randn(1000, generator=draw) * 0.1}, share)
        assert len((numbers % 2**12).unique()) > 500  # about 890 of 4096, if they are spread evenly


def test_weights_become_shares_of_2_to_the_28():
    # 1 : 3 are a quarter and three quarters of 268435456.
    assert fixed.shares([1, 3], [True, True]) == [67108864, 201326592]
    assert fixed.shares([0, 0], [True, False]) == [0, 0]


def test_kinds_divide_the_shares_between_clients_with_labels_and_without():
    # One with labels has half; the others have 10 and 30 images, so a quarter and three quarters of the other half.
    found = fixed.shares([5, 10, 30], [True, False, False], partial(by_kind, share=0.5))
    assert found == [134217728, 33554432, 100663296]


def test_no_client_has_more_than_the_largest_share_of_its_kind():
    # 8, 1 and 1 become 2, 1 and 1 where half is the most.
    assert fixed.shares([8, 1, 1], [False] * 3, largest=0.5) == [134217728, 67108864, 67108864]


def test_the_mean_is_that_of_the_whole_numbers_worked_out_by_hand():
    old = {"w": torch.zeros(2), "n": torch.tensor(3)}
    models = [
        {"w": torch.tensor([1.0, 4.0]), "n": torch.tensor(9)},
        {"w": torch.tensor([3.0, -4.0]), "n": torch.tensor(8)},
    ]
    found = mean(models, [1, 3], old, keep=True)
    assert found.model["w"].tolist() == [2.5, -2.0]  # (1 + 9) / 4, (4 - 12) / 4
    assert found.model["n"] == 3  # a sum has no largest counter, so it stays as it was
    assert found.of(lambda upload: upload.model, old, lambda reply: 1)["w"].tolist() == [2.0, 0.0]


def test_equal_models_of_whole_steps_are_their_own_mean_and_a_mean_of_nothing_is_the_old_model():
    # Eight eighths of multiples of 2^-21 are whole numbers of steps.
    same = {"w": (torch.randn(50, generator=torch.Generator().manual_seed(0)) * 2**21).round() / 2**21}
    assert torch.equal(mean([same] * 8, [1] * 8, same).model["w"], same["w"])
    assert mean([], [], same).model is same
    assert mean([same], [0], same).model is same


def test_the_order_of_clients_changes_no_bit():
    draw = torch.Generator().manual_seed(1)
    models = [{"w": torch.randn(1000, generator=draw)} for _ in range(9)]
    weights = [float(n * n + 1) for n in range(9)]
    order = list(range(9))
    random.Random(0).shuffle(order)
    one = mean(models, weights, models[0]).model["w"]
    other = mean([models[i] for i in order], [weights[i] for i in order], models[0]).model["w"]
    assert torch.equal(one, other)


@pytest.mark.parametrize("size", [0.01, 1.0, 1000.0])
def test_the_mean_is_as_near_to_the_exact_one_as_the_module_says(size):
    """The bound is checked with fractions, so that no rounding of the test itself counts."""
    draw = torch.Generator().manual_seed(2)
    models = [{"w": (torch.rand(200, generator=draw) * 2 - 1) * size} for _ in range(10)]
    weights = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    found = mean(models, weights, models[0]).model["w"]
    plain = tree.mean(zip(map(float, weights), models, strict=True))["w"]
    for place in range(200):
        exact = sum(w * Fraction(float(m["w"][place])) for w, m in zip(weights, models, strict=True)) / sum(weights)
        bound = Fraction(10, 2**24) + 10 * Fraction(size) / 2**27 + abs(exact) / 2**23
        assert abs(Fraction(float(found[place])) - exact) <= bound
        assert abs(float(plain[place]) - float(found[place])) <= 10 * size * 2**-23 + float(bound)


def test_the_largest_numbers_and_weights_do_not_overflow():
    models = [{"w": torch.tensor([1024.0, -1024.0])}] * 3
    assert mean(models, [1e9, 1.0, 1e9], models[0]).model["w"].tolist() == [1024.0, -1024.0]


@pytest.mark.parametrize("bad", [1025.0, float("nan"), float("inf")])
def test_a_number_that_the_sum_cannot_hold_is_refused(bad):
    with pytest.raises(ValueError, match="sums in whole numbers hold numbers up to 1024"):
        fixed.units({"w": torch.tensor([bad])}, 1)


REFUSED = {
    "clients.sums = 'fixed' is not for rscfed, whose server needs each": ["method=rscfed", "clients.sums=fixed"],
    "clients.aggregate = 'median' needs each": ["clients.sums=fixed", "clients.aggregate=median"],
    "hides the updates that clients.outlier compares; leave it out, or use clients.clip": [
        *("clients.sums=masked", "clients.outlier=3"),
    ],
    "is not for twin-sight, whose sites also send 'twin'": ["method=twin-sight", "clients.sums=masked"],
    "model.buffers = 'recomputed' shows the statistics": ["clients.sums=masked", "model.buffers=recomputed"],
    "needs 3 clients or more in a round": ["clients.sums=masked", "clients.per_round=2"],
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_needs_single_models_is_refused_in_a_sentence(why):
    with pytest.raises(BadInput) as found:
        read({}, REFUSED[why])
    assert why in str(found.value)
