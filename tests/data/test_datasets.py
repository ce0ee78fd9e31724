"""Data sets must be decoded once, mapped by all processes, and decoded again when anything has changed."""

import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.data import datasets
from fewlabel.data.datasets import Raw
from tests import owndata


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fewlabel" / "decoded"


def test_digits_are_scikit_learns_in_its_order_in_three_splits(cache):
    from sklearn.datasets import load_digits

    digits = datasets.load("digits", 8)
    assert {name: len(split) for name, split in digits.splits.items()} == {
        "train": 1197,
        "validation": 300,
        "test": 300,
    }
    assert (digits.classes, digits.channels, digits.image_size) == (tuple("0123456789"), 1, 8)
    pixels = torch.cat([split.images.pixels for split in digits.splits.values()])
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (1797, 1, 8, 8))
    images, labels = load_digits(return_X_y=True)
    assert np.array_equal(torch.cat([split.labels for split in digits.splits.values()]).numpy(), labels)
    # Sixteen greys survive being written as 256.
    assert np.array_equal((pixels.view(-1, 64).double() * 16 / 255).round().numpy(), images)


def test_training_images_are_normalised_to_mean_0_and_deviation_1(cache):
    train = datasets.load("digits", 16).splits["train"].images
    seen = train.view(torch.arange(1197), "plain", torch.Generator()).double()
    assert seen.mean().item() == pytest.approx(0, abs=1e-6)
    assert seen.std(unbiased=False).item() == pytest.approx(1, abs=1e-6)


def test_mean_and_deviation_are_worked_out_by_channel():
    images = np.zeros((2, 2, 1, 2), np.uint8)
    images[0, 0], images[1, 0] = 255, 0  # half white: mean 0.5, deviation 0.5
    images[:, 1] = 51  # all 0.2: the deviation of a constant is kept from being 0, by which nothing can be divided
    mean, std = datasets.moments(images)
    assert mean == pytest.approx([0.5, 0.2])
    assert std == pytest.approx([0.5, 1e-6])


def test_decoding_twice_gives_the_same_arrays(cache, tmp_path, monkeypatch):
    first = datasets.load("digits", 12)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    second = datasets.load("digits", 12)
    for name, split in first.splits.items():
        assert torch.equal(split.images.pixels, second.splits[name].images.pixels)
        assert torch.equal(split.labels, second.splits[name].labels)
        assert split.images.mean == second.splits[name].images.mean


