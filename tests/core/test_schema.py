"""Every rule of `fewlabel.core.schema`, each with the sentence a person reads when it is broken."""

from __future__ import annotations

import math
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field, make_dataclass, replace
from typing import Annotated, Any, Literal

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from fewlabel.core.errors import BadInput
from fewlabel.core.schema import (
    Count,
    Natural,
    NonNegative,
    Positive,
    Range,
    Share,
    assign,
    check,
    keys,
    parse,
    plain,
    read,
)


@dataclass(frozen=True)
class Clients:
    count: Count = 10
    alpha: Positive | None = 0.5
    dropout: Share = 0.0
    sizes: tuple[Natural, ...] = ()


@dataclass(frozen=True)
class Labels:
    at: Literal["some-clients", "every-client", "server"] = "some-clients"
    per_class: Natural | None = None


@dataclass(frozen=True)
class Stage:
    epochs: Count
    decay: NonNegative = 0.0


@dataclass(frozen=True)
class FedProx:
    mu: Positive = 0.01


@dataclass(frozen=True)
class FedAvg:
    pass


METHODS: dict[str, type] = {"fedprox": FedProx, "fedavg": FedAvg}


def read_method(raw: Any, where: str) -> Any:
    settings = dict(raw)
    return read(METHODS[settings.pop("name")], settings, where)


def plain_method(method: Any) -> dict[str, Any]:
    return {"name": type(method).__name__.lower(), **plain(method)}


@dataclass(frozen=True)
class Experiment:
    data: str
    rounds: Count = 100
    lr: Positive = 0.03
    augment: bool = True
    note: str | None = None
    kind: Literal["none", "weak"] = "weak"
    clients: Clients = Clients()
    labels: Labels = Labels()
    stages: tuple[Stage, ...] = ()
    weights: dict[str, NonNegative] = field(default_factory=dict)
    limits: tuple[float | None, ...] = ()
    warmup: Stage | None = None
    method: Any = field(default=FedProx(), metadata={"read": read_method, "plain": plain_method})


def sentence(**table: Any) -> str:
    with pytest.raises(BadInput) as error:
        read(Experiment, {"data": "digits", **table})
    return str(error.value)


def built(**changes: Any) -> str:
    with pytest.raises(BadInput) as error:
        check(replace(Experiment("digits"), **changes))
    return str(error.value)


def test_what_a_table_leaves_out_is_the_default():
    assert read(Experiment, {"data": "digits", "clients": {"count": 3}}) == Experiment("digits", clients=Clients(3))


def test_lists_tables_and_nested_tables_become_tuples_dicts_and_dataclasses():
    table = {"data": "d", "stages": [{"epochs": 2}], "weights": {"a": 1}, "clients": {"sizes": [1, 2]}}
    expected = Experiment("d", stages=(Stage(2),), weights={"a": 1.0}, clients=Clients(sizes=(1, 2)))
    assert read(Experiment, table) == expected


