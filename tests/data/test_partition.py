"""Images must be dealt out as the papers do it, each to one place, and labels be just where they are said to be."""

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.rng import Rng
from fewlabel.data import partition as partitions
from fewlabel.data.labels import by_rule
from fewlabel.data.partition import PARTITIONS, Holding, Partition, arrived, deal, dirichlet, pattern, shards
from fewlabel.experiment import Clients, Experiment, Labels, Stream, read
from tests.keeper import Keeper

DRAWN = [name for name, (draw, _) in PARTITIONS.items() if draw]

# Partitions

Y = np.random.Generator(np.random.PCG64(0)).permutation(np.repeat(np.arange(10), 120))


def every(partition: Partition) -> np.ndarray:
    return np.concatenate([partition.server, partition.validation, *(share.images for share in partition.shares)])


def histogram(y: np.ndarray, parts: list[np.ndarray]) -> np.ndarray:
    return np.stack([np.bincount(y[part], minlength=y.max() + 1) for part in parts])


@pytest.mark.parametrize("at", ["some-clients", "every-client", "server", "some-clients+every-client+server"])
@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("seed", [0, 1])
def test_every_image_is_dealt_to_just_one_place(at, kind, seed):
    clients = Clients(count=8, partition=kind, min_size=20)
    partition = deal(Y, clients, Labels(at=at, server_per_class=3, validation=0.1), seed)
    assert np.array_equal(np.sort(every(partition)), np.arange(len(Y)))
    assert len(partition.shares) == 8
    assert min(map(len, partition.shares)) >= 18  # a labeled client of 20 gives two to validation


def test_iid_parts_differ_by_one_image_at_most():
    partition = deal(Y[:1003], Clients(count=8, partition="iid"), Labels(), 0)
    assert sorted(len(s.labeled) + len(s.unlabeled) for s in partition.shares) == [125] * 5 + [126] * 3


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.8, 10.0])
@pytest.mark.parametrize("seed", range(5))
def test_a_client_with_its_fair_share_gets_nothing_of_the_next_classes(alpha, seed):
    clients = Clients(count=7, alpha=alpha, min_size=1)
    table = histogram(Y, dirichlet(Y, clients, Rng(seed)))
    fair = len(Y) / 7
    before = np.cumsum(table, axis=1) - table  # what a client held when a class was dealt out
    assert (table[before >= fair] == 0).all()
    assert (before >= fair).any()  # or the rule was not put to the test


class Draws:
    """A stream whose Dirichlet draws are these, and which leaves all else in its order."""

    def __init__(self, *shares: object) -> None:
        self.numpy, self._shares = self, iter(shares)

    def permutation(self, index: np.ndarray) -> np.ndarray:
        return index

    def dirichlet(self, alpha: np.ndarray) -> object:
        return next(self._shares)


def test_rounding_gives_nothing_to_a_client_with_its_fair_share():
    # Ten tenths of what the ten others may take add up to just below 1, and 600 times that is 599 and a last image.
    tenths = np.append(np.full(10, 0.1), 0)
    assert int(np.cumsum(tenths / tenths.sum())[9] * 600) == 599
    y = np.repeat([0, 1], [60, 600])
    # The last of eleven clients takes all of class 0; of class 1 all would take the same.
    table = histogram(y, dirichlet(y, Clients(count=11, min_size=1), Draws(np.eye(11)[10], np.full(11, 0.1))))
    assert table[10].tolist() == [60, 0]
    assert table[:10, 1].sum() == 600


def test_without_the_rule_clients_may_grow_beyond_their_fair_share():
    clients = Clients(count=5, alpha=0.2, balanced=False, min_size=1)
    tables = [histogram(Y, dirichlet(Y, clients, Rng(seed))) for seed in range(5)]
    fair = len(Y) / 5
    assert any((t[np.cumsum(t, axis=1) - t >= fair] > 0).any() for t in tables)


def test_a_share_too_small_for_a_number_still_deals_the_class_to_those_who_may_have_it():
    # Dirichlet(1e-5) gives all of a class to one client, and to the rest exactly nothing.
    clients = Clients(count=4, alpha=1e-5, min_size=1)
    table = histogram(Y, dirichlet(Y, clients, Rng(0)))
    before = np.cumsum(table, axis=1) - table
    assert table.sum() == len(Y)
    assert (table[before >= len(Y) / 4] == 0).all()


def test_a_smaller_alpha_makes_clients_more_different():
    def largest_class(alpha: float) -> float:
        tables = [histogram(Y, dirichlet(Y, Clients(count=5, alpha=alpha, min_size=1), Rng(s))) for s in range(10)]
        return float(np.mean([(t.max(axis=1) / t.sum(axis=1)).mean() for t in tables]))

    often, sometimes, rarely = largest_class(0.05), largest_class(0.8), largest_class(100.0)
    assert often > sometimes + 0.1
    assert sometimes > rarely + 0.05
    assert rarely < 0.2  # of ten classes, each has about a tenth


