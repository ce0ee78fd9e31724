"""Tables as a terminal, a README, a paper and a program have them; what is best in them, and what is chance."""

import csv
import io
import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fewlabel.cli.main import main
from fewlabel.experiment import Clients, Experiment, Labels, read
from fewlabel.report.comparison import Comparison
from fewlabel.report.findings import guesses
from fewlabel.report.groups import holm, paired
from fewlabel.report.result_tables import thousands
from fewlabel.report.results import Result
from fewlabel.report.tables import Table, megabytes, seconds
from tests.report.layout import lay_out, metrics

Made = Callable[..., Result]


@pytest.fixture(autouse=True)
def eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is as wide as the terminal. Here that is what a test says, and not what the tests were started in."""
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Lays out a run of one round whose metrics all have one value, below tmp_path/runs."""

    def make(experiment: Experiment, value: float | None, **more: Any) -> Result:
        directory = tmp_path / "runs" / f"{len(list((tmp_path / 'runs').glob('*'))):03d}"
        line: dict[str, Any] = {"round": 1, "seconds": 2.0, "bytes_up": 10**6, "bytes_down": 10**6, **more}
        line |= {"model_bytes": 2 * 10**6, "asked": 1, "replies": 1}
        if value is not None:
            line["test"] = metrics(value, recall_per_class=[value] * 10)
        return lay_out(directory, experiment, [line])

    return make


def of(name: str, **more: Any) -> Experiment:
    return Experiment(method=name, rounds=1, **more)


def over_seeds(made: Made, name: str, values: list[float], **more: Any) -> list[Result]:
    return [made(replace(of(name, **more), seed=seed), value) for seed, value in enumerate(values)]


def column(comparison: Comparison, heading: str) -> dict[str, str]:
    table = comparison.table()
    number = table.columns.index(heading)
    return {row[0]: row[number] for row in table.rows}


# what is marked


def test_the_best_and_the_second_between_floor_and_ceiling_are_marked_where_there_is_a_choice(made: Made) -> None:
    values = {"labels-only": 0.3, "fedavg": 0.5, "fedprox": 0.6, "rscfed": 0.4, "all-labels": 0.95}
    results = [made(of(name), value) for name, value in values.items()]
    table = Comparison(results).table()
    at = [table.columns.index(words) for words in ("accuracy", "balanced acc.", "AUC")]
    assert table.best == {(2, number) for number in at}
    assert table.second == {(1, number) for number in at}
    assert (table.html().count("<b>60.0</b>"), table.html().count("<u>50.0</u>")) == (3, 3)
    assert ("**60.0**" in table.markdown(), "<u>50.0</u>" in table.markdown()) == (True, True)
    assert (r"\textbf{60.0}" in table.latex(), r"\underline{50.0}" in table.latex()) == (True, True)
    assert ("60.0¹" in str(table), "50.0²" in str(table)) == (True, True)
    assert "¹: best method; ²: second best." in str(table)
    rows = [line for line in str(table).splitlines() if line.startswith(tuple(values)) and ".0" in line]
    assert len({line.index(".") for line in rows[: len(values)]}) == 1  # marked or not, they stand below each other
    assert not Comparison([results[0], results[1], results[4]]).table().best


@pytest.mark.parametrize(
    ("floor", "best", "second"), [(0.4, {2}, {1}), (0.5, {2}, {1}), (0.55, {2}, set()), (0.9, set(), set())]
)
def test_no_row_below_the_floor_has_a_rank(floor: float, best: set[int], second: set[int], made: Made) -> None:
    values = {"labels-only": floor, "fedavg": 0.5, "fedprox": 0.6, "all-labels": 0.95}
    comparison = Comparison([made(of(name), value) for name, value in values.items()])
    for table in (comparison.table(), comparison.overview()):
        assert ({row for row, _ in table.best}, {row for row, _ in table.second}) == (best, second)
    assert ("What is below labels-only has no rank." in str(comparison.table())) == (floor > 0.5)


