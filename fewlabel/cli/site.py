"""The commands of a site: set it up, check it, take part, leave."""

import os
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from fewlabel.cli.options import Kind, words
from fewlabel.core.errors import BadInput, FewLabelError
from fewlabel.deploy import join as joining
from fewlabel.deploy import keys, members, processes, site_check, site_folder, site_process
from fewlabel.deploy import peers as known_peers
from fewlabel.report.terminal import tell

app = typer.Typer(suggest_commands=False, rich_markup_mode="rich")

Directory = Annotated[Path, Argument(metavar="[DIR]", hidden=True)]


@app.callback(invoke_without_command=True)
def site(context: typer.Context) -> None:
    """Take part in a federation. Your data stay at your site.

    Every command has its own help, such as `fewlabel site init --help`.

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
    trusted: Annotated[
        Path | None, Option("--trust", metavar="DIR", help="The folder that the coordinator gave you.")
    ] = None,
    name: Annotated[str | None, Option(metavar="NAME", help="Name of this site, for people.")] = None,
    client: Annotated[
        int | None, Option(metavar="N", min=0, help="Number of this site, as agreed with the coordinator.")
    ] = None,
    data: Annotated[
        Path | None,
        Option(metavar="PATH", help="Your images: a folder for each class, a table with labels (csv), or an npz."),
    ] = None,
    kind: Annotated[Kind | None, Option(help="What PATH is; by default what it looks like.")] = None,
    state: Annotated[
        Path | None,
        Option(metavar="DIR", help="For the log and for what methods keep between rounds; by default DIR/state."),
    ] = None,
    modules: Annotated[
        str, Option(metavar="A,B", help="Modules with methods or networks of your own that you trust.")
    ] = "",
) -> None:
    """Set up a site: its settings, its key and its enrolment.

    DIR is a new folder, by default ./site. You are asked for what you do
    not give. Then send DIR/enrolment.json to the coordinator. The key
    stays here.

    Examples:
      fewlabel site init
      fewlabel site init north --trust trust --name north --client 0 --data images
    """
    from fewlabel.deploy import policy

    processes.need_flower()
    site_folder.refuse_used(folder)
    given = trusted or Path(asked("--trust", "Folder that the coordinator gave you"))
    federation = members.read_trust(given)
    name = members.check_name(name if name is not None else asked("--name", "Name of this site"))
    number = client if client is not None else int(asked("--client", "Number of this site", int))
    images = data or Path(asked("--data", "Images: a folder for each class, a table with labels (csv), or an npz"))
    if not images.exists():
        raise BadInput(f"there is no {images}; --data is where this site's images are")
    folder = folder.resolve()
    config = site_folder.SiteConfig(
        number,
        str(images.absolute()),
        str((state or folder / site_folder.STATE).absolute()),
        kind=str(kind or ""),
        modules=modules,
        methods=", ".join(federation.methods),
        terms=str(folder / members.TRUST),
    )
    key = keys.fingerprint(site_folder.create(folder, name, given, config).key)
    policy.write_fresh(folder)
    print(f"'{name}' is set up as client {number} of '{federation.name}', with the key {key}")
    print(f"what a coordinator may run here is in {folder / policy.FILE}; read it, and change it as you like")
    print(f"send {folder / site_folder.ENROLMENT} to the coordinator, and tell them the key's fingerprint another way")


def asked(flag: str, question: str, kind: type = str) -> Any:
    """Ask a person. If there is none, name the option that is missing."""
    if not sys.stdin.isatty():
        raise BadInput(f"site init needs {flag}")
    return typer.prompt(question, type=kind, err=True)


def opened(folder: Path) -> tuple[Path, site_folder.SiteFile]:
    """Return a site's folder, by its whole path, and its settings."""
    processes.need_flower()
    folder = folder.resolve()
    found = site_folder.read(folder)
    return folder, replace(found, place=site_folder.completed(folder, found))


@app.command()
def check(folder: Directory = Path("site")) -> None:
    """Check all that a site needs before it joins.

    There is a line for each check. The exit code is 2 if one fails.

    Examples:
      fewlabel site check
      fewlabel site check north
    """
    folder, found = opened(folder)
    os.umask(0o077)  # nobody else may read images that are decoded here
    failed = []
    for name, look in site_check.checks(folder, found).items():
        try:
            print(f"ok      {name}: {look()}", flush=True)
        except (FewLabelError, OSError) as error:
            failed.append(name)
            print(f"failed  {name}: {error}", flush=True)
    if failed:
        raise BadInput(f"{', '.join(failed)} must be mended before the site can join")


@app.command()
def join(
    folder: Directory = Path("site"),
    yes: Annotated[bool, Option("--yes", help="Do not ask: you have consented before.")] = False,
    insecure: Annotated[bool, Option("--insecure", help="Without TLS and without a key, to try things out.")] = False,
    printing: Annotated[bool, Option("--print-command", help="Only show what would be started.")] = False,
) -> None:
    """Take part, until Ctrl-C or `fewlabel site leave`.

    First you read what will leave your site, and are asked for consent.

    Examples:
      fewlabel site join
      fewlabel site join north --yes
      fewlabel site join --print-command
    """
    from fewlabel.deploy import experiments, policy

    folder, found = opened(folder)
    if not insecure:
        keys.load_key(Path(found.key))  # raises if something is wrong with it
    experiments.check_not_withdrawn(Path(found.place.state))
    policy.load(found.place.policy)  # raises if something is wrong with it
    programs = processes.Programs(folder, processes.flower_environment(folder / "flower"))
    commands = joining.commands(folder, found, insecure)
    if printing:
        return print(programs.shown(commands))
    if not yes:
        ask_for_consent(members.read_trust(Path(found.trust)).name, found.place.methods)
    if not insecure:
        joining.refuse_unfit(folder, found)
    joining.take_part(programs, commands, found, insecure)
    return tell("left the federation")


