"""How long a server waits for a site follows what rounds have taken, and who stays silent is asked less often."""

import json
import math
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.data.site_files import Terms
from fewlabel.deploy import waiting
from fewlabel.deploy.pace import Pace
from fewlabel.deploy.run_plan import RunPlan, load_plan
from fewlabel.deploy.server import serve
from fewlabel.engine.executor import Job
from fewlabel.engine.record import read_rounds
from tests.deploy.federated import experiment, federate, lines, local_grid, simulated, split, weights

TERMS = Terms(("cat", "dog"), 1, 16)


def job(client: int, round: int, task: str = "local_update") -> Job:
    return Job("", "client", task, client, round)


def pace(**plan) -> Pace:
    return Pace(RunPlan("0" * 32, TERMS, 2, **{"factor": 5.0, "least": 10.0, "deadline": 1000.0, "again": 3, **plan}))


def test_a_deadline_is_a_multiple_of_the_median_of_the_rounds_slowest_replies():
    """Rounds of 20, 40 and 30 s have a median of 30 s, five times of which is 150 s."""
    found = pace()
    for number, (fast, slow) in enumerate([(3, 20), (4, 40), (5, 30)], 1):
        found.replied(job(0, number), fast)
        found.replied(job(1, number), slow)
    assert found.deadline(job(0, 4)) == found.deadline(job(1, 4)) == 150
    assert pace(factor=None).deadline(job(0, 4)) == 1000


def test_a_site_that_is_slower_than_most_rounds_has_a_multiple_of_its_own_median():
    """It was in one of three rounds, for 100 s; the rounds' median is 2 s."""
    found = pace()
    for number, (client, seconds) in enumerate([(0, 2), (1, 100), (0, 1)], 1):
        found.replied(job(client, number), seconds)
    assert found.deadline(job(0, 4)) == 10  # 5 times 2 s
    assert found.deadline(job(1, 4)) == 500


def test_a_deadline_has_a_floor_and_a_ceiling_and_the_first_task_of_a_kind_has_the_ceiling():
    found = pace()
    assert found.deadline(job(0, 1)) == 1000
    found.replied(job(0, 1), 0.1)
    assert found.deadline(job(0, 2)) == 10
    assert found.deadline(job(1, 2)) == 1000  # another site may have more images
    assert found.deadline(job(0, 2, "other")) == 1000
    found.replied(job(0, 2, "other"), 300)
    assert found.deadline(job(0, 3, "other")) == 1000


def test_others_tell_how_long_a_task_may_take_that_a_site_has_never_done():
    """Client 0, with 100 images, took 6 s. Client 1 has 300, so 18 s are expected: 4 * 5 * 18 s, then twice that."""
    found = pace()
    found.sizes = {0: 100, 1: 300, 2: 50}
    assert found.first_deadline(job(1, 1)) == math.inf  # nobody knows
    found.replied(job(0, 1), 6)
    assert found.first_deadline(job(1, 1)) == 360
    assert found.first_deadline(job(2, 1)) == 120  # fewer images may take as long
    assert found.first_deadline(job(1, 1, "other")) == math.inf
    found.missed(job(1, 1))
    assert found.first_deadline(job(1, 2)) == 720
    found.missed(job(1, 2))
    assert found.first_deadline(job(1, 6)) == 1000  # the ceiling
    found.replied(job(1, 6), 900)
    assert found.first_deadline(job(1, 7)) == math.inf  # from now on its own replies tell
    found.replied(job(0, 1, "short"), 0.1)
    assert found.first_deadline(job(1, 1, "short")) == 40  # 4 times the least
    assert pace(factor=None).first_deadline(job(1, 1)) == math.inf


def test_a_site_that_hangs_in_the_first_round_is_passed_over(tmp_path: Path):
    """Although nobody knows how long it usually takes, and the deadline is an hour."""
    experiment = whole(2)
    data = split(experiment, tmp_path / "sites")
    grid = local_grid(data, tmp_path / "state")
    grid.meddle = lambda job, reply: None if job.client == 1 and job.kind == "client" else reply
    run = federate(experiment, data, tmp_path / "run", least=0.05, factor=0.01)
    serve(grid, run)
    found = read_rounds(run)
    assert [line["replies"] for line in found] == [2, 2]
    assert [line["failures"][0]["why"][:17] for line in found] == ["it was silent for"] * 2


