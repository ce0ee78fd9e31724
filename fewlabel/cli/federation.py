"""The commands of whoever coordinates a federation: a thin layer over Flower's SuperLink and the front before it."""

import json
import shlex
import sys
import time
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fewlabel.cli.options import RUNS, Changes, Form, Format, Layout, Out, Resume, Tables, table_of, tell, words
from fewlabel.core import schema
from fewlabel.core.errors import BadInput, RunFailed
from fewlabel.deploy import keys, processes, submit, superlink

if TYPE_CHECKING:
    from fewlabel.experiment import Experiment

app = typer.Typer(suggest_commands=False, rich_markup_mode="rich")
LINK, FRONT = "superlink", "front"  # the programs
SINCE = {"connected": ", last heard {} ago", "not connected": " for {}"}

Directory = Annotated[Path, Argument(metavar="DIR", hidden=True)]
Printing = Annotated[bool, Option("--print-command", help="Only show what would be started.")]
Insecure = Annotated[bool, Option("--insecure", help="Without TLS and without keys: to try things out.")]


@app.callback(invoke_without_command=True)
def federation(context: typer.Context) -> None:
    """Coordinate sites that keep their data.

    Examples:
      fewlabel federation init lungs --address 10.0.0.5:9443 --terms terms.json
      fewlabel federation serve lungs
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def init(
    folder: Directory,
    address: Annotated[str, Option(metavar="HOST:PORT", help="Where sites will reach the server.")] = "",
    name: Annotated[str | None, Option(metavar="NAME", help="By default that of DIR.")] = None,
    terms: Annotated[
        Path | None, Option(metavar="FILE", help="terms.json, as `fewlabel data split` writes it; or the next five.")
    ] = None,
    classes: Annotated[str | None, Option(metavar="A,B", help="Names of the classes, in order.")] = None,
    size: Annotated[int | None, Option("--image-size", metavar="N", help="Pixels of a side.")] = None,
    channels: Annotated[int, Option(metavar="N", help="1 grey, 3 colour.")] = 1,
    mean: Annotated[str | None, Option(metavar="A,B", help="Of each channel, in 0..1.")] = None,
    std: Annotated[str | None, Option(metavar="A,B", help="Of each channel.")] = None,
    methods: Annotated[
        str | None, Option(metavar="A,B", help="What will run, for sites to consent to; by default any.")
    ] = None,
    form: Format = Form.TEXT,
) -> None:
    """Make a federation: its certificates, and what sites need.

    DIR is new. DIR/trust is for every site, and holds no secret;
    the rest is the coordinator's alone.

    Examples:
      fewlabel federation init lungs --address 10.0.0.5:9443 --terms terms.json
      fewlabel federation init lungs --address learn.example.org:9443 \\
        --classes normal,pneumonia --image-size 28 --mean 0.57 --std 0.17
    """
    from fewlabel.data.site_files import Terms
    from fewlabel.deploy.site import table

    processes.need_flower()
    if not address:
        raise BadInput("federation init needs --address, where sites will reach the server, such as 10.0.0.5:9443")
    about = keys.Federation(
        name if name is not None else folder.resolve().name, address, version("fewlabel"), known_methods(methods)
    )
    flags = {"classes": classes, "image_size": size, "mean": mean, "std": std}
    given = [f"--{flag.replace('_', '-')}" for flag, value in flags.items() if value is not None]
    if terms is not None and given:
        raise BadInput(f"--terms says all, so leave out {', '.join(given)}")
    agreed = table(terms) if terms is not None else terms_of(channels, flags)
    schema.read(Terms, agreed)  # or it says what is wrong
    made = keys.create(folder.absolute(), about, agreed)
    if form == "json":
        return print(json.dumps({"directory": str(folder), "name": about.name, "address": address, "trust": str(made)}))
    print(f"'{about.name}' at {address}; give {folder / keys.TRUST} to every site")
    return print(f"then: fewlabel federation serve {shlex.quote(str(folder))}")


def known_methods(text: str | None) -> tuple[str, ...]:
    from fewlabel.experiment import ROWS, read_method

    names = tuple(words(text or ""))
    for name in names:
        read_method(ROWS[name][0] if name in ROWS else name)  # or it says that there is none
    return names


def terms_of(channels: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Terms from the command line."""
    if flags["classes"] is None or flags["image_size"] is None:
        raise BadInput("federation init needs --terms, or at least --classes and --image-size")
    found = {"classes": words(flags["classes"]), "channels": channels, "image_size": flags["image_size"]}
    for name in ("mean", "std"):
        if flags[name] is not None:
            try:
                found[name] = [float(word) for word in words(flags[name])]
            except ValueError:
                raise BadInput(f"--{name} takes numbers such as 0.5 or 0.5,0.4,0.4, found '{flags[name]}'") from None
    return found


