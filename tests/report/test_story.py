"""Headlines and findings say what the numbers say: each rule with runs whose numbers are known."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fewlabel.engine import record
from fewlabel.experiment import Clients, Experiment
from fewlabel.report.comparison import Comparison
from fewlabel.report.results import Result
from fewlabel.report.story import Story, listed, number, points, story_of_groups, story_of_run
from tests.report.layout import lay_out, metrics

Made = Callable[..., Result]
CLASSES = ("0", "1", "2")


def counts(*right: int, of: int = 100, wrong: int = 0) -> list[list[int]]:
    """So many of 100 images of each class are right. The others are taken for the class `wrong`, or for the next."""
    table = [[0] * len(right) for _ in right]
    for n, found in enumerate(right):
        table[n][n] = found
        table[n][wrong if wrong != n else (n + 1) % len(right)] += of - found
    return table


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Lays out a run with these counts in its last round, and with these labels of each class."""

    def make(
        method: str,
        confusion: list[list[int]] | None,
        labels: list[int] | None = None,
        seed: int = 0,
        finished: bool = True,
        more: dict[str, Any] | None = None,
        experiment: Experiment | None = None,
        **about: Any,
    ) -> Result:
        experiment = replace(experiment or Experiment(rounds=5), method=method, name="", seed=seed)
        line: dict[str, Any] = {"round": 5 if finished else 2, "seconds": 1.0, "bytes_up": 1, "bytes_down": 1}
        if confusion:
            recalls = [row[n] / sum(row) for n, row in enumerate(confusion)]
            balanced = sum(recalls) / len(recalls)
            test = metrics(balanced, images=sum(map(sum, confusion)), recall_per_class=recalls, confusion=confusion)
            line["test"] = test
        directory = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        result = lay_out(directory, experiment, [line | (more or {})], finished, {"classes": CLASSES, "clients": []})
        if labels:
            found = {"clients": 10, "labeled_clients": 1, "labeled": sum(labels), "at_server": 0, "validation": 0}
            found |= {"hidden": 1000 - sum(labels), "unknown": 0, "per_class": labels} | about
            (directory / record.NOTES).write_text(json.dumps({"labels": found, "sentences": []}))
        return Result(result.directory)

    return make


def told(*results: Result) -> Story:
    return story_of_groups(Comparison(list(results)).groups)


LABELS = [40, 57, 3]


def test_the_best_method_is_told_with_its_points_above_labels_alone_and_the_class_that_nobody_finds(made: Made) -> None:
    """Recalls 0.95, 0.90 and 0.05 have the mean 63.3 %; labels alone 0.6, 0.55 and 0.02, so 39.0 %: 24.3 points less.

    The labeled client has three images of class 2, fewer than FEW.
    """
    floor = made("labels-only", counts(60, 55, 2), LABELS)
    best, other = made("cbafed", counts(95, 90, 5), LABELS), made("fedirm", counts(80, 80, 4), LABELS)
    story = told(floor, best, other)
    assert story.headline == (
        "cbafed: 63.3 % balanced accuracy, 24 points above labels alone. "
        "Nobody finds class 2: the labeled client has three of them."
    )
    assert story.findings[0].startswith(
        "cbafed is 24 points above labels alone. The choice of test images hardly explains the difference (+1"
    )
    assert "1 of 10 clients has labels: 100 of 1,000 images." in story.findings
    assert "cbafed finds 5.0 % of class 2, the fewest of all classes, and takes 95.0 % of it for 0." in story.findings
    assert story.findings[-1].startswith(
        "300 test images and one seed. By chance alone, balanced accuracy may be off by"
    )
    assert story.findings[-1].endswith("Another seed may rank methods otherwise.")


def test_a_difference_within_its_interval_is_told_as_that(made: Made) -> None:
    floor, best = made("labels-only", counts(80, 80, 80)), made("cbafed", counts(82, 82, 82))
    one = told(floor, best)
    assert one.headline == (
        "cbafed is not clearly better than labels alone: it has 82.0 % balanced accuracy, labels alone 80.0 %."
    )
    assert one.findings[0].startswith(
        "cbafed is 2.0 points above labels alone. The difference lies within its interval, so it may be chance (−"
    )
    many = told(floor, best, made("fedirm", counts(81, 81, 81)))
    assert many.headline.startswith("No method is clearly better than labels alone: cbafed has 82.0 % balanced")
    assert "fedirm (81.0 %) may be as good as cbafed: the difference lies within its interval." in many.findings


