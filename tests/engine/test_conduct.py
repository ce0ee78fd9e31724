"""Updates are bounded, offenders are named and left out, and all of that gives the same bits however a run is done."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fewlabel.core.errors import BadInput
from fewlabel.core.federation import SOME_CLIENTS, ClientError, ClientInfo, Model, Reply, TooFewReplies
from fewlabel.data.settings import Attack
from fewlabel.engine import conformance
from fewlabel.engine.checkpoint import Saved
from fewlabel.engine.conduct import Conduct, Judge, Lost
from fewlabel.engine.conformance import Bench
from fewlabel.engine.record import read_rounds
from fewlabel.engine.run import execute, prepare
from fewlabel.engine.serial import Serial
from fewlabel.experiment import Clients, Experiment, read
from fewlabel.methods import METHODS
from tests.methods import test_conformance

RunDir = Callable[..., Path]
SENT = Model({"w": torch.tensor([1.0, 0.0])})
NAME = "local_update, with labels, parameter"


def judge(**settings) -> Judge:
    found = Judge(Clients(**settings), {2: "Klinik B"})
    found.round = 1
    return found


def moves(*norms: float, labeled: bool = True) -> list[tuple[Reply[Model], Model]]:
    """Replies of clients 0, 1, …, each of which has moved one of two weights by so much."""
    return [
        (Reply(n, ClientInfo(n, int(labeled), 1), Model({"w": torch.tensor([1.0, norm])})), SENT)
        for n, norm in enumerate(norms)
    ]


def passed(judge: Judge, replies: list[tuple[Reply[Model], Model]]) -> dict[int, float]:
    """How far the clients have moved after judgement, in the order of replies."""
    return {one.client.id: one.upload.model["w"][1].item() for one in judge.judged("local_update", iter(replies))}


def done(judge: Judge) -> list[tuple[int, str]]:
    return [(suspect["client"], suspect["did"]) for suspect in judge.take_suspects()]


def test_an_update_is_clipped_to_a_norm():
    strict = judge(clip=2.0)
    assert passed(strict, moves(1.0, 8.0)) == {0: 1.0, 1: 2.0}
    assert done(strict) == [(1, "clipped")]


def test_an_update_is_clipped_to_a_multiple_of_the_median_of_earlier_rounds():
    """The median of 1, 2 and 3 is 2, so the bound is 3. The next median is that of 1, 2, 3, 1 and 3, which is 2."""
    strict = judge(clip_median=1.5)
    strict.conduct = Conduct({NAME: (1.0, 2.0, 3.0)})
    assert passed(strict, moves(1.0, 60.0)) == {0: 1.0, 1: 3.0}
    assert done(strict) == [(1, "clipped")]
    assert strict.conduct.norms[NAME] == (1.0, 2.0, 3.0, 1.0, 3.0)  # no more than what its bound let through


def test_updates_of_a_first_round_are_compared_with_each_other_and_keep_their_order():
    """The median of 90, 1, 2 is 2, so the bound is 4."""
    strict = judge(clip_median=2.0)
    assert list(passed(strict, moves(90.0, 1.0, 2.0)).items()) == [(0, 4.0), (1, 1.0), (2, 2.0)]


def test_clients_with_labels_are_not_compared_with_those_without():
    strict = judge(clip_median=2.0)
    strict.conduct = Conduct({NAME: (1.0,), "local_update, without labels, parameter": (100.0,)})
    assert passed(strict, moves(90.0, labeled=False)) == {0: 90.0}
    assert passed(strict, moves(90.0)) == {0: 2.0}


def test_where_most_clients_of_a_kind_moved_nothing_the_other_kind_is_the_measure():
    """Or one that moves among many that do not could go anywhere: 2 * 3 is the bound."""
    strict = judge(clip_median=2.0)
    strict.conduct = Conduct({NAME: (3.0,), "local_update, without labels, parameter": (0.0, 0.0, 0.0)})
    assert passed(strict, moves(0.0, 90.0, labeled=False)) == pytest.approx({0: 0.0, 1: 6.0})


def test_an_outlier_is_left_out_and_one_that_repeats_is_excluded():
    strict = judge(outlier=5.0, exclude_after=2)
    for round in (1, 2):
        strict.round = round
        assert not strict.excludes(2)
        assert list(passed(strict, moves(1.0, 2.0, 90.0))) == [0, 1]
        assert done(strict) == [(2, "left out")] + [(2, "excluded")] * (round == 2)
    assert not strict.excludes(2)  # in the same round, some workers may have got its next job already
    strict.round = 3
    assert strict.excludes(2)
    assert strict.conduct.strikes == {2: (1, 2)}


def test_a_round_in_which_all_updates_grow_leaves_nobody_out_for_good():
    """From 1 to 100: at most 5 is remembered of each, so the median and the bound follow."""
    strict = judge(outlier=5.0)
    passed(strict, moves(*[1.0] * 10))
    for _ in range(20):
        found = passed(strict, moves(*[100.0] * 10))
    assert len(found) == 10


def test_whoever_is_far_is_named_though_no_setting_bounds_updates():
    mild = judge()
    assert passed(mild, moves(1.0, 2.0, 90.0)) == {0: 1.0, 1: 2.0, 2: 90.0}
    (suspect,) = mild.take_suspects()
    why = "its update has norm 90, 45 times the median of clients with labels"
    assert suspect == {"client": 2, "name": "Klinik B", "task": "local_update", "why": why, "did": "named"}
    assert passed(judge(), moves(1.0, 90.0)) == {0: 1.0, 1: 90.0}  # of two, nobody can say who is wrong


def pair(**settings) -> Judge:
    """A judge of two clients with labels and one without."""
    found = judge(**settings)
    found.sizes([ClientInfo(0, 1, 1), ClientInfo(1, 1, 1), ClientInfo(2, 0, 1)])
    return found


def test_one_of_two_clients_does_not_decide_how_large_an_update_may_be():
    """The mean of the two in the middle would let 1001 through in the first round, and more and more later."""
    strict = pair(clip_median=2.0)
    for _ in range(100):
        assert passed(strict, moves(1.0, 1000.0)) == {0: 1.0, 1: 2.0}
        assert done(strict) == [(1, "clipped")]


def test_one_of_two_clients_cannot_have_the_other_left_out_by_hardly_moving():
    strict = pair(outlier=5.0)
    for _ in range(60):
        assert list(passed(strict, moves(1.0, 1e-3))) == [0, 1]
    strict = pair(outlier=5.0, clip_median=2.0)
    assert passed(strict, moves(1.0, 1000.0)) == {0: 1.0, 1: 2.0}  # nobody can say which is wrong, so it is clipped
    assert list(passed(strict, moves(1.0, 5001.0))) == [0]  # beyond 5 times what was seen before


def test_one_of_two_clients_is_named_from_the_second_round_on():
    mild = pair()
    passed(mild, moves(1.0, 1000.0))
    passed(mild, moves(1.0, 1000.0))
    assert done(mild) == [(1, "named")]


def test_a_size_far_above_the_others_is_named_and_counts_no_more_than_its_share():
    """Of 100, 100 and 10,000,000 images the last counts as 200: half of 400."""
    strict = judge(largest_share=0.5)
    infos = [ClientInfo(0, 0, 100), ClientInfo(1, 0, 100), ClientInfo(2, 0, 10**7), ClientInfo(3, 10, 0)]
    assert [info.size for info in strict.sizes(infos)] == [100, 100, 200, 10]
    (suspect,) = strict.take_suspects()
    assert suspect["why"] == "it claims 10,000,000 images, and the median client without labels has 100"
    assert [info.size for info in judge().sizes(infos)] == [100, 100, 10**7, 10]


def test_a_run_ends_once_everyone_with_labels_is_excluded():
    strict, lost = judge(exclude_after=1), Lost()
    clients = [ClientInfo(0, 5, 0), ClientInfo(1, 0, 5)]
    strict.name(0, "local_update", "odd", "left out")
    lost.check(1, clients, strict)
    strict.round = 2
    with pytest.raises(TooFewReplies, match=r"the last site with labels was lost \(client 0: it is excluded\)"):
        lost.check(3, clients, strict)


# Whole runs

PROTECTED = Clients(
    count=6, per_round=5, dropout=0.1, alpha=2.0, clip_median=1.5, outlier=20.0, exclude_after=2, largest_share=0.4
)
ATTACK = Attack("scale", (1, 4), 10.0)


def protected(name: str, **more) -> Experiment:
    whole = test_conformance.experiment(METHODS[name], SOME_CLIENTS)
    return replace(whole, clients=replace(PROTECTED, **{"attack": ATTACK, **more}))


CASES = {
    "fedavg": protected("fedavg"),
    "fedavg-noise": protected("fedavg", attack=Attack("noise", (0,), 50.0)),
    "cbafed-median": protected("cbafed", aggregate="median"),
    "fedirm-trimmed": protected("fedirm", aggregate="trimmed-mean"),
    "twinsight-geometric": protected("twin-sight", aggregate="geometric-median"),
    "semifl-nan": protected("semifl", attack=Attack("not-a-number", (1,))),
    "rscfed": protected("rscfed"),
    "fedmatch": protected("fedmatch"),
    "cbafed-counts": protected("cbafed", attack=Attack("false-counts", (1, 4), 1000.0)),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory, pool) -> Bench:
    return Bench(tmp_path_factory.mktemp("bench"), pool)


@pytest.mark.parametrize("name", CASES)
def test_a_protected_run_gives_the_same_bits_with_workers_and_after_kills(name, bench):
    conformance.same_bits_with_workers(bench, CASES[name])
    conformance.same_bits_after_kills(bench, CASES[name])
    if name != "cbafed-counts":
        named = {
            one["client"] for line in read_rounds(bench.undisturbed(CASES[name])) for one in line.get("suspects", ())
        }
        assert named & set(CASES[name].clients.attack.ids)


def test_without_what_earlier_rounds_showed_a_resumed_run_would_differ(bench, monkeypatch):
    """Or the test above would prove nothing."""
    monkeypatch.setattr("fewlabel.engine.run.Saved", lambda *parts: Saved(*parts[:4]))
    with pytest.raises(conformance.Broken):
        conformance.same_bits_after_kills(bench, CASES["fedavg"])


def test_settings_that_bound_nothing_change_no_bit(run_dir):
    plain, bounded = run_dir(), run_dir("clients.clip=1e9", "clients.clip_median=1e6", "clients.outlier=1e6")
    for directory in (plain, bounded):
        execute(directory, executor=Serial())
    assert conformance.lines(plain) == conformance.lines(bounded)
    before, after = (load_file(directory / "model.safetensors") for directory in (plain, bounded))
    assert all(torch.equal(before[name], after[name]) for name in before)


# What an attacker does to a model, on real data

DIGITS = (
    *(
        "data=digits",
        "data.image_size=8",
        "model=tests.nets:linear",
        "recipe=fewlabel",
        "train.mixup=0",
        "seed=1",
        "rounds=8",
    ),
    *("clients.count=6", "clients.alpha=5.0", "labels.clients=4", "method=fedavg"),
    *("method.local.epochs=5", "method.local.batch_size=16", "method.local.lr=0.1"),
)


def accuracy(tmp_path: Path, *changes: str) -> tuple[float, set[tuple[int, str]]]:
    """The accuracy of a run's last round, and who was named for what."""
    directory = prepare(read({}, [*DIGITS, *changes]), tmp_path / str(len(list(tmp_path.iterdir()))))
    found = execute(directory, executor=Serial())["last"]["test"]["accuracy"]
    lines = read_rounds(directory)
    return found, {(one["client"], one["did"]) for line in lines for one in line.get("suspects", ())}


