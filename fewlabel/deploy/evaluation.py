"""What a site answers to `evaluate`, and how often: a coordinator must not read test images by choosing weights.

A site cannot know whether weights were trained or made up: the coordinator computes the average, and chooses what it
sends. So a site bounds what any weights can show. It answers once for each measured round of a run, in the order of
rounds, as often in all as its policy says, and only in coarse shares (`core.coarse`). Who asks again for the same
weights gets the same answer, whose rounding depends on the weights and a secret of the site. The record of a run
(`experiments`) keeps the hash of the weights of each round: in an honest run it is the same at every site.
"""

import base64
import hashlib
import hmac
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from fewlabel.core import coarse, storage
from fewlabel.core.errors import StorageError
from fewlabel.deploy.messages import Refused
from fewlabel.deploy.policy import Evaluating
from fewlabel.engine.executor import Job
from fewlabel.experiment import Experiment

ANSWERS, SECRET = "answers.jsonl", "secret"
BYTES = 32  # of the secret


@dataclass(frozen=True)
class Given:
    """An answer that was given."""

    run: str
    round: int
    weights: str  # hash
    answer: str  # base64


def digest(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def given(state: Path) -> list[Given]:
    """Read the answers that this site has given so far."""
    path = state / ANSWERS
    try:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # what was half written has not left
        return [Given(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise StorageError(f"{path} cannot be read: {error}; no model is measured until it can") from None


def answered(
    state: Path, job: Job, experiment: Experiment, message: bytes, limits: Evaluating, measure: Callable[[], bytes]
) -> bytes:
    """Return the answer to an order, from `measure` or from an earlier time, or refuse it."""
    before = given(state)
    mine = {one.round: one for one in before if one.run == job.run}
    if job.round < 1 or (job.round % experiment.evaluate.every and job.round != experiment.rounds):
        raise Refused(f"round {job.round} of this run is not measured (evaluate.every)")
    if (old := mine.get(job.round)) is not None:
        if old.weights != digest(message):
            raise Refused(f"round {job.round} of this run was measured with other weights, and each is measured once")
        return base64.b64decode(old.answer)
    if mine and max(mine) > job.round:
        raise Refused(f"round {max(mine)} of this run was measured before, and rounds are measured in their order")
    if len(before) >= limits.most:
        raise Refused(f"this site gives {limits.most} answers about its test images in all, and has given them "
                      "(evaluate.most in its policy)")  # fmt: skip
    found = measure()
    note(state, Given(job.run, job.round, digest(message), base64.b64encode(found).decode()))
    return found


def note(state: Path, answer: Given) -> None:
    """Append an answer before it leaves, so that it counts whatever happens."""
    with (state / ANSWERS).open("a+b") as file:
        storage.drop_torn_line(file)
        file.write(json.dumps(asdict(answer)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def chance(state: Path, message: bytes) -> coarse.Chance:
    """Return numbers that depend on the weights and on this site's secret alone."""
    path = state / SECRET
    if not path.exists() or path.stat().st_size < BYTES:  # a power cut may leave an empty file, which anyone can guess
        storage.write(path, os.urandom(BYTES))
        path.chmod(0o600)
    key, about = path.read_bytes(), hashlib.sha256(message).digest()

    def number(name: str) -> float:
        drawn = hmac.digest(key, about + name.encode(), "sha256")
        return (int.from_bytes(drawn[:8], "big") >> 11) / 2**53

    return number
