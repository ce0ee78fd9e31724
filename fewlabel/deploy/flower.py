"""Flower's part: the ServerApp and the ClientApp that carry messages, and a SuperNode that fetches no code.

Every message is one ConfigRecord. A site gets an `order` (`messages.Order`), a `message` and perhaps `statistics`. It
sends an `upload`, or nothing if a task has nothing to send, or why there is no upload: `refused`, `failed`. Flower
starts a process for each message to a site, so PyTorch must not load here unless that process does the work itself.

Flower can carry code to sites. `python -m fewlabel.deploy.flower supernode` is Flower's SuperNode without that.
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
from fewlabel.deploy.site_process import Parts, ask, attempt
from fewlabel.engine.flower_messages import RECORD, answer, printable

# Flower carries this to nodes instead of an app's code: it points to the FewLabel that is installed there.
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


def write_app(folder: Path) -> Path:
    """Write the app that `flwr run` submits. Every installation of this version writes the same bytes."""
    app = folder / "fewlabel-app"
    app.mkdir(parents=True, exist_ok=True)
    (app / "pyproject.toml").write_bytes(app_file())
    return app


def app_file() -> bytes:
    return APP.format(version=version("fewlabel")).encode()


# The server


def run_server(grid: Grid, context: Context) -> None:
    """Play the rounds of the run in the directory that the run's configuration names."""
    from fewlabel.deploy.server import serve

    def say(text: str) -> None:
        print(f"fewlabel: {text}", flush=True)

    directory = Path(str(context.run_config["directory"]))
    serve(grid, directory, watch=lambda line: print(json.dumps(line), flush=True), say=say)


server_app = ServerApp()
server_app.main()(run_server)


# A site


def respond(message: Message, context: Context) -> Message:
    """Return a site's reply to any message. It comes from the site process, or from this one if there is none."""

    def reply() -> Parts:
        record, config = message.content.get(RECORD), context.node_config
        parts = dict(record) if isinstance(record, ConfigRecord) else {}
        if "socket" in config:
            return ask(Path(str(config["socket"])), parts)
        from fewlabel.deploy import site

        return site.reply(config, parts)

    return answer(message, **attempt(reply))


client_app = ClientApp()
client_app.query()(respond)
client_app.evaluate()(respond)
client_app.train()(respond)


# A site's node

POLL = (0.2, 3.0)  # seconds between two looks for messages: at first, and at most
FLOWER = "1.41.0"  # the version whose inner parts `run_only_installed_code` changes


class ForeignCode(FewLabelError):
    """A run that would bring code to a site."""


def supernode(arguments: list[str]) -> None:
    """Run Flower's SuperNode. It runs the FewLabel that is installed here, and no other code."""
    run_only_installed_code()
    poll_often()
    from flwr.supernode.cli import flower_supernode

    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()
    os._exit(1)  # the SuperLink has ended it, but one of its threads would keep this process alive


def poll_often() -> None:
    """Have a SuperNode in this process look for messages often after the last one, and then less and less often.

    Flower looks every three seconds, which would be most of a short round.
    """
    from flwr.supernode import start_client_internal as inner

    pull = inner._pull_and_store_message

    def wait(**more: Any) -> int:
        began = time.monotonic()
        while (run := pull(**more)) is None:
            time.sleep(min(max(POLL[0], (time.monotonic() - began) / 4), POLL[1]))
        return run

    vars(inner)["_pull_and_store_message"] = wait


def run_only_installed_code() -> None:
    """Keep a SuperNode in this process from fetching a bundle of code.

    A run passes only if it names the bundle that this FewLabel makes itself. The node gives its own copy of that bundle
    to the processes that it starts. (Flower's own `--trusted-entities` needs a SuperLink that passes signatures on, and
    the open one does not.)
    """
    if version("flwr") != FLOWER:
        raise BadInput(f"a site needs Flower {FLOWER}, and this is {version('flwr')}; pip install 'flwr=={FLOWER}'")
    from flwr.cli.build import build_fab_from_files
    from flwr.supercore.fab import Fab
    from flwr.supercore.run import Run
    from flwr.supernode import start_client_internal as inner

    content, _ = build_fab_from_files({"pyproject.toml": app_file()})
    here, own = version("fewlabel"), Fab(sha256(content).hexdigest(), content, {})
    pull = inner._pull_and_store_message

    def checked(run: Run) -> Run:
        """Return a run with our own code. Of what the server says about it, only its number and its state are kept."""
        if run.fab_hash != own.hash_str:
            raise ForeignCode(
                f"refused run {run.run_id}, which brings bundle {printable(run.fab_hash)}: this site executes only "
                f"{own.hash_str}, that of its own FewLabel {here}; the coordinator needs the same version"
            )
        app = replace(run, fab_id="fewlabel/fewlabel-app", fab_version=here, override_config={})
        return replace(app, primary_task_type="flwr-serverapp")

    def pull_own(*, receive: Any, get_run: Any, get_fab: Any, **more: Any) -> int | None:
        """Take Flower's step from a message to a task, in which it would learn of a run and fetch its bundle."""
        messages: list[Message] = []

        def kept() -> Any:
            received = receive()
            messages.extend(received[:1] if received else ())
            return received

        try:
            return pull(receive=kept, get_run=lambda run: checked(get_run(run)), get_fab=lambda *_: own, **more)
        except ForeignCode as error:
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
