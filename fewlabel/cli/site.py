"""The commands of a site: it says what it has, checks it, and takes part by Flower's SuperNode and its own resident."""

import json
import os
import re
import shutil
import socket
import ssl
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fewlabel.cli.options import Kind, tell, words
from fewlabel.core import schema
from fewlabel.core.errors import BadInput, FewLabelError, RunFailed
from fewlabel.deploy import keys, processes

if TYPE_CHECKING:
    from fewlabel.deploy.site import Place

app = typer.Typer(suggest_commands=False, rich_markup_mode="rich")
FILE, ENROLMENT, RESIDENT, NODE = "site.toml", "enrolment.json", "resident", "supernode"
LEAST = 10**9  # bytes on the disk for what methods keep between rounds
LONGEST = 100  # bytes of a socket's path
RESTARTS = 3  # of its programs within a minute
DECLINED = re.compile(r"\[code: 412\] (.*)")  # by the front, with its reason
CONNECTED, REFUSED = "SuperNode ID: ", "[code: 2004]"  # what Flower's node says once it is, or if it cannot be now
PATIENCE = 90.0  # seconds to be let in since the first refusal: Flower counts a site as connected for one minute more
PAUSE = 10.0  # seconds until the next attempt

Directory = Annotated[Path, Argument(metavar="[DIR]", hidden=True)]


@dataclass(frozen=True)
class Site:
    """What site.toml says, beside its table [place] (an `apart.Place`)."""

    name: str
    trust: str  # folder, as the coordinator gave it
    key: str  # file


@app.callback(invoke_without_command=True)
def site(context: typer.Context) -> None:
    """Take part in a federation, with data that stay here.

    Examples:
      fewlabel site init
      fewlabel site check
      fewlabel site join
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def init(
    folder: Directory = Path("site"),
    trusted: Annotated[Path | None, Option("--trust", metavar="DIR", help="What the coordinator gave you.")] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="Of this site, for people.")] = None,
    client: Annotated[int | None, Option(metavar="N", min=0, help="Its number, agreed with the coordinator.")] = None,
    data: Annotated[
        Path | None, Option(metavar="PATH", help="Folder with a folder for each class, table with labels (csv), npz.")
    ] = None,
    kind: Annotated[Kind | None, Option(help="What PATH is; by default what it looks like.")] = None,
    state: Annotated[
        Path | None, Option(metavar="DIR", help="For what methods keep between rounds; by default below DIR.")
    ] = None,
    modules: Annotated[
        str, Option(metavar="A,B", help="Modules with methods or networks of your own that you trust.")
    ] = "",
) -> None:
    """Set up a site: its settings, its key and its enrolment.

    DIR is new, by default ./site. What is not given is asked for.
    Then send DIR/enrolment.json to the coordinator; the key stays here.

    Examples:
      fewlabel site init
      fewlabel site init north --trust trust --name north --client 0 --data images
    """
    processes.need_flower()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is there already and not empty; choose another directory")
    given = trusted or Path(asked("--trust", "Folder that the coordinator gave you"))
    federation = keys.read_trust(given)
    name = keys.named(name if name is not None else asked("--name", "Name of this site"))
    number = client if client is not None else int(asked("--client", "Number of this site", int))
    images = data or Path(asked("--data", "Images: a folder for each class, a table with labels (csv), or an npz"))
    if not images.exists():
        raise BadInput(f"there is no {images}; --data is where this site's images are")
    folder = folder.resolve()
    if len(str(folder / RESIDENT).encode()) > LONGEST:
        raise BadInput(f"{folder} is too long a path for a socket; choose one of at most {LONGEST - 9} bytes")
    state = (state or folder / "state").absolute()
    place: dict[str, Any] = {"client": number, "data": str(images.absolute()), "state": str(state)}
    optional = {"kind": str(kind or ""), "modules": modules, "methods": ", ".join(federation.methods)}
    optional["terms"] = str(folder / keys.TRUST)
    place |= {name: value for name, value in optional.items() if value}
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    shutil.copytree(given, folder / keys.TRUST)
    keys.new_key(folder / "key", ssh=True)
    write_site(folder, Site(name, str(folder / keys.TRUST), str(folder / "key")), place)
    wish = keys.enrol(folder / keys.TRUST, folder / "key", number, name)
    keys.put(folder / ENROLMENT, keys.document(asdict(wish)))
    print(f"'{name}' is set up as client {number} of '{federation.name}', by the key {keys.fingerprint(wish.key)}")
    print(f"send {folder / ENROLMENT} to the coordinator, and tell the key's fingerprint by another way")


def asked(flag: str, question: str, kind: type = str) -> Any:
    """What a person says; where there is none, the option that says it is missing."""
    if not sys.stdin.isatty():
        raise BadInput(f"site init needs {flag}")
    return typer.prompt(question, type=kind, err=True)


def write_site(folder: Path, site: Site, place: Mapping[str, Any]) -> None:
    import tomli_w

    keys.put(folder / FILE, tomli_w.dumps({**asdict(site), "place": place}).encode())


def read_site(folder: Path) -> tuple[Site, dict[str, Any]]:
    """A site's settings; those of its place are as yet unchecked, for that loads PyTorch."""
    processes.need_flower()
    try:
        table = tomllib.loads((folder / FILE).read_text())
    except FileNotFoundError:
        raise BadInput(f"{folder} holds no site; `fewlabel site init` sets one up") from None
    except ValueError as error:
        raise BadInput(f"{folder / FILE} is not TOML: {error}") from None
    place = table.pop("place", None)
    if not isinstance(place, dict):
        raise BadInput(f"{folder / FILE} lacks its table [place]")
    return schema.read(Site, table), place


