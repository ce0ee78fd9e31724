"""What each client has spent of its privacy in a run. It survives kills, and steps that were repeated count again.

A reply is kept until no resume can ask for it again. Whoever asks the same again gets the same reply: the noise is in
it already, so it tells nothing more, and it spends nothing more.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.errors import StorageError
from fewlabel.engine.executor import SERVER_ID, Job, Outcome
from fewlabel.experiment import Experiment
from fewlabel.learn.private import Guard, Steps, spent

FOLDER = "privacy"


@dataclass(frozen=True)
class Ledger:
    """The files with the private steps of clients, in a run's directory."""

    directory: Path

    def path(self, client: int) -> Path:
        return self.directory / FOLDER / f"{client}.json"

    def guard(self, experiment: Experiment, client: int, labeled: bool) -> Guard | None:
        """Return what makes a client's training private, if the experiment wants that."""
        if experiment.privacy is None or client == SERVER_ID:
            return None
        local, unlabeled = experiment.method.local, getattr(experiment.method, "epochs_unlabeled", None)
        epochs = local.epochs if labeled else unlabeled or local.epochs
        return Guard(experiment.privacy, epochs * experiment.rounds, self.history(client), epochs)

    def history(self, client: int) -> list[Steps]:
        """Return the steps of a client so far."""
        path = self.path(client)
        try:
            return [(float(a), float(b), int(n)) for a, b, n in json.loads(path.read_text())] if path.exists() else []
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"{path} cannot be read: {error}; nothing leaves before it can") from None

    def save(self, client: int, guard: Guard) -> float:
        """Keep a client's steps. Return the epsilon that it has spent, or raise BadInput if it is too much."""
        storage.make_folder(self.directory / FOLDER)
        storage.write(self.path(client), json.dumps(guard.history).encode())
        return guard.check_budget()

    def reply(self, job: Job, message: bytes) -> Outcome | None:
        """Return what a client replied when it was asked the same before, if it is kept."""
        path = self._reply(job, message)
        if not path.exists():
            return None
        head, _, payload = path.read_bytes().partition(b"\n")
        return Outcome(payload, json.loads(head))

    def keep(self, job: Job, message: bytes, outcome: Outcome) -> None:
        """Keep a reply, and drop those that no resume can ask for."""
        path = self._reply(job, message)
        storage.make_folder(path.parent)
        for old in path.parent.iterdir():
            if int(old.name.partition("-")[0]) <= job.checkpointed or old.stem.rpartition("-")[0] == called(job):
                old.unlink(missing_ok=True)
        storage.write(path, json.dumps(outcome.outside).encode() + b"\n" + (outcome.payload or b""))

    def _reply(self, job: Job, message: bytes) -> Path:
        digest = hashlib.sha256(job.task.encode() + b"\0" + message).hexdigest()
        return self.directory / FOLDER / str(job.client) / f"{called(job)}-{digest}.reply"

    def epsilon(self, client: int, delta: float) -> float:
        """Return the epsilon that a client has spent."""
        return spent(self.history(client), delta)


def called(job: Job) -> str:
    return f"{job.round}-{job.call}"
