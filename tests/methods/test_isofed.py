"""IsoFed (Saha, Mishra and Noble, MICCAI 2023), equation by equation, worked out by hand on softmax regression."""

import math
from dataclasses import replace

import pytest
import torch

from fewlabel.core.federation import ClientInfo, Model
from fewlabel.core.images import Tally
from fewlabel.data.images import Images
from fewlabel.learn.losses import information
from fewlabel.learn.optim import Local
from fewlabel.learn.teacher import MeanTeacher
from fewlabel.methods import METHODS
from fewlabel.methods.isofed import IsoFed
from tests.hand import STEP, Uploads, passes, site, values, weights
from tests.methods.test_rscfed import (
    BETA,
    CONSENSUS,
    CONSISTENT,
    SIZES,
    START,
    SUPERVISED,
    VALUES,
    Few,
    approx,
    models,
    moved,
    pull,
    sigmoid,
)

BARE = IsoFed(beta=0.0, pretraining=0, teacher=MeanTeacher(decay=0.75, student_view="strong"), local=STEP)
FULL = replace(BARE, pretraining=1, pretraining_rate=1.0)

# From START, as in the tests of RSCFed, a network is known by the a that it moved: SUPERVISED after a step on an image
# with label 0, CONSISTENT after one towards the teacher that is still where the student is.


def test_isofed_eq_1_the_teacher_follows_the_student_by_alpha_after_each_step():
    method = replace(BARE, local=replace(STEP, batch_size=2))
    # After the first step the logits are 4 CONSISTENT further apart, and a quarter of that in the teacher.
    second = pull(math.log(3) + 4 * CONSISTENT, math.log(3) + CONSISTENT)
    assert moved(method.local_update(site(0, unlabeled=[1] * 4), START)) == approx(CONSISTENT + second)


def test_isofed_the_teacher_begins_anew_in_each_round():
    one = site(0, unlabeled=[1, 1])
    for _ in range(2):
        assert moved(BARE.local_update(one, START)) == approx(CONSISTENT)
        assert one.state is None


def test_isofed_eq_2_3_a_group_is_averaged_by_distance_from_its_mean():
    clients = [ClientInfo(i, 0, n) for i, n in enumerate(SIZES)]
    uploads = dict(zip(clients, map(Model, models(*VALUES)), strict=True))
    found = IsoFed(beta=BETA).phase(Model({}), Uploads(uploads), clients)
    assert found.model["w"].item() == pytest.approx(CONSENSUS)


H = -(3 / 4 * math.log(3 / 4) + 1 / 4 * math.log(1 / 4))  # the entropy of (3/4, 1/4)


@pytest.mark.parametrize(
    ("p", "value"),
    [
        ([[1 / 4] * 4] * 3, 0.0),  # nothing is sure: -ln 4 + ln 4
        ([[1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0]], -math.log(4)),  # sure and diverse: the least
        ([[0, 1.0, 0, 0]] * 3, 0.0),  # sure, and always the same
        ([[3 / 4, 1 / 4], [1 / 4, 3 / 4]], -math.log(2) + H),
        ([[3 / 4, 1 / 4], [3 / 4, 1 / 4]], 0.0),
    ],
)
def test_isofed_eq_4_is_the_mean_entropy_less_that_of_the_mean(p, value):
    p = torch.tensor(p, requires_grad=True)
    found = information(p)
    found.backward()
    assert found.item() == approx(value)
    assert p.grad.isfinite().all()


# Two images, seen as 1 and -1, and weights (ln 3, 0): the network says (3/4, 1/4) of the one and (1/4, 3/4) of the
# other. The loss of eq. 4 has the derivative (ln mean_c - ln p_ic) / 2 by p_ic, and by the first logit p (1 - p) times
# the difference of that between the classes: 3/16 * -ln 3 / 2 for x = 1, the opposite for x = -1. The weight takes in x
# times both, -3/16 ln 3. It grows to 19/16 ln 3, the other falls to -3/16 ln 3, the biases stay.
SLOPE = Model(weights([math.log(3), 0.0]))
ADAPTED = 11 / 8 * math.log(3)  # the difference of the logits at x = 1
GROWN = 3 / 16 * math.log(3)


def grown(method: IsoFed, **images: list) -> float:
    """By how much the first weight grew, on condition that the second fell as much and the biases stay."""
    weight, bias = values(method.local_update(site(0, **images), SLOPE).model)
    assert [weight[1], *bias] == pytest.approx([math.log(3) - weight[0], 0.0, 0.0], abs=1e-6)
    return weight[0] - math.log(3)


# The step after it, by symmetry that on x = 1 alone: of cross-entropy 1 - p, of consistency `pull`.
LABELED = {"labeled": [(1, 0), (-1, 1)]}
UNLABELED = {"unlabeled": [1, -1]}


