"""How bytes travel in Flower's messages: named parts in one ConfigRecord, to sites and to the nodes of a simulation."""

from collections.abc import Iterable

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

RECORD = "fewlabel"


def send(grid: Grid, node: int, ttl: float, kind: str, group: str, **parts: bytes | None) -> str | None:
    """Send a node the parts of a message. Return the id of the message, or None if it cannot be sent."""
    record = ConfigRecord({name: part for name, part in parts.items() if part is not None})
    message = Message(RecordDict({RECORD: record}), node, kind, ttl=ttl, group_id=group)
    return next(iter(grid.push_messages([message])), None)


def receive(grid: Grid, sent: Iterable[str]) -> list[tuple[str, Message]]:
    """Return the replies that have come to these messages, by the id of the message."""
    wanted = list(sent)
    replies = grid.pull_messages(wanted) if wanted else ()
    return [(r.metadata.reply_to_message_id, r) for r in replies if r.metadata.reply_to_message_id in wanted]


def answer(message: Message, **parts: bytes | str | None) -> Message:
    """Return a node's reply to a message."""
    record = ConfigRecord({name: part for name, part in parts.items() if part is not None})
    return Message(RecordDict({RECORD: record}), reply_to=message)


def printable(text: str) -> str:
    """Shorten a text that somebody else wrote, and keep only letters that can be shown."""
    short = " ".join(text.split())[:300]
    return "".join(letter if letter.isprintable() else "?" for letter in short)
