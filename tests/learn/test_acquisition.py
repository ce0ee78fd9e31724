"""Which images to label next: expected values worked out by hand."""

import math

import pytest
import torch

from fewlabel.core.errors import BadInput
from fewlabel.core.rng import Rng
from fewlabel.learn.acquisition import (
    STRATEGIES,
    Seen,
    badge,
    choose,
    k_center,
    least_certain,
    rarity,
    small_margin,
)


def test_least_certain_is_one_minus_the_largest_probability():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]])
    assert least_certain(p).tolist() == pytest.approx([0.3, 0.6])


def test_the_margin_is_between_the_two_most_likely_classes():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]])
    assert small_margin(p).tolist() == pytest.approx([1 - 0.5, 1 - 0.05])


def test_least_certain_and_margin_may_disagree():
    # Image 0: 1 - 0.5 = 0.5, margin 0.5 - 0.48. Image 1: 1 - 0.45 = 0.55, margin 0.45 - 0.30.
    p = torch.tensor([[0.50, 0.48, 0.02], [0.45, 0.30, 0.25]])
    even = [100_000, 100_000, 100_000]  # so many labels of each class that rarity is the same for both images
    seen = Seen(p, torch.zeros(2, 1))
    assert choose("least-certain", 1, seen, Rng(0), even) == [1]
    assert choose("margin", 1, seen, Rng(0), even) == [0]


def test_rarity_adds_up_probabilities_over_the_roots_of_what_is_there():
    # Labels 7 and 0, predicted 1 + 0 and 0 + 1 (two sure images): 1 + 7 + 1 = 9 and 1 + 0 + 1 = 2.
    sure = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert rarity(sure, [7, 0]).tolist() == pytest.approx([1 / 3, 1 / math.sqrt(2)])
    # Both half and half: 1 + 7 + 1 = 9 and 1 + 0 + 1 = 2 again, and each image has half of both.
    half = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    assert rarity(half, [7, 0]).tolist() == pytest.approx([0.5 / 3 + 0.5 / math.sqrt(2)] * 2)


def test_of_two_images_as_uncertain_the_one_of_a_rare_class_comes_first():
    p = torch.tensor([[0.6, 0.4, 0.0], [0.0, 0.4, 0.6]])
    seen = Seen(p, torch.ones(2, 1))
    for strategy in ("least-certain", "margin"):
        assert choose(strategy, 2, seen, Rng(0), [50, 5, 0]) == [1, 0]
        assert choose(strategy, 2, seen, Rng(0), [0, 5, 50]) == [0, 1]


def test_k_center_takes_the_farthest_image_each_time():
    # On a line at 0, 1, 4, 10 with a labeled image at 0: the farthest is 10; then 4 is 4 from 0 and 6 from 10: 4.
    # Then 1 is 1 from 0, and 0 is 0 away.
    features, even = torch.tensor([[0.0], [1.0], [4.0], [10.0]]), torch.ones(4)
    assert k_center(features, 3, even, torch.tensor([[0.0]])) == [3, 2, 1]


def test_k_center_without_labels_begins_near_the_mean():
    # The mean of 0, 1, 4, 10 is 3.75: 4 is nearest. Then 10 is 6 away, 0 is 4: 10, and then 0.
    features, even = torch.tensor([[0.0], [1.0], [4.0], [10.0]]), torch.ones(4)
    assert k_center(features, 3, even) == [2, 3, 0]


def test_k_center_weighs_distances():
    # 10 is 10 away with weight 0.1, so 1; 4 is 4 away with weight 1.
    features = torch.tensor([[4.0], [10.0]])
    assert k_center(features, 1, torch.tensor([1.0, 0.1]), torch.tensor([[0.0]])) == [0]


def test_k_center_takes_copies_last_and_no_image_twice():
    features = torch.tensor([[1.0], [1.0], [2.0]])
    assert sorted(k_center(features, 9, torch.ones(3))) == [0, 1, 2]


def test_badge_never_draws_what_the_model_is_sure_of_while_others_are_left():
    # p = (1, 0) has the gradient 0, so its chance is 0; the other two have errors (-0.5, 0.5).
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.5, 0.5]]).double()
    features = torch.tensor([[9.0, 9.0], [1.0, 0.0], [0.0, 1.0]]).double()
    for seed in range(10):
        assert set(badge(p, features, 2, torch.ones(3), Rng(seed))) == {1, 2}
        assert badge(p, features, 3, torch.ones(3), Rng(seed))[-1] == 0


def test_badge_draws_no_copy_of_what_was_drawn_while_others_are_left():
    # Images 0 and 1 are the same. Whichever is drawn, the other is 0 away, and image 2 is not: 2 is always among two.
    p = torch.full((3, 2), 0.5).double()
    features = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double()
    for seed in range(10):
        assert 2 in badge(p, features, 2, torch.ones(3), Rng(seed))


def test_badge_draws_first_in_proportion_to_the_squared_gradient_times_the_weight():
    # Errors (-0.5, 0.5) for both; features 1 and 2: squared norms 0.5 and 2; weights 2 and 1: chances 1 : 2.
    p, features = torch.full((2, 2), 0.5).double(), torch.tensor([[1.0], [2.0]]).double()
    weight = torch.tensor([2.0, 1.0]).double()
    first = [badge(p, features, 1, weight, Rng("draw", seed))[0] for seed in range(3000)]
    assert sum(first) / 3000 == pytest.approx(2 / 3, abs=0.03)  # the same seeds each time: no chance involved


def test_distances_of_gradients_are_those_of_the_whole_matrices():
    # badge() must draw as k-means++ does on the gradients written out: p has errors a, features h, and g = a h^T.
    torch.manual_seed(0)
    p, features = torch.rand(6, 3).softmax(1).double(), torch.rand(6, 4).double()
    error = p - torch.nn.functional.one_hot(p.argmax(1), 3)
    whole = (error[:, :, None] * features[:, None, :]).flatten(1)
    draws, nearest, chosen = Rng(5).numpy, whole.square().sum(1), []
    for _ in range(4):
        ends = nearest.cumsum(0)
        chosen.append(int(torch.searchsorted(ends, draws.random() * float(ends[-1]), right=True)))
        nearest = torch.minimum(nearest, (whole - whole[chosen[-1]]).square().sum(1))
        nearest[chosen] = 0
    assert badge(p, features, 4, torch.ones(6).double(), Rng(5)) == chosen


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_gives_each_image_at_most_once_and_the_same_for_the_same_seed(strategy):
    torch.manual_seed(1)
    seen = Seen(torch.rand(40, 5).softmax(1), torch.rand(40, 8))
    chosen = choose(strategy, 15, seen, Rng(3))
    assert len(set(chosen)) == 15
    assert set(chosen) <= set(range(40))
    assert chosen == choose(strategy, 15, seen, Rng(3))
    assert len(choose(strategy, 99, seen, Rng(3))) == 40


def test_random_takes_no_notice_of_the_model():
    one, other = Seen(torch.eye(9), torch.eye(9)), Seen(torch.full((9, 9), 1 / 9), torch.zeros(9, 9))
    assert choose("random", 5, one, Rng(0)) == choose("random", 5, other, Rng(0))
    assert choose("random", 5, one, Rng(0)) != choose("random", 5, one, Rng(1))


def test_an_unknown_strategy_is_a_sentence():
    with pytest.raises(BadInput, match=r"'margins'.*margin"):
        choose("margins", 1, Seen(torch.eye(2), torch.eye(2)), Rng(0))
