"""The training loop must take just the steps that its settings say."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fewlabel.core.images import Labeled, Tally, Unlabeled
from fewlabel.core.tree import of
from fewlabel.data.images import Images
from fewlabel.learn.loop import fit, paired, paired_views
from fewlabel.learn.losses import proximal
from fewlabel.learn.optim import SGD, Local, memory_of, optimizer
from tests.nets import tiny


class Weights(nn.Module):
    """Bare numbers, so that the loss w . c has the gradient c."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))


def trained(start: list[float], gradients: list[list[float]], local: Local, labels: bool = True) -> list[float]:
    model = Weights(*start)
    batches = [torch.tensor(gradient) for gradient in gradients]
    fit(model, optimizer(model, local, labels), batches, lambda c: (model.w * c).sum(), local.clip)
    return model.w.tolist()


PLAIN = Local(lr=0.5, momentum=0.0, weight_decay=0.0, clip=None)


def test_a_plain_step_is_the_learning_rate_times_the_gradient():
    assert trained([2.0, -1.0], [[3.0, -4.0]], PLAIN) == [0.5, 1.0]  # 2 - 0.5*3, -1 + 0.5*4


def test_each_batch_is_one_step_from_a_gradient_of_its_own():
    assert trained([0.0], [[1.0], [2.0], [4.0]], PLAIN) == [-3.5]
    assert trained([7.0], [], PLAIN) == [7.0]


def test_momentum_adds_what_is_left_of_earlier_gradients():
    # m: 1, then 0.5*1 + 2 = 2.5, then 0.5*2.5 + 4 = 5.25; the sum is 8.75, and half of it the way.
    assert trained([0.0], [[1.0], [2.0], [4.0]], Local(lr=0.5, momentum=0.5, weight_decay=0.0, clip=None)) == [-4.375]


def test_weight_decay_pulls_towards_zero_before_momentum():
    # g = 3 + 0.1*2 = 3.2, w = 2 - 0.5*3.2 = 0.4; then g = 3 + 0.04, m = 0.9*3.2 + 3.04 = 5.92, w = 0.4 - 2.96.
    found = trained([2.0], [[3.0], [3.0]], Local(lr=0.5, momentum=0.9, weight_decay=0.1, clip=None))
    assert found == pytest.approx([-2.56], rel=1e-6)


def test_clipping_shortens_a_gradient_that_is_longer_and_no_other():
    clipped = Local(lr=1.0, momentum=0.0, weight_decay=0.0, clip=1.0)
    # (3, 4) has the norm 5; PyTorch adds a millionth to it before dividing.
    assert trained([0.0, 0.0], [[3.0, 4.0]], clipped) == pytest.approx([-0.6, -0.8], rel=1e-6)
    assert trained([0.0, 0.0], [[0.3, 0.4]], clipped) == pytest.approx([-0.3, -0.4], rel=1e-6)


def test_clipping_is_of_the_loss_alone_and_decay_comes_after():
    found = trained([10.0], [[5.0]], Local(lr=1.0, momentum=0.0, weight_decay=0.1, clip=1.0))
    assert found == pytest.approx([8.0], rel=1e-6)  # 10 - (1 + 0.1*10)


@pytest.mark.parametrize(("labels", "other", "end"), [(True, 0.25, [0.5]), (False, 0.25, [1.25]), (False, None, [0.5])])
def test_a_site_without_labels_may_have_a_learning_rate_of_its_own(labels, other, end):
    assert trained([2.0], [[3.0]], replace(PLAIN, lr_unlabeled=other), labels) == end  # 2 - 0.5*3, 2 - 0.25*3


def test_adam_goes_as_far_as_the_learning_rate_against_the_sign_of_a_steady_gradient():
    # Both moments are brought to the scale of the gradient: m / sqrt(v) = g / |g|, but for a hundred-millionth.
    adam = replace(PLAIN, optimizer="adam", momentum=0.9)
    assert trained([2.0, -1.0], [[3.0, -4.0]], adam) == pytest.approx([1.5, -0.5])
    assert trained([2.0, -1.0], [[3.0, -4.0]] * 2, adam) == pytest.approx([1.0, 0.0], abs=1e-6)