@pytest.mark.parametrize(
    ("method", "images", "growth"),
    [
        (BARE, LABELED, 1 / 4),
        (FULL, LABELED, GROWN + 1 - sigmoid(ADAPTED)),
        (BARE, UNLABELED, pull(math.log(3), math.log(3))),
        (FULL, UNLABELED, GROWN + pull(ADAPTED, ADAPTED)),
        (replace(FULL, student_from="received"), LABELED, GROWN + 1 - sigmoid(ADAPTED)),  # which has no teacher
        (replace(FULL, student_from="received"), UNLABELED, pull(math.log(3), ADAPTED)),
        (replace(BARE, student_from="received"), UNLABELED, pull(math.log(3), math.log(3))),
    ],
)
def test_isofed_eq_4_adapts_what_any_client_receives_and_the_teacher_begins_there(method, images, growth):
    assert grown(method, **images) == approx(growth)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_isofed_adapts_for_as_many_epochs_as_asked_at_a_share_of_the_clients_rate(share):
    # So small steps that they add up: three of adapting, and one of training.
    method = replace(FULL, pretraining=3, pretraining_rate=share, local=replace(STEP, lr=1.0, lr_unlabeled=1e-3))
    expected = 1e-3 * (3 * share * GROWN + pull(math.log(3), math.log(3)))
    assert grown(method, **UNLABELED) == pytest.approx(expected, rel=5e-3)


def test_isofed_clients_without_labels_may_have_epochs_of_their_own():
    method = replace(BARE, local=replace(STEP, lr=1e-3, epochs=3), epochs_unlabeled=2)
    assert grown(method, **LABELED) == pytest.approx(3e-3 / 4, rel=5e-3)
    assert grown(method, **UNLABELED) == pytest.approx(2e-3 * pull(math.log(3), math.log(3)), rel=5e-3)


def test_isofed_adapts_and_trains_with_momentum_of_its_own_each():
    method = replace(FULL, local=replace(STEP, momentum=0.9))
    assert grown(method, **UNLABELED) == approx(GROWN + pull(ADAPTED, ADAPTED))


class Brighter(Images):
    """Images that are seen as 1 in the weak view and as 2 in the strong one."""

    def views(self, index, names, rng):
        return [torch.full((len(index), 1, 1, 1), {"weak": 1.0, "strong": 2.0}[name]) for name in names]


def test_isofed_shows_the_weak_view_to_the_teacher_and_the_strong_one_to_the_student():
    one = site(0, unlabeled=[1, 1, 1])
    one.unlabeled._images = Brighter(one.unlabeled._images.pixels, (0.0,), (1.0,))
    seen = passes(one)
    weight, bias = values(BARE.local_update(one, SLOPE).model)
    # The student says 9/10 at x = 2, just what the sharpened teacher says at x = 1, so there is nothing to learn.
    assert seen == [(False, 3), (True, 3)]
    assert weight + bias == pytest.approx([math.log(3), 0.0, 0.0, 0.0], abs=1e-6)


# Phases

# The unlabeled client moves by CONSISTENT, which makes the logits differ by four times that more; the labeled one
# begins there and has 1 - p left to go.
BOTH = CONSISTENT + 1 - sigmoid(math.log(3) + 4 * CONSISTENT)


@pytest.mark.parametrize(
    ("silent", "end"), [([], BOTH), ([1, 2], SUPERVISED), ([0], CONSISTENT), ([2], BOTH), ([0, 1, 2], 0.0)]
)
def test_isofed_unlabeled_clients_come_first_and_labeled_ones_begin_with_their_model(silent, end):
    fed = Few(site(0, [(1, 0)]), site(1, unlabeled=[1, 1]), site(2, unlabeled=[1, 1, 1]), silent=silent)
    assert moved(BARE.round(START, fed)) == approx(end)
    assert fed.asked == [2, 1, 0]  # in a phase, the largest first
    sent = [moved(message) for _, message in fed.sent]
    assert sent[:2] == [0.0, 0.0]
    assert sent[2] == approx(CONSISTENT if {1, 2} - set(silent) else 0.0)


def test_r4_isofed_adapting_at_labeled_clients_is_work_without_labels():
    """Three images with labels: each is adapted to once, without its label, and trained on once, with it."""
    one = site(0, labeled=[(1, 0)] * 3)
    one.labeled._tally = tally = Tally()
    FULL.local_update(one, START)
    assert tally.trained == [3, 3]


def test_isofed_each_group_is_averaged_alone():
    # Of the labeled clients one has label 0 and a gradient of -1/4, the other three of label 1 and one of 3/4.
    fed = Few(site(0, [(1, 0)]), site(1, [(1, 1)] * 3), site(2, unlabeled=[1] * 9), silent=[2])
    assert moved(BARE.round(START, fed)) == approx((1 * 1 / 4 - 3 * 3 / 4) / 4)


def test_the_defaults_are_those_of_rscfed_and_of_the_paper():
    assert METHODS["isofed"] == IsoFed(
        beta=1e4,
        pretraining=1,
        pretraining_rate=0.1,
        student_from="pretrained",
        teacher=MeanTeacher(decay=0.999, temperature=0.5, weight=1.0, student_view="strong", ramp=False),
        local=Local(epochs=1, batch_size=64, lr=0.03, lr_unlabeled=0.021),
    )
