"""Images must reach a network as stated, and without a label where there is none."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.images import Labeled, Tally, Unlabeled, cut
from fewlabel.core.rng import Rng
from fewlabel.data import datasets
from fewlabel.data.datasets import Raw
from fewlabel.data.images import Images
from fewlabel.data.views import make_views
from tests import owndata


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pixels(count: int, channels: int = 3, size: int = 16) -> Tensor:
    return torch.randint(1, 256, (count, channels, size, size), dtype=torch.uint8, generator=generator())


def numbered(count: int) -> Images:
    """Images of one pixel whose value is their number, so that a batch says what it holds."""
    return Images(torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1), (0.0,), (1 / 255,))


# Views


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """The plain way: image [C, H, W] moved by whole pixels, black coming in."""
    result, (_, height, width) = torch.zeros_like(image), image.shape
    for row in range(height):
        for column in range(width):
            if 0 <= row + down < height and 0 <= column + right < width:
                result[:, row, column] = image[:, row + down, column + right]
    return result


@pytest.mark.parametrize(("size", "reach"), [(16, 2), (8, 1), (4, 1)])
def test_the_weak_view_shifts_each_image_by_up_to_an_eighth_on_its_own(size, reach):
    images = pixels(40, size=size)
    seen = make_views(["shift"], images, generator(1))[0]
    assert seen.shape == images.shape
    assert seen.dtype == torch.uint8
    moves = [(down, right) for down in range(-reach, reach + 1) for right in range(-reach, reach + 1)]
    found = []
    for image, view in zip(images, seen, strict=True):
        fitting = [move for move in moves if torch.equal(shifted(image, *move), view)]
        assert len(fitting) == 1  # no pixel of these images is black, so only one shift can have made the view
        found += fitting
    assert len(set(found)) > 5
    # The same draws in a plain loop: first all shifts down, then all to the right.
    down, right = torch.randint(0, 2 * reach + 1, (2, 40, 1, 1), generator=generator(1)).flatten(1).tolist()
    assert found == [(d - reach, r - reach) for d, r in zip(down, right, strict=True)]


def test_every_shift_of_the_weak_view_occurs_and_so_does_none():
    image = pixels(1).expand(1000, -1, -1, -1)
    seen = {bytes(view.numpy().tobytes()) for view in make_views(["shift"], image, generator())[0]}
    assert len(seen) == 25  # 5 x 5 shifts of up to 2 pixels
    assert bytes(image[0].contiguous().numpy().tobytes()) in seen


def test_views_leave_the_stored_images_alone():
    images = Images(pixels(6), (0.5,) * 3, (0.5,) * 3)
    before = images.pixels.clone()
    for name in ("plain", "weak"):
        images.view(torch.arange(6), name, generator()).mul_(0)
    assert torch.equal(images.pixels, before)


def test_a_view_is_normalised_by_channel():
    raw = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 3, 1, 1).expand(2, 3, 2, 2)
    images = Images(raw, mean=(0.5, 0.5, 0.1), std=(0.5, 0.25, 0.2))
    seen = images.view(torch.tensor([1]), "plain", generator())
    assert seen.shape == (1, 3, 2, 2)
    assert seen.dtype == torch.float32
    # (0 - 0.5) / 0.5, (1 - 0.5) / 0.25, (0.2 - 0.1) / 0.2
    torch.testing.assert_close(seen[0, :, 0, 0], torch.tensor([-1.0, 2.0, 0.5]))


def test_an_unknown_view_is_named():
    with pytest.raises(BadInput, match="there is no view 'week'; there are plain, weak"):
        numbered(2).view(torch.arange(2), "week", generator())


# Sets


@pytest.mark.parametrize(
    ("images", "size", "sizes"),
    [(7, 3, [3, 4]), (8, 3, [3, 3, 2]), (9, 3, [3, 3, 3]), (1, 3, [1]), (4, 3, [4]), (2, 5, [2]), (0, 3, [])],
)
def test_a_single_image_left_over_joins_the_batch_before(images, size, sizes):
    batches = cut(torch.arange(images), size)
    assert [len(batch) for batch in batches] == sizes
    assert [int(i) for batch in batches for i in batch] == list(range(images))


def test_a_single_image_is_trained_on_twice_at_once_each_time_seen_anew():
    images = Images(numbered(50).pixels.expand(-1, 1, 8, 8).contiguous(), (0.0,), (1 / 255,))
    labeled = Labeled(images, torch.tensor([42]), torch.tensor([7]), generator())
    unlabeled = Unlabeled(images, torch.tensor([41, 42]), generator())
    views = set()
    for size in (1, 4) * 4:
        [(x, y)] = labeled.batches("weak", size)
        [(weak, index)] = unlabeled.batches(("weak",), size, subset=torch.tensor([1]))
        assert (y.tolist(), index.tolist()) == ([7, 7], [1, 1])
        assert (len(x), len(weak)) == (2, 2)
        views |= {tuple(one.flatten().tolist()) for one in x}
    assert len(views) > 2
    [(x, y)] = labeled.batches("plain", shuffle=False)  # which is for predictions, one for each image
    assert (len(x), y.tolist()) == (1, [7])


def test_batches_show_each_image_once_with_its_label():
    where = torch.tensor([4, 8, 15, 16, 23, 42])
    labeled = Labeled(numbered(50), where, where % 5, generator())
    batches = list(labeled.batches("plain", 4))
    assert [len(y) for _, y in batches] == [4, 2]
    images, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    number = images.flatten().round().long()
    assert sorted(number.tolist()) == where.tolist()
    assert torch.equal(y, number % 5)


def test_each_pass_has_an_order_of_its_own_unless_it_is_told_not_to_shuffle():
    labeled = Labeled(numbered(30), torch.arange(30), torch.arange(30), generator())
    passes = [torch.cat([y for _, y in labeled.batches("plain", 7)]).tolist() for _ in range(3)]
    assert len({tuple(one) for one in passes}) == 3
    assert torch.cat([y for _, y in labeled.batches("plain", 7, shuffle=False)]).tolist() == list(range(30))


def test_unlabeled_batches_hold_the_views_asked_for_and_the_index_of_their_images():
    where = torch.tensor([4, 8, 15, 16, 23, 42])
    unlabeled = Unlabeled(numbered(50), where, generator())
    seen = []
    for plain, weak_, again, index in unlabeled.batches(("plain", "weak", "plain"), 4):
        assert torch.equal(plain.flatten().round().long(), where[index])
        assert torch.equal(plain, again)
        assert weak_.shape == plain.shape
        seen += index.tolist()
    assert sorted(seen) == list(range(6))


def test_unlabeled_batches_of_a_subset_hold_just_that():
    unlabeled = Unlabeled(numbered(50), torch.arange(10, 30), generator())
    batches = list(unlabeled.batches(("plain",), 2, subset=torch.tensor([3, 1, 7])))
    assert sorted(int(i) for _, index in batches for i in index) == [1, 3, 7]
    assert list(unlabeled.batches(("plain",), 2, subset=torch.tensor([], dtype=torch.long))) == []


def test_unlabeled_images_with_pseudo_labels_are_a_fixed_labeled_set():
    unlabeled = Unlabeled(numbered(50), torch.tensor([40, 41, 42, 43]), generator())
    labeled = unlabeled.with_labels(torch.tensor([3, 0, 2]), torch.tensor([7, 8, 9]))
    assert len(labeled) == 3
    (images, y), *more = labeled.batches("plain", 5)
    assert not more
    pairs = zip(images.flatten().round().int().tolist(), y.tolist(), strict=True)
    assert set(pairs) == {(43, 7), (40, 8), (42, 9)}


def test_a_tally_counts_the_images_drawn_for_training_by_whether_the_site_has_their_labels():
    tally = Tally()
    labeled = Labeled(numbered(50), torch.arange(5), torch.zeros(5, dtype=torch.long), generator(), tally)
    unlabeled = Unlabeled(numbered(50), torch.arange(10, 20), generator(), tally)

    def counted(batches: Iterator[object]) -> tuple[int, int]:
        before = tally.labeled, tally.unlabeled
        for _ in batches:
            pass
        return tally.labeled - before[0], tally.unlabeled - before[1]

    pseudo = unlabeled.with_labels(torch.tensor([3, 0, 2]), torch.tensor([7, 8, 9]))
    assert counted(labeled.batches(size=2)) == (5, 0)
    assert counted(unlabeled.batches(("weak", "strong"), 4)) == (0, 10)  # an image counts once, however many its views
    assert counted(unlabeled.batches(("weak", "weak"), 4, counted=2)) == (0, 20)  # unless both are trained on
    assert counted(unlabeled.batches(subset=torch.tensor([1, 2]))) == (0, 2)
    assert counted(pseudo.batches()) == (0, 3)
    assert counted((labeled + pseudo).batches(size=4)) == counted((pseudo + labeled).batches(size=4)) == (5, 3)
    with torch.no_grad():
        assert counted(labeled.batches()) == counted(unlabeled.batches()) == (0, 0)
    next(labeled.batches(size=2))  # the rest of the pass is never drawn
    assert (tally.labeled, tally.unlabeled) == (5 + 5 + 5 + 2, 10 + 20 + 2 + 3 + 3 + 3)


def test_two_sets_of_a_site_together_hold_the_images_of_both():
    unlabeled = Unlabeled(numbered(50), torch.tensor([40, 41]), generator())
    labeled = Labeled(numbered(50), torch.tensor([7, 8, 9]), torch.tensor([1, 2, 3]), generator())
    both = labeled + unlabeled.with_labels(torch.tensor([1]), torch.tensor([5]))
    ((images, y),) = both.batches("plain", 9, shuffle=False)
    assert images.flatten().round().int().tolist() == [7, 8, 9, 41]
    assert y.tolist() == both.y.tolist() == [1, 2, 3, 5]


def held(value: object, seen: set[int]) -> Iterator[object]:
    """Everything that can be reached from an object through its attributes, entries and closures."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield value
    inside = list(vars(value).values()) if hasattr(value, "__dict__") and not isinstance(value, type) else []
    if isinstance(value, list | tuple | set | frozenset):
        inside += value
    elif isinstance(value, dict):
        inside += [*value.keys(), *value.values()]
    for part in inside:
        yield from held(part, seen)