@app.command()
def enrol(folder: Directory, file: Annotated[Path, Argument(metavar="FILE", hidden=True)]) -> None:
    """Admit a site.

    FILE is the enrolment.json of a site. Compare the fingerprint with the
    one that the site sees, by telephone, say.

    Examples:
      fewlabel federation enrol lungs enrolment.json
    """
    folder = opened(folder)
    wish = keys.read_enrolment(file)
    member = keys.admit(folder, wish)
    about = keys.read_trust(folder / keys.TRUST)
    print(f"client {member.client} is '{member.name}', by the key {keys.fingerprint(member.key)}")
    if wish.version != about.version:
        tell(f"'{member.name}' has FewLabel {wish.version}, and the federation {about.version}: it will be refused")
    if processes.holder(folder) is not None:
        superlink.register(folder)


@app.command()
def remove(folder: Directory, site: Annotated[str, Argument(metavar="SITE", hidden=True)]) -> None:
    """Remove a site, by its name or number.

    From now on it is refused, in runs under way too. Its key cannot be
    enrolled again, and its number is free for another site.

    Examples:
      fewlabel federation remove lungs north
    """
    folder = opened(folder)
    member = keys.remove(folder, site)
    print(f"client {member.client} is no longer '{member.name}', by the key {keys.fingerprint(member.key)}")
    if processes.holder(folder) is not None:
        superlink.register(folder)


@app.command()
def serve(
    folder: Directory,
    listen: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Where to listen, if that is not the address of sites.")
    ] = None,
    insecure: Insecure = False,
    printing: Printing = False,
) -> None:
    """Serve a federation, until Ctrl-C or `fewlabel federation stop`.

    Flower's SuperLink listens on this machine alone. Sites reach the front
    before it, which lets through what nodes need and nothing else.

    Examples:
      fewlabel federation serve lungs
      fewlabel federation serve lungs --listen 0.0.0.0:9443
      fewlabel federation serve lungs --print-command
    """
    folder = opened(folder)
    host, port = keys.host_and_port(listen or keys.read_trust(folder / keys.TRUST).address)
    inner = ("127.0.0.1", processes.free_port()) if not insecure else (host, port)
    environment = processes.flower_environment(folder / "flower")
    commands = {LINK: superlink.command(folder, *inner, insecure)}
    if not insecure:
        commands[FRONT] = front(folder, host, port, *inner)
    if printing:
        return print("\n".join(processes.shown(environment, command) for command in commands.values()))
    if insecure:
        tell(f"whoever reaches {host}:{port} can run programs of theirs on this machine; rehearse with --insecure only")
    elif keys.renewed(folder, keys.read_trust(folder / keys.TRUST).address):
        tell("the server's certificate was about to end: this is a new one, which sites trust as they did the old one")
    ours = processes.Programs(folder, environment)
    with suppress(KeyboardInterrupt), processes.interruptible(), ours.all_ended():
        processes.refuse_taken(host, port)
        superlink.connect(folder, *inner, insecure)
        ours.start(LINK, commands[LINK])
        ours.wait_for(LINK, *inner)
        superlink.register(folder)
        if FRONT in commands:
            ours.start(FRONT, commands[FRONT])
            ours.wait_for(FRONT, "127.0.0.1" if host in ("0.0.0.0", "::") else host, port)
        tell(f"serving at {host}:{port}{' without TLS and keys' * insecure}; Ctrl-C ends it; logs are in {folder}")
        while (gone := ours.ended()) is None:
            time.sleep(0.5)
        raise RunFailed(f"{gone} has ended: {ours.verdict(gone)}; serve again, then resume the run")
    return tell("no longer serving")