def test_a_method_that_is_clearly_above_labels_alone_is_told_though_another_has_a_better_mean(made: Made) -> None:
    """Of three seeds, semifl is 10 points above in each. rscfed is 20 above on average, but 20 below in one."""
    floor = [made("labels-only", counts(60, 60, 60, of=100), seed=seed) for seed in range(3)]
    steady = [made("semifl", counts(70, 70, 70, of=100), seed=seed) for seed in range(3)]
    wild = [made("rscfed", counts(n, n, n, of=100), seed=seed) for seed, n in enumerate((40, 100, 100))]
    assert told(*floor, *steady, *wild).headline == (
        "semifl: 70.0 % balanced accuracy, 10 points above labels alone. rscfed has 80.0 %, but that difference may be "
        "chance."
    )


def test_a_gain_is_told_in_the_seeds_that_both_have(made: Made) -> None:
    """In seed 0 the method is 20 points below. A lucky seed 1, which labels alone lack, hides it in the mean."""
    runs = made("labels-only", counts(60, 60, 60)), made("semifl", counts(40, 40, 40))
    assert "20 points below labels alone" in told(*runs, made("semifl", counts(95, 95, 95), seed=1)).headline


def test_methods_that_are_equally_good_are_told_as_such(made: Made) -> None:
    assert told(made("semifl", counts(90, 90, 60)), made("rscfed", counts(60, 90, 90))).headline == (
        "semifl: 80.0 % balanced accuracy, the best of two methods, as good as rscfed."
    )


def test_methods_below_labels_alone_are_told_as_such(made: Made) -> None:
    floor = made("labels-only", counts(90, 90, 90))
    assert told(floor, made("fedirm", counts(60, 60, 60))).headline == (
        "fedirm: 60.0 % balanced accuracy, 30 points below labels alone."
    )
    story = told(floor, made("fedirm", counts(60, 60, 60)), made("cbafed", counts(50, 50, 50)))
    assert story.headline == (
        "No method reaches labels alone (90.0 % balanced accuracy): the best, fedirm, is 30 points below."
    )
    assert "cbafed (40 points) is clearly below labels alone." in story.findings
    near = told(floor, made("rscfed", counts(95, 95, 95)), made("isofed", counts(89, 89, 89)))
    assert "isofed (1.0 point) is below labels alone, but within the interval." in near.findings


def test_the_gap_to_all_labels_is_told_if_there_is_one(made: Made) -> None:
    """From 50 to 90 are 40 points, of which 30 are three quarters."""
    floor, best = made("labels-only", counts(50, 50, 50)), made("cbafed", counts(80, 80, 80))
    bounds = told(floor, best, made("all-labels", counts(90, 90, 90))).findings[1]
    assert re.match(r"Labels alone reach 50.0 % \(44\.\d–55\.\d\), all labels 90.0 % \(86\.\d–93\.\d\)\. ", bounds)
    assert bounds.endswith("cbafed closes 75 % of the gap.")
    assert "closes all of the gap" in told(floor, best, made("all-labels", counts(79, 79, 79))).findings[1]
    none = told(floor, made("cbafed", counts(52, 52, 52)), made("all-labels", counts(51, 51, 51))).findings[1]
    assert none.endswith("The gap between them lies within its interval, so there is hardly anything to gain.")
    over = told(floor, best, made("all-labels", counts(51, 51, 51))).findings[1]
    assert over.endswith(
        "cbafed is 29 points above all labels, so they are no ceiling here: they may need more rounds."
    )


def test_without_labels_alone_the_best_is_told_alone(made: Made) -> None:
    assert told(made("cbafed", counts(80, 80, 80))).headline == "cbafed: 80.0 % balanced accuracy."
    two = told(made("cbafed", counts(80, 80, 80)), made("fedirm", counts(70, 70, 70)))
    assert two.headline == "cbafed: 80.0 % balanced accuracy, the best of two methods."


def test_methods_that_guess_are_told_as_such(made: Made) -> None:
    """One class for all images has a third of three classes."""
    floor, bad = made("labels-only", counts(60, 60, 60)), made("rscfed", counts(100, 0, 0))
    said = "33.3 % balanced accuracy, and one class for all images has 33.3 %"
    assert told(floor, bad).headline == f"rscfed guesses: {said}."
    two = told(floor, bad, made("fedirm", counts(100, 0, 0)))
    assert two.headline == f"Every method guesses: {said}."
    mixed = told(floor, bad, made("fedirm", counts(80, 80, 80)))
    assert mixed.headline.startswith("fedirm: 80.0 % balanced accuracy, 20 points above labels alone.")
    assert any(finding.startswith(f"rscfed guesses: {said}.") for finding in mixed.findings)
    assert "Nobody" not in mixed.headline  # what rscfed does not find says nothing
    assert story_of_run(bad).headline == f"rscfed guesses: {said}."


