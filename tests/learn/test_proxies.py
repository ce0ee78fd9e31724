"""Class proxies, worked out by hand."""

import math

import pytest
import torch
from torch import nn

from fewlabel.core.rng import Rng
from fewlabel.learn.proxies import classifier, contrast, features, projections, tuned


def test_proxies_are_the_last_matrix_of_a_network():
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    assert classifier(net.state_dict()) == "4.weight"
    with pytest.raises(ValueError, match="has no class proxies"):
        classifier(nn.Conv2d(1, 4, 3).state_dict())


def test_features_are_what_the_classifier_gets():
    net = nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        net[0].bias.zero_()
    with features(net, "2.weight") as last:
        net(torch.tensor([[3.0]]))
        assert last().tolist() == [[3, 0]]
        net(torch.tensor([[-2.0]]))
        assert last().tolist() == [[0, 2]]
    net(torch.tensor([[5.0]]))
    assert last().tolist() == [[0, 2]]  # no longer watched


def test_projections_are_drawn_as_pytorch_draws_linear_layers():
    first = projections(4, Rng("one"))
    assert {name: tuple(value.shape) for name, value in first.items()} == {
        "project_features": (4, 4),
        "project_shift": (4,),
        "project_proxies": (4, 4),
    }
    assert all(value.abs().max() <= 1 / 2 for value in first.values())
    assert torch.equal(projections(4, Rng("one"))["project_shift"], first["project_shift"])


PROXIES = torch.tensor([[2.0, 0.0], [0.0, 3.0], [-1.0, 0.0]])  # of any length
PRIOR = torch.tensor([0.25, 0.25, 0.5])
A = (2.0, 0.0), (0.97, 0.03, 0.0), True  # surely of class 0
B = (0.6, 0.8), (0.2, 0.5, 0.3), False  # only class 1 is more likely than usual
C = (-1.0, 0.0), (0.0, 0.01, 0.99), True  # surely of class 2
D = (0.6, 0.8), (0.4, 0.6, 0.0), False  # of class 0 or 1


def losses(*images):
    points, p, sure = zip(*images, strict=True)
    return contrast(torch.tensor(points), PROXIES, torch.tensor(p), torch.tensor(sure), PRIOR).tolist()


def test_contrast_tells_the_proxy_of_a_class_from_images_of_other_classes():
    # The cosines of A and B with their proxies are 1 and 0.8, of which B's counts half. With each other it is 0.6.
    expected = [math.log(math.exp(1) + math.exp(0.6)) - 1, math.log(math.exp(0.4) + math.exp(0.6)) - 0.4]
    assert losses(A, B) == pytest.approx(expected)


def test_contrast_leaves_out_images_in_another_direction():
    assert losses(A, C) == pytest.approx([0, 0], abs=1e-6)  # a cosine of -1
    assert losses(A, B, C) == pytest.approx([*losses(A, B), 0], abs=1e-6)


def test_contrast_images_that_may_share_a_class_are_no_negatives():
    assert losses(A, D, B)[1] == pytest.approx(0, abs=1e-6)
    assert losses(A, D, B)[::2] == pytest.approx(losses(A, B))


def test_contrast_draws_an_undecided_image_to_several_proxies_by_their_probability():
    other = (0.6, 0.8), (0.0, 0.0, 1.0), True  # of class 2, in the same direction as D
    positive = 0.4 * 0.6 + 0.6 * 0.8
    assert losses(D, other)[0] == pytest.approx(math.log(math.exp(positive) + math.exp(1)) - positive)


def test_contrast_an_image_is_not_its_own_negative():
    usual = (0.6, 0.8), tuple(PRIOR.tolist()), False  # no class is more likely than usual
    assert losses(usual) == pytest.approx([0], abs=1e-6)


def test_tuning_moves_the_mean_proxies_until_they_tell_the_clients_apart():
    """One step at rate 1 on all four rows. The mean is (0, 2), so the margin is 2.

    Row 1 of class 0 has the distances (1, 1), with margin (3, 1): the probabilities are 1 - s and s = sigmoid(2). The
    distances' gradient is (s, -s), the proxies' (-s, -s). Row -1 has (3, 3): (1/2, -1/2) and (1/2, -1/2). Row 2 of
    class 1 has (2, 2), twice: (-1/2, 1/2) and (1/2, 0), because a distance of 0 has no slope.
    """
    mean = torch.tensor([[0.0], [2.0]])
    clients = [torch.tensor([[1.0], [2.0]]), torch.tensor([[-1.0], [2.0]])]
    s = 1 / (1 + math.exp(-2))
    moved = tuned(mean, clients, 1, 4, 1.0, Rng("proxies"))
    assert moved.flatten().tolist() == pytest.approx([-(1.5 - s) / 4, 2 + (0.5 + s) / 4])
    assert torch.equal(tuned(mean, clients, 0, 4, 1.0, Rng("proxies")), mean)


def test_tuning_takes_batches_in_an_order_of_its_own_and_leaves_the_mean_alone():
    mean, clients = torch.tensor([[0.0], [2.0]]), [torch.tensor([[1.0], [2.5]]), torch.tensor([[-1.0], [1.5]])]
    first, again, other = (tuned(mean, clients, 3, 1, 0.1, Rng(name)) for name in ("a", "a", "b"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert mean.tolist() == [[0], [2]]
    with torch.no_grad():
        assert torch.equal(tuned(mean, clients, 3, 1, 0.1, Rng("a")), first)
