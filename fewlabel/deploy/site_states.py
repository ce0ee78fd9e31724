"""The sites of a run as a page shows them: who takes part, who is waited for, and who gave no reply last."""

import time
from contextlib import suppress
from pathlib import Path

from fewlabel.core.errors import FewLabelError
from fewlabel.deploy import members, waiting
from fewlabel.deploy.run_plan import load_plan
from fewlabel.deploy.server import CLIENTS
from fewlabel.deploy.site import read_json
from fewlabel.engine import record
from fewlabel.report.live import SiteState
from fewlabel.report.terminal import span


def site_states(directory: Path) -> list[SiteState]:
    """Return the sites of a run over sites. Before the first round, these are the members of its federation."""
    plan, names = load_plan(directory), dict[int, str]()
    if folder := plan.federation or plan.members:
        with suppress(FewLabelError, OSError):  # it may be on another machine
            names = {member.client: member.name for member in members.members(Path(folder))}
    running = record.is_in_use(directory)
    waited = {one.client: one for one in (waiting.read(directory) if running else ())}  # a kill leaves the file behind
    if not (directory / CLIENTS).exists():
        come = "is there" if waited else "not yet there"
        return [
            SiteState(name, None, None, *waited_for(waited[number]))
            if number in waited
            else SiteState(name, None, None, come)
            for number, name in names.items()
        ]
    failures = [each for line in record.read_rounds(directory)[-1:] for each in line.get("failures", ())]
    failed = {each["client"]: each["why"] for each in failures if isinstance(each, dict)}  # 0.1 has sentences
    found = []
    for client in read_json(directory / CLIENTS)["clients"]:
        number, state, about = client["id"], "takes part" if running else "took part", ""
        if number in waited:
            state, about = waited_for(waited[number])
        elif number in failed:
            state, about = "no reply", failed[number]
        name = names.get(number, f"client {number}")
        found.append(SiteState(name, client["num_labeled"], client["num_unlabeled"], state, about))
    return found


def waited_for(one: waiting.Waited) -> tuple[str, str]:
    """Return the state of a site that is waited for, and what to know about it."""
    since = span(max(0.0, time.time() - one.since))
    return "waited for", f"{since}; it is refused: {one.refused}" if one.refused else since
