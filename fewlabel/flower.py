"""Flower: how messages travel between a server and its sites. One ServerApp, one ClientApp, and nothing heavy.

Every message is one ConfigRecord. To a site: `order` (an `apart.Order`), `message` and perhaps `statistics`; back:
`upload`, or nothing where a task has nothing to send, or why there is none: `refused`, `failed`. Flower starts a
process for each message to a site, so PyTorch loads here only where that process does the work itself.
"""

import json
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fewlabel import resident
from fewlabel.errors import BadInput, FewLabelError

RECORD = "fewlabel"

# What Flower carries to nodes in place of an app's code: a pointer to the FewLabel that is installed there.
APP = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "fewlabel-app"
version = "{version}"
description = "The FewLabel that is installed at each site."
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fewlabel"

[tool.flwr.app.components]
serverapp = "fewlabel.flower:server_app"
clientapp = "fewlabel.flower:client_app"

[tool.flwr.app.config]
directory = ""
"""


class Silent(FewLabelError):
    """A reply that Flower made up, because there is none."""


def write_app(folder: Path) -> Path:
    """The app that `flwr run` submits; the same bytes from every installation of this version."""
    app = folder / "fewlabel-app"
    app.mkdir(parents=True, exist_ok=True)
    (app / "pyproject.toml").write_text(APP.format(version=version("fewlabel")))
    return app


# The server


def send(grid: Grid, node: int, ttl: float, kind: str, group: str, **parts: bytes | None) -> str | None:
    """Sends a node the parts of a message; returns the name that its reply will have, or None if it cannot be sent."""
    record = ConfigRecord({name: part for name, part in parts.items() if part is not None})
    message = Message(RecordDict({RECORD: record}), node, kind, ttl=ttl, group_id=group)
    return next(iter(grid.push_messages([message])), None)


def receive(grid: Grid, sent: Iterable[str]) -> list[tuple[str, Message]]:
    """The replies that have come to these messages."""
    wanted = list(sent)
    replies = grid.pull_messages(wanted) if wanted else ()
    return [(r.metadata.reply_to_message_id, r) for r in replies if r.metadata.reply_to_message_id in wanted]


def upload_of(reply: Message, limit: int) -> bytes | None:
    """The bytes in a site's reply, whatever else it has put there."""
    if reply.has_error():
        raise Silent(f"Flower says: {printable(reply.error.reason or str(reply.error.code))}")
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


def printable(text: str) -> str:
    """What somebody else wrote, as a short text that can be shown."""
    short = " ".join(text.split())[:300]
    return "".join(letter if letter.isprintable() else "?" for letter in short)


def begin(grid: Grid, context: Context) -> None:
    """Runs what lies in the directory that the run's configuration names."""
    from fewlabel.fleet import serve

    serve(grid, Path(str(context.run_config["directory"])), watch=lambda line: print(json.dumps(line), flush=True))


server_app = ServerApp()
server_app.main()(begin)


# A site


def respond(message: Message, context: Context) -> Message:
    """A site's reply to any message; no error leaves it in any other way."""
    try:
        record = message.content.get(RECORD)
        parts = dict(record) if isinstance(record, ConfigRecord) else {}
        reply = resident.reply(context.node_config, parts)
    except Exception as error:
        print(f"fewlabel: {type(error).__name__}: {error}", flush=True)  # for the site's own eyes
        reply = {"failed": f"{type(error).__name__}, about which the site's own log says more"}
    return Message(RecordDict({RECORD: ConfigRecord(reply)}), reply_to=message)


client_app = ClientApp()
client_app.query()(respond)
client_app.train()(respond)