def test_who_was_silent_in_two_rounds_is_asked_again_three_rounds_later_until_it_replies():
    found, asked = pace(), []
    for number in range(1, 14):
        if not found.left_out(job(0, number)):
            asked.append(number)
            if number < 8:
                found.missed(job(0, number))
            else:
                found.replied(job(0, number), 1)
    assert asked == [1, 2, 5, 8, 9, 10, 11, 12, 13]
    found.missed(job(0, 14))
    assert found.left_out(job(0, 14)) == "it was silent earlier in this round"
    assert found.left_out(job(0, 15)) == ""
    found.missed(job(0, 15))
    assert found.left_out(job(0, 17)) == "it was silent in rounds 14 and 15, and is asked again in round 18"
    assert found.left_out(job(1, 17)) == ""


def test_the_plan_of_an_earlier_version_waits_and_asks_as_that_did(tmp_path: Path):
    table = {"run": "0" * 32, "terms": vars(TERMS), "sites": 2, "deadline": 50.0}
    (tmp_path / "federation.json").write_text(json.dumps(table))
    found = Pace(load_plan(tmp_path))
    found.replied(job(0, 1), 1)
    assert found.deadline(job(0, 2)) == 50
    for number in range(2, 9):
        found.missed(job(0, number))
        assert found.left_out(job(0, number + 1)) == ""


def whole(rounds: int):
    return experiment(
        "method=fedavg", "clients.count=3", "labels.at=every-client", "labels.fraction=0.5", f"rounds={rounds}"
    )


def test_a_silent_site_is_passed_over_and_the_others_go_on(tmp_path: Path):
    """Client 1 says nothing from round 2 to round 8: it is asked in 2, 3, 6 and 9, and from then on."""
    experiment = whole(10)
    data = split(experiment, tmp_path / "sites")

    def quiet(job: Job, reply):
        return None if job.client == 1 and 2 <= job.round <= 8 else reply

    grid = local_grid(data, tmp_path / "state", meddle=quiet)
    run = federate(experiment, data, tmp_path / "run", deadline=0.4, again=3)
    serve(grid, run)
    assert [order.job.round for order in grid.orders("client") if order.job.client == 1] == [1, 2, 3, 6, 9, 10]
    found = read_rounds(run)
    assert [line["replies"] for line in found] == [3, 2, 2, 2, 2, 2, 2, 2, 3, 3]
    (why,) = [failure["why"] for failure in found[4]["failures"]]
    assert why == "it was silent in rounds 2 and 3, and is asked again in round 6"


def test_deadlines_change_no_bit_as_long_as_nobody_is_silent(tmp_path: Path):
    experiment = whole(3)
    data = split(experiment, tmp_path / "sites")
    run = federate(experiment, data, tmp_path / "run", deadline=300.0, factor=100.0, least=200.0, again=1)
    serve(local_grid(data, tmp_path / "state"), run)
    simulated(experiment, tmp_path / "simulated")
    assert weights(run) == weights(tmp_path / "simulated")
    assert lines(run) == lines(tmp_path / "simulated")


def test_who_is_waited_for_is_written_down_and_then_no_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(waiting, "NAMED", 0.2)
    experiment, seen = whole(2), []
    data = split(experiment, tmp_path / "sites")
    grid = local_grid(data, tmp_path / "state", meddle=lambda job, reply: reply if job.client != 1 else None)
    run = federate(experiment, data, tmp_path / "run", deadline=1.5)
    pull = grid.pull_messages

    def watched(ids):
        seen.append(waiting.text(waiting.read(run), {1: "'Klinik B'"}))
        return pull(ids)

    grid.pull_messages = watched
    serve(grid, run)
    assert any(text.startswith("waiting for 'Klinik B', ") for text in seen)
    assert {text.partition(",")[0] for text in seen} == {"", "waiting for 'Klinik B'"}
    assert not (run / waiting.FILE).exists()


def test_who_is_waited_for_is_told_after_ten_seconds_and_then_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    news = waiting.News(tmp_path, {1: "'Klinik B'"})

    def at(seconds: float) -> str:
        nonlocal now
        now = 1000.0 + seconds
        return news.news()

    assert at(0) == ""
    waiting.write(tmp_path, [waiting.Waited(1, 1000.0, 3.0)])
    assert [at(11), at(12), at(29), at(31), at(59)] == [
        "waiting for 'Klinik B', 11 s", "", "", "waiting for 'Klinik B', 31 s", "",
    ]  # fmt: skip
    assert [at(601), at(1199), at(1201)] == ["waiting for 'Klinik B', 601 s", "", "waiting for 'Klinik B', 1201 s"]
    waiting.write(tmp_path, [])
    assert at(1900) == ""
    waiting.write(tmp_path, [waiting.Waited(1, 3000.0, 200.0), waiting.Waited(2, 3000.0, 200.0)])
    assert at(2011) == "waiting for 'Klinik B', client 2, 11 s"
    assert [at(2031), at(2299)] == ["", ""]  # tasks of 200 s may take 300 s before that is worth another line
    assert at(2301) == "waiting for 'Klinik B', client 2, 301 s"