def test_classes_need_not_be_there_or_be_numbered_without_gaps():
    y = np.repeat([2, 5, 9], [30, 1, 29])
    assert np.array_equal(np.sort(every(deal(y, Clients(count=3, min_size=5), Labels(), 0))), np.arange(60))


def test_a_request_that_cannot_be_met_says_what_to_change():
    with pytest.raises(BadInput, match="13 clients of at least 100 images need more than the 1200 there are; lower"):
        deal(Y, Clients(count=13, min_size=100), Labels(), 0)
    with pytest.raises(BadInput, match=r"no Dirichlet\(0.001\) partition of 1200 images gives each of 20 clients 50"):
        deal(Y, Clients(count=20, min_size=50, alpha=0.001), Labels(), 0)


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("at", ["some-clients", "every-client", "server"])
def test_the_seed_alone_decides_who_gets_what(kind, at):
    def checksum(seed: int) -> str:
        return deal(Y, Clients(partition=kind), Labels(at=at), seed).checksum

    assert checksum(3) == checksum(3)
    assert checksum(3) != checksum(4)


@pytest.mark.parametrize("kind", DRAWN)
@pytest.mark.parametrize("labels", [Labels("every-client", fraction=0.5), Labels(clients=4, validation=0.1)])
def test_the_order_of_a_share_tells_nothing_of_its_classes(kind, labels):
    y = np.sort(Y)
    partition, again = (deal(y, Clients(count=8, partition=kind, min_size=40), labels, 0) for _ in range(2))
    assert partition.checksum == again.checksum
    parts = [part for share in partition.shares for part in (share.labeled, share.unlabeled) if len(part)]
    assert len(parts) == (16 if labels.at == "every-client" else 8)
    for part in parts:
        unlike = 1 - ((np.bincount(y[part]) / len(part)) ** 2).sum()  # how often two of them differ in class
        changes = sum(a != b for a, b in pairwise(y[part]))
        assert changes > unlike * len(part) / 2  # in order of class, at most nine


def test_of_each_class_every_client_gets_as_many_and_the_rest_is_spread():
    y = np.repeat([0, 1, 2], [8, 9, 6])
    table = histogram(y, partitions.iid_per_class(y, Clients(count=4), Rng(0)))
    # 8 = 2 each; 9 = 2 each and one for client 0; 6 = 1 each and, going on from there, one for clients 1 and 2.
    assert table.tolist() == [[2, 3, 1], [2, 2, 2], [2, 2, 2], [2, 2, 1]]


def test_shards_are_equal_pieces_of_the_images_sorted_by_class():
    # 4 classes of 6, in shards of 3: none crosses a class, so each client has two threes, of one class or of two.
    y = np.tile(np.arange(4), 6)
    table = histogram(y, shards(y, Clients(count=4), Rng(0)))
    assert (table.sum(axis=1) == 6).all()
    assert set(table.flatten().tolist()) <= {0, 3, 6}
    assert table.sum(axis=0).tolist() == [6] * 4
    for each in (1, 3):  # McMahan's two are the default
        parts = shards(Y, Clients(count=10, shards=each), Rng(0))
        assert max(len(np.unique(Y[part])) for part in parts) <= 2 * each


def test_the_fedmatch_pattern_is_the_authors_for_ten_classes():
    first = [0.50, 0.15, 0.03, 0.03, 0.03, 0.02, 0.03, 0.03, 0.03, 0.15]
    found = pattern(10)
    assert found[0] == pytest.approx(first)
    assert found[3] == pytest.approx(first[-3:] + first[:-3])
    assert found.sum(axis=0) == pytest.approx(1)  # no class is wanted more than another


def test_the_fedmatch_pattern_for_other_numbers_of_classes():
    hundred = pattern(100)[7]
    assert hundred[[7, 6, 8]] == pytest.approx([0.50, 0.15, 0.15])
    # The 97 others share 0.20: 96 with 3 parts each and the opposite one with 2.
    assert hundred[57] == pytest.approx(0.20 * 2 / 290)
    assert hundred[30] == pytest.approx(0.20 * 3 / 290)
    # With fewer than ten, what stays of the numbers is scaled to 1; neighbours may be one and the same.
    assert pattern(4)[0] == pytest.approx(np.array([50, 15, 2, 15]) / 82)
    assert pattern(3)[1] == pytest.approx(np.array([15, 50, 15]) / 80)
    assert pattern(2)[1] == pytest.approx(np.array([30, 50]) / 80)
    assert pattern(1).tolist() == [[1.0]]
    for classes in range(1, 40):
        assert pattern(classes).sum(axis=1) == pytest.approx(1)


@pytest.mark.parametrize("count", [10, 20])
def test_a_fedmatch_client_has_the_classes_of_its_type(count):
    y = np.tile(np.arange(10), 1000)
    table = histogram(y, partitions.fedmatch(y, Clients(count=count), Rng(0)))
    for client in range(count):
        assert table[client] == pytest.approx(pattern(10)[client % 10] * 10_000 / count, abs=1)


