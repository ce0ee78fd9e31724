"""What goes wrong in a real federation: sites that lie, die and return, a SuperLink that dies, and no process left.

All on real processes on this machine. Each test prints how many seconds it took to notice and to recover.
"""

import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from safetensors import safe_open

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from fewlabel.core import wire
from fewlabel.core.federation import Model, train
from fewlabel.deploy import processes as programs
from fewlabel.deploy import site, site_process, waiting
from fewlabel.deploy.messages import Order
from fewlabel.engine.record import read_rounds
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import prepare
from fewlabel.experiment import Experiment
from tests.deploy.federated import experiment, federate, lines, local_grid, simulated, split, weights
from tests.deploy.test_flower import first
from tests.flower_processes import Processes, until

pytestmark = pytest.mark.slow

# A site process that is as it should be, but for the rounds in which a file beside its socket says otherwise.


def spoilt(upload: bytes, value: torch.Tensor) -> bytes:
    return wire.pack(Model(first(wire.unpack(Model, upload).model, value)))


def hang(upload: bytes) -> bytes:
    time.sleep(3600)
    return upload


def read_for_ever(upload: bytes) -> bytes:
    """Read a pipe that nobody writes to, like a disk that does not answer. Signs of life go on meanwhile."""
    path = Path(tempfile.mkdtemp()) / "disk"
    os.mkfifo(path)
    return path.read_bytes()


def times(upload: bytes, factor: float) -> bytes:
    model = wire.unpack(Model, upload).model
    return wire.pack(Model({name: factor * v if v.is_floating_point() else v for name, v in model.items()}))


MOODS = {
    "loud": lambda upload: times(upload, 1000.0),
    "overflow": lambda upload: spoilt(upload, torch.full((4, 1, 3, 3), 3e38)),
    "stuck": read_for_ever,
    "NaN": lambda upload: spoilt(upload, torch.full((4, 1, 3, 3), torch.nan)),
    "shape": lambda upload: spoilt(upload, torch.zeros(3)),
    "oversized": lambda upload: bytes(3_000_000),
    "mangled": lambda upload: b"\xff" * 100,
    "hang": hang,
    "die": lambda upload: os._exit(9),
}
ODD = "import json, sys; from pathlib import Path; from tests.deploy.test_flower_faults import odd; "
ODD += "odd(json.loads(sys.argv[1]), Path(sys.argv[2]))"


def odd(config: dict, socket: Path) -> None:
    file = socket.with_suffix(".moods")

    def reply(parts: dict) -> dict:
        job, made = wire.unpack(Order, parts["order"]).job, site.reply(config, parts)
        moods = json.loads(file.read_text()) if file.exists() and job.kind == "client" else {}
        if (mood := moods.get(str(job.round))) is None:
            return made
        file.with_suffix(".seen").write_text(mood)
        return {"failed": "OSError"} if mood == "fail" else {"upload": MOODS[mood](made["upload"])}

    site_process.serve(reply, socket)


class Sites(Processes):
    """Three sites with labels at each."""

    def mood(self, client: int, **rounds: str) -> None:
        """How a client is in rounds, such as _2="hang"; as it should be in all others."""
        self.seen(client).unlink(missing_ok=True)
        moods = {number.strip("_"): mood for number, mood in rounds.items()}
        (self.folder / f"site{client}.moods").write_text(json.dumps(moods))

    def seen(self, client: int) -> Path:
        """Is there once the mood has shown."""
        return self.folder / f"site{client}.seen"

    def lay_out(self, name: str, whole: Experiment, **plan: float) -> Path:
        return federate(whole, self.data, self.data.parent / name, patience=300.0, **{"deadline": 300.0, **plan})


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    folder = tmp_path_factory.mktemp("federation")
    data = split(fedavg(), folder / "sites")
    configs = list(local_grid(data, folder / "state").configs.values())
    with Sites(folder / "processes", configs, ODD) as processes:
        processes.data = data
        yield processes


@pytest.fixture(autouse=True)
def well(sites: Sites) -> None:
    for client in range(3):
        sites.mood(client)


def fedavg(*changes: str) -> Experiment:
    return experiment("method=fedavg", "clients.count=3", "labels.at=every-client", "labels.fraction=0.5", *changes)


def told(run: Path, **figures: float) -> None:
    print(f"{run.name}: " + ", ".join(f"{what.replace('_', ' ')} {seconds:.1f} s" for what, seconds in figures.items()))


