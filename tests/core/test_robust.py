"""Means that one client cannot decide, with values worked out by hand."""

import pytest
import torch

from fewlabel.core.averaging import Rule, average
from fewlabel.core.federation import ClientInfo, Model, Reply
from fewlabel.core.robust import capped, cut_of, geometric_median, total, trimmed


def models(*rows: list[float]) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor(row)} for row in rows]


@pytest.mark.parametrize(
    ("weights", "share", "expected"),
    [
        ([5, 3, 2], 1.0, [5, 3, 2]),
        ([5, 3, 2], 0.5, [5, 3, 2]),  # 5 of 10 is half
        ([98, 1, 1], 0.5, [2, 1, 1]),  # 2 of 4
        ([98, 1, 1], 0.4, [4 / 3, 1, 1]),  # x = 0.4 (x + 2)
        ([98, 98, 4, 1], 0.4, [10, 10, 4, 1]),  # x = 0.4 (2 x + 5): 10 of 25
        ([98, 7, 1], 0.2, [1, 1, 1]),  # three cannot all have less than a third
        ([98], 0.2, [98]),  # the only one has the whole
        ([98, 2], 0.2, [2, 2]),
        ([98, 0, 1, 1], 0.5, [2, 0, 1, 1]),  # who does not count at first does not count
        ([0, 0], 0.5, [0, 0]),
        ([], 0.5, []),
    ],
)
def test_no_weight_is_more_than_its_share(weights, share, expected):
    assert capped(weights, share) == pytest.approx(expected)


def test_a_trimmed_mean_leaves_out_the_largest_and_the_smallest_of_each_number():
    found = trimmed(models([1.0, 1e9], [2.0, -5.0], [3.0, 4.0], [-1e9, 6.0]), 1)
    assert found["w"].tolist() == [1.5, 5.0]  # of 1 and 2; of 4 and 6


def test_a_median_of_an_even_number_is_the_mean_of_the_two_in_the_middle():
    assert trimmed(models([1.0], [2.0], [4.0], [1e9]), 1)["w"].tolist() == [3.0]
    assert trimmed(models([1.0], [7.0], [1e9]), 1)["w"].tolist() == [7.0]


def test_the_middle_of_equal_models_is_that_model_to_the_bit():
    row = torch.randn(100, generator=torch.Generator().manual_seed(0)).tolist()
    for found in (trimmed(models(row, row, row), 0), geometric_median(models(row, row, row))):
        assert found["w"].tolist() == row


def test_a_counter_is_the_middle_one():
    found = trimmed([{"n": torch.tensor(number)} for number in (3, 2**60, 5)], 0)
    assert found["n"].item() == 5


@pytest.mark.parametrize(
    ("clients", "trim", "expected"),
    [(1, 0.2, 0), (2, 0.2, 0), (3, 0.2, 1), (4, 0.2, 1), (10, 0.2, 2), (10, 0.0, 1), (4, 0.45, 1), (5, 0.45, 2)],
)
def test_a_trimmed_mean_of_three_or_more_leaves_out_at_least_one_at_each_end(clients, trim, expected):
    assert cut_of(clients, trim) == expected


def test_the_geometric_median_on_a_line_is_the_median():
    assert geometric_median(models([0.0], [1.0], [1e6]))["w"].item() == pytest.approx(1.0, abs=1e-3)


def test_the_geometric_median_of_a_triangle_sees_all_sides_at_120_degrees():
    """Of (0, 0), (1, 0), (0.5, h): on the axis of symmetry, at the height tan(30 deg) / 2, if h is more than that."""
    found = geometric_median(models([0.0, 0.0], [1.0, 0.0], [0.5, 3.0]))["w"]
    assert found.tolist() == pytest.approx([0.5, 0.28867513], abs=1e-4)


def test_one_model_of_1e17_does_not_move_the_geometric_median_of_four():
    found = geometric_median(models([1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1e17, 1e17]))["w"]
    assert ((found >= -0.01) & (found <= 1.01)).all()


