"""Where a federation stands: who is enrolled, who is connected, and what runs."""

from pathlib import Path
from typing import Any

from fewlabel.deploy import keys, members, processes, superlink, waiting, wishes
from fewlabel.deploy.submit import RUNS, last_round
from fewlabel.engine import record


def status(folder: Path) -> dict[str, Any]:
    """Return who is enrolled and connected, and which runs there are."""
    about, process = members.read_trust(folder / members.TRUST), processes.process_using(folder)
    known: dict[str, superlink.Node] = {}
    states: dict[str, str] = {}
    if process is not None:
        known, listed = superlink.nodes(folder), superlink.flwr(folder, "list")["runs"]
        states = {run["run-id"]: run["status"].removeprefix("finished:") for run in listed}
    labels, images = wishes.read(folder), members.reported(folder)
    sites = [
        {"client": member.client, "name": member.name}
        | (known[member.key].state() if member.key in known else {"state": "enrolled"})
        | {"key": keys.fingerprint(member.key), "node": member.node}
        | {"labels": labels.reported.get(str(member.client)), "images": images.get(str(member.client))}
        | {"wanted": labels.wanted.get(str(member.client), 0)}
        for member in members.members(folder)
    ]
    submitted = sorted((folder / RUNS).glob("*"), key=lambda path: path.stat().st_mtime)
    runs = {path.read_text(): path.name for path in submitted}  # of one that was resumed, the last submission
    names = members.names(folder)
    listing = [
        {"run": number, "directory": directory, "round": last_round(Path(directory))}
        | {"state": "completed" if record.is_finished(Path(directory)) else states.get(number, "stopped")}
        | {"waiting": waiting.text(waiting.read(Path(directory)), names) if states.get(number) == "running" else ""}
        for directory, number in runs.items()
    ]
    return {"name": about.name, "address": about.address, "process": process, "sites": sites, "runs": listing}
