"""The command `fewlabel`: results on stdout, everything else on stderr, and one sentence for whatever goes wrong.

PyTorch takes seconds to import, so it comes in with the commands that need it, and help is there at once.
"""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import version
from typing import Annotated

import click
import typer
from typer import Option

from fewlabel.cli import audit, data, federation, model, papers, run, show, site
from fewlabel.core.errors import FewLabelError
from fewlabel.report.terminal import tell

EXIT_CODES = (
    "Exit codes: 0 fine, 1 a bug in FewLabel, 2 bad input, 3 the run failed and can be resumed, "
    "4 disk or files, 130 interrupted."
)
app = typer.Typer(add_completion=False, suggest_commands=False, rich_markup_mode="rich")
app.add_typer(data.app, name="data")
app.add_typer(federation.app, name="federation")
app.add_typer(site.app, name="site")


@app.callback(invoke_without_command=True, epilog=EXIT_CODES)
def fewlabel(
    context: typer.Context,
    show_version: Annotated[bool, Option("--version", help="Show the version and exit.")] = False,
) -> None:
    """Federated learning for when few have labels.

    Every command explains itself, as in `fewlabel run --help`.

    Examples:
      fewlabel run --method fedprox --set rounds=10
      fewlabel compare --methods fedprox --seeds 0,1,2
    """
    if show_version:
        print(version("fewlabel"))
    elif context.invoked_subcommand is None:
        print(context.get_help())


app.command()(run.run)
app.command()(run.compare)
app.command()(run.sweep)
app.command()(papers.reproduce)
app.command("list")(show.list_)
app.command()(show.show)
app.command()(show.watch)
app.command()(model.predict)
app.command()(model.export)
app.command()(audit.audit)
app.command()(show.bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; what goes wrong is told in one line."""
    try:
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)  # methods and data of one's own lie there
        command = typer.main.get_command(app)
        # Not command.main(), which has its own idea of what to print when something goes wrong.
        with command.make_context("fewlabel", list(sys.argv[1:] if argv is None else argv)) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except BaseException as error:
        sentence, code = verdict(error)
        if sentence:
            tell("; ".join([sentence.rstrip("."), *getattr(error, "__notes__", [])]))
        return code
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # or Python would try once more at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def verdict(error: BaseException) -> tuple[str, int]:
    """The sentence for an error, and the exit code."""
    match error:
        case click.BadParameter():
            return misused(error), 2
        case click.ClickException():
            return error.format_message(), 2
        case FewLabelError(__cause__=ModuleNotFoundError()):
            return f"{str(error).rstrip('.')}; modules of your own are looked for in {os.getcwd()}", error.exit_code
        case FewLabelError():
            return str(error), error.exit_code
        case KeyboardInterrupt():
            return "interrupted", 130
        case BrokenPipeError() | SystemExit(__context__=BrokenPipeError()):  # which rich makes of it
            return "", 128 + signal.SIGPIPE  # the reader has seen enough
        case SystemExit():  # of a module of the user's
            said = error.code if isinstance(error.code, str) else f"something ended the command by exit({error.code})"
            return " ".join(said.split()), 2
        case OSError():
            return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error), 4
    with tempfile.NamedTemporaryFile("w", prefix="fewlabel-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    return f"this is a bug in FewLabel: {type(error).__name__}: {error}; traceback in {file.name}", 1


def misused(error: click.BadParameter) -> str:
    """The sentence for a value that an option or argument does not take."""
    found, _, _ = error.message.partition(" is not ")  # click begins with it
    match error.param:
        case click.Option(opts=[name, *_], type=click.IntRange() | click.FloatRange() as kind):
            what = "whole number" if isinstance(kind, click.IntRange) else "number"
            most = "" if kind.max is None else f" to {kind.max}"
            return f"{name} takes a {what} from {kind.min}{most}, found {found}"
        case click.Parameter(type=click.Choice(choices=choices)):
            near = get_close_matches(found.strip("'"), [str(getattr(choice, "value", choice)) for choice in choices], 1)
            return error.format_message().rstrip(".") + (f"; did you mean '{near[0]}'?" if near else "")
    return error.format_message()


if __name__ == "__main__":
    sys.exit(main())
