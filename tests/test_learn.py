"""The training loop must take just the steps that its settings say."""

import pytest
import torch
from torch import nn

from fewlabel.learn.loop import SGD, Local, fit
from fewlabel.learn.losses import proximal
from fewlabel.tree import of
from tests.nets import tiny


class Weights(nn.Module):
    """Bare numbers, so that the loss w . c has the gradient c."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values))


def trained(start: list[float], gradients: list[list[float]], local: Local) -> list[float]:
    model = Weights(*start)
    batches = [torch.tensor(gradient) for gradient in gradients]
    fit(model, SGD(model.parameters(), local), batches, lambda c: (model.w * c).sum(), local.clip)
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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 5e-4])
def test_our_step_is_that_of_torch_optim(momentum, decay):
    local = Local(lr=0.1, momentum=momentum, weight_decay=decay, clip=None)
    ours, theirs = tiny(1, 10, 8).eval(), tiny(1, 10, 8).eval()
    theirs.load_state_dict(ours.state_dict())
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=momentum, weight_decay=decay, fused=True)
    images = torch.randn(6, 8, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    optimizer = SGD(ours.parameters(), local)
    for x in images:
        for model, step in ((ours, optimizer), (theirs, reference)):
            step.zero_grad()
            model(x).square().mean().backward()
            step.step()
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=0, atol=0, msg=name)


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