# The papers' sets: SVHN's 73,257 digits and ISIC's 8,012 images by class, and CIFAR-100.
PAPERS = {
    "svhn": np.repeat(np.arange(10), [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659]),
    "cifar100": np.repeat(np.arange(100), 500),
    "isic": np.repeat(np.arange(7), [262, 411, 879, 92, 890, 5364, 114]),
}


@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize(("name", "size"), [("svhn", 73_257), ("cifar100", 50_000), ("isic", 8_012)])
def test_the_papers_partitions_have_the_papers_properties(name, size, balanced):
    y = PAPERS[name]
    for seed in range(3):
        partition = deal(y, Clients(alpha=0.8, balanced=balanced), Labels(which="rule"), seed)
        sizes = np.array(list(map(len, partition.shares)))
        assert sizes.sum() == size == len(y)
        assert np.array_equal(np.sort(every(partition)), np.arange(size))
        assert sizes.min() >= 10
        (chosen,) = [number for number, share in enumerate(partition.shares) if len(share.labeled)]
        assert len(partition.shares[chosen].unlabeled) == 0
        held = [len(np.unique(y[share.images])) for share in partition.shares]
        assert held[chosen] == max(held)
        away = abs(sizes - size / 10)
        assert away[chosen] == min(away[n] for n in range(10) if held[n] == max(held))


def test_all_hundred_classes_are_dealt_out_of_cifar100():
    # The authors' code deals out classes 0 to 9, 5,000 images: 3.57 % instead of 15.57 % for whoever let it.
    table = histogram(PAPERS["cifar100"], [s.images for s in deal(PAPERS["cifar100"], Clients(), Labels(), 0).shares])
    assert table.sum(axis=0).tolist() == [500] * 100
    assert table.sum(axis=1).max() < 1.1 * 5000  # the balancing rule makes sizes even where classes are many


def dataset(y: np.ndarray, clients: object = None, **splits: object) -> SimpleNamespace:
    """As much of a data set as dealing it out looks at."""
    train = SimpleNamespace(labels=torch.from_numpy(y), clients=clients)
    classes = tuple(map(str, range(int(y.max()) + 1)))
    return SimpleNamespace(name="mine", digest="d1", classes=classes, splits={"train": train, **splits})


def test_a_column_makes_a_client_of_each_of_its_values():
    experiment = Experiment(clients=Clients(count=3, partition="by-column", min_size=1))
    found = partitions.of(dataset(np.arange(8) % 2, np.array([*"bacbaab", ""])), experiment)
    assert [sorted(share.images.tolist()) for share in found.shares] == [[1, 4, 5], [0, 3, 6], [2]]
    assert found.data == "d1"
    named = replace(experiment, clients=Clients(count=2, partition="by-column", min_size=2, column="ward"))
    columns = {"hospital": np.arange(7), "ward": np.array([7, 9, 7, 9, 7, 9, 7])}
    found = partitions.of(dataset(np.arange(7) % 2, columns), named)
    assert [sorted(share.images.tolist()) for share in found.shares] == [[0, 2, 4, 6], [1, 3, 5]]


