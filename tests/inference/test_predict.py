"""Prediction: an image from its file gets the probabilities that evaluation gave it, and what is unsure is marked."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import fewlabel as fl
from fewlabel.cli.main import main
from fewlabel.core import metrics
from fewlabel.core.errors import BadInput, FewLabelError, StorageError
from fewlabel.core.federation import batch_statistics
from fewlabel.engine.card import Card
from fewlabel.engine.run import Interrupted, execute, prepare
from fewlabel.engine.worker import EVALUATION_BATCH
from fewlabel.engine.world import World
from fewlabel.experiment import read
from fewlabel.inference.predict import BATCH, Predictions, Reader, StoredModel
from tests.data.test_own import dicom

SETTINGS = (
    "data.name=folder",
    "data.image_size=16",
    "clients.count=2",
    "clients.min_size=1",
    "labels.at=every-client",
    "labels.fraction=1",
    "rounds=1",
    "model=tests.nets:tiny",
    "method.local.epochs=5",
    "method.local.batch_size=8",
)
CLASSES = ("dark", "light", "striped")


def drawn(label: str, rng: np.random.Generator) -> np.ndarray:
    """A grey image in 0..255, of a size of its own."""
    shape = tuple(rng.integers(14, 24, 2))
    image = rng.normal({"dark": 60, "light": 180, "striped": 120}[label], 25, shape)
    if label == "striped":
        image[::4] += 90
    return image.clip(0, 255)


def write_grey(path: Path, image: np.ndarray, rng: np.random.Generator) -> None:
    Image.fromarray(image.astype(np.uint8)).save(path.with_suffix(".png"))


def write_mixed(path: Path, image: np.ndarray, rng: np.random.Generator) -> None:
    """Two of three in colour, as JPEG; the others grey."""
    if rng.random() < 1 / 3:
        return write_grey(path, image, rng)
    tinted = np.stack([image, image * rng.uniform(0.5, 1), 255 - image], 2)
    return Image.fromarray(tinted.astype(np.uint8)).save(path.with_suffix(".jpg"))


def write_wide(path: Path, image: np.ndarray, rng: np.random.Generator) -> None:
    Image.fromarray((image * 4000 / 255).astype(np.uint16)).save(path.with_suffix(".png"))


def write_dicom(path: Path, image: np.ndarray, rng: np.random.Generator) -> None:
    dicom(path.with_suffix(".dcm"), (image * 8).astype(np.uint16), WindowCenter=1000, WindowWidth=1500)


Writer = Callable[[Path, np.ndarray, np.random.Generator], None]


def folder(root: Path, write: Writer) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 5)):
        for label in CLASSES:
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                write(root / split / label / str(number), drawn(label, rng), rng)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """A run on images of one's own: its directory and the images'; each is made once."""
    made: dict[tuple[Writer, tuple[str, ...]], tuple[Path, Path]] = {}

    def make(write: Writer, *changes: str) -> tuple[Path, Path]:
        if (write, changes) not in made:
            root = tmp_path_factory.mktemp("own")
            images = folder(root / "images", write)
            experiment = read({}, [*SETTINGS, f"data.path={images}", *changes])
            execute(prepare(experiment, root / "run"), workers=1)
            made[write, changes] = root / "run", images
        return made[write, changes]

    return make


@pytest.fixture
def grey(trained: Callable[..., tuple[Path, Path]]) -> tuple[Path, Path]:
    return trained(write_grey)


def evaluated(run: Path) -> torch.Tensor:
    """The test set's probabilities as evaluation computes them, from decoded arrays, and calibrated."""
    images, model = World.open(run).dataset.splits["test"].images, StoredModel.open(run)
    (logits,) = metrics.outputs(
        model.network, [images.view(torch.arange(len(images.pixels)), "plain", torch.Generator())]
    )
    return (logits / (model.card.temperature or 1)).softmax(1)


@pytest.mark.parametrize(
    ("write", "changes"),
    [
        (write_grey, []),
        (write_grey, ["data.channels=3"]),
        (write_mixed, []),
        (write_mixed, ["data.channels=1"]),
        (write_wide, ["model.buffers=recomputed"]),
        (write_dicom, []),
    ],
)
def test_a_test_image_from_its_file_gets_the_probabilities_of_evaluation(
    write: Writer, changes: list[str], trained: Callable[..., tuple[Path, Path]]
) -> None:
    run, images = trained(write, *changes)
    found = fl.predict(run, images / "test")
    assert found.files == tuple(map(str, sorted((images / "test").rglob("*.*"))))  # as the data set has them
    assert found.classes == CLASSES
    np.testing.assert_allclose(found.probabilities, evaluated(run).numpy(), atol=1e-6)
    assert np.ptp(found.probabilities, axis=0).min() > 0.1  # or equality would prove little
    told = fl.Result(run).last
    truth = [CLASSES.index(Path(file).parent.name) for file in found.files]
    assert told is not None
    assert (
        metrics.measure(torch.tensor(found.probabilities), torch.tensor(truth))["confusion"]
        == (told["test"]["confusion"])
    )
    assert not found.unreadable


