"""Labels that a site holds out: of all its classes, never trained on, drawn by the seed alone, and off by default."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fewlabel.core.errors import BadInput
from fewlabel.core.rng import Rng
from fewlabel.data.labels import held_out
from fewlabel.data.partition import Holding, Partition
from fewlabel.engine.executor import SERVER_ID
from fewlabel.engine.run import prepare
from fewlabel.engine.world import World
from fewlabel.experiment import Clients, Data, Experiment, Labels, Stream


def world(tmp_path, share=0.25, **more) -> World:
    whole = {
        "rounds": 4,
        "data": Data("digits", image_size=16),
        "clients": Clients(count=4),
        "labels": Labels(clients=2, held_out=share),
    }
    return World.open(prepare(Experiment(**whole | more), tmp_path / f"run-{len(list(tmp_path.iterdir()))}"))


def site(world: World, client: int, round: int = 1):
    return world.site(client, round, Rng("test"), torch.nn.Identity())


def test_every_class_is_held_out_in_its_share_and_two_labels_are_kept():
    y = np.array([0] * 82 + [1] * 40)  # two of them, whichever, are kept: 120 are left, of which a quarter is drawn
    drawn = held_out(y, 0.25, Rng("a"))
    assert len(drawn) == len(set(drawn.tolist())) == 30  # round(0.25 * 122), to the even neighbour
    assert np.bincount(y[drawn]).tolist() in ([20, 10], [21, 9])
    assert held_out(y, 0.25, Rng("a")).tolist() == drawn.tolist() == sorted(drawn)
    assert held_out(y, 0.25, Rng("b")).tolist() != drawn.tolist()
    assert [len(held_out(y[:n], 0.9, Rng("a"))) for n in (0, 1, 2, 3, 10)] == [0, 0, 0, 1, 8]


def test_how_many_are_held_out_depends_only_on_how_many_there_are():
    for n in range(40):
        assert len(held_out(np.arange(n) % 7, 0.3, Rng("a"))) == len(held_out(np.zeros(n, int), 0.3, Rng("b")))


def test_a_site_shows_what_it_holds_out_and_trains_on_the_rest(tmp_path):
    before, after = world(tmp_path, 0.0), world(tmp_path, 0.25)
    assert before.partition.checksum == after.partition.checksum
    for client in range(4):
        whole, part = site(before, client), site(after, client)
        assert whole.held_out is None
        if whole.labeled is None:
            assert part.held_out is None
            continue
        aside = set(part.held_out._where.tolist())
        assert len(aside) == round(0.25 * len(whole.labeled))
        kept = [image for image in whole.labeled._where.tolist() if image not in aside]
        assert part.labeled._where.tolist() == kept  # in the same order
        assert part.info == after.info(client, 1)
        assert part.info.num_labeled == len(kept)
        truth = after.dataset.splits["train"].labels
        assert torch.equal(part.held_out.y, truth[part.held_out._where])
        counts = [torch.bincount(images.y, minlength=10) for images in (part.held_out, whole.labeled)]
        assert (counts[0] - 0.25 * counts[1]).abs().max() < 1.5  # two labels are kept at any rate
        for _ in part.held_out.batches("plain"):
            pass
        assert part.tally.trained[0] == 0  # looking at it is no training


def test_the_same_labels_are_held_out_in_every_round_and_other_ones_with_another_seed(tmp_path):
    one, other = world(tmp_path), world(tmp_path, seed=1)
    held = [site(one, 0, number).held_out._where.tolist() for number in (1, 2, 4)]
    assert held[0] == held[1] == held[2]
    assert held[0] != site(other, 0).held_out._where.tolist()


def test_the_server_holds_out_labels_of_its_own(tmp_path):
    here = world(tmp_path, labels=Labels(at="server", per_class=8, held_out=0.25))
    server = site(here, SERVER_ID)
    assert (len(server.labeled), len(server.held_out)) == (60, 20)
    assert site(here, 0).held_out is None


def test_labels_that_are_wrong_on_purpose_are_held_out_as_the_site_knows_them(tmp_path):
    here = world(tmp_path, labels=Labels(clients=1, held_out=0.5, noise=0.5))
    aside = site(here, 0).held_out
    assert torch.equal(aside.y, here.known_labels[aside._where])
    assert not torch.equal(aside.y, here.dataset.splits["train"].labels[aside._where])


def test_where_labels_stream_so_do_those_that_are_held_out(tmp_path):
    stream = Stream(steps=2, rounds=2, mode="grow", data="all")
    here = world(tmp_path, stream=stream)
    first, last = site(here, 0, 1), site(here, 0, 3)
    assert set(first.held_out._where.tolist()) < set(last.held_out._where.tolist())
    assert len(last.held_out) == len(here.divided(0)[1])
    assert not set(last.held_out._where.tolist()) & set(last.labeled._where.tolist())


def test_a_patient_is_not_held_out_and_trained_on(tmp_path):
    here = world(tmp_path)
    drawn = here.divided(0)[1]
    train = here.dataset.splits["train"]
    pairs = replace(train, groups=torch.arange(len(train)) // 8)
    here = replace(here, dataset=replace(here.dataset, splits=here.dataset.splits | {"train": pairs}))
    kept, aside = here.divided(0)
    assert len(kept) == here.info(0, 1).num_labeled
    assert not set((kept // 8).tolist()) & set((aside // 8).tolist())
    assert 0 < len(aside) < len(drawn)


def test_of_images_elsewhere_a_server_knows_how_many_are_trained_on(tmp_path):
    here = world(tmp_path)
    sizes = [(len(one.labeled), len(one.unlabeled)) for one in here.partition.shares]
    elsewhere = tuple(Holding(*(np.full(n, -1) for n in pair)) for pair in sizes)
    there = replace(here, partition=Partition(elsewhere, here.partition.server))
    assert [there.info(client, 1) for client in range(4)] == [here.info(client, 1) for client in range(4)]


def test_a_share_of_1_leaves_nothing_to_train_on():
    with pytest.raises(BadInput, match=r"labels\.held_out"):
        Experiment(labels=Labels(held_out=1.0))
