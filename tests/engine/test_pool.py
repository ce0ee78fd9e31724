"""Executors: jobs of a client in their order, replies in job order, few under way, and nothing left when they close."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest
import torch

from fewlabel.core import wire
from fewlabel.core.federation import ClientError, Reply, Site
from fewlabel.core.tasks import on_client
from fewlabel.data import datasets
from fewlabel.engine.executor import Executor, Job
from fewlabel.engine.pool import Pool, WorkerDied
from fewlabel.engine.rounds import Server
from fewlabel.engine.run import execute
from fewlabel.engine.serial import Serial
from tests.data.test_datasets import mapped
from tests.probe import Done, Order, Probe, wait_for

Fed = Callable[..., Server]


@pytest.fixture
def fed(run_dir: Callable[..., Path]) -> Fed:
    """A federation of five clients that do as they are told, whose work an executor does."""
    return lambda executor: Server(run_dir("method=tests.probe:Probe"), executor)


@pytest.fixture(params=["serial", "pool"])
def executor(request: pytest.FixtureRequest) -> Executor:
    return Serial() if request.param == "serial" else request.getfixturevalue("pool")


def obey(fed: Server, orders: Iterable[tuple[int, Order]]) -> Iterator[Reply[Done]]:
    return fed.run(fed.method.obey, ((fed.clients[client], order) for client, order in orders))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE}


def descriptors() -> list[str]:
    """What a pool may have open in this process. Data sets are mapped files and stay as long as someone uses them."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(target for target in found if target.startswith(("socket:", "pipe:", "/memfd:")))


class Counted:
    """An executor that counts the jobs in its hands."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.window = executor, executor.window
        self.wait, self.discard, self.tickets = executor.wait, executor.discard, executor.tickets
        self.most = 0

    def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
        ticket = self.executor.submit(job, message, statistics)
        self.most = max(self.most, self.held)
        return ticket

    @property
    def held(self) -> int:
        """Jobs under way, or done and not collected."""
        return len(self.tickets.under_way) + len(self.tickets.outcomes)


# --- order


def test_every_job_has_its_reply_in_job_order(fed: Fed, executor: Executor) -> None:
    clients = [4, 0, 3, 3, 1, 0, 2]
    replies = list(obey(fed(executor), ((c, Order(name=str(n))) for n, c in enumerate(clients))))
    assert [reply.job for reply in replies] == list(range(7))
    assert [reply.client.id for reply in replies] == clients
    assert [reply.upload.names[-1] for reply in replies] == list("0123456")


def test_a_client_drawn_twice_goes_on_from_where_it_was(fed: Fed, executor: Executor) -> None:
    replies = list(obey(fed(executor), [(0, Order("a")), (1, Order("b")), (0, Order("c")), (0, Order("d"))]))
    assert [reply.upload.names for reply in replies] == [("a",), ("b",), ("a", "c"), ("a", "c", "d")]


def test_a_state_lives_on_in_the_next_run_and_round(fed: Fed, executor: Executor) -> None:
    world = fed(executor)
    list(obey(world, [(0, Order("a")), (0, Order("b"))]))
    assert next(obey(world, [(0, Order("c"))])).upload.names == ("a", "b", "c")
    world._open, world.round = False, 1
    world.finish_round(None)
    world.round = 2
    assert next(obey(world, [(0, Order("d"))])).upload.names == ("a", "b", "c", "d")


def test_a_second_job_of_a_client_waits_for_the_first_though_a_worker_is_free(
    fed: Fed, pool: Pool, tmp_path: Path
) -> None:
    """Of two workers one waits for client 1, so the other is free for client 0's second job, and must not take it."""
    orders = [
        (0, Order("first", wait_for=str(tmp_path / "go"))),
        (0, Order("second")),
        (1, Order("go", touch=str(tmp_path / "go"))),
    ]
    first, second, _ = obey(fed(pool), orders)
    assert first.upload.names == ("first",)
    assert second.upload.names == ("first", "second")