def test_a_whole_number_becomes_a_float_where_a_float_is_asked():
    assert isinstance(read(Experiment, {"data": "d", "lr": 1}).lr, float)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"clients": {"alhpa": 1}}, "unknown setting 'clients.alhpa'; did you mean 'clients.alpha'?"),
        ({"client": {"alpha": 1}}, "unknown setting 'client'; did you mean 'clients'?"),
        ({"LR": 1}, "unknown setting 'LR'; did you mean 'lr'?"),
        ({"dropout": 1}, "unknown setting 'dropout'; did you mean 'clients.dropout'?"),
        ({"clients": {"per_class": 1}}, "unknown setting 'clients.per_class'; did you mean 'labels.per_class'?"),
        ({"labels_per_class": 1}, "unknown setting 'labels_per_class'; did you mean 'labels.per_class'?"),
        ({"labels": {"zzz": 1}}, "unknown setting 'labels.zzz'; the settings here are: at, per_class"),
        (
            {"stages": [{"epochs": 1}, {"epoch": 1}]},
            "unknown setting 'stages[1].epoch'; did you mean 'stages[1].epochs'?",
        ),
        (
            {"method": {"name": "fedprox", "nu": 1}},
            "unknown setting 'method.nu'; the settings here are: mu",
        ),
        ({"method": {"name": "fedavg", "mu": 1}}, "unknown setting 'method.mu'; the settings here are: none"),
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_known_one(table, expected):
    assert sentence(**table) == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"rounds": "ten"}, "rounds must be a whole number, found 'ten'"),
        ({"rounds": 10.0}, "rounds must be a whole number, found 10.0"),
        ({"rounds": True}, "rounds must be a whole number, found true"),
        ({"rounds": None}, "rounds must be a whole number, found none"),
        ({"lr": "0.1"}, "lr must be a number, found '0.1'"),
        ({"lr": False}, "lr must be a number, found false"),
        ({"lr": math.nan}, "lr must be a finite number, found nan"),
        ({"lr": math.inf}, "lr must be a finite number, found inf"),
        ({"lr": 10**400}, f"lr must be a finite number, found 1{'0' * 76}..."),
        ({"augment": 1}, "augment must be true or false, found 1"),
        ({"data": 5}, "data must be text, found 5"),
        ({"note": ["a"]}, "note must be text, found a list"),
        ({"clients": 5}, "clients must be a table, found 5"),
        ({"clients": {"sizes": 5}}, "clients.sizes must be a list, as in 'clients.sizes=[5]', found 5"),
        ({"clients": {"sizes": "5,6"}}, "clients.sizes must be a list, as in 'clients.sizes=[5,6]', found '5,6'"),
        ({"clients": {"sizes": "five"}}, "clients.sizes must be a list, found 'five'"),
        ({"clients": {"sizes": [1, "b"]}}, "clients.sizes[1] must be a whole number, found 'b'"),
        ({"clients": {"alpha": "x"}}, "clients.alpha must be a number, found 'x'"),
        ({"weights": [1]}, "weights must be a table, found a list"),
        ({"weights": {"a": "b"}}, "weights.a must be a number, found 'b'"),
        ({"lr": {"start": 1}}, "lr must be a number, found a table"),
        ({"method": {"name": "fedprox", "mu": "x"}}, "method.mu must be a number, found 'x'"),
    ],
)
def test_a_wrong_type_is_refused(table, expected):
    assert sentence(**table) == expected


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"clients": {"alpha": -1}}, "clients.alpha must be above 0, found -1"),
        ({"clients": {"dropout": 2}}, "clients.dropout must be from 0 to 1, found 2"),
        ({"rounds": 0}, "rounds must be at least 1, found 0"),
        ({"weights": {"a": -0.5}}, "weights.a must be at least 0, found -0.5"),
        ({"stages": [{"epochs": 0}]}, "stages[0].epochs must be at least 1, found 0"),
        ({"method": {"name": "fedprox", "mu": 0}}, "method.mu must be above 0, found 0"),
    ],
)
def test_a_number_out_of_range_is_refused_with_the_range(table, expected):
    assert sentence(**table) == expected


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (Range(0, 1), [0, 0.5, 1], [-0.1, 1.1], "from 0 to 1"),
        (Range(0, 1, open_low=True), [0.1, 1], [0, 1.1], "above 0 and at most 1"),
        (Range(0, 1, open_high=True), [0, 0.9], [-1, 1], "at least 0 and below 1"),
        (Range(None, 3), [-9, 3], [4], "at most 3"),
        (Range(None, 3, open_high=True), [2], [3], "below 3"),
        (Range(2), [2, 9], [1], "at least 2"),
        (Range(2, open_low=True), [3], [2], "above 2"),
    ],
)
def test_a_range_holds_its_closed_ends_only_and_says_so(allowed, inside, outside, words):
    assert all(x in allowed for x in inside)
    assert not any(x in allowed for x in outside)
    assert str(allowed) == words


def test_a_range_may_stand_around_an_optional_number():
    @dataclass(frozen=True)
    class Decay:
        rate: Annotated[float | None, Range(0, 1)] = 0.5

    assert read(Decay, {"rate": "none"}) == Decay(None)
    with pytest.raises(BadInput, match=r"^rate must be from 0 to 1, found 2$"):
        read(Decay, {"rate": 2})


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        (
            {"labels": {"at": "sever"}},
            "labels.at must be one of some-clients, every-client, server; found 'sever' (did you mean 'server'?)",
        ),
        ({"labels": {"at": "xyz"}}, "labels.at must be one of some-clients, every-client, server; found 'xyz'"),
        ({"labels": {"at": 3}}, "labels.at must be one of some-clients, every-client, server; found 3"),
        ({"labels": {"at": ["server"]}}, "labels.at must be one of some-clients, every-client, server; found a list"),
    ],
)
def test_a_word_that_is_no_choice_is_refused_with_the_choices(table, expected):
    assert sentence(**table) == expected