def mapped(tensor: Tensor) -> Path:
    """The file that a tensor's memory is mapped from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *file = line.split(maxsplit=5)
        start, end = (int(place, 16) for place in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return Path(*file)
    raise ValueError("no memory of this process")


def test_decoded_images_are_mapped_from_their_files(cache):
    for name, split in datasets.load("digits", 8).splits.items():
        assert mapped(split.images.pixels) == cache / "digits-8px-v2" / f"{name}-images.npy"
    assert mapped(torch.zeros(10)).suffix != ".npy"


def test_a_data_set_is_decoded_once_and_nothing_is_left_aside(cache):
    owndata.CALLS.clear()
    datasets.load("tests.owndata:two_colours", 4)
    datasets.load("tests.owndata:two_colours", 4)
    assert owndata.CALLS == ["two_colours"]
    assert [path.name for path in cache.iterdir()] == ["tests.owndata-two_colours-4px-v2"]


def load_at_once(barrier, queue) -> None:
    torch.set_num_threads(1)  # as in a worker: a fork cannot use the threads of its parent
    barrier.wait()
    queue.put(int(datasets.load("digits", 20).splits["train"].images.pixels.sum()))


def test_two_processes_may_decode_at_once(cache):
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(2), context.Queue()
    processes = [context.Process(target=load_at_once, args=(barrier, queue), daemon=True) for _ in range(2)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=30) for _ in processes]
    for process in processes:
        process.join()
    assert found == [int(datasets.load("digits", 20).splits["train"].images.pixels.sum())] * 2
    assert [path.name for path in cache.iterdir()] == ["digits-20px-v2"]


def test_the_slower_of_two_processes_takes_what_the_faster_wrote(cache):
    datasets.load("digits", 8)
    datasets.decode("digits", 8, cache / "digits-8px-v2", datasets.digits)
    assert len(list(cache.iterdir())) == 1


def test_a_cache_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(StorageError, match=r"cannot be written to .*: Not a directory; set XDG_CACHE_HOME"):
        datasets.load("digits", 8)


def test_a_disk_that_fills_up_while_decoding_says_so_and_leaves_nothing(cache, monkeypatch):
    def full(*_: object) -> None:
        raise OSError("512 requested and 0 written")  # what NumPy says, without a number or its text

    monkeypatch.setattr(datasets.np, "save", full)
    with pytest.raises(StorageError, match="512 requested and 0 written; set XDG_CACHE_HOME to a directory with room"):
        datasets.load("digits", 8)
    assert list(cache.iterdir()) == []


def swap(folder: Path) -> None:
    np.save(folder / "train-labels.npy", np.load(folder / "train-labels.npy")[::-1])


def blacken(folder: Path) -> None:
    np.save(folder / "train-images.npy", np.zeros_like(np.load(folder / "train-images.npy")))


DAMAGES = {
    "labels swapped": swap,
    "images black": blacken,
    "labels cut short": lambda folder: os.truncate(folder / "train-labels.npy", 1000),
    "images gone": lambda folder: (folder / "test-images.npy").unlink(),
    "about.json gone": lambda folder: (folder / "about.json").unlink(),
    "about.json cut short": lambda folder: os.truncate(folder / "about.json", 100),
    "about.json of an earlier FewLabel": lambda folder: (folder / "about.json").write_text('{"splits": ["train"]}'),
}


@pytest.mark.parametrize("name", ["digits", "tests.owndata:two_colours"])
@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_arrays_are_noticed_and_decoded_anew(cache, name, fresh, damage):
    def seen() -> list[tuple[bytes, bytes]]:
        splits = datasets.load(name, 8, fresh).splits.values()
        return [(split.images.pixels.numpy().tobytes(), split.labels.numpy().tobytes()) for split in splits]

    before, (folder,) = seen(), cache.iterdir()
    DAMAGES[damage](folder)
    assert seen() == before
    assert list(cache.iterdir()) == [folder]


@pytest.mark.parametrize("name", ["digits", "tests.owndata:two_colours"])
def test_labels_whose_bytes_rot_under_the_same_size_and_time_are_noticed_once_a_run(cache, name):
    before, (folder,) = datasets.load(name, 8).splits["train"].labels.clone(), cache.iterdir()
    path = folder / "train-labels.npy"
    stat, whole = path.stat(), bytearray(path.read_bytes())
    whole[-8] ^= 1
    path.write_bytes(whole)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert torch.equal(datasets.load(name, 8, fresh=True).splits["train"].labels, before)


def test_your_own_function_is_asked_again_and_mends_images_that_rot(cache):
    datasets.load("tests.owndata:two_colours", 8)
    (path,) = cache.glob("*/train-images.npy")
    stat, whole = path.stat(), path.read_bytes()
    path.write_bytes(whole[:-64] + bytes(64))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    datasets.load("tests.owndata:two_colours", 8, fresh=True)
    assert path.read_bytes() == whole


def test_to_open_reads_no_image(cache, monkeypatch):
    datasets.load("digits", 8)
    read: list[str] = []
    content = datasets.reading.digest_of
    monkeypatch.setattr(datasets.reading, "digest_of", lambda file: read.append(file.name) or content(file))
    datasets.load("digits", 8)
    assert read == []
    datasets.load("digits", 8, fresh=True)
    assert sorted(read) == ["test-labels.npy", "train-labels.npy", "validation-labels.npy"]


def test_what_a_killed_decoding_left_is_cleared_and_what_another_writes_is_not(cache):
    dead = multiprocessing.get_context("fork").Process(target=int)
    dead.start()
    dead.join()
    cache.mkdir(parents=True)
    left, alive, alien = (cache / f"{datasets.ASIDE}{who}-x" for who in (dead.pid, os.getppid(), "else"))
    for folder in (left, alive, alien):
        folder.mkdir()
        (folder / "train-images.npy").touch()
    datasets.load("digits", 8)
    assert {path.name for path in cache.iterdir()} == {alive.name, alien.name, "digits-8px-v2"}


def test_a_data_set_of_your_own_is_named_by_its_function(cache):
    found = datasets.load("tests.owndata:two_colours", 8)
    assert found.classes == ("red", "blue")
    assert (found.channels, found.image_size) == (3, 8)
    assert {name: len(split) for name, split in found.splits.items()} == {"train": 8, "test": 4}
    assert torch.equal(found.splits["train"].images.pixels[1, 2], torch.full((8, 8), 255, dtype=torch.uint8))
    assert found.splits["train"].images.mean == pytest.approx((0.5, 0.0, 0.5))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("digit", "there is no data set 'digit'; did you mean 'digits'"),
        ("xyz", "there is no data set 'xyz'; there are digits"),
        ("tests.nowhere:f", "data set 'tests.nowhere:f' cannot be imported: No module named 'tests.nowhere'"),
        ("tests.owndata:f", "data set 'tests.owndata:f' cannot be imported: module 'tests.owndata' has no attribute"),
        (":f", "data set ':f' cannot be imported"),
        (
            "tests.owndata:floats",
            r"train images must be uint8 \[N, C, H, W\] with N labels, found float64 \[2, 1, 4, 4\]",
        ),
        ("badsets:gone", "data set 'badsets:gone' failed: FileNotFoundError: .*x.png"),
        ("badsets:pair", "data set 'badsets:pair' must return a fewlabel.data.datasets.Raw, returned tuple"),
    ],
)
def test_a_data_set_that_is_not_there_or_no_data_set_is_refused_in_a_sentence(
    cache, tmp_path, monkeypatch, name, sentence
):
    (tmp_path / "badsets.py").write_text("def gone():\n    open('/nowhere/x.png')\n\n\ndef pair():\n    return 1, 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match=sentence):
        datasets.load(name, 8)


IMAGE, LABELS = np.zeros((2, 1, 4, 4), np.uint8), np.arange(2)
TWO = {"train": (IMAGE, LABELS), "test": (IMAGE, LABELS)}


@pytest.mark.parametrize(
    ("classes", "splits", "sentence"),
    [
        ("ab", {"train": (IMAGE, LABELS)}, "a data set has train, test and perhaps validation, found train"),
        ("ab", TWO | {"extra": (IMAGE, LABELS)}, "perhaps validation, found train, test, extra"),
        ("ab", TWO | {"test": (IMAGE, LABELS[:1])}, r"test images must be .* with labels \[1\]"),
        ("ab", TWO | {"train": (IMAGE, LABELS + 1)}, "train labels must be from 0 to 1"),
        ("a", TWO, "a data set has two classes or more, found a"),
    ],
)
def test_a_raw_data_set_is_checked(classes, splits, sentence):
    Raw(("a", "b"), TWO)
    with pytest.raises(BadInput, match=sentence):
        Raw(tuple(classes), splits)


def test_resizing_is_bilinear_with_antialiasing():
    image = np.zeros((1, 1, 4, 4), np.uint8)
    image[0, 0, :, 2:] = 200
    # Halving with antialiasing weighs the four nearest columns by 1/8, 3/8, 3/8, 1/8: (3*0 + 1*200) / 7 at the edge,
    # where the outermost falls away.
    assert datasets.resize(image, 2)[0, 0].tolist() == [[29, 171], [29, 171]]
    assert datasets.resize(image, 4) is image
