"""Exports: an ONNX file that says what we say, weights that predict as the run does, and a card that is honest."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import fewlabel as fl
from fewlabel.cli.main import main
from fewlabel.core import metrics
from fewlabel.core.errors import BadInput
from fewlabel.engine.card import Card
from fewlabel.engine.run import execute
from fewlabel.engine.world import World
from fewlabel.experiment import Data
from fewlabel.inference.model_card import ONNX, SAFETENSORS, by_class, split_of
from fewlabel.inference.predict import StoredModel
from tests.data.test_own import grey

SETTINGS = (
    "clients.count=2",
    "labels.at=every-client",
    "labels.fraction=1",
    "rounds=2",
    "method.local.optimizer=adam",
    "method.local.lr=0.005",
    "method.local.epochs=2",
    "method.local.batch_size=16",
)
NETWORKS = ("simple-cnn", "tests.nets:tiny")  # the second has BatchNorm in two places, and is one's own


@pytest.fixture(scope="module")
def trained(small_run: Callable[..., Path]) -> Callable[..., Path]:
    """A finished run on digits; each is made once."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*changes: str) -> Path:
        if changes not in made:
            made[changes] = small_run(*SETTINGS, *changes)
            execute(made[changes], workers=1)
        return made[changes]

    return make


def ours(run: Path, pixels: np.ndarray) -> np.ndarray:
    """Probabilities of uint8 images, normalised as in training."""
    images = World.open(run).dataset.splits["test"].images
    normalised = (torch.from_numpy(pixels).float() / 255 - torch.tensor(images.mean)) / torch.tensor(images.std)
    model = StoredModel.open(run)
    (logits,) = metrics.outputs(model.network, [normalised])
    return (logits / (model.card.temperature or 1)).softmax(1).numpy()


