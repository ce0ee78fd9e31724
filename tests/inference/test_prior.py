"""Which weights and which prior a model is used with: the user chooses, the card says so, exports carry it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import fewlabel as fl
from fewlabel.core.errors import BadInput
from fewlabel.engine import record
from fewlabel.engine.card import Card
from fewlabel.engine.run import execute
from fewlabel.engine.serial import Serial
from fewlabel.inference.predict import StoredModel
from fewlabel.inference.prior import with_prior
from tests.conftest import Command

CARD = Card(("cat", "dog"), {"name": "simple-cnn"}, 8, 1, (0.5,), (0.5,), {}, balanced=True)


@pytest.fixture(scope="module")
def run(small_run: Callable[..., Path]) -> Path:
    """Validation chooses round 3 of 6."""
    directory = small_run("method.local.lr=0.3", "evaluate.every=1", "train.balance=logit-adjusted", "seed=1")
    execute(directory, executor=Serial())
    return directory


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("images") / "some.npz"
    np.savez(path, images=np.random.default_rng(0).integers(0, 256, (4, 16, 16), dtype=np.uint8))
    return path


def shift(card: Card, prior: object, run: Path = Path("nowhere")) -> list[float]:
    found = with_prior(card, prior, run).shift  # type: ignore[arg-type]
    assert found is not None
    return list(found)


# Priors


def test_a_prior_adds_its_logarithm_to_a_balanced_model() -> None:
    """A model with equal classes has odds of 1. With 3 to 1, ln 3 comes between the logits."""
    assert with_prior(CARD, None, Path("nowhere")) == CARD
    assert shift(CARD, "equal") == [0, 0]
    cat, dog = shift(CARD, {"cat": 3, "dog": 1})
    assert cat - dog == pytest.approx(np.log(3))
    assert with_prior(CARD, "dog=1,cat=3", Path("nowhere")).prior == (0.75, 0.25)


def test_a_second_prior_replaces_the_first() -> None:
    first = with_prior(CARD, "cat=9,dog=1", Path("nowhere"))
    assert shift(first, "cat=3,dog=1") == pytest.approx(shift(CARD, "cat=3,dog=1"))
    assert shift(first, "equal") == pytest.approx([0, 0])


def test_a_prior_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "prior.txt").write_text("cat = 30\n\ndog=10\n")
    assert shift(CARD, str(tmp_path / "prior.txt")) == shift(CARD, "cat=3,dog=1")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("cat=1", "lacks dog; it must have the classes cat, dog"),
        ("cat=1,dog=1,cow=1", "has cow"),
        ("cat=1,dog=0", "numbers above 0, found 1.0, 0.0"),
        ("cat=much,dog=1", "a number for each class, as in cat=0.9, found 'cat=much'"),
        ("lables", "--prior is equal, labels, a file, or shares such as cat=0.9,dog=0.1; found 'lables'"),
        ("labels", "sites keep that to themselves"),
    ],
)
def test_a_prior_that_cannot_be_is_one_sentence(given: str, told: str) -> None:
    with pytest.raises(BadInput, match=told):
        with_prior(CARD, given, Path("nowhere"))


def test_the_labels_of_a_run_are_its_prior_with_one_more_of_each_class(run: Path, images: Path) -> None:
    counts = np.array(record.read_summary(run)["labels_per_class"])
    card = StoredModel.open(run, prior="labels").card
    np.testing.assert_allclose(card.prior, (counts + 1) / (counts.sum() + 10))
    equal, labels = (fl.predict(run, images, prior=prior).probabilities for prior in (None, "labels"))
    odds = (labels[:, 0] / labels[:, 1]) / (equal[:, 0] / equal[:, 1])
    np.testing.assert_allclose(odds, (counts[0] + 1) / (counts[1] + 1), rtol=1e-4)
    assert np.array_equal(fl.predict(run, images, prior="equal").probabilities, equal)


def test_a_model_that_was_not_balanced_expects_the_labels_already(small_run: Callable[..., Path]) -> None:
    directory = small_run("rounds=1")
    execute(directory, executor=Serial())
    card = StoredModel.open(directory).card
    assert not card.balanced
    assert shift(card, "labels", directory) == pytest.approx([0] * 10)
    assert np.ptp(shift(card, "equal", directory)) > 0
    with pytest.raises(BadInput, match="does not say how many labels"):
        with_prior(card, "equal", directory / record.MODEL)


@pytest.mark.parametrize("form", ["onnx", "safetensors"])
def test_an_exported_model_carries_weights_and_prior(form: str, run: Path, images: Path, tmp_path: Path) -> None:
    pixels = np.load(images)["images"][:, None]
    expected = fl.predict(run, images, weights="validation", prior="labels").probabilities
    assert not np.allclose(expected, fl.predict(run, images).probabilities, atol=0.01)
    path = fl.export(run, form, tmp_path, weights="validation", prior="labels")
    if form == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(path, providers=["CPUExecutionProvider"])
        (found,) = session.run(["probabilities"], {"images": pixels})
    else:
        found = fl.predict(path, images).probabilities
    np.testing.assert_allclose(found, expected, atol=1e-5)
    told = (tmp_path / "MODEL_CARD.md").read_text()
    chosen = record.read_summary(run)["chosen_on_validation"]["round"]
    assert f"The weights are those of round {chosen}, which had the best balanced accuracy on validation." in told
    assert "It expects classes in these shares: 0 " in told
    assert f"round {chosen}, in percent" in told
    assert "Measured without the prior that was chosen." in told


def test_one_folder_has_one_model_in_all_its_formats(run: Path, tmp_path: Path) -> None:
    fl.export(run, "safetensors", tmp_path)
    told = (tmp_path / "MODEL_CARD.md").read_text()
    assert "It expects all classes to be equally frequent, because it was trained so" in told
    fl.export(run, "safetensors", tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"as if it had been exported")
    with pytest.raises(BadInput, match="holds an export with other weights or another prior; choose another --out"):
        fl.export(run, "safetensors", tmp_path, weights="validation")


# Weights


def test_predictions_take_the_last_weights_or_those_that_validation_chose(run: Path, images: Path) -> None:
    last = fl.predict(run, images).probabilities
    assert np.array_equal(fl.predict(run, images, weights="last").probabilities, last)
    chosen = fl.predict(run, images, weights="validation").probabilities
    assert np.array_equal(fl.predict(run / record.CHOSEN_MODEL, images).probabilities, chosen)
    assert not np.array_equal(chosen, last)
    with pytest.raises(BadInput, match="weights are last or validation, not 'best'"):
        fl.predict(run, images, weights="best")
    with pytest.raises(BadInput, match=r"is the model of the last round \(6\); give the run's directory"):
        fl.predict(run / record.MODEL, images, weights="validation")


def test_without_validation_images_no_weights_are_chosen_and_predict_says_so(
    small_run: Callable[..., Path], images: Path, fewlabel: Command
) -> None:
    directory = small_run("rounds=1")
    execute(directory, executor=Serial())
    lines = [{k: v for k, v in line.items() if k != "validation"} for line in record.read_rounds(directory)]
    (directory / record.ROUNDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / record.CHOSEN_MODEL).unlink()
    found = fewlabel("predict", directory, images, "--weights", "validation")
    assert found.code == 2
    assert "has no weights that validation chose: it has no validation images; use --weights last" in found.err
    assert fewlabel("predict", directory, images, "--weights", "last", "--prior", "labels").code == 0


def test_a_model_of_fewlabel_0_1_is_still_read(run: Path, images: Path, tmp_path: Path) -> None:
    with safe_open(run / record.MODEL, "pt") as file:
        card = json.loads(file.metadata()["fewlabel"])
    for name in ("chosen", "round", "balanced", "temperature", "prior", "shift"):
        del card[name]
    save_file(load_file(run / record.MODEL), tmp_path / "old.safetensors", {"fewlabel": json.dumps(card)})
    found = StoredModel.open(tmp_path / "old.safetensors").card
    assert (found.chosen, found.temperature, found.shift) == ("last", None, None)
    assert len(fl.predict(tmp_path / "old.safetensors", images)) == 4
