"""Labels that people add must join those that are there, change nothing else, and be part of the experiment."""

import hashlib
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fewlabel.core.errors import BadInput
from fewlabel.data import partition
from fewlabel.data.added import path_from, read_answers, with_labels
from fewlabel.data.datasets import cache_folder, open_decoded
from fewlabel.data.own.layouts import list_images
from fewlabel.data.own.listing import last_answers
from fewlabel.data.partition import Holding, Partition, nothing
from fewlabel.engine import record
from fewlabel.engine.run import execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.engine.sweep import place
from fewlabel.engine.world import World, dataset_of
from fewlabel.experiment import Experiment, dumps, load, read
from tests.conftest import SMALL

HEAD = "path,label,who,when,seconds,note\n"


def table(path: Path, *rows: str) -> Path:
    path.write_text(HEAD + "".join(f"{row}\n" for row in rows))
    return path


# Which answer counts


def test_the_last_answer_of_each_person_counts_and_different_ones_stay_apart():
    given = [
        ("a", "ann", "cat"),
        ("a", "ann", "dog"),  # she corrected herself
        ("b", "ann", "cat"),
        ("b", "bob", "dog"),  # they disagree
        ("c", "ann", "cat"),
        ("c", "ann", ""),  # she took it back
        ("d", "ann", ""),  # she cannot tell, and he can
        ("d", "bob", "cat"),
        ("e", "ann", "cat"),
        ("e", "bob", "cat"),
    ]
    assert last_answers(given) == {"a": ["dog"], "b": ["cat", "dog"], "c": [], "d": ["cat"], "e": ["cat"]}


def test_a_table_without_persons_counts_each_row(tmp_path):
    (tmp_path / "t.csv").write_text("image;label\na;cat\na;dog\nb;unlabeled\n")
    assert read_answers(tmp_path / "t.csv") == {"a": ["cat", "dog"], "b": []}


def test_csv_data_read_a_table_of_answers_as_people_meant_it(tmp_path):
    for name in "abc":
        Image.new("L", (4, 4), ord(name)).save(tmp_path / f"{name}.png")
    rows = ["a.png,x,ann,t,1,", "a.png,y,ann,t,1,", "b.png,x,ann,t,1,", "b.png,y,bob,t,1,", "c.png,x,ann,t,1,"]
    answers = table(tmp_path / "labels.csv", *rows, "c.png,,ann,t,,undone")
    found = [(item.name, item.label) for item in list_images("csv", answers).items]
    assert found == [("a.png", "y"), ("b.png", "x"), ("b.png", "y"), ("c.png", "")]


def test_a_path_is_written_from_the_tables_folder_if_it_lies_below(tmp_path):
    assert path_from(tmp_path / "labels.csv", str(tmp_path / "in" / "a.png")) == "in/a.png"
    assert path_from(tmp_path / "sub" / "labels.csv", str(tmp_path / "a.png")) == str(tmp_path / "a.png")
    assert path_from(tmp_path / "labels.csv", "train_images[3]") == "train_images[3]"


# In an experiment


def dealt(*changes: str) -> tuple[Experiment, Partition]:
    experiment = read({}, ["data.image_size=16", "clients.count=5", *changes])
    return experiment, partition.of(dataset_of(experiment), experiment)


@pytest.fixture
def answers(tmp_path):
    """Two right labels and a wrong one, for images of clients 1, 1 and 2, which have none."""
    _, plain = dealt()
    y = dataset_of(read({}, ["data.image_size=16"])).splits["train"].labels.numpy()
    first, second, third = plain.shares[1].unlabeled[4], plain.shares[1].unlabeled[2], plain.shares[2].unlabeled[0]
    images = {int(first): int(y[first]), int(second): int(y[second]), int(third): int((y[third] + 1) % 10)}
    return table(tmp_path / "labels.csv", *(f"train[{i}],{label},ann,t,1.5," for i, label in images.items())), images


def test_added_labels_move_images_and_nothing_else(answers):
    file, images = answers
    _, plain = dealt()
    _, found = dealt(f"labels.file={file}")
    first, second, third = images
    assert found.shares[1].labeled.tolist() == [second, first]  # in the order of the client's images, not the file's
    assert found.shares[2].labeled.tolist() == [third]
    for client in range(5):
        before, after = plain.shares[client], found.shares[client]
        left = [image for image in before.unlabeled.tolist() if image not in images]
        assert after.unlabeled.tolist() == left
        assert after.labeled[: len(before.labeled)].tolist() == before.labeled.tolist()
    assert dict(zip(*found.added.tolist(), strict=True)) == images
    assert found.checksum != plain.checksum


def test_what_the_person_said_is_trained_on_even_if_the_data_know_better(answers, tmp_path):
    file, images = answers
    directory = prepare(read({}, [*SMALL, f"labels.file={file}"]), tmp_path / "run")
    world = World.open(directory)
    assert [int(world.known_labels[image]) for image in images] == list(images.values())
    notes = json.loads((directory / record.NOTES).read_text())
    assert ", 3 of them by labels.file" in notes["sentences"][0]
    assert notes["labels"]["labeled_clients"] == 3