@pytest.mark.parametrize("network", NETWORKS)
def test_onnx_gives_our_probabilities_for_any_number_of_images(
    network: str, trained: Callable[..., Path], tmp_path: Path
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    run = trained(f"model={network}")
    session = onnxruntime.InferenceSession(fl.export(run, "onnx", tmp_path), providers=["CPUExecutionProvider"])
    pixels = World.open(run).dataset.splits["test"].images.pixels.numpy()
    assert np.ptp(ours(run, pixels), axis=0).min() > 0.1  # or equality would prove little
    for count in (1, 5):
        (found,) = session.run(["probabilities"], {"images": pixels[:count]})
        assert found.shape == (count, 10)
        np.testing.assert_allclose(found, ours(run, pixels[:count]), atol=1e-4)
    told = session.get_modelmeta().custom_metadata_map
    assert json.loads(told["classes"]) == list("0123456789")
    assert json.loads(told["network"])["name"] == network
    assert b"site-packages" not in (tmp_path / "model.onnx").read_bytes()
    assert str(Path(fl.__file__).parent).encode() not in (tmp_path / "model.onnx").read_bytes()


def test_exported_weights_predict_as_the_run_does_and_say_what_they_need(
    trained: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained("model=tests.nets:tiny")
    assert main(["export", str(run), "--to", "safetensors", "--out", str(tmp_path / "out"), "--format", "json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == {
        key: str(tmp_path / "out" / name)
        for key, name in zip(("model", "card"), ("model.safetensors", "MODEL_CARD.md"), strict=True)
    }
    pixels = World.open(run).dataset.splits["test"].images.pixels.numpy()
    for number in range(3):
        Image.fromarray(pixels[number, 0]).save(tmp_path / f"{number}.png")
    expected = fl.predict(run, str(tmp_path / "*.png")).probabilities
    np.testing.assert_allclose(expected, ours(run, pixels[:3]), atol=1e-6)
    for model in (tmp_path / "out", written["model"]):
        assert np.array_equal(fl.predict(model, str(tmp_path / "*.png")).probabilities, expected)
    with safe_open(written["model"], "pt") as file:
        told = json.loads(file.metadata()["fewlabel"])
    assert told["network"]["name"] == "tests.nets:tiny"
    assert (told["image_size"], told["channels"], len(told["mean"]), len(told["std"])) == (16, 1, 1, 1)
    assert told["version"] == fl.__version__
    assert len(told["experiment_digest"]) == 64
    assert "experiment" not in told  # it may hold paths


def test_the_card_has_the_runs_own_numbers_and_what_it_is_not_for(trained: Callable[..., Path]) -> None:
    run = trained("model=tests.nets:tiny")
    fl.export(fl.Result(run), "safetensors")
    card = (run / "export" / "MODEL_CARD.md").read_text()
    last = fl.Result(run).last
    assert last is not None
    assert f"| accuracy | {100 * last['test']['accuracy']:.1f} |" in card
    for n, recall in enumerate(last["test"]["recall_per_class"]):
        assert f"| {n} | {sum(last['test']['confusion'][n])} | {100 * recall:.1f} |" in card
    told = json.loads((run / "partition.json").read_text())
    labeled = sum(len(client["labeled"]) for client in told["clients"])
    assert f"2 of 2 clients have labels, {labeled:,} in all" in card
    for words in (
        "not a medical device",
        "only for images like those it was trained on",
        "What leaves a site: The weights",
        "fedavg, 2 rounds, seed 0",
        'name = "fedavg"',
        "uint8 [N, 1, 16, 16], grey",
    ):
        assert words in card
    assert str(run) not in card
    assert (f"`{SAFETENSORS}`: " in card, f"`{ONNX}`: " in card) == (True, False)  # which is not there
    assert "\n300 test images: one more error is 0.3 points of accuracy.\n" in card


def test_the_card_says_whose_split_it_was(tmp_path: Path) -> None:
    for part in ("", "train/", "test/"):
        for name in "ab":
            grey(tmp_path / ("divided" if part else "whole") / part / name / "1.png", 1)
    drawn = "split drawn: of the labeled images 70% to train, 10% to validate and 20% to test"
    whole, divided, gone = (Data("folder", path=str(tmp_path / name)) for name in ("whole", "divided", "gone"))
    assert split_of(whole) == split_of(replace(divided, split="70-10-20")) == drawn
    assert split_of(divided) == "with the split that it came with"
    assert split_of(gone) == "with the split that it came with, or else a drawn one"
    assert split_of(Data("digits")) == "split `published`, or if none is published `70-10-20`"


def test_precision_by_class_is_of_what_was_called_so() -> None:
    """Called a: 3 + 1 = 4, of which 3 are; called c: none."""
    test = {
        "confusion": [[3, 1, 0], [1, 4, 0], [0, 0, 0]],
        "recall_per_class": [0.75, 0.8, None],
        "auc_per_class": [0.9, 0.8, None],
    }
    assert by_class(test, Card(("a", "b", "c"), {}, 4, 1, (0,), (1,), {})) == (
        ("a", "4", "75.0", "75.0", "90.0"),
        ("b", "5", "80.0", "80.0", "80.0"),
        ("c", "0", "–", "–", "–"),
    )


def test_a_class_that_is_missed_is_named_among_what_the_model_is_not_for(run_dir: Callable[..., Path]) -> None:
    run = run_dir("rounds=1", "method.local.lr=1e-6")  # which names one class for all
    execute(run, workers=1)
    fl.export(run, "safetensors")
    card = (run / "export" / "MODEL_CARD.md").read_text()
    assert card.count(" (0.0%)") == 9


def test_statistics_that_stayed_at_sites_make_no_onnx_file(trained: Callable[..., Path]) -> None:
    run = trained("model=tests.nets:tiny", "model.buffers=local")
    with pytest.raises(BadInput, match="lacks BatchNorm's statistics, which stayed at the sites"):
        fl.export(run, "onnx")
    fl.export(run, "safetensors")
    assert "Compute them over the images" in (run / "export" / "MODEL_CARD.md").read_text()


def test_without_onnx_one_sentence_says_what_to_install(
    trained: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", str(trained("model=tests.nets:tiny")), "--to", "onnx"]) == 2
    assert capsys.readouterr().err == (
        "fewlabel: ONNX files need onnx, which is not here: in FewLabel's folder, pip install '.[export]'\n"
    )


def test_a_runs_own_files_are_not_written_over(trained: Callable[..., Path]) -> None:
    run = trained("model=tests.nets:tiny")
    before = (run / "model.safetensors").read_bytes()
    with pytest.raises(BadInput, match="is a run, whose own files would be written over"):
        fl.export(run, "safetensors", run)
    assert (run / "model.safetensors").read_bytes() == before
    with pytest.raises(BadInput, match="to onnx or safetensors, not to 'pickle'"):
        fl.export(run, "pickle")


def test_a_run_without_a_model_is_not_exported(run_dir: Callable[..., Path]) -> None:
    with pytest.raises(BadInput, match="unfinished, round 0 of 6"):
        fl.export(run_dir(), "onnx")