@pytest.mark.parametrize(
    ("labels", "about", "why"),
    [
        ([40, 57, 3], {}, ": the labeled client has three of them"),
        ([40, 57, 0], {}, ": the labeled client has none of them"),
        ([40, 57, 3], {"labeled_clients": 4}, ": the labeled clients have three of them"),
        ([40, 57, 3], {"labeled_clients": 0, "at_server": 100}, ": the server has three of them"),
        ([400, 570, 70], {}, ": the labeled client has 70 of them"),  # a quarter of the mean, 347, is 87
        ([40, 57, 30], {}, ""),  # labels are not the cause
        (None, {}, ""),  # nobody knows
    ],
)
def test_a_class_is_not_found_for_want_of_labels_only_if_there_are_few(
    made: Made, labels: list[int] | None, about: dict[str, int], why: str
) -> None:
    story = story_of_run(made("cbafed", counts(90, 90, 9), labels, **about))
    assert story.headline.endswith(f"test images. It does not find class 2{why}.")
    assert "It does not find" not in story_of_run(made("cbafed", counts(90, 90, 10), labels, **about)).headline


def test_labels_are_told_of_all_seeds_not_only_of_the_first(made: Made) -> None:
    """In seed 1, class 2 has three labels, and then 30, which are not few."""
    none, three, many = ([40, 57, 0], [40, 57, 3], [40, 57, 30])

    def two(first: list[int], second: list[int]) -> Story:
        confusion = counts(90, 90, 9)
        return told(*(made("cbafed", confusion, labels, seed=n) for n, labels in enumerate([first, second])))

    assert two(none, three).headline.endswith("class 2: the labeled client has at most three of them.")
    assert two(three, three).headline.endswith("class 2: the labeled client has three of them.")
    assert two(none, many).headline.endswith("It does not find class 2.")
    assert any("labels: 97 to 100 of " in finding for finding in two(none, three).findings)


def test_what_guesses_in_one_seed_is_told_with_that_seed(made: Made) -> None:
    rows = [made("rscfed", counts(*recalls), seed=n) for n, recalls in enumerate([(80, 80, 80), (100, 0, 0)])]
    good = [made("fedirm", counts(80, 80, 80), seed=n) for n in (0, 1)]
    (found,) = (finding for finding in told(*rows, *good).findings if finding.startswith("rscfed guesses"))
    assert found.startswith("rscfed guesses in 1 of 2 seeds: 56.7 % balanced accuracy, and one class for all images")
    assert " Seed 1: " in found


def test_several_classes_that_nobody_finds_are_named_together(made: Made) -> None:
    both = story_of_run(made("cbafed", counts(100, 5, 40, of=100), [90, 2, 2]))
    assert both.headline.endswith("It does not find class 1: the labeled client has two of them.")
    rows = [made(name, counts(99, 9, 9), [90, 2, 1]) for name in ("cbafed", "fedirm")]
    assert told(*rows).headline.endswith("Nobody finds classes 1 and 2: the labeled client has at most two of each.")


def test_a_single_run_is_told_with_its_interval_and_test_images(made: Made) -> None:
    more = {"pseudo_labels": {"coverage": 0.5, "precision": 0.875}}
    story = story_of_run(made("cbafed", counts(80, 80, 60), more=more))
    assert story.headline == "cbafed: 73.3 % balanced accuracy (68.4–78.1) on 300 test images."
    assert story.findings == (
        "It finds 60.0 % of class 2, the fewest of all classes, and takes 40.0 % of it for 0.",
        "It gives 50.0 % of the unlabeled images a pseudo-label, and 87.5 % of these are right.",
    )


def test_an_unfinished_run_is_told_as_far_as_it_has_got(made: Made, tmp_path: Path) -> None:
    run = made("cbafed", counts(80, 80, 80), finished=False)
    assert story_of_run(run).headline.startswith("After round 2 of 5: cbafed: 80.0 % balanced accuracy (")
    unmeasured = made("cbafed", None, finished=False)
    assert story_of_run(unmeasured).headline == "cbafed: unfinished, round 2 of 5. Nothing is measured yet."
    both = told(made("labels-only", counts(50, 50, 50)), run)
    assert both.headline.startswith("So far (1 of 2 runs are finished): cbafed: 80.0 % balanced accuracy, 30 points")
    (run.directory / record.ROUNDS).write_text("")
    assert story_of_run(Result(run.directory)).headline == "cbafed: no round of 5 is complete yet."
    assert told(Result(run.directory)).headline == "Nothing is measured yet."