@pytest.mark.parametrize(
    ("columns", "settings", "sentence"),
    [
        (None, {}, "'mine' does not say which client holds an image; choose another clients.partition"),
        ({}, {}, "'mine' does not say which client holds an image"),
        (np.arange(6) % 3, {"column": "ward"}, "'mine' has no column 'ward'; clients.column may be left out"),
        ({"ward": np.arange(6)}, {"column": "wrd"}, "'mine' has no column 'wrd'; clients.column may be ward"),
        (np.arange(6) % 3, {"count": 4}, "by-column gives 3 clients; set clients.count to that number"),
        (np.arange(6) // 5, {"count": 2}, "client 1 has 1 images and clients.min_size is 2; lower it"),
    ],
)
def test_a_column_that_cannot_be_used_is_refused_in_a_sentence(columns, settings, sentence):
    clients = Clients(**{"count": 3, "partition": "by-column", "min_size": 2, **settings})
    with pytest.raises(BadInput, match=sentence):
        partitions.of(dataset(np.arange(6) % 2, columns), Experiment(clients=clients))


def test_clients_of_a_column_come_in_their_natural_order_and_minus_one_is_nobodys():
    experiment = Experiment(clients=Clients(count=4, partition="by-column", min_size=1))
    for names in (["h10", "h2", "", "h1", "h0"], [10, 2, -1, 1, 0], ["10", "2", "-1", "1", "0"]):
        found = partitions.of(dataset(np.arange(5) % 2, np.array(names)), experiment)
        assert [share.images.tolist() for share in found.shares] == [[4], [3], [1], [0]]


@pytest.mark.parametrize("kind", DRAWN)
def test_where_the_server_takes_all_named_labels_the_rest_is_dealt_to_all_alike(kind):
    y = np.repeat([0, 1, -1], [5, 5, 40])
    found = deal(y, Clients(count=4, partition=kind), Labels("server", per_class=5), 0)
    assert found.server.tolist() == list(range(10))
    assert [len(share) for share in found.shares] == [10] * 4


def test_a_client_is_large_enough_with_its_images_of_no_known_class():
    y = np.repeat([0, 1, -1], [4, 4, 40])
    found = deal(
        y, Clients(count=4, min_size=10), Labels(), 0
    )  # ten unnamed images each; of the eight others none must
    assert min(map(len, found.shares)) >= 10
    with pytest.raises(BadInput, match="4 clients of at least 13 images need more"):
        deal(y, Clients(count=4, min_size=13), Labels(), 0)


def test_dirichlet_draws_again_only_below_the_smallest_size():
    # One class for two clients: the first draw gives one image to the first, the second five to each, which is enough.
    draws = Draws(np.array([0.1, 0.9]), np.array([0.5, 0.5]), None)
    assert [len(part) for part in dirichlet(np.zeros(10, int), Clients(count=2, min_size=5), draws)] == [5, 5]


def saved(path: Path, **settings: object) -> Partition:
    partition = partitions.of(dataset(Y), Experiment(clients=Clients(count=6), **settings))
    partition.save(path, Y, tuple("0123456789"))
    return partition


@pytest.mark.parametrize(
    "labels",
    [Labels(), Labels("server", per_class=3), Labels("every-client", per_class=3), Labels(validation=0.2, noise=0.1)],
)
def test_a_saved_partition_can_be_dealt_again(tmp_path, labels):
    before = saved(tmp_path / "p.json", labels=labels, seed=4)
    file = Clients(count=6, partition="file", file=str(tmp_path / "p.json"))
    assert partitions.of(dataset(Y), Experiment(clients=file, labels=labels, seed=4)).checksum == before.checksum
    again = partitions.of(dataset(Y), Experiment(clients=file, labels=labels, seed=5))
    assert [set(s.images) for s in again.shares] == [set(s.images) for s in before.shares]
    assert np.array_equal(again.server, before.server)
    assert np.array_equal(again.validation, before.validation)


def test_a_saved_partition_takes_other_labels_and_other_left_out_shares(tmp_path):
    before = saved(tmp_path / "p.json", labels=Labels(unlabeled_clients=3))
    file = Clients(count=6, partition="file", file=str(tmp_path / "p.json"))
    ceiling = partitions.of(dataset(Y), Experiment(clients=file, labels=Labels("every-client", fraction=1.0)))
    assert [set(s.labeled) for s in ceiling.shares] == [set(s.images) for s in before.shares]
    assert ceiling.clients == (0, 1, 2, 3)
    at_server = partitions.of(dataset(Y), Experiment(clients=file, labels=Labels("server", per_class=2)))
    assert set(at_server.server) <= {i for share in before.shares for i in share.images}
    assert len(every(at_server)) == len(np.unique(every(at_server))) == len(every(before))
    with pytest.raises(BadInput, match="more than those who hold images: nobody"):
        partitions.of(dataset(Y), Experiment(clients=file, labels=Labels("server", per_class=1000)))
    for labels in (Labels(ids=(5,)), Labels(clients=5), Labels(unlabeled_clients=4)):
        with pytest.raises(BadInput, match="ask for more than those who hold images: 0, 1, 2, 3"):
            partitions.of(dataset(Y), Experiment(clients=file, labels=labels))


def test_a_saved_partition_of_other_data_is_refused(tmp_path):
    saved(tmp_path / "p.json")
    file = Clients(count=6, partition="file", file=str(tmp_path / "p.json"))
    other = dataset(Y)
    other.digest = "d2"
    with pytest.raises(BadInput, match=r"p\.json deals out other images than those of 'mine'"):
        partitions.of(other, Experiment(clients=file))
    with pytest.raises(BadInput, match=r"file gives 6 clients; set clients.count to that number"):
        partitions.of(dataset(Y), Experiment(clients=replace(file, count=7)))
    with pytest.raises(BadInput, match=r"'file' needs clients\.file, the path of a partition\.json"):
        Experiment(clients=Clients(partition="file"))
    with pytest.raises(StorageError, match="No such file"):
        partitions.of(dataset(Y), Experiment(clients=replace(file, file=str(tmp_path / "none.json"))))
    with pytest.raises(BadInput, match="'by-column' needs a data set, or a file, that gives it"):
        deal(Y, Clients(partition="by-column"), Labels(), 0)


# Labels


def test_labels_at_some_clients_are_all_of_theirs_and_none_of_the_others():
    partition = deal(Y, Clients(), Labels(at="some-clients", clients=3), 0)
    for number, share in enumerate(partition.shares):
        assert (len(share.labeled) > 0, len(share.unlabeled) > 0) == (number < 3, number >= 3)
    assert len(partition.server) == 0


@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_labels_at_every_client_are_a_fraction_of_its_images_but_two_at_least(fraction):
    """Because BatchNorm needs two; all labels are a fraction of 1."""
    partition = deal(Y, Clients(), Labels(at="every-client", fraction=fraction), 0)
    for holding in partition.shares:
        assert len(holding.labeled) == max(2, round(fraction * len(holding)))
    partition = deal(Y[:5], Clients(count=5, min_size=1, partition="iid"), Labels("every-client", fraction=fraction), 0)
    assert {len(holding.labeled) for holding in partition.shares} == {1}


def test_labels_at_every_client_may_be_some_of_each_class_it_holds():
    partition = deal(Y, Clients(), Labels(at="every-client", per_class=5), 0)
    for share in partition.shares:
        whole = np.bincount(Y[np.concatenate([share.labeled, share.unlabeled])], minlength=10)
        assert np.bincount(Y[share.labeled], minlength=10).tolist() == np.minimum(whole, 5).tolist()


def test_labels_at_the_server_are_as_many_of_each_class_and_its_clients_have_none():
    partition = deal(Y, Clients(), Labels(at="server", per_class=7), 0)
    assert np.bincount(Y[partition.server]).tolist() == [7] * 10
    assert all(len(share.labeled) == 0 for share in partition.shares)
    assert len(deal(Y, Clients(), Labels(at="server"), 0).server) == 500


def test_where_the_labels_are_does_not_change_who_holds_which_image():
    def whole(labels: Labels) -> list[list[int]]:
        shares = deal(Y, Clients(), labels, 0).shares
        return [sorted(np.concatenate([s.labeled, s.unlabeled]).tolist()) for s in shares]

    assert whole(Labels(clients=1)) == whole(Labels(clients=5)) == whole(Labels(at="every-client", fraction=1.0))


def test_the_rule_prefers_all_classes_and_then_the_size_nearest_to_the_mean():
    y = np.array([0, 1, 2] * 8)
    parts = [np.arange(0, 9), np.arange(9, 12), np.array([12, 15, 18, 21, 13]), np.array([14]), np.arange(16, 18)]
    # Sizes 9, 3, 5, 1, 2: mean 4. Clients 0 and 1 hold all classes and are 5 and 1 away; 2 and 4 hold two and are 1 and
    # 2 away; client 3 holds one.
    assert by_rule(y, parts) == [1, 0, 2, 4, 3]
    assert by_rule(y, [parts[0], parts[0][:0], parts[1]]) == [0, 2]  # both 3 away: the smaller number; nobody is no one


def labeled_clients(labels: Labels, seed: int = 0) -> list[int]:
    return [n for n, share in enumerate(deal(Y, Clients(), labels, seed).shares) if len(share.labeled)]


def test_which_clients_are_labeled_is_a_choice():
    assert labeled_clients(Labels(clients=2)) == [0, 1]
    assert labeled_clients(Labels(ids=(7, 3))) == [3, 7]
    parts = [share.images for share in deal(Y, Clients(), Labels(), 0).shares]
    assert labeled_clients(Labels(clients=3, which="rule")) == sorted(by_rule(Y, parts)[:3])
    by_seed = [labeled_clients(Labels(clients=3, which="seed"), seed) for seed in range(5)]
    assert all(len(found) == 3 for found in by_seed)
    assert len(set(map(tuple, by_seed))) > 1
    assert labeled_clients(Labels(clients=3, which="seed"), 2) == by_seed[2]


@pytest.mark.parametrize("which", ["first", "rule", "seed"])
def test_shares_may_be_left_out(which):
    whole = deal(Y, Clients(), Labels(clients=2, which=which), 0)
    for more in (1, 4, 8):
        labels = Labels(clients=2, unlabeled_clients=more, which=which)
        found = deal(Y, Clients(), labels, 0)
        assert len(found.shares) == 10
        assert len(found.clients) == 2 + more
        for client in found.clients:  # as they are with all shares: only the others are gone
            assert np.array_equal(found.shares[client].labeled, whole.shares[client].labeled)
            assert np.array_equal(found.shares[client].unlabeled, whole.shares[client].unlabeled)
        assert sum(len(found.shares[client].labeled) > 0 for client in found.clients) == 2
        ceiling = deal(Y, Clients(), replace(labels, at="some-clients+every-client", fraction=1.0), 0)
        assert ceiling.clients == found.clients


@pytest.mark.parametrize("at", ["server", "every-client"])
def test_where_none_is_fully_labeled_so_many_clients_take_part_as_are_said(at):
    assert len(deal(Y, Clients(), Labels(at, unlabeled_clients=5), 0).clients) == 5


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (
            {"clients": 4, "unlabeled_clients": 7},
            "labels.clients = 4 and labels.unlabeled_clients = 7 are together more",
        ),
        ({"ids": [1, 1]}, r"labels.ids must be different clients from 0 to 9, found \[1, 1\]"),
        ({"ids": [10]}, "labels.ids must be different clients from 0 to 9"),
        ({"ids": []}, "labels.ids must be different clients from 0 to 9"),
        ({"validation": 1.0}, "labels.validation must be at least 0 and below 1, found 1.0"),
        ({"which": "best"}, "labels.which must be one of first, rule, seed"),
        ({"at": "server+some-clients"}, r"one of some-clients, every-client, server, some-clients\+every-client, "),
    ],
)
def test_labels_that_cannot_be_placed_are_refused_in_a_sentence(labels, sentence):
    with pytest.raises(BadInput, match=sentence):
        read({"labels": labels})