def by_client_0(kind: str, strength: float | None = None) -> list[str]:
    set_strength = [] if strength is None else [f"clients.attack.strength={strength}"]
    return [f"clients.attack.kind={kind}", "clients.attack.ids=[0]", *set_strength]


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> float:
    found, named = accuracy(tmp_path_factory.mktemp("honest"))
    assert not named
    assert found > 0.75
    return found


@pytest.fixture(scope="module")
def ruined(tmp_path_factory) -> Callable[..., tuple[float, set[tuple[int, str]]]]:
    """The same of a run that an attack of client 0 ruins, because nothing bounds it: `ruined("noise", 100.0)`."""
    return cache(lambda *attack: accuracy(tmp_path_factory.mktemp("ruined"), *by_client_0(*attack)))


@pytest.mark.parametrize(
    ("attack", "defence", "did"),
    [
        (("noise", 1e6), "clients.clip_median=1.5", "clipped"),
        (("sign-flip", 20.0), "clients.outlier=5", "left out"),
        (("sign-flip", 20.0), "clients.aggregate=median", "named"),
        (("sign-flip", 20.0), "clients.aggregate=trimmed-mean", "named"),
        (("sign-flip", 20.0), "clients.aggregate=geometric-median", "named"),
        (("noise", 100.0), "clients.clip_median=2", "clipped"),
    ],
)
def test_one_attacker_ruins_a_model_unless_it_is_bounded(attack, defence, did, honest, ruined, tmp_path):
    unbounded, named = ruined(*attack)
    assert unbounded < honest - 0.2
    assert (0, "named") in named
    saved, named = accuracy(tmp_path, *by_client_0(*attack), defence)
    assert saved > honest - 0.1
    assert (0, did) in named
    assert {client for client, what in named if what == "left out"} <= {0}