def same_as_without(run: Path, whole: Experiment, client: int, directory: Path) -> bool:
    """Whether a run's weights are those of a simulation in which a client is absent whenever it failed in the run."""
    fed = Server(prepare(whole, directory))
    missing = [client in [failure["client"] for failure in line.get("failures", ())] for line in read_rounds(run)]
    rounds, state = train(fed.method, fed, fed.method.init(fed)), None
    for gone in missing:
        fed.absent = frozenset({client} if gone else ())
        _, state = next(rounds)
    with safe_open(run / "model.safetensors", "pt") as file:
        return all(torch.equal(file.get_tensor(name), value) for name, value in state.model.items())


def test_a_site_that_sends_what_it_should_not_is_refused_by_name_and_the_rounds_go_on(sites, tmp_path):
    whole = fedavg("rounds=5")
    sites.mood(2, _1="NaN", _2="shape", _3="oversized", _4="mangled")
    run = sites.lay_out("wrong", whole)
    log = sites.run(run)
    found = read_rounds(run)
    assert [line["replies"] for line in found] == [2, 2, 2, 2, 3], log
    whys = ["found NaN or Inf", "found torch.float32 [3]", "3000000 bytes, more than", "the buffer is cut short"]
    for line, why in zip(found[:4], whys, strict=True):
        (failure,) = line["failures"]
        assert (failure["client"], failure["task"]) == (2, "local_update")
        assert failure["why"].startswith("its upload is refused")
        assert why in failure["why"]
    assert same_as_without(run, whole, 2, tmp_path / "simulated")
    told(run, each_round=found[3]["seconds"])


def test_a_site_whose_update_is_a_thousand_times_too_large_is_left_out_by_name(sites, tmp_path):
    """And numbers that would make the average overflow end no run."""
    sites.mood(2, _1="overflow", _3="loud")
    run = sites.lay_out("loud", fedavg("rounds=4", "clients.clip_median=2.0", "clients.outlier=20.0"))
    log = sites.run(run)
    found = read_rounds(run)
    assert [line["replies"] for line in found] == [2, 3, 2, 3], log
    (failure,), (third,) = found[0]["failures"], found[2]["suspects"]
    assert (failure["client"], "numbers beyond 1e+18" in failure["why"]) == (2, True)
    assert (third["client"], third["did"], "times the median" in third["why"]) == (2, "left out", True)
    told(run, each_round=found[3]["seconds"])


def test_a_killed_node_costs_a_deadline_at_most_then_nothing_and_takes_part_again_when_it_is_back(sites, tmp_path):
    whole = fedavg("rounds=9")
    sites.mood(2, _2="hang")
    run = sites.lay_out("killed", whole, deadline=50.0)
    running = sites.submit(run)
    until(sites.seen(2).exists)
    sites.kill("node2")
    sites.kill("site2")
    killed = time.monotonic()

    def failures() -> list[str]:
        return [failure["why"] for line in read_rounds(run) for failure in line.get("failures", ())]

    until(failures)
    first_round = read_rounds(run)[1]["seconds"]
    until(lambda: any("it is not connected" in failure for failure in failures()))
    unlisted, back = time.monotonic() - killed, time.monotonic()
    sites.site_process(2)
    sites.node(2)
    until(lambda: read_rounds(run)[-1]["replies"] == 3)
    returned = time.monotonic() - back
    running.wait(600)
    found = read_rounds(run)
    why = r"it was silent for 50 s|no reply came before the deadline|it is no longer connected .*Node Unavailable.*"
    assert found[1]["failures"][0]["client"] == 2
    assert re.fullmatch(
        why, found[1]["failures"][0]["why"]
    )  # Flower notices up to a minute after the last sign of life
    assert {line["replies"] for line in found} == {2, 3}
    assert (found[0]["replies"], found[1]["replies"], found[-1]["replies"]) == (3, 2, 3)
    assert same_as_without(run, whole, 2, tmp_path / "simulated")
    told(run, round_with_the_kill=first_round, not_asked_any_more_after=unlisted, back_in_a_round_after=returned)