def front(folder: Path, host: str, port: int, inner_host: str, inner_port: int) -> list[str]:
    shown = f"[{host}]" if ":" in host else host
    certified = {"--certificate": "server.pem", "--key": "server.key", "--ca": "ca.pem"}
    return [
        *(sys.executable, "-m", "fewlabel.deploy.gateway"),
        *("--listen", f"{shown}:{port}", "--to", f"{inner_host}:{inner_port}"),
        *(word for flag, name in certified.items() for word in (flag, str(folder / name))),
        *("--members", str(folder)),
    ]


@app.command()
def run(
    folder: Directory,
    file: Annotated[Path | None, Argument(metavar="EXPERIMENT", hidden=True)] = None,
    changes: Changes = None,
    data: Annotated[
        Path | None,
        Option(metavar="PATH", help="Where test, validation and server lie, as far as the server has them."),
    ] = None,
    sites: Annotated[int | None, Option(metavar="N", min=1, help="That must be there first; by default all.")] = None,
    patience: Annotated[float | None, Option(metavar="SECONDS", help="To wait for sites; by default 600.")] = None,
    deadline: Annotated[float | None, Option(metavar="SECONDS", help="For a site's task; by default 3600.")] = None,
    out: Out = None,
    resume: Resume = None,
    insecure: Insecure = False,
    form: Tables = Layout.TEXT,
) -> None:
    """Run an experiment (TOML) with the sites of a federation.

    The federation must be served meanwhile. Ctrl-C ends the run, and
    --resume goes on with it after its last checkpoint.

    Examples:
      fewlabel federation run lungs experiment.toml --data sites
      fewlabel federation run lungs --resume runs/fedavg-seed0
    """
    from fewlabel.api import fresh_directory
    from fewlabel.deploy.server import prepare
    from fewlabel.deploy.site import load_terms
    from fewlabel.experiment import read
    from fewlabel.report.results import Result

    folder = opened(folder)
    if resume is not None:
        if [given for given in (file, changes, data, sites, patience, deadline, out) if given not in (None, [])]:
            raise BadInput(
                "--resume goes on with a run as it is: give no EXPERIMENT and no option that would change it"
            )
        directory, experiment = resume, Result(resume).experiment
    else:
        if file is None:
            raise BadInput("federation run needs an experiment (TOML), or --resume with the directory of a run")
        if data is not None and not data.is_dir():
            raise BadInput(f"there is no directory {data}; --data is where test, validation and server lie")
        experiment = read(table_of(file), changes or [])
        refuse_unnamed(folder, experiment)
        directory = out or fresh_directory(experiment, RUNS)
    if resume is not None and Result(resume).finished:
        tell(f"{directory} is finished already; this is its result")
    else:
        if resume is not None:
            refuse_other(folder, resume, insecure)
        served(folder, insecure)
        if resume is None:
            more = {"data": data and str(data.absolute()), "sites": sites, "patience": patience, "deadline": deadline}
            more |= {"members": None if insecure else str(folder)}
            given = {name: value for name, value in more.items() if value is not None}
            prepare(experiment, directory, load_terms(folder / keys.TRUST), **given)
        else:
            tell(submit.going_on(directory, experiment.rounds))
    try:
        if not Result(directory).finished:
            submit.follow(folder, directory, experiment.rounds)
        from fewlabel.report.terminal import show_result

        result = Result(directory)
        return show_result(result, form, result.report())
    except KeyboardInterrupt:
        if not (directory / "summary.json").exists():
            raise
        return tell(f"the run is completed; to see it: fewlabel show {shlex.quote(str(directory))}")


