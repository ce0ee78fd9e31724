"""Metrics against values worked by hand, against scikit-learn, and pooled against whole."""

import json
import math
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor, nn

from fewlabel.core.errors import BadInput
from fewlabel.core.metrics import (
    Audit,
    auc,
    audit_metrics,
    count,
    measure,
    merge_audits,
    predict,
)

# Six images, two of class 0, three of class 1, one of class 2.
#                         class 0 class 1 class 2    true predicted
TINY = torch.tensor(
    [
        [0.70, 0.20, 0.10],  # 0    0
        [0.30, 0.45, 0.25],  # 0    1
        [0.10, 0.80, 0.10],  # 1    1
        [0.40, 0.40, 0.20],  # 1    0, a tie that goes to the lowest class
        [0.05, 0.50, 0.45],  # 1    1
        [0.20, 0.50, 0.30],  # 2    1
    ]
)
TINY_Y = torch.tensor([0, 0, 1, 1, 1, 2])


def random_case(
    seed: int, n: int, classes: int, *, absent: tuple[int, ...] = (), silent: tuple[int, ...] = (), digits: int = 15
) -> tuple[Tensor, Tensor]:
    """Scores that lean to the truth: `absent` classes are not in y, `silent` ones score 0, few `digits` make ties."""
    rng = np.random.default_rng(seed)
    y = rng.choice([c for c in range(classes) if c not in absent], size=n)
    scores = rng.normal(size=(n, classes)) * 2
    scores[np.arange(n), y] += 1.0
    scores[:, list(silent)] = -np.inf
    return torch.from_numpy(scores).softmax(1).round(decimals=digits), torch.from_numpy(y)


CASES = {
    "plain": random_case(0, 500, 5),
    "ties": random_case(1, 400, 4, digits=1),
    "two classes": random_case(2, 300, 2),
    "two classes with ties": random_case(3, 300, 2, digits=1),
    "absent classes": random_case(4, 300, 6, absent=(0, 4)),
    "neither in y nor predicted": random_case(5, 200, 4, absent=(3,), silent=(3,)),
    "one class only": random_case(6, 50, 3, absent=(0, 2)),
    "never predicted": random_case(7, 200, 3, silent=(1,)),
}
CASES["float32 and uint8"] = CASES["plain"][0].float(), CASES["plain"][1].to(torch.uint8)
each_case = pytest.mark.parametrize(("scores", "y"), CASES.values(), ids=CASES.keys())


def test_counts_by_hand():
    counts = count(TINY, TINY_Y)
    assert counts.confusion.tolist() == [[1, 1, 0], [1, 2, 0], [0, 1, 0]]
    # From 0.4 on (0.40 itself is in): class 0: 0.70 (is 0), 0.40 (is 1). Class 1: 0.45 (is 0), 0.80, 0.40 and 0.50
    # (are 1), 0.50 (is 2). Class 2: 0.45 (is 1).
    assert counts.above.tolist() == [[1, 1], [2, 3], [1, 0]]


def test_metrics_by_hand():
    result = measure(TINY, TINY_Y)
    assert result["images"] == 6
    assert result["accuracy"] == pytest.approx(3 / 6)
    # Recall: 1 of 2, 2 of 3, 0 of 1.
    assert result["recall_per_class"] == pytest.approx([1 / 2, 2 / 3, 0])
    assert result["balanced_accuracy"] == result["recall"] == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)
    # Precision: 1 of 2 predictions of class 0, 2 of 4 of class 1, class 2 is never predicted: 0.
    assert result["precision"] == pytest.approx((1 / 2 + 2 / 4 + 0) / 3)
    # Specificity: of the 4 not of class 0, 3 are not called 0; of the 3 not of class 1, 1; of the 5 not of class 2, 5.
    assert result["specificity"] == pytest.approx((3 / 4 + 1 / 3 + 5 / 5) / 3)
    # F1 = 2 right / (true + predicted): 2/(2+2), 4/(3+4), 0/(1+0).
    assert result["f1"] == pytest.approx((2 / 4 + 4 / 7 + 0) / 3)
    # AUC, pairs won. Class 0: 0.70 beats all 4 of {.10 .40 .05 .20}, 0.30 beats 3: 7 of 8.
    # Class 1: against {.20 .45 .50}: 0.80 wins 3, 0.40 wins 1, 0.50 wins 2 and ties one: 6.5 of 9.
    # Class 2: 0.30 against {.10 .25 .10 .20 .45}: 4 of 5.
    assert result["auc_per_class"] == pytest.approx([7 / 8, 6.5 / 9, 4 / 5])
    assert result["auc"] == pytest.approx((7 / 8 + 6.5 / 9 + 4 / 5) / 3)
    # Binary, right decisions: class 0: 1 of 2 positives, 3 of 4 negatives; class 1: 3 of 3 and 1 of 3;
    # class 2: 0 of 1 and 4 of 5.
    assert result["binary_sensitivity"] == pytest.approx((1 / 2 + 3 / 3 + 0) / 3)
    assert result["binary_specificity"] == pytest.approx((3 / 4 + 1 / 3 + 4 / 5) / 3)
    assert result["binary_accuracy"] == pytest.approx((4 / 6 + 4 / 6 + 4 / 6) / 3)
    assert result["binary_f1"] == pytest.approx((2 / 4 + 6 / 8 + 0) / 3)  # twice the hits by hits, alarms and positives
    assert result["confusion"] == [[1, 1, 0], [1, 2, 0], [0, 1, 0]]


