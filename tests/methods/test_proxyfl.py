"""ProxyFL (Chen and Wang, CVPR 2026), worked out by hand on softmax regression. `learn.proxies` has its own tests.

An image has one feature here, its pixel. A feature that is scaled to length one has no slope, so the contrast moves
nothing, unless a test says otherwise.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fewlabel.core.errors import BadInput
from fewlabel.core.federation import Model
from fewlabel.core.rng import Rng
from fewlabel.experiment import Experiment
from fewlabel.learn.optim import Local
from fewlabel.learn.proxies import contrast, projections, tuned
from fewlabel.methods import METHODS
from fewlabel.methods.proxyfl import ProxyFL, State, Update
from tests.hand import STEP, Sites, passes, site, values, weights
from tests.methods.test_rscfed import START, approx, moved, sigmoid

BARE = ProxyFL(threshold=0.7, tuning_epochs=0, local=STEP)
HALF = torch.tensor([0.5, 0.5])


def state() -> State:
    return State(START.model, projections(1, Rng("projections")), HALF)


def steps(update: Update | None) -> float:
    assert update is not None
    return moved(Model(update.model))


# At START the network says (3/4, 1/4) of any image. All are seen as 1, so a network is known by its a; a step on
# probabilities p towards a target t for the first class moves it by t - p.


def test_loss_adds_the_labels_and_the_sure_unlabeled_images():
    both = {"labeled": [(1, 0)], "unlabeled": [1, 1]}
    assert steps(BARE.local_update(site(0, **both), state())) == approx(1 / 4 + 1 / 4)
    assert steps(replace(BARE, weight_unlabeled=3.0).local_update(site(0, **both), state())) == approx(1 / 4 + 3 / 4)
    assert steps(replace(BARE, threshold=0.8).local_update(site(0, **both), state())) == approx(1 / 4)
    assert steps(BARE.local_update(site(0, [(1, 0)]), state())) == approx(1 / 4)  # in the warm-up, say
    assert steps(BARE.local_update(site(0, unlabeled=[1, 1]), state())) == approx(1 / 4)


def test_the_received_model_labels_what_either_model_is_sure_of():
    # Two labels 1 in the first of two epochs: the local model goes to a = -3/4 - (3/4 - 1) = -1/2 and says class 1.
    one = site(0, [(1, 1)], [1, 1])
    method = replace(BARE, local=replace(STEP, epochs=2))
    p = sigmoid(math.log(3) - 2)
    assert steps(method.local_update(one, state())) == approx(-1 / 2 + (0 - p) + (1 - p))
    assert [(label.tolist(), epoch) for _, label, epoch in one.audited] == [([0, 0], 1), ([0, 0], 2)]
    # With labels 0, the local model becomes sure where the received one is not: it goes to a = 1/4, and says 0.891.
    one = site(0, [(1, 0)], [1, 1])
    replace(method, threshold=0.8).local_update(one, state())
    assert [(label.tolist(), epoch) for _, label, epoch in one.audited] == [([], 1), ([0, 0], 2)]


def test_the_received_model_judges_in_evaluation_mode():
    one = site(0, [(1, 0)], [1, 1, 1])
    seen = passes(one)
    BARE.local_update(one, state())
    # A single label comes twice. Then the received model judges it; weak and strong views; it judges the weak ones.
    assert seen == [(True, 2), (False, 2), (True, 3), (True, 3), (False, 3)]


def test_clients_without_labels_may_have_epochs_of_their_own():
    method = replace(BARE, local=replace(STEP, epochs=3), epochs_unlabeled=1)
    one = site(0, unlabeled=[1, 1])
    assert steps(method.local_update(one, state())) == approx(1 / 4)


def test_both_views_go_through_a_backward_pass_and_count_as_work():
    one = site(0, unlabeled=[1, 1])
    one.unlabeled._tally = one.tally
    BARE.local_update(one, state())
    assert one.tally.trained[1] == 4


def test_counts_are_labels_and_sure_pseudo_labels_of_the_last_epoch():
    method = replace(BARE, local=replace(STEP, epochs=2))
    assert method.local_update(site(0, [(1, 1), (1, 1), (1, 0)], [1, 1]), state()).counts.tolist() == [1 + 2, 2]
    unsure = replace(method, threshold=0.99)
    assert unsure.local_update(site(0, [(1, 1), (1, 1), (1, 0)], [1, 1]), state()).counts.tolist() == [1, 2]


# With two features, the contrast has a slope. The projections are trained by nothing else.


def two_features() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(1, 2), nn.Linear(2, 2))


@pytest.mark.parametrize("labeled", [(), ((2, 0), (-1, 1))])
def test_contrast_compares_projected_features_of_both_views_with_projected_proxies(labeled):
    x, known = torch.tensor([[1.0], [-2.0]]), torch.tensor([[float(pixel)] for pixel, _ in labeled]).view(-1, 1)
    first, bias = torch.tensor([[1.0], [0.5]]), torch.tensor([0.0, 3.0])  # features in similar directions
    proxies = torch.tensor([[0.5, 0.1], [-0.3, 0.1]])  # positive pixels are rather of class 0, negative of class 1
    model = {"1.weight": first, "1.bias": bias, "2.weight": proxies, "2.bias": torch.zeros(2)}
    matrices = torch.tensor([[1.0, 0.2], [-0.1, 1.0]]), torch.tensor([[1.0, 0.3], [0.0, 1.0]])
    names = "project_features", "project_proxies", "project_shift"
    start = State(model, dict(zip(names, (*matrices, torch.tensor([0.1, 0.2])), strict=True)), HALF)
    update = replace(BARE, threshold=1.0, weight_contrast=2.0).local_update(
        site(0, labeled, [1, -2], network=two_features()), start
    )

    points = torch.cat([x, x, known]) @ first.T + bias
    own = {name: value.clone().requires_grad_() for name, value in start.projections.items()}
    projected = points @ own["project_features"].T + own["project_shift"]
    p = (points @ proxies.T).softmax(1)
    sure = torch.zeros(len(p), dtype=torch.bool)
    loss = contrast(projected, proxies @ own["project_proxies"].T, p, sure, HALF)[:4].mean()
    for name, slope in zip(own, torch.autograd.grad(2 * loss, list(own.values())), strict=True):
        assert slope.abs().max() > 1e-4
        expected = start.projections[name] - slope
        assert update.projections[name].flatten().tolist() == pytest.approx(expected.flatten().tolist(), abs=1e-5)


# Rounds


class Seeded(Sites):
    def rng(self, *names: str) -> Rng:
        return Rng(*names)


def test_clients_are_averaged_by_size_and_so_are_projections():
    fed = Seeded(site(0, [(1, 0)]), site(1, [(1, 1)] * 3), round=1)
    after = BARE.round(state(), fed)
    assert moved(Model(after.model)) == approx((1 * 1 / 4 - 3 * 3 / 4) / 4)
    for name, value in state().projections.items():
        assert torch.equal(after.projections[name], value)  # nobody moved them


def test_the_server_tunes_the_mean_proxies_and_leaves_the_bias():
    sites = site(0, [(1, 0)]), site(1, [(1, 1)] * 3)
    method = replace(BARE, tuning_epochs=2, tuning_batch=3, tuning_lr=0.1)
    after = method.round(state(), Seeded(*sites))
    # The clients' weights are (1/4, -1/4) and (-3/4, 3/4), their mean by size (-1/2, 1/2).
    rows = [torch.tensor([[a], [-a]]) for a in (-3 / 4, 1 / 4)]  # the larger client comes first
    expected = tuned(torch.tensor([[-1 / 2], [1 / 2]]), rows, 2, 3, 0.1, Rng("proxies"))
    weight, bias = values(after.model)
    assert weight == approx(expected.flatten().tolist())
    assert abs(weight[0] + 1 / 2) > 0.01
    assert bias == approx([math.log(3) - 1 / 2, 1 / 2])


def test_the_prior_is_a_moving_mean_of_what_clients_count():
    fed = Seeded(site(0, [(1, 0)] * 2), site(1, [(1, 1)] * 2 + [(1, 0)]))
    after = replace(BARE, decay=0.9).round(state(), fed)
    assert after.prior.tolist() == approx([0.9 / 2 + 0.1 * 3 / 5, 0.9 / 2 + 0.1 * 2 / 5])


def test_a_round_without_replies_changes_nothing():
    before = state()
    after = replace(BARE, tuning_epochs=5).round(before, Seeded(site(0, [(1, 0)]), silent=[0]))
    assert moved(Model(after.model)) == 0
    assert torch.equal(after.prior, before.prior)


def test_a_network_whose_last_matrix_is_no_classifier_is_refused():
    fed = Seeded(site(0, [(1, 0)]))
    fed.server = site(-1, [(1, 0)], network=nn.Sequential(nn.Flatten(), nn.Linear(1, 3)))
    with pytest.raises(BadInput, match="must be its classifier, with 2 rows, but it has 3"):
        BARE.init(fed)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"projections": {}}, "the projections must have the shapes"),
        ({"projections": projections(2, Rng("one"))}, "the projections must have the shapes"),
        ({"counts": torch.tensor([1.0, -1.0])}, "there must be 2 counts of images, none of them negative"),
        ({"counts": torch.ones(3)}, "there must be 2 counts of images"),
    ],
)
def test_an_upload_that_does_not_fit_the_network_is_refused(change, why):
    upload = Update(weights([0.0, 0.0]), projections(1, Rng("one")), torch.ones(2))
    upload.check(weights([0.0, 0.0]))
    with pytest.raises(ValueError, match=why):
        replace(upload, **change).check(weights([0.0, 0.0]))


def test_it_says_that_it_is_made_for_labels_at_every_client():
    [caution] = Experiment(method="proxyfl").cautions
    assert caution.startswith("proxyfl is made for labels at every client")
    whole = Experiment(method="proxyfl", labels=replace(Experiment().labels, at="every-client"))
    assert whole.cautions == []


def test_the_defaults_are_those_of_the_authors():
    assert METHODS["proxyfl"] == ProxyFL(
        threshold=0.95,
        weight_unlabeled=1.0,
        weight_contrast=1.0,
        decay=0.99,
        tuning_epochs=100,
        tuning_batch=4,
        tuning_lr=0.005,
        batch_unlabeled=256,
        epochs_unlabeled=None,
        local=Local(epochs=5, batch_size=128, lr=0.1, momentum=0.9, weight_decay=1e-4, clip=None),
    )
