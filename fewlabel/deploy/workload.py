"""What a site has done in each round of a run, counted where it happens: a policy must not rely on settings alone.

The coordinator decides how often it asks, and a message may say how long to train. So a site counts the passes over its
images in all tasks of a round, and refuses one beyond its policy. It also counts how often it is asked: otherwise, a
coordinator could have as many replies in a single round as it likes. A task that tells exact counts over labels is done
for one set of weights in a run, or many answers could be put together to read single images. The file tells people
which weights it was sent.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.errors import StorageError
from fewlabel.deploy.messages import Refused
from fewlabel.deploy.received import Received
from fewlabel.engine.executor import Job

FILE = "work.json"
CALLS = 100  # tasks of a round
TIMES = 20  # that the same one is asked for: a run that is resumed repeats rounds


@dataclass(frozen=True)
class Done:
    """A task of a round."""

    task: str
    times: int = 0  # that it was asked for
    passes: int = 0  # over the site's images
    norm: float = 0.0  # of the weights that it was sent
    sha256: str = ""  # of them


Work = dict[str, dict[str, Done]]  # by round and call


def begin(directory: Path, job: Job, most_epochs: int | None, sent: Received, once: bool = False) -> int | None:
    """Note that a task is asked for. Return how many passes it may make, or None if there is no limit.

    A task that is to be done `once` is done again only for the same round and weights: a run that is resumed repeats
    rounds.
    """
    work = read(directory)
    calls, name = work.setdefault(str(job.round), {}), called(job)
    if name not in calls and len(calls) >= CALLS:
        raise Refused(f"this site has done {CALLS} tasks in round {job.round} of this run, and does no more in a round")
    before = calls.get(name, Done(job.task))
    if before.task != job.task:
        raise Refused(f"call {name} of round {job.round} was '{before.task}', and is not '{job.task}'")
    done = [(number, one.sha256) for number in work for one in work[number].values() if one.task == job.task]
    if once and any(one != (str(job.round), sent.sha256) for one in done):
        raise Refused(
            f"this site has done '{job.task}' for other weights or in another round of this run: it does it once"
        )
    if before.times >= TIMES:
        raise Refused(f"this site was asked {TIMES} times for call {name} of round {job.round}, and does it no more")
    calls[name] = replace(before, times=before.times + 1, norm=sent.norm, sha256=sent.sha256)
    write(directory, work)
    if most_epochs is None:
        return None
    return most_epochs - sum(done.passes for other, done in calls.items() if other != name)


def finish(directory: Path, job: Job, passes: int) -> None:
    """Note how many passes over the site's images a task has made. One that is repeated counts once."""
    if passes:
        work = read(directory)
        calls, name = work[str(job.round)], called(job)
        calls[name] = replace(calls[name], passes=passes)
        write(directory, work)


def last_norm(directory: Path, job: Job) -> float:
    """Return the norm of the largest weights in the last round before this one, or 0 if there was none."""
    work = read(directory)
    earlier = [number for number in map(int, work) if number < job.round]
    return max((done.norm for done in work[str(max(earlier))].values()), default=0.0) if earlier else 0.0


def called(job: Job) -> str:
    return str(job.call) if job.kind in ("client", "hidden") else job.kind


def read(directory: Path) -> Work:
    path = directory / FILE
    try:
        work = json.loads(path.read_text()) if path.exists() else {}
        return {number: {call: Done(**done) for call, done in calls.items()} for number, calls in work.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} cannot be read: {error}; nothing is trained before it can") from None


def write(directory: Path, work: Work) -> None:
    whole = {number: {call: asdict(done) for call, done in calls.items()} for number, calls in work.items()}
    storage.write(directory / FILE, json.dumps(whole).encode())
