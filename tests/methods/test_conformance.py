"""What every method must pass, in every setting that it declares. A method is covered by its line in METHODS."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fewlabel.core.federation import LabelPlace
from fewlabel.engine import conformance
from fewlabel.engine.conformance import Bench, lines, weights
from fewlabel.engine.pool import Pool
from fewlabel.engine.run import execute
from fewlabel.engine.serial import Serial
from fewlabel.experiment import Clients, Data, Experiment, Labels, Stream
from fewlabel.methods import METHODS
from tests.keeper import Keeper

ALL = {**METHODS, "keeper": Keeper()}
FIRST = {type(method): name for name, method in reversed(ALL.items())}  # the others are rows with other settings


def cases(*parts):
    """Every method; rows that differ from another only in settings are left to `make test-all`."""
    for name, method in ALL.items():
        marks = [] if FIRST[type(method)] == name else [pytest.mark.slow]
        for part in parts[0](method) if parts else [None]:
            values = (method,) if part is None else (method, part)
            yield pytest.param(*values, id="-".join([name, *([part] if part else [])]), marks=marks)


def places(method) -> list[LabelPlace]:
    """Where its labels may be; clients that share nothing cannot have theirs at the server, and say so in `init`."""
    return sorted(s for s in method.label_places if s != LabelPlace.SERVER or getattr(method, "sharing", True))


CASES = list(cases(places))
# One check has a test of its own below, which makes it and demands more: hidden labels must reach the audit.
PROMISES = [check for check in conformance.CHECKS.values() if check is not conformance.hidden_labels_change_nothing]


def experiment(method, setting: LabelPlace, buffers: str = "global") -> Experiment:
    """The small experiment of conformance, in which every part of our methods has something to do."""
    if hasattr(method, "warmup_epochs"):
        method = replace(method, warmup_epochs=2, threshold=0.0, skip=2)
    elif hasattr(method, "threshold"):
        method = replace(method, threshold=0.2)
    if hasattr(method, "helpers") or getattr(method, "unlabeled", "none") != "none":  # sure of much, rates that fall
        patience = 1 if getattr(method, "sharing", True) else None
        method = replace(method, confidence=0.2, patience=patience, local=replace(method.local, lr=0.03))
    if hasattr(method, "helpers_every"):
        method = replace(method, helpers_every=2)
    if hasattr(method, "uncertainty"):
        method = replace(method, uncertainty=3.0)
    if hasattr(method, "tutors"):  # few, but of each kind: one learns all labels, two leave out others of them
        method = replace(method, tutors=3, views=1, epochs_unlabeled=1)
    whole = conformance.small_experiment(method, setting, buffers)
    return replace(whole, labels=replace(whole.labels, held_out=0.25)) if isinstance(method, Keeper) else whole


@pytest.fixture(scope="module")
def bench(tmp_path_factory, pool) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), pool)


@pytest.fixture(scope="module")
def three() -> Iterator[Pool]:
    with Pool(3) as pool:
        yield pool


@pytest.mark.parametrize("method", list(cases()))
def test_refuses_in_one_sentence_the_settings_it_does_not_declare(method):
    conformance.refuses_other_places(method)


@pytest.mark.parametrize(("method", "setting"), CASES)
@pytest.mark.parametrize("check", PROMISES, ids=lambda check: check.__name__)
def test_keeps_what_every_method_promises(method, setting, check, bench):
    check(bench, experiment(method, setting))


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_three_workers_give_the_bits_of_one(method, setting, bench, three, tmp_path):
    again = Bench(tmp_path, three)
    directory = again.laid_out(experiment(method, setting))
    execute(directory, executor=three)
    conformance.demand_same(bench.undisturbed(experiment(method, setting)), directory)


@pytest.mark.parametrize("buffers", ["local", "recomputed"])
@pytest.mark.parametrize("method", list(cases()))
def test_every_policy_for_statistics_works_with_any_number_of_workers(method, buffers, bench):
    whole = experiment(method, sorted(method.label_places)[0], buffers)
    conformance.same_bits_with_workers(bench, replace(whole, rounds=3))


STREAMED = list(cases(lambda method: [s for s in places(method) if s != LabelPlace.SOME_CLIENTS]))


@pytest.mark.parametrize(("method", "setting"), STREAMED)
def test_images_may_come_in_steps(method, setting, bench):
    whole = experiment(method, setting)
    clients, stream = replace(whole.clients, min_size=40, dropout=0.0), Stream(steps=2, rounds=1)
    conformance.same_bits_with_workers(bench, replace(whole, clients=clients, stream=stream, rounds=2))


@pytest.mark.parametrize(("method", "setting"), CASES)
def test_hidden_labels_reach_the_audit_and_nothing_else(method, setting, bench):
    """If they did not reach the audit, that they reach nothing else would prove nothing."""
    directory = conformance.hidden_labels_change_nothing(bench, experiment(method, setting))
    before, after = (
        [[line.get(part) for part in conformance.AUDIT] for line in lines(run)]
        for run in (bench.undisturbed(experiment(method, setting)), directory)
    )
    if any(first and first["coverage"] for first, _ in before):
        assert before != after


@pytest.mark.parametrize("buffers", ["global", "local", "recomputed"])
@pytest.mark.parametrize(("method", "setting"), CASES)
def test_a_site_may_have_a_single_image_with_a_label_and_one_without(method, setting, buffers, bench):
    """Which BatchNorm could not be trained on. Hospital 4 has an image of each kind where every client has some."""
    labels = Labels(at=setting.value, per_class=1)
    if setting == LabelPlace.SOME_CLIENTS:
        labels = Labels(at=setting.value, ids=(0, 2))
    whole = replace(
        experiment(method, setting, buffers),
        rounds=2,
        data=Data("tests.owndata:hospitals", image_size=8),
        clients=Clients(count=5, partition="by-column", min_size=1),
        labels=labels,
    )
    directory = bench.laid_out(whole)
    execute(directory, executor=Serial())
    assert weights(directory)
    assert len(lines(directory)) == 2
