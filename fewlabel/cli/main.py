"""The command `fewlabel`: results on stdout, everything else on stderr, one sentence for whatever goes wrong.

PyTorch takes seconds to import. Only the commands that need it import it, so help appears at once.
"""

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import click
import typer
from typer import Option

from fewlabel.cli import audit, data, federation, label, methods, model, papers, run, show, site
from fewlabel.core import schema
from fewlabel.core.errors import FewLabelError, did_you_mean
from fewlabel.experiment import Experiment
from fewlabel.report.terminal import tell

EXIT_CODES = (
    "Exit codes: 0 success, 1 a bug in FewLabel or a promise that check-method found broken, 2 bad input, "
    "3 the run failed and can be resumed, "
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

    For help on a command: `fewlabel run --help`.

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
app.command()(methods.check_method)
app.command("list")(show.list_)
app.command()(show.show)
app.command()(show.watch)
app.command()(model.predict)
app.command()(model.export)
app.command()(label.label)
app.command()(audit.audit)
app.command()(show.bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. An error is one line on stderr."""
    try:
        if (here := os.getcwd()) not in sys.path:
            sys.path.insert(0, here)  # your own methods and data may be there
        command = typer.main.get_command(app)
        # Not command.main(), which prints errors in its own way.
        with command.make_context("fewlabel", list(sys.argv[1:] if argv is None else argv)) as context:
            command.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except BaseException as error:
        sentence, code = explain(error)
        if sentence:
            tell("; ".join([sentence.rstrip("."), *getattr(error, "__notes__", [])]))
        return code
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # Python would try once more when it exits, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def explain(error: BaseException) -> tuple[str, int]:
    """Return the sentence for an error, and the exit code."""
    match error:
        case click.BadParameter():
            return explain_value(error), 2
        case click.NoSuchOption():
            return explain_option(error), 2
        case click.ClickException():
            return error.format_message(), 2
        case FewLabelError(__cause__=ModuleNotFoundError()):
            return f"{str(error).rstrip('.')}; modules of your own are looked for in {os.getcwd()}", error.exit_code
        case FewLabelError():
            return str(error), error.exit_code
        case KeyboardInterrupt():
            return "interrupted", 130
        case BrokenPipeError() | SystemExit(__context__=BrokenPipeError()):  # as rich raises it
            return "", 128 + signal.SIGPIPE  # the reader has seen enough
        case SystemExit():  # a module of the user's did this
            why = error.code if isinstance(error.code, str) else f"something ended the command by exit({error.code})"
            return " ".join(why.split()), 2
        case OSError():
            return f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error), 4
    with tempfile.NamedTemporaryFile("w", prefix="fewlabel-", suffix=".txt", delete=False) as file:
        traceback.print_exception(error, file=file)
    return f"this is a bug in FewLabel: {type(error).__name__}: {error}; traceback in {file.name}", 1


def explain_value(error: click.BadParameter) -> str:
    """Return the sentence for a value that an option or argument does not take."""
    found, _, _ = error.message.partition(" is not ")  # click's message begins with the value
    match error.param:
        case click.Option(opts=[name, *_], type=click.IntRange() | click.FloatRange() as kind):
            what = "whole number" if isinstance(kind, click.IntRange) else "number"
            most = "" if kind.max is None else f" to {kind.max}"
            return f"{name} takes a {what} from {kind.min}{most}, found {found}"
        case click.Parameter(type=click.Choice(choices=choices)):
            names = [str(getattr(choice, "value", choice)) for choice in choices]
            return "; ".join(filter(None, [error.format_message().rstrip("."), did_you_mean(found.strip("'"), names)]))
    return error.format_message()


def explain_option(error: click.NoSuchOption) -> str:
    """Return the sentence for an option that is not there. A setting by that name, such as rounds, goes after --set."""
    if error.ctx is not None and any("--set" in parameter.opts for parameter in error.ctx.command.params):
        name = error.option_name.lstrip("-").replace("-", "_")
        method = schema.keys(type(Experiment().method))
        keys = [*schema.keys(Experiment), *(f"method.{key}" for key in method)]
        whole = [key for key in (name, f"{name}.name", f"{name}.count") if key in keys]
        if len(found := whole[:1] or [key for key in keys if key.endswith(f".{name}")]) == 1:
            return f"there is no option {error.option_name}, but a setting: --set {found[0]}=VALUE"
    return error.format_message()


if __name__ == "__main__":
    sys.exit(main())
