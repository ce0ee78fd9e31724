"""Mixup, worked out by hand."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from fewlabel.core.images import Mixup
from fewlabel.core.mixing import draw_share, mix
from fewlabel.core.rng import Rng
from fewlabel.learn.mixup import mixup


def pixels(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(-1, 1, 1, 1)


def test_mixup_blends_images_and_labels_by_the_same_share():
    x, y = mix((pixels(4, 8), torch.tensor([0, 1])), (pixels(0, 4), torch.tensor([1, 1])), 0.75, 3)
    assert x.flatten().tolist() == [3, 7]  # 0.75 * 4, 0.75 * 8 + 0.25 * 4
    assert y.tolist() == [[0.75, 0.25, 0], [0, 1, 0]]


def test_mixup_takes_soft_labels():
    soft = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    _, y = mix((pixels(4, 8), soft), (pixels(0, 4), torch.tensor([0, 0])), 0.5, 2)
    assert y.tolist() == [[0.75, 0.25], [0.5, 0.5]]


def test_the_loss_of_a_blend_is_the_blend_of_the_losses():
    logits, first, second = torch.tensor([[1.0, 2.0, -1.0]]), torch.tensor([1]), torch.tensor([2])
    _, y = mix((pixels(1), first), (pixels(2), second), 0.25, 3)
    expected = 0.25 * cross_entropy(logits, first) + 0.75 * cross_entropy(logits, second)
    assert cross_entropy(logits, y).item() == pytest.approx(expected.item())


def test_a_batch_is_mixed_with_itself_in_another_order_by_a_share_from_its_own_stream():
    batch = pixels(*range(100)), torch.arange(100) % 2
    rng = Rng("mixup")
    first, second = mixup(batch, rng, 0.75, 2), mixup(batch, rng, 0.75, 2)
    again = Rng("mixup")
    assert torch.equal(mixup(batch, again, 0.75, 2)[0], first[0])
    assert torch.equal(mixup(batch, again, 0.75, 2)[0], second[0])
    assert not torch.equal(first[0], second[0])
    share = float(Rng("mixup").numpy.beta(0.75, 0.75))
    partner = ((first[0].flatten() - share * batch[0].flatten()) / (1 - share)).round().long()
    assert sorted(partner.tolist()) == list(range(100))  # each image is once a partner
    assert first[1][:, 1].tolist() == pytest.approx((share * batch[1] + (1 - share) * batch[1][partner]).tolist())


def test_shares_are_of_the_beta_distribution():
    rng, one, other = Rng("many"), (pixels(1), torch.tensor([0])), (pixels(0), torch.tensor([1]))
    shares = torch.tensor([mixup(one, rng, 0.75, 2, other)[0].item() for _ in range(4000)])
    assert shares.mean().item() == pytest.approx(1 / 2, abs=0.02)
    assert shares.var().item() == pytest.approx(1 / 10, abs=0.01)  # 1 / (4 (2 * 0.75 + 1))


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_shares_drawn_by_a_generator_are_of_the_beta_distribution(alpha):
    rng = Rng("johnk").torch
    shares = torch.tensor([draw_share(alpha, rng) for _ in range(4000)])
    assert shares.mean().item() == pytest.approx(1 / 2, abs=0.02)
    assert shares.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), abs=0.01)
    # Of Beta(0.4, 0.4), 24 % lie below 0.1 (by its integral); of the uniform distribution 10 %.
    assert (shares < 0.1).float().mean().item() == pytest.approx({0.4: 0.24, 1.0: 0.1}[alpha], abs=0.025)


def test_all_views_of_a_batch_are_mixed_with_the_same_partners_by_the_same_share():
    y = torch.tensor([0, 1, 2, 1])
    x, other, blended = Mixup(0.4, 3).blend([pixels(1, 2, 3, 4), pixels(10, 20, 30, 40)], y, Rng("batch").torch)
    rng = Rng("batch").torch
    share, order = draw_share(0.4, rng), torch.randperm(4, generator=rng)
    expected = [share * (i + 1) + (1 - share) * (order[i].item() + 1) for i in range(4)]
    assert x.flatten().tolist() == pytest.approx(expected)
    assert other.flatten().tolist() == pytest.approx([10 * value for value in expected])
    for i in range(4):
        row = [0.0, 0.0, 0.0]
        row[y[i]] += share
        row[y[order[i]]] += 1 - share
        assert blended[i].tolist() == pytest.approx(row)