def test_a_choice_is_told_apart_by_type():
    @dataclass(frozen=True)
    class Depth:
        of: Literal[1, 2] = 1

    assert read(Depth, {"of": 2}) == Depth(2)
    with pytest.raises(BadInput, match=r"^of must be one of 1, 2; found true$"):
        read(Depth, {"of": True})


def test_a_missing_setting_without_default_is_named():
    with pytest.raises(BadInput, match=r"^data is missing and has no default; it must be text$"):
        read(Experiment, {})
    assert sentence(warmup={}) == "warmup.epochs is missing and has no default; it must be a whole number"


@pytest.mark.parametrize("hint", [list[int], int | str, tuple[int, str], set, Any])
def test_a_type_that_cannot_be_a_setting_is_the_programmers_error(hint):
    cls = make_dataclass("Wrong", [("x", hint)], frozen=True)
    with pytest.raises(TypeError, match="a setting cannot be of type"):
        read(cls, {"x": 1})


def test_what_is_no_table_is_refused():
    with pytest.raises(BadInput, match=r"^the settings must be a table, found 5$"):
        read(Experiment, 5)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^method must be a table, found 'fedprox'$"):
        read(FedProx, "fedprox", "method")  # type: ignore[arg-type]


@pytest.mark.parametrize("none", ["none", None])
def test_the_word_none_empties_an_optional_setting(none):
    found = read(Experiment, {"data": "d", "note": none, "clients": {"alpha": none}, "warmup": none})
    assert (found.note, found.clients.alpha, found.warmup) == (None, None, None)


@pytest.mark.parametrize("none", ["none", None])
def test_the_word_none_stays_a_word_where_it_is_a_choice(none):
    assert read(Experiment, {"data": "d", "kind": none}).kind == "none"


def test_a_custom_setting_is_read_and_written_by_its_own_functions():
    found = read(Experiment, {"data": "d", "method": {"name": "fedavg"}})
    assert found.method == FedAvg()
    assert plain(found)["method"] == {"name": "fedavg"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rounds": "ten"}, "rounds must be a whole number, found 'ten'"),
        ({"rounds": 0}, "rounds must be at least 1, found 0"),
        ({"lr": math.nan}, "lr must be a finite number, found nan"),
        ({"data": None}, "data must be text, found none"),
        ({"data": Labels()}, "data must be text, found a Labels"),
        ({"labels": Labels("sever")},  # type: ignore[arg-type]
         "labels.at must be one of some-clients, every-client, server; found 'sever' (did you mean 'server'?)"),
        ({"clients": Clients(alpha=-1)}, "clients.alpha must be above 0, found -1"),
        ({"clients": Clients(sizes=[1])}, "clients.sizes must be a tuple, found a list"),  # type: ignore[arg-type]
        ({"clients": {"alpha": 1}}, "clients must be a Clients, found a table"),
        ({"clients": Labels()}, "clients must be a Clients, found a Labels"),
        ({"stages": (Stage(1), Stage(0))}, "stages[1].epochs must be at least 1, found 0"),
        ({"weights": {"a": -1}}, "weights.a must be at least 0, found -1"),
        ({"weights": {3: 1.0}}, "a key of weights must be text, found 3"),
        ({"warmup": Stage(0)}, "warmup.epochs must be at least 1, found 0"),
        ({"kind": None}, "kind must be one of none, weak; found none"),
        ({"method": FedProx(0)}, "method.mu must be above 0, found 0"),
        ({"note": "none"}, "note must not be the text 'none', which a file reads as no value; use None"),
    ],
)  # fmt: skip
def test_an_object_built_in_python_meets_the_same_rules(changes, expected):
    assert built(**changes) == expected