def test_another_threshold():
    # From 0.25 on: class 0: .70 .30 (both 0) and .40 (is 1).
    assert count(TINY, TINY_Y, threshold=0.25).above[0].tolist() == [1, 2]
    assert measure(TINY, TINY_Y, 0.25)["binary_accuracy"] != measure(TINY, TINY_Y)["binary_accuracy"]


def test_collapsed_pneumonia_mnist():
    """Always class 1 on the 624 test images: the values known from papers for a model that has collapsed."""
    y = torch.cat([torch.zeros(234), torch.ones(390)]).long()
    scores = torch.tensor([[0.2, 0.8]]).repeat(624, 1)
    result = measure(scores, y)
    assert result["images"] == 624
    assert [100 * result[name] for name in ("accuracy", "precision", "recall", "auc")] == [62.5, 31.25, 50.0, 50.0]
    assert result["specificity"] == result["balanced_accuracy"] == 0.5


@each_case
def test_agrees_with_sklearn(scores: Tensor, y: Tensor):
    result, predicted, truth = measure(scores, y), scores.numpy().argmax(1), y.numpy()
    classes = scores.shape[1]
    expected = {"accuracy": reference.accuracy_score(truth, predicted)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "y_pred contains classes not in y_true", "a single label"
        expected["balanced_accuracy"] = reference.balanced_accuracy_score(truth, predicted)
    for name in ("precision", "recall", "f1"):
        score = getattr(reference, f"{name}_score")
        expected[name] = score(truth, predicted, average="macro", zero_division=0)
    # Specificity is the recall of "not this class".
    occurring = np.union1d(truth, predicted)
    expected["specificity"] = np.mean(
        [reference.recall_score(truth != c, predicted != c, zero_division=0) for c in occurring]
    )
    over = (scores >= 0.4).numpy()
    expected["binary_accuracy"] = np.mean([np.mean(over[:, c] == (truth == c)) for c in range(classes)])
    have, lack = ([c for c in range(classes) if ((truth == c) == side).any()] for side in (True, False))
    sensitivity = [reference.recall_score(truth == c, over[:, c], zero_division=0) for c in have]
    specificity = [reference.recall_score(truth != c, ~over[:, c], zero_division=0) for c in lack]
    expected["binary_sensitivity"] = np.mean(sensitivity)
    expected["binary_specificity"] = np.mean(specificity)
    expected["binary_f1"] = np.mean([reference.f1_score(truth == c, over[:, c], zero_division=0) for c in have])
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    assert result["confusion"] == reference.confusion_matrix(truth, predicted, labels=range(classes)).tolist()


@each_case
def test_auc_agrees_with_sklearn(scores: Tensor, y: Tensor):
    exact = auc(scores, y)
    assert exact.dtype == torch.float64
    for c, value in enumerate(exact.tolist()):
        truth = y.numpy() == c
        if truth.all() or not truth.any():
            assert math.isnan(value)
        else:
            assert value == pytest.approx(reference.roc_auc_score(truth, scores[:, c].numpy()), abs=1e-12)


@each_case
def test_metrics_are_plain_json(scores: Tensor, y: Tensor):
    result = measure(scores, y)
    assert json.loads(json.dumps(result, allow_nan=False)) == result


def test_no_images():
    scores, y = torch.empty(0, 3), torch.empty(0, dtype=torch.int64)
    result = measure(scores, y)
    lists = {"recall_per_class": [None] * 3, "auc_per_class": [None] * 3, "confusion": [[0] * 3] * 3}
    assert result == dict.fromkeys(result) | {"images": 0} | lists
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize(
    ("scores", "y", "says"),
    [
        (torch.rand(4), torch.zeros(4).long(), "table of floats"),
        (torch.rand(4, 0), torch.zeros(4).long(), "table of floats"),
        (torch.ones(4, 2).long(), torch.zeros(4).long(), "table of floats"),
        (torch.full((4, 2), math.nan), torch.zeros(4).long(), "finite"),
        (torch.full((4, 2), math.inf), torch.zeros(4).long(), "finite"),
        (torch.rand(4, 2), torch.zeros(3).long(), "4 whole numbers"),
        (torch.rand(4, 2), torch.zeros(4, 1).long(), "4 whole numbers"),
        (torch.rand(4, 2), torch.zeros(4), "4 whole numbers"),
        (torch.rand(4, 2), torch.tensor([0, 1, 2, 1]), "0..1"),
        (torch.rand(4, 2), torch.tensor([0, 1, -1, 1]), "0..1"),
    ],
)
def test_bad_input(scores: Tensor, y: Tensor, says: str):
    for function in (count, auc, measure):
        with pytest.raises(BadInput, match=says):
            function(scores, y)


def test_audits_of_nobody_cannot_be_merged():
    with pytest.raises(BadInput):
        merge_audits([])


class TestPredict:
    def model(self) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
        model[1].eval()  # a frozen layer in a model that trains
        return model

    def test_probabilities_in_eval_mode(self):
        model, x = self.model(), torch.randn(10, 4)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scores = predict(model, iter(x.split(4)))
        assert scores.dtype == torch.float32
        assert [module.training for module in model] == [True, False, True, True]
        assert model.training
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        torch.testing.assert_close(scores, model.eval()(x).softmax(1))

    def test_low_precision_is_raised_before_the_softmax(self):
        scores = predict(nn.Identity(), [torch.randn(5, 3, dtype=torch.bfloat16)])
        torch.testing.assert_close(scores.sum(1), torch.ones(5))

    def test_scores_can_serve_in_training(self):
        weight = torch.ones(1, requires_grad=True)
        scores = predict(nn.Identity(), [torch.randn(5, 3)])
        (weight * scores).sum().backward()
        assert weight.grad is not None

    def test_flags_come_back_after_an_error(self):
        model = self.model()
        with pytest.raises(RuntimeError):
            predict(model, [torch.randn(2, 5)])
        assert [module.training for module in model] == [True, False, True, True]

    def test_no_images(self):
        assert predict(self.model(), [torch.empty(0, 4)]).shape == (0, 3)
        with pytest.raises(BadInput, match="no batch"):
            predict(self.model(), [])


def test_audit():
    # 20 images; 5 called class 0 (of 4 with a known label 3 right), none class 1, 7 class 2 (of 6, 3 right): 12 of 20
    # used, 6 of 10 right.
    audit = Audit(20, torch.tensor([5, 0, 7]), torch.tensor([4, 0, 6]), torch.tensor([3, 0, 3]))
    assert audit_metrics(audit) == {
        "coverage": 0.6,
        "precision": 0.6,
        "precision_per_class": [0.75, None, 0.5],
        "used_per_class": [5, 0, 7],
    }
    again = Audit.from_json(json.loads(json.dumps(audit.to_json())))
    told = {"total": 20, "used": [5, 0, 7], "judged": [4, 0, 6], "correct": [3, 0, 3]}
    assert again.to_json() == audit.to_json() == told
    assert again.used.dtype == again.correct.dtype == torch.int64
    double = {"total": 40, "used": [10, 0, 14], "judged": [8, 0, 12], "correct": [6, 0, 6]}
    assert merge_audits(iter([audit, again])).to_json() == double


def test_audit_of_nothing():
    none = torch.zeros(2).long()
    nothing = Audit(0, none, none, none)
    empty = {"coverage": None, "precision": None, "precision_per_class": [None, None], "used_per_class": [0, 0]}
    assert audit_metrics(nothing) == empty
    assert audit_metrics(Audit(5, none, none, none)) == empty | {"coverage": 0.0}
    unjudged = Audit(4, torch.tensor([2, 1]), none, none)
    assert audit_metrics(unjudged) == empty | {"coverage": 0.75, "used_per_class": [2, 1]}