def test_a_site_that_is_stuck_in_its_first_round_is_named_and_passed_over(sites, tmp_path):
    """Nobody knows how long its task takes, but the others' replies tell."""
    whole = fedavg("rounds=1")
    sites.mood(2, _1="stuck")
    run = sites.lay_out("stuck", whole, least=20.0, deadline=3600.0)
    running = sites.submit(run)
    until(sites.seen(2).exists)
    began = time.monotonic()
    until(lambda: [one.client for one in waiting.read(run)] == [2])
    named = time.monotonic() - began
    until(lambda: read_rounds(run), 1200)
    passed_over = time.monotonic() - began
    running.wait(1800)
    sites.kill("site2")
    sites.site_process(2)
    found = read_rounds(run)
    assert [line["replies"] for line in found] == [2]
    assert found[0]["failures"][0]["why"].startswith("it was silent for")
    assert same_as_without(run, whole, 2, tmp_path / "simulated")
    told(run, named_after=named, passed_over_after=passed_over)


def test_too_few_replies_end_the_run_and_it_resumes_to_the_bits_of_one_undisturbed(sites, tmp_path):
    whole = fedavg("clients.min_replies=3")
    sites.mood(0, _2="fail")
    run = sites.lay_out("few", whole)
    assert "TooFewReplies: round 2 had 2 replies to 'local_update' and needs 3 (clients.min_replies)" in sites.run(run)
    assert [path.name[:12] for path in (run / "checkpoint").glob("round-*")] == ["round-000001"]
    sites.mood(0)
    began = time.monotonic()
    sites.run(run)
    told(run, the_rest_after_a_resume=time.monotonic() - began)
    simulated(whole, tmp_path / "simulated")
    assert weights(run) == weights(tmp_path / "simulated")
    assert lines(run) == lines(tmp_path / "simulated")


def test_a_site_process_that_dies_is_a_failure_with_a_reason_and_its_site_works_again_with_a_new_one(sites):
    sites.mood(1, _2="die")
    run = sites.lay_out("process", fedavg("rounds=6"))
    running, dying = sites.submit(run), sites.started["site1"]
    until(lambda: dying.poll() is not None)
    died = time.monotonic()
    until(lambda: len(read_rounds(run)) >= 2)
    noticed, back = time.monotonic() - died, time.monotonic()
    sites.site_process(1)
    until(lambda: read_rounds(run)[-1]["replies"] == 3)
    returned = time.monotonic() - back
    running.wait(600)
    found = read_rounds(run)
    why = "its task failed: its site process ended before it had answered; `fewlabel site join` starts it again"
    assert found[1]["failures"] == [{"client": 1, "task": "local_update", "why": why}]
    assert found[-1]["replies"] == 3
    told(run, noticed_after=noticed, back_in_a_round_after=returned)


def test_a_killed_superlink_costs_one_round_and_no_bit(sites, tmp_path):
    whole = fedavg("rounds=6")
    run = sites.lay_out("link", whole)
    sites.submit(run)
    until(lambda: len(read_rounds(run)) >= 2)
    helpers = psutil.Process(sites.started["link"].pid).children(recursive=True)
    sites.started["link"].kill()
    sites.started.pop("link").wait()
    killed = time.monotonic()
    until(lambda: not living(helpers))  # Flower's own, which watch it; one of them is at the run
    gone, before = time.monotonic() - killed, len(read_rounds(run))
    sites.link()
    listening = time.monotonic() - killed
    said = len(sites.log("run-link").read_text())
    log = sites.run(run)[said:]
    again = [json.loads(line)["round"] for line in log.splitlines() if line.startswith('{"round": ')]
    assert again, log
    assert again == list(range(again[0], 7))
    assert again[0] in (before, before + 1)  # the kill may come between the line of a round and its checkpoint
    simulated(whole, tmp_path / "simulated")
    assert weights(run) == weights(tmp_path / "simulated")
    assert lines(run) == lines(tmp_path / "simulated")
    told(run, helpers_gone_after=gone, listening_again_after=listening, finished_after=time.monotonic() - killed)


def test_whoever_stops_a_federation_in_mid_round_leaves_no_process_behind(sites):
    sites.mood(0, _1="hang")
    sites.submit(sites.lay_out("stopped", fedavg()))
    until(sites.seen(0).exists)
    assert len(of(sites)) > 10  # a link, nodes, site processes, and what they have started
    began = time.monotonic()
    programs.end(sites.folder, sites.started.values())
    told(sites.folder, stopped_after=time.monotonic() - began)
    assert not of(sites)


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended. On a busy machine the number of one that has may soon be another program's."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def of(sites: Sites) -> list[int]:
    """All processes of a federation, found by another mark than the one that they are ended by."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(sites.folder / "home"):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found