def test_a_mixture_runs_where_a_method_declares_all_its_parts():
    assert Experiment(labels=Labels("some-clients+server")).labels.at == "some-clients+server"
    assert Experiment(method=Keeper(), labels=Labels("some-clients+every-client")).labels.clients == 1
    with pytest.raises(
        BadInput, match=r"cannot use labels\.at = 'some-clients\+server'; it is made for every-client, some"
    ):
        Experiment(method=Keeper(), labels=Labels("some-clients+server"))


def test_a_mixture_puts_labels_in_all_its_places():
    labels = Labels("some-clients+every-client+server", clients=2, per_class=1, server_per_class=6)
    partition = deal(Y, Clients(), labels, 0)
    assert np.bincount(Y[partition.server]).tolist() == [6] * 10
    for client, share in enumerate(partition.shares):
        held = len(np.unique(Y[share.images]))
        assert (len(share.labeled), len(share.unlabeled) == 0) == ((len(share), True) if client < 2 else (held, False))
    partition = deal(Y, Clients(), Labels("some-clients+server", clients=2), 0)
    assert len(partition.server) == 500
    assert [len(share.labeled) > 0 for share in partition.shares] == [True, True] + [False] * 8


def test_what_nobody_labeled_is_dealt_out_but_never_labeled():
    y = np.where(np.arange(len(Y)) % 3 == 0, -1, Y)
    for at in ("some-clients", "every-client", "server"):
        partition = deal(y, Clients(), Labels(at, clients=3, fraction=1.0, validation=0.1, noise=0.5), 0)
        labeled = np.concatenate([partition.server, partition.validation, *(s.labeled for s in partition.shares)])
        assert len(labeled)
        assert (y[labeled] >= 0).all()
        assert np.array_equal(np.sort(every(partition)), np.arange(len(y)))


