"""What is told about the data of a run before its first round: who has labels, and which are hidden."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fewlabel as fl
from fewlabel.core.errors import BadInput
from fewlabel.data.datasets import Dataset, Split
from fewlabel.data.images import Images
from fewlabel.data.partition import Holding, Partition, deal
from fewlabel.engine.notes import notes_of
from fewlabel.engine.run import prepare
from fewlabel.engine.world import World
from fewlabel.experiment import dumps, load, read
from tests.conftest import Command
from tests.data.test_own import grey

pytestmark = pytest.mark.usefixtures("_elsewhere")
TINY = ["data.image_size=8", "model.name=tests.nets:tiny", "rounds=1", "clients.count=3", "clients.min_size=1"]


@pytest.fixture
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 images of two classes and 9 without a label. 70 % of the labels are to train on."""
    for number in range(40):
        grey(tmp_path / "images" / "ab"[number % 2] / f"{number}.png", number)
    for number in range(40, 49):
        grey(tmp_path / "images" / "unlabeled" / f"{number}.png", number)
    return tmp_path / "images"


def own(folder: Path, *changes: str) -> list[str]:
    return ["data.name=folder", f"data.path={folder}", *TINY, *changes]


def sentences(*changes: str) -> list[str]:
    """What is told about an experiment."""
    from fewlabel.data import partition
    from fewlabel.engine.world import dataset_of

    experiment = read({}, changes)
    dataset = dataset_of(experiment)
    found: list[str] = notes_of(World(experiment, dataset, partition.of(dataset, experiment)))["sentences"]
    return found


# The default for one's own data


def test_every_label_of_ones_own_data_counts_unless_asked_otherwise(folder: Path) -> None:
    labels = read({}, own(folder)).labels
    assert (labels.at, labels.fraction) == ("every-client", 1.0)
    assert sentences(*own(folder)) == ["Labels: all 3 clients, 28 of 37 images; 9 images came without one"]
    assert fl.Experiment(data=fl.Data("folder", path=str(folder))).labels == labels


def test_labels_that_are_held_out_are_counted(folder: Path) -> None:
    told = sentences(*own(folder, "clients.count=1", "labels.held_out=0.25"))
    assert told == ["Labels: the only client, 28 of 37 images; 7 of them are held out; 9 images came without one"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["labels.validation=0.1"], ("every-client", 1.0)),
        (["labels.fraction=0.5"], ("every-client", 0.5)),
        (["labels.per_class=2"], ("every-client", 0.1)),
        (["labels.at=every-client"], ("every-client", 1.0)),
        (["labels.clients=2"], ("some-clients", 0.1)),
        (["labels.ids=[1]"], ("some-clients", 0.1)),
        (["labels.which=rule"], ("some-clients", 0.1)),
        (["labels.at=server"], ("server", 0.1)),
    ],
)
def test_what_is_asked_about_labels_of_ones_own_data_wins(
    folder: Path, given: list[str], expected: tuple[str, float]
) -> None:
    labels = read({}, own(folder, *given)).labels
    assert (labels.at, labels.fraction) == expected


def test_labels_that_python_gives_are_taken_as_they_are(folder: Path) -> None:
    data = fl.Data("folder", path=str(folder))
    assert fl.Experiment(data=data, labels=fl.Labels()).labels == fl.Labels()
    assert fl.Experiment(data="tests.owndata:shades").labels.at == "every-client"
    assert fl.Experiment().labels == fl.Labels()


def test_a_stored_experiment_stays_what_it_was(folder: Path, tmp_path: Path) -> None:
    """A run of before: its experiment.toml says that one client has labels."""
    before = fl.Experiment(data=fl.Data("folder", path=str(folder)), labels=fl.Labels())
    (tmp_path / "e.toml").write_text(dumps(before))
    assert load(tmp_path / "e.toml") == before
    now = read({}, own(folder))
    (tmp_path / "e.toml").write_text(dumps(now))
    assert load(tmp_path / "e.toml") == now
    assert 'at = "every-client"' in dumps(now)


