"""Soft labels: wherever images have labels, these may be probabilities of the classes."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from fewlabel.learn.losses import adjusted, fixmatch, supervised
from tests.hand import site, weights

SOFT = torch.tensor([[0.75, 0.25], [0.5, 0.5]])


def test_images_with_soft_labels_come_in_batches_with_them():
    given = site(0, unlabeled=[4, 5, 6]).unlabeled.with_labels(torch.tensor([2, 0]), SOFT)
    [(x, y)] = given.batches("plain", shuffle=False)
    assert x.flatten().round().tolist() == [6, 4]
    assert torch.equal(y, SOFT)
    assert [y.shape for _, y in given.batches("weak", 1)] == [(2, 2)]  # one left over joins the batch before


def test_hard_and_soft_labels_join_as_soft_ones_in_either_order():
    one = site(0, [(1, 1)], [4, 5])
    soft = one.unlabeled.with_labels(torch.arange(2), SOFT)
    assert (one.labeled + soft).y.tolist() == [[0.0, 1.0], [0.75, 0.25], [0.5, 0.5]]
    assert (soft + one.labeled).y.tolist() == [[0.75, 0.25], [0.5, 0.5], [0.0, 1.0]]
    assert (soft + soft).y.shape == (4, 2)
    assert (one.labeled + one.labeled).y.tolist() == [1, 1]
    assert len(one.labeled + soft) == 3
    for _ in (one.labeled + soft).batches("weak", 3):
        pass
    assert one.tally.trained == [0, 0]  # the hand-made sets count for themselves


def test_the_prior_of_soft_labels_is_their_sum_with_one_image_more_of_each_class():
    one = site(0, [(1, 1)], [4, 5])
    one.labeled._balanced = one.unlabeled._balanced = 2
    soft = one.unlabeled.with_labels(torch.arange(2), SOFT)
    assert soft.log_prior.exp().tolist() == pytest.approx([2.25 / 4, 1.75 / 4])
    assert (one.labeled + soft).log_prior.exp().tolist() == pytest.approx([2.25 / 5, 2.75 / 5])


def test_the_supervised_loss_of_soft_labels_is_their_expected_cross_entropy():
    one = site(0, unlabeled=[1, 1])
    soft = one.unlabeled.with_labels(torch.arange(2), SOFT)
    model = one.load(weights([math.log(3), 0.0]))  # (3/4, 1/4) at x = 1
    [batch] = soft.batches("plain", shuffle=False)
    sure, unsure = math.log(4 / 3), math.log(4)
    expected = (0.75 * sure + 0.25 * unsure + 0.5 * sure + 0.5 * unsure) / 2
    assert supervised(model, soft, batch).item() == pytest.approx(expected)
    one.unlabeled._balanced = 2
    balanced = one.unlabeled.with_labels(torch.arange(2), SOFT)  # priors 2.25/4 and 1.75/4: odds 3 * 9/7 = 27/7
    sure, unsure = math.log(34 / 27), math.log(34 / 7)
    expected = (0.75 * sure + 0.25 * unsure + 0.5 * sure + 0.5 * unsure) / 2
    assert supervised(model, balanced, batch).item() == pytest.approx(expected)


def test_fixmatch_takes_soft_labels_and_one_hot_ones_are_hard():
    logits, hard = torch.tensor([[1.0, -1.0], [0.5, 2.0], [0.0, 0.0]]), torch.tensor([0, 0, 1])
    sure = torch.tensor([True, True, False])
    one_hot = torch.nn.functional.one_hot(hard, 2).float()
    assert fixmatch(logits, one_hot, sure).item() == pytest.approx(fixmatch(logits, hard, sure).item())
    assert adjusted(logits, None) is logits
    soft = torch.tensor([[0.5, 0.5]] * 3)
    assert fixmatch(logits, soft, sure).item() == pytest.approx(cross_entropy(logits[:2], soft[:2]).item() * 2 / 3)


def test_an_audit_scores_the_most_likely_class_of_soft_labels():
    one = site(0, unlabeled=[4, 5])
    one.audit(torch.arange(2), torch.tensor([[0.25, 0.75], [0.9, 0.1]]), 3)
    [(index, label, epoch)] = one.audited
    assert (index.tolist(), label.tolist(), epoch) == ([0, 1], [1, 0], 3)
