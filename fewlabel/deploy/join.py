"""A site takes part: its process and Flower's node are started, watched, and started again when they die or hang."""

import json
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from fewlabel.core.errors import BadInput, RunFailed, printable
from fewlabel.deploy import keys, members, processes, site_check
from fewlabel.deploy.site_folder import SOCKET, SiteFile
from fewlabel.deploy.site_process import is_late, last_beat
from fewlabel.report.terminal import span, tell

PROCESS, NODE = "site-process", "supernode"  # the two programs
RESTARTS = 3  # of the site process within a minute
REFUSAL = re.compile(r"\[code: 412\] (.*)")  # by the gateway, with its reason
CONNECTED, NOT_NOW = "SuperNode ID: ", "[code: 2004]"  # what Flower's node prints once it is, or if it cannot be yet
PATIENCE = 90.0  # seconds to be let in since the first refusal: Flower counts a site as connected for one minute more
PAUSE, LONGEST = 5.0, 300.0  # seconds until the next attempt: at first, and at most; each time they double
HUNG = 30.0  # seconds without a sign of life until a program is ended and started again
LOOK = 5.0  # seconds between two looks for stopped processes
REFUSED = ("disk", "key", "certificate", "versions")  # checks that must pass here; the site process checks its data


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


def refuse_unfit(folder: Path, site: SiteFile) -> None:
    """Refuse to join where `site check` would find something to mend. A server that does not answer may do so later."""
    checks = site_check.checks(folder, site)
    for name in REFUSED:
        try:
            checks[name]()
        except BadInput as error:
            raise BadInput(f"{name}: {error}; `fewlabel site check` shows everything that must be mended") from None


def check_server(trust: Path) -> None:
    """Raise an error if the federation's server cannot be reached now, or would not take the times signed here."""
    site_check.check_connection(trust)
    site_check.check_clock(trust)


def take_part(programs: processes.Programs, commands: dict[str, list[str]], site: SiteFile, insecure: bool) -> None:
    """Run a site's programs until Ctrl-C. Start one again if it dies or hangs."""
    federation = members.read_trust(Path(site.trust))
    reachable = (lambda: None) if insecure else partial(check_server, Path(site.trust))
    with suppress(KeyboardInterrupt), processes.interruptible(), programs.cleaned_up():
        words = Words(programs.log(PROCESS))
        start_process(programs, commands[PROCESS])
        start_node(programs, commands[NODE], reachable)
        who = f"client {site.place.client} of '{federation.name}' at {federation.address}"
        tell(f"joined as {who}; press Ctrl-C to leave; logs are in {programs.folder}")
        hangs = Hangs(programs)
        deaths: dict[str, list[float]] = {PROCESS: [], NODE: []}
        while True:
            words.tell()
            if hangs.end():
                start_process(programs, commands[PROCESS])
            if (gone := programs.first_ended()) is not None:
                recent = [when for when in deaths[gone] if time.monotonic() - when < 60]
                deaths[gone] = [*recent, time.monotonic()]
                if gone == PROCESS:
                    restart_process(programs, commands[gone], len(recent))
                else:
                    tell(f"the connection to the server was lost: {in_own_words(programs)}; connecting again")
                    time.sleep(min(PAUSE * len(recent), LONGEST))
                    start_node(programs, commands[gone], reachable)
                    tell("connected again")
            time.sleep(0.2)


# The site process


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


def restart_process(programs: processes.Programs, command: list[str], recently: int) -> None:
    """Start a site process again that has died, unless it did so several times within a minute."""
    if recently >= RESTARTS:
        raise RunFailed(f"the {PROCESS} dies again and again: {programs.how_ended(PROCESS)}")
    tell(f"the {PROCESS} has died and is started again: {programs.how_ended(PROCESS)}")
    start_process(programs, command)