def test_the_best_is_that_of_p_values_even_below_the_floor(made: Made) -> None:
    seeds = [0.5, 0.52, 0.54, 0.51, 0.55, 0.53]
    results = [*over_seeds(made, "fedavg", seeds), *over_seeds(made, "fedprox", [v + 0.1 for v in seeds])]
    floor = over_seeds(made, "labels-only", [v + 0.2 + 0.01 * (v > 0.52) for v in seeds])
    assert column(Comparison([*floor, *results]), "p, to best")["fedavg"] != "–"


def test_two_that_are_best_leave_no_second(made: Made) -> None:
    table = Comparison(
        [made(of(name), v) for name, v in {"fedavg": 0.5, "fedprox": 0.5, "rscfed": 0.4}.items()]
    ).table()
    assert {row for row, _ in table.best} == {0, 1}
    assert not table.second


def test_r6_a_row_that_guesses_says_so_and_has_no_rank(made: Made) -> None:
    """Ten classes: one class for all images has a balanced accuracy of 0.1, so below 0.13 a model guesses."""
    values = {"labels-only": 0.12, "fedavg": 0.13, "fedprox": 0.6, "rscfed": 0.129, "all-labels": 0.95}
    comparison = Comparison([made(of(name), value) for name, value in values.items()])
    table = comparison.table()
    assert [row[0] for row in table.rows] == [
        "labels-only (guesses)", "fedavg", "fedprox", "rscfed (guesses)", "all-labels",
    ]  # fmt: skip
    assert {row for row, _ in table.best} == {2}
    assert {row for row, _ in table.second} == {1}
    for text in (str(table), table.markdown(), table.latex(), table.html()):
        assert "rscfed (guesses)" in text
        assert "less than 3 points above that of a model that gives every image the same class" in " ".join(
            text.split()
        )
    assert [row["guessing_seeds"] for row in comparison.to_json()] == [[0], [], [], [0], []]


def test_r6_of_two_methods_that_guess_none_is_best(made: Made) -> None:
    table = Comparison([made(of(name), value) for name, value in {"fedavg": 0.1, "rscfed": 0.11}.items()]).table()
    assert not table.best
    assert not table.second


def test_r6_one_seed_that_guesses_is_told_and_costs_the_rank(made: Made) -> None:
    results = over_seeds(made, "fedavg", [0.9, 0.1]) + over_seeds(made, "fedprox", [0.4, 0.4])
    table = Comparison(results).table()
    assert [row[0] for row in table.rows] == ["fedavg (guesses in 1 of 2 seeds)", "fedprox"]
    assert {row for row, _ in table.best} == {1}


def test_r6_the_overview_says_where_a_method_guesses(made: Made) -> None:
    shares = {0.1: {"fedavg": 0.1, "fedprox": 0.3}, 0.8: {"fedavg": 0.6, "fedprox": 0.5}}
    results = [made(of(n, clients=Clients(alpha=a)), v) for a, values in shares.items() for n, v in values.items()]
    table = Comparison(results).overview()
    assert table.rows == (("fedavg", "10.0 (guesses)", "60.0"), ("fedprox", "30.0", "50.0"))
    assert (table.best, table.second) == ({(1, 1), (0, 2)}, {(1, 2)})


def test_r6_guessing_is_a_matter_of_balanced_accuracy_over_the_classes_that_are_tested() -> None:
    """One class of two for all images: 0.5. Nine of ten images right by always saying the large one is no knowledge."""
    large = {"accuracy": 0.9, "balanced_accuracy": 0.5, "recall_per_class": [1.0, 0.0]}
    assert guesses(large)
    assert not guesses(large | {"recall_per_class": [1.0, 0.0, 0.5]})  # of three classes, 0.5 is well above 1 / 3
    assert guesses(large | {"recall_per_class": [1.0, 0.0, None]})  # of the third there is no test image
    assert not guesses({"balanced_accuracy": 1.0, "recall_per_class": [1.0, None]})  # nothing to tell apart
    assert not guesses({})


