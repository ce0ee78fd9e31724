"""What a site shows a method: batches must be whole, counted, and without a label where there is none."""

from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from fewlabel.core.images import Labeled, Tally, Unlabeled, count_step, cut
from fewlabel.core.rng import Rng
from fewlabel.data.images import Images
from fewlabel.learn.loop import fit
from fewlabel.learn.optim import SGD, Local


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def numbered(count: int) -> Images:
    """Images of one pixel whose value is their number, so that a batch says what it holds."""
    return Images(torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1), (0.0,), (1 / 255,))


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


def test_labeled_images_come_in_several_views_with_their_labels():
    where = torch.tensor([4, 8, 15, 16, 23, 42])
    labeled = Labeled(numbered(50), where, where % 5, generator())
    sizes = []
    for plain, weak_, again, y in labeled.views(("plain", "weak", "plain"), 4):
        assert torch.equal(plain.flatten().round().long() % 5, y)
        assert torch.equal(plain, again)
        assert weak_.shape == plain.shape
        sizes.append(len(y))
    assert sizes == [4, 2]


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


def test_u5_a_tally_counts_the_images_of_each_step_by_whether_the_site_has_their_labels():
    tally = Tally()
    labeled = Labeled(numbered(50), torch.arange(5), torch.zeros(5, dtype=torch.long), generator(), tally)
    unlabeled = Unlabeled(numbered(50), torch.arange(10, 20), generator(), tally)

    def counted(batches: Iterable[object]) -> tuple[int, int]:
        before = list(tally.stepped)
        for batch in batches:
            count_step(batch)
        return tally.stepped[0] - before[0], tally.stepped[1] - before[1]

    pseudo = unlabeled.with_labels(torch.tensor([3, 0, 2]), torch.tensor([7, 8, 9]))
    assert counted(labeled.batches(size=2)) == (5, 0)
    assert counted(unlabeled.batches(("weak", "strong"), 4)) == (0, 10)  # an image counts once, however many its views
    assert counted(unlabeled.batches(("weak", "weak"), 4, counted=2)) == (0, 20)  # unless both are trained on
    assert counted((labeled + pseudo).views(("weak", "weak"), counted=2)) == (10, 6)
    assert counted(unlabeled.batches(subset=torch.tensor([1, 2]))) == (0, 2)
    assert counted(pseudo.batches()) == (0, 3)
    assert counted((labeled + pseudo).batches(size=4)) == counted((pseudo + labeled).batches(size=4)) == (5, 3)
    kept = list(labeled.batches(size=2))
    assert counted(kept * 3) == (15, 0)  # each time that a step is made with it
    assert counted(kept[:1]) == (2, 0)  # the rest is drawn, but no step is made with it
    assert counted([(x.flip(3), y) for x, y in kept]) == (5, 0)  # whatever is done to the images
    pairs = [(kept[0], None), (kept[1], next(unlabeled.batches(("weak",), 4)))]
    assert counted(pairs) == (5, 4)  # 2 and 3 with labels, as a single image joins the batch before
    assert counted(labeled.without_labels().batches()) == (0, 5)
    with torch.no_grad():
        assert counted(labeled.batches()) == (0, 0)


def test_u5_images_that_are_only_looked_at_do_not_count():
    tally = Tally()
    labeled = Labeled(numbered(50), torch.arange(5), torch.zeros(5, dtype=torch.long), generator(), tally)
    list(labeled.batches("plain"))  # to choose a threshold, say
    model = torch.nn.Linear(1, 1)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor | None:
        return model(batch[0].flatten(1)[:, :1]).sum() if len(batch[1]) == 2 else None

    fit(model, SGD(model.parameters(), Local()), labeled.batches(size=3), loss)
    assert tally.trained == [2, 0]  # of batches of 3 and 2, the first has no loss


def test_u5_of_a_loop_that_makes_its_own_steps_the_images_drawn_with_gradients_count():
    tally = Tally()
    labeled = Labeled(numbered(50), torch.arange(5), torch.zeros(5, dtype=torch.long), generator(), tally)
    unlabeled = Unlabeled(numbered(50), torch.arange(10, 20), generator(), tally)
    for _ in labeled.batches(size=2):
        pass
    with torch.no_grad():
        list(unlabeled.batches())
    unlabeled.count(3)
    assert tally.trained == [5, 3]


def test_images_without_their_labels_come_in_the_same_batches():
    def labeled() -> Labeled:
        return Labeled(numbered(50), torch.arange(9), torch.arange(9), generator())

    for (x, _), (same, _) in zip(labeled().batches(size=4), labeled().without_labels().batches(size=4), strict=True):
        assert x.equal(same)


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
