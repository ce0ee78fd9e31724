"""What survives a kill: whole files, the newest checkpoint, and of each client the states that a resume may ask for."""

import errno
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from fewlabel.core import wire
from fewlabel.core.errors import StorageError
from fewlabel.core.storage import write
from fewlabel.engine import checkpoint
from fewlabel.engine.checkpoint import Checkpoints, ClientStates, Saved
from fewlabel.engine.conduct import Conduct
from fewlabel.engine.record import in_use


@dataclass(frozen=True)
class Note:
    text: str


@dataclass(frozen=True)
class Other:
    number: int


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_child(action: Callable[[], Any]) -> int | None:
    """Does something in a forked process and returns how that ended."""
    child = get_context("fork").Process(target=action)
    child.start()
    child.join(60)
    return child.exitcode


# --- write


def test_a_written_file_is_alone_in_its_folder(tmp_path: Path) -> None:
    write(tmp_path / "a", b"one")
    write(tmp_path / "a", b"two", durable=False)
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"two"


@pytest.mark.parametrize("operation", ["fsync", "rename"])
def test_a_write_that_fails_says_so_and_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path / "a", b"old")
    monkeypatch.setattr(os, operation, full)
    with pytest.raises(StorageError, match="No space left on device; make room"):
        write(tmp_path / "a", b"new")
    assert names(tmp_path) == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