def test_replies_come_in_job_order_although_later_jobs_are_done_first(fed: Fed, pool: Pool, tmp_path: Path) -> None:
    late = str(tmp_path / "late")
    orders = [(0, Order("0", wait_for=late)), (1, Order("1")), (2, Order("2")), (3, Order("3", touch=late))]
    replies = list(obey(fed(pool), orders))
    assert [reply.upload.names for reply in replies] == [("0",), ("1",), ("2",), ("3",)]


def test_all_workers_take_part(fed: Fed, pool: Pool, tmp_path: Path) -> None:
    meet = [str(tmp_path / name) for name in "ab"]
    orders = [(0, Order(touch=meet[0], wait_for=meet[1])), (1, Order(touch=meet[1], wait_for=meet[0]))]
    processes = {reply.upload.process for reply in obey(fed(pool), orders)}
    assert len(processes) == 2
    assert os.getpid() not in processes


@dataclass(frozen=True)
class Mapper(Probe):
    """Says which file a site's pixels lie in, when both workers are at it."""

    @on_client
    def where(self, site: Site[Done], order: Order) -> Done:
        data = site.labeled or site.unlabeled
        assert data is not None
        next(iter(data.batches(size=2)))
        Path(order.touch).touch()
        wait_for(Path(order.wait_for))
        return Done((str(mapped(data._images.pixels)),), os.getpid())


def test_workers_share_the_images_of_one_file(run_dir: Callable[..., Path], pool: Pool, tmp_path: Path) -> None:
    fed, meet = (
        Server(run_dir("method=tests.engine.test_pool:Mapper"), pool),
        [str(tmp_path / name) for name in "ab"],
    )
    orders = [Order(touch=mine, wait_for=other) for mine, other in (meet, meet[::-1])]
    replies = [reply.upload for reply in fed.run(fed.method.where, zip(fed.clients[:2], orders, strict=True))]
    assert len({reply.process for reply in replies}) == 2
    assert {reply.names for reply in replies} == {(str(datasets.cache_folder() / "digits-16px-v2/train-images.npy"),)}


# --- window


def test_a_run_pulls_few_jobs_ahead_of_the_reply_in_hand(fed: Fed, executor: Executor) -> None:
    pulled, counted = 0, Counted(executor)

    def orders() -> Iterator[tuple[int, Order]]:
        nonlocal pulled
        for number in range(30):
            pulled += 1
            yield number % 5, Order(str(number))

    replies = obey(fed(counted), orders())
    assert pulled == 0
    for number, _ in enumerate(replies):
        assert pulled <= number + executor.window
        assert counted.held < executor.window  # one of the window is in hand
    assert pulled == 30
    assert counted.held == 0
    assert counted.most == executor.window


def test_a_client_with_all_jobs_has_one_under_way(fed: Fed, pool: Pool) -> None:
    class OneAtATime(Counted):
        def submit(self, job: Job, message: bytes, statistics: bytes | None) -> int:
            assert not pool.tickets.under_way
            return super().submit(job, message, statistics)

    replies = list(obey(fed(OneAtATime(pool)), ((2, Order(str(n))) for n in range(8))))
    assert replies[-1].upload.names == tuple("01234567")


# --- open runs


def test_a_run_not_consumed_to_its_end_is_an_error_when_the_round_ends(fed: Fed, executor: Executor) -> None:
    world = fed(executor)
    next(obey(world, [(0, Order()), (1, Order())]))
    with pytest.raises(RuntimeError, match="must be consumed to their end"):
        world.finish_round(None)
    executor.discard()


def test_a_run_never_begun_is_an_error_when_the_round_ends(fed: Fed, executor: Executor) -> None:
    world = fed(executor)
    obey(world, [(0, Order())])
    with pytest.raises(RuntimeError, match="must be consumed to their end"):
        world.finish_round(None)


def test_a_second_run_opened_meanwhile_is_an_error(fed: Fed, executor: Executor) -> None:
    world = fed(executor)
    replies = obey(world, [(0, Order()), (1, Order())])
    next(replies)
    with pytest.raises(RuntimeError, match="must be consumed to their end"):
        obey(world, [(2, Order())])
    assert len(list(replies)) == 1
    assert len(list(obey(world, [(2, Order())]))) == 1