def test_bold_is_compared_within_a_group_and_the_overview_comes_first(made: Made) -> None:
    shares = {0.1: {"labels-only": 0.2, "fedavg": 0.5, "fedprox": 0.3}, 0.8: {"fedavg": 0.6, "fedprox": 0.9}}
    results = [
        made(of(name, clients=Clients(alpha=alpha)), value)
        for alpha, values in shares.items()
        for name, value in values.items()
    ]
    comparison = Comparison(results)
    first, table = comparison.tables()
    assert first.columns == ("method", "alpha=0.1", "alpha=0.8")
    assert first.rows == (("labels-only", "20.0", "–"), ("fedavg", "50.0", "60.0"), ("fedprox", "30.0", "90.0"))
    assert (first.best, first.second) == ({(1, 1), (2, 2)}, {(2, 1), (1, 2)})
    assert table.headings == ((0, "alpha=0.1"), (3, "alpha=0.8"))
    assert [row[0] for row in table.rows] == ["labels-only", "fedavg", "fedprox", "fedavg", "fedprox"]
    assert {(1, 1), (4, 1)} <= table.best
    assert [row["setting"] for row in comparison.to_json()] == ["alpha=0.1"] * 3 + ["alpha=0.8"] * 2
    for text in (str(comparison), table.markdown(), table.html(), table.latex()):
        assert text.count("alpha=0.1") == text.count("alpha=0.8") >= 1


def test_a_ceiling_joins_all_groups_that_differ_only_in_their_labels(made: Made) -> None:
    few, many = Labels(at="every-client", fraction=0.1), Labels(at="every-client", fraction=0.5)
    ceiling = made(of("all-labels", labels=few), 0.9)
    assert of("all-labels", labels=few) == of("all-labels", labels=many)
    comparison = Comparison([made(of("fedavg", labels=few), 0.5), made(of("fedavg", labels=many), 0.6), ceiling])
    assert [[row.name for row in group.rows] for group in comparison.groups] == [["fedavg", "all-labels"]] * 2
    assert len(comparison.rows) == 3


# what is computed


def test_the_gap_closed_is_the_share_of_the_way_from_floor_to_ceiling(made: Made) -> None:
    """From 0.5 to 0.9, 0.6 is a quarter of the way and 0.4 a quarter back."""
    values = {"labels-only": 0.5, "fedavg": 0.6, "fedprox": 0.4, "all-labels": 0.9}
    comparison = Comparison([made(of(name), value) for name, value in values.items()])
    told = column(comparison, "gap closed, %")
    assert told == {"labels-only": "–", "fedavg": "25", "fedprox": "-25", "all-labels": "–"}
    assert "Gap closed" in str(comparison)


@pytest.mark.parametrize(("ceiling", "shown"), [(0.4, False), (0.505, False), (0.549, False), (0.55, True)])
def test_u6_no_share_of_a_gap_below_five_points_is_shown_and_one_note_says_why(
    made: Made, ceiling: float, shown: bool
) -> None:
    values = {"labels-only": 0.5, "fedavg": 0.6, "all-labels": ceiling}
    comparison = Comparison([made(of(name), value) for name, value in values.items()])
    why = "No gap closed: all-labels is less than 5 points more accurate than labels-only."
    assert ("gap closed, %" in comparison.table().columns, "Gap closed" in str(comparison)) == (shown, shown)
    assert [note for note in comparison.table().notes if "No gap" in note] == ([] if shown else [why])
    assert comparison.to_json()[1]["gap_closed"] == (pytest.approx(2.0) if shown else None)  # 10 points of 5


def test_u6_the_note_on_a_narrow_gap_names_its_group(made: Made) -> None:
    def group(alpha: float, ceiling: float) -> list[Result]:
        values = {"labels-only": 0.5, "fedavg": 0.6, "all-labels": ceiling}
        return [made(of(name, clients=Clients(alpha=alpha)), value) for name, value in values.items()]

    table = Comparison([*group(0.1, 0.9), *group(0.8, 0.51)]).table()
    why = "No gap closed in alpha=0.8: all-labels is less than 5 points more accurate than labels-only."
    assert [note for note in table.notes if "No gap" in note] == [why]
    assert [row[table.columns.index("gap closed, %")] for row in table.rows] == ["–", "25", "–", "–", "–", "–"]


