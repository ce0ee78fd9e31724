"""The harness of the measurements: its arithmetic, and that it plays real processes in turn."""

import sys
import time

import pytest

from benchmarks.measure import Contestant, at_least, at_most, playing, race, ratio, short, starts

# Contestants: they are played in processes of their own, which import this file.


def steady(turn, seconds):
    while turn():
        time.sleep(seconds)


def busy(turn, seconds):
    while turn():
        until = time.process_time() + seconds
        while time.process_time() < until:
            pass


def broken(turn):
    turn()
    raise ValueError("no such luck")


def played(function, **options):
    return Contestant(function.__name__, f"tests.test_bench:{function.__name__}", options, sys.executable)


def test_a_ratio_is_the_median_of_the_ratios_of_each_repeat():
    # 2/1, 9/3, 4/4: the median is 2, though the median of 2, 9, 4 over that of 1, 3, 4 is 4/3.
    assert ratio([2, 9, 4], [1, 3, 4])["ratio"] == 2


def test_the_interval_of_equal_ratios_is_a_point():
    assert ratio([2, 4, 6], [1, 2, 3])["interval_95"] == [2, 2]


def test_the_interval_of_three_repeats_is_from_the_least_to_the_most():
    # A sample of three has the least ratio as its median with probability (1 + 3 * 2) / 27 = 7/27, far above 2.5 %.
    assert ratio([1, 2, 3], [1, 1, 1])["interval_95"] == [1, 3]


def test_one_odd_repeat_of_nine_does_not_stretch_the_interval():
    # To be the median it must be drawn at least 5 times of 9: C(9,5) (1/9)^5 (8/9)^4 and less, together 0.1 %.
    assert ratio([1] * 8 + [100], [1] * 9)["interval_95"] == [1, 1]


@pytest.mark.parametrize(("near", "met"), [(0.96, True), (0.91, True), (0.89, False), (0.5, False)])
def test_a_target_is_met_if_the_near_end_misses_it_by_less_than_5_hundredths(near, met):
    assert at_least({"interval_95": [near, 2]}, 0.95) is met
    assert at_most({"interval_95": [0, 1 - near]}, 0.05) is met


def test_three_digits_are_shown():
    assert short({"a": [1.23456, 2], "b": "c"}) == {"a": [1.235, 2], "b": "c"}


def test_contestants_are_timed_and_those_who_wait_use_no_processor():
    found = race([played(steady, seconds=0.02), played(busy, seconds=0.1)], repeats=3, warm_up=1, rounds=2)
    assert [len(times) for times in found["each"].values()] == [3, 3]
    assert found["seconds"]["steady"] >= 0.02
    assert found["cpu_seconds"]["busy"] >= 0.09 > 0.05 > found["cpu_seconds"]["steady"]
    assert max(found["idle"].values()) < 0.2


def test_a_start_is_measured_without_its_imports():
    found = starts([played(steady, seconds=0.2)], repeats=1)
    assert 0.2 <= found["first_round"]["steady"] < found["imports"]["steady"] + 0.2 + 5
    assert found["imports"]["steady"] > 0
    assert found["pss_mb"]["steady"] > 1


def test_a_contestant_that_fails_is_named_with_what_it_said():
    with (
        pytest.raises(RuntimeError, match=r"(?s)broken ended with exit code 1.*no such luck"),
        playing(played(broken)) as player,
    ):
        player.round()
