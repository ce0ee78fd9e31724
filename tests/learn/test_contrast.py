"""What networks learn by comparing images with each other, worked out by hand."""

import math

import pytest
import torch
from torch import nn

from fewlabel.core import tree
from fewlabel.core.errors import BadInput
from fewlabel.learn.contrast import PROJECTED, Projection, classifier, neighbourhood, nt_xent, with_features
from fewlabel.networks import MODELS, build


def rows(*values: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_nt_xent_is_the_cross_entropy_of_finding_the_other_view_among_all():
    # Two images with orthogonal projections: each view has cosine 1 with its other view, and 0 with both of the others.
    first, second = rows((1, 0), (0, 1)), rows((1, 0), (0, 1))
    assert nt_xent(first, second, 1.0).item() == pytest.approx(math.log(math.e + 2) - 1)
    assert nt_xent(first, second, 0.5).item() == pytest.approx(math.log(math.e**2 + 2) - 2)


def test_nt_xent_compares_angles_and_not_lengths():
    first, second = rows((3, 0), (0, 0.1)), rows((7, 0), (0, 2))
    assert nt_xent(first, second, 1.0).item() == pytest.approx(math.log(math.e + 2) - 1)


def test_nt_xent_of_views_that_are_mistaken_for_the_other_image_is_high():
    # The other view has cosine 0, one view of the other image 1, and the other 0.
    assert nt_xent(rows((1, 0), (0, 1)), rows((0, 1), (1, 0)), 1.0).item() == pytest.approx(math.log(math.e + 2))


def test_nt_xent_of_projections_that_are_all_alike_is_that_of_chance():
    same = torch.ones(3, 4)
    assert nt_xent(same, same, 0.07).item() == pytest.approx(math.log(5))  # of six views, five are others


def test_neighbourhood_is_the_squared_difference_of_cosines_as_a_mean_over_pairs():
    # Cosines 1/sqrt(2) and 0 of the two images; each image with itself has 1 in both.
    ours, theirs = rows((1, 1), (0, 1)), rows((1, 0), (0, 1))
    assert neighbourhood(ours, theirs).item() == pytest.approx(2 * (1 / 2) / 4)


def test_neighbourhood_ignores_turns_and_lengths_and_the_number_of_features():
    ours, theirs = rows((1, 0), (0, 1), (1, 1)), rows((0, 2, 0), (0, 0, -5), (0, 1, -1))
    assert neighbourhood(ours, theirs).item() == pytest.approx(0, abs=1e-12)


def test_neighbourhood_pulls_both_networks_and_a_feature_of_zero_does_no_harm():
    ours, theirs = rows((1, 1), (0, 0)).requires_grad_(), rows((1, 0), (1, 1)).requires_grad_()
    neighbourhood(ours, theirs).backward()
    for features in (ours, theirs):
        assert features.grad.isfinite().all()
        assert features.grad.any()


def test_features_are_what_the_last_linear_layer_gets():
    network = nn.Sequential(nn.Flatten(), nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 3))
    with torch.no_grad():
        network[1].weight[:], network[1].bias[:] = rows((2,), (-1,)), torch.tensor([1.0, 0.0])
    x = torch.tensor([3.0]).view(1, 1, 1, 1)
    features, logits = with_features(network, x)
    assert features.tolist() == [[7, 0]]  # 2 * 3 + 1, and relu(-3)
    assert torch.equal(logits, network(x))
    assert not network[3]._forward_pre_hooks  # nothing is left behind
    assert classifier(tree.of(network)) == "3.weight"


@pytest.mark.parametrize("name", sorted(MODELS))
def test_every_network_has_features_for_a_projection(name):
    if name in ("resnet18", "resnet18-cifar", "densenet121", "vit-tiny"):
        pytest.importorskip("torchvision", reason="these networks are torchvision's")
    size = 32
    network = build(name, 3, 5, size).eval()
    weights = tree.of(network)
    with torch.no_grad():
        features, logits = with_features(network, torch.zeros(2, 3, size, size))
    assert weights[classifier(weights)].shape == (5, features.shape[1])
    assert logits.shape == (2, 5)
    assert Projection(features.shape[1])(features).shape == (2, PROJECTED)


def test_a_network_without_a_linear_layer_is_refused_in_one_sentence():
    with pytest.raises(BadInput, match=r"but this one has none; set model\.name"):
        classifier(tree.of(nn.Conv2d(1, 2, 3)))


def test_the_projection_is_two_layers_with_a_relu_between():
    head = Projection(2)
    with torch.no_grad():
        for layer in (head.projection_hidden, head.projection_output):
            layer.weight.zero_()
            layer.bias.zero_()
        head.projection_hidden.weight[:] = rows((1, 0), (0, -1))
        head.projection_output.weight[:2] = rows((2, 3), (0, 1))
    assert head(rows((4, -5), (4, 5)))[:, :3].tolist() == [[23, 5, 0], [8, 0, 0]]
