"""The smaller studies: attacks, privacy, labels. Lines that runs leave, and what the tables say about them."""

from pathlib import Path

import pytest

from experiments import lines, sides
from fewlabel.engine.run import prepare
from fewlabel.engine.sweep import attempt
from fewlabel.experiment import read


@pytest.fixture(autouse=True)
def docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lines, "DOCS", tmp_path / "docs")
    return tmp_path / "docs"


def write(study: str, cell: str, row: str, score: float, seed: int = 0, named: int | None = None) -> None:
    scores = dict.fromkeys(("last_balanced_accuracy", "last_accuracy", "last_auc"), score)
    line = {"table": study, "cell": cell, "row": row, "seed": seed, "settings": "", "rounds": 12, **scores}
    lines.add({**line, "attacker_named_in_round": named})


def test_a_run_with_an_attack_says_what_was_tried_and_when_the_attacker_was_named(tmp_path: Path) -> None:
    table = {
        "recipe": "fewlabel",
        "rounds": 2,
        "data": {"name": "digits", "image_size": 16},
        "clients": {"count": 4, "clip_median": 2.0, "attack": {"kind": "scale", "ids": [1], "strength": 100.0}},
        "labels": {"clients": 4},
        "method": {"name": "labels-only"},
    }
    directory = prepare(read(table), tmp_path / "runs" / "one")
    assert attempt(directory, 1, lambda line: None, lambda: False).get("done")
    assert sides.keep("attacks", tmp_path / "runs") == 1
    assert sides.keep("attacks", tmp_path / "runs") == 1  # the same run again: its line is replaced
    [line] = lines.read_lines("attacks")
    assert (line["cell"], line["row"], line["seed"]) == ("labeled", "clip_median = 2|scale", "0")
    assert line["attacker_named_in_round"] == "1"
    assert 0 <= float(line["last_balanced_accuracy"]) <= 1


def test_the_table_of_attacks_says_who_is_named_and_which_defence_has_the_best_worst_case() -> None:
    for row, none, scale, flip in (
        ("none", 0.8, 0.1, 0.6),
        ("median", 0.75, 0.7, 0.65),
        ("clip_median = 2", 0.8, 0.7, 0.5),
    ):
        write("attacks", "labeled", f"{row}|none", none)
        write("attacks", "labeled", f"{row}|scale", scale, named=1)
        write("attacks", "labeled", f"{row}|label-flip", flip)
    said = sides.attacks("labeled")
    assert [line.split(" | ")[0] for line in said.splitlines() if line.startswith("| ")][2:] == [
        "| none", "| clip_median = 2", "| median"
    ]  # fmt: skip
    assert "| none | 80.0 | 10.0 | 60.0 |" in said
    assert "named in 1 of 2 attacks, and not in: label-flip." in said
    assert "The best worst case is that of `median`: 65 (label-flip); without a defence it is 10 (scale)." in said
    assert sides.attacks("unlabeled") == ""


def test_epsilons_stand_from_none_to_the_strictest_and_what_they_cost_is_said_first() -> None:
    for name, score in (("1", 0.3), ("none", 0.9), ("8", 0.6)):
        for seed in range(2 if name == "1" else 3):
            write("privacy", "", f"|{name}", score + 0.02 * seed, seed)
    said = sides.privacy()
    # Epsilon 1 has seeds 0 and 1 alone, and so has the row without privacy that it is compared with.
    assert said.startswith("**Epsilon 8 costs 30.0 points of balanced accuracy and epsilon 1 60.0**")
    assert [line.split(" | ")[0] for line in said.splitlines() if line.startswith("| ")][2:] == [
        "| none", "| 8", "| 1 (2 of 3 seeds)"
    ]  # fmt: skip
    assert "| 8 | 62.0 ± 2.0 | 62.0 ± 2.0 | 62.0 ± 2.0 |" in said
    assert "| 1 (2 of 3 seeds) | 31.0 ± 1.4 | 31.0 ± 1.4 | 31.0 ± 1.4 |" in said  # 30 and 32: 31, and sqrt(2)
    assert "Seeds 0, 1, 2, 12 rounds." in said
    assert "all-labels" not in said  # no ceiling has run yet


def test_what_privacy_costs_is_also_said_against_the_ceiling_by_the_recipe() -> None:
    write("privacy", "", "|none", 0.7)
    write("privacy", "", "|8", 0.6)
    lines.add(
        {
            "table": "o-box",
            "cell": "blood",
            "row": "all-labels",
            "seed": 0,
            "settings": "",
            "last_balanced_accuracy": 0.9,
        }
    )
    said = sides.privacy()
    assert said.startswith("**Epsilon 8 costs 10.0 points of balanced accuracy**")
    assert "reaches 90.0 %" in said
    assert "each epsilon costs 20.0 points more" in said


def test_labels_that_buy_what_unlabeled_images_bring_are_on_a_straight_line_between_those_tried() -> None:
    # Labels alone: 80, with 100 labels 84 and with 400 90. Unlabeled images bring 2 points: 50 labels' worth by random.
    # Least certain: 81 and 87, so 82 is a sixth of the way from 100 to 400: 150.
    write("labels", "pbc", "labels-only|none 0", 0.80)
    write("labels", "pbc", "tutor|none 0", 0.82)
    for strategy, few, many in (("random", 0.84, 0.90), ("least-certain", 0.81, 0.87)):
        write("labels", "pbc", f"labels-only|{strategy} 100", few)
        write("labels", "pbc", f"labels-only|{strategy} 400", many)
    said = sides.labels("pbc")
    assert "unlabeled images bring +2.0 points (tutor)" in said
    assert "as many labels more do that for labels alone: 50 (random), 150 (least-certain)." in said
    assert "is best" not in said  # of one seed nothing is said about strategies
    assert "| labels-only | random | 80.0 (1 of 3 seeds) | 84.0 (1 of 3 seeds) | 90.0 (1 of 3 seeds) |" in said


def test_a_strategy_is_compared_with_random_seed_by_seed() -> None:
    for seed, (random, certain) in enumerate([(0.80, 0.82), (0.80, 0.79), (0.80, 0.85)]):
        write("labels", "ham", "labels-only|none 0", 0.7, seed)
        write("labels", "ham", "labels-only|random 100", random, seed)
        write("labels", "ham", "labels-only|least-certain 100", certain, seed)
    said = sides.labels("ham")
    assert "labels-only, 100 labels: least-certain is best, +2.0 points against random, ahead in 2 of 3 seeds." in said
    assert "unlabeled images bring" not in said  # our own method has no run yet


def test_a_line_never_reaches_what_it_is_always_below() -> None:
    assert sides.reached([(0, 80.0), (100, 81.0)], 82.0) is None
    assert sides.reached([(0, 80.0), (100, 84.0)], 81.0) == 25.0
