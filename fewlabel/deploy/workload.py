"""What a site has done in each round of a run, counted where it happens: a policy must not rely on settings alone.

The coordinator decides how often it asks, and a message may say how long to train. So a site counts the passes over its
images in all tasks of a round, and refuses one beyond its policy. It also counts how often it is asked: otherwise, a
coordinator could have as many replies in a single round as it likes.
"""

import json
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.errors import StorageError
from fewlabel.deploy.messages import Refused
from fewlabel.engine.executor import Job

FILE = "work.json"
CALLS = 100  # tasks of a round
TIMES = 20  # that the same one is asked for: a run that is resumed repeats rounds

Work = dict[str, dict[str, list[int]]]  # by round and call: how often it was asked for, and how many passes it made


def begin(directory: Path, job: Job, most_epochs: int | None) -> int | None:
    """Note that a task is asked for. Return how many passes it may make, or None if there is no limit."""
    work = read(directory)
    calls, name = work.setdefault(str(job.round), {}), called(job)
    if name not in calls and len(calls) >= CALLS:
        raise Refused(f"this site has done {CALLS} tasks in round {job.round} of this run, and does no more in a round")
    times, passes = calls.get(name, [0, 0])
    if times >= TIMES:
        raise Refused(f"this site was asked {TIMES} times for call {name} of round {job.round}, and does it no more")
    calls[name] = [times + 1, passes]
    write(directory, work)
    if most_epochs is None:
        return None
    return most_epochs - sum(passes for other, (_, passes) in calls.items() if other != name)


def finish(directory: Path, job: Job, passes: int) -> None:
    """Note how many passes over the site's images a task has made. One that is repeated counts once."""
    if passes:
        work = read(directory)
        work[str(job.round)][called(job)][1] = passes
        write(directory, work)


def called(job: Job) -> str:
    return str(job.call) if job.kind in ("client", "hidden") else job.kind


def read(directory: Path) -> Work:
    path = directory / FILE
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} cannot be read: {error}; nothing is trained before it can") from None


def write(directory: Path, work: Work) -> None:
    storage.write(directory / FILE, json.dumps(work).encode())