def test_u6_the_table_of_a_run_says_that_its_model_predicts_one_class_or_guesses(made: Made) -> None:
    result = made(of("rscfed"), 0.5)
    result.rounds[-1]["test"] |= {"recall_per_class": [0.0, 1.0], "balanced_accuracy": 0.5}
    assert "The model predicts the same class for every image." in result.table().notes
    result.rounds[-1]["test"]["recall_per_class"] = [0.1, 0.9]
    assert [note for note in result.table().notes if note.startswith("The model guesses: balanced accuracy is less")]
    result.rounds[-1]["test"]["balanced_accuracy"] = 0.9
    assert not [note for note in result.table().notes if "The model" in note]


def test_a_paired_t_test_by_hand() -> None:
    """Differences 1, 2, 3, 4, 5: mean 3, standard deviation sqrt(2.5), t = 3 / sqrt(2.5 / 5) = sqrt(18) = 4.2426.

    With 4 degrees of freedom, the tails beyond t and -t are 1 - s (3 - s^2) / 2, s being t / sqrt(t^2 + 4).
    """
    s = (18 / 22) ** 0.5
    one, other = {n: n + 1.0 for n in range(5)}, dict.fromkeys(range(5), 0.0)
    assert paired(one, other) == pytest.approx(1 - s * (3 - s**2) / 2)
    assert paired({**one, 9: 7.0}, other) == paired(one, other)  # of seeds that both have
    assert paired({n: n for n in range(4)}, other) is None
    assert paired(other, other) == 1.0


def test_holm_corrects_for_the_number_of_tests() -> None:
    """Three tests: 0.01 * 3, 0.02 * 2, and 0.03 * 1, which may not be below the one before it."""
    a, b, c = (object() for _ in range(3))
    found = holm({c: 0.03, a: 0.01, b: 0.02})  # type: ignore[dict-item]
    assert [found[key] for key in (a, b, c)] == pytest.approx([0.03, 0.04, 0.04])  # type: ignore[index]
    assert list(holm({a: 0.7, b: 0.8}).values()) == [1.0, 1.0]  # type: ignore[dict-item]


def test_differences_are_tested_from_five_seeds_on(made: Made) -> None:
    floor, good = [0.50, 0.51, 0.52, 0.53, 0.54], [0.70, 0.72, 0.71, 0.73, 0.75]
    same = [0.55, 0.46, 0.56, 0.49, 0.53]
    for count, tested in ((4, False), (5, True)):
        results = over_seeds(made, "labels-only", floor[:count]) + over_seeds(made, "fedavg", same[:count])
        comparison = Comparison(results + over_seeds(made, "fedprox", good[:count]))
        assert ("p, to floor" in comparison.table().columns) is tested
        notes = " ".join(comparison.table().notes)
        assert ("Too few seeds" in notes, "paired t-test" in notes) == (not tested, tested)
    rows = {row["name"]: row for row in comparison.to_json()}
    assert column(comparison, "p, to floor")["fedprox"] == "<0.001"
    assert rows["fedavg"]["p_to_floor"] > 0.5
    assert rows["fedavg"]["p_to_best"] == paired(dict(enumerate(same)), dict(enumerate(good)))  # one test: as it is
    assert rows["fedprox"]["p_to_best"] is rows["labels-only"]["p_to_floor"] is None


def test_rows_without_a_shared_model_show_their_clients_own(made: Made) -> None:
    shared = made(of("fedavg"), 0.5, local_accuracy=0.4)
    assert "clients' own models: accuracy" not in Comparison([shared]).table().columns
    comparison = Comparison([shared, made(of("local-sl"), None, local_accuracy=0.3)])
    assert column(comparison, "clients' own models: accuracy") == {"fedavg": "40.0", "local-sl": "30.0"}
    assert column(comparison, "accuracy") == {"fedavg": "50.0", "local-sl": "–"}