def test_unequal_work_is_a_finding(made: Made) -> None:
    work = [{"images_labeled": n, "images_unlabeled": 0} for n in (100, 1000)]
    floor, best = (
        made("labels-only", counts(50, 50, 50), more=work[0]),
        made("cbafed", counts(80, 80, 80), more=work[1]),
    )
    assert "Unequal work: cbafed trained on 10.0 times as many images as labels-only." in told(floor, best).findings


def test_what_a_method_concludes_about_its_own_runs_is_a_finding(made: Made) -> None:
    def tutor(seed: int, low: float) -> Result:
        gain = {"gain": 0.05, "gain_low": low, "gain_high": 0.09, "gain_images": 90.0, "given_up": 0.0}
        return made("tutor", counts(80, 80, 80), seed=seed, more=gain)

    floors = [made("labels-only", counts(70, 70, 70), seed=seed) for seed in (0, 1, 2)]
    runs = [tutor(0, -0.01), tutor(1, 0.01), tutor(2, -0.02)]
    short = "tutor: Unlabeled images may or may not have helped (seeds 0, 2). Unlabeled images helped (seed 1)."
    assert short in told(*floors, *runs).findings
    (main,), (every,) = (Comparison([*floors, *runs]).tables(every=every) for every in (False, True))
    assert any(short in note for note in main.notes)
    whole = "Unlabeled images helped: +5.0 points of balanced accuracy against the same training without them"
    assert any(note.startswith(f"tutor, seed 1: {whole}") for note in every.notes)
    assert any(finding.startswith(f"tutor, seed 1: {whole}") for finding in told(floors[1], runs[1]).findings)
    assert story_of_run(runs[1]).findings[0].startswith(whole)


def test_several_settings_are_told_one_by_one(made: Made) -> None:
    few, many = (Experiment(rounds=5, clients=Clients(count=n)) for n in (5, 10))
    story = told(
        made("labels-only", counts(50, 50, 50), experiment=few),
        made("cbafed", counts(80, 80, 80), experiment=few),
        made("fedirm", counts(60, 60, 60), experiment=few),
        made("labels-only", counts(50, 50, 50), experiment=many),
        made("cbafed", counts(50, 50, 49), experiment=many),
        made("fedirm", counts(52, 52, 52), experiment=many),
    )
    assert story.headline == (
        "2 settings: cbafed has the best balanced accuracy in 1, fedirm in 1. In 1 of 2 it is clearly above labels "
        "alone."
    )
    assert story.findings[0] == "count=5: cbafed: 80.0 % balanced accuracy, 30 points above labels alone."
    assert story.findings[1].startswith("count=10: No method is clearly better than labels alone: fedirm has 52.0 %")


def test_several_seeds_are_told_by_their_mean(made: Made) -> None:
    floors = [made("labels-only", counts(50, 50, 50), seed=seed) for seed in (0, 1)]
    methods = [made("cbafed", counts(n, n, n), seed=seed) for seed, n in ((0, 70), (1, 90))]
    story = told(*floors, *methods)
    assert story.headline == "cbafed: 80.0 % balanced accuracy, 30 points above labels alone."
    assert story.findings[0].startswith(
        "cbafed is 30 points above labels alone. The difference is hardly chance, though two seeds tell little about "
        "others (+"
    )
    alone = told(floors[0], *methods)  # labels alone have one seed, so both are compared in one
    assert "The choice of test images hardly explains the difference" in alone.findings[0]
    more = [made("labels-only", counts(50, 50, 50), seed=seed) for seed in (2, 3, 4)]
    more += [made("cbafed", counts(80, 80, 80), seed=seed) for seed in (2, 3, 4)]
    assert "The difference is hardly chance (+" in told(*floors, *methods, *more).findings[0]
    assert story.findings[-1].startswith("300 test images and two seeds. By chance alone,")


def test_words() -> None:
    assert [points(share) for share in (0.0996, -0.23456, 0.01, 0.0123)] == [
        "10 points", "23 points", "1.0 point", "1.2 points",
    ]  # fmt: skip
    assert [number(n) for n in (0, 3, 12, 13, 1200)] == ["no", "three", "twelve", "13", "1,200"]
    assert [listed(list(names)) for names in ("a", "ab", "abc")] == ["a", "a and b", "a, b and c"]
