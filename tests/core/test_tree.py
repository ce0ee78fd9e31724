"""Arithmetic on Trees must keep parameters, statistics and counters apart, and a mean must not hold its trees."""

import math
import weakref

import pytest
import torch
from torch import Tensor, nn

from fewlabel.core import tree
from tests.nets import tiny


def a_tree(weight: list[float], mean: float = 0.0, var: float = 1.0, batches: int = 0) -> tree.Tree:
    return {
        "weight": torch.tensor(weight, dtype=torch.float32),
        "bn.running_mean": torch.tensor([float(mean)]),
        "bn.running_var": torch.tensor([float(var)]),
        "bn.num_batches_tracked": torch.tensor(batches),
    }


def equal(a: tree.Tree, b: tree.Tree) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


# What is what


def test_entries_are_told_apart_as_parameters_statistics_and_counters():
    net = tree.of(tiny(1, 10, 8))
    kinds = {name: tree.kind(name, value) for name, value in net.items()}
    assert {n for n, k in kinds.items() if k == "parameter"} == {
        "0.weight", "1.weight", "1.bias", "6.weight", "6.bias", "7.weight", "7.bias", "9.weight", "9.bias",
    }  # fmt: skip
    assert {n for n, k in kinds.items() if k == "statistic"} == {
        "1.running_mean", "1.running_var", "7.running_mean", "7.running_var",
    }  # fmt: skip
    assert {n for n, k in kinds.items() if k == "counter"} == {"1.num_batches_tracked", "7.num_batches_tracked"}
    assert tree.parameters(net).keys() | tree.statistics(net).keys() == net.keys()
    assert tree.parameters(net).keys().isdisjoint(tree.statistics(net))


def test_the_state_of_a_module_is_a_copy():
    layer = nn.Linear(2, 2)
    before = tree.of(layer)
    with torch.no_grad():
        layer.weight.add_(1)
    assert not torch.equal(before["weight"], layer.weight)
    assert not before["weight"].requires_grad


def test_an_untrained_network_has_fresh_statistics_and_its_constants():
    net = nn.Sequential(nn.BatchNorm1d(2))
    net.register_buffer("lookup", torch.tensor([3, 1, 2]))
    net.train()
    net(torch.randn(8, 2) + 5)
    assert equal(
        tree.untrained(net),
        {
            "lookup": torch.tensor([3, 1, 2]),
            "0.running_mean": torch.zeros(2),
            "0.running_var": torch.ones(2),
            "0.num_batches_tracked": torch.tensor(0),
        },
    )
    assert net[0].num_batches_tracked == 1


# The mean


def test_the_mean_weighs_each_tree():
    trees = [(1.0, a_tree([1, 10])), (3.0, a_tree([5, 2])), (4.0, a_tree([0, -2]))]
    # (1*1 + 3*5 + 4*0) / 8 and (1*10 + 3*2 - 4*2) / 8
    assert torch.equal(tree.mean(trees)["weight"], torch.tensor([2.0, 1.0]))


def test_statistics_are_averaged_and_counters_are_not():
    found = tree.mean([(1, a_tree([0], mean=2, var=1, batches=7)), (3, a_tree([0], mean=6, var=3, batches=4))])
    assert found["bn.running_mean"] == 5  # (2 + 3*6) / 4
    assert found["bn.running_var"] == 2.5  # (1 + 3*3) / 4
    assert torch.equal(found["bn.num_batches_tracked"], torch.tensor(7))


@pytest.mark.parametrize("weights", [[1, 1, 1], [3, 5, 7], [0.1, 0.7, 1e-9], [1e9, 1, 123.456]])
def test_the_mean_of_equal_trees_is_that_tree_to_the_bit(weights):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1e3
    same = {"weight": values, "bn.num_batches_tracked": torch.tensor(3)}
    assert equal(tree.mean((w, {n: v.clone() for n, v in same.items()}) for w in weights), same)


def test_a_tree_without_weight_does_not_count():
    assert equal(tree.mean([(0, a_tree([9, 9])), (2, a_tree([1, 2])), (0.0, a_tree([7, 7]))]), a_tree([1, 2]))


@pytest.mark.parametrize("nothing", [[], [(0, a_tree([1.0]))], [(0, a_tree([1.0])), (0.0, a_tree([2.0]))]])
def test_the_mean_of_nothing_is_the_default(nothing):
    old = a_tree([4])
    assert tree.mean(nothing, default=old) is old
    with pytest.raises(ValueError, match="the mean of no trees needs a default"):
        tree.mean(nothing)


@pytest.mark.parametrize("weight", [-1, -1e-9, math.nan, math.inf])
def test_a_weight_that_is_negative_or_not_finite_is_refused(weight):
    with pytest.raises(ValueError, match=f"a weight must be finite and not negative, found {weight}"):
        tree.mean([(1, a_tree([1])), (weight, a_tree([1]))])


def test_trees_of_different_networks_are_refused_by_name():
    with pytest.raises(ValueError, match="different networks: only one of them has extra"):
        tree.mean([(1, a_tree([1])), (1, a_tree([1]) | {"extra": torch.zeros(1)})])
    with pytest.raises(ValueError, match=r"'weight' is \(1,\) in one tree and \(2,\) in the other"):
        tree.mean([(1, a_tree([1])), (1, a_tree([1, 2]))])
    with pytest.raises(ValueError, match="different networks: only one of them has weight"):
        tree.add(a_tree([1]), {n: v for n, v in a_tree([1]).items() if n != "weight"})