def test_a_good_object_passes_the_check():
    check(Experiment("digits", lr=1, stages=(Stage(1),), weights={"a": 1}, warmup=Stage(2), kind="none"))


def test_plain_leaves_none_out_and_turns_tuples_into_lists():
    table = plain(Experiment("d", clients=Clients(sizes=(1, 2))))
    assert "note" not in table
    assert table["clients"]["sizes"] == [1, 2]
    assert table["labels"] == {"at": "some-clients"}


def test_plain_writes_none_where_leaving_it_out_would_bring_back_a_default():
    table = plain(Experiment("d", clients=Clients(alpha=None), limits=(None, 1.0)))
    assert table["clients"]["alpha"] == "none"
    assert table["limits"] == ["none", 1.0]


def test_keys_are_dotted_and_stop_at_custom_settings():
    assert keys(Experiment) == [
        "data", "rounds", "lr", "augment", "note", "kind", "clients.count", "clients.alpha", "clients.dropout",
        "clients.sizes", "labels.at", "labels.per_class", "stages", "weights", "limits", "warmup.epochs",
        "warmup.decay", "method",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("0.5", 0.5), ("1e-3", 0.001), ("true", True), ("[1, 2]", [1, 2]), ("{a = 1}", {"a": 1}),
        ('"3"', "3"), ("server", "server"), ("some-clients", "some-clients"), ("none", None), ('"none"', "none"),
        ("", ""), ("a = b", "a = b"), ("1\nother = 2", "1\nother = 2"), ("True", "True"), ("9" * 5000, "9" * 5000),
    ],
)  # fmt: skip
def test_a_value_is_read_as_toml_and_otherwise_as_the_bare_words(text, value):
    found = parse(text)
    assert found == value
    assert type(found) is type(value)


def test_assign_creates_the_tables_on_the_way():
    data: dict[str, Any] = {"clients": {"count": 3}}
    assign(data, "clients.alpha", 0.1)
    assign(data, "labels.at", "server")
    assign(data, "rounds", 5)
    assert data == {"clients": {"count": 3, "alpha": 0.1}, "labels": {"at": "server"}, "rounds": 5}


def test_assign_refuses_to_go_through_what_is_no_table():
    with pytest.raises(BadInput, match=r"^cannot set clients\.alpha\.x: clients\.alpha must be a table, found 0\.1$"):
        assign({"clients": {"alpha": 0.1}}, "clients.alpha.x", 1)


@pytest.mark.parametrize("dotted", ["", ".", "a.", ".a", "a..b"])
def test_assign_refuses_an_empty_name(dotted):
    data: dict[str, Any] = {}
    with pytest.raises(BadInput) as error:
        assign(data, dotted, 1)
    assert str(error.value) == f"a setting's name is words joined by dots, found '{dotted}'"
    assert data == {}


def test_settings_are_read_without_loading_torch():
    program = "import sys, fewlabel.core.schema; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


text = st.text(st.characters(codec="utf-8"), max_size=8)
positive = st.floats(0, 1e300, exclude_min=True)
stages = st.builds(Stage, st.integers(1, 9), st.floats(0, 1e300))
experiments = st.builds(
    Experiment,
    data=text,
    rounds=st.integers(1, 10**6),
    lr=positive,
    augment=st.booleans(),
    note=st.none() | text.filter(lambda word: word != "none"),
    kind=st.sampled_from(["none", "weak"]),
    clients=st.builds(
        Clients,
        st.integers(1, 100),
        st.none() | positive,
        st.floats(0, 1),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    labels=st.builds(Labels, st.sampled_from(["some-clients", "every-client", "server"]), st.none() | st.integers(0)),
    stages=st.lists(stages, max_size=3).map(tuple),
    weights=st.dictionaries(text, st.floats(0, 1e300), max_size=3),
    limits=st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=3).map(tuple),
    warmup=st.none() | stages,
    method=st.just(FedAvg()) | st.builds(FedProx, positive),
)


@given(experiments)
def test_every_experiment_comes_back_from_its_table_and_from_its_file(experiment):
    check(experiment)
    assert read(Experiment, plain(experiment)) == experiment
    assert read(Experiment, tomllib.loads(tomli_w.dumps(plain(experiment)))) == experiment