def test_a_stored_partition_keeps_added_labels_and_old_ones_are_read(answers, tmp_path):
    file, _ = answers
    experiment, found = dealt(f"labels.file={file}")
    y = dataset_of(experiment).splits["train"].labels.numpy()
    found.save(tmp_path / "partition.json", y, tuple("0123456789"))
    again = Partition.load(tmp_path / "partition.json")
    assert again.checksum == found.checksum
    assert again.added.tolist() == found.added.tolist()
    _, plain = dealt()
    plain.save(tmp_path / "old.json", y, tuple("0123456789"))
    assert "added" not in json.loads((tmp_path / "old.json").read_text())
    assert Partition.load(tmp_path / "old.json").added.shape == (2, 0)


def test_experiments_without_added_labels_stay_as_they_were():
    # The checksum is that of FewLabel before there was labels.file.
    changes = ["data.image_size=16", "labels.noise=0.1", "labels.validation=0.1", "data.split=80-20"]
    experiment = read({"recipe": "fewlabel"}, changes)
    assert not {"file", "sha256"} & tomllib.loads(dumps(experiment))["labels"].keys()  # so the run's name is the same
    checksum = partition.of(dataset_of(experiment), experiment).checksum
    assert checksum == "29a54080259c151902645427497e6c536a2b2aff11e82ae85669670c11fd00f1"


def test_the_hash_of_the_file_is_part_of_the_experiment(answers):
    file, _ = answers
    experiment, _ = dealt(f"labels.file={file}")
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    assert experiment.labels.sha256 == expected
    assert f'sha256 = "{expected}"' in dumps(experiment)
    before = place(experiment, Path())
    with file.open("a") as more:
        more.write("train[0],1,bob,t,1,\n")
    assert place(dealt(f"labels.file={file}")[0], Path()) != before


def test_a_changed_or_missing_file_is_one_sentence(answers, tmp_path):
    file, _ = answers
    experiment, _ = dealt(f"labels.file={file}")
    (tmp_path / "experiment.toml").write_text(dumps(experiment))
    file.write_text(file.read_text() + "train[0],1,bob,t,1,\n")
    with pytest.raises(BadInput, match=r"labels.csv has changed: labels.sha256 is .*restore it, or take it as it is"):
        partition.of(dataset_of(experiment), load(tmp_path / "experiment.toml"))
    now = load(tmp_path / "experiment.toml", ["labels.sha256=none"])
    assert now.labels.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    file.unlink()
    stored = load(tmp_path / "experiment.toml")  # what was run can still be read
    with pytest.raises(BadInput, match=r"there is no .*labels.csv; labels.file is a table of labels"):
        partition.of(dataset_of(experiment), stored)
    with pytest.raises(BadInput, match=r"there is no .*labels.csv"):
        read({}, [f"labels.file={file}"])


def test_a_run_repeats_to_the_bit_with_any_workers_and_resumes_without_the_file(answers, tmp_path, pool):
    file, _ = answers
    experiment = read({}, [*SMALL, "method=tutor", "recipe=fewlabel", f"labels.file={file}"])
    bits = []
    for name in ("one", "two"):
        directory = prepare(experiment, tmp_path / name)
        if name == "two":
            file.unlink()  # the partition has the labels
            execute(directory, executor=pool)
        else:
            execute(directory, executor=Serial())
        bits.append((directory / record.MODEL).read_bytes())
    assert bits[0] == bits[1]


@pytest.mark.parametrize("method", ["labels-only", "tutor", "rscfed", "cbafed", "fedmatch", "fedprox-fixmatch"])
def test_methods_train_with_clients_that_are_partly_labeled(method, answers, tmp_path):
    file, _ = answers
    quick = ["method.warmup_epochs=1"] if method == "cbafed" else []
    changes = [*SMALL, f"method={method}", "rounds=2", *quick]
    found = []
    for name, more in (("with", [f"labels.file={file}"]), ("without", [])):
        directory = prepare(read({}, [*changes, *more]), tmp_path / name)
        execute(directory, executor=Serial())
        found.append((directory / record.MODEL).read_bytes())
    assert found[0] != found[1]  # the labels were used


@pytest.mark.parametrize("method", ["fedirm", "isofed"])
def test_methods_for_all_labels_or_none_say_so(method, answers):
    with pytest.raises(BadInput, match=rf"{method} is made for clients that have all labels or none; leave it out"):
        read({}, [f"method={method}", f"labels.file={answers[0]}"])


