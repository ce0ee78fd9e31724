"""Takes replies from Flower, each by itself: one that cannot be read, or never comes whole, is no other site's problem.

Flower takes a reply as soon as it is announced, waits until all parts of it are there, and then reads them. A member
decides what the parts are, and when they come. If all replies were taken in one call, one member could end a run by
parts that nobody can read, and keep everybody waiting by parts that never come.
"""

import threading
import time
from collections.abc import Iterable
from queue import Empty, SimpleQueue
from typing import Any

from google.protobuf.message import DecodeError

from fewlabel.core.errors import BadInput
from fewlabel.engine import flower_messages

PAUSE = (0.05, 1.0)  # seconds between two looks for a reply: at first, and at most
UNREADABLE = (DecodeError, ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError)  # by content


class Pulls:
    """Takes the replies to messages, with a thread for each message. One that waits for its parts ends with us."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid
        self.wanted = frozenset[str]()
        self.begun = set[str]()
        self.found: SimpleQueue[tuple[str, Any]] = SimpleQueue()
        self.arrived = threading.Event()

    def receive(self, sent: Iterable[str]) -> list[tuple[str, Any]]:
        """Return the replies that have come to these messages. In place of an unreadable one stands an error.

        Nobody waits for replies to other messages any more.
        """
        self.wanted = frozenset(sent)
        self.begun &= self.wanted
        for name in self.wanted - self.begun:
            self.begun.add(name)
            threading.Thread(target=self.pull, args=(name,), daemon=True).start()
        replies = list[tuple[str, Any]]()
        self.arrived.clear()
        while True:
            try:
                name, reply = self.found.get_nowait()
            except Empty:
                return replies
            if isinstance(reply, Exception) and not isinstance(reply, BadInput):
                raise reply
            if name in self.wanted:
                replies.append((name, reply))

    def pull(self, name: str) -> None:
        """Look for the reply to a message until it is there, or nobody wants it any more."""
        pause = PAUSE[0]
        while name in self.wanted:
            reply: Any = None
            try:
                reply = next((one for _, one in flower_messages.receive(self.grid, [name])), None)
            except UNREADABLE as error:
                reply = BadInput(f"its reply is refused: Flower cannot read it ({type(error).__name__})")
            except Exception as error:  # the SuperLink is gone: the run cannot go on
                reply = error
            if reply is not None:
                self.found.put((name, reply))
                self.arrived.set()
                return
            time.sleep(pause)
            pause = min(1.5 * pause, PAUSE[1])

    def wait(self, seconds: float) -> None:
        """Wait until a reply is there, but not longer than this."""
        self.arrived.wait(seconds)