def test_pseudo_labels_have_columns_where_there_are_some(made: Made) -> None:
    plain, said = made(of("fedavg"), 0.5), {"precision": 0.75, "coverage": 0.5}
    assert not [words for words in Comparison([plain]).table().columns if "pseudo" in words]
    comparison = Comparison([plain, made(of("rscfed"), 0.5, pseudo_labels=said)])
    assert column(comparison, "pseudo-labels: precision") == {"fedavg": "–", "rscfed": "75.0"}
    assert column(comparison, "pseudo-labels: coverage") == {"fedavg": "–", "rscfed": "50.0"}


def test_a_ceiling_with_the_labels_of_the_floor_leaves_no_gap_and_that_is_told(made: Made) -> None:
    def told(value: float, images: int | None) -> list[str]:
        rows = {"labels-only": (0.5, 1000), "rscfed": (0.6, 1000), "all-labels": (value, images)}
        found = [
            made(of(name), accuracy, **({"images_labeled": count, "images_unlabeled": 0} if images else {}))
            for name, (accuracy, count) in rows.items()
        ]
        return [note for note in Comparison(found).table().notes if "No gap to close" in note]

    assert told(0.5, 1000) == ["No gap to close: all-labels has no more labels than labels-only."]
    assert told(0.5, 9000) == told(0.7, 1000) == told(0.5, None) == []  # that of sites elsewhere nobody knows


def test_runs_of_equal_work_are_compared_whatever_their_rounds_are(made: Made) -> None:
    def run(name: str, rounds: int, seed: int, value: float) -> Result:
        return made(replace(of(name), rounds=rounds, seed=seed), value)

    floor = [run("labels-only", 40, 0, 0.4), run("labels-only", 44, 1, 0.6)]
    own = [run("rscfed", 10, 0, 0.5), run("rscfed", 12, 1, 0.9)]
    ceiling = [run("all-labels", 9, seed, 0.9) for seed in (0, 1)]
    comparison = Comparison([*floor, *own, *ceiling])
    assert len(comparison.groups) == 1
    assert {name: text[:4] for name, text in column(comparison, "accuracy").items()} == {
        "labels-only": "50.0", "rscfed": "70.0", "all-labels": "90.0",
    }  # fmt: skip
    assert column(comparison, "gap closed, %")["rscfed"] == "50"
    assert not [note for note in comparison.table().notes if "more than their method" in note]
    both = Comparison([*own, run("rscfed", 20, 0, 0.8)])  # one seed with two numbers of rounds is two rows
    assert [row[0] for row in both.table().rows] == ["rscfed rounds=10", "rscfed rounds=20"]


def test_a_model_that_predicts_one_class_for_every_image_is_noted(made: Made) -> None:
    def told(*recalls: float) -> list[str]:
        results = [made(of("fedavg"), 0.5), made(of("rscfed"), 0.5)]
        results[1].rounds[-1]["test"]["recall_per_class"] = list(recalls)
        return [note for note in Comparison(results).table().notes if "same class" in note]

    assert told(0.0, 1.0, 0.0) == ["These models predict the same class for every image: rscfed (seed 0)."]
    assert told(0.1, 1.0, 0.0) == []
    assert told(0.0, 0.9, 0.0) == []


def test_a_method_that_trains_on_far_more_images_than_the_floor_is_noted(made: Made) -> None:
    def told(unlabeled: int) -> list[str]:
        rows = {"labels-only": (1000, 0), "rscfed": (800, unlabeled), "all-labels": (9000, 0)}
        found = [made(of(name), 0.5, images_labeled=a, images_unlabeled=b) for name, (a, b) in rows.items()]
        return [note for note in Comparison(found).table().notes if "Unequal work" in note]

    assert told(1500) == ["Unequal work: rscfed trained on 2.3 times as many images as labels-only."]
    assert told(600) == []
    assert not [note for note in Comparison([made(of("rscfed"), 0.5)]).table().notes if "Unequal work" in note]


