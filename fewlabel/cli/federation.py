"""The commands of a coordinator: create a federation, admit sites, serve, run, see where it stands."""

import json
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fewlabel.api import fresh_directory
from fewlabel.cli.options import RUNS, Changes, Form, Format, Layout, Out, Resume, Tables, table_of, words
from fewlabel.core import schema
from fewlabel.core.errors import BadInput
from fewlabel.deploy import keys, members, processes, submit, superlink, wishes
from fewlabel.deploy import peers as known_peers
from fewlabel.deploy import status as federation_status
from fewlabel.engine import record
from fewlabel.experiment import method_named, read
from fewlabel.report.results import Result
from fewlabel.report.terminal import show_result, span, tell

app = typer.Typer(suggest_commands=False, rich_markup_mode="rich")
SINCE = {"connected": ", last heard {} ago", "not connected": " for {}"}

Directory = Annotated[Path, Argument(metavar="DIR", hidden=True)]
Printing = Annotated[bool, Option("--print-command", help="Only show what would be started.")]
Insecure = Annotated[bool, Option("--insecure", help="Without TLS and without keys, to try things out.")]


@app.callback(invoke_without_command=True)
def federation(context: typer.Context) -> None:
    """Coordinate a federation of sites that keep their data.

    Every command has its own help, such as `fewlabel federation init --help`.

    Examples:
      fewlabel federation init lungs --address 10.0.0.5:9443 --terms terms.json
      fewlabel federation serve lungs
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def init(
    folder: Directory,
    address: Annotated[str, Option(metavar="HOST:PORT", help="Where sites reach the server.")] = "",
    name: Annotated[str | None, Option(metavar="NAME", help="Name of the federation; by default that of DIR.")] = None,
    terms: Annotated[
        Path | None,
        Option(metavar="FILE", help="terms.json, as `fewlabel data split` writes it; or use the next five."),
    ] = None,
    classes: Annotated[str | None, Option(metavar="A,B", help="Names of the classes, in order.")] = None,
    size: Annotated[int | None, Option("--image-size", metavar="N", help="Pixels of a side.")] = None,
    channels: Annotated[int, Option(metavar="N", help="1 grey, 3 colour.")] = 1,
    mean: Annotated[str | None, Option(metavar="A,B", help="Mean of each channel, in 0..1.")] = None,
    std: Annotated[str | None, Option(metavar="A,B", help="Standard deviation of each channel.")] = None,
    methods: Annotated[
        str | None, Option(metavar="A,B", help="Methods that sites are asked to consent to; by default any.")
    ] = None,
    form: Format = Form.TEXT,
) -> None:
    """Create a federation: its certificates, and what its sites need.

    DIR is a new folder. Give DIR/trust to every site: it holds no secret.
    Keep the rest to yourself.

    Examples:
      fewlabel federation init lungs --address 10.0.0.5:9443 --terms terms.json
      fewlabel federation init lungs --address learn.example.org:9443 \\
        --classes normal,pneumonia --image-size 28 --mean 0.57 --std 0.17
    """
    from fewlabel.data.site_files import Terms
    from fewlabel.deploy.site import read_json

    processes.need_flower()
    if not address:
        raise BadInput("federation init needs --address, where sites reach the server, such as 10.0.0.5:9443")
    about = members.Federation(
        name if name is not None else folder.resolve().name, address, version("fewlabel"), known_methods(methods)
    )
    flags = {"classes": classes, "image_size": size, "mean": mean, "std": std}
    given = [f"--{flag.replace('_', '-')}" for flag, value in flags.items() if value is not None]
    if terms is not None and given:
        raise BadInput(f"--terms sets all of them, so leave out {', '.join(given)}")
    agreed = read_json(terms) if terms is not None else terms_of(channels, flags)
    schema.read(Terms, agreed)  # raises if something is wrong
    made = members.create(folder.absolute(), about, agreed)
    if form == "json":
        return print(json.dumps({"directory": str(folder), "name": about.name, "address": address, "trust": str(made)}))
    print(f"'{about.name}' at {address}; give {folder / members.TRUST} to every site")
    return print(f"then: fewlabel federation serve {shlex.quote(str(folder))}")


def known_methods(text: str | None) -> tuple[str, ...]:
    names = tuple(words(text or ""))
    for name in names:
        method_named(name)  # raises if there is none
    return names


def terms_of(channels: int, flags: dict[str, Any]) -> dict[str, Any]:
    """Return a federation's terms from the options of the command."""
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

    FILE is the site's enrolment.json. Compare the fingerprint with the one
    that the site sees, for example on the telephone.

    Examples:
      fewlabel federation enrol lungs enrolment.json
    """
    folder = opened(folder)
    request = members.read_enrolment(file)
    member = members.admit(folder, request)
    about = members.read_trust(folder / members.TRUST)
    print(f"client {member.client} is '{member.name}', with the key {keys.fingerprint(member.key)}")
    if request.version != about.version:
        tell(f"'{member.name}' has FewLabel {request.version}, and the federation {about.version}: it will be refused")
    if processes.process_using(folder) is not None:
        superlink.register(folder)


@app.command()
def remove(folder: Directory, site: Annotated[str, Argument(metavar="SITE", hidden=True)]) -> None:
    """Remove a site, by its name or number.

    From now on it is refused, also in a run under way. Its key cannot be
    enrolled again. Its number is free for another site.

    Examples:
      fewlabel federation remove lungs north
    """
    folder = opened(folder)
    member = members.remove(folder, site)
    print(f"client {member.client} is no longer '{member.name}', with the key {keys.fingerprint(member.key)}")
    if processes.process_using(folder) is not None:
        superlink.register(folder)


@app.command()
def peers(
    folder: Directory,
    out: Annotated[Path, Option(metavar="FILE", help="Where to write the list.")] = Path("peers.json"),
) -> None:
    """Write the members' public keys to a file, for masked sums.

    Give it to every site once all are enrolled, and again when one joins
    or leaves. Each site reads it by `fewlabel site peers`.

    Examples:
      fewlabel federation peers lungs
    """
    listed = known_peers.of(opened(folder))
    known_peers.write(listed, out)
    for peer in listed.members:
        print(f"client {peer.client} is '{peer.name}', with the key {keys.fingerprint(peer.key)}")
    tell(f"give {out} to every site, which reads it by: fewlabel site peers {out}")


@app.command()
def ask(
    folder: Directory,
    site: Annotated[str, Argument(metavar="SITE", hidden=True)],
    labels: Annotated[int, Option("--labels", metavar="N", min=0, help="How many more labels; 0 takes it back.")] = 50,
) -> None:
    """Ask a site, by its name or number, to label more images.

    The site learns it in its next run. `fewlabel site check` shows it
    there, and the site's people decide. Send them the model, which
    chooses the images: `fewlabel export`.

    Examples:
      fewlabel federation ask lungs north --labels 50
    """
    folder = opened(folder)
    member = members.find(folder, site)
    wishes.change(folder, wanted={member.client: labels})
    what = f"asked for {labels:,} more labels" if labels else "no longer asked for labels"
    print(f"'{member.name}' is {what}, from its next run on")


@app.command()
def serve(
    folder: Directory,
    listen: Annotated[
        str | None, Option(metavar="HOST:PORT", help="Where to listen, if sites use another address.")
    ] = None,
    insecure: Insecure = False,
    printing: Printing = False,
) -> None:
    """Serve a federation, until Ctrl-C or `fewlabel federation stop`.

    Flower's SuperLink listens on this machine alone. Sites reach a gateway
    before it, which lets Flower's nodes pass and nobody else.

    Examples:
      fewlabel federation serve lungs
      fewlabel federation serve lungs --listen 0.0.0.0:9443
      fewlabel federation serve lungs --print-command
    """
    folder = opened(folder)
    address = members.read_trust(folder / members.TRUST).address
    outside = keys.host_and_port(listen or address)
    inside = outside if insecure else ("127.0.0.1", processes.free_port())
    programs = processes.Programs(folder, processes.flower_environment(folder / superlink.HOME))
    commands = superlink.commands(folder, outside, inside, insecure)
    if printing:
        return print(programs.shown(commands))
    if insecure:
        tell(f"whoever reaches {listen or address} can run programs on this machine; use --insecure only to rehearse")
    elif keys.renew_if_due(folder, address):
        tell("the server's certificate was about to end, so it has a new one; sites trust it as they did the old one")
    superlink.serve(programs, commands, outside, inside)
    return tell("no longer serving")


@app.command()
def run(
    folder: Directory,
    file: Annotated[Path | None, Argument(metavar="EXPERIMENT", hidden=True)] = None,
    changes: Changes = None,
    data: Annotated[
        Path | None,
        Option(metavar="PATH", help="Folder with test, validation and server, if the server has them."),
    ] = None,
    sites: Annotated[
        int | None, Option(metavar="N", min=1, help="Sites to wait for before the first round; by default all.")
    ] = None,
    patience: Annotated[
        float | None, Option(metavar="SECONDS", help="How long to wait for sites; by default 600.")
    ] = None,
    deadline: Annotated[
        float | None, Option(metavar="SECONDS", help="How long a site's task may take at most; by default 3600.")
    ] = None,
    factor: Annotated[
        float | None,
        Option(
            "--deadline-factor", metavar="X", help="How many times longer than usual a task may take; by default 5."
        ),
    ] = None,
    least: Annotated[
        float | None,
        Option("--least-deadline", metavar="SECONDS", help="How long a task may take in any case; by default 60."),
    ] = None,
    again: Annotated[
        int | None,
        Option(
            "--ask-again",
            metavar="ROUNDS",
            min=1,
            help="After how many rounds a site that was silent twice is asked again; by default 4.",
        ),
    ] = None,
    out: Out = None,
    resume: Resume = None,
    insecure: Insecure = False,
    form: Tables = Layout.TEXT,
) -> None:
    """Run an experiment (TOML) with the sites of a federation.

    The federation must be served meanwhile. Ctrl-C ends the run, and so
    does closing the terminal. --resume goes on after the last checkpoint,
    or shows the run if it still goes on.

    Examples:
      fewlabel federation run lungs experiment.toml --data sites
      fewlabel federation run lungs --resume runs/fedavg-seed0
    """
    from fewlabel.data.site_files import TERMS
    from fewlabel.deploy.run_plan import SETTLED, prepare
    from fewlabel.deploy.site import load_terms

    folder = opened(folder)
    if resume is not None:
        options = (file, changes, data, sites, patience, deadline, factor, least, again, out)
        if [given for given in options if given not in (None, [])]:
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
        submit.check_consent(folder, experiment)
        directory = out or fresh_directory(experiment, RUNS)
    if resume is not None and record.is_finished(resume):
        tell(f"{directory} is finished already; this is its result")
    else:
        if resume is not None:
            submit.check_same_keys(folder, resume, insecure)
        submit.check_served(folder, insecure)
        if resume is not None and (number := submit.goes_on(folder, resume)) is not None:
            return shown_to_its_end(folder, resume, experiment, number, form)
        if resume is None:
            more = {"data": data and str(data.absolute()), "sites": sites, "patience": patience, "deadline": deadline}
            more |= {"factor": factor, "least": least, "again": again, "federation": str(folder)}
            more |= {"members": None if insecure else str(folder), "settled": str(folder / SETTLED / TERMS)}
            given = {name: value for name, value in more.items() if value is not None}
            (folder / SETTLED).mkdir(exist_ok=True)
            fixed = (folder / SETTLED / TERMS).exists()
            prepare(experiment, directory, load_terms(folder / (SETTLED if fixed else members.TRUST)), **given)
        else:
            tell(submit.resume_notice(directory, experiment.rounds))
    try:
        if not record.is_finished(directory):
            submit.follow(folder, directory, experiment)
        result = Result(directory)
        return show_result(result, form, result.report())
    except KeyboardInterrupt:
        if not record.is_finished(directory):
            raise
        return tell(f"the run is completed; to see it: fewlabel show {shlex.quote(str(directory))}")


Run = Annotated[Path, Argument(metavar="RUN", hidden=True)]


@app.command()
def attach(run: Run, form: Tables = Layout.TEXT) -> None:
    """Show a run that goes on, as the terminal did that started it.

    RUN is the directory of the run. Ctrl-C leaves the run running.

    Examples:
      fewlabel federation attach runs/first
    """
    folder, experiment = federation_of(run), Result(run).experiment
    if record.is_finished(run):
        tell(f"{run} is finished already; this is its result")
        return show_result(Result(run), form, Result(run).report())
    if (number := submit.goes_on(folder, run)) is None:
        raise BadInput(f"{run} does not go on; to resume it: {submit.resume_command(folder, run)}")
    return shown_to_its_end(folder, run, experiment, number, form)


@app.command()
def cancel(run: Run) -> None:
    """End a run that goes on, from any terminal. You can resume it.

    RUN is the directory of the run.

    Examples:
      fewlabel federation cancel runs/first
    """
    folder = federation_of(run)
    if record.is_finished(run):
        return tell(f"{run} is finished already")
    found = submit.cancel(folder, run)
    return tell(
        f"{run} {'has ended' if found else 'does not go on'}; to resume it: {submit.resume_command(folder, run)}"
    )


def federation_of(run: Path) -> Path:
    """Return the folder of the federation that carries out a run."""
    from fewlabel.deploy.run_plan import load_plan

    if not (run / record.FEDERATION).is_file():
        raise BadInput(f"{run} is no run of a federation: it has no {record.FEDERATION}")
    plan = load_plan(run)
    if (folder := plan.federation or plan.members) is None:
        raise BadInput(
            f"{run} does not say which federation it is of; resume it by: fewlabel federation run DIR --resume"
        )
    return opened(Path(folder))


def shown_to_its_end(folder: Path, run: Path, experiment: Any, number: str, form: Layout) -> None:
    """Show a run that goes on, and its result if it ends meanwhile."""
    if submit.attach(folder, run, experiment, number):
        show_result(Result(run), form, Result(run).report())


@app.command()
def status(folder: Directory, form: Format = Form.TEXT) -> None:
    """Show who is enrolled, who is connected, and what runs.

    A site is
      enrolled         nothing else is known while nobody serves;
      never connected  the server knows its key;
      connected        it is heard every 20 seconds or so; if that was
                       longer ago, it may be cut off;
      not connected    it left, or was not heard for a minute.
    A run is pending, starting, running, completed, failed or stopped. You
    can resume it unless it is completed.

    Examples:
      fewlabel federation status lungs
      fewlabel federation status lungs --format json
    """
    found = federation_status.status(opened(folder))
    if form == "json":
        return print(json.dumps(found, indent=1))
    serving = f"served by process {found['process']}" if found["process"] else "not served"
    print(f"'{found['name']}' at {found['address']}: {serving}")
    for site in found["sites"]:
        since = SINCE.get(site["state"], "").format(span(site.get("seconds", 0)))
        asked = f", asked for {site['wanted']:,} more" if site["wanted"] else ""
        labels = "" if site["labels"] is None else f"; {site['labels']:,} labels in its last run"
        print(f"client {site['client']} '{site['name']}': {site['state']}{since}{labels}{asked}")
    for run in found["runs"]:
        waits = f", {run['waiting']}" if run["waiting"] else ""
        print(f"run {run['directory']}: {run['state']}, round {run['round']}{waits}")
    return None


@app.command()
def stop(folder: Directory) -> None:
    """Stop serving a federation. No process is left.

    A run ends with it, and you can resume it.

    Examples:
      fewlabel federation stop lungs
    """
    folder = opened(folder)
    tell(f"{folder} is no longer served" if processes.stop(folder) else f"nobody serves {folder}")


def opened(folder: Path) -> Path:
    """Return a federation's folder, by its whole path."""
    processes.need_flower()
    if not (folder / members.TRUST / members.ABOUT).is_file():
        raise BadInput(f"{folder} holds no federation; `fewlabel federation init` creates one")
    return folder.resolve()