@pytest.mark.parametrize("which", ["first", "rule", "seed"])
def test_only_clients_with_labels_can_be_the_labeled_ones(which):
    y, hospital = np.array([-1] * 6 + [0, 1] * 2 + [-1, 0, 1]), np.repeat([*"abc"], [6, 4, 3])  # b has 4 labels, c 2
    clients = Clients(count=3, partition="by-column", min_size=1)

    def dealt(seed: int = 0, **labels: object) -> Partition:
        return partitions.of(dataset(y, hospital), Experiment(clients=clients, labels=Labels(**labels), seed=seed))

    for seed in range(4):
        assert [len(s.labeled) for s in dealt(seed, clients=2, which=which).shares] == [0, 4, 2]
        assert [len(s) for s in dealt(seed, clients=1, which=which).shares] == [6, 4, 3]
        assert any(len(s.labeled) for s in dealt(seed, clients=1, which=which).shares)
    with pytest.raises(BadInput, match=r"labels.clients = 3, but only 2 of 3 clients have labels: 1, 2$"):
        dealt(clients=3, which=which)
    with pytest.raises(BadInput, match=r"labels.ids = \[0, 1\], but only 2 of 3 clients have labels: 1, 2$"):
        dealt(ids=(0, 1), which=which)


@pytest.mark.parametrize("at", ["every-client", "server"])
def test_a_run_without_any_label_is_refused(at):
    for validation in (0.0, 0.1):
        with pytest.raises(BadInput, match=f"labels.at = '{at}' finds no label to train on; a run needs some"):
            deal(np.full(40, -1), Clients(count=2), Labels(at, validation=validation), 0, classes=2)


# Validation


def test_a_share_of_the_labels_validates_at_the_server_where_no_split_is_published():
    before = deal(Y, Clients(), Labels(clients=3), 0)
    found = deal(Y, Clients(), Labels(clients=3, validation=0.1), 0)
    spoken = np.concatenate([share.labeled for share in before.shares])
    assert len(found.validation) == round(0.1 * len(spoken))
    assert set(found.validation) <= set(spoken)
    assert np.array_equal(np.sort(every(found)), np.arange(len(Y)))
    # Of each class a tenth, to within one image.
    tenth = np.bincount(Y[spoken], minlength=10) / 10
    assert (abs(np.bincount(Y[found.validation], minlength=10) - tenth) <= 1).all()
    for share, whole in zip(found.shares, before.shares, strict=True):
        assert np.array_equal(share.unlabeled, whole.unlabeled)
        assert set(share.labeled) == set(whole.labeled) - set(found.validation)
    with pytest.raises(BadInput, match=r"labels\.validation is for data without a validation split"):
        deal(Y, Clients(), Labels(clients=3, validation=0.1), 0, published=True)