def test_the_mean_holds_no_tree_while_the_next_one_is_made():
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()

    def trees():
        for _ in range(6):
            assert not alive  # so the result and one tree are all there ever is
            made = {"weight": torch.ones(3)}
            alive.add(made["weight"])
            yield 1.0, made
            del made

    assert torch.equal(tree.mean(trees())["weight"], torch.ones(3))


def test_inputs_are_never_changed():
    a, b = a_tree([1, 2], 3, 4, 5), a_tree([6, 7], 8, 9, 10)
    results = [
        tree.mean([(1, a), (2, b)]), tree.mean([(1, a)]), tree.pool([(1, a), (2, b)]), tree.pool([(1, a)]),
        tree.add(a, b), tree.sub(a, b), tree.scale(a, 2),
    ]  # fmt: skip
    for result in results:
        for value in result.values():
            value.add_(1)  # nor do results share memory with them
    assert equal(a, a_tree([1, 2], 3, 4, 5))
    assert equal(b, a_tree([6, 7], 8, 9, 10))


# Sums and norms


def test_sums_touch_parameters_alone():
    a, b = a_tree([1, 2], 3, 4, 5), a_tree([10, 20], 30, 40, 50)
    assert equal(tree.add(a, b), a_tree([11, 22], 3, 4, 5))
    assert equal(tree.add(a, b, 0.5), a_tree([6, 12], 3, 4, 5))
    assert equal(tree.sub(a, b), a_tree([-9, -18], 3, 4, 5))
    assert equal(tree.scale(a, -3), a_tree([-3, -6], 3, 4, 5))


def test_the_norm_is_that_of_the_parameters_as_one_vector():
    assert tree.norm(a_tree([3, 4], mean=100, var=100, batches=100)) == 5.0
    assert tree.norm({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([[2.0], [4.0]])}) == 5.0  # 1 + 4 + 4 + 16
    assert tree.norm({}) == 0.0


def test_the_norm_is_calculated_in_double_precision():
    # The square of 1e30 is beyond single precision.
    assert tree.norm({"a": torch.tensor([3e30, 4e30])}) == pytest.approx(5e30, rel=1e-6)


# Pooled statistics


def test_pooling_adds_the_variance_of_the_means():
    # Of 1 image with mean 0 and variance 2, and 3 with mean 4 and variance 6: the mean is 12/4 = 3, the mean variance
    # (2 + 18)/4 = 5, the variance of the means (1*9 + 3*1)/4 = 3.
    found = tree.pool([(1, a_tree([0], 0, 2, 1)), (3, a_tree([0], 4, 6, 5))])
    assert (found["bn.running_mean"], found["bn.running_var"], found["bn.num_batches_tracked"]) == (3, 8, 5)


def test_pooling_many_parts_is_the_variance_of_the_whole():
    x = torch.randn(60, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2 + 7
    parts = torch.split(x, [1, 9, 20, 30])
    found = tree.pool(
        (len(p), {"running_mean": p.mean(0), "running_var": p.var(unbiased=False)}) for p in map(torch.clone, parts)
    )
    assert found["running_mean"].item() == pytest.approx(x.mean().item(), rel=1e-12)
    assert found["running_var"].item() == pytest.approx(x.var(unbiased=False).item(), rel=1e-12)


def test_a_pooled_variance_cannot_fall_below_zero():
    # In single precision 1000^2 + 1e-4 is 1000^2: the mean of squares less the square of the mean would be 0 or less.
    parts = [(7, a_tree([0], 1000.0, 1e-4)), (11, a_tree([0], 1000.1, 1e-4)), (13, a_tree([0], 1000.0, 1e-4))]
    spread = 11 / 31 * 20 / 31 * (torch.tensor(1000.1) - 1000).item() ** 2
    assert tree.pool(parts)["bn.running_var"].item() == pytest.approx(1e-4 + spread, rel=1e-3)
    assert tree.pool([(1, a_tree([0], 1000.0, 0.0)), (2, a_tree([0], 1000.0, 0.0))])["bn.running_var"] == 0


def test_a_mean_may_be_of_counters_alone():
    assert tree.mean([(1, {}), (2, {})]) == {}
    assert tree.mean([(1, {"n": torch.tensor(3)}), (2, {"n": torch.tensor(1)})]) == {"n": torch.tensor(3)}


def test_pooling_nothing_is_nothing():
    assert tree.pool([]) == {}
    assert tree.pool([(3, {}), (4, {})]) == {}


def test_load_does_what_load_state_dict_does_also_after_a_tensor_was_exchanged():
    module = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    wanted = {name: torch.full_like(value, 7) for name, value in module.state_dict().items()}
    tree.load(module, wanted)
    module[0].weight = nn.Parameter(torch.zeros(3, 2))
    tree.load(module, wanted)
    assert all((value == 7).all() for value in module.state_dict().values())
    assert tree.of(module).keys() == module.state_dict().keys()


def test_load_refuses_weights_of_another_network():
    with pytest.raises(RuntimeError, match="size mismatch"):
        tree.load(nn.Linear(2, 3), tree.of(nn.Linear(3, 3)))
    with pytest.raises(RuntimeError, match="Missing key"):
        tree.load(nn.Linear(2, 3), tree.of(nn.Linear(2, 3, bias=False)))
