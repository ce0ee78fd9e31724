"""An experiment must say everything a result depends on, in one way only, and survive being written and read."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.federation import LabelPlace
from fewlabel.data.partition import deal
from fewlabel.experiment import Clients, Data, Evaluate, Experiment, Labels, Net, Stream, dumps, load, read
from fewlabel.learn.optim import Local
from fewlabel.methods import METHODS
from fewlabel.methods.fedavg import FedAvg
from tests.own_methods import Idle, ServerOnly, Steps


def reread(experiment: Experiment) -> Experiment:
    return read(tomllib.loads(dumps(experiment)))


# Precedence


def test_an_override_wins_over_the_file_and_the_file_over_the_default(tmp_path):
    path = tmp_path / "e.toml"
    path.write_text("rounds = 7\nseed = 3\n[clients]\ncount = 4\n[method.local]\nlr = 0.5\n")
    found = load(path, ["rounds=9", "clients.alpha = 0.1", "method.local.epochs=2"])
    assert (found.rounds, found.seed, found.evaluate.every) == (9, 3, 1)
    assert (found.clients.count, found.clients.alpha) == (4, 0.1)
    assert found.method == FedAvg(local=Local(epochs=2, batch_size=10, lr=0.5))


def test_the_last_of_two_overrides_wins():
    assert read({}, ["rounds=9", "rounds=11"]).rounds == 11


def test_a_methods_settings_start_from_the_defaults_of_its_name():
    assert read({"method": "fedprox"}).method == METHODS["fedprox"] == FedAvg(proximal=0.01, weights="uniform")
    assert read({"method": {"name": "fedprox", "proximal": 1}}).method == FedAvg(proximal=1.0, weights="uniform")
    # FedAvg's own five epochs stay, although Local by itself has one.
    assert read({"method": {"local": {"lr": 0.1}}}).method.local.epochs == 5


def test_changing_the_methods_name_keeps_the_settings_of_the_file():
    found = read({"method": {"name": "fedavg", "local": {"lr": 0.5}}}, ["method=fedprox"])
    assert found.method == replace(METHODS["fedprox"], local=replace(METHODS["fedprox"].local, lr=0.5))
    assert found.name == "fedprox"


def test_reading_leaves_the_table_alone():
    table = {"clients": {"count": 4}, "method": "all-labels"}
    read(table, ["clients.count=5"])
    assert table == {"clients": {"count": 4}, "method": "all-labels"}


@pytest.mark.parametrize("key", ["data", "model", "method"])
def test_a_name_alone_stands_for_its_table(key):
    name = {"data": "digits", "model": "resnet9", "method": "fedprox"}[key]
    whole = read({key: {"name": name}})
    assert read({key: name}) == read({}, [f"{key}={name}"]) == Experiment(**{key: name}) == whole


def test_a_name_keeps_the_rest_of_its_table():
    found = read({"model": {"name": "simple-cnn", "norm": "group"}}, ["model=resnet9"])
    assert found.model == Net("resnet9", norm="group")
    assert Experiment(data="digits", model="resnet18").model == Net("resnet18")


# Rows


def test_labels_only_is_fedavg_under_its_own_name():
    for found in (read({"method": "labels-only"}), Experiment(method="labels-only"), read({}, ["method=labels-only"])):
        assert found == Experiment(method=FedAvg(), name="labels-only")


@pytest.mark.parametrize(
    "labels", [Labels(), Labels("server", per_class=5), Labels("every-client", per_class=3), Labels(clients=2)]
)
def test_all_labels_is_fedavg_with_every_label_wherever_they_were(labels):
    table = {"at": labels.at, "clients": labels.clients} | ({"per_class": 5} if labels.per_class else {})
    for found in (Experiment(method="all-labels", labels=labels), read({"method": "all-labels", "labels": table})):
        assert (found.name, found.method) == ("all-labels", FedAvg())
        assert (found.labels.at, found.labels.fraction, found.labels.per_class) == ("every-client", 1.0, None)


def test_where_shares_are_left_out_a_row_with_every_label_has_the_same_clients():
    for at, then in (("some-clients", "some-clients+every-client"), ("server", "every-client")):
        labels = Labels(at, unlabeled_clients=5)
        table = {"method": "all-labels", "labels": {"at": at, "unlabeled_clients": 5}}
        for found in (Experiment(method="all-labels", labels=labels), read(table)):
            assert found.labels == Labels(then, fraction=1.0, unlabeled_clients=5)
            y, clients = np.arange(300) % 3, Clients()
            assert deal(y, clients, found.labels, 0).clients == deal(y, clients, labels, 0).clients


@pytest.mark.parametrize("data", ["unlabeled", "labeled"])
@pytest.mark.parametrize("method", ["all-labels", "wfedavg"])
def test_where_images_come_in_steps_a_row_with_every_label_streams_all_of_them(method, data):
    table = {"method": method, "stream": {"data": data, "rounds": 2}}
    for found in (Experiment(method=method, stream=Stream(data=data, rounds=2)), read(table)):
        assert found.stream == Stream(data="all", rounds=2)
    assert Experiment(method=method).stream is None is read({"method": method}).stream
    assert Experiment(method="labels-only", stream=Stream()).stream.data == "unlabeled"


UNUSED = {
    "clients.shards=3": "clients.partition = 'shards'",
    "clients.column=ward": "clients.partition = 'by-column'",
    "clients.file=p.json": "clients.partition = 'file'",
    "labels.per_class=5": "labels.at with every-client or server",
    "labels.server_per_class=5": "labels.at with server",
    "data.columns.label=dx": "data.name = 'csv' or 'dicom'",
    "data.conflicting=keep": "data.name = 'folder' or 'csv' or 'npz' or 'dicom'",
    "data.unreadable=skip": "data.name = 'folder' or 'csv' or 'npz' or 'dicom'",
}


@pytest.mark.parametrize("change", UNUSED)
def test_a_setting_that_would_change_nothing_is_refused(change):
    key = change.partition("=")[0].removesuffix(".label")
    with pytest.raises(BadInput, match=f"^{key} is for {UNUSED[change]} and would change nothing here; leave it out$"):
        read({}, [change])


@pytest.mark.parametrize("change", ["labels.clients=2", "labels.which=rule", "labels.ids=[3]"])
def test_with_labels_at_the_server_alone_no_client_is_chosen_to_have_all(change):
    with pytest.raises(BadInput, match=r"is for labels\.at with some-clients and would change nothing here"):
        read({}, ["labels.at=server", change])
    assert read({}, ["labels.at=some-clients+server", change])


@pytest.mark.parametrize("base", [["labels.at=server", "labels.server_per_class=5"], ["labels.at=every-client+server"]])
def test_a_row_with_every_label_resets_what_it_no_longer_needs(base):
    found = read({}, [*base, "labels.per_class=3", "labels.unlabeled_clients=4", "method=all-labels"])
    assert found.labels == Labels("every-client", fraction=1.0, unlabeled_clients=4)


def test_a_row_takes_settings_and_a_name_of_its_own():
    found = read({"method": {"name": "all-labels", "proximal": 0.5}, "name": "ceiling"})
    assert (found.name, found.method.proximal) == ("ceiling", 0.5)
    assert reread(found) == found


# Methods


def test_a_method_may_be_given_as_an_object():
    found = Experiment(method=FedAvg(proximal=0.3))
    assert (found.name, found.method.proximal) == ("fedavg", 0.3)
    assert reread(found) == found


def test_a_method_of_ones_own_is_named_by_its_class():
    found = read({"method": {"name": "tests.own_methods:Idle", "warmup": 3}})
    assert found.method == Idle(warmup=3)
    assert found.name == "tests.own_methods:Idle"
    assert Experiment(method=Idle(warmup=3)) == found == reread(found)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("fedprx", "there is no method 'fedprx'; did you mean 'fedprox'"),
        ("labels_only", "did you mean 'labels-only'"),
        ("zzz", "there is no method 'zzz'; see `fewlabel list methods`"),
        (3, "method must be a name or a table, found 3"),
        ({"name": 3}, "there is no method '3'"),
        ({"name": ["fedavg"]}, "there is no method"),
        ("tests.nowhere:X", "method 'tests.nowhere:X' cannot be imported: No module named 'tests.nowhere'"),
        ("tests.own_methods:X", "method 'tests.own_methods:X' cannot be imported: module .* has no attribute 'X'"),
        (":X", "method ':X' cannot be imported"),
        ("tests.own_methods:broken", "method 'tests.own_methods:broken' cannot be imported: no licence found"),
        ("tests.own_methods:Unfrozen", "method Unfrozen must be a frozen dataclass; its fields are its settings"),
        ({"proximl": 1}, "unknown setting 'method.proximl'; did you mean 'method.proximal'"),
        ({"local": {"learning_rate": 1}}, "unknown setting 'method.local.learning_rate'"),
        ({"local": {"lr": 0}}, "method.local.lr must be above 0, found 0"),
    ],
)
def test_a_method_that_cannot_be_used_is_refused_in_a_sentence(method, sentence):
    with pytest.raises(BadInput, match=sentence):
        read({"method": method})


@pytest.mark.parametrize("method", [FedAvg, {"name": "fedavg"}, 3, None])
def test_from_python_too_a_method_must_be_one(method):
    with pytest.raises(BadInput, match="must be a frozen dataclass"):
        Experiment(method=method)


def test_a_setting_that_the_method_is_not_made_for_is_refused():
    with pytest.raises(BadInput, match=r"cannot use labels\.at = 'server'; it is made for some-clients"):
        Experiment(method=Idle(), labels=Labels("server"))
    with pytest.raises(BadInput, match=r"cannot use labels\.at = 'some-clients'; it is made for server"):
        Experiment(method=ServerOnly())
    assert Experiment(method=ServerOnly(), labels=Labels("server")).labels.at == LabelPlace.SERVER


# Refusals


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"round": 3}, "unknown setting 'round'; did you mean 'rounds'"),
        ({"clients": {"alfa": 3}}, "unknown setting 'clients.alfa'; did you mean 'clients.alpha'"),
        ({"alpha": 3}, "unknown setting 'alpha'; did you mean 'clients.alpha'"),
        ({"rounds": 0}, "rounds must be at least 1, found 0"),
        ({"rounds": "3"}, "rounds must be a whole number, found '3'"),
        ({"seed": -1}, "seed must be at least 0, found -1"),
        ({"labels": {"at": "some-client"}}, "did you mean 'some-clients'"),
        ({"clients": {"partition": "dirichlt"}}, "no clients.partition 'dirichlt'; did you mean 'dirichlet'"),
        (
            {"clients": {"count": 3}, "labels": {"clients": 4}},
            "labels.clients = 4 is more than clients.count = 3; lower",
        ),
        (
            {"clients": {"per_round": 3, "min_replies": 4}},
            "clients.min_replies is more than the clients that take part",
        ),
        ({"labels": {"fraction": 0}}, "labels.fraction must be above 0 and at most 1, found 0"),
        ({"data": 3}, "data must be a table, found 3"),
    ],
)
def test_a_wrong_setting_is_refused_in_a_sentence(table, sentence):
    with pytest.raises(BadInput, match=sentence):
        read(table)


def test_an_override_must_be_an_assignment():
    with pytest.raises(BadInput, match=r"--set takes a\.b=c, found 'rounds'"):
        read({}, ["rounds"])


def test_from_python_the_same_rules_hold():
    with pytest.raises(BadInput, match="rounds must be at least 1"):
        Experiment(rounds=0)
    with pytest.raises(BadInput, match=r"clients\.alpha must be above 0"):
        Experiment(clients=Clients(alpha=0.0))
    with pytest.raises(BadInput, match=r"method\.local\.lr must be above 0"):
        Experiment(method=FedAvg(local=Local(lr=-1.0)))


def test_a_file_that_cannot_be_read_says_why(tmp_path):
    with pytest.raises(BadInput, match="there is no file"):
        load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(BadInput, match="is not valid TOML"):
        load(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b'name = "\xe9"')
    with pytest.raises(StorageError, match="cannot be read"):
        load(tmp_path / "latin.toml")
    with pytest.raises(BadInput, match="is a directory"):
        load(tmp_path)


# Written and read

positive = st.floats(min_value=1e-6, max_value=1e6)
count = st.integers(1, 10**6)
maybe_count = st.none() | count

locals_ = st.builds(
    Local, epochs=count, batch_size=count, lr=positive, momentum=st.floats(0, 1), clip=st.none() | positive
)
methods = st.builds(
    FedAvg, local=locals_, weights=st.sampled_from(["size", "uniform"]), proximal=st.floats(0, 10)
) | st.builds(
    Idle,
    steps=st.builds(Steps, lr=positive, lr_unlabeled=st.none() | positive),
    warmup=maybe_count,
    thresholds=st.lists(st.floats(0, 1), max_size=3).map(tuple),
)
experiments = st.builds(
    Experiment,
    method=methods | st.sampled_from(["fedavg", "fedprox", "labels-only", "all-labels"]),
    name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=20),
    seed=st.integers(0, 2**62),
    data=st.builds(Data, image_size=maybe_count),
    model=st.builds(
        Net, dropout=st.none() | st.floats(0, 1), buffers=st.sampled_from(["global", "local", "recomputed"])
    ),
    clients=st.builds(
        Clients, count=st.integers(8, 100), alpha=positive, per_round=maybe_count, balanced=st.booleans()
    ),
    labels=st.builds(Labels, clients=st.integers(1, 8), fraction=st.floats(0, 1, exclude_min=True)),
    evaluate=st.builds(Evaluate, every=count, local=st.booleans()),
)


@given(experiments)
def test_an_experiment_that_is_written_and_read_is_equal(experiment):
    text = dumps(experiment)
    again = read(tomllib.loads(text))
    assert again == experiment
    assert dumps(again) == text


def test_a_none_is_written_where_leaving_it_out_would_bring_back_a_value():
    plain = Experiment(method=FedAvg(local=Local(epochs=5, batch_size=10, clip=None)))
    assert tomllib.loads(dumps(plain))["method"]["local"]["clip"] == "none"
    assert reread(plain).method.local.clip is None
    # Steps has no lr_unlabeled by default, but Idle's Steps has one.
    inner = Experiment(method=Idle(steps=Steps(lr=0.2, lr_unlabeled=None)))
    assert reread(inner).method.steps.lr_unlabeled is None
    assert read({"method": {"local": {"clip": "none"}}}).method.local.clip is None
    assert read({}, ["method.local.clip=none"]) == plain


def test_the_resolved_file_names_every_setting_that_has_a_value(tmp_path):
    table = tomllib.loads(dumps(Experiment(method="fedprox")))
    assert table["name"] == "fedprox"
    assert table["method"] == {
        "name": "fedavg",
        "weights": "uniform",
        "proximal": 0.01,
        "unlabeled": "none", "weight_unlabeled": 1.0, "confidence": 0.75, "batch_unlabeled": 50, "decay": 3.0,
        "sharing": True,
        "local": {
            "epochs": 5, "batch_size": 10, "lr": 0.03, "optimizer": "sgd", "momentum": 0.9, "second_momentum": 0.999,
            "weight_decay": 5e-4, "clip": 5.0,
        },
    }  # fmt: skip
    assert table["clients"] == {
        "count": 10, "partition": "dirichlet", "alpha": 0.8, "balanced": True, "min_size": 10, "dropout": 0.0,
        "min_replies": 0, "aggregate": "mean", "trim": 0.2, "sums": "float",
    }  # fmt: skip
    path = tmp_path / "experiment.toml"
    path.write_text(dumps(Experiment(method="fedprox")))
    assert dumps(load(path)) == path.read_text()


def test_two_experiments_of_the_same_settings_are_equal_however_they_were_made():
    made = Experiment(method="fedprox", rounds=3, clients=Clients(alpha=0.1))
    assert made == read({"method": "fedprox"}, ["rounds=3", "clients.alpha=0.1"]) == reread(made)