def test_every_site_keeps_two_labels_and_a_validation_of_none_is_refused():
    few = Labels("every-client", fraction=0.0, validation=0.5)  # two labels each
    with pytest.raises(BadInput, match=r"labels.validation = 0.5 of 20 labeled images is no image; raise it"):
        deal(Y, Clients(), few, 0)
    partition = deal(Y, Clients(), Labels("every-client+server", fraction=0.0, server_per_class=1, validation=0.5), 0)
    assert [len(share.labeled) for share in partition.shares] == [2] * 10
    assert (len(partition.server), len(partition.validation)) == (2, 8)  # half of 30 would be 15


# Noise


def test_noise_gives_a_share_of_the_labels_another_class():
    labels = Labels("every-client", fraction=1.0, noise=0.4)
    partition = deal(Y, Clients(), labels, 0)
    images, wrong = partition.noise
    assert len(images) == len(np.unique(images)) == 480  # 0.4 of 1,200
    assert (wrong != Y[images]).all()
    steps = np.bincount((wrong - Y[images]) % 10, minlength=10)
    assert steps[0] == 0
    assert (abs(steps[1:] - 480 / 9) < 30).all()  # four standard deviations of 6.9: each other class alike
    assert partition.checksum == deal(Y, Clients(), labels, 0).checksum
    assert partition.checksum != deal(Y, Clients(), labels, 1).checksum
    assert partition.checksum != deal(Y, Clients(), replace(labels, noise=0.0), 0).checksum


def test_noise_is_in_labels_alone_and_leaves_all_else_as_it_is():
    quiet = deal(Y, Clients(), Labels("some-clients+server", clients=2, validation=0.1), 0)
    noisy = deal(Y, Clients(), Labels("some-clients+server", clients=2, validation=0.1, noise=1.0), 0)
    spoken = [quiet.server, quiet.validation, *(share.labeled for share in quiet.shares)]
    assert noisy.noise[0].tolist() == sorted(np.concatenate(spoken).tolist())
    assert replace(noisy, noise=quiet.noise).checksum == quiet.checksum


# Streams


def test_images_come_in_steps():
    index = np.array([9, 8, 7, 6, 5, 4, 3])  # 7 in 3 steps: 3, 2, 2
    replaced = [arrived(index, round, Stream(3, 2, "replace")).tolist() for round in range(9)]
    assert replaced == [[9, 8, 7]] * 3 + [[6, 5]] * 2 + [[4, 3]] * 4  # round 0 is before the first; the last step lasts
    grown = [arrived(index, round, Stream(3, 2, "grow")).tolist() for round in range(9)]
    assert grown == [[9, 8, 7]] * 3 + [[9, 8, 7, 6, 5]] * 2 + [[9, 8, 7, 6, 5, 4, 3]] * 4


@pytest.mark.parametrize(("data", "labeled", "unlabeled"), [("unlabeled", 20, 2), ("labeled", 4, 10), ("all", 4, 2)])
def test_a_stream_is_of_what_it_is_said_to_be(data, labeled, unlabeled):
    share = Holding(np.arange(20), np.arange(20, 30))
    found = share.at(1, Stream(5, 1, data=data))
    assert (len(found.labeled), len(found.unlabeled)) == (labeled, unlabeled)
    assert share.at(1, None) is share


def test_each_step_of_a_stream_needs_two_images_of_each_client():
    clients = Clients(count=4, partition="iid", min_size=1)
    assert deal(np.zeros(40, int), clients, Labels(), 0, Stream(steps=5, data="all"))  # ten images each
    with pytest.raises(BadInput, match="client 3 has 9 unlabeled images, fewer than two for each of 5 steps; lower"):
        deal(np.zeros(39, int), clients, Labels(), 0, Stream(steps=5, data="all"))


def test_a_stream_deals_the_same_images_in_their_random_order():
    still = deal(Y, Clients(), Labels("every-client"), 0)
    moving = deal(Y, Clients(), Labels("every-client"), 0, Stream(4))
    for a, b in zip(still.shares, moving.shares, strict=True):
        assert np.array_equal(a.labeled, b.labeled)
        assert a.unlabeled.tolist() == b.unlabeled.tolist() != sorted(b.unlabeled.tolist())
        steps = [b.at(round, Stream(4, 1)).unlabeled for round in (1, 2, 3, 4)]
        assert np.array_equal(np.concatenate(steps), b.unlabeled)
        assert max(map(len, steps)) - min(map(len, steps)) <= 1
    with pytest.raises(
        BadInput, match=r"client \d has \d+ unlabeled images, fewer than two for each of 100 steps; lower"
    ):
        deal(Y, Clients(), Labels(), 0, Stream(100))


# On disk


