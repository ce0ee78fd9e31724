"""Errors for people: one sentence that says what is wrong and how to fix it, and the exit code of the command."""

from collections.abc import Iterable
from difflib import get_close_matches


class FewLabelError(Exception):
    """An error that a user can fix. The command prints its sentence without a traceback, and exits with `exit_code`."""

    exit_code = 1


class BadInput(FewLabelError):
    """A setting, file or name cannot be used as given."""

    exit_code = 2


class Spent(BadInput):
    """A site has no epsilon left for a task, so it does not train."""


class RunFailed(FewLabelError):
    """A run could not go on. What it has computed is kept, and it can be resumed."""

    exit_code = 3


class StorageError(FewLabelError):
    """A directory, disk or stored file cannot be read or written."""

    exit_code = 4


def unknown(what: str, name: str, known: Iterable[str], else_: str = "") -> str:
    """Return the sentence for a name that does not exist. It names the nearest one, says `else_`, or lists them all."""
    hint = did_you_mean(name, known) or else_ or f"there are {', '.join(known)}"
    return f"there is no {what} '{name}'; {hint}"


def printable(text: str, most: int = 300) -> str:
    """Shorten a text that somebody else wrote, and keep only letters that can be shown."""
    short = " ".join(text.split())[:most]
    return "".join(letter if letter.isprintable() else "?" for letter in short)


def install(extra: str) -> str:
    """Return the command that installs one of FewLabel's extras. There is no package of it to download."""
    return f"in FewLabel's folder, pip install '.[{extra}]'"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question that names the known word nearest to a misspelt one, or an empty text if none is near."""
    near = get_close_matches(name, list(known), 1)
    return f"did you mean '{near[0]}'?" if near else ""