# how it is written


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_fits_the_terminal_with_its_words_and_numbers_unbroken(
    made: Made, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    results = []
    for name in ("labels-only", "fedavg", "a-rather-long-name-of-a-method", "all-labels"):
        experiment = replace(of(name if "long" not in name else "rscfed"), name=name)
        for seed, value in enumerate((0.1, 0.5, 0.9, 0.1, 0.9)):
            more = {"pseudo_labels": {"precision": value, "coverage": value}, "bytes_up": 10**9}
            more |= {"images_labeled": 3000, "images_unlabeled": 10**6}
            results.append(made(replace(experiment, seed=seed), value, **more))
    text = "\n\n".join(map(str, Comparison(results).tables(every=True)))
    assert max(map(len, text.splitlines())) <= width
    assert "\x1b" not in text
    assert text.count("50.0 ± 40") == 4 * 5  # accuracy, balanced accuracy, AUC, precision and coverage
    words = {"accuracy", "balanced", "precision", "coverage", "thousands", "FedAvg)", "sec."}
    assert words <= set(text.split())
    rows = [line.split()[0] for line in text.splitlines() if line and line[0].isalpha()]
    assert rows.count("labels-only") == rows.count("all-labels") == rows.count("fedavg") >= 2


def test_u16_a_comparison_is_one_block_of_at_most_seven_columns_and_three_notes(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With long names, several seeds, a row that guesses, and unequal work."""
    monkeypatch.setenv("COLUMNS", "80")
    values = {"labels-only": 0.5, "fed-selftraining": 0.1, "fedprox": 0.6, "fedmatch-sparse": 0.55, "all-labels": 0.9}
    results = []
    for name, value in values.items():
        more = {"images_labeled": 42_000, "images_unlabeled": 1_234_000 * ("fed" in name)}
        more |= {"pseudo_labels": {"precision": value, "coverage": value}}
        results += [made(replace(of(name), seed=seed), value + seed / 1000, **more) for seed in (0, 1, 2)]
    comparison = Comparison(results)
    (table,) = comparison.tables()
    assert table.columns == ("method", "accuracy", "gap closed, %", "balanced acc.", "AUC", "images, thousands")
    assert len(table.notes) == 3
    text = str(comparison)
    assert max(map(len, text.splitlines())) <= 80
    rows = [line.split()[0] for line in text.splitlines() if line.count("±") == 3]
    assert rows == list(values)
    (everything,) = comparison.tables(every=True)
    assert set(table.columns) < set(everything.columns)
    assert len(everything.notes) > 3


def test_u16_without_a_gap_the_points_above_the_floor_are_shown(made: Made) -> None:
    values = {"labels-only": 0.5, "fedavg": 0.6, "fedprox": 0.45, "all-labels": 0.52}
    (table,) = Comparison([made(of(name), value) for name, value in values.items()]).tables()
    at = table.columns.index("above floor")
    assert "gap closed, %" not in table.columns
    assert [row[at] for row in table.rows] == ["–", "+10.0", "-5.0", "+2.0"]


def test_u16_one_seed_has_an_interval_over_test_images_and_several_their_deviation(made: Made) -> None:
    """Of 100 images 80 are right: tests/report/test_intervals.py has the interval, 72 to 87, so 7.5 to either side."""
    confusion = [[45, 5], [15, 35]]
    results = [made(replace(of("fedavg"), seed=seed), 0.8) for seed in (0, 1)]
    for result in results:
        result.rounds[-1]["test"]["confusion"] = confusion
    one = Comparison(results[:1])
    assert one.table().rows[0][1:3] == ("80.0 ± 7.5", "80.0 ± 7.5")
    assert one.table().notes[0].endswith("± is a 95 % interval over test images.")
    assert one.to_json()[0]["interval"]["accuracy"] == pytest.approx([0.72, 0.87])
    both = Comparison(results)
    assert both.table().rows[0][1:3] == ("80.0 ± 0.0", "80.0 ± 0.0")
    assert both.table().notes[0].startswith("Mean ± standard deviation of seeds 0, 1")
    assert "interval" not in both.table().notes[0]


def test_u17_few_images_are_not_nothing() -> None:
    assert [thousands(n) for n in (0, 12, 50, 449, 9_940, 9_960, 1_234_567)] == [
        "0", "<0.1", "0.1", "0.4", "9.9", "10", "1,235",
    ]  # fmt: skip


def test_a_column_that_does_not_fit_stands_below_with_the_names_again() -> None:
    table = Table("t", ("name", "a" * 30, "b" * 30, "c" * 30), (("x", "1", "2", "3"),))
    text = str(table)
    assert text.index("a" * 30) < text.index("b" * 30) < text.index("c" * 30)
    assert [line.split() for line in text.splitlines() if line.startswith("x")] == [["x", "1", "2"], ["x", "3"]]


def test_no_part_of_a_table_is_wider_than_it_must_be_so_that_no_column_stands_alone() -> None:
    """Four columns of 22 and the name: 67 for three of them, 45 for two."""
    table = Table("t", ("name", *(letter * 20 for letter in "abcd")), (("x", "1", "2", "3", "4"),))
    assert [line.split() for line in str(table).splitlines() if line.startswith("x")] == [
        ["x", "1", "2"],
        ["x", "3", "4"],
    ]


def test_numbers_are_short() -> None:
    assert [megabytes(n) for n in (0, 1.234e6, 99.94e6, 99.96e6, 1.2345e9)] == ["0", "1.23", "99.9", "100", "1,234"]
    assert [seconds(n) for n in (0.04, 99.94, 99.96, 3600)] == ["0.0", "99.9", "100", "3,600"]


def test_markdown_keeps_its_columns_apart() -> None:
    table = Table("t", ("a", "b"), (("x|y", "1"),), ("A note.",), headings=((0, "s"),))
    assert table.markdown() == "**t**\n\n| a | b |\n| --- | ---: |\n| *s* |  |\n| x\\|y | 1 |\n\nA note.\n"


def test_latex_has_the_lines_of_booktabs_and_escapes_what_it_would_take_for_commands() -> None:
    rows = (("a_b & 5%", "60.0 ± 1.0"), ("$x^2$ {~} \\cmd #", "–"))
    table = Table("50% of <x>", ("name", "b"), rows, ("A_note.",), frozenset({(0, 1)}), headings=((0, "s"), (1, "t")))
    assert table.latex().splitlines() == [
        r"\begin{table}  % \usepackage{booktabs}",
        r"\centering\small\setlength{\tabcolsep}{4pt}",
        r"\caption{50\% of \textless{}x\textgreater{}}",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"name & b \\",
        r"\midrule",
        r"\multicolumn{2}{l}{\emph{s}} \\",
        r"a\_b \& 5\% & \textbf{60.0 $\pm$ 1.0} \\",
        r"\midrule",
        r"\multicolumn{2}{l}{\emph{t}} \\",
        r"\$x\textasciicircum{}2\$ \{\textasciitilde{}\} \textbackslash{}cmd \# & -- \\",
        r"\bottomrule",
        r"\end{tabular}",
        r"\par\smallskip\footnotesize\raggedright",
        r"A\_note.",
        r"\end{table}",
    ]


def test_u17_latex_is_one_piece_and_shrunk_if_it_is_wider_than_the_page() -> None:
    rows = (("a" * 20, "-25", *["60.0 ± 1.0"] * 4),)
    table = Table("t", ("name", "gap closed, %", *["pseudo-labels: accuracy"] * 4), rows, ("Note.",))
    text = table.latex()
    assert (text.count(r"\begin{table}"), text.count("60.0"), text.count("a" * 20), text.count("Note.")) == (1, 4, 1, 1)
    assert r"\shortstack[r]{gap\\closed,\\\%}" in text
    assert r"\shortstack[r]{pseudo-labels:\\accuracy}" in text
    assert "$-$25" in text
    lines = text.splitlines()
    assert lines[0] == r"\begin{table}  % \usepackage{booktabs,graphicx}"
    assert lines[3] == r"\resizebox{\linewidth}{!}{%"
    assert r"\end{tabular}}" in lines


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here: apt-get install texlive-latex-recommended")
def test_latex_compiles_and_nothing_is_wider_than_the_page(made: Made, tmp_path: Path) -> None:
    """Five seeds, so that there are chances, long names, and two settings with an overview before them."""
    results = []
    for alpha in (0.1, 0.8):
        for name, off in {"labels-only": 0.0, "fedavg": 0.01, "rscfed": 0.02, "all-labels": 0.05}.items():
            for seed, value in enumerate((0.1, 0.5, 0.9, 0.2, 0.8)):
                shown = "a-rather-long-name_of & a $method$ 100%" if name == "rscfed" else name
                experiment = replace(of(name, clients=Clients(alpha=alpha)), seed=seed, name=shown)
                more = {"pseudo_labels": {"precision": value, "coverage": value}, "bytes_up": 10**9}
                results.append(made(experiment, value + off, **more))
    text = "\n".join(table.latex() for every in (False, True) for table in Comparison(results).tables(every))
    whole = rf"\documentclass{{article}}\usepackage{{booktabs,graphicx}}\begin{{document}}{text}\end{{document}}"
    (tmp_path / "page.tex").write_text(whole)
    command = ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "page.tex"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stdout[-2000:]
    assert "Overfull" not in said.stdout, said.stdout
    for words in (r"\textbf", r"\underline", "gap", "paired t-test"):
        assert words in text


def test_brackets_in_names_are_no_markup() -> None:
    assert "[red]x[/red]" in str(Table("[bold]", ("",), (("[red]x[/red]",),)))


def test_a_csv_has_a_line_for_each_row_with_all_its_digits(made: Made) -> None:
    results = [*over_seeds(made, "fedavg", [0.5, 0.6]), made(of("local-sl"), None, local_accuracy=1 / 3)]
    one, other = csv.DictReader(io.StringIO(Comparison(results).csv()))
    assert (one["name"], one["seeds"], float(one["last_accuracy_mean"])) == ("fedavg", "0 1", 0.55)
    assert float(one["last_accuracy_std"]) == pytest.approx(0.1 / 2**0.5)
    assert (float(other["local_accuracy_mean"]), other["last_accuracy_mean"]) == (1 / 3, "")


@pytest.mark.parametrize("below", ["", "000"])
def test_show_writes_each_form_and_nothing_else(
    made: Made, below: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made(of("fedavg"), 0.5)
    made(of("fedprox"), 0.6)

    def show(form: str) -> str:
        assert main(["show", str(tmp_path / "runs" / below), "--format", form]) == 0
        return capsys.readouterr().out

    assert "50.0" in show("text")
    assert show("markdown").startswith("**")
    assert "| --- | ---: |" in show("markdown")
    assert show("latex").startswith(r"\begin{table}")
    assert show("latex").endswith("\\end{table}\n")
    lines = list(csv.DictReader(io.StringIO(show("csv"))))
    assert [line["last_auc_mean"] for line in lines] == (["0.5"] if below else ["0.5", "0.6"])
    json.loads(show("json"))


def test_the_note_on_the_recipe_says_whose_sites_were_changed(made: Made) -> None:
    def note(*experiments: Experiment) -> str:
        text = " ".join(Comparison([made(one, 0.5) for one in experiments]).table().notes)
        return text[text.index("Recipe") :].split(" The chosen round")[0]

    whole, few, many = (
        read({"recipe": "fewlabel", "rounds": 1, "method": name}, changes)
        for name, changes in {
            "labels-only": [],
            "fedprox": ["method.local.lr=0.5"],
            "rscfed": [f"method.local.{key}" for key in ("lr=0.1", "epochs=1", "clip=1.0", "batch_size=8")],
        }.items()
    )
    assert note(whole).endswith("balanced classes, warm-up on labels alone, mixed images.")
    assert note(whole, few).endswith(
        "labels alone, mixed images. Not as the recipe trains sites: fedprox (method.local.lr)."
    )
    assert note(many).endswith(
        "sites: rscfed (method.local.epochs, method.local.batch_size, method.local.lr and 1 more)."
    )
    printed = read({"recipe": "printed", "rounds": 1}, ["method.local.lr=0.5"])
    assert note(printed) == "Recipe printed: trained as the papers print it."
    assert str(Result(made(few, 0.5).directory).table()).count("Not as the recipe trains") == 1