def test_a_stored_partition_is_read_back_with_its_histograms(tmp_path):
    labels = Labels("some-clients+server", server_per_class=2, validation=0.1, noise=0.2)
    partition = deal(Y, Clients(count=3), labels, 0, Stream(4))
    partition.save(tmp_path / "partition.json", Y, tuple("0123456789"))
    found = Partition.load(tmp_path / "partition.json")
    assert found.checksum == partition.checksum
    for a, b in zip(found.shares, partition.shares, strict=True):
        assert a.unlabeled.dtype == np.int64
        assert np.array_equal(a.labeled, b.labeled)
        assert np.array_equal(a.unlabeled, b.unlabeled)
    assert np.array_equal(found.server, partition.server)
    assert np.array_equal(found.validation, partition.validation)
    assert np.array_equal(found.noise, partition.noise)
    stored = json.loads((tmp_path / "partition.json").read_text())
    for place, index in (("server", partition.server), ("validation", partition.validation)):
        assert stored[place]["classes"] == np.bincount(Y[index], minlength=10).tolist()
    total = np.sum([part["classes"] for part in (*stored["clients"], stored["server"], stored["validation"])], axis=0)
    assert total.tolist() == [120] * 10


def test_the_checksum_sees_who_holds_what_and_whether_with_labels():
    one, two, none = np.array([1]), np.array([1, 2]), np.array([], np.int64)
    base = Partition((Holding(one, none), Holding(none, none)), none)
    others = [
        Partition((Holding(none, one), Holding(none, none)), none),
        Partition((Holding(none, none), Holding(one, none)), none),
        Partition((Holding(two, none), Holding(none, none)), none),
        replace(base, server=one),
        Partition((Holding(none, none), Holding(none, none)), one),
    ]
    assert len({partition.checksum for partition in (base, *others)}) == 6


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda t: t["clients"][0]["labeled"].append(0), "was changed: its checksum does not match"),
        (lambda t: t["clients"][1]["unlabeled"].reverse(), "was changed: its checksum does not match"),
        (lambda t: t["clients"].pop(), "was changed: its checksum does not match"),
        (lambda t: t["validation"]["labeled"].append(0), "was changed: its checksum does not match"),
        (lambda t: t.update(noise=[[0], [1]]), "was changed: its checksum does not match"),
        (lambda t: t.update(noise=[[0], []]), "is not a partition that can be read"),
        (lambda t: t.update(data="d2"), "was changed: its checksum does not match"),
        (lambda t: t["clients"].reverse(), "can be read: client 2 stands in the place of client 0"),
        (lambda t: t.pop("server"), "is not a partition that can be read: 'server'"),
        (lambda t: t["clients"][0].update(labeled=["x"]), "is not a partition that can be read"),
        (lambda t: t["clients"][0].update(labeled=[1 << 70]), "is not a partition that can be read"),
    ],
)
def test_a_partition_that_was_tampered_with_is_refused(tmp_path, damage, sentence):
    path = tmp_path / "partition.json"
    deal(Y, Clients(count=3), Labels(), 0).save(path, Y, tuple("0123456789"))
    table = json.loads(path.read_text())
    damage(table)
    path.write_text(json.dumps(table))
    with pytest.raises(StorageError, match=sentence):
        Partition.load(path)


NONE = np.array([], np.int64)


@pytest.mark.parametrize(
    ("clients", "more", "sentence"),
    [
        (([1, 2], [2, 3]), {}, "puts image 2 in several places; leave each image in one"),
        (([1, 2], [3]), {"server": np.array([3])}, "puts image 3 in several places"),
        (([1, 2], [3]), {"validation": np.array([1])}, "puts image 1 in several places"),
        (([1, -1], [3]), {}, "holds image -1, and images count from 0"),
        (([1, 2], [3]), {"noise": np.array([[-2], [0]])}, "holds image -2, and images count from 0"),
    ],
)
def test_a_partition_made_by_hand_must_put_each_image_in_one_place(tmp_path, clients, more, sentence):
    shares = tuple(Holding(np.array(images), NONE) for images in clients)
    Partition(**{"shares": shares, "server": NONE, **more}).save(tmp_path / "p.json", Y, tuple("0123456789"))
    with pytest.raises(StorageError, match=sentence):
        Partition.load(tmp_path / "p.json")


def test_a_partition_made_by_hand_must_hold_images_that_there_are(tmp_path):
    made = Partition((Holding(np.arange(20), np.array([10**6])),), NONE, "d1")
    made.save(tmp_path / "p.json", np.zeros(10**6 + 1, int), tuple("0123456789"))
    file = Clients(count=1, partition="file", file=str(tmp_path / "p.json"))
    with pytest.raises(BadInput, match="holds image 1000000, but 'mine' has 1200 to train on, from 0"):
        partitions.of(dataset(Y), Experiment(clients=file))


def test_a_partition_that_is_cut_short_or_missing_is_refused(tmp_path):
    path = tmp_path / "partition.json"
    with pytest.raises(StorageError, match="No such file"):
        Partition.load(path)
    path.write_text('{"clients": [')
    with pytest.raises(StorageError, match="is not a partition that can be read"):
        Partition.load(path)