@pytest.mark.parametrize(("kind", "why"), [("not-a-number", "found NaN or Inf"), ("huge", "it holds 3e+38")])
def test_an_upload_that_cannot_be_averaged_is_refused_by_name_and_the_run_goes_on(kind, why, honest, tmp_path):
    found, named = accuracy(tmp_path, *by_client_0(kind), "clients.exclude_after=3")
    assert found > honest - 0.1
    assert named == {(0, "left out"), (0, "excluded")}
    lines = read_rounds(tmp_path / "0")
    assert all(why in line["suspects"][0]["why"] for line in lines[:3])
    assert [line["replies"] for line in lines] == [3] * 8
    assert [line["asked"] for line in lines] == [4, 4, 4, 3, 3, 3, 3, 3]


def test_a_client_that_claims_more_images_than_it_has_gets_no_more_than_its_share(honest, tmp_path):
    """Clients differ in their classes here, or a liar who trains honestly would do no harm."""
    liar = [*by_client_0("false-counts", 1e6), "clients.alpha=0.2", "clients.balanced=false"]
    alone, named = accuracy(tmp_path, *liar)
    bounded, _ = accuracy(tmp_path, *liar, "clients.largest_share=0.25")
    assert (0, "named") in named
    assert bounded > alone + 0.1