def test_unlabeled_images_lead_to_no_label(run_dir):
    from fewlabel.engine.world import World

    world = World.open(run_dir("rounds=1"))
    labels = world.dataset.splits["train"].labels
    site = world.site(1, 1, Rng(0), torch.nn.Linear(1, 1))
    assert site.labeled is None
    hidden = labels[torch.from_numpy(world.partition.shares[1].unlabeled)]
    tensors = [value for value in held(site, set()) if isinstance(value, Tensor | np.ndarray)]
    assert len(tensors) > 2  # the pixels and the index at least
    for tensor in map(torch.as_tensor, tensors):
        assert tensor.shape not in (labels.shape, hidden.shape) or not (
            torch.equal(tensor, labels) or torch.equal(tensor, hidden)
        )
    # The search does find labels where they are.
    assert any(value is site.model for value in held(site, set()))
    reachable = held(world.site(0, 1, Rng(0), torch.nn.Linear(1, 1)), set())
    assert any(
        isinstance(v, Tensor) and torch.equal(v, labels[torch.from_numpy(world.partition.shares[0].labeled)])
        for v in reachable
    )


# Data sets


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "fewlabel" / "decoded"


def test_digits_are_1797_in_three_splits(cache):
    digits = datasets.load("digits", 8)
    assert {name: len(split) for name, split in digits.splits.items()} == {
        "train": 1197,
        "validation": 300,
        "test": 300,
    }
    assert digits.classes == ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    assert (digits.channels, digits.image_size) == (1, 8)
    for split in digits.splits.values():
        assert split.images.pixels.dtype == torch.uint8
        assert split.images.pixels.shape == (len(split), 1, 8, 8)
        assert set(split.labels.tolist()) == set(range(10))