def test_adam_remembers_two_moments():
    # m: 0.5*1, then 0.5*0.5 + 0.5*3 = 1.75, less bias 1.75 / (1 - 0.25) = 7/3.
    # v: 0.75*0 + 0.25*1, then 0.75*0.25 + 0.25*9 = 39/16, less bias 39/16 / (1 - 9/16) = 39/7.
    adam = replace(PLAIN, optimizer="adam", lr=1.0, momentum=0.5, second_momentum=0.75)
    assert trained([0.0], [[1.0], [3.0]], adam) == pytest.approx([-1 - 7 / 3 / (39 / 7) ** 0.5])


IMAGES = torch.randn(6, 8, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def steps(model: nn.Module, stepper, images: torch.Tensor) -> None:
    for x in images:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).square().mean().backward()
        stepper.step()


def same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "momentum", "theirs"),
    [
        ("sgd", 0.0, lambda p, **more: torch.optim.SGD(p, momentum=0.0, fused=True, **more)),
        ("sgd", 0.9, lambda p, **more: torch.optim.SGD(p, momentum=0.9, fused=True, **more)),
        ("adam", 0.9, lambda p, **more: torch.optim.Adam(p, betas=(0.9, 0.99), fused=True, **more)),
    ],
)
@pytest.mark.parametrize("decay", [0.0, 5e-4])
def test_our_step_is_that_of_torch_optim(kind, momentum, theirs, decay):
    local = Local(lr=0.1, optimizer=kind, momentum=momentum, second_momentum=0.99, weight_decay=decay, clip=None)
    ours, reference = tiny(1, 10, 8).eval(), tiny(1, 10, 8).eval()
    reference.load_state_dict(ours.state_dict())
    steps(ours, optimizer(ours, local), IMAGES)
    steps(reference, theirs(reference.parameters(), lr=0.1, weight_decay=decay), IMAGES)
    assert same(ours, reference)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_an_optimizer_that_remembers_goes_on_as_if_there_had_been_no_break(kind):
    local = Local(lr=0.1, optimizer=kind)
    whole, halves, forgetful = (tiny(1, 10, 8).eval() for _ in range(3))
    for other in (halves, forgetful):
        other.load_state_dict(whole.state_dict())
    steps(whole, optimizer(whole, local), IMAGES)
    first = optimizer(halves, local)
    steps(halves, first, IMAGES[:3])
    kept = {name: value.clone() for name, value in memory_of(first).items()}
    steps(halves, optimizer(halves, local, memory=kept), IMAGES[3:])
    assert same(whole, halves)
    for part in (IMAGES[:3], IMAGES[3:]):
        steps(forgetful, optimizer(forgetful, local), part)
    assert not same(whole, forgetful)


def test_what_was_kept_of_an_optimizer_is_copied_and_plain_sgd_keeps_nothing():
    model, local = Weights(0.0), Local(lr=0.5, momentum=0.5, weight_decay=0.0)
    kept = {"momentum.0": torch.tensor([2.0])}
    fit(model, optimizer(model, local, memory=kept), [0], lambda _: model.w.sum())
    assert model.w.tolist() == [-1.0]  # half of 0.5*2 + 1
    assert kept["momentum.0"].tolist() == [2.0]
    assert memory_of(optimizer(model, PLAIN)) == {}


def test_frozen_parameters_and_those_without_a_gradient_stay_as_they_are():
    model = nn.ModuleDict({"used": Weights(1.0), "unused": Weights(1.0), "frozen": Weights(1.0)})
    model["frozen"].requires_grad_(False)
    optimizer = SGD(model.parameters(), Local(lr=1.0, weight_decay=0.5))
    fit(model, optimizer, [0, 0], lambda _: model["used"].w.sum() * model["frozen"].w.sum(), 5.0)
    assert model["used"].w.item() < 0
    assert model["unused"].w.item() == model["frozen"].w.item() == 1.0


def test_training_is_in_training_mode():
    model = nn.Sequential(Weights(1.0), nn.Dropout())
    model.eval()
    modes = []

    def loss(_):
        modes.append([module.training for module in model.modules()])
        return model[0].w.sum()

    fit(model, SGD(model.parameters(), PLAIN), [0], loss)
    assert modes == [[True, True, True]]


def test_a_leftover_gradient_is_forgotten():
    model = Weights(0.0)
    model.w.grad = torch.tensor([1000.0])
    fit(model, SGD(model.parameters(), PLAIN), [torch.tensor([1.0])], lambda c: (model.w * c).sum())
    assert model.w.tolist() == [-0.5]


