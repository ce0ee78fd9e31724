"""SAGE (Liu et al., CVPR 2025), worked out by hand on softmax regression.

The paper's equations are named by what they define: the confidence gap, the coefficient exp(-kappa * gap), the soft
target, and the loss.
"""

import math
from dataclasses import replace

import pytest
import torch

from fewlabel.core.federation import Model
from fewlabel.experiment import Experiment
from fewlabel.learn.optim import Local
from fewlabel.methods import METHODS
from fewlabel.methods.sage import SAGE
from tests.hand import STEP, Sites, passes, site, values, weights
from tests.methods.test_rscfed import START, approx, moved, sigmoid

KAPPA = math.log(2) / 0.05
BARE = SAGE(threshold=0.7, local=STEP)


@pytest.mark.parametrize(
    ("local", "received", "target", "sure"),
    [
        ((0.97, 0.02, 0.01), (0.01, 0.97, 0.02), (1, 0, 0), True),  # no gap: the local label
        ((0.97, 0.02, 0.01), (0.05, 0.92, 0.03), (1 / 2, 1 / 2, 0), True),  # a gap of 0.05
        ((0.96, 0.03, 0.01), (0.03, 0.11, 0.86), (1 / 4, 0, 3 / 4), True),  # of 0.1, the global model unsure
        ((0.96, 0.03, 0.01), (0.81, 0.11, 0.08), (1, 0, 0), True),  # of 0.15, but they agree
        ((0.50, 0.30, 0.20), (0.01, 0.97, 0.02), (0, 1, 0), True),  # only the global model is sure
        ((0.50, 0.30, 0.20), (0.10, 0.10, 0.80), (0, 0, 1), False),  # neither
    ],
)
def test_sage_target_blends_both_labels_by_the_confidence_gap(local, received, target, sure):
    blend, mask = SAGE().target(torch.tensor([local]), torch.tensor([received]))
    assert blend[0].tolist() == pytest.approx(target, abs=1e-6)
    assert mask.tolist() == [sure]


def test_sage_kappa_of_zero_keeps_the_local_label_and_a_large_one_the_global():
    local, received = torch.tensor([[0.97, 0.03]]), torch.tensor([[0.02, 0.98]])
    assert replace(SAGE(), kappa=0.0).target(local, received)[0].tolist() == [[1, 0]]
    assert replace(SAGE(), kappa=1e6).target(local, received)[0].tolist() == [[0, 1]]


# At START the network says (3/4, 1/4) of any image. All are seen as 1, so a network is known by its a; a step on
# probabilities p towards a target t for the first class moves it by t - p.


def test_sage_loss_adds_the_labels_and_the_sure_unlabeled_images():
    both = {"labeled": [(1, 0)], "unlabeled": [1, 1]}
    assert moved(BARE.local_update(site(0, **both), START)) == approx(1 / 4 + 1 / 4)
    assert moved(replace(BARE, weight_unlabeled=3.0).local_update(site(0, **both), START)) == approx(1 / 4 + 3 / 4)
    assert moved(replace(BARE, threshold=0.8).local_update(site(0, **both), START)) == approx(1 / 4)
    assert moved(BARE.local_update(site(0, [(1, 0)]), START)) == approx(1 / 4)  # in the warm-up, say
    assert moved(BARE.local_update(site(0, unlabeled=[1, 1]), START)) == approx(1 / 4)


def test_sage_clients_without_labels_may_have_epochs_of_their_own():
    """A step of 1/4 moves the logits apart by 1, so the second of two is 1 - sigmoid(ln 3 + 1)."""
    twice = replace(BARE, local=replace(STEP, epochs=2))
    second = 1 - sigmoid(math.log(3) + 1)
    assert moved(twice.local_update(site(0, unlabeled=[1, 1]), START)) == approx(1 / 4 + second)
    once = replace(twice, epochs_unlabeled=1)
    assert moved(once.local_update(site(0, unlabeled=[1, 1]), START)) == approx(1 / 4)
    assert moved(once.local_update(site(0, [(1, 0)]), START)) == approx(1 / 4 + second)


def test_sage_local_model_labels_as_it_trains_and_the_global_model_as_received():
    # After a step towards label 1 and pseudo-label 0 the local model is at a = 1/4 - 3/4 and says class 1, and is sure.
    one = site(0, [(1, 1)], [1, 1])
    method = replace(BARE, local=replace(STEP, epochs=2))
    p = sigmoid(math.log(3) - 2)
    share = math.exp(-KAPPA * (3 / 4 - (1 - p)))
    assert 1 - p > 0.7
    assert 0.5 < share < 0.7
    second = ((1 - share) - p) + (0 - p)
    assert moved(method.local_update(one, START)) == approx(-1 / 2 + second)
    assert [(label.tolist(), epoch) for _, label, epoch in one.audited] == [([0, 0], 1), ([1, 1], 2)]


def test_sage_only_sure_images_count_in_the_mean_over_all():
    slope = Model(weights([math.log(3), 0.0]))  # 3/4 at x = 1, 1/2 at x = 0
    weight, _ = values(BARE.local_update(site(0, unlabeled=[1, 0, 0, 0]), slope).model)
    assert weight[0] - math.log(3) == approx(1 / 4 / 4)


def test_sage_global_model_labels_in_evaluation_mode():
    one = site(0, [(1, 0)], [1, 1, 1])
    seen = passes(one)
    BARE.local_update(one, START)
    assert seen == [(True, 2), (True, 3), (False, 3), (True, 3)]  # labels (a single one twice), local, global, strong


def test_sage_clients_are_averaged_by_size():
    fed = Sites(site(0, [(1, 0)]), site(1, [(1, 1)] * 3), round=1)
    assert moved(BARE.round(START, fed)) == approx((1 * 1 / 4 - 3 * 3 / 4) / 4)


def test_sage_says_that_it_is_made_for_labels_at_every_client():
    [caution] = Experiment(method="sage").cautions
    assert caution.startswith("sage is made for labels at every client")
    whole = Experiment(method="sage", labels=replace(Experiment().labels, at="every-client"))
    assert whole.cautions == []


def test_the_defaults_are_those_of_the_authors():
    assert METHODS["sage"] == SAGE(
        threshold=0.95,
        kappa=KAPPA,
        weight_unlabeled=1.0,
        batch_unlabeled=256,
        local=Local(epochs=5, batch_size=128, lr=0.1, momentum=0.9, weight_decay=1e-4, clip=None),
    )
