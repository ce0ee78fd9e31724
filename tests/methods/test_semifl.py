"""SemiFL (Diao, Ding and Tarokh, NeurIPS 2022), step by step of its algorithm, worked out by hand.

The paper's equations are named by what they define: the pseudo-labels, the fix set, the mix set, and the two losses.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fewlabel.core.federation import ClientInfo, Mean, Model, Reply, Site
from fewlabel.core.rng import Rng
from fewlabel.learn.alternate import State, averaged
from fewlabel.learn.optim import Local
from fewlabel.methods import METHODS
from fewlabel.methods.semifl import SemiFL
from tests.hand import STEP, passes, site, values, weights
from tests.methods.test_rscfed import START, SUPERVISED, Few, approx, moved, sigmoid

# At START the network says (3/4, 1/4) of any image. All are seen as 1: a step towards label 0 moves a network by 1/4.
FIX = SemiFL(threshold=0.7, weight_mix=0.0, global_momentum=0.0, local=STEP)
BOTH = replace(FIX, weight_mix=1.0)


def state(model: Model = START) -> State:
    return State(model.model, {name: torch.zeros_like(value) for name, value in model.model.items()})


def test_semifl_fix_loss_is_cross_entropy_with_the_received_models_labels():
    assert moved(FIX.local_update(site(0, unlabeled=[1, 1, 1]), START)) == approx(SUPERVISED)


def test_semifl_mix_loss_adds_to_the_fix_loss_by_its_weight():
    # All images are alike and get label 0, so a mixed one is like them.
    one = site(0, unlabeled=[1, 1, 1])
    assert moved(BOTH.local_update(one, START)) == approx(2 * SUPERVISED)
    assert moved(replace(BOTH, weight_mix=3.0).local_update(one, START)) == approx(4 * SUPERVISED)


SLOPE = Model(weights([math.log(3), 0.0]))  # at x = 3 it says (27/28, 1/28), at x = -1 (1/4, 3/4)


def drawn(number: int) -> int:
    """Which of two images client `number` draws into a mix set of one."""
    return int(torch.randint(2, (1,), generator=Rng("site", number).stream("mix set").torch))


@pytest.mark.parametrize("second", [0, 1])
def test_semifl_mix_set_is_drawn_from_all_images_and_mixed_by_beta(second):
    number = next(n for n in range(50) if drawn(n) == second)
    share = float(Rng("site", number).stream("mixup").numpy.beta(0.75, 0.75))
    method = replace(BOTH, threshold=0.9)  # so the fix set is the image 3 alone, and -1 has the label 1
    weight, bias = values(method.local_update(site(number, unlabeled=[3, -1]), SLOPE).model)
    x, target = (3.0, 1.0) if second == 0 else (3 * share - (1 - share), share)
    pull = target - sigmoid(x * math.log(3))  # of the mixed image; that of the fix set is 1/28
    assert weight == approx([math.log(3) + 3 / 28 + x * pull, -3 / 28 - x * pull])
    assert bias == approx([1 / 28 + pull, -1 / 28 - pull])


def test_semifl_pseudo_labels_are_made_once_a_round_in_evaluation_mode():
    one = site(0, unlabeled=[1] * 4)
    seen = passes(one)
    method = replace(BOTH, local=replace(STEP, epochs=2, batch_size=2))
    method.local_update(one, START)
    assert seen == [(False, 4), *[(True, 2)] * 8]  # two epochs of two batches, each of the fix and the mix set
    [(index, label, _)] = one.audited
    assert (sorted(index.tolist()), label.tolist()) == ([0, 1, 2, 3], [0] * 4)


def test_semifl_unlabeled_images_may_have_epochs_of_their_own():
    """A step of 1/4 moves the logits apart by 1, so the second of two is 1 - sigmoid(ln 3 + 1). Labels have both."""
    twice = replace(FIX, local=replace(STEP, epochs=2))
    second = 1 - sigmoid(math.log(3) + 1)
    assert moved(twice.local_update(site(0, unlabeled=[1, 1]), START)) == approx(SUPERVISED + second)
    once = replace(twice, epochs_unlabeled=1)
    assert moved(once.local_update(site(0, unlabeled=[1, 1]), START)) == approx(SUPERVISED)
    assert moved(once.fine_tune(site(0, [(1, 0)]), START)) == approx(SUPERVISED + second)


def test_semifl_trained_images_are_counted_once_for_each_loss():
    for method, counted in ((FIX, 3), (BOTH, 6)):
        one = site(0, unlabeled=[1, 1, 1])
        one.unlabeled._tally = one.tally
        method.local_update(one, START)
        assert one.tally.trained == [0, counted]


def test_semifl_a_client_that_is_sure_of_nothing_skips_the_round():
    one = site(0, unlabeled=[1, 1])
    assert replace(FIX, threshold=0.8).local_update(one, START) is None
    assert one.audited == []
    assert FIX.local_update(site(1, [(1, 0)]), START) is None  # without unlabeled images, too


def test_semifl_with_the_recipe_classes_of_the_pseudo_labels_count_alike():
    one = site(0, unlabeled=[1, 1])
    one.unlabeled._balanced = 2  # priors 3/4 and 1/4, of mixed images 5/6 and 1/6
    assert moved(FIX.local_update(one, START)) == approx(1 / 10)  # 1 - 9/10, from 3 * 3 : 1
    assert moved(BOTH.local_update(one, START)) == approx(1 / 10 + 1 / 16)  # and 1 - 15/16, from 3 * 5 : 1


# Rounds


class Served(Few):
    """Sites, and a server that may have labels."""

    def __init__(self, *sites: Site[Any], labeled: Any = (), **more: Any) -> None:
        super().__init__(*sites, **more)
        self.server = site(-1, labeled)

    def map(self, task: Any, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.sent.append((-1, item))
            yield task(self.server, item)


AFTER = 1 - sigmoid(math.log(3) + 4 * SUPERVISED)  # a step towards label 0 after another


def test_semifl_clients_train_first_and_the_server_fine_tunes_their_average():
    fed = Served(site(0, unlabeled=[1, 1]), site(1, unlabeled=[1, 1, 1]), labeled=[(1, 0)])
    assert moved(Model(FIX.round(state(), fed).model)) == approx(SUPERVISED + AFTER)
    assert fed.asked == [1, 0, -1]
    assert moved(fed.sent[-1][1]) == approx(SUPERVISED)


def test_semifl_labeled_clients_take_the_servers_part():
    fed = Served(site(0, unlabeled=[1, 1]), site(1, [(1, 0)]), site(2, [(1, 1)] * 3))
    # From there a step towards label 0 is AFTER, one towards label 1 is AFTER - 1; they count by their labels.
    assert moved(Model(FIX.round(state(), fed).model)) == approx(SUPERVISED + (AFTER + 3 * (AFTER - 1)) / 4)
    assert fed.asked == [0, 2, 1]


def test_semifl_a_client_with_both_kinds_takes_part_in_both_phases_and_the_server_comes_last():
    fed = Served(site(0, [(1, 0)], [1, 1]), labeled=[(1, 0)])
    last = 1 - sigmoid(math.log(3) + 4 * (SUPERVISED + AFTER))
    assert moved(Model(FIX.round(state(), fed).model)) == approx(SUPERVISED + AFTER + last)
    assert fed.asked == [0, 0, -1]


@pytest.mark.parametrize(("silent", "end"), [([0], SUPERVISED), ([1], SUPERVISED), ([0, 1], 0.0)])
def test_semifl_whoever_is_missing_the_others_go_on(silent, end):
    fed = Served(site(0, unlabeled=[1, 1]), site(1, [(1, 0)]), silent=silent)
    after = replace(FIX, global_momentum=0.5).round(state(), fed)
    assert moved(Model(after.model)) == approx(end)


def one(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([value]), "n.running_mean": torch.tensor([value])}


def mean(value: float) -> Mean[None]:
    return Mean(one(value), [Reply(0, ClientInfo(0, 0, 1), None)])


def test_semifl_average_has_momentum_over_rounds():
    first = averaged(State(one(0.0), one(0.0)), mean(1.0), 0.5)
    assert (first.model["w"].item(), first.velocity["w"].item()) == (1.0, 1.0)
    # Fine-tuned to 2, then the clients' mean is 2.5: 2 + 0.5 * 1 + (2.5 - 2) = 3.
    second = averaged(State(one(2.0), first.velocity), mean(2.5), 0.5)
    assert (second.model["w"].item(), second.velocity["w"].item()) == (3.0, 1.0)
    assert second.model["n.running_mean"].item() == 2.5  # statistics have none
    assert torch.equal(averaged(State(one(2.0), first.velocity), mean(2.5), 0.0).model["w"], one(2.5)["w"])


def test_the_defaults_are_those_of_the_paper():
    assert METHODS["semifl"] == SemiFL(
        threshold=0.95,
        alpha=0.75,
        weight_mix=1.0,
        global_momentum=0.5,
        local=Local(epochs=5, batch_size=10, lr=0.03, momentum=0.9, weight_decay=5e-4, clip=1.0),
    )
