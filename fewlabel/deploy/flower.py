"""Flower: how messages travel between a server and its sites. One ServerApp, one ClientApp, and nothing heavy.

Every message is one ConfigRecord. To a site: `order` (an `apart.Order`), `message` and perhaps `statistics`; back:
`upload`, or nothing where a task has nothing to send, or why there is none: `refused`, `failed`. Flower starts a
process for each message to a site, so PyTorch loads here only where that process does the work itself.

Flower can carry code to sites. `python -m fewlabel.deploy.flower supernode` is Flower's SuperNode with that taken out.
"""

import json
import os
import sys
import time
from dataclasses import replace
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid, ServerApp

from fewlabel.core.errors import BadInput, FewLabelError
from fewlabel.deploy import site_process
from fewlabel.engine.flower_messages import RECORD, answer, printable

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
serverapp = "fewlabel.deploy.flower:server_app"
clientapp = "fewlabel.deploy.flower:client_app"

[tool.flwr.app.config]
directory = ""
"""


class Silent(FewLabelError):
    """A reply that Flower made up, because there is none."""


def write_app(folder: Path) -> Path:
    """The app that `flwr run` submits; the same bytes from every installation of this version."""
    app = folder / "fewlabel-app"
    app.mkdir(parents=True, exist_ok=True)
    (app / "pyproject.toml").write_bytes(pointer())
    return app


def pointer() -> bytes:
    return APP.format(version=version("fewlabel")).encode()


# The server


def upload_of(reply: Message, limit: int) -> bytes | None:
    """The bytes in a site's reply, whatever else it has put there."""
    if reply.has_error():
        if reply.error.code in (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE):
            raise Silent("no reply came before the deadline")
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


def begin(grid: Grid, context: Context) -> None:
    """Runs what lies in the directory that the run's configuration names."""
    from fewlabel.deploy.nodes import serve

    def say(text: str) -> None:
        print(f"fewlabel: {text}", flush=True)

    directory = Path(str(context.run_config["directory"]))
    serve(grid, directory, watch=lambda line: print(json.dumps(line), flush=True), say=say)


server_app = ServerApp()
server_app.main()(begin)


# A site


def respond(message: Message, context: Context) -> Message:
    """A site's reply to any message; no error leaves it in any other way."""
    try:
        record = message.content.get(RECORD)
        parts = dict(record) if isinstance(record, ConfigRecord) else {}
        reply = site_process.reply(context.node_config, parts)
    except Exception as error:
        print(f"fewlabel: {type(error).__name__}: {error}", flush=True)  # for the site's own eyes
        reply = {"failed": f"{type(error).__name__}, about which the site's own log says more"}
    return answer(message, **reply)


client_app = ClientApp()
client_app.query()(respond)
client_app.evaluate()(respond)
client_app.train()(respond)


# A site's node

LOOK = (0.2, 3.0)  # seconds between two looks for messages: at first, and at most
FITTED = "1.41.0"  # the Flower whose inner parts `confine` knows


class Foreign(FewLabelError):
    """A run that would bring code to a site."""


def supernode(arguments: list[str]) -> None:
    """Flower's SuperNode, for the FewLabel that is installed here and no other code."""
    confine()
    hasten()
    from flwr.supernode.cli import flower_supernode

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()
    os._exit(1)  # the SuperLink wants no more of it, and a thread of its own would keep it as it is


def hasten() -> None:
    """From now on a SuperNode in this process looks for messages often after the last one, and ever more seldom then.

    Flower's own three seconds would be most of a short round.
    """
    from flwr.supernode import start_client_internal as inner

    pull = inner._pull_and_store_message

    def wait(**more: Any) -> int:
        began = time.monotonic()
        while (run := pull(**more)) is None:
            time.sleep(min(max(LOOK[0], (time.monotonic() - began) / 4), LOOK[1]))
        return run

    vars(inner)["_pull_and_store_message"] = wait


def confine() -> None:
    """From now on a SuperNode in this process fetches no bundle.

    A run passes if it names the bundle that this FewLabel makes itself, and what the node hands to the processes that
    it starts is the one made here. (Flower's own means, `--trusted-entities`, needs a SuperLink that passes signatures
    on, and the open one does not.)
    """
    if version("flwr") != FITTED:
        raise BadInput(f"a site needs Flower {FITTED}, and this is {version('flwr')}; pip install 'flwr=={FITTED}'")
    from flwr.cli.build import build_fab_from_files
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run
    from flwr.supernode import start_client_internal as inner

    content, _ = build_fab_from_files({"pyproject.toml": pointer()})
    here, own = version("fewlabel"), Fab(sha256(content).hexdigest(), content, {})
    pull = inner._pull_and_store_message

    def checked(run: Run) -> Run:
        """A run of our own code, of which the server says no more than its number and its state."""
        if run.fab_hash != own.hash_str:
            raise Foreign(
                f"refused run {run.run_id}, which brings bundle {printable(run.fab_hash)}: this site executes only "
                f"{own.hash_str}, that of its own FewLabel {here}; the coordinator needs the same version"
            )
        app = replace(run, fab_id="fewlabel/fewlabel-app", fab_version=here, override_config={})
        return replace(app, primary_task_type="flwr-serverapp")

    def pull_own(*, receive: Any, get_run: Any, get_fab: Any, **more: Any) -> int | None:
        """Flower's step from a server's message to a task, in which it learns of a run and fetches its bundle."""
        messages: list[Message] = []

        def kept() -> Any:
            received = receive()
            messages.extend(received[:1] if received else ())
            return received

        try:
            return pull(receive=kept, get_run=lambda run: checked(get_run(run)), get_fab=lambda *_: own, **more)
        except Foreign as error:
            print(f"fewlabel: {error}", file=sys.stderr, flush=True)
            reply = Message(Error(ErrorCode.INVALID_FAB, str(error)), reply_to=messages[0])
            inner._insert_message(reply, more["state"], more["object_store"])
            return messages[0].metadata.run_id

    vars(inner)["_pull_and_store_message"] = pull_own


if __name__ == "__main__":
    try:
        if sys.argv[1:2] != ["supernode"]:
            raise BadInput(
                "write `python -m fewlabel.deploy.flower supernode`, and what Flower's flower-supernode takes"
            )
        supernode(sys.argv[2:])
    except FewLabelError as failure:
        print(f"fewlabel: {failure}", file=sys.stderr)
        sys.exit(failure.exit_code)
