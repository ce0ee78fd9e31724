"""Intervals are those that drawing test images again gives, and a difference within its interval is called chance."""

from typing import Any

import pytest
from scipy.stats import binom

from fewlabel.experiment import Experiment
from fewlabel.report import intervals
from fewlabel.report.comparison import Comparison
from fewlabel.report.intervals import Difference, difference, measured, of
from fewlabel.report.page_tables import page_table
from fewlabel.report.result_tables import run_table
from tests.report.layout import lay_out, metrics

EIGHTY = [[45, 5], [15, 35]]  # 80 of 100 images are right


def test_the_interval_of_accuracy_is_that_of_a_binomial_share() -> None:
    """To draw 100 images with replacement, of which 80 are right, is to draw from a binomial: 72 to 88 of 100.

    87 is as good an end: 97.47 % of all draws are up to it.
    """
    ends = [binom.ppf(q, 100, 0.8) / 100 for q in (0.025, 0.975)]
    assert ends == [0.72, 0.88]
    assert of([EIGHTY])["accuracy"] == pytest.approx(ends, abs=0.0101)


def test_the_interval_of_balanced_accuracy_counts_each_class_alike() -> None:
    """Recalls 0.5 of 4 images and 1.0 of 400: the mean is 0.75, and only the first class is uncertain.

    Nearly always, 0 to 4 of its images are right, whatever their number in the draw: the mean is from 0.5 to 1.
    Among 400 + 4 images, accuracy is certain within a percent.
    """
    found = of([[[2, 2], [0, 400]]])
    assert found["balanced_accuracy"] == pytest.approx((0.5, 1.0))
    assert found["accuracy"][0] > 0.98


def test_a_class_without_a_test_image_does_not_count() -> None:
    with_empty = [[45, 5, 0], [15, 35, 0], [0, 0, 0]]
    assert measured(with_empty) == measured(EIGHTY) == {"accuracy": 0.8, "balanced_accuracy": 0.8}
    found = of([with_empty])["balanced_accuracy"]
    assert found == pytest.approx(of([EIGHTY])["balanced_accuracy"], abs=0.01)


def test_all_right_is_not_certain() -> None:
    """Of 10 images none is wrong. By the rule of three, up to 3 / 10 of all may be."""
    assert of([[[5, 0], [0, 5]]]) == dict.fromkeys(intervals.METRICS, (0.7, 1.0))
    assert of([[[0, 2], [1, 0]]])["accuracy"] == (0.0, 1.0)  # 3 / 3
    assert of([[[0, 50], [50, 0]]])["accuracy"] == (0.0, 0.03)


def test_the_draws_are_the_same_each_time() -> None:
    first = of([EIGHTY])
    intervals.draws.cache_clear()
    assert of([EIGHTY]) == first


def test_seeds_that_agree_are_no_surer_about_images_and_seeds_that_differ_are_less_sure() -> None:
    """All seeds are tested on the same images, so three that agree have the interval of one.

    Seeds of 40 % and 80 %: the mean is 60 %. Of two drawn with replacement, both are the first or both the second in
    every other draw, so the interval reaches from below 40 % to above 80 %.
    """
    one = of([EIGHTY])["accuracy"]
    assert of([EIGHTY] * 3)["accuracy"] == pytest.approx(one)
    low, high = of([EIGHTY, [[20, 30], [30, 20]]])["accuracy"]
    assert low < 0.4 < 0.8 < high


def test_a_difference_within_its_interval_may_be_chance() -> None:
    """5 points of 100 images: the standard deviation is the root of (0.8 * 0.2 + 0.75 * 0.25) / 100, which is 0.059.

    1.96 of it are 0.116, so the interval is about -0.066 to 0.166.
    """
    near = difference([EIGHTY], [[[40, 10], [15, 35]]], "accuracy")
    assert near.mean == pytest.approx(0.05)
    assert near.interval == pytest.approx((-0.066, 0.166), abs=0.011)
    assert near.chance
    far = difference([EIGHTY], [[[20, 30], [30, 20]]], "accuracy")
    assert far.mean == pytest.approx(0.4)
    assert not far.chance
    assert difference([[[20, 30], [30, 20]]], [EIGHTY], "accuracy").interval[1] < 0
    same = difference([EIGHTY], [EIGHTY], "accuracy")
    assert same.mean == 0
    assert same.interval[0] < -0.05  # two models with the same counts need not be right on the same images
    assert [Difference(0.0, (low, 0.1)).chance for low in (-0.1, 0.0, 0.01)] == [True, True, False]


def test_a_page_has_intervals_and_the_number_of_test_images(tmp_path: Any) -> None:
    def made(name: str, confusion: list[list[int]], seed: int = 0) -> Any:
        share = measured(confusion)["accuracy"]
        test = metrics(share, recall_per_class=[row[n] / sum(row) for n, row in enumerate(confusion)])
        line = {"round": 1, "test": test | {"confusion": confusion}, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1}
        experiment = Experiment(method=name, rounds=1, seed=seed)
        return lay_out(tmp_path / f"{name}-{seed}", experiment, [line])

    results = [made("labels-only", [[20, 30], [30, 20]]), made("fedprox", EIGHTY)]
    table = page_table(Comparison(results).groups)
    assert table.title == "Test results on digits (100 test images), in percent"
    assert table.columns[:4] == ("method", "balanced accuracy", "above labels alone", "accuracy")
    assert len(table.columns) <= 7
    assert table.rows[0][2:4] == ("–", "40.0 (30.0–50.0)")
    assert table.rows[1][3] == "80.0 (72.0–87.0)"
    assert table.rows[1][2].startswith("+40.0 (+2")
    assert any("by bootstrap over test images." in note for note in table.notes)
    table = page_table(Comparison([*results, made("fedprox", EIGHTY, seed=1)]).groups)
    assert any("over seeds and test images. From fewer than 5 seeds they are too narrow." in n for n in table.notes)
    shown = {row[0]: row[1] for row in run_table(results[1], brackets=True).rows}
    assert shown["accuracy"] == "80.0 (72.0–87.0)"
    assert shown["recall of a"] == "90.0 (45 of 50)"
    assert run_table(results[1], brackets=True).title == "fedprox on digits, seed 0: 100 test images"
    assert dict(row[:2] for row in results[1].table().rows)["accuracy"] == "80.0"  # in a terminal