@app.command()
def check(folder: Directory = Path("site")) -> None:
    """Check all that a site needs before it joins.

    A line for each check; the exit code is 2 if one fails.

    Examples:
      fewlabel site check
      fewlabel site check north
    """
    from fewlabel.deploy.site import Place

    os.umask(0o077)  # images that are decoded here are nobody else's
    folder = folder.resolve()
    site, table = read_site(folder)
    place, given = schema.read(Place, table), Path(site.trust)
    checks: dict[str, Callable[[], str]] = {
        "data": lambda: about_data(place, given),
        "disk": lambda: about_disk(Path(place.state)),
        "key": lambda: about_key(folder, Path(site.key)),
        "certificate": lambda: about_certificate(given),
        "connection": lambda: about_connection(given),
        "versions": lambda: about_versions(given),
    }
    failed = []
    for name, look in checks.items():
        try:
            print(f"ok      {name}: {look()}", flush=True)
        except (FewLabelError, OSError) as error:
            failed.append(name)
            print(f"failed  {name}: {error}", flush=True)
    if failed:
        raise BadInput(f"{', '.join(failed)} must be mended before the site can join")


def about_data(place: "Place", given: Path) -> str:
    from fewlabel.deploy.site import load_terms, site_world, testable
    from fewlabel.experiment import Experiment

    terms = load_terms(given)
    world = site_world(place, Experiment(), terms)
    share, labels = world.partition.shares[place.client], world.dataset.splits["train"].labels
    if not len(share):
        raise BadInput(f"{place.data} has no image")
    seen = len(set(labels[labels >= 0].tolist()))
    counts = f"{len(share.labeled):,} images with a label and {len(share.unlabeled):,} without"
    counts += f", {tested:,} to test on" if (tested := testable(world)) else ""
    return f"{counts}, of {seen} of {len(terms.classes)} classes, read at {terms.image_size}x{terms.image_size}"


def about_disk(state: Path) -> str:
    from fewlabel.report.terminal import size

    if not state.is_dir() or not os.access(state, os.W_OK | os.X_OK):
        raise BadInput(f"{state} is not a directory that can be written")
    if state.stat().st_mode & 0o077:
        raise BadInput(f"others may look into {state}; forbid it by: chmod 700 {state}")
    free = shutil.disk_usage(state).free
    if free < LEAST:
        raise BadInput(f"{state} has {size(free)} left, and methods may need {size(LEAST)}")
    return f"{size(free)} free in {state}, which nobody else may enter"


