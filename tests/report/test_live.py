"""The live page: what it tells of a run, and that a real browser draws it while a real run goes on."""

import html
import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fewlabel.cli.main import main
from fewlabel.deploy import members, waiting
from fewlabel.deploy.site_states import site_states
from fewlabel.engine import record
from fewlabel.report.live import MOST_POINTS, LivePage, SitesOf, SiteState, thinned
from fewlabel.report.loopback import Request
from tests.report.test_watch import RunDir, line, reach

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
browsed = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


def no_sites(directory: Path) -> list[SiteState]:
    raise AssertionError("a simulation has no sites on other machines")


def state(directory: Path, sites_of: SitesOf = no_sites) -> dict[str, Any]:
    answer = LivePage(directory, sites_of).answer(Request("GET", "/state.json", {}))
    found: dict[str, Any] = json.loads(answer.body)
    return found


def test_the_state_tells_rounds_time_curves_and_clients(run_dir: RunDir) -> None:
    """Three of six rounds, of three seconds each with their evaluation: nine seconds left."""
    directory = run_dir("method=fedprox")
    reach(directory, 1, 2, 3)
    with record.in_use(directory):
        found = state(directory)
    assert (found["state"], found["done"], found["rounds"], found["left"]) == ("running", 3, 6, "9.0 s")
    accuracy = next(curve for curve in found["curves"] if curve["label"] == "accuracy")
    assert accuracy["lines"] == [{"run": 0, "points": [[1, 0.1], [2, 0.2], [3, 0.3]]}]
    assert "AUC" not in [curve["label"] for curve in found["curves"]]  # nobody knows it
    (run,) = found["runs"]
    assert (run["round"], run["sent"], run["per_round"]) == (3, "12.0 kB", "3.0 s")
    partition = json.loads((directory / "partition.json").read_text())["clients"]
    assert [site["labeled"] + site["unlabeled"] for site in found["sites"]] == [
        len(each["labeled"]) + len(each["unlabeled"]) for each in partition
    ]
    assert {site["state"] for site in found["sites"]} == {"simulated"}


def test_a_page_of_many_runs_has_a_curve_for_each_and_no_sites(run_dir: RunDir) -> None:
    first, second = run_dir("method=fedprox"), run_dir("method=labels-only", "seed=1")
    reach(first, 1, 2)
    reach(second, 1)
    found = state(first.parent)
    assert [len(each["points"]) for each in found["curves"][0]["lines"]] == [2, 1]
    assert (found["sites"], found["left"], found["state"]) == ([], None, "stopped")


