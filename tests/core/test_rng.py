"""A draw must depend on its key alone, and nothing but `Rng.scope` may touch a global random state."""

import ast
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import fewlabel
from fewlabel.core.rng import Rng
from fewlabel.engine.run import execute

PACKAGE = Path(fewlabel.__file__).parent


def draws(rng: Rng) -> tuple:
    return (
        rng.seed,
        tuple(torch.rand(4, generator=rng.torch).tolist()),
        tuple(rng.numpy.random(4)),
        tuple(rng.stream("sample").sample(range(1000), 5)),
    )


def test_the_same_key_gives_the_same_numbers():
    assert draws(Rng(0, "task", 3, 4, "train", 0)) == draws(Rng(0, "task", 3, 4, "train", 0))


def test_different_keys_give_different_numbers():
    keys = [
        (), (0,), (1,), ("0",), ("1",), (0, "a"), ("a", 0), (0, "b"), (0, "a", 1), (0, "a", 2), (0, 1, 2), (0, 12),
        (0, "12"), (0, "a", "b"), (0, "ab"), (0, "a\x1fstr:b"), (0, "a', 'b"), (0, "a, b"), (True,), (-1,),
    ]  # fmt: skip
    found = [draws(Rng(*key)) for key in keys]
    for kind in range(4):
        assert len({one[kind] for one in found}) == len(keys)


def test_a_stream_below_is_the_stream_of_the_longer_key_whatever_was_drawn_above():
    above = Rng(7, "client")
    draws(above)
    assert draws(above.stream(3, "shuffle")) == draws(Rng(7, "client", 3, "shuffle"))


def test_a_stream_goes_on_where_it_was():
    rng = Rng(0)
    first, second = torch.rand(3, generator=rng.torch), torch.rand(3, generator=rng.torch)
    assert torch.equal(torch.cat([first, second]), torch.rand(6, generator=Rng(0).torch))


def test_the_numbers_of_a_key_never_change():
    # Pinned: a change here changes every result there is.
    assert Rng(0, "task", 1).seed == 396678567633239262


def test_a_sample_is_without_replacement_and_in_order():
    found = Rng(0).sample("abcdefghij", 6)
    assert len(set(found)) == 6
    assert found == sorted(found)
    assert Rng(0).sample("abc", 3) == ["a", "b", "c"]


def test_samples_are_fair():
    # Of 10 items, 3 drawn 2,000 times: each 600 times, with a standard deviation of sqrt(2000 * 0.3 * 0.7) = 20.
    counts = np.zeros(10)
    for number in range(2000):
        counts[Rng("fair", number).sample(range(10), 3)] += 1
    assert abs(counts - 600).max() < 100


def test_a_scope_seeds_torch_and_restores_it():
    before = torch.random.get_rng_state()
    with Rng(1).scope():
        first = torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(5)
    with Rng(1).scope():
        assert torch.equal(torch.rand(3), first)
    with Rng(2).scope():
        assert not torch.equal(torch.rand(3), first)


def test_a_scope_restores_torch_after_an_exception():
    before = torch.random.get_rng_state()
    with pytest.raises(ZeroDivisionError), Rng(1).scope():
        torch.rand(3 // 0)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_scopes_nest():
    with Rng(1).scope():
        expected = torch.rand(4)
    with Rng(1).scope():
        first = torch.rand(2)
        with Rng(2).scope():
            torch.rand(9)
        assert torch.equal(torch.cat([first, torch.rand(2)]), expected)


GENERATORS = {"Generator", "PCG64"}  # what a stream is made of


def test_nothing_outside_rng_touches_a_global_random_state():
    touched = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.name == "rng.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Attribute):
                names = [ast.unparse(node)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Name) and node.id == "default_generator":
                names = [node.id]
            touched += [f"{path.relative_to(PACKAGE)}: {name}" for name in names if is_global(name)]
    assert touched == []


def is_global(name: str) -> bool:
    parts = name.split(".")
    if parts[0] in ("np", "numpy") and parts[1:2] == ["random"]:
        return len(parts) == 2 or parts[2] not in GENERATORS
    if parts[0] == "torch":
        return parts[1:2] == ["random"] or parts[-1] in ("manual_seed", "seed", "default_generator", "set_rng_state")
    return parts[0] == "random"


@pytest.mark.parametrize(
    "name",
    ["torch.manual_seed", "torch.random.fork_rng", "torch.default_generator", "np.random.seed", "np.random.choice",
     "numpy.random.rand", "random", "random.shuffle", "torch.cuda.manual_seed", "np.random.default_rng"],
)  # fmt: skip
def test_the_search_for_global_random_state_knows_its_names(name):
    assert is_global(name)


@pytest.mark.parametrize("buffers", ["global", "local", "recomputed"])
def test_a_run_leaves_the_global_random_states_alone(run_dir, buffers):
    directory = run_dir("model=tests.nets:tiny", f"model.buffers={buffers}", "rounds=2", "evaluate.local=true")
    before = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    execute(directory, workers=1)
    after = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1][0] == after[1][0]
    assert np.array_equal(before[1][1], after[1][1])
    assert before[1][2:] == after[1][2:]
    assert before[2] == after[2]
