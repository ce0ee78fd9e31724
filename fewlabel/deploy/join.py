"""A site takes part: its own process and Flower's node are started, watched, and started again when they die."""

import json
import re
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.deploy import keys, members, processes
from fewlabel.deploy.site_check import NoAnswer, check_certificate, check_connection
from fewlabel.deploy.site_folder import SOCKET, SiteFile
from fewlabel.report.terminal import tell

PROCESS, NODE = "site-process", "supernode"  # the two programs
REFUSED = "fewlabel: refused "  # how a site's process begins a line about an order that it refuses
RESTARTS = 3  # of the programs within a minute
REFUSAL = re.compile(r"\[code: 412\] (.*)")  # by the gateway, with its reason
CONNECTED, NOT_NOW = "SuperNode ID: ", "[code: 2004]"  # what Flower's node prints once it is, or if it cannot be yet
PATIENCE = 90.0  # seconds to be let in since the first refusal: Flower counts a site as connected for one minute more
PAUSE = 10.0  # seconds until the next attempt


def commands(folder: Path, site: SiteFile, insecure: bool) -> dict[str, list[str]]:
    """Return the commands of a site's two programs."""
    trust = Path(site.trust)
    secure = ["--root-certificates", str(trust / f"{keys.CA}.pem"), "--auth-supernode-private-key", site.key]
    node = [
        *(sys.executable, "-m", "fewlabel.deploy.flower", "supernode"),
        *("--superlink", members.read_trust(trust).address),
        *(["--insecure"] if insecure else secure),
        *("--node-config", f"socket={json.dumps(str(folder / SOCKET))}"),
        *("--port", str(processes.free_port())),
    ]
    return {PROCESS: [sys.executable, "-m", "fewlabel", "site", "answer", str(folder)], NODE: node}


def check_server(trust: Path) -> None:
    """Refuse to join a server that is not the federation's. One that does not answer yet may do so later."""
    check_certificate(trust)
    with suppress(NoAnswer):
        check_connection(trust)


def take_part(programs: processes.Programs, commands: dict[str, list[str]], site: SiteFile) -> None:
    """Run a site's programs until Ctrl-C. Start one again if it dies."""
    federation = members.read_trust(Path(site.trust))
    start = {PROCESS: start_process, NODE: start_node}
    with suppress(KeyboardInterrupt), processes.interruptible(), programs.cleaned_up():
        for name in start:
            start[name](programs, commands[name])
        who = f"client {site.place.client} of '{federation.name}' at {federation.address}"
        tell(f"joined as {who}; press Ctrl-C to leave; logs are in {programs.folder}")
        deaths: list[float] = []
        refusals = Refusals(programs)
        while True:
            refusals.tell_new()
            if (gone := programs.first_ended()) is not None:
                deaths = [when for when in deaths if time.monotonic() - when < 60] + [time.monotonic()]
                if len(deaths) > RESTARTS:
                    raise RunFailed(f"the {gone} dies again and again: {programs.last_error(gone)}")
                tell(f"the {gone} has died and is started again: {programs.last_error(gone)}")
                start[gone](programs, commands[gone])
            time.sleep(0.2)


class Refusals:
    """Tells the people at a site what their site refuses, each sentence once in a row."""

    def __init__(self, programs: processes.Programs) -> None:
        self.programs, self.size, self.seen, self.last = programs, 0, 0, ""

    def tell_new(self) -> None:
        log = self.programs.log(PROCESS)
        if not log.exists() or log.stat().st_size == self.size:
            return
        self.size = log.stat().st_size
        said = [line for line in self.programs.output(PROCESS).splitlines() if line.startswith(REFUSED)]
        self.seen = self.seen if self.seen <= len(said) else 0  # the process was started again
        for line in said[self.seen :]:
            if line != self.last:
                tell(line.removeprefix("fewlabel: "))
            self.last = line
        self.seen = len(said)


def start_process(programs: processes.Programs, command: list[str]) -> None:
    """Start the site process, and wait until it can be talked to."""
    path = programs.folder / SOCKET
    path.unlink(missing_ok=True)
    started = programs.start(PROCESS, command)
    while not path.exists():
        if started.poll() is not None:
            why = f"the {PROCESS} does not start: {programs.last_error(PROCESS)}"
            raise BadInput(why) if started.returncode == BadInput.exit_code else RunFailed(why)
        time.sleep(0.1)


def start_node(programs: processes.Programs, command: list[str]) -> None:
    """Start Flower's node, and wait until it is connected. Try again if the server still counts it as connected."""
    until, once = float("inf"), cache(tell)
    while True:
        node, began = programs.start(NODE, command), time.monotonic()
        while node.poll() is None:
            if CONNECTED in programs.output(NODE):
                return
            if time.monotonic() - began > PAUSE:
                once("waiting for the server to answer; press Ctrl-C to give up")
            time.sleep(0.1)
        output = programs.output(NODE)
        if NOT_NOW not in output or time.monotonic() > until:
            reason = REFUSAL.search(output)
            raise RunFailed(
                f"the server does not let this site in: {reason[1] if reason else programs.last_error(NODE)}"
            )
        until = min(until, time.monotonic() + PATIENCE)
        why = "the server still counts this site as connected, or does not know its key"
        once(f"{why}; this tries again for {PATIENCE:.0f} s")
        time.sleep(PAUSE)
