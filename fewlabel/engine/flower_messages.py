"""How bytes travel in Flower's messages: named parts in one ConfigRecord, to sites and to the nodes of a simulation."""

import math
from collections.abc import Iterable
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fewlabel.core.errors import BadInput, FewLabelError
from fewlabel.core.errors import printable as printable

RECORD = "fewlabel"


class NoReply(FewLabelError):
    """An error that Flower sends instead of a site's reply."""


class TooLate(NoReply):
    """A site that was silent until its deadline."""


# What Flower's errors mean to people.
MEANING = {
    ErrorCode.LOAD_CLIENT_APP_EXCEPTION: "its FewLabel could not be started; the site's supernode.log says why",
    ErrorCode.CLIENT_APP_RAISED_EXCEPTION: "its FewLabel failed; the site's supernode.log says why",
    ErrorCode.NODE_UNAVAILABLE: "it is no longer connected",
    ErrorCode.CLIENT_APP_CRASHED: "its process ended before it had answered; the site's supernode.log may say why",
    ErrorCode.INVALID_FAB: "it refuses to run code of another FewLabel; both sides need the same version",
}


def send(grid: Grid, node: int, ttl: float, kind: str, group: str, **parts: bytes | str | None) -> str | None:
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


def parts_of(reply: Message | FewLabelError) -> dict[str, Any]:
    """Return all parts of a reply by name, none if it is not one of ours, or an error in its place."""
    found = None if isinstance(reply, FewLabelError) or reply.has_error() else reply.content.get(RECORD)
    return dict(found) if isinstance(found, ConfigRecord) else {}


def told(reply: Message | FewLabelError) -> dict[str, float]:
    """Return what a site tells beside its upload: the epsilon that it has `spent`, and whether none is left."""
    parts = parts_of(reply)
    none_left: dict[str, float] = {"spent": True} if "spent" in parts else {}
    try:
        epsilon = float(str(parts["epsilon"]))
    except (KeyError, ValueError):
        return none_left
    return none_left | ({"epsilon": epsilon} if 0 <= epsilon < math.inf else {})


def upload_of(reply: Message | FewLabelError, limit: int) -> bytes | None:
    """Return the upload in a site's reply. Raise an error with the reason if there is none, or if it is too large.

    An error that stands in place of a reply is raised, too.
    """
    if isinstance(reply, FewLabelError):
        raise reply
    if reply.has_error():
        if reply.error.code in (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
            raise TooLate("no reply came before the deadline")
        theirs = printable(reply.error.reason or str(reply.error.code))
        meaning = MEANING.get(reply.error.code, "Flower could not bring its reply")
        raise NoReply(f"{meaning} (Flower's words: {theirs.rstrip('.')})")
    found = reply.content.get(RECORD)
    if not isinstance(found, ConfigRecord):
        raise BadInput("its reply is not one of fewlabel's")
    if "refused" in found:
        raise BadInput(f"it refused: {printable(str(found['refused']))}")
    if "failed" in found:
        raise BadInput(f"its task failed: {printable(str(found['failed']))}")
    upload = found.get("upload")
    if upload is None:
        return None
    if not isinstance(upload, bytes):
        raise BadInput("its upload is refused: it is not bytes")
    if len(upload) > limit:
        raise BadInput(f"its upload is refused: it has {len(upload)} bytes, more than {limit}")
    return upload
