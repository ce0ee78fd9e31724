"""How large an update is, and what bounds do to it, with values worked out by hand."""

from dataclasses import dataclass

import pytest
import torch

from fewlabel.core import tree, updates, wire
from fewlabel.core.federation import ClientError, ClientInfo, Model, Weights
from fewlabel.core.tasks import Asked, accept, tasks
from fewlabel.learn.decomposed import Update
from fewlabel.learn.relation import Relation
from fewlabel.learn.sparse import pack
from fewlabel.methods.cbafed import CBAFed
from fewlabel.methods.cbafed import Update as Counts
from fewlabel.methods.fedavg import FedAvg
from fewlabel.methods.fedirm import FedIRM
from fewlabel.methods.fedirm import State as WithRelation
from fewlabel.methods.fedmatch import Message
from tests.nets import tiny


def net(w: list[float], mean: float = 0.0, var: float = 1.0, seen: int = 0) -> dict[str, torch.Tensor]:
    statistics = {"n.running_mean": torch.tensor([mean]), "n.running_var": torch.tensor([var])}
    return {"w": torch.tensor(w), **statistics, "n.num_batches_tracked": torch.tensor(seen)}


SENT = Model(net([1.0, 1.0]))


def test_an_update_is_the_change_of_parameters_and_apart_from_it_of_statistics():
    """(3, 4) has norm 5. The mean moves by 2; the standard deviation from 1 to 2, and so by 1: sqrt(5)."""
    found = updates.norms(updates.moved(Model(net([4.0, 5.0], 2.0, 4.0, 99)), SENT))
    assert found == {"parameter": 5.0, "statistic": pytest.approx(5**0.5)}


def test_a_scaled_update_goes_a_part_of_the_way():
    """Half of (3, 4) from (1, 1); the mean goes to 1, the standard deviation to 1.5; counters stay as they came."""
    upload = Model(net([4.0, 5.0], 2.0, 4.0, 99))
    half = updates.scaled(upload, SENT, {"parameter": 0.5, "statistic": 0.5}).model
    assert half["w"].tolist() == [2.5, 3.0]
    assert half["n.running_mean"].item() == 1.0
    assert half["n.running_var"].item() == 2.25
    assert half["n.num_batches_tracked"].item() == 99
    alone = updates.scaled(upload, SENT, {"parameter": 0.5}).model
    assert alone["n.running_var"].item() == 4.0
    assert upload.model["w"].tolist() == [4.0, 5.0]


def test_an_upload_without_statistics_has_an_update_of_parameters():
    found = updates.norms(updates.moved(Model({"w": torch.tensor([1.0, 3.0])}), SENT))
    assert found == {"parameter": 2.0}


@dataclass(frozen=True)
class Otherwise:
    weights: Weights
    more: dict[str, torch.Tensor]


def test_weights_are_compared_with_weights_whatever_their_fields_are_called():
    upload = Otherwise({"w": torch.tensor([1.0, 4.0])}, {"v": torch.tensor([1e9])})
    assert updates.norms(updates.moved(upload, SENT)) == {"parameter": 3.0}


def test_fedmatch_moves_sigma_and_psi():
    """Sigma moves by (3, 0), psi by (0, 4): together 5. At half the way, what did not move is not sent."""
    sigma, psi = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([2.0, 0.0])}
    sent = Message(sigma, pack(psi), (), 0.1, 1)
    upload = Update(pack({"w": torch.tensor([4.0, 1.0])}, sigma), pack({"w": torch.tensor([2.0, 4.0])}, psi))
    assert updates.norms(updates.moved(upload, sent)) == {"parameter": 5.0}
    half = updates.moved(updates.scaled(upload, sent, {"parameter": 0.5}), sent)
    assert half["sigma"][1]["w"].tolist() == [2.5, 1.0]
    assert half["psi"][1]["w"].tolist() == [2.0, 2.0]
    alone = updates.scaled(Update(psi=upload.psi), sent, {"parameter": 0.5})
    assert alone.sigma is None


# What accept refuses

NETWORK = tree.of(tiny(1, 10, 8))
CLIENT = ClientInfo(7, 20, 30)


def refused(method, upload) -> str:
    task = tasks(method)["local_update"]
    with pytest.raises(ClientError) as error:
        accept(task, CLIENT, 3, wire.pack(upload, task.upload), NETWORK, Asked(CLIENT, 10))
    assert error.value.client == 7
    return error.value.why


def test_numbers_that_make_an_average_overflow_are_refused():
    huge = NETWORK | {"6.bias": torch.full((16,), 3e38)}
    assert "it holds 3e+38, and numbers beyond 1e+18 make the average overflow" in refused(FedAvg, Model(huge))
    assert "lower method.local.lr" not in refused(FedAvg, Model(huge))
    statistics = NETWORK | {"1.running_var": torch.full((4,), 1e19)}
    assert "it holds 1e+19" in refused(FedAvg, Model(statistics))


@pytest.mark.parametrize(
    ("used", "counts", "why"),
    [
        (51, None, "it says that it trained on 51 images, and it has 50"),
        (-1, None, "it says that it trained on -1 images"),
        (2**62, None, "it says that it trained on 4611686018427387904 images"),
        (20, [20, 0], "its counts of images must be 10"),
        (20, [21, -1, *[0] * 8], "none negative"),
        (20, [19, *[0] * 9], "add up to 20"),
        (20, [2**62, 2**62, 2**62, 2**62, 20, *[0] * 5], "add up to 20"),  # which overflows to 20
    ],
)
def test_counts_must_be_of_images_that_the_client_has(used, counts, why):
    assert why in refused(CBAFed, Counts(NETWORK, used, None if counts is None else torch.tensor(counts)))


@pytest.mark.parametrize(
    "relation",
    [
        Relation(torch.full((10, 10), 2.0), torch.ones(10, dtype=torch.bool)),
        Relation(torch.full((10, 10), -0.1), torch.ones(10, dtype=torch.bool)),
        Relation(torch.full((9, 10), 0.1), torch.ones(10, dtype=torch.bool)),
        Relation(torch.full((10, 10), 0.1), torch.ones(3, dtype=torch.bool)),
        Relation(torch.full((10, 10), 0.1), torch.ones(10)),
    ],
)
def test_a_relation_must_be_probabilities_of_the_classes(relation):
    assert "its relation must be 10 rows of probabilities" in refused(FedIRM, WithRelation(NETWORK, relation))