@pytest.mark.parametrize("operation", ["fsync", "rename"])
def test_a_kill_within_a_write_leaves_the_old_file(tmp_path: Path, operation: str) -> None:
    def killed() -> None:
        setattr(os, operation, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write(tmp_path / "a", b"new")

    write(tmp_path / "a", b"old")
    assert in_child(killed) == -signal.SIGKILL
    assert (tmp_path / "a").read_bytes() == b"old"


# --- Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoint", Note, "0.1.0")


def saved(number: int) -> Saved[Note]:
    return Saved(number, Note(f"after {number}"), {"norm.running_mean": torch.arange(number) / 3})


def test_without_a_checkpoint_there_is_nothing_to_load(checkpoints: Checkpoints) -> None:
    assert checkpoints.load() is None


def test_a_checkpoint_is_read_back_to_the_bit(checkpoints: Checkpoints) -> None:
    checkpoints.save(7, checkpoints.pack(saved(7)))
    found = checkpoints.load()
    assert found is not None
    assert (found.round, found.state) == (7, Note("after 7"))
    assert found.statistics is not None
    torch.testing.assert_close(found.statistics, saved(7).statistics, rtol=0, atol=0)
    checkpoints.save(8, checkpoints.pack(Saved(8, Note("no statistics"), None)))
    assert checkpoints.load() == Saved(8, Note("no statistics"), None)


def test_equal_checkpoints_have_equal_names(checkpoints: Checkpoints) -> None:
    checkpoints.save(7, checkpoints.pack(saved(7)))
    first = names(checkpoints.folder)
    checkpoints.save(7, checkpoints.pack(saved(7)))
    assert names(checkpoints.folder) == first


def test_a_checkpoint_replaces_the_older_one_and_what_a_kill_left_aside(checkpoints: Checkpoints) -> None:
    checkpoints.save(9, checkpoints.pack(saved(9)))
    (checkpoints.folder / ".round-000010-0123456789abcdef.safetensors.4711").write_bytes(b"half")
    checkpoints.save(10, checkpoints.pack(saved(10)))
    assert [name[:13] for name in names(checkpoints.folder)] == ["round-000010-"]


def test_the_newest_checkpoint_is_taken_when_a_kill_left_two(checkpoints: Checkpoints) -> None:
    checkpoints.save(9, checkpoints.pack(saved(9)))
    older = next(checkpoints.folder.iterdir())
    data = older.read_bytes()
    checkpoints.save(10, checkpoints.pack(saved(10)))
    older.write_bytes(data)
    found = checkpoints.load()
    assert found is not None
    assert found.round == 10


def test_a_failed_save_keeps_the_checkpoint_before(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoints.save(2, checkpoints.pack(saved(2)))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        checkpoints.save(4, checkpoints.pack(saved(4)))
    found = checkpoints.load()
    assert found is not None
    assert found.round == 2


@pytest.mark.parametrize("at", [0, 100, -1])
def test_a_damaged_checkpoint_is_told_from_a_whole_one(checkpoints: Checkpoints, at: int) -> None:
    checkpoints.save(7, checkpoints.pack(saved(7)))
    path = next(checkpoints.folder.iterdir())
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(StorageError, match=rf"{path.name} is damaged"):
        checkpoints.load()


def test_a_checkpoint_cut_short_is_damaged(checkpoints: Checkpoints) -> None:
    checkpoints.save(7, checkpoints.pack(saved(7)))
    path = next(checkpoints.folder.iterdir())
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="is damaged"):
        checkpoints.load()


def test_another_format_names_the_version_that_wrote_it(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(checkpoint, "FORMAT", "4")
        other = Checkpoints(checkpoints.folder, Note, "9.9")
        other.save(7, other.pack(saved(7)))
    with pytest.raises(StorageError, match=r"written by fewlabel 9\.9 in another format \(4, here 3\)"):
        checkpoints.load()


def test_a_checkpoint_of_0_1_has_no_shipped_model(checkpoints: Checkpoints) -> None:
    """Its format is 1, and it has the first three parts."""
    old = checkpoints.kinds["1"](7, saved(7).state, None)
    checkpoints.save(7, wire.pack(old, header={"format": "1", "version": "0.1.0"}))
    assert checkpoints.load() == saved(7)._replace(statistics=None, shipped=None)


def test_a_checkpoint_of_format_2_knows_nothing_about_clients(checkpoints: Checkpoints) -> None:
    old = checkpoints.kinds["2"](7, saved(7).state, None, {"w": torch.ones(1)})
    checkpoints.save(7, wire.pack(old, header={"format": "2", "version": "0.2.0"}))
    found = checkpoints.load()
    assert found is not None
    assert found.conduct is None
    assert found.shipped == {"w": torch.ones(1)}


def test_a_checkpoint_keeps_what_is_known_about_clients(checkpoints: Checkpoints) -> None:
    conduct = Conduct({"local_update, with labels, parameter": (0.5, 2.0)}, {3: (1, 4)})
    checkpoints.save(7, checkpoints.pack(saved(7)._replace(conduct=conduct)))
    found = checkpoints.load()
    assert found is not None
    assert found.conduct == conduct


def test_a_checkpoint_of_another_method_does_not_fit(checkpoints: Checkpoints) -> None:
    checkpoints.save(7, checkpoints.pack(saved(7)))
    with pytest.raises(StorageError, match="does not fit this method"):
        Checkpoints(checkpoints.folder, Other, "0.1.0").load()


# --- ClientStates


class Client:
    """One client's states, by (round, call)."""

    def __init__(self, folder: Path) -> None:
        self.states = ClientStates(folder)

    def save(self, round: int, call: int, checkpointed: int) -> None:
        self.states.save(3, round, call, Note(f"{round}.{call}"), Note, checkpointed)

    def load(self, round: int, call: int) -> str | None:
        found = self.states.load(3, round, call, Note)
        return None if found is None else found.text

    def keys(self) -> list[str]:
        return [f"{key[0]}.{key[1]}" for key, _ in self.states._files(3)]


@pytest.fixture
def client(tmp_path: Path) -> Client:
    return Client(tmp_path / "clients")


def test_a_client_that_was_never_asked_has_no_state(client: Client) -> None:
    assert client.load(1, 0) is None


def test_a_job_starts_from_the_newest_state_before_its_own_key(client: Client) -> None:
    client.save(1, 0, checkpointed=0)
    client.save(1, 1, checkpointed=0)
    client.save(4, 0, checkpointed=0)
    assert client.load(9, 0) == "4.0"
    assert client.load(4, 1) == "4.0"
    assert client.load(4, 0) == "1.1"


def test_a_job_drops_the_states_of_its_own_key_and_later(client: Client) -> None:
    client.save(1, 0, checkpointed=1)
    client.save(2, 0, checkpointed=1)
    client.save(2, 1, checkpointed=1)
    assert client.load(2, 0) == "1.0"
    assert client.keys() == ["1.0"]


def test_states_of_clients_do_not_mix(tmp_path: Path) -> None:
    states = ClientStates(tmp_path)
    states.save(1, 1, 0, Note("of 1"), Note, 0)
    states.save(11, 1, 0, Note("of 11"), Note, 0)
    assert states.load(1, 2, 0, Note) == Note("of 1")
    assert states.load(2, 2, 0, Note) is None
    assert states.load(11, 1, 0, Note) is None
    assert states.load(1, 2, 0, Note) == Note("of 1")


def test_what_a_kill_left_aside_is_no_state(client: Client) -> None:
    client.save(1, 0, checkpointed=0)
    (client.states.folder / "3" / ".000002-0000.safetensors.4711").write_bytes(b"half")
    assert client.load(3, 0) == "1.0"


def test_of_past_rounds_the_checkpointed_and_the_last_complete_one_are_kept(client: Client) -> None:
    """While round r runs, a resume may start from the checkpoint or from round r - 1, whose own is yet to come."""
    for number in (1, 2, 3):
        client.save(number, 0, checkpointed=0)
    assert client.keys() == ["2.0", "3.0"]  # 0 starts from nothing, and 1 is behind the last complete round
    client.save(4, 0, checkpointed=2)
    assert client.keys() == ["2.0", "3.0", "4.0"]
    client.save(5, 0, checkpointed=2)
    assert client.keys() == ["2.0", "4.0", "5.0"]
    client.save(6, 0, checkpointed=4)
    assert client.keys() == ["4.0", "5.0", "6.0"]


def test_a_state_is_kept_however_long_ago_the_client_was_asked(client: Client) -> None:
    client.save(1, 0, checkpointed=0)
    client.save(9, 0, checkpointed=8)
    assert client.keys() == ["1.0", "9.0"]
    client.save(20, 0, checkpointed=18)
    assert client.keys() == ["9.0", "20.0"]


def test_of_several_calls_in_a_round_the_one_before_is_kept_so_a_job_can_be_repeated(client: Client) -> None:
    client.save(3, 0, checkpointed=2)
    client.save(3, 1, checkpointed=2)
    for call in (0, 1, 2):
        client.save(5, call, checkpointed=4)
    assert client.keys() == ["3.1", "5.1", "5.2"]
    assert client.load(5, 2) == "5.1"


@pytest.mark.parametrize("seed", range(20))
def test_a_client_sees_the_same_states_however_often_it_is_killed(tmp_path: Path, seed: int) -> None:
    """The round loop in small: the checkpoint of a round, if it is due, is written once the next round is complete."""
    chance = random.Random(seed)
    asked = [chance.choice([0, 0, 1, 2, 3]) for _ in range(12)]  # jobs of this client in each round
    keys = [(round, call) for round, jobs in enumerate(asked) for call in range(jobs)]
    client, kills, checkpointed, round = Client(tmp_path), 0, 0, 1
    while round < len(asked):
        for call in range(asked[round]):
            before = [key for key in keys if key < (round, call) and key[0] > 0]
            expected = f"{before[-1][0]}.{before[-1][1]}" if before else None
            assert client.load(round, call) == expected, f"after {kills} kills, at {round}.{call} from {checkpointed}"
            client.save(round, call, checkpointed)
            if kills < 8 and chance.random() < 0.15:
                kills += 1
                if chance.random() < 0.3:  # not killed but failed: what is complete is kept
                    checkpointed = round - 1
                round = checkpointed
                break
        else:
            if chance.random() < 0.4:
                checkpointed = round - 1
        round += 1


# --- in_use


def test_a_directory_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    with in_use(tmp_path), pytest.raises(StorageError, match="is in use by another process"), in_use(tmp_path):
        pass
    with in_use(tmp_path):
        pass


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    def killed() -> None:
        with in_use(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(killed) == -signal.SIGKILL
    with in_use(tmp_path):
        pass


def test_a_lock_is_seen_by_another_process(tmp_path: Path) -> None:
    def intrude() -> None:
        try:
            with in_use(tmp_path):
                os._exit(0)
        except StorageError:
            os._exit(4)

    with in_use(tmp_path):
        assert in_child(intrude) == 4
    assert in_child(intrude) == 0
