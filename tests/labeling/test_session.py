"""Answers must be kept as they were given, batches be the same for everybody, and simulations repeat to the byte."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewlabel.core.errors import BadInput
from fewlabel.data.added import read_answers
from fewlabel.data.own.layouts import list_images
from fewlabel.data.pictures import Values, look
from fewlabel.engine.run import execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.engine.world import World
from fewlabel.experiment import read
from fewlabel.labeling import batches
from fewlabel.labeling.answers import CANNOT_TELL, SKIPPED, UNDONE, Answer, Answers, agreed, disagreements, standing
from fewlabel.labeling.session import Session, advice, keys_of
from fewlabel.labeling.simulate import simulate, spread
from fewlabel.labeling.strategies import STRATEGIES, USUAL
from fewlabel.learn import acquisition
from tests.conftest import SMALL


def test_the_command_knows_the_strategies_that_there_are():
    assert tuple(STRATEGIES) == acquisition.STRATEGIES
    assert USUAL in STRATEGIES


# Answers


def test_an_answer_is_synced_to_disk_when_append_returns(tmp_path, monkeypatch):
    table, sizes, real = Answers(tmp_path / "a.csv"), [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (sizes.append(os.fstat(number).st_size), real(number)))
    table.append(Answer("x,1.png", "a cat", "ann", "t", "1.5"))
    assert sizes == [(tmp_path / "a.csv").stat().st_size]
    assert (tmp_path / "a.csv").read_text().splitlines()[1] == '"x,1.png",a cat,ann,t,1.5,'
    assert table.read() == [Answer("x,1.png", "a cat", "ann", "t", "1.5")]


def test_a_row_that_a_power_cut_left_unfinished_is_cut_off_and_no_other(tmp_path):
    Answers(tmp_path / "a.csv").append(Answer("x.png", "cat", "ann"))
    whole = (tmp_path / "a.csv").read_bytes()
    (tmp_path / "a.csv").write_bytes(whole + b"y.png,do")
    assert Answers(tmp_path / "a.csv").read() == [Answer("x.png", "cat", "ann")]
    assert (tmp_path / "a.csv").read_bytes() == whole


def test_a_file_that_is_something_else_is_left_alone(tmp_path):
    (tmp_path / "a.csv").write_text("image,label\nx,cat\n")
    with pytest.raises(BadInput, match="is not a table of answers"):
        Answers(tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "image,label\nx,cat\n"
    (tmp_path / "photo").write_bytes(b"no table\nand no end of the line")
    with pytest.raises(BadInput, match="is not a table of answers"):
        Answers(tmp_path / "photo")
    assert (tmp_path / "photo").read_bytes() == b"no table\nand no end of the line"


def test_a_row_that_a_full_disk_cut_short_does_not_swallow_the_next(tmp_path):
    table = Answers(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_bytes((tmp_path / "a.csv").read_bytes() + b"x.png,ca")
    table.append(Answer("y.png", "dog", "ann"))
    assert table.read() == [Answer("y.png", "dog", "ann")]
    (tmp_path / "a.csv").unlink()  # and so for a table that was moved away meanwhile
    table.append(Answer("z.png", "dog", "ann"))
    assert table.read() == [Answer("z.png", "dog", "ann")]
    (tmp_path / "b.csv").write_bytes(b"path,lab")  # the head itself
    Answers(tmp_path / "b.csv").append(Answer("y.png", "dog", "ann"))
    assert Answers(tmp_path / "b.csv").read() == [Answer("y.png", "dog", "ann")]


def test_two_programs_that_write_at_once_lose_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from fewlabel.labeling.answers import Answer, Answers\n"
        "table = Answers(Path(sys.argv[1]))\n"
        "for number in range(50): table.append(Answer(f'{number}.png', 'cat', sys.argv[2]))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "a.csv"), who]) for who in ("ann", "bob")]
    assert [process.wait() for process in both] == [0, 0]
    rows = Answers(tmp_path / "a.csv").read()
    for who in ("ann", "bob"):
        assert [row.path for row in rows if row.who == who] == [f"{number}.png" for number in range(50)]


def test_what_stands_is_each_persons_last_word():
    rows = [
        Answer("x", "cat", "ann"),
        Answer("x", "dog", "bob"),
        Answer("y", "cat", "ann"),
        Answer("y", "", "ann", note=UNDONE),
        Answer("z", "cat", "ann"),
        Answer("z", "", "bob", note=CANNOT_TELL),
    ]
    found = standing(rows)
    assert {image: sorted(each) for image, each in found.items()} == {"x": ["ann", "bob"], "y": [], "z": ["ann", "bob"]}
    assert disagreements(found) == {"x": {"ann": "cat", "bob": "dog"}}
    assert agreed(found) == {"z": "cat"}


# Sessions


@pytest.fixture
def session(tmp_path):
    folder = tmp_path / "images"
    (folder / "unlabeled").mkdir(parents=True)
    (folder / "classes.txt").write_text("cat\ndog\n")
    for number in range(3):
        Image.new("L", (6, 4), 50 * number).save(folder / "unlabeled" / f"{number}.png")
    names = tuple(str(folder / "unlabeled" / f"{number}.png") for number in range(3))
    batch = batches.Batch("", "random", ("cat", "dog"), names, ((0.25, 0.75), (0.5, 0.5), (0.5, 0.5)))
    return Session(list_images("folder", folder), batch, Answers(tmp_path / "labels.csv"), "ann")


def test_a_session_goes_through_the_batch_and_back(session):
    assert session.state()["current"] == 0
    session.answer(0, "", "cat", 1.23)
    session.answer(1, SKIPPED, "", 2)
    assert session.state()["current"] == 2
    assert session.undo() == 1
    assert session.undo() == 0
    assert session.state()["done"] == 0
    with pytest.raises(BadInput, match="nothing to take back"):
        session.undo()
    session.answer(0, "", "dog", 1e9)
    for image in (1, 2):
        session.answer(image, CANNOT_TELL, "", -1)
    state = session.state()
    assert (state["current"], state["done"], state["cannot_tell"]) == (None, 3, 2)
    assert [row.seconds for row in session.answers.read() if row.note == ""] == ["1.2", "36000.0"]
    assert read_answers(session.answers.file) == {f"images/unlabeled/{n}.png": ["dog"] * (n == 0) for n in range(3)}


def test_labels_of_one_class_alone_are_told_unless_that_may_be_chance():
    assert advice({"cat": 4}, 2) == advice({"cat": 4, "dog": 1}, 2) == advice({}, 2) == advice({"cat": 9}, 1) == ""
    assert advice({"cat": 5}, 2) == (
        "All 5 labels are 'cat'. If that is right, label another batch: the other classes need labels, too."
    )


def test_what_is_no_answer_is_refused_and_not_written(session):
    for wrong in ((0, "", "bird"), (0, "", ""), (0, SKIPPED, "cat"), (0, "maybe", ""), (3, "", "cat"), (-1, "", "cat")):
        with pytest.raises(BadInput):
            session.answer(*wrong, 1.0)
    assert session.answers.read() == []


def test_the_opinion_is_sorted_by_probability(session):
    assert session.opinion(0) == [{"name": "dog", "p": 0.75}, {"name": "cat", "p": 0.25}]


def test_a_class_that_is_a_key_has_itself_and_others_the_next_free_one():
    assert keys_of(["0", "1", "2"]) == ["0", "1", "2"]
    assert keys_of(["normal", "2", "c"]) == ["1", "2", "3"]  # c is "cannot tell"
    assert len(set(filter(None, keys_of([f"class {n}" for n in range(40)])))) == 29


def test_a_batch_is_for_everybody_who_has_not_seen_all_of_it(tmp_path):
    file = tmp_path / "labels.csv"
    for images in (("a", "b"), ("c",)):
        batches.add(file, batches.Batch("m", "margin", ("x", "y"), images, ((0.5, 0.5),) * len(images)))
    first, second = batches.load(file)
    assert batches.to_go_on([first, second], "m", "margin", lambda name: name == "a") == first
    assert batches.to_go_on([first, second], "m", "margin", lambda name: name in "ab") == second
    assert batches.to_go_on([first, second], "m", "margin", lambda name: True) is None
    assert batches.to_go_on([first, second], "other", "margin", lambda name: False) is None
    assert batches.to_go_on([first, second], "m", "random", lambda name: False) is None


def test_contrast_makes_values_black_and_white():
    values = Values(np.array([[100.0, 150.0, 200.0]], np.float32), 100, 200)
    assert values.shown().tolist() == [[0, 128, 255]]
    assert values.shown(150, 200).tolist() == [[0, 0, 255]]
    inverted = Values(values.values, 100, 200, inverted=True)
    assert inverted.shown().tolist() == [[255, 127, 0]]


def test_an_image_is_shown_upright_in_colour_and_in_its_own_size(tmp_path):
    turned = Image.new("RGB", (6, 4), (255, 0, 0))
    exif = turned.getexif()
    exif[274] = 6  # to be turned by a quarter
    turned.save(tmp_path / "a.png", exif=exif)
    found = look(tmp_path / "a.png").values
    assert found.shape == (6, 4, 3)
    assert found[0, 0].tolist() == [255, 0, 0]


# Simulations


def test_labels_are_spread_evenly_over_clients_and_no_client_gives_more_than_it_has():
    assert spread(10, [9, 9, 9]) == [4, 3, 3]
    assert spread(10, [1, 9, 9]) == [1, 5, 4]
    assert spread(10, [1, 2, 3]) == [1, 2, 3]
    assert spread(2, [5, 5, 5]) == [1, 1, 0]
    assert spread(5, []) == []


@pytest.fixture(scope="module")
def run(small_run):
    directory = small_run("method=labels-only", "rounds=3")
    execute(directory, executor=Serial())
    return directory


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_simulation_answers_rightly_at_the_clients_without_labels_and_repeats_to_the_byte(strategy, run, tmp_path):
    found = simulate(run, strategy, 18, tmp_path / "a.csv")
    assert found.clients == {1: 5, 2: 5, 3: 4, 4: 4}
    world = World.open(run)
    y, classes = world.dataset.splits["train"].labels, world.dataset.classes
    answers = read_answers(tmp_path / "a.csv")
    assert len(answers) == 18
    free = np.concatenate([share.unlabeled for share in world.partition.shares])
    for name, labels in answers.items():
        image = int(name.removeprefix("train[").removesuffix("]"))
        assert image in free
        assert labels == [classes[y[image]]]
    again = simulate(run, strategy, 18, tmp_path / "b.csv")
    assert again.file.read_bytes() == (tmp_path / "a.csv").read_bytes()


def test_the_choice_does_not_depend_on_hidden_labels(run, tmp_path, monkeypatch):
    """Hidden labels answer, and do not choose."""
    simulate(run, "uncertain-diverse", 18, tmp_path / "a.csv")
    real = World.open

    def shuffled(directory):
        world = real(directory)
        labels = world.dataset.splits["train"].labels
        hidden = torch.from_numpy(np.concatenate([share.unlabeled for share in world.partition.shares]))
        labels[hidden] = labels[hidden.flip(0)]
        return world

    monkeypatch.setattr(World, "open", shuffled)
    simulate(run, "uncertain-diverse", 18, tmp_path / "b.csv")
    one, other = (read_answers(tmp_path / name) for name in ("a.csv", "b.csv"))
    assert list(one) == list(other)
    assert one != other


def test_labels_add_up_over_several_simulations(run, tmp_path):
    simulate(run, "margin", 10, tmp_path / "a.csv")
    second = prepare(
        read({}, [*SMALL, "method=labels-only", "rounds=1", f"labels.file={tmp_path / 'a.csv'}"]), tmp_path / "run"
    )
    execute(second, executor=Serial())
    found = simulate(second, "margin", 10, tmp_path / "b.csv")
    assert found.before == 10
    one, other = (read_answers(tmp_path / name) for name in ("a.csv", "b.csv"))
    assert len(other) == 20
    assert one.items() <= other.items()


def test_the_command_simulates_and_says_what_is_wrong(run, fewlabel, tmp_path):
    done = fewlabel("label", "--simulate", "--run", run, "--count", "8", "--out", tmp_path / "l.csv")
    assert done.code == 0, done.err
    assert "8 labels at 4 clients, chosen by uncertain-diverse, after 0 earlier ones" in done.out
    assert f"labels.file={tmp_path / 'l.csv'}" in done.out
    for words, why in (
        (["--simulate"], "--simulate takes --run"),
        ([], "label needs PATH, where your images are, or SITE"),
        ([tmp_path / "none"], "there is no file or folder"),
        ([tmp_path, "--strategy", "margin"], "--strategy margin needs --run"),
        ([tmp_path, "--strategy", "margins"], "margin"),
        ([tmp_path, "--run", run, "--format", "json"], "--format json is for --simulate"),
        (["--simulate", "--run", tmp_path], "is no simulation"),
    ):
        failed = fewlabel("label", *words)
        assert failed.code == 2, failed
        assert why in failed.err
        assert failed.err.count("\n") == 1


def test_images_that_all_have_a_label_leave_nothing_to_do(fewlabel, tmp_path):
    for label in "ab":
        (tmp_path / "images" / label).mkdir(parents=True)
        Image.new("L", (4, 4)).save(tmp_path / "images" / label / "1.png")
    failed = fewlabel("label", Path(tmp_path / "images"))
    assert failed.code == 2
    assert "has a label or an answer: there is nothing left to label" in failed.err