class Hangs:
    """Finds programs of a site that give no sign of life, and ends them, so that they are started again."""

    def __init__(self, programs: processes.Programs) -> None:
        self.programs, self.beat, self.looked = programs, 0, 0.0
        self.changed = time.monotonic()
        self.stopped: dict[int, float] = {}  # since when, by process

    def end(self) -> bool:
        """End the site process if it gives no sign of life or is late, and the node if something of it is stopped.

        Return True if the site process was ended.
        """
        now, process = time.monotonic(), self.programs.started[PROCESS]
        if (beat := last_beat(self.programs.folder / SOCKET)) != self.beat:
            self.beat, self.changed = beat, now
        late = is_late(self.programs.folder / SOCKET)
        if hung := now - self.changed > HUNG or late:
            why = f"has given no sign of life for {HUNG:.0f} s"
            if late:  # it is alive, but may wait for a disk that does not answer
                why = "has been at an order for longer than the coordinator waits for it"
            tell(f"the {PROCESS} {why}, so it is ended and started again")
            self.kill(process.pid)
            process.wait()
            self.changed = now
        if now - self.looked > LOOK:
            self.looked = now
            others = [number for number in processes.marked(self.programs.folder) if number != process.pid]
            found = [number for number in others if processes.is_stopped(number)]
            self.stopped = {number: self.stopped.get(number, now) for number in found}
            if any(now - since > HUNG for since in self.stopped.values()):
                tell(f"a process of Flower's node has been stopped for {HUNG:.0f} s, so the node is ended")
                for number in (*self.stopped, self.programs.started[NODE].pid):
                    self.kill(number)
        return hung

    def kill(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


class Words:
    """Repeats at the site's terminal what its process says in the log: what it refused, and why a task failed."""

    def __init__(self, log: Path) -> None:
        self.log, self.read = log, log.stat().st_size if log.exists() else 0
        self.told: deque[str] = deque(maxlen=50)

    def tell(self) -> None:
        if not self.log.exists() or self.log.stat().st_size == self.read:
            return
        with self.log.open("rb") as file:
            file.seek(self.read)
            whole, _, _ = file.read().rpartition(b"\n")
        self.read += len(whole) + bool(whole)
        for line in whole.decode(errors="replace").splitlines():
            if line.startswith("fewlabel: ") and line not in self.told:
                self.told.append(line)
                tell(printable(line.removeprefix("fewlabel: "), 1500))


# Flower's node


def start_node(
    programs: processes.Programs, command: list[str], reachable: Callable[[], object] = lambda: None
) -> None:
    """Start Flower's node, and wait until it is connected. Try again until it is, with growing pauses, and say why."""
    until, once, pause = float("inf"), cache(tell), PAUSE
    while True:
        try:
            reachable()
        except BadInput as error:
            tell(f"{error}; the next attempt is in {span(pause)}; press Ctrl-C to give up")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)
            continue
        node, began = programs.start(NODE, command), time.monotonic()
        while node.poll() is None:
            if CONNECTED in programs.output(NODE):
                return
            if time.monotonic() - began > 2 * PAUSE:
                once("waiting for the server to answer; press Ctrl-C to give up")
            time.sleep(0.1)
        output = programs.output(NODE)
        if reason := REFUSAL.search(output):
            raise RunFailed(f"the server does not let this site in: {reason[1]}")
        if NOT_NOW in output:
            if time.monotonic() > until:
                why = "it counts this site as connected, or does not know its key; does it run elsewhere with this key?"
                raise RunFailed(f"the server does not let this site in: {why}")
            until = min(until, time.monotonic() + PATIENCE)
            why = "the server still counts this site as connected, or does not know its key"
            once(f"{why}; this tries again for {PATIENCE:.0f} s")
            time.sleep(PAUSE)
        else:
            tell(f"{in_own_words(programs)}; the next attempt is in {span(pause)}; press Ctrl-C to give up")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST)


def in_own_words(programs: processes.Programs) -> str:
    """Say what the end of Flower's node means, and how it ended."""
    return f"Flower's node has ended: {programs.how_ended(NODE)}"
