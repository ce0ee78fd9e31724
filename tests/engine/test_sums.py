"""Sums in whole numbers give the same bits with any number of workers, and for a method of one's own."""

from dataclasses import dataclass, replace

import pytest

from fewlabel.core.errors import BadInput
from fewlabel.core.federation import SOME_CLIENTS, Federation, Model, Site, broadcast
from fewlabel.core.tasks import on_client
from fewlabel.engine.run import execute, prepare
from tests.deploy.federated import experiment, simulated, weights


@pytest.mark.parametrize("changes", [("method=fedirm", "method.labeled_share=0.5"), ("method=cbafed",)])
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
