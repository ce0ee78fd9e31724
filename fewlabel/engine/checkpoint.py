"""What survives a kill: the server's last complete round, and the state that each client keeps for itself.

Every file is written under another name and then renamed, so there is always a whole one.
"""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from fewlabel.core import storage, wire
from fewlabel.core.errors import StorageError
from fewlabel.core.tree import Tree
from fewlabel.engine import record
from fewlabel.engine.conduct import Conduct

FORMAT = "3"  # 1, of FewLabel 0.1, has no shipped model; 2 has no conduct
S = TypeVar("S")


class Saved(NamedTuple, Generic[S]):
    round: int
    state: S
    statistics: Tree | None  # BatchNorm's, where the experiment recomputes them
    shipped: Tree | None = None  # the mean over rounds, where the recipe has one
    conduct: Conduct | None = None  # what is known about clients


class Best(NamedTuple):
    """The best round on validation so far."""

    round: int
    score: float
    model: bytes | None  # packed; None if FewLabel 0.1 played the round, and did not keep it


class Checkpoints:
    """A run's checkpoint directory: the last round, and the model of the best round on validation so far.

    Each is a file named after its round and a digest of its bytes.
    """

    def __init__(self, folder: Path, state_kind: Any, version: str, rounds: int | None = None) -> None:
        self.folder, self.version, self.rounds = folder, version, rounds
        parts = [("round", int), ("state", state_kind), ("statistics", Tree | None)]
        later = [*parts, ("shipped", Tree | None)]
        self.kind = make_dataclass("Checkpoint", [*later, ("conduct", Conduct | None)], frozen=True)
        older = {"1": parts, "2": later}
        self.kinds = {form: make_dataclass("Checkpoint", each, frozen=True) for form, each in older.items()}
        self.kinds[FORMAT] = self.kind

    def pack(self, saved: Saved[Any]) -> bytes:
        """A round's state as it is now: what a method changes in place later is not part of it."""
        header = {"format": FORMAT, "version": self.version}
        if self.rounds is not None:
            header["rounds"] = str(self.rounds)
        return wire.pack(self.kind(*saved), header=header)

    def save(self, round: int, data: bytes, best: Best | None = None) -> None:
        self.folder.mkdir(exist_ok=True)
        paths = [self.folder / f"round-{round:06d}-{digest(data)}.safetensors"]
        if best is not None and best.model is not None:
            paths.append(self.folder / f"best-{best.round:06d}-{digest(best.model)}.safetensors")
            if not paths[1].exists():  # the best comes first: a kill may leave one too many, and never one too few
                storage.write(paths[1], best.model)
        storage.write(paths[0], data)
        for old in self.folder.iterdir():  # also what a kill left behind
            if old not in paths:
                old.unlink()

    def load_best(self, lines: Sequence[record.Line]) -> Best | None:
        """Return the best of the rounds with these lines."""
        if (line := record.chosen_on_validation(lines)) is None:
            return None
        found = sorted(self.folder.glob(f"best-{line['round']:06d}-*.safetensors"))
        models = [data for path in found if path.stem.endswith(digest(data := path.read_bytes()))]
        if found and not models:
            raise StorageError(f"{found[0]} is damaged: its content does not match its name; start the run anew")
        return Best(line["round"], record.validation_score(line) or 0.0, models[0] if models else None)

    def load(self) -> Saved[Any] | None:
        """Return the newest checkpoint, or None if there is none yet."""
        files = sorted(self.folder.glob("round-*.safetensors"), key=lambda path: int(path.name.split("-")[1]))
        if not files:
            return None
        path = files[-1]
        data = path.read_bytes()
        if not path.stem.endswith(digest(data)):
            raise StorageError(f"checkpoint {path} is damaged: its content does not match its name; start the run anew")
        header = wire.header(data)
        if header.get("format") not in self.kinds:
            raise StorageError(
                f"checkpoint {path} was written by fewlabel {header.get('version')} in another format "
                f"({header.get('format')}, here {FORMAT}); resume it with that version"
            )
        if self.rounds is not None and "rounds" in header:
            record.check_rounds(self.folder.parent, int(header["rounds"]), self.rounds)
        try:
            saved: Any = wire.unpack(self.kinds[header["format"]], data)
        except wire.WireError as error:
            raise StorageError(f"checkpoint {path} does not fit this method: {error}") from None
        more = getattr(saved, "shipped", None), getattr(saved, "conduct", None)
        return Saved(saved.round, saved.state, saved.statistics, *more)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


class ClientStates:
    """The private states of clients on disk, by (client, round, call).

    A job starts from the newest state before its own key, and drops later ones. So a round that is repeated after a
    kill starts from the same state as before. `durable` states also survive a power cut. Sites need this, because they
    cannot be asked to start anew with the server.
    """

    def __init__(self, folder: Path, durable: bool = False) -> None:
        self.folder, self.durable = folder, durable

    def load(self, client: int, round: int, call: int, kind: Any, device: torch.device = wire.CPU) -> Any | None:
        before = None
        for key, path in self._files(client):
            if key < (round, call):
                before = path
            else:
                path.unlink(missing_ok=True)
        try:
            return None if before is None else wire.unpack(kind, before.read_bytes(), device=device)
        except wire.WireError as error:
            raise StorageError(f"the client state {before} is damaged ({error}); start the run anew") from None

    def save(self, client: int, round: int, call: int, value: Any, kind: Any, checkpointed: int) -> None:
        """Store a state, and drop those that no resume can ask for again."""
        folder = self.folder / str(client)
        folder.mkdir(parents=True, exist_ok=True)
        storage.write(folder / f"{round:06d}-{call:04d}.safetensors", wire.pack(value, kind), durable=self.durable)
        # A state may be asked for again by a resume from the checkpoint, by a resume from the round before this one
        # (its checkpoint may be written as late as the end of this round), and by a repetition of this job.
        starts = ((checkpointed + 1, 0), (round, 0), (round, call))
        older = [(key, path) for key, path in self._files(client) if key < (round, call)]
        needed = {max((key for key, _ in older if key < start), default=None) for start in starts}
        for key, path in older:
            if key not in needed:
                path.unlink(missing_ok=True)

    def _files(self, client: int) -> list[tuple[tuple[int, int], Path]]:
        try:
            names = os.listdir(self.folder / str(client))
        except FileNotFoundError:
            return []
        whole = [name for name in names if name.endswith(".safetensors") and not name.startswith(".")]
        keys = {name: tuple(map(int, name.removesuffix(".safetensors").split("-"))) for name in whole}
        return sorted(((key[0], key[1]), self.folder / str(client) / name) for name, key in keys.items())
