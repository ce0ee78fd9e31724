"""What is wrong is said in the round that shows it, once, with its cause and the setting that mends it."""

from pathlib import Path
from typing import Any

import pytest

from fewlabel.cli.main import main
from fewlabel.experiment import Experiment, Train
from fewlabel.methods.cbafed import CBAFed
from fewlabel.report.findings import SHORT, Finding, findings, predicts_one_class, too_few_rounds
from fewlabel.report.terminal import Rounds, Runs

ONE_CLASS = [0.0, 1.0, 0.0]
SEVERAL = [0.2, 0.8, 0.2]


def line(number: int, recalls: list[float], auc: float = 0.6, unlabeled: int = 0, **more: Any) -> dict[str, Any]:
    balanced = sum(recalls) / len(recalls)
    test = {"accuracy": balanced, "balanced_accuracy": balanced, "auc": auc, "recall_per_class": recalls}
    costs = {"seconds": 1.0, "bytes_up": 0, "bytes_down": 0, "images_labeled": 10, "images_unlabeled": unlabeled}
    return {"round": number, "test": test, **costs, **more}


def found(experiment: Experiment, *lines: dict[str, Any]) -> Finding:
    (finding,) = findings(experiment, lines)
    return finding


def of(method: str = "rscfed", rounds: int = 10, train: Train | None = None) -> Experiment:
    return Experiment(method=method, rounds=rounds, train=train)


def test_without_a_warm_up_the_missing_warm_up_is_the_cause() -> None:
    pseudo = {"pseudo_labels": {"precision": 0.125, "coverage": 1.0}}
    lines = [line(number, ONE_CLASS, unlabeled=90, **pseudo) for number in (1, 2, 3)]
    finding = found(of(), *lines)
    assert (finding.kind, finding.round) == ("one-class", 2)  # in round 1 nobody knows much
    assert finding.what == "The model predicts the same class for every test image."
    assert finding.why == (
        "It used unlabeled images from round 1 on, before it had learned from labels. Of its pseudo-labels, 12.5 % are "
        "right."
    )
    assert finding.mend == "Add a warm-up: set recipe=fewlabel, or train.warmup=0.25 alone."


def test_during_the_warm_up_nothing_is_said() -> None:
    """A quarter of 20 rounds is 5. A model that has not begun to learn gets a tenth of the rounds, at least one."""
    warm = of(rounds=20, train=Train(warmup=0.25))
    lines = [line(number, ONE_CLASS) for number in range(1, 6)]
    assert findings(warm, lines) == []
    finding = found(warm, *lines, line(6, ONE_CLASS, unlabeled=90))
    assert finding.round == 6
    assert finding.why == "Its warm-up of 5 rounds was too short to learn from labels."
    assert finding.mend == "Raise train.warmup, or rounds."
    own = Experiment(method=CBAFed(warmup=3), rounds=10)
    assert found(own, *(line(n, ONE_CLASS, unlabeled=90 * (n > 3)) for n in range(1, 6))).round == 4
    assert "Raise method.warmup" in found(own, *(line(n, ONE_CLASS, unlabeled=90 * (n > 3)) for n in range(1, 6))).mend


def test_a_model_that_knew_more_before_was_misled() -> None:
    lines = [line(1, ONE_CLASS), line(2, SEVERAL), line(3, ONE_CLASS, unlabeled=90)]
    finding = found(of(rounds=8, train=Train(warmup=0.25)), *lines)
    assert finding.round == 3
    assert finding.why == "Unlabeled images misled it: its balanced accuracy was 40.0 % in round 2."
    assert finding.mend == "Raise train.warmup, or lower method.local.lr (now 0.03)."


def test_equal_scores_for_all_images_are_a_rate_that_is_too_large() -> None:
    """Equal scores are ties, and a tie counts one half: the AUC is exactly 0.5."""
    finding = found(of("labels-only", rounds=100), line(1, ONE_CLASS, 0.5), line(2, ONE_CLASS, 0.5))
    assert finding.round == 2
    assert finding.why == "It gives all images the same scores, so its training has diverged."
    assert finding.mend.startswith("Lower method.local.lr (now ")