# --- many runs, one executor


def test_an_executor_serves_runs_one_after_the_other(fed: Fed, executor: Executor) -> None:
    for _ in range(3):
        replies = list(obey(fed(executor), [(0, Order("a")), (0, Order("b"))]))
        assert [reply.upload.names for reply in replies] == [("a",), ("a", "b")]


def test_an_executor_serves_runs_side_by_side(fed: Fed, executor: Executor) -> None:
    worlds = [fed(executor), fed(executor)]
    runs = [
        obey(world, [(n % 5, Order(f"{name}{n}")) for n in range(10)]) for name, world in zip("ab", worlds, strict=True)
    ]
    for number, replies in enumerate(zip(*runs, strict=True)):
        before = [number - 5] if number >= 5 else []
        for name, reply in zip("ab", replies, strict=True):
            assert reply.upload.names == tuple(f"{name}{n}" for n in [*before, number])


# --- errors


def test_a_task_that_raises_is_a_client_error_from_its_own_traceback(fed: Fed, executor: Executor) -> None:
    world = fed(executor)
    world.round = 2
    replies = obey(world, [(0, Order("fine")), (3, Order(fail="no such luck")), (1, Order("after"))])
    assert next(replies).upload.names == ("fine",)
    with pytest.raises(ClientError, match="client 3 failed in 'obey' of round 2: ValueError: no such luck") as caught:
        next(replies)
    assert (caught.value.client, caught.value.task, caught.value.round) == (3, "obey", 2)
    assert "raise ValueError(order.fail)\nValueError: no such luck" in str(caught.value.__cause__)
    executor.discard()
    assert [r.upload.names for r in obey(fed(executor), [(3, Order("again"))])] == [("again",)]


def test_a_state_is_kept_only_if_the_task_succeeds(fed: Fed, executor: Executor) -> None:
    world = fed(executor)
    list(obey(world, [(0, Order("a"))]))
    with pytest.raises(ClientError):
        list(obey(world, [(0, Order(fail="b"))]))
    executor.discard()
    world._open = False
    assert next(obey(world, [(0, Order("c"))])).upload.names == ("a", "c")


def test_discard_forgets_jobs_under_way_and_done(fed: Fed, pool: Pool, tmp_path: Path) -> None:
    """The first job cannot end before the second has; both are forgotten, one of them still under way."""
    meet = str(tmp_path / "meet")
    replies = obey(fed(pool), [(0, Order("0")), (1, Order("1", wait_for=meet)), (2, Order("2", touch=meet))])
    next(replies)
    pool.discard()
    assert not pool.tickets.under_way
    assert not pool.tickets.outcomes


