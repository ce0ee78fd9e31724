"""The models that a run leaves: the last, and the one of the round that validation chose, whoever computed them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fewlabel.engine import record
from fewlabel.engine.pool import Pool
from fewlabel.engine.run import Interrupted, execute
from fewlabel.engine.serial import Serial
from fewlabel.engine.world import World

RunDir = Callable[..., Path]
# A rate at which the model gets worse again: validation chooses round 3 of 6.
RISING_AND_FALLING = ("method.local.lr=0.3", "evaluate.every=1")


def card(path: Path) -> dict:
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["fewlabel"])


def models(directory: Path) -> list[bytes]:
    return [(directory / name).read_bytes() for name in (record.MODEL, record.CHOSEN_MODEL)]


def line(round: int, balanced: float, accuracy: float = 0.5) -> record.Line:
    return {"round": round, "test": {}, "validation": {"accuracy": accuracy, "balanced_accuracy": balanced}}


def test_validation_chooses_the_first_round_with_the_best_balanced_accuracy() -> None:
    lines = [line(1, 0.4, 0.9), line(2, 0.6), {"round": 3}, line(4, 0.6, 0.8), line(5, 0.5)]
    chosen = record.chosen_on_validation(lines)
    assert chosen is not None
    assert chosen["round"] == 2
    assert record.chosen_on_validation([{"round": 1, "test": {}}]) is None


def test_the_chosen_weights_are_those_of_the_chosen_round(run_dir: RunDir, pool: Pool) -> None:
    """While round 3 is measured, round 4 trains. A run that ends with round 3 shows what its weights were."""
    long, short = run_dir(*RISING_AND_FALLING), run_dir(*RISING_AND_FALLING, "rounds=3")
    summary = execute(long, executor=pool)
    execute(short, executor=Serial())
    assert summary["chosen_on_validation"]["round"] == 3
    chosen, then, last = (
        load_file(path) for path in (long / record.CHOSEN_MODEL, short / record.MODEL, long / record.MODEL)
    )
    assert all(torch.equal(chosen[name], then[name]) for name in then)
    assert any(not torch.equal(chosen[name], last[name]) for name in last)
    assert [(c["chosen"], c["round"]) for c in map(card, (long / record.CHOSEN_MODEL, long / record.MODEL))] == [
        ("validation", 3), ("last", 6)]  # fmt: skip


@pytest.mark.parametrize("recipe", ["printed", "fewlabel"])
@pytest.mark.parametrize("buffers", ["global", "recomputed", "local"])
def test_both_models_are_the_same_from_any_workers_and_after_a_stop(
    run_dir: RunDir, pool: Pool, recipe: str, buffers: str
) -> None:
    changes = (*RISING_AND_FALLING, f"recipe={recipe}", "model=tests.nets:tiny", f"model.buffers={buffers}")
    one, two, stopped = run_dir(*changes), run_dir(*changes), run_dir(*changes)
    execute(one, executor=Serial())
    execute(two, executor=pool)
    for _ in range(5):  # after each round
        asked = iter([True])
        with pytest.raises(Interrupted):
            execute(stopped, executor=Serial(), stop=lambda asked=asked: next(asked))
    execute(stopped, executor=Serial())
    assert models(one) == models(two) == models(stopped)


def test_only_the_best_so_far_is_kept_on_disk(run_dir: RunDir) -> None:
    directory = run_dir(*RISING_AND_FALLING, "checkpoint.rounds=1")
    folder, seen = directory / record.CHECKPOINTS, list[list[str]]()

    def look(*_: object) -> None:
        seen.append(sorted(path.name.rpartition("-")[0] for path in folder.glob("*")))

    execute(directory, executor=Serial(), watch=look)
    look()
    best = {1: 1, 2: 1, 3: 3, 4: 3, 5: 3, 6: 3}  # a line is written before its checkpoint
    assert seen == [[], *([f"best-{best[n]:06d}", f"round-{n:06d}"] for n in best)]


def test_a_run_that_an_earlier_version_began_has_the_chosen_weights_only_if_it_saw_them(run_dir: RunDir) -> None:
    directory = run_dir(*RISING_AND_FALLING)
    with pytest.raises(Interrupted):
        execute(directory, executor=Serial(), stop=lambda: len(record.read_rounds(directory)) >= 3)
    for kept in (directory / record.CHECKPOINTS).glob("best-*"):
        kept.unlink()
    execute(directory, executor=Serial())
    assert (directory / record.MODEL).exists()
    assert not (directory / record.CHOSEN_MODEL).exists()


def test_a_run_knows_the_labels_it_trained_with_unless_sites_keep_them(run_dir: RunDir) -> None:
    directory = run_dir("rounds=1", "labels.clients=2")
    summary, world = execute(directory, executor=Serial()), World.open(directory)
    labels = world.dataset.splits["train"].labels
    held = [int(labels[image]) for share in world.partition.shares for image in share.labeled]
    assert summary["labels_per_class"] == [held.count(c) for c in range(10)]


def test_the_temperature_is_in_the_card_where_validation_labels_tell_one(run_dir: RunDir) -> None:
    directory = run_dir("rounds=6", "labels.at=every-client", "labels.fraction=1", "method.local.lr=0.1")
    execute(directory, executor=Serial())
    assert 0.05 < card(directory / record.MODEL)["temperature"] < 20
