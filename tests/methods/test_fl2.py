"""(FL)2 (Lee et al., NeurIPS 2024), worked out by hand on softmax regression.

The paper's parts are named as there: client-specific adaptive thresholding, sharpness-aware consistency
regularization, and learning status-aware aggregation.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fewlabel.core.federation import ClientInfo, Model, Reply
from fewlabel.learn.optim import Local
from fewlabel.methods import METHODS
from fewlabel.methods.fl2 import FL2, Update
from tests.hand import STEP, passes, site, values, weights
from tests.methods.test_rscfed import START, SUPERVISED, approx, moved, sigmoid
from tests.methods.test_semifl import AFTER, Served, state

# At START the network says (3/4, 1/4) of any image. All are seen as 1: a step towards label 0 moves a network by 1/4.
PLAIN = FL2(radius=0.0, global_momentum=0.0, local=STEP)
SLOPE = Model(weights([math.log(3), 0.0]))  # of x it says (3^x, 1) / (3^x + 1)


def used(method: FL2, *pixels: int, model: Model = SLOPE) -> list[int]:
    """The pixels that a client trains on."""
    one = site(0, unlabeled=pixels)
    method.local_update(one, model)
    return sorted(pixels[i] for index, _, _ in one.audited for i in index.tolist())


# Client-specific adaptive thresholding


def test_threshold_is_the_clients_mean_confidence():
    # The model is 3/4 sure of the image 1, 9/10 of 2 and 27/28 of 3.
    assert used(PLAIN, 1, 2) == [2]  # above (3/4 + 9/10) / 2
    assert used(PLAIN, 2, 3) == [3]  # where 2 is below the threshold
    update = PLAIN.local_update(site(0, unlabeled=[1, 2]), SLOPE)
    assert update.threshold == approx((3 / 4 + 9 / 10) / 2)


def test_threshold_is_lower_for_a_class_that_is_predicted_less():
    # The model is 27/28, 27/28 and 3/4 sure of 3, 3 and -1: 0.893 in the mean. Class 1 has a mean probability of
    # (1/28 + 1/28 + 3/4) / 3, class 0 of (27/28 + 27/28 + 1/4) / 3. So its threshold is 0.893 * 0.821 / 2.179 = 0.337.
    assert used(PLAIN, 3, 3, -1) == [-1, 3, 3]
    assert used(PLAIN, 3, 3, 1) == [3, 3]  # which is as sure, but of class 0


def test_one_threshold_for_all_is_an_ablation():
    assert used(replace(PLAIN, adaptive=False, threshold=0.8), 1, 2, 3) == [2, 3]
    assert used(replace(PLAIN, adaptive=False, threshold=0.99), 1, 2, 3) == []


def test_clients_without_unlabeled_images_skip_the_round():
    assert PLAIN.local_update(site(0, [(1, 0)]), START) is None


# The loss


def test_loss_is_cross_entropy_with_the_received_models_labels():
    one = site(0, unlabeled=[1, 1])
    seen = passes(one)
    method = replace(PLAIN, local=replace(STEP, epochs=2))
    assert moved(method.local_update(one, START)) == approx(SUPERVISED + AFTER)
    assert seen == [(False, 2), (True, 2), (True, 2)]  # labels once a round
    assert moved(replace(method, epochs_unlabeled=1).local_update(one, START)) == approx(SUPERVISED)


def perturbed(radius: float) -> float:
    """How much further SACR moves the network from START, by hand.

    The gradient of the cross-entropy is (-1/4, 1/4) for weights and biases. T is 0.01 for the weights, which are 0, and
    1 for the biases, so |T g| = 1/4 sqrt(2 + 2 * 0.01^2), and T^2 g is 1e-4 and 1 times g. The logits' difference falls
    by twice the sum of both steps. There the divergence from (3/4, 1/4) has the gradient p - 3/4.
    """
    step = radius * (1 + 1e-4) / math.sqrt(2 + 2e-4)
    return 3 / 4 - sigmoid(math.log(3) - 2 * step)


@pytest.mark.parametrize("radius", [0.1, 1.0])
def test_weights_nearby_must_predict_what_the_weights_predict(radius):
    method = replace(PLAIN, radius=radius, threshold=0.7)
    assert perturbed(radius) > 0.02
    assert moved(method.local_update(site(0, unlabeled=[1, 1]), START)) == approx(SUPERVISED + perturbed(radius))


def test_only_images_above_the_fixed_threshold_are_regularized():
    one = site(0, unlabeled=[1, 1])
    assert moved(replace(PLAIN, radius=1.0, threshold=0.8).local_update(one, START)) == approx(SUPERVISED)
    # Of the images 3 and -1, both of which are trained on, the first alone is above 0.9. It counts in the mean over
    # both. Its gradient is 1/28 * (-3, 3) for the weights ln 3 and 0, and 1/28 * (-1, 1) for the biases 0.
    large, small = math.log(3) + 0.01, 0.01
    norm = math.sqrt(9 * large**2 + 9 * small**2 + 2)
    fall = (3 * 3 * large**2 + 3 * 3 * small**2 + 2) / norm  # of the difference of its logits
    pull = (27 / 28 - sigmoid(3 * math.log(3) - fall)) / 2
    weight, bias = values(
        replace(PLAIN, radius=1.0, threshold=0.9).local_update(site(0, unlabeled=[3, -1]), SLOPE).model
    )
    # Cross-entropy alone: the image 3 pulls by 1/28 towards class 0, the image -1 by 1/4 towards class 1.
    assert weight[0] == approx(math.log(3) + (3 / 28 + 1 / 4) / 2 + 3 * pull)
    assert bias[0] == approx((1 / 28 - 1 / 4) / 2 + pull)


def test_the_pass_through_the_weights_nearby_counts_as_work():
    for radius, counted in ((0.0, 2), (0.1, 4)):
        one = site(0, unlabeled=[1, 1])
        one.unlabeled._tally = one.tally
        replace(PLAIN, radius=radius, threshold=0.7).local_update(one, START)
        assert one.tally.trained == [0, counted]


def test_the_pass_through_the_weights_nearby_leaves_batchnorm_statistics_alone():
    ends = []
    for radius in (0.0, 0.1):
        network = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(1), nn.Linear(1, 2))
        nn.init.constant_(network[2].weight, 0.1)
        network[2].bias.data.copy_(torch.tensor([0.3, 0.0]))  # drawn ones would leave out other images in each network
        one = site(0, unlabeled=[1, 3], network=network)
        start = Model({name: value.clone() for name, value in network.state_dict().items()})
        ends.append(replace(PLAIN, radius=radius, threshold=0.1).local_update(one, start).model)
    for name in ("1.running_mean", "1.running_var", "1.num_batches_tracked"):
        assert torch.equal(ends[0][name], ends[1][name])
    assert ends[0]["1.running_mean"].item() == approx(0.2)  # a tenth of the way to 2
    assert not torch.equal(ends[0]["2.bias"], ends[1]["2.bias"])


def test_with_the_recipe_classes_of_the_pseudo_labels_count_alike():
    one = site(0, unlabeled=[1, 1])
    one.unlabeled._balanced = 2  # priors 3/4 and 1/4
    assert moved(PLAIN.local_update(one, START)) == approx(1 / 10)  # 1 - 9/10, from 3 * 3 : 1


# Rounds


@pytest.mark.parametrize(("threshold", "weight"), [(0.75, 0.25), (0.5, 0.5), (1.0, 1e-6)])
def test_clients_that_are_less_sure_count_more(threshold, weight):
    reply = Reply(0, ClientInfo(0, 0, 30), Update({}, threshold))
    assert PLAIN.weight(reply) == approx(weight)
    assert replace(PLAIN, by_status=False).weight(reply) == 30


@pytest.mark.parametrize("threshold", [-0.1, 1.1])
def test_a_threshold_that_is_no_probability_is_refused(threshold):
    with pytest.raises(ValueError, match="a threshold must be between 0 and 1"):
        Update({}, threshold).check({})


def test_an_average_by_learning_status_is_fine_tuned_by_whoever_has_labels():
    # Client 0 is 3/4 sure of its images and counts 1/4; client 1 is 9/10 sure and counts 1/10.
    fed = Served(site(0, unlabeled=[1, 1]), site(1, unlabeled=[2, 2, 2, 2]))
    after = Model(PLAIN.round(state(SLOPE), fed).model)
    weight, bias = values(after.model)
    shares = [1 / 4 / (1 / 4 + 1 / 10), 1 / 10 / (1 / 4 + 1 / 10)]
    assert bias[0] == approx(shares[0] / 4 + shares[1] / 10)
    assert weight[0] == approx(math.log(3) + shares[0] / 4 + shares[1] * 2 / 10)


def test_clients_train_first_then_labeled_clients_then_the_server():
    fed = Served(site(0, [(1, 0)], [1, 1]), labeled=[(1, 0)])
    last = 1 - sigmoid(math.log(3) + 4 * (SUPERVISED + AFTER))
    assert moved(Model(PLAIN.round(state(), fed).model)) == approx(SUPERVISED + AFTER + last)
    assert fed.asked == [0, 0, -1]


def test_average_has_momentum():
    fed = Served(site(0, unlabeled=[1, 1]))
    method = replace(PLAIN, global_momentum=0.5)
    first = method.round(state(), fed)
    second = method.round(first, fed)
    assert moved(Model(second.model)) == approx(SUPERVISED + SUPERVISED / 2 + AFTER)


def test_the_defaults_are_those_of_the_authors():
    assert METHODS["fl2"] == FL2(
        adaptive=True,
        threshold=0.95,
        radius=0.1,
        by_status=True,
        global_momentum=0.5,
        batch_unlabeled=32,
        epochs_unlabeled=None,
        local=Local(epochs=5, batch_size=10, lr=0.03, momentum=0.9, weight_decay=5e-4, clip=1.0),
    )
