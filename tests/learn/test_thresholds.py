"""Thresholds that adapt to a network, worked out by hand."""

import pytest
import torch

from fewlabel.core import wire
from fewlabel.learn.thresholds import SelfAdaptive, flexible, select


def two(*first: float) -> torch.Tensor:
    """Predictions for two classes."""
    return torch.tensor([[p, 1 - p] for p in first])


def test_flexmatch_lowers_the_threshold_of_classes_that_are_learned_less():
    # Above 0.8 are four images of class 0 and two of class 1, and one of none: shares 4/4 and 2/4, M(1/2) = 1/3.
    p = two(0.9, 0.9, 0.95, 0.85, 0.1, 0.05, 0.5)
    assert flexible(p, 0.8).tolist() == pytest.approx([0.8, 0.8 / 3])
    index, label = select(p, flexible(p, 0.8))
    assert (index.tolist(), label.tolist()) == ([0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 1])


def test_flexmatch_warms_up_while_most_images_are_unsure():
    # Six images are unsure, more than any class has: shares 1/6 and 1/6, M(1/6) = 1/11.
    p = two(0.9, 0.1, *[0.5] * 6)
    assert flexible(p, 0.8).tolist() == pytest.approx([0.8 / 11] * 2)
    assert flexible(two(0.5, 0.6), 0.8).tolist() == [0, 0]
    assert flexible(p[:0], 0.8).tolist() == [0, 0]


def test_freematch_eq_5_6_7_thresholds_follow_confidence_and_shares():
    start = SelfAdaptive.start(2)
    assert start.thresholds.tolist() == [0.5, 0.5]
    # The largest probabilities are 0.9, 0.7 and 0.8, in the mean 0.8; the classes' means are 0.8 and 0.2.
    after = start.after(two(0.9, 0.7, 0.8), decay=0.75)
    assert after.confidence == pytest.approx(0.75 * 0.5 + 0.25 * 0.8)  # 0.575
    assert after.shares.tolist() == pytest.approx([0.575, 0.425])
    assert after.thresholds.tolist() == pytest.approx([0.575, 0.425])  # 0.425 / 0.575 * 0.575
    again = after.after(two(0.9, 0.1), decay=0.0)
    assert again.thresholds.tolist() == pytest.approx([0.9, 0.9])
    assert start.confidence == 0.5  # nothing was changed in place


def test_a_site_can_keep_freematchs_thresholds_between_rounds():
    kept = SelfAdaptive.start(3).after(torch.tensor([[0.5, 0.25, 0.25]]))
    found = wire.unpack(SelfAdaptive, wire.pack(kept))
    assert found.confidence == kept.confidence
    assert torch.equal(found.shares, kept.shares)