def test_what_clients_count_together_hardly_depends_on_one_of_them():
    assert total([10, 20, 30]) == 60
    assert total([10, 20, 1e8]) == 60


# Through fed.mean


def replies(*clients: tuple[int, int, float]) -> list[Reply[Model]]:
    """Of each client: images with a label, images without, and the only number of its model."""
    return [
        Reply(job, ClientInfo(job, labeled, unlabeled), Model({"w": torch.tensor([value])}))
        for job, (labeled, unlabeled, value) in enumerate(clients)
    ]


def size(reply: Reply[Model]) -> float:
    return reply.client.size


OLD = {"w": torch.tensor([0.5])}


def test_a_mean_with_bounded_shares_is_taken_within_each_kind():
    """Labeled: weights 98, 1, 1 become 2, 1, 1, so (2 * 9 + 1 * 1 + 1 * 2) / 4 = 5.25. Unlabeled: 4 alone."""
    found = average(
        replies((98, 0, 9.0), (1, 0, 1.0), (0, 12, 4.0), (1, 0, 2.0)), OLD, size, None, rule=Rule(share=0.5)
    )
    assert found.model["w"].item() == pytest.approx((4 * 5.25 + 12 * 4) / 16)


def test_a_mean_with_bounded_shares_is_the_same_when_it_holds_few_models():
    """With 20 clients and a share of 0.3, three models are held and the others are folded as they come."""
    sizes = [1, 50, 3, 2, 90, 1, 1, 70, 2, 5, 6, 1, 2, 3, 1, 1, 2, 4, 2, 1]
    values = [float((7 * place) % 11) for place in range(20)]
    found = average(replies(*((n, 0, v) for n, v in zip(sizes, values, strict=True))), OLD, size, rule=Rule(share=0.3))
    weights = capped(sizes, 0.3)
    expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    assert max(weights) / sum(weights) == pytest.approx(0.3)
    assert found.model["w"].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("how", ["trimmed-mean", "median", "geometric-median"])
def test_a_false_size_and_a_far_model_change_little_and_are_named(how):
    clients = [(10, 0, 1.0), (10, 0, 1.1), (10, 0, 1.2), (10, 0, 1.3), (10, 0, 1.4), (10**8, 0, 1e9)]
    found = average(replies(*clients), OLD, size, rule=Rule(how, 0.2))
    assert 1.0 <= found.model["w"].item() <= 1.4
    assert list(found.far) == [5]
    assert found.far[5] > 1e9


def test_robust_means_of_both_kinds_are_joined_by_what_the_kinds_count():
    """Labeled: 1, 2, 100 of 10 images each: median 2, weight 30. Unlabeled: 5, 7 of 20 images: median 6, weight 40."""
    clients = [(10, 0, 1.0), (10, 0, 2.0), (10, 0, 100.0), (0, 20, 5.0), (0, 20, 7.0)]
    found = average(replies(*clients), OLD, size, rule=Rule("median"))
    assert found.model["w"].item() == pytest.approx((30 * 2 + 40 * 6) / 70)
    half = average(replies(*clients), OLD, size, lambda weights, labeled: [0.5, 0.5], rule=Rule("median"))
    assert half.model["w"].item() == pytest.approx(4.0)


def test_who_has_no_weight_has_no_say():
    found = average(replies((10, 0, 1.0), (0, 0, 9.0)), OLD, size, rule=Rule("median"))
    assert found.model["w"].item() == 1.0
    assert average(replies((0, 0, 9.0)), OLD, size, rule=Rule("median")).model is OLD
    assert average([], OLD, size, rule=Rule(share=0.5)).model is OLD


def test_another_tree_of_the_uploads_is_averaged_by_the_same_rule():
    found = average(replies((1, 0, 1.0), (1, 0, 2.0), (1, 0, 100.0)), OLD, size, keep=True, rule=Rule("median"))
    assert found.of(lambda upload: upload.model, OLD, size)["w"].item() == 2.0
    plain = average(replies((1, 0, 1.0), (3, 0, 2.0)), OLD, size, keep=True)
    assert plain.of(lambda upload: upload.model, OLD, size)["w"].item() == 1.75
