"""Bring what pages of the manual show up to date: `python docs/console.py PAGE.md ...`

A block of the kind `console` shows commands and what they print. A block whose first line is a comment with a file's
name is that file. A block below `<!-- file: PATH -->` is a copy of a file in the repository. All commands of a page run
in one new directory, in the order of the page.
"""

import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.M)
FILE = re.compile(r"# (\S+\.(?:toml|py|csv))\n")
COPY = re.compile(r"(^<!-- file: (\S+) -->\n```\w+\n).*?(^```$)", re.M | re.S)


def shown(page: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page, each with the output that the page shows."""
    for kind, text in BLOCK.findall(page):
        if kind == "console":
            yield from COMMAND.findall(text)


def write_files(path: Path) -> None:
    """Write the files that a page shows into this directory."""
    page = path.read_text()
    for _, text in BLOCK.findall(page):
        if name := FILE.match(text):
            Path(name[1]).write_text(text)
    for _, name, _ in COPY.findall(page):
        Path(Path(name).name).write_text((path.parent / name).read_text())


def with_copies(path: Path) -> str:
    """Return a page with the files that it copies as they are today."""
    return COPY.sub(lambda found: found[1] + (path.parent / found[2]).read_text() + found[3], path.read_text())


def printed(line: str) -> str:
    """Return what a command of FewLabel prints on stdout, without spaces at the ends of lines."""
    from fewlabel.cli.main import main

    name, *arguments = shlex.split(line)
    with redirect_stdout(io.StringIO()) as out:
        code = main(arguments) if name == "fewlabel" else 127
    if code:
        raise SystemExit(f"{line}: exit code {code}")
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().strip("\n").splitlines())


def refreshed(page: str) -> str:
    """Return a page with what its commands print today."""

    def command(found: re.Match[str]) -> str:
        return f"$ {found[1]}\n{printed(found[1])}"

    def block(found: re.Match[str]) -> str:
        return COMMAND.sub(command, found[0]) if found[1] == "console" else found[0]

    return BLOCK.sub(block, page)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    for path in [Path(name).resolve() for name in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            write_files(path)
            path.write_text(refreshed(with_copies(path)))