def about_key(folder: Path, key: Path) -> str:
    public = keys.public_half(keys.load_key(key))
    if not keys.same_key(public, keys.read_enrolment(folder / ENROLMENT).key):
        raise BadInput(f"{folder / ENROLMENT} is of another key than {key}")
    return f"{keys.fingerprint(public)}, which nobody else may read; joining tells whether it is enrolled"


def about_certificate(given: Path) -> str:
    found, federation = keys.load_certificate(given / f"{keys.CA}.pem"), keys.read_trust(given)
    if not found.not_valid_before_utc <= keys.now() <= found.not_valid_after_utc:
        raise BadInput(f"it is not valid now (but until {found.not_valid_after_utc:%Y-%m-%d}); is the clock right?")
    return f"of '{federation.name}', valid until {found.not_valid_after_utc:%Y-%m-%d}"


class Away(BadInput):
    """A server that may yet be there."""


def about_connection(given: Path) -> str:
    """Whether the server is there, and is the one that the coordinator named."""
    address = keys.read_trust(given).address
    host, port = keys.host_and_port(address)
    context = ssl.create_default_context(cafile=given / f"{keys.CA}.pem")
    try:
        with (
            socket.create_connection((host, port), 10) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            return f"{address} by {secure.version()}, with a certificate of this federation"
    except ssl.SSLError as error:
        why = getattr(error, "verify_message", "") or error.reason or str(error)
        why = "it does not speak TLS, as if served with --insecure" if why == "WRONG_VERSION_NUMBER" else why
        raise BadInput(f"{address} is not the server of this federation: {why}") from None
    except OSError as error:
        raise Away(f"{address} does not answer: {error.strerror or error}") from None


def about_versions(given: Path) -> str:
    ours, theirs = version("fewlabel"), keys.read_trust(given).version
    if ours != theirs:
        raise BadInput(f"FewLabel is {ours} here and {theirs} at the coordinator; both must have the same")
    return f"FewLabel {ours} here and at the coordinator, Flower {version('flwr')} here"


@app.command()
def join(
    folder: Directory = Path("site"),
    yes: Annotated[bool, Option("--yes", help="Do not ask, for you have consented.")] = False,
    insecure: Annotated[bool, Option("--insecure", help="Without TLS and without a key: to try things out.")] = False,
    printing: Annotated[bool, Option("--print-command", help="Only show what would be started.")] = False,
) -> None:
    """Take part, until Ctrl-C or `fewlabel site leave`.

    First it says what will leave this site, and asks whether to go on.

    Examples:
      fewlabel site join
      fewlabel site join north --yes
      fewlabel site join --print-command
    """
    folder = folder.resolve()
    site, place = read_site(folder)
    if not insecure:
        keys.load_key(Path(site.key))  # or it says what is wrong with it
    environment = processes.flower_environment(folder / "flower")
    commands = {RESIDENT: reside_command(folder), NODE: node_command(folder, site, insecure)}
    if printing:
        return print("\n".join(processes.shown(environment, command) for command in commands.values()))
    federation = keys.read_trust(Path(site.trust))
    if not yes:
        print(told(federation.name, str(place.get("methods", ""))), file=sys.stderr)
        if not sys.stdin.isatty():
            raise BadInput("nobody is there to consent; whoever has read this types --yes")
        if not typer.confirm(f"Take part in '{federation.name}'?", err=True):
            raise BadInput("without consent the site does not join")
    if not insecure:
        about_certificate(Path(site.trust))
        with suppress(Away):
            about_connection(Path(site.trust))
    ours = processes.Programs(folder, environment)
    with suppress(KeyboardInterrupt), processes.interruptible(), ours.all_ended():
        live(ours, commands, f"client {place.get('client')} of '{federation.name}' at {federation.address}")
    return tell("left the federation")


def told(federation: str, methods: str) -> str:
    """What leaves a site by the methods that it lets run."""
    from fewlabel.deploy.consent import consent
    from fewlabel.report.terminal import known

    if methods:
        return "\n\n".join(map(consent, words(methods)))
    rows = [f"{row['name']}: {row['leaves']}" for row in known("methods") if "leaves" in row]
    return "\n".join([f"'{federation}' names no method: it may be any of these.", *rows])


def reside_command(folder: Path) -> list[str]:
    return [sys.executable, "-m", "fewlabel", "site", "reside", str(folder)]


def node_command(folder: Path, site: Site, insecure: bool) -> list[str]:
    secure = [
        "--root-certificates",
        str(Path(site.trust) / f"{keys.CA}.pem"),
        "--auth-supernode-private-key",
        site.key,
    ]
    return [
        *(sys.executable, "-m", "fewlabel.deploy.flower", "supernode"),
        *("--superlink", keys.read_trust(Path(site.trust)).address),
        *(["--insecure"] if insecure else secure),
        *("--node-config", f"resident={json.dumps(str(folder / RESIDENT))}"),
        *("--port", str(processes.free_port())),
    ]


def live(ours: processes.Programs, commands: Mapping[str, list[str]], who: str) -> None:
    """Runs both programs; one that dies is started again."""
    start = {RESIDENT: begin, NODE: connect}
    for name in start:
        start[name](ours, commands[name])
    tell(f"joined as {who}; Ctrl-C leaves; logs are in {ours.folder}")
    deaths: list[float] = []
    while True:
        if (gone := ours.ended()) is not None:
            deaths = [when for when in deaths if time.monotonic() - when < 60] + [time.monotonic()]
            if len(deaths) > RESTARTS:
                raise RunFailed(f"the {gone} dies again and again: {ours.verdict(gone)}")
            tell(f"the {gone} has died and is started again: {ours.verdict(gone)}")
            start[gone](ours, commands[gone])
        time.sleep(0.2)


def connect(ours: processes.Programs, command: list[str]) -> None:
    """Starts Flower's node, again where it is still counted as connected from before, until it is connected."""
    until, once = float("inf"), cache(tell)
    while True:
        node, began = ours.start(NODE, command), time.monotonic()
        while node.poll() is None:
            if CONNECTED in ours.said(NODE):
                return
            if time.monotonic() - began > PAUSE:
                once("waiting for the server to answer; Ctrl-C gives up")
            time.sleep(0.1)
        if REFUSED not in ours.said(NODE) or time.monotonic() > until:
            said = DECLINED.search(ours.said(NODE))
            raise RunFailed(f"the server does not let this site in: {said[1] if said else ours.verdict(NODE)}")
        until = min(until, time.monotonic() + PATIENCE)
        why = "the server counts this site as connected still, or does not know its key"
        once(f"{why}; this tries again for {PATIENCE:.0f} s")
        time.sleep(PAUSE)


def begin(ours: processes.Programs, command: list[str]) -> None:
    """Starts the resident, and waits until it can be talked to."""
    path = ours.folder / RESIDENT
    path.unlink(missing_ok=True)
    resident = ours.start(RESIDENT, command)
    while not path.exists():
        if resident.poll() is not None:
            why = f"the resident does not start: {ours.verdict(RESIDENT)}"
            raise BadInput(why) if resident.returncode == BadInput.exit_code else RunFailed(why)
        time.sleep(0.1)


@app.command()
def leave(folder: Directory = Path("site")) -> None:
    """End `fewlabel site join`, from another terminal.

    What the site is doing for a round is lost; it may join again.

    Examples:
      fewlabel site leave
      fewlabel site leave north
    """
    folder = folder.resolve()
    read_site(folder)  # or it says that there is none
    tell(f"{folder} has left the federation" if processes.stop(folder) else f"{folder} has not joined")


@app.command(hidden=True)
def reside(folder: Directory = Path("site")) -> None:
    """Do what Flower's node passes on: `fewlabel site join` starts this."""
    from fewlabel.deploy.site import Place
    from fewlabel.deploy.site_process import reside

    folder = folder.resolve()
    _, place = read_site(folder)
    schema.read(Place, place)  # or it says what is wrong
    with suppress(KeyboardInterrupt):
        reside(place, folder / RESIDENT)
