"""Images must be normalised as the weights want that a run starts from, and the card must say how."""

import pytest

from fewlabel.engine.card import Card
from fewlabel.engine.sweep import own_code
from fewlabel.engine.world import dataset_of
from fewlabel.experiment import Data, Experiment, Net


def test_pretrained_weights_of_torchvision_get_imagenets_mean_and_std_in_every_split_and_on_the_card():
    experiment = Experiment(data=Data("digits", channels=3), model=Net("resnet18", pretrained=True))
    dataset = dataset_of(experiment)
    expected = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert {(split.images.mean, split.images.std) for split in dataset.splits.values()} == {expected}
    card = Card.of(experiment, dataset, "last", 1, None)
    assert (card.mean, card.std) == expected


def test_a_grey_image_gets_the_means_over_the_three_channels_that_it_stands_for():
    images = dataset_of(Experiment(model=Net("resnet18", pretrained=True))).splits["train"].images
    assert images.mean == pytest.approx((1.347 / 3,))
    assert images.std == pytest.approx((0.678 / 3,))


def test_weights_of_timm_get_their_own():
    pytest.importorskip("timm", reason="timm is not installed: pip install '.[timm]'")
    model = Net("timm:vit_tiny_patch16_224", pretrained=True)
    dataset = dataset_of(Experiment(data=Data("digits", image_size=32), model=model))
    assert (dataset.splits["train"].images.mean, dataset.splits["train"].images.std) == ((0.5,), (0.5,))


def test_networks_that_start_at_random_get_the_mean_and_std_of_the_data():
    plain, images = (dataset_of(Experiment(model=name)).splits["train"].images for name in ("simple-cnn", "resnet18"))
    assert (images.mean, images.std) == (plain.mean, plain.std)
    assert images.mean != (0.449,)


def test_timms_code_is_not_a_users_own():
    assert own_code(Experiment(model="timm:no_such_network")) == b""