def test_an_honest_run_without_bounds_has_no_suspects_and_a_mean_as_ever(run_dir):
    directory = run_dir()
    execute(directory, executor=Serial())
    assert not any("suspects" in line for line in read_rounds(directory))


def test_a_bad_upload_of_a_simulation_without_attackers_is_a_bug(run_dir):
    with pytest.raises(ClientError, match="expected finite values"):
        execute(run_dir("method.local.lr=1e30", "method.local.clip=none"), executor=Serial())


# What is refused


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (["method=rscfed", "clients.aggregate=median"], "'median' is not for rscfed, which weighs each client's model"),
        (["clients.trim=0.1"], "clients.trim is for clients.aggregate = 'trimmed-mean'"),
        (by_client_0("flip"), "clients.attack.kind must be one of scale, "),
        (["clients.attack.kind=scale"], "clients.attack.ids is missing"),
        (["clients.attack.kind=scale", "clients.attack.ids=[10]"], "must be different clients from 0 to 9"),
        (by_client_0("huge", 3.0), "clients.attack.strength would change nothing for kind = 'huge'"),
        (["clients.clip=0"], "clients.clip must be above 0"),
        (["clients.largest_share=1.5"], "clients.largest_share must be above 0 and at most 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, why):
    with pytest.raises(BadInput, match=why):
        read({}, changes)


def test_whoever_has_no_labels_cannot_flip_them(tmp_path):
    changes = ["clients.attack.kind=label-flip", "clients.attack.ids=[0, 3]"]
    with pytest.raises(BadInput, match="needs labels, and client 3 has none; choose other"):
        prepare(read({}, changes), tmp_path / "run")
