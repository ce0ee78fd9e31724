"""`fewlabel check-method`: a method of one's own that breaks a promise is told which one, and why."""

import json

import pytest

from tests.conftest import Command

BROKEN = {
    "Honest": set(),
    "AsksTheProcess": {"two workers give the bits of one", "killed and resumed gives the bits of a run never killed"},
    "Peeks": {"hidden labels change nothing"},
    "Silent": {"it tells what leaves a site"},
    "NeedsSomeone": {"any client may be missing", "it tells what leaves a site"},
}


@pytest.mark.parametrize("name", BROKEN)
def test_exactly_the_promises_that_a_method_breaks_are_named(name: str, fewlabel: Command) -> None:
    found = fewlabel("check-method", f"tests.cheats:{name}", "--format", "json")
    promises = json.loads(found.out)["promises"]
    assert {one["promise"] for one in promises if one["why"]} == BROKEN[name]
    assert found.code == (1 if BROKEN[name] else 0)


def test_what_is_kept_beside_the_state_is_found(fewlabel: Command) -> None:
    found = fewlabel("check-method", "tests.cheats:CountsAtHome")
    assert found.code == 1
    lines = found.out.splitlines()
    assert lines[0] == "ok      local_update declares what it gets (model), sends (model) and keeps (nothing)"
    assert any(line.startswith("failed  killed and resumed") and "differ" in line for line in lines)


def test_a_method_that_cannot_run_is_checked_no_further(fewlabel: Command) -> None:
    found = fewlabel("check-method", "tests.bad_methods:Raises")
    *_, last = found.out.splitlines()
    assert last.startswith("failed  a run comes to its end (labels.at = some-clients): client ")
    assert "the scanner is broken" in last


def test_settings_of_the_method_can_be_changed_and_no_others(fewlabel: Command) -> None:
    assert fewlabel("check-method", "tests.cheats:Honest", "--set", "rounds=3").code == 2
    found = fewlabel("check-method", "tests.keeper:Keeper", "--set", "method.decay=2")
    assert (found.code, "method.decay" in found.err) == (2, True)