def test_digits_are_scikit_learns_in_its_order(cache):
    from sklearn.datasets import load_digits

    splits = datasets.load("digits", 8).splits.values()
    images, labels = load_digits(return_X_y=True)
    found = torch.cat([split.images.pixels for split in splits]).view(-1, 64).double() * 16 / 255
    assert np.array_equal(torch.cat([split.labels for split in splits]).numpy(), labels)
    assert np.array_equal(found.round().numpy(), images)  # sixteen greys survive being written as 256


def test_training_images_are_normalised_to_mean_0_and_deviation_1(cache):
    train = datasets.load("digits", 16).splits["train"].images
    seen = train.view(torch.arange(1197), "plain", generator()).double()
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


def test_a_function_of_ones_own_is_asked_again_and_mends_images_that_rot(cache):
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


def test_a_data_set_of_ones_own_is_named_by_its_function(cache):
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
    ],
)
def test_a_data_set_that_is_not_there_or_no_data_set_is_refused_in_a_sentence(cache, name, sentence):
    with pytest.raises(BadInput, match=sentence):
        datasets.load(name, 8)


def test_a_raw_data_set_is_checked():
    image, y = np.zeros((2, 1, 4, 4), np.uint8), np.arange(2)
    Raw(("a", "b"), {"train": (image, y), "test": (image, y)})
    with pytest.raises(BadInput, match="a data set has train, test and perhaps validation, found train"):
        Raw(("a", "b"), {"train": (image, y)})
    with pytest.raises(BadInput, match="perhaps validation, found train, test, extra"):
        Raw(("a", "b"), {"train": (image, y), "test": (image, y), "extra": (image, y)})
    with pytest.raises(BadInput, match=r"test images must be .* with labels \[1\]"):
        Raw(("a", "b"), {"train": (image, y), "test": (image, y[:1])})
    with pytest.raises(BadInput, match="train labels must be from 0 to 1"):
        Raw(("a", "b"), {"train": (image, y + 1), "test": (image, y)})
    with pytest.raises(BadInput, match="a data set has two classes or more, found a"):
        Raw(("a",), {"train": (image, 0 * y), "test": (image, 0 * y)})


def test_resizing_is_bilinear_with_antialiasing():
    image = np.zeros((1, 1, 4, 4), np.uint8)
    image[0, 0, :, 2:] = 200
    # Halving with antialiasing weighs the four nearest columns by 1/8, 3/8, 3/8, 1/8: (3*0 + 1*200) / 7 at the edge,
    # where the outermost falls away.
    assert datasets.resize(image, 2)[0, 0].tolist() == [[29, 171], [29, 171]]
    assert datasets.resize(image, 4) is image


def test_a_function_of_ones_own_that_fails_or_returns_something_else_is_named(tmp_path, monkeypatch):
    (tmp_path / "badsets.py").write_text("def gone():\n    open('/nowhere/x.png')\n\n\ndef pair():\n    return 1, 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BadInput, match=r"data set 'badsets:gone' failed: FileNotFoundError: .*x.png"):
        datasets.load("badsets:gone", 8)
    with pytest.raises(
        BadInput, match=r"data set 'badsets:pair' must return a fewlabel.data.datasets.Raw, returned tuple"
    ):
        datasets.load("badsets:pair", 8)
