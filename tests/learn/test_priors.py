"""Shares of classes estimated from predictions, worked out by hand."""

import pytest
import torch

from fewlabel.learn.priors import adapted, explained, folds, kappa, mistaken

P = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.5, 0.5]])


def test_saerens_em_a_step_weighs_predictions_by_the_shares_estimated_so_far():
    q, prior = adapted(P, steps=1, smoothing=0.0)
    assert prior.tolist() == pytest.approx([0.7, 0.3])
    assert q[:, 0].tolist() == pytest.approx([28 / 31, 28 / 31, 0.7])  # 0.56 : 0.06 and 0.35 : 0.15
    q, again = adapted(P, steps=2, smoothing=0.0)
    mean = (28 / 31 + 28 / 31 + 0.7) / 3
    assert again.tolist() == pytest.approx([mean, 1 - mean])
    assert q[2].tolist() == pytest.approx([mean, 1 - mean])  # weighs p, not the predictions of the step before


def test_smoothing_keeps_a_little_of_every_class():
    q, prior = adapted(P, steps=1, smoothing=0.1)
    assert prior.tolist() == pytest.approx([0.68, 0.32])
    assert q[:, 0].tolist() == pytest.approx([17 / 19, 17 / 19, 0.68])
    only = torch.tensor([[1.0, 0.0]] * 5)
    assert adapted(only)[1].tolist() == pytest.approx([0.99, 0.01])


def test_without_steps_or_images_nothing_is_known_of_the_classes():
    assert torch.equal(adapted(P, steps=0)[0], P)
    assert adapted(P, steps=0)[1].tolist() == [0.5, 0.5]
    q, prior = adapted(P[:0])
    assert (len(q), prior.tolist()) == (0, [0.5, 0.5])


def test_em_finds_the_true_shares_of_predictions_that_are_right_for_equal_classes():
    # Two kinds of image, x = a with p(a | class) = 0.9, 0.3 and x = b with 0.1, 0.7. For equal classes p(0 | a) = 3/4
    # and p(0 | b) = 1/8. Of 1,000 images 80 % are of class 0: 780 are a, 220 are b.
    p = torch.tensor([[3 / 4, 1 / 4]] * 780 + [[1 / 8, 7 / 8]] * 220, dtype=torch.float64)
    assert adapted(p, steps=500, smoothing=0.0)[1].tolist() == pytest.approx([0.8, 0.2], abs=1e-6)


def test_folds_spread_the_labels_of_each_class_evenly():
    fold = folds(torch.tensor([1, 0, 1, 1, 0, 2]), 3)
    assert fold.tolist() == [2, 0, 0, 1, 1, 2]  # in order of classes: images 1 and 4, then 0, 2, 3, then 5


def test_mistakes_count_labels_by_what_they_are_taken_for():
    assert mistaken(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1]), 2).tolist() == [[1, 1], [0, 2]]


def test_shares_explain_predictions_by_known_mistakes():
    # Class 0 is always known, and class 1 is taken for it half of the time. If three of four images are predicted as
    # class 0, 3/4 = a + (1 - a) / 2, and so a = 1/2.
    mistakes = torch.tensor([[10**6, 5 * 10**5], [0, 5 * 10**5]])
    found = explained(torch.tensor([0.75, 0.25]), mistakes)
    assert found.tolist() == pytest.approx([0.5, 0.5], abs=1e-4)
    # One step from equal shares: predictions 0 are of class 0 like 1 : 1/2, predictions 1 always of class 1.
    step = explained(torch.tensor([0.75, 0.25]), mistakes, steps=1)
    assert step.tolist() == pytest.approx([0.75 * 2 / 3, 0.75 / 3 + 0.25], abs=1e-4)


def test_em_takes_200_steps_even_where_it_is_slow():
    # All images are predicted as class 0, and so are 99 % of class 1. A step divides the odds of class 1 by 1 / 0.99.
    mistakes = torch.tensor([[100, 99], [0, 1]])
    found = explained(torch.tensor([1.0, 0.0]), mistakes, smoothing=0.0)
    assert float(found[0]) == pytest.approx(1 / (1 + 0.99**200))


def test_few_labels_are_smoothed_by_what_is_usual():
    # Three of four labels are right. Class 1 has one label, which was wrong; with two more like all, it is right in
    # 1.5 of 3 cases, and class 0 in 4.5 of 5. Predictions like those of half and half: (0.9 + 0.5) / 2.
    mistakes = torch.tensor([[3, 1], [0, 0]])
    predicted = torch.tensor([(0.9 + 0.5) / 2, (0.1 + 0.5) / 2])
    assert explained(predicted, mistakes).tolist() == pytest.approx([0.5, 0.5], abs=1e-3)


def test_without_known_mistakes_predictions_are_taken_as_right():
    none = torch.zeros(2, 2, dtype=torch.int64)
    assert explained(torch.tensor([0.7, 0.3]), none).tolist() == pytest.approx([0.7, 0.3])


def test_kappa_is_how_much_of_what_chance_gets_wrong_is_right():
    # 90 of 100 right, where chance has 50; and where chance has 0.82 * 0.9 + 0.18 * 0.1 = 0.756.
    assert kappa(torch.tensor([[45, 5], [5, 45]])) == pytest.approx(0.8)
    assert kappa(torch.tensor([[81, 1], [9, 9]])) == pytest.approx((0.9 - 0.756) / (1 - 0.756))
    assert kappa(torch.tensor([[90, 10], [0, 0]])) == pytest.approx(0, abs=1e-12)  # always the same class
    # Where clients.largest_share bounds a site, its labels count in part.
    assert kappa(torch.tensor([[0.25, 0.0], [0.0, 0.25]])) == 1
    assert kappa(torch.tensor([[5, 0], [0, 0]])) == kappa(torch.zeros(2, 2)) == 0