def test_images_are_files_folders_patterns_and_arrays_each_taken_once(grey: tuple[Path, Path], tmp_path: Path) -> None:
    run, images = grey
    dark = images / "test" / "dark"
    by_folder, by_pattern = fl.predict(run, dark), fl.predict(run, str(images / "test" / "d*" / "*.png"))
    assert by_folder.files == by_pattern.files == tuple(str(dark / f"{n}.png") for n in range(5))
    first, second, *others = by_folder.files
    assert fl.predict(run, [dark / "1.png", dark, dark / "1.png"]).files == (second, first, *others)
    pixels = World.open(run).dataset.splits["test"].images.pixels.numpy()
    np.savez(tmp_path / "a.npz", test_images=pixels[:, 0], test_labels=np.zeros(len(pixels)))
    arrays = fl.predict(fl.Result(run), tmp_path)
    assert arrays.files[1] == f"{tmp_path / 'a.npz'}:test_images[1]"
    np.testing.assert_allclose(arrays.probabilities, evaluated(run).numpy(), atol=1e-6)


def test_many_images_are_read_some_at_a_time_and_none_is_alone(tmp_path: Path) -> None:
    """66 + 63 = 129 images: 64, then 65 rather than 64 and 1."""
    np.savez(tmp_path / "a.npz", images=np.zeros((66, 4, 4), np.uint8))
    np.savez(tmp_path / "b.npz", images=np.zeros((63, 4, 4), np.uint8))
    card, seen = Card(("a", "b"), {}, 4, 1, (0.5,), (0.25,), {}), list[tuple[int, int]]()
    reader = Reader(card, [tmp_path / "a.npz", tmp_path / "b.npz"], lambda done, total: seen.append((done, total)))
    batches = list(reader.batches())
    assert [len(batch) for batch in batches] == [BATCH, BATCH + 1]
    assert batches[0].unique().tolist() == [-2.0]  # (0 - 0.5) / 0.25
    assert seen == [(1, 2), (2, 2)]
    assert len(reader.names) == 129


def test_dicom_is_seen_through_the_window_of_training(tmp_path: Path) -> None:
    """Of 80 around 40, from 0 to 79: 0 is black, 40 is 129 and 79 white, whatever the file's own window is."""
    path = dicom(tmp_path / "a.dcm", np.array([[0, 40], [79, 200]], np.uint16), WindowCenter=1000, WindowWidth=1500)
    card = Card(("a", "b"), {}, 2, 1, (0,), (1,), {"window": (40, 80)})
    assert next(Reader(card, [path]).pixels()).tolist() == [[[0, 129], [255, 255]]]