def test_a_stream_and_a_hash_without_a_file_are_refused(answers):
    with pytest.raises(BadInput, match="there from the first round on; leave out it or stream"):
        read({}, [f"labels.file={answers[0]}", "stream.steps=2"])
    with pytest.raises(BadInput, match=r"labels\.sha256 is for labels\.file"):
        read({}, ["labels.sha256=00"])


def test_rows_that_do_not_count_are_told(answers, tmp_path):
    _, plain = dealt()
    own, (one, other) = int(plain.shares[0].labeled[0]), plain.shares[3].unlabeled[:2].tolist()
    file = table(
        tmp_path / "more.csv",
        f"train[{one}],3,ann,t,1,",
        f"train[{other}],3,ann,t,1,",
        f"train[{other}],4,bob,t,1,",
        f"train[{own}],3,ann,t,1,",
        "train[99999],3,ann,t,1,",
    )
    _, found = dealt(f"labels.file={file}")
    assert found.added.tolist() == [[one], [3]]
    disagree, nobody, before = found.notes
    assert f"people disagree about 1 image in {file}, such as train[{other}]" in disagree
    assert f"{file} names 1 image that nobody here trains on, such as train[99999]" in nobody
    assert f"1 image in {file} had a label before, which stays" in before


def test_unknown_classes_and_names_are_refused(tmp_path):
    with pytest.raises(BadInput, match=r"says that train\[1\] is 'cat', which is no class; there are 0, 1"):
        dealt(f"labels.file={table(tmp_path / 'a.csv', 'train[1],cat,ann,t,1,')}")
    with pytest.raises(BadInput, match=r"names no image that this experiment trains on, such as b\.png"):
        dealt(f"labels.file={table(tmp_path / 'b.csv', 'b.png,1,ann,t,1,')}")
    (tmp_path / "c.csv").write_text("path,label,who\ntrain[1]\n")
    with pytest.raises(BadInput, match=r"line 2 of .*c\.csv has 1 fields for 3 columns; complete it"):
        dealt(f"labels.file={tmp_path / 'c.csv'}")


def test_only_training_labels_may_come_from_the_file_alone(tmp_path):
    """Images of one's own without a single label to train on, but for those in the file. Splits stay as they were."""
    folder, draw = tmp_path / "images", np.random.Generator(np.random.PCG64(0))
    for where in ("train/unlabeled", "test/a", "test/b"):
        (folder / where).mkdir(parents=True)
        for number in range(8):
            Image.fromarray(draw.integers(0, 255, (8, 8), np.uint8)).save(folder / where / f"{number}.png")
    changes = ["data.name=folder", f"data.path={folder}", "clients.count=2", "clients.min_size=2", "model=simple-cnn"]
    with pytest.raises(BadInput, match="finds no label to train on"):
        dealt(*changes)
    rows = [f"images/train/unlabeled/{n}.png,{'ab'[n % 2]},ann,t,1," for n in range(6)]
    experiment, found = dealt(*changes, f"labels.file={table(tmp_path / 'labels.csv', *rows)}")
    assert sum(len(share.labeled) for share in found.shares) == 6
    assert sum(len(share.unlabeled) for share in found.shares) == 2
    names = dataset_of(experiment).splits["train"].names
    assert names is not None
    labels = {Path(names[image]).stem: label for image, label in found.added.T.tolist()}
    assert labels == {str(n): n % 2 for n in range(6)}


def test_decoded_images_of_earlier_versions_are_named_when_that_is_needed(tmp_path):
    folder = tmp_path / "images"
    for label in "ab":
        (folder / label).mkdir(parents=True)
        for number in range(20):
            Image.new("L", (8, 8), 10 * number + ord(label)).save(folder / label / f"{number}.png")
    changes = ["data.name=folder", f"data.path={folder}", "data.image_size=8"]
    before = dataset_of(read({}, changes))
    [decoded] = [
        path for path in cache_folder().glob("folder-8px-*") if open_decoded("", 8, path).digest == before.digest
    ]
    about = json.loads((decoded / "about.json").read_text())
    (decoded / "train-names.npy").unlink()
    arrays = {name: state for name, state in about["arrays"].items() if "names" not in name}
    (decoded / "about.json").write_text(json.dumps({**about, "names": False, "arrays": arrays}))
    assert dataset_of(read({}, changes)).splits["train"].names is None
    file = table(tmp_path / "labels.csv", "images/a/0.png,b,ann,t,1,")
    again = dataset_of(read({}, [*changes, f"labels.file={file}"]))
    assert again.digest == before.digest
    assert again.splits["train"].names is not None


def test_added_labels_keep_the_order_of_a_clients_images():
    holding = Holding(np.array([3, 1]), np.array([9, 7, 8]))
    found = with_labels(holding, np.array([8, 9, 100]))
    assert (found.labeled.tolist(), found.unlabeled.tolist()) == ([3, 1, 9, 8], [7])
    same = with_labels(holding, nothing())
    assert (same.labeled.tolist(), same.unlabeled.tolist()) == ([3, 1], [9, 7, 8])