def test_long_curves_are_thinned_and_keep_their_last_point() -> None:
    points = [(n, n / 1000) for n in range(1, 1001)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS
    assert kept[-1] == (1000, 1.0)
    assert kept == sorted(kept)
    assert thinned(points[:5]) == points[:5]


def test_unknown_pages_are_refused_and_known_ones_are_there(run_dir: RunDir) -> None:
    page = LivePage(run_dir("method=fedprox"), no_sites)
    assert page.answer(Request("GET", "/../watch.py", {})).status == 404
    for path in ("/", "/live.js", "/live.css"):
        assert page.answer(Request("GET", path, {})).status == 200


def test_sites_are_named_with_whom_is_waited_for_and_who_gave_no_reply(tmp_path: Path, run_dir: RunDir) -> None:
    directory = run_dir("method=fedprox")
    terms = {"classes": ["a", "b"], "channels": 1, "image_size": 16, "mean": [0.5], "std": [0.25]}
    (directory / record.FEDERATION).write_text(json.dumps({"run": "0" * 32, "terms": terms, "sites": 3}))
    assert site_states(directory) == []
    clients = [{"id": n, "num_labeled": 10 * (n == 0), "num_unlabeled": 5} for n in range(3)]
    (directory / "clients.json").write_text(json.dumps({"clients": clients}))
    failure = {"client": 2, "task": "local_update", "why": "it was silent for 60 s"}
    with (directory / record.ROUNDS).open("a") as file:
        file.write(json.dumps(line(1, failures=[failure, "client 0: a sentence of 0.1"])) + "\n")
    waiting.write(directory, [waiting.Waited(1, time.time() - 75)])
    assert [site.state for site in site_states(directory)] == ["took part", "took part", "no reply"]  # it was killed
    with record.in_use(directory):
        first, second, third = site_states(directory)
    assert first == SiteState("client 0", 10, 5, "takes part")
    assert (second.state, second.about) == ("waited for", "1 min 15 s")
    assert (third.state, third.about) == ("no reply", "it was silent for 60 s")


def test_before_the_first_round_sites_are_there_or_waited_for_or_refused(tmp_path: Path, run_dir: RunDir) -> None:
    directory, folder = run_dir("method=fedprox"), tmp_path / "fed"
    members.create(folder, members.Federation("fed", "127.0.0.1:1", "0"), {})
    each = [members.Member(n, name, f"key {n}", str(n), "") for n, name in enumerate(("north", "south", "west"))]
    members.write_members(folder, tuple(each))
    terms = {"classes": ["a", "b"], "channels": 1, "image_size": 16, "mean": [0.5], "std": [0.25]}
    plan = {"run": "0" * 32, "terms": terms, "sites": 3, "members": str(folder)}
    (directory / record.FEDERATION).write_text(json.dumps(plan))
    names = ("north", "south", "west")
    with record.in_use(directory):
        assert site_states(directory) == [SiteState(name, None, None, "not yet there") for name in names]
        late = [waiting.Waited(1, time.time() - 75), waiting.Waited(2, time.time() - 75, refused="it has no images")]
        waiting.write(directory, late)
        first, second, third = site_states(directory)
    assert first == SiteState("north", None, None, "is there")
    assert (second.name, second.state, second.about) == ("south", "waited for", "1 min 15 s")
    assert (third.state, third.about) == ("waited for", "1 min 15 s; it is refused: it has no images")
    assert {site.state for site in site_states(directory)} == {"not yet there"}  # no process works on it now
    end = f"to go on: fewlabel federation run {folder} --resume {directory}"
    assert state(directory, site_states)["sentence"].endswith(end)


def test_web_goes_without_once_and_format(run_dir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(run_dir("method=fedprox")), "--web", "--once"]) == 2
    assert "leave those out" in capsys.readouterr().err
    assert main(["watch", "nowhere", "--web"]) == 2
    assert "nowhere is not there" in capsys.readouterr().err


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Path]:
    """A real run of far more rounds than it will play."""
    directory = tmp_path / "run"
    settings = ["rounds=100000", "data.image_size=16", "clients.count=3", "method.local.epochs=1", "name=a<b>c"]
    words = [word for setting in settings for word in ("--set", setting)]
    command = [sys.executable, "-m", "fewlabel", "run", "--method", "fedavg", "--workers", "1", "--out", str(directory)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen([*command, *words], stderr=log, stdout=log) as run:
        rounds = directory / record.ROUNDS
        until = time.monotonic() + 300
        while not (rounds.exists() and rounds.read_text().count("\n") > 2):
            assert run.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < until
            time.sleep(0.1)
        yield directory
        run.send_signal(signal.SIGKILL)


@browsed
def test_a_browser_draws_the_page_while_the_run_goes_on(going_on: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fewlabel", "watch", str(going_on), "--web"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as served:
        assert served.stdout
        address = served.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
        try:
            early = json.load(urllib.request.urlopen(f"{address}state.json"))
            options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
            options += ["--enable-logging=stderr", f"--user-data-dir={tmp_path / 'profile'}", "--no-first-run"]
            options += ["--disable-dev-shm-usage", "--virtual-time-budget=4000", "--dump-dom", address]
            assert CHROMIUM
            out, told = tmp_path / "out", tmp_path / "err"
            with out.open("w") as stdout, told.open("w") as stderr:  # files: its children could keep a pipe open
                subprocess.run([CHROMIUM, *options], stdout=stdout, stderr=stderr, timeout=120, check=True)
            late = json.load(urllib.request.urlopen(f"{address}state.json"))
        finally:
            served.send_signal(signal.SIGINT)
            assert served.wait(30) == 130
    page = out.read_text()
    assert [text for text in told.read_text().splitlines() if "CONSOLE" in text] == []
    drawn = re.search(r'data-drawn="(\d+)"', page)
    assert drawn
    assert int(drawn[1]) >= 2  # it came again for news
    assert "a&lt;b&gt;c" in page  # a name is text
    shown = re.search(r"running: round (\d+) of 100000, .+ left", html.unescape(page))
    assert shown
    assert early["done"] <= int(shown[1]) <= late["done"]
    assert early["done"] < late["done"]
    assert page.count('class="curve"') == len(late["curves"]) >= 3
    assert re.findall(r">client (\d)<", page) == ["0", "1", "2"]


def test_the_page_only_reads(run_dir: RunDir) -> None:
    directory = run_dir("method=fedprox")
    reach(directory, 1)
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    state(directory)
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