def test_the_floor_and_the_ceiling_have_the_same_labels_where_none_are_hidden(folder: Path) -> None:
    floor, ceiling = (read({"method": row}, own(folder)).labels for row in ("labels-only", "all-labels"))
    assert floor == ceiling


def test_a_method_for_some_clients_says_what_to_set(folder: Path) -> None:
    with pytest.raises(BadInput) as refused:
        read({"method": "fedirm"}, own(folder))
    assert str(refused.value) == (
        "fedirm cannot use labels.at = 'every-client', the default for your own data; it is made for some-clients: "
        "set labels.clients, the number of clients that keep their labels"
    )
    assert read({"method": "fedirm"}, own(folder, "labels.clients=1")).labels.at == "some-clients"


# What is told


def test_hidden_labels_are_told(folder: Path) -> None:
    """28 labels to train on, at three clients of which one keeps its own."""
    hint = " (labels.at = 'every-client' and labels.fraction = 1 use them all)"
    experiment = read({}, own(folder, "labels.clients=1", "clients.partition=iid"))
    kept = len(World.open(prepare(experiment, folder.parent / "run")).partition.shares[0].labeled)
    assert sentences(*own(folder, "labels.clients=1", "clients.partition=iid"))[:1] == [
        f"Labels: 1 of 3 clients, {kept} of 37 images; 9 images came without one; {28 - kept} other labels are hidden "
        f"for this experiment{hint}"
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["labels.clients=2"], "Labels: 2 of 4 clients, {} of 1,197 images; the other labels are hidden for this"),
        (["labels.at=server"], "Labels: the server, 500 of 1,197 images; the other labels are hidden for this"),
        (["labels.at=every-client", "labels.fraction=1"], "Labels: all 4 clients, all 1,197 images"),
    ],
)
def test_a_simulated_run_says_in_one_line_who_has_labels(given: list[str], expected: str) -> None:
    told, *_ = sentences("clients.count=4", "clients.partition=iid", *given)
    assert told.startswith(expected.format("599" if "599" in told else "598"))


def test_a_method_that_has_nothing_to_learn_from_is_told() -> None:
    every = ["labels.at=every-client", "labels.fraction=1"]
    assert "rscfed: every image has a label, so there is nothing to learn" in sentences("method=rscfed", *every)[1]
    assert sentences("method=fedprox", *every)[1:] == []
    assert "every image" not in " ".join(sentences("method=rscfed"))


