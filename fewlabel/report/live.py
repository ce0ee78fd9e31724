"""A page that shows runs while they go on: `fewlabel watch RUN --web`. It only reads their directories.

`live.html`, `live.js` and `live.css` are its form. They show `state.json`, which the page asks for every second.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import Any

from fewlabel.core.errors import FewLabelError
from fewlabel.engine import record
from fewlabel.report.findings import in_last_round
from fewlabel.report.loopback import LoopbackServer, Request, Response
from fewlabel.report.terminal import size, span, tell
from fewlabel.report.watch import SHARES, Progress, RunProgress, Watcher, names_of

MOST_POINTS = 300  # of a curve: more than a screen can show
MOST_SITES = 200
FILES = {
    "/": ("live.html", "text/html; charset=utf-8"),
    "/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/live.css": ("live.css", "text/css; charset=utf-8"),
}


@dataclass(frozen=True)
class SiteState:
    """A site as the page shows it."""

    name: str
    labeled: int | None  # None if it has not told yet
    unlabeled: int | None
    state: str  # such as "takes part", "waited for" or "no reply"
    about: str = ""  # how long it is waited for, or why it gave no reply


SitesOf = Callable[[Path], Sequence[SiteState]]


class LivePage:
    """Answers the requests of the page. `sites_of` is for runs whose sites are on other machines."""

    def __init__(self, directory: Path, sites_of: SitesOf) -> None:
        self._watcher, self._sites_of = Watcher(directory), sites_of
        self._simulated: dict[Path, list[SiteState]] = {}
        self._lock = Lock()  # requests come in threads
        self._watcher.read()  # which refuses a directory without runs

    def answer(self, request: Request) -> Response:
        if request.path in FILES:
            name, kind = FILES[request.path]
            return Response(200, kind, files("fewlabel.report").joinpath(name).read_bytes())
        if request.path != "/state.json":
            return Response.text("there is no such page", 404)
        with self._lock:
            return Response.json(self.state())

    def state(self) -> dict[str, Any]:
        """Return all that the page shows."""
        progress = self._watcher.read()
        one = progress.runs[0]
        left = progress.seconds_left
        names = names_of(progress.runs)
        return {
            "title": one.run.title if progress.alone else f"{progress.count} in {progress.directory}",
            "state": progress.state,
            "sentence": progress.sentence(),
            "done": sum(each.reached for each in progress.runs),
            "rounds": sum(each.rounds for each in progress.runs),
            "left": None if left is None else span(left),
            "at": time.strftime("%H:%M:%S"),
            "runs": [described(each, names[each]) for each in progress.runs],
            "curves": curves(progress),
            "findings": findings(progress),
            "sites": [asdict(site) for site in self.sites(one)[:MOST_SITES]] if progress.alone else [],
        }

    def sites(self, one: RunProgress) -> Sequence[SiteState]:
        """Return the sites of a run, with what the last round tells of them."""
        directory = one.run.directory
        if (directory / record.FEDERATION).exists():
            return self._sites_of(directory)
        if directory not in self._simulated:  # a partition is large, and does not change
            self._simulated[directory] = simulated_sites(one)
        return self._simulated[directory]


def simulated_sites(one: RunProgress) -> list[SiteState]:
    """Return the clients of a simulation, from the run's partition."""
    try:
        clients = one.run.partition.get("clients", [])
    except FewLabelError:  # not written yet
        return []
    held = ((each["id"], len(each["labeled"]), len(each["unlabeled"])) for each in clients)
    return [SiteState(f"client {n}", labeled, rest, "simulated") for n, labeled, rest in held if labeled + rest]


def described(one: RunProgress, name: str) -> dict[str, Any]:
    """Return a run's line in the table."""
    return {
        "name": name,
        "seed": one.run.seed,
        "state": one.state,
        "round": one.reached,
        "rounds": one.rounds,
        "sent": size(one.sent("up") + one.sent("down")),
        "per_round": None if one.seconds_per_round is None else span(one.seconds_per_round),
        "last": {label: one.last(pick) for label, pick in SHARES.items()},
    }


def curves(progress: Progress) -> list[dict[str, Any]]:
    """Return a plot for each number that a run has, with a line for each of the runs that have it."""
    found = []
    for label, pick in SHARES.items():
        lines = []
        for number, one in enumerate(progress.runs):
            points = [(line["round"], value) for line in one.run.rounds if (value := pick(line)) is not None]
            if points:
                lines.append({"run": number, "points": thinned(points)})
        if lines:
            found.append({"label": label, "rounds": max(one.rounds for one in progress.runs), "lines": lines})
    return found


def thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most MOST_POINTS of these points, and always the last one."""
    step = -(-len(points) // MOST_POINTS)
    return [*reversed(points[::-1][::step])] if step else []


def findings(progress: Progress) -> list[str]:
    """Return what the last round of each run shows to be wrong."""
    told = []
    for one in progress.runs:
        if one.run.rounds:
            before = "" if progress.alone else f"{one.run.name}, seed {one.run.seed}: "
            told += [f"{before}{found}" for found in in_last_round(one.run.experiment, one.run.rounds)]
    return told


def serve_page(directory: Path, sites_of: SitesOf) -> None:
    """Serve the page until Ctrl-C, which leaves the runs alone."""
    with LoopbackServer(LivePage(directory, sites_of).answer) as server:
        print(server.address, flush=True)
        tell("open this address in a browser on this machine; it is secret, and Ctrl-C ends the page, not the runs")
        server.serve()
