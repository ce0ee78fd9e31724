"""Probe: a method whose clients do what its messages say, to look into an executor; and Trap, to kill a worker."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fewlabel.core.federation import Model, Site
from fewlabel.core.tasks import on_client
from fewlabel.learn.optim import Local
from tests.keeper import Keeper, Memory, Update
from tests.toys import Still


@dataclass(frozen=True)
class Order:
    """What a client is to do, in this order. Files stand for events, so that no test depends on time."""

    name: str = ""
    touch: str = ""
    wait_for: str = ""
    fail: str = ""
    die: bool = False
    echo: Tensor | None = None


@dataclass(frozen=True)
class Done:
    """The orders that this client has carried out in its life, this one the last, and which process did it."""

    names: tuple[str, ...]
    process: int
    echo: Tensor | None = None


@dataclass(frozen=True)
class Probe(Still):
    """Does as it is told."""

    local: Local = Local()  # unused, but every small run sets it

    @on_client
    def obey(self, site: Site[Done], order: Order) -> Done:
        if order.touch:
            Path(order.touch).touch()
        if order.wait_for:
            wait_for(Path(order.wait_for))
        if order.fail:
            raise ValueError(order.fail)
        if order.die:
            os._exit(7)
        before = site.state.names if site.state else ()
        site.state = Done((*before, order.name), os.getpid())
        return Done(site.state.names, os.getpid(), order.echo)


@dataclass(frozen=True)
class Trap(Keeper):
    """Keeper, but where the file `trap` exists one client writes its process into it and hangs, or raises."""

    trap: str = ""
    client: int = 2
    at: int = 4  # round

    @on_client
    def local_update(self, site: Site[Memory], msg: Model) -> Update:
        trap = Path(self.trap)
        if (site.info.id, site.round) == (self.client, self.at) and trap.exists():
            if trap.read_text() == "raise":
                raise ValueError("trapped")
            trap.write_text(str(os.getpid()))
            time.sleep(60)
            raise AssertionError("nobody came to kill this process")
        return super().local_update(site, msg)


def wait_for(path: Path, content: bool = False) -> str:
    """Until a file is there, or has content; a minute at most."""
    deadline = time.monotonic() + 60
    while not path.exists() or (content and not path.read_text()):
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)
    return path.read_text()
