"""What each client has spent of its privacy in a run. It survives kills, and steps that were repeated count again."""

import json
from dataclasses import dataclass
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.errors import StorageError
from fewlabel.engine.executor import SERVER_ID
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
        return Guard(experiment.privacy, epochs * experiment.rounds, self.history(client))

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

    def epsilon(self, client: int, delta: float) -> float:
        """Return the epsilon that a client has spent."""
        return spent(self.history(client), delta)