def refuse_unnamed(folder: Path, experiment: "Experiment") -> None:
    from fewlabel.deploy.site import agreed

    methods = ", ".join(keys.read_trust(folder / keys.TRUST).methods)
    if not agreed(methods, experiment):
        raise BadInput(f"sites have consented to {methods}, and {experiment.name} sends something else")


def refuse_other(folder: Path, run: Path, insecure: bool) -> None:
    """A run keeps to the keys that it began with, or to none."""
    from fewlabel.deploy.server import load_plan

    members = load_plan(run).members
    if members != (None if insecure else str(folder)):
        how = "with --insecure" if members is None else f"with the keys of {members}"
        raise BadInput(f"{run} was begun {how}, and is resumed so or not at all")


def served(folder: Path, insecure: bool) -> None:
    again = f"fewlabel federation serve {shlex.quote(str(folder))}"
    if processes.holder(folder) is None:
        raise BadInput(f"nobody serves {folder}; start it in another terminal: {again}")
    if bool(superlink.connection(folder).get("insecure")) != insecure:
        raise BadInput(f"--insecure is for both or neither of `federation serve` and `federation run`; {again}")


@app.command()
def status(folder: Directory, form: Format = Form.TEXT) -> None:
    """Show who is enrolled, who is connected, and what runs.

    A site is
      enrolled         all that is known while nobody serves;
      never connected  the server knows its key;
      connected        and is heard every 20 seconds or so: for longer
                       than that, it may be cut off;
      not connected    it left, or was not heard for a minute.
    A run is pending, starting, running, completed, failed or stopped. It
    can be resumed unless it is completed.

    Examples:
      fewlabel federation status lungs
      fewlabel federation status lungs --format json
    """
    from fewlabel.report.terminal import span

    folder = opened(folder)
    told = standing(folder)
    if form == "json":
        return print(json.dumps(told, indent=1))
    serving = f"served by process {told['process']}" if told["process"] else "not served"
    print(f"'{told['name']}' at {told['address']}: {serving}")
    for site in told["sites"]:
        since = SINCE.get(site["state"], "").format(span(site.get("seconds", 0)))
        print(f"client {site['client']} '{site['name']}': {site['state']}{since}")
    for run in told["runs"]:
        print(f"run {run['directory']}: {run['state']}, round {run['round']}")
    return None


def standing(folder: Path) -> dict[str, Any]:
    about, process = keys.read_trust(folder / keys.TRUST), processes.holder(folder)
    known: dict[str, superlink.Node] = {}
    states: dict[str, str] = {}
    if process is not None:
        known, listed = superlink.nodes(folder), superlink.flwr(folder, "list")["runs"]
        states = {run["run-id"]: run["status"].removeprefix("finished:") for run in listed}
    sites = [
        {"client": member.client, "name": member.name}
        | (known[member.key].standing() if member.key in known else {"state": "enrolled"})
        | {"key": keys.fingerprint(member.key), "node": member.node}
        for member in keys.members(folder)
    ]
    submitted = sorted((folder / "runs").glob("*"), key=lambda path: path.stat().st_mtime)
    runs = {path.read_text(): path.name for path in submitted}  # of one that was resumed, the last submission
    listing = [
        {"run": number, "directory": directory, "round": submit.last_round(Path(directory))}
        | {"state": "completed" if Path(directory, "summary.json").exists() else states.get(number, "stopped")}
        for directory, number in runs.items()
    ]
    told = {"name": about.name, "address": about.address, "process": process}
    return {**told, "sites": sites, "runs": listing}


@app.command()
def stop(folder: Directory) -> None:
    """End what serves a federation; no process is left.

    A run ends with it, and can be resumed.

    Examples:
      fewlabel federation stop lungs
    """
    folder = opened(folder)
    tell(f"{folder} is no longer served" if processes.stop(folder) else f"nobody serves {folder}")


def opened(folder: Path) -> Path:
    """A federation's directory, by its whole path."""
    processes.need_flower()
    if not (folder / keys.TRUST / keys.ABOUT).is_file():
        raise BadInput(f"{folder} holds no federation; `fewlabel federation init` makes one")
    return folder.resolve()