@pytest.mark.parametrize("size", [0, 1, 50_000_000])
def test_messages_of_any_size_pass(fed: Fed, executor: Executor, size: int) -> None:
    echo = torch.arange(251, dtype=torch.uint8).repeat(size // 251 + 1)[:size]
    for reply in obey(fed(executor), [(0, Order(echo=echo)), (1, Order(echo=echo + 1))]):
        assert reply.upload.echo is not None
        assert torch.equal(reply.upload.echo, echo + reply.job)


def test_outcomes_wait_unread_however_much_their_workers_do_meanwhile(fed: Fed, pool: Pool, tmp_path: Path) -> None:
    run, last = str(fed(pool).directory), tmp_path / "last"
    tickets = {}
    for number in range(8):
        order = Order(echo=torch.full([1000 * (8 - number)], number), touch=str(last) if number == 7 else "")
        job = Job(run, "client", "obey", client=number % 5, round=number)
        tickets[pool.submit(job, wire.pack(order), None)] = order
    wait_for(last)
    while not all(pool.tickets.ready(ticket) for ticket in tickets):
        pool.wait()
    for ticket, order in tickets.items():
        echo = wire.unpack(Done, pool.tickets.collect(ticket).payload or b"").echo
        assert echo is not None
        assert order.echo is not None
        assert torch.equal(echo, order.echo)


# --- death


def test_a_worker_that_ends_in_its_task_is_named_with_client_task_and_round(fed: Fed) -> None:
    with Pool(2) as own:
        world = fed(own)
        world.round = 3
        with pytest.raises(WorkerDied, match=r"died \(exit 7\) while client 4 was at 'obey' of round 3; resume"):
            list(obey(world, [(0, Order()), (4, Order(die=True)), (1, Order())]))


def test_a_worker_killed_while_idle_is_noticed(fed: Fed) -> None:
    with Pool(1) as own:
        list(obey(fed(own), [(0, Order())]))
        os.kill(own._processes[0].pid or 0, signal.SIGKILL)
        own._processes[0].join()
        with pytest.raises(WorkerDied, match=r"killed by signal 9\) while no job was in its hands"):
            list(obey(fed(own), [(0, Order())]))


def test_a_pool_whose_worker_died_refuses_more_work_and_holds_nothing(fed: Fed) -> None:
    before = children(), descriptors()
    own = Pool(2)
    with pytest.raises(WorkerDied):
        list(obey(fed(own), [(0, Order(die=True))]))
    assert (children(), descriptors()) == before
    with pytest.raises(WorkerDied, match="cannot be reached"):
        own.wait()
    with pytest.raises(WorkerDied, match="cannot be reached"):
        list(obey(fed(own), [(0, Order())]))
    own.close()
    assert (children(), descriptors()) == before


# --- close


@pytest.mark.parametrize("jobs", [0, 7])
def test_closing_leaves_no_process_and_no_open_file(fed: Fed, jobs: int) -> None:
    before = children(), descriptors()
    with Pool(2) as own:
        assert len(children() - before[0]) == 2
        list(obey(fed(own), ((n % 5, Order(echo=torch.ones(n))) for n in range(jobs))))
    assert (children(), descriptors()) == before
    own.close()


def test_closing_ends_jobs_under_way(fed: Fed, tmp_path: Path) -> None:
    before, begun, never = (children(), descriptors()), tmp_path / "begun", str(tmp_path / "never")
    own = Pool(2)
    replies = obey(
        fed(own), [(0, Order()), (1, Order(touch=str(begun), wait_for=never)), (2, Order(echo=torch.ones(9)))]
    )
    next(replies)
    wait_for(begun)
    own.close()
    assert (children(), descriptors()) == before


def test_a_pool_closes_in_peace_though_a_younger_one_inherited_its_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[str] = []
    first = Pool(2)
    with Pool(2):
        monkeypatch.setattr(BaseProcess, "kill", lambda process: killed.append(process.name))
        first.close()
    assert not killed


def test_workers_do_not_inherit_work_from_a_pool_under_way(fed: Fed) -> None:
    with Pool(1) as first:
        replies = obey(fed(first), ((0, Order(str(n))) for n in range(6)))
        next(replies)
        with Pool(1) as second:
            assert [r.upload.names for r in obey(fed(second), [(0, Order("own"))])] == [("own",)]
        assert [reply.upload.names[-1] for reply in replies] == list("12345")


def test_an_executor_of_the_callers_is_left_open(run_dir: Callable[..., Path], pool: Pool) -> None:
    before = children(), descriptors()
    for _ in range(2):
        execute(run_dir("rounds=1"), executor=pool)
    assert (children(), descriptors()) == before


def test_a_job_that_cannot_be_sent_is_not_waited_for(fed: Fed, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lacks is a descriptor, say; `discard` would wait for its outcome forever."""
    with Pool(1) as own:
        world = fed(own)
        monkeypatch.setattr("fewlabel.engine.pool.parcel", lambda *_: (_ for _ in ()).throw(OSError(24, "too many")))
        with pytest.raises(OSError, match="too many"):
            list(obey(world, [(0, Order("a"))]))
        assert not own.tickets.under_way
        own.discard()