def test_labels_alone_get_a_tenth_of_the_rounds_to_begin() -> None:
    lines = [line(number, ONE_CLASS, 0.7) for number in range(1, 30)]
    finding = found(of("labels-only", rounds=100), *lines)
    assert finding.round == 11
    assert finding.why == "It has begun to tell classes apart (AUC 70.0 %), but one class outweighs the others."
    assert finding.mend.startswith("Set train.balance=logit-adjusted, or raise rounds or method.local.lr (now ")
    even = found(of("labels-only", rounds=100, train=Train(balance="logit-adjusted")), *lines)
    assert even.mend.startswith("Raise rounds or method.local.lr (now ")
    assert found(of("labels-only"), line(1, ONE_CLASS, 0.51), line(2, ONE_CLASS, 0.51)).why == (
        "It has learned nothing from the labels yet."
    )


def test_the_last_round_has_no_patience_and_a_good_run_no_finding() -> None:
    assert found(of(rounds=1), line(1, ONE_CLASS)).round == 1
    assert findings(of(), [line(number, SEVERAL) for number in range(1, 11)]) == []
    assert findings(of(), [{"round": 1}, {"round": 2}]) == []  # nothing is measured


def test_what_is_predicted_counts_not_what_is_right() -> None:
    """Rows are true classes, columns are predictions."""
    all_2 = {"test": {"confusion": [[0, 0, 3], [0, 0, 5], [0, 0, 0]]}}  # of class 2 there is no test image
    swapped = {"test": {"confusion": [[0, 3, 0], [5, 0, 0], [0, 0, 4]], "recall_per_class": ONE_CLASS}}
    alone = {"test": {"confusion": [[9, 0], [0, 0]]}}  # only one class is tested
    assert [predicts_one_class(each) for each in (all_2, swapped, alone, {})] == [True, False, False, False]


def test_it_is_said_once_in_its_round_also_after_a_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experiment = of(rounds=4)
    with Rounds(experiment, tmp_path, pace=0) as shown:
        for number in range(1, 5):
            shown.watch(line(number, ONE_CLASS, unlabeled=90))
    said = capsys.readouterr().err.splitlines()
    assert [text[:8] for text in said] == ["round 1/", "round 2/", "fewlabel", "round 3/", "round 4/"]
    assert said[2].startswith("fewlabel: round 2: The model predicts the same class for every test image. It used")
    with Runs({tmp_path / "a": of("fedirm"), tmp_path / "b": experiment}, done=0) as many:
        for number in (1, 2, 3):
            many.watch(tmp_path / "b", line(number, ONE_CLASS, unlabeled=90))
        many.watch(tmp_path / "b", {"done": True})
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("fewlabel: rscfed, round 2: The model predicts")
    assert said[1].startswith("1/2  rscfed")
    assert len(said) == 2


def test_a_real_run_that_guesses_is_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ("rounds=3", "recipe=printed", "data.image_size=16", "clients.count=4", "method.local.epochs=2")
    more = ["--data", "digits", "--workers", "1", *(word for change in quick for word in ("--set", change))]
    assert main(["run", "--method", "rscfed", *more]) == 0
    told = capsys.readouterr()
    (warning,) = [text for text in told.err.splitlines() if text.startswith("fewlabel: round")]
    assert warning.startswith("fewlabel: round 2: The model predicts the same class for every test image. It used")
    assert warning.endswith("Add a warm-up: set recipe=fewlabel, or train.warmup=0.25 alone.")
    assert "The model predicts the same class for every image." in told.out
    assert main(["compare", "--methods", "rscfed", *more]) == 0
    told = capsys.readouterr()
    assert [text for text in told.err.splitlines() if text.startswith("fewlabel: rscfed") and "round 2: The" in text]
    assert "rscfed (guesses)" in told.out


def test_weights_that_are_not_finite_end_the_run_with_the_setting_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    more = ["--set", "method.local.lr=1e30", "--set", "method.local.clip=none", "--set", "rounds=2", "--workers", "1"]
    assert main(["run", "--method", "labels-only", "--data", "digits", *more]) != 0
    told = capsys.readouterr().err
    assert "of round 1" in told
    assert "if its training has diverged, lower method.local.lr or set method.local.clip" in told


def test_a_short_run_is_told_that_its_average_lags_behind() -> None:
    recipe = Train(average=0.8)
    assert too_few_rounds(of(rounds=5, train=recipe)) == (
        "5 rounds are few: what is measured is an average over rounds, which lags behind in so short a run. "
        "Set rounds=30 or more, or train.average=0."
    )
    assert too_few_rounds(of(rounds=1, train=recipe)).startswith("One round is few")
    assert too_few_rounds(of(rounds=SHORT + 1, train=recipe)) == ""
    assert too_few_rounds(of(rounds=5, train=Train(average=0))) == too_few_rounds(of(rounds=5)) == ""