def ask_for_consent(federation: str, methods: str) -> None:
    from fewlabel.deploy.consent import consent, consent_to_all

    text = "\n\n".join(map(consent, words(methods))) if methods else consent_to_all(federation)
    print(text, file=sys.stderr)
    if not sys.stdin.isatty():
        raise BadInput("there is nobody to ask for consent; if you have read this and agree, add --yes")
    if not typer.confirm(f"Take part in '{federation}'?", err=True):
        raise BadInput("the site does not join without your consent")


@app.command()
def approve(
    folder: Directory = Path("site"),
    yes: Annotated[bool, Option("--yes", help="Do not ask: approve every run that waits.")] = False,
) -> None:
    """Approve runs that wait for you, if policy.toml has ask = "once" or "every-run".

    You read what each would do and what would leave your site. A run that
    you do not approve is forgotten until the coordinator asks again.

    Examples:
      fewlabel site approve
      fewlabel site approve north
    """
    from fewlabel.deploy import experiments

    _, found = opened(folder)
    state = Path(found.place.state)
    waiting = experiments.names(state, experiments.WAITING)
    if not waiting:
        return tell("no run waits for approval")
    for run in waiting:
        record = experiments.load(state, run, experiments.WAITING)
        assert record is not None
        print(experiments.summary(record))
        if not yes and not sys.stdin.isatty():
            raise BadInput("there is nobody to ask; if you have read this and agree, add --yes")
        if yes or typer.confirm(f"Approve run {run}?", err=True):
            experiments.approve(state, run)
            tell(f"run {run} is approved; the coordinator's next attempt succeeds")
        else:
            experiments.reject(state, run)
            tell(f"run {run} is not approved")
    return None


@app.command()
def peers(
    file: Annotated[Path, Argument(metavar="FILE", hidden=True)],
    folder: Directory = Path("site"),
    yes: Annotated[bool, Option("--yes", help="Do not ask: you have compared the fingerprints.")] = False,
) -> None:
    """Read the other members' keys, which masked sums need.

    FILE is the peers.json that the coordinator made. Compare the
    fingerprints with the other sites themselves, for example on the
    telephone: whoever gave you a wrong key could read your weights.

    Examples:
      fewlabel site peers peers.json
      fewlabel site peers peers.json north
    """
    folder, found = opened(folder)
    listed = known_peers.read(file)
    known_peers.check(listed, Path(found.trust), found.place.client, Path(found.key))
    for peer in listed.members:
        print(f"client {peer.client} is '{peer.name}', with the key {keys.fingerprint(peer.key)}")
    if not yes and not sys.stdin.isatty():
        raise BadInput("there is nobody to ask; if you have compared the fingerprints, add --yes")
    if not yes and not typer.confirm("Did each site confirm its fingerprint, by another way?", err=True):
        raise BadInput("the keys are not taken before you have compared them")
    known_peers.write(listed, Path(found.place.peers))
    tell(f"masked sums of this site trust these keys; to trust others, read a new list ({found.place.peers})")


@app.command()
def leave(
    folder: Directory = Path("site"),
    withdraw: Annotated[
        bool, Option("--withdraw", help="For good: refuse everything from now on, and show what was sent.")
    ] = False,
) -> None:
    """End `fewlabel site join`, from another terminal.

    The work of the current round is lost. The site may join again, unless
    it withdraws.

    Examples:
      fewlabel site leave
      fewlabel site leave north
      fewlabel site leave --withdraw
    """
    folder, found = opened(folder)
    stopped = processes.stop(folder)
    if not withdraw:
        return tell(f"{folder} has left the federation" if stopped else f"{folder} has not joined")
    from fewlabel.deploy import experiments

    state = Path(found.place.state)
    experiments.withdraw(state)
    for line in experiments.sent_until_now(state) or ["nothing was sent in any run"]:
        print(line)
    print("What was sent cannot be called back: a model that learned from your images does not unlearn them.")
    print("Ask the coordinator to remove your site, and to say which models were trained with it.")
    return tell(f"{folder} has withdrawn; to take part again, remove {state / experiments.WITHDRAWN}")


@app.command(hidden=True)
def answer(folder: Directory = Path("site")) -> None:
    """Answer the messages that Flower's node passes on. `fewlabel site join` starts this."""
    from fewlabel.deploy.site import reply

    folder, found = opened(folder)
    os.umask(0o077)  # nobody else may read images that are decoded here
    site_check.check_data(found.place, Path(found.trust))
    with suppress(KeyboardInterrupt):
        site_process.serve(partial(reply, vars(found.place)), folder / site_folder.SOCKET)
