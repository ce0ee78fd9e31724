"""The live page of a real federation: who comes, who takes part, whom a round waits for, in a real browser."""

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install '.[flower]'")

from tests.browser import Browser, browsed, started
from tests.cli.test_federation import Session, process_of

STATES = "state.sites.map(site => site.state)"


def text(tab: Browser, which: str) -> str:
    found: str = tab.ask(f"document.querySelector({which!r}).innerText")
    return found


def at(tab: Browser, *states: str) -> None:
    """Wait until the page tells these states of the sites."""
    tab.wait(f"{STATES}.join() === {','.join(states)!r}")


@browsed
@pytest.mark.slow
def test_the_page_of_a_federation_tells_who_is_there_and_whom_it_waits_for(tmp_path: Path) -> None:
    """Two sites of three come, then the third; one of them hangs and is started again; the run is cancelled."""
    session = Session(tmp_path)
    session.set_up(sites=3, rounds=500, more='[labels]\nat = "every-client"\nfraction = 0.5\n')
    try:
        session.begin("serve", "federation serve fed", "serving at")
        for n in (1, 2):
            session.run(f"federation enrol fed site-{n}/enrolment.json")
        for n in range(2):
            session.begin(f"join{n}", f"site join site-{n} --yes", f"joined as client {n} of 'fed'")
        session.begin("run", "federation run fed e.toml --data sites --out run", "2 of 3 sites are there")
        session.begin("watch", "watch run --web", "/\n")
        (tmp_path / "profile").mkdir()
        with started(tmp_path / "profile") as tab:
            tab.open(session.said("watch").split()[0], "document.body?.dataset.drawn > 0")
            at(tab, "is there", "is there", "waited for")
            assert text(tab, "#waiting").startswith("Waiting for s2 (")
            assert text(tab, "#status") == "running: round 0 of 500"

            session.begin("join2", "site join site-2 --yes", "joined as client 2 of 'fed'")
            tab.wait("state.done > 1")
            at(tab, "takes part", "takes part", "takes part")
            assert tab.ask("state.sites.map(site => site.name).join()") == "s0,s1,s2"
            assert all(number > 0 for number in tab.ask("state.sites.map(site => site.labeled)"))
            assert tab.ask("document.querySelectorAll('#curves .curve').length") >= 3
            assert " left" in text(tab, "#status")
            assert tab.ask("document.getElementById('waiting').hidden")

            os.kill(process_of(tmp_path / "site-1", b"answer"), signal.SIGSTOP)
            at(tab, "takes part", "waited for", "takes part")
            assert text(tab, "#waiting").startswith("Waiting for s1 (1")
            at(tab, "takes part", "no reply", "takes part")  # `join` has ended it
            assert "no reply: its task failed: its site process ended" in text(tab, "#sites")
            at(tab, "takes part", "takes part", "takes part")

            session.run("federation cancel run")
            at(tab, "took part", "took part", "took part")
            assert text(tab, "#status").startswith("stopped: round ")
            assert f"to go on: fewlabel federation run {tmp_path / 'fed'} --resume run." in text(tab, "#foot")
            assert tab.said == []
        session.left["watch"].send_signal(signal.SIGINT)
        assert session.left.pop("watch").wait(30) == 130
    finally:
        session.end()
