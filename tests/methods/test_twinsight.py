"""Twin-sight (Zhang et al., ICLR 2024), worked out by hand.

The paper's losses are named by what they are for: labels, pseudo-labels, instance discrimination, and neighbourhoods
(eq. 9).
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fewlabel.core import tree
from fewlabel.core.federation import Model, Site
from fewlabel.core.images import Tally
from fewlabel.core.rng import Rng
from fewlabel.core.wire import WireError
from fewlabel.experiment import Experiment
from fewlabel.learn.contrast import PROJECTED, Projection
from fewlabel.learn.optim import Local
from fewlabel.methods import METHODS
from fewlabel.methods.twinsight import Twins, TwinSight
from tests.hand import STEP, Sites, passes, site
from tests.methods.test_rscfed import START, approx, moved

# At START the network says (3/4, 1/4) of any image. All are seen as 1, so a network is known by its a; a step on
# probabilities p towards a target t for the first class moves it by t - p. Its features are its input, so the losses of
# the twin do not move it.
BARE = TwinSight(threshold=0.7, weight_unlabeled=1.0, local=STEP)


def head(features: int = 1, seed: int = 0) -> dict[str, Tensor]:
    with Rng("head", seed).scope():
        return tree.of(Projection(features))


def sent(model: Model = START) -> Twins:
    return Twins(model.model, model.model, head())


def test_twinsight_supervised_loss_is_cross_entropy_on_labels():
    assert moved(BARE.local_update(site(0, [(1, 0)]), sent())) == approx(1 / 4)
    assert moved(BARE.local_update(site(0, [(1, 1)]), sent())) == approx(-3 / 4)


def test_twinsight_labels_are_adjusted_to_the_classes_of_the_site():
    one = site(0, [(1, 0), (1, 0), (1, 0), (1, 1)])
    one.labeled._balanced = 2  # priors (4/6, 2/6): the odds of 3 become 6
    assert moved(BARE.local_update(one, sent())) == approx(3 / 4 - 6 / 7)


def test_twinsight_supervised_model_learns_from_pseudo_labels_that_it_is_sure_of():
    one = site(0, unlabeled=[1, 1])
    assert moved(BARE.local_update(one, sent())) == approx(1 / 4)
    [(index, label, epoch)] = one.audited
    assert (sorted(index.tolist()), label.tolist(), epoch) == ([0, 1], [0, 0], 1)
    assert moved(replace(BARE, weight_unlabeled=3.0).local_update(site(0, unlabeled=[1, 1]), sent())) == approx(3 / 4)
    assert moved(replace(BARE, threshold=0.8).local_update(site(0, unlabeled=[1, 1]), sent())) == approx(0)


def test_twinsight_loss_adds_labels_and_pseudo_labels_where_a_client_has_both():
    assert moved(BARE.local_update(site(0, [(1, 1)], [1, 1, 1]), sent())) == approx(-3 / 4 + 1 / 4)


def test_twinsight_clients_without_labels_may_train_for_other_epochs():
    twice = replace(BARE, local=replace(STEP, epochs=2), epochs_unlabeled=1)
    assert moved(twice.local_update(site(0, unlabeled=[1, 1]), sent())) == approx(1 / 4)
    p = 1 / (1 + math.exp(-(math.log(3) + 1)))
    assert moved(twice.local_update(site(0, [(1, 0)]), sent())) == approx(1 / 4 + 1 - p)


# A network with features: the input x is seen as (W x + b), and the classifier is zero. The images are 1 and 0.


def two_layers(weight: tuple[float, float], bias: tuple[float, float]) -> dict[str, Tensor]:
    return {
        "1.weight": torch.tensor(weight).view(2, 1),
        "1.bias": torch.tensor(bias),
        "2.weight": torch.zeros(2, 2),
        "2.bias": torch.zeros(2),
    }


def featured(*images: int) -> Site[Any]:
    return site(0, unlabeled=images, network=nn.Sequential(nn.Flatten(), nn.Linear(1, 2), nn.Linear(2, 2)))


def identity() -> dict[str, Tensor]:
    """A projection that passes on two features, as long as they are positive."""
    found = {name: torch.zeros_like(value) for name, value in head(2).items()}
    found["projection_hidden.weight"][:] = torch.eye(2)
    found["projection_output.weight"][:2] = torch.eye(2)
    return found


OURS, THEIRS = two_layers((1, 0), (0, 1)), two_layers((1, -1), (0, 1))  # cosines of 1/sqrt(2), and of 0


def test_twinsight_eq9_makes_both_twins_find_the_same_images_alike():
    """The loss is (c - c')^2 / 2, with the gradients c - c' by c, and c' - c by c'.

    Ours: u = (1, 1) and v = (0, 1), so the gradient of c by u is (-1/2, 1/2) / sqrt(2), and by v (1, 0) / sqrt(2).
    Times c - c' = 1 / sqrt(2), and with u = W + b and v = b, a step moves W by (1/4, -1/4) and b by (-1/4, -1/4).
    Theirs: u = (1, 0) and v = (0, 1), with the gradients (0, 1) and (1, 0), times -1 / sqrt(2).
    """
    method = replace(BARE, threshold=1.0, weight_twin=0.0)
    found, root = method.local_update(featured(1, 0), Twins(OURS, THEIRS, head(2))), 1 / math.sqrt(2)
    assert found.model["1.weight"].flatten().tolist() == approx([1.25, -0.25])
    assert found.model["1.bias"].tolist() == approx([-0.25, 0.75])
    assert found.twin["1.weight"].flatten().tolist() == approx([1, -1 + root])
    assert found.twin["1.bias"].tolist() == approx([root, 1 + root])
    half = replace(method, weight_neighbours=0.5).local_update(featured(1, 0), Twins(OURS, THEIRS, head(2)))
    assert half.model["1.weight"].flatten().tolist() == approx([1.125, -0.125])


APART = two_layers((1, -1), (1, 2))  # features (2, 1) and (1, 2), with a cosine of 4/5
UNTIED = replace(BARE, threshold=1.0, weight_neighbours=0.0, weight_twin=0.5, temperature=1.0)


def test_twinsight_without_the_constraint_the_twin_does_not_move_the_model():
    found = UNTIED.local_update(featured(1, 0), Twins(OURS, APART, identity()))
    assert all(torch.equal(found.model[name], value) for name, value in OURS.items())
    assert not torch.equal(found.twin["1.weight"], APART["1.weight"])


def test_twinsight_twin_learns_to_tell_images_apart():
    """Both views of an image are alike here, so the loss is ln(e + 2 e^c) - 1, with c the cosine of the two images.

    The temperature is 1. The gradient by c is 2 e^c / (e + 2 e^c). That of c by u = (2, 1) is (v - c u) / 5, because u
    and v are both as long as the root of 5; by v = (1, 2) it is (u - c v) / 5. Features are u = W + b and v = b.
    """
    found = UNTIED.local_update(featured(1, 0), Twins(OURS, APART, identity()))
    c = 4 / 5
    slope = 0.5 * 2 * math.exp(c) / (math.e + 2 * math.exp(c))  # the weight of the loss is 1/2
    by_u, by_v = ((1 - 2 * c) / 5, (2 - c) / 5), ((2 - c) / 5, (1 - 2 * c) / 5)
    assert found.twin["1.weight"].flatten().tolist() == approx([1 - slope * by_u[0], -1 - slope * by_u[1]])
    assert found.twin["1.bias"].tolist() == approx([1 - slope * (by_u[0] + by_v[0]), 2 - slope * (by_u[1] + by_v[1])])
    assert torch.equal(found.twin["2.weight"], APART["2.weight"])  # its classifier is not used
    assert not torch.equal(found.projection["projection_output.weight"], identity()["projection_output.weight"])


def test_twinsight_twin_learns_the_same_from_labeled_images():
    network = nn.Sequential(nn.Flatten(), nn.Linear(1, 2), nn.Linear(2, 2))
    labeled = UNTIED.local_update(site(0, [(1, 0), (0, 1)], network=network), Twins(OURS, APART, identity()))
    unlabeled = UNTIED.local_update(featured(1, 0), Twins(OURS, APART, identity()))
    torch.testing.assert_close(labeled.twin, unlabeled.twin)


def test_twinsight_passes_all_views_at_once_and_counts_them():
    tally = Tally()
    one = site(0, [(1, 0)] * 3, [1, 1], tally=tally)
    one.labeled._tally = one.unlabeled._tally = tally
    seen = passes(one)
    BARE.local_update(one, sent())
    # The twin is a copy with the same hook: 5 weak and 2 strong views through the model, and all 10 through the twin.
    assert sorted(seen) == [(True, 7), (True, 10)]
    assert tally.trained == [3 * 3, 4 * 2]


def test_twinsight_both_twins_are_averaged_by_size():
    fed = Sites(site(0, [(1, 0)]), site(1, [(1, 1)] * 3), round=1)
    state = replace(sent(), twin={name: value + 1 for name, value in START.model.items()})
    found = BARE.round(state, fed)
    assert moved(found) == approx((1 * 1 / 4 - 3 * 3 / 4) / 4)
    apart = [BARE.local_update(one, state) for one in (site(0, [(1, 0)]), site(1, [(1, 1)] * 3))]
    for name, value in found.projection.items():
        expected = (apart[0].projection[name] + 3 * apart[1].projection[name]) / 4
        torch.testing.assert_close(value, expected)
    assert [message for _, message in fed.sent] == [state, state]


def test_twinsight_labeled_clients_may_have_a_share_of_the_models_average_whatever_their_size():
    fed = Sites(site(0, [(1, 1)]), site(1, unlabeled=[1, 1, 1]), round=1)
    assert moved(BARE.round(sent(), fed)) == approx((1 * -3 / 4 + 3 * 1 / 4) / 4)
    half = replace(BARE, labeled_share=0.5)
    assert moved(half.round(sent(), fed)) == approx((-3 / 4 + 1 / 4) / 2)
    shared = half.round(sent(), fed).projection, BARE.round(sent(), fed).projection
    torch.testing.assert_close(*shared)  # the twin is averaged by size


def test_twinsight_labeled_clients_get_half_of_the_weight_by_the_recipe():
    method = Experiment(method="twin-sight", train="fewlabel").method
    assert (method.labeled_share, method.epochs_unlabeled, method.local.epochs) == (0.5, 1, 5)


def test_twinsight_keeps_both_twins_if_nobody_replies():
    state = sent()
    fed = Sites(site(0, [(1, 0)]), silent=[0])
    assert BARE.round(state, fed) == state


@pytest.mark.parametrize(
    "change",
    [
        {"twin": {}},
        {"twin": {name: value.double() for name, value in START.model.items()}},
        {"twin": {"1.weight": torch.zeros(2, 2), "1.bias": torch.zeros(2)}},
        {"projection": {}},
        {"projection": head(2)},
        {"projection": {name: value.double() for name, value in head().items()}},
    ],
)
def test_twinsight_an_upload_that_does_not_fit_the_network_is_refused(change):
    sent().check(START.model)
    with pytest.raises((ValueError, WireError), match=r"different networks|in the other|expected torch.float32"):
        replace(sent(), **change).check(START.model)


def test_the_defaults_are_those_of_the_authors():
    assert METHODS["twin-sight"] == TwinSight(
        threshold=0.95,
        weight_unlabeled=0.5,
        weight_twin=0.5,
        weight_neighbours=1.0,
        temperature=0.07,
        local=Local(epochs=1, batch_size=64, lr=0.01, momentum=0.9, weight_decay=1e-4, clip=None),
    )
    assert PROJECTED == 128