def test_run_compare_and_python_tell_it(
    folder: Path, fewlabel: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "fewlabel: Labels: all 3 clients, 28 of 37 images; 9 images came without one\n"
    sets = [word for change in own(folder) for word in ("--set", change)]
    found = fewlabel("run", *sets, "--out", "run", "--workers", "1")
    assert found.code == 0
    assert told in found.err
    found = fewlabel("compare", *sets, "--methods", "rscfed", "--seeds", "0,1", "--workers", "1")
    assert found.err.count(told) == 1
    capsys.readouterr()
    fl.run(read({}, own(folder)), tmp_path / "python", workers=1)
    assert capsys.readouterr().err == told


def test_seeds_that_differ_are_told_apart(fewlabel: Command) -> None:
    few = ["--set", "rounds=1", "--set", "clients.count=4", "--set", "model.name=tests.nets:tiny"]
    err = fewlabel("sweep", *few, "--seeds", "0,1", "--workers", "1").err
    assert "fewlabel: seed 0: Labels: 1 of 4 clients, " in err
    assert "fewlabel: seed 1: Labels: 1 of 4 clients, " in err


def test_a_function_of_ones_own_may_have_images_without_a_label() -> None:
    assert sentences("data=tests.owndata:half_known", *TINY) == [
        "Labels: all 3 clients, 15 of 30 images; 15 images came without one"
    ]


# Classes that labels miss


def about(labels: str, *held: str, classes: str = "abc") -> list[str]:
    """What is told about classes where clients hold images of these classes, such as "aabb", a letter for each."""
    names = sorted(set("".join(held)) | set(classes))
    y = torch.tensor([names.index(letter) for letter in "".join(held)])
    ends = np.cumsum([len(some) for some in held])
    parts = np.split(np.arange(len(y)), ends[:-1])
    experiment = read({}, [f"clients.count={len(held)}", "clients.min_size=1", *labels.split()])
    given = Partition(tuple(Holding(part[:0], part) for part in parts), parts[0][:0])
    dealt = deal(y.numpy(), experiment.clients, experiment.labels, 0, given=given, classes=len(names))
    images = Images(torch.zeros(len(y), 1, 2, 2, dtype=torch.uint8), (0.0,), (1.0,))
    dataset = Dataset("toy", "", tuple(names), 1, 2, {"train": Split(images, y)})
    found = notes_of(World(experiment, dataset, dealt))
    assert sum(found["labels"]["per_class"]) == found["labels"]["labeled"]
    return [sentence for sentence in found["sentences"] if not sentence.startswith("Labels: ")]


A, B, C = "a" * 5, "b" * 5, "c" * 5


@pytest.mark.parametrize(
    ("labels", "held", "expected"),
    [
        ("", (A + B + C, A), []),
        (
            "",
            (A + B, C),
            [
                "No labeled image shows class 'c': the labeled client has none. The model cannot learn it; choose "
                "other clients with labels.which = 'rule' or labels.ids"
            ],
        ),
        (
            "labels.clients=2 labels.which=rule",
            (A, A, B + C[1:]),
            [
                "Few labeled images show class 'c' (4). The model will hardly learn it; add some",
            ],
        ),
        (
            "labels.clients=2",
            (A, A, B + C),
            [
                "No labeled image shows classes 'b' and 'c': the labeled clients have none. The model cannot learn "
                "them; choose other clients with labels.which = 'rule' or labels.ids"
            ],
        ),
        (
            "labels.which=rule",
            (A, B, C),
            [
                "No labeled image shows classes 'b' and 'c': the labeled client has none. The model cannot learn them; "
                "choose more clients with labels.clients, or others with labels.ids"
            ],
        ),
        (
            "labels.at=every-client labels.fraction=1",
            (A, B),
            ["No image to train on is labeled as class 'c'. The model cannot learn it; add some"],
        ),
        (
            "labels.at=every-client labels.per_class=2",
            (A, B, C),
            [
                "Few labeled images show classes 'a' (2), 'b' (2) and 'c' (2). The model will hardly learn them; raise "
                "labels.per_class"
            ],
        ),
    ],
)
def test_classes_that_labels_miss_are_told_with_the_cause_and_what_mends_it(
    labels: str, held: tuple[str, ...], expected: list[str]
) -> None:
    assert about(labels, *held) == expected


def test_of_many_classes_the_first_are_named() -> None:
    (told,) = about("", A, "".join(letter * 5 for letter in "bcdefghij"), classes="abcdefghij")
    assert told.startswith("No labeled image shows classes 'b', 'c', 'd', 'e', 'f', 'g' and 3 more: the labeled client")


def test_a_missing_class_is_told_by_run_compare_and_python_and_recorded(
    fewlabel: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dealt out in shards, one of ten clients has few of the ten digits."""
    few = ["rounds=1", "clients.partition=shards", "model.name=tests.nets:tiny"]
    sets = [word for change in few for word in ("--set", change)]
    told = "fewlabel: No labeled image shows classes '"
    assert told in fewlabel("run", *sets, "--out", "run", "--workers", "1").err
    assert fewlabel("compare", *sets, "--methods", "fedprox", "--workers", "1").err.count(told) == 1
    capsys.readouterr()
    fl.run(read({}, few), tmp_path / "python", workers=1)
    assert told in capsys.readouterr().err
    counts = fl.Result(tmp_path / "run").notes["labels"]["per_class"]
    assert len(counts) == 10
    assert counts.count(0) > 5