def test_what_cannot_be_read_is_named_and_the_others_are_predicted(
    grey: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = grey
    (tmp_path / "broken.png").write_bytes(b"no image")
    Image.new("I;16", (8, 8), 4000).save(tmp_path / "wide.png")
    np.savez(tmp_path / "odd.npz", labels=np.zeros(3))
    (tmp_path / "no.npz").write_bytes(b"no npz")
    given = [tmp_path / name for name in ("broken.png", "gone.png", "wide.png", "odd.npz", "no.npz")]
    assert main(["predict", *map(str, [run, *given, images / "test"])]) == 2
    said = capsys.readouterr()
    assert said.err == "fewlabel: 5 files could not be read, 15 images were\n"
    for words in (
        "broken.png: it is not an image of a known format",
        "gone.png: there is no such file",
        "wide.png: it has more than eight bits, and the model was trained on images of eight",
        "odd.npz: it has no images, as in train_images, but labels",
        "no.npz is not an npz file: it is no zip archive; expected arrays",
    ):
        assert words in said.out
    assert said.out.count("test/") == 15
    with pytest.raises(BadInput, match=r"none of 1 file can be read; .*broken.png: it is not an image"):
        fl.predict(run, tmp_path / "broken.png")


def test_the_csv_has_all_probabilities_and_the_table_what_is_unsure(
    grey: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = grey
    found = fl.predict(run, images, unsure_below=0.9)
    written = tmp_path / "out.csv"
    assert main(["predict", str(run), str(images), "--csv", str(written), "--unsure-below", "0.9"]) == 0
    assert str(written) in capsys.readouterr().out
    rows = list(csv.DictReader(written.open()))
    assert [row["file"] for row in rows] == list(found.files)
    table = np.array([[float(row[name]) for name in CLASSES] for row in rows])
    np.testing.assert_allclose(table, found.probabilities, atol=1e-6)
    assert [bool(row["unsure"]) for row in rows] == (found.probabilities.max(1) < 0.9).tolist()
    assert [row["class"] for row in rows] == [CLASSES[n] for n in found.probabilities.argmax(1)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.csv"]
    assert main(["predict", str(run), str(images), "--format", "json", "--unsure-below", "0.9"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [image["probabilities"]["dark"] for image in told["images"]] == found.probabilities[:, 0].tolist()
    assert [image["unsure"] for image in told["images"]] == [bool(row["unsure"]) for row in rows]


def test_unsure_is_what_lies_below_the_threshold() -> None:
    """0.8 itself is sure; ties go to the first class."""
    probabilities = np.array([[0.8, 0.2, 0], [0.1, 0.11, 0.79], [0.5, 0, 0.5]], np.float64)
    answers = Predictions(CLASSES, ("a", "b", "c"), probabilities, {}, 0.8).answers
    assert [(a.label, a.unsure, a.second) for a in answers] == [
        ("dark", False, "light"),
        ("striped", True, "light"),
        ("dark", True, "striped"),
    ]


@pytest.mark.parametrize("columns", ["50", "120"])
def test_the_table_fits_the_terminal_and_is_a_line_for_each_image_in_a_pipe(
    columns: str, grey: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, images = grey
    monkeypatch.setenv("COLUMNS", columns)
    words = ["predict", str(run), str(images / "test"), "--unsure-below", "1"]
    assert main(words) == 0
    piped = capsys.readouterr().out.splitlines()
    assert sum("test/" in line and "unsure: or " in line for line in piped) == 15
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(words) == 0
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, shown)) <= int(columns)


def test_images_of_other_colours_are_converted_and_counted(
    grey: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Red, green and blue of 200, 100 and 50 are 59.8 + 58.7 + 5.7 = 124 grey."""
    run, _ = grey
    Image.new("RGB", (16, 16), (200, 100, 50)).save(tmp_path / "a.png")
    Image.new("L", (16, 16), 124).save(tmp_path / "b.png")
    assert main(["predict", str(run), str(tmp_path), "--format", "json"]) == 0
    said = capsys.readouterr()
    assert said.err == "fewlabel: converted 1 of 2 images to grey, as the model needs\n"
    first, second = json.loads(said.out)["images"]
    assert first["probabilities"] == second["probabilities"]


def test_statistics_that_stayed_at_the_sites_are_those_of_the_images_given(
    trained: Callable[..., tuple[Path, Path]],
) -> None:
    run, images = trained(write_grey, "model.buffers=local")
    found = fl.predict(run, images / "test")
    assert "stayed at the sites" in found.notes[0]
    network, test = StoredModel.open(run).network, World.open(run).dataset.splits["test"].images
    assert len(test.pixels) < EVALUATION_BATCH
    batch = test.view(torch.arange(15), "plain", torch.Generator())
    batch_statistics(network, [batch])
    np.testing.assert_allclose(found.probabilities, metrics.predict(network, [batch]).numpy(), atol=1e-6)
    with pytest.raises(BadInput, match="the statistics of several images"):
        fl.predict(run, images / "test" / "dark" / "0.png")


# Runs without a model, and what else is no model


def refused(run: Path, images: Path | str = "a.png", kind: type[FewLabelError] = BadInput) -> str:
    with pytest.raises(kind) as caught:
        fl.predict(run, images)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_run_without_a_model_says_why(run_dir: Callable[..., Path], tmp_path: Path) -> None:
    unfinished = run_dir()
    assert "unfinished, round 0 of 6, and its model comes with the last; finish it by: fewlabel run --resume" in (
        refused(unfinished)
    )
    with pytest.raises(Interrupted):
        execute(unfinished, workers=1, stop=lambda: True)
    assert "unfinished, round 1 of 6" in refused(unfinished)
    assert "holds 1 run; give one of them, such as" in refused(tmp_path)
    assert refused(tmp_path / "nowhere") == f"there is no {tmp_path / 'nowhere'}; give the directory of a run"


def test_a_run_that_shares_no_model_says_so(run_dir: Callable[..., Path]) -> None:
    alone = run_dir("method=local-sl", "labels.at=every-client", "labels.fraction=1", "rounds=1")
    execute(alone, workers=1)
    assert refused(alone) == f"{alone} has no model: local-sl shares none, each of its clients keeps its own"


def test_what_is_no_model_of_ours_is_refused(grey: tuple[Path, Path], tmp_path: Path) -> None:
    run, images = grey
    (tmp_path / "text.safetensors").write_text("no model")
    assert "is not a model that can be read" in refused(tmp_path / "text.safetensors", kind=StorageError)
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    assert "does not say its classes" in refused(tmp_path / "other.safetensors", kind=StorageError)
    (tmp_path / "empty").mkdir()
    assert refused(run, tmp_path / "empty") == f"there are no images in {tmp_path / 'empty'}"
    assert refused(run, str(tmp_path / "*.png")) == f"no file matches {tmp_path / '*.png'}"
    assert fl.predict(run / "model.safetensors", images / "test" / "dark").files


def test_a_network_of_ones_own_that_changed_since_is_refused(
    run_dir: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests import nets

    run = run_dir("model=tests.nets:tiny", "rounds=1")
    execute(run, workers=1)
    monkeypatch.setattr(nets, "tiny", nets.linear)
    assert "are not of the network 'tests.nets:tiny' as it is now" in refused(run)
    monkeypatch.delattr(nets, "tiny")
    assert "'tests.nets:tiny' cannot be imported" in refused(run)