def test_an_iterator_of_batches_is_consumed_one_at_a_time():
    model, events = Weights(0.0), []

    def batches():
        for number in range(3):
            events.append(f"batch {number}")
            yield number

    def loss(number):
        events.append(f"loss {number}")
        return model.w.sum()

    fit(model, SGD(model.parameters(), PLAIN), batches(), loss)
    assert events == ["batch 0", "loss 0", "batch 1", "loss 1", "batch 2", "loss 2"]


def test_what_comes_after_a_step_comes_after_each_and_not_where_there_is_no_loss():
    model, after = Weights(0.0), []
    fit(
        model,
        SGD(model.parameters(), PLAIN),
        [torch.tensor([1.0]), None, torch.tensor([2.0])],
        lambda c: None if c is None else (model.w * c).sum(),
        after=lambda: after.append(model.w.item()),
    )
    assert after == [-0.5, -1.5]


# Pairs of batches


def numbered(count: int) -> Images:
    return Images(torch.arange(count, dtype=torch.uint8).view(-1, 1, 1, 1), (0.0,), (1 / 255,), weak="none")


@pytest.mark.parametrize(
    ("labeled", "unlabeled", "steps"),
    [(4, 10, 5), (10, 4, 5), (4, 5, 2), (4, None, 2), (None, 4, 2), (4, 0, 2), (0, 4, 2), (None, None, 0), (0, 0, 0)],
)
def test_the_kind_with_fewer_batches_begins_again_until_the_other_is_through(labeled, unlabeled, steps):
    where, rng = torch.arange(10), torch.Generator().manual_seed(0)
    sets = (
        None if labeled is None else Labeled(numbered(10), where[:labeled], where[:labeled], rng),
        None if unlabeled is None else Unlabeled(numbered(10), where[:unlabeled], rng),
    )
    pairs = list(paired(*sets, ("weak", "plain"), 2))
    assert len(pairs) == steps
    for kind, count in enumerate((labeled, unlabeled)):
        batches = [pair[kind] for pair in pairs]
        if not count:
            assert batches == [None] * steps
            continue
        assert all(len(batch) == 2 + kind for batch in batches)  # an image and its label, or two views and an index
        seen = torch.cat([batch[-1] for batch in batches]).tolist()
        for start in range(0, len(seen), count):  # each pass shows all of them before the next begins
            one = seen[start : start + count]
            assert len(set(one)) == len(one)
        assert set(seen) == set(range(count))


def test_pairs_may_hold_several_views_of_labeled_images_too():
    where, rng = torch.arange(10), torch.Generator().manual_seed(0)
    tally = Tally()
    labeled = Labeled(numbered(10), where[:4], where[:4], rng, tally)
    unlabeled = Unlabeled(numbered(10), where, rng, tally)
    pairs = list(paired_views(labeled, unlabeled, ("plain", "plain"), 2, (3, 4)))
    assert len(pairs) == 5  # and the labeled batches begin again
    for (x, again, y), (u, _, index) in pairs:
        assert x.flatten().tolist() == again.flatten().tolist() == y.tolist()
        assert u.flatten().tolist() == index.tolist()
    assert tally.trained == [3 * 10, 4 * 10]
    assert [first for first, _ in paired_views(None, unlabeled, ("weak",), 10, (1, 1))] == [None]
    assert [second for _, second in paired_views(labeled, None, ("weak",), 10, (1, 1))] == [None]


# Losses


def test_the_proximal_term_is_half_the_squared_distance_and_its_gradient_the_distance():
    model = nn.Linear(1, 2)
    anchor = of(model)
    with torch.no_grad():
        model.weight += torch.tensor([[2.0], [-1.0]])
        model.bias += torch.tensor([1.0, 0.0])
    value = proximal(model, anchor)
    value.backward()
    assert value.item() == pytest.approx(3.0, rel=1e-6)  # (4 + 1 + 1 + 0) / 2
    torch.testing.assert_close(model.weight.grad, torch.tensor([[2.0], [-1.0]]))
    torch.testing.assert_close(model.bias.grad, torch.tensor([1.0, 0.0]))


def test_statistics_are_no_part_of_the_proximal_distance():
    net = tiny(1, 10, 8)
    anchor = of(net)
    net.train()
    with torch.no_grad():
        net(torch.randn(9, 1, 8, 8))
    assert proximal(net, anchor).item() == 0.0
