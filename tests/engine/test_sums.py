"""Sums in whole numbers give the same bits with any number of workers, and for a method of one's own."""

from dataclasses import dataclass, replace

import pytest

from fewlabel.core.errors import BadInput
from fewlabel.core.federation import SOME_CLIENTS, Federation, Model, Site, broadcast
from fewlabel.core.tasks import on_client
from fewlabel.engine.run import execute, prepare
from tests.deploy.federated import experiment, simulated, weights


@pytest.mark.parametrize(
    "changes", [("method=fedirm", "method.labeled_share=0.5"), ("method=cbafed", "method.warmup_epochs=1")]
)
def test_whole_numbers_give_the_same_bits_with_any_number_of_workers(changes, tmp_path):
    whole = experiment(*changes, "clients.sums=fixed", "rounds=2")
    execute(prepare(whole, tmp_path / "two"), workers=2)
    assert weights(simulated(whole, tmp_path / "one")) == weights(tmp_path / "two")


@dataclass(frozen=True)
class Peeks:
    """A method of one's own that looks at each model, and does not say so."""

    label_places = frozenset({SOME_CLIENTS})

    def init(self, fed: Federation) -> Model:
        return Model(fed.server.weights())

    def model(self, state: Model) -> dict:
        return state.model

    def round(self, state: Model, fed: Federation) -> Model:
        return [reply.upload for reply in fed.run(self.task, broadcast(fed.clients, state))][-1]

    @on_client
    def task(self, site: Site[None], msg: Model) -> Model:
        return msg


def test_a_method_of_ones_own_that_looks_at_single_models_is_refused(tmp_path):
    whole = replace(experiment("clients.sums=masked", "rounds=1"), method=Peeks(), name="peeks")
    with pytest.raises(BadInput, match="is not for peeks, whose server looks at each 'task'"):
        simulated(whole, tmp_path / "run")


# Masked sums of too few clients are refused before a run begins. Of six clients, some have labels.

APART = (
    "clients.sums = 'masked' needs 3 clients or more in each mean, and {} averages {} clients by themselves, of which "
)
REFUSED = {
    ("tutor", 1): "labeled, is 1; have 3 labeled clients (labels.clients), or leave clients.sums out",
    ("tutor", 5): "unlabeled, is 1; have 3 unlabeled clients, or leave clients.sums out",
    ("semifl", 4): "unlabeled, are 2; have 3 unlabeled clients, or leave clients.sums out",
    ("labels-only", 2): "labeled, are 2; have 3 labeled clients (labels.clients), or leave clients.sums out",
    ("fedavg-plus", 2): "labeled, are 2; have 3 labeled clients (labels.clients), or leave clients.sums out",
    ("cbafed", 2): "labeled, are 2; have 3 labeled clients (labels.clients), or leave clients.sums out",
}
SUMMED = ["tutor", "fedavg", "fedprox-fixmatch", "fedirm", "fedirm-authors", "fedavg-plus", "semifl", "fl2", "sage"]
SIX = ("clients.sums=masked", "clients.count=6", "rounds=2")


@pytest.mark.parametrize(("method", "labeled"), REFUSED)
def test_a_masked_sum_of_too_few_clients_of_a_kind_is_refused_before_a_run_is_laid_out(method, labeled, tmp_path):
    kind, _, rest = REFUSED[method, labeled].partition(", ")
    with pytest.raises(BadInput) as error:
        prepare(experiment(*SIX, f"method={method}", f"labels.clients={labeled}"), tmp_path / "run")
    assert str(error.value) == APART.format(method, kind) + f"there {rest}"
    assert not (tmp_path / "run").exists()


def test_the_warm_up_of_a_recipe_averages_labeled_clients_by_themselves(tmp_path):
    whole = ("method=fedavg-fixmatch", "labels.clients=2", "train.warmup=0.5")
    prepare(experiment(*SIX, *whole, "rounds=1"), tmp_path / "without")  # half of one round is none
    with pytest.raises(BadInput, match="averages labeled clients by themselves, of which there are 2"):
        prepare(experiment(*SIX, *whole), tmp_path / "with")


@pytest.mark.parametrize("at", ["labels.clients=2", "labels.clients=5", "labels.at=server"])
@pytest.mark.parametrize("method", SUMMED)
def test_what_is_not_refused_has_enough_clients_in_each_masked_sum(method, at, tmp_path):
    try:
        whole = experiment(*SIX, f"method={method}", at, "labels.per_class=3" if "server" in at else "seed=5")
        simulated(whole, tmp_path / "run")
    except BadInput:  # and nothing else
        return
