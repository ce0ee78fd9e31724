"""The command `fewlabel audit`: check a site's log, and show what it says."""

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from fewlabel.cli.options import Form, Format
from fewlabel.core.errors import StorageError
from fewlabel.deploy.site_log import FILE, verify

MANY = 10  # faults that are shown


def audit(
    file: Annotated[Path, Argument(metavar="FILE", hidden=True)],
    head: Annotated[
        str | None,
        Option("--head", metavar="HASH", help="A head that you noted earlier and that must still be in the log."),
    ] = None,
    form: Format = Form.TEXT,
) -> None:
    """Check a site's log, and show what came and left.

    FILE is the audit.jsonl in a site's state folder, or that folder. If a
    line was changed, removed, inserted or moved, the command names it and
    the exit code is 4. If lines were cut off at the end, you only notice
    it with a head: note the head that is printed, keep it away from the
    log, and give it next time. If no line has it, the exit code is 4 too.

    Examples:
      fewlabel audit state/audit.jsonl
      fewlabel audit state/audit.jsonl --head 1f3c9a0b
    """
    path = file / FILE if file.is_dir() else file
    account = verify(path)
    if account.faults:
        more = f"; and {len(account.faults) - MANY} more" if len(account.faults) > MANY else ""
        raise StorageError(f"{path} is not as it was written: {'; '.join(account.faults[:MANY])}{more}")
    noted = account.line_of(head) if head is not None else None
    if form == "json":
        found = {"lines": len(account.entries), "head": account.head, "torn": account.torn, "tasks": account.totals()}
        return print(json.dumps(found if noted is None else found | {"head_at": noted}, indent=1))
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("task", "came", "bytes", "left", "bytes"):
        table.add_column(name, justify="left" if name == "task" else "right", overflow="fold")
    for task, row in account.totals().items():
        shown = "".join(letter if letter.isprintable() else "?" for letter in task)
        table.add_row(shown, *(f"{row[key]:,}" for key in ("in", "bytes_in", "out", "bytes_out")))
    Console(highlight=False, markup=False, emoji=False).print(table)
    if account.entries:
        print(
            f"{len(account.entries):,} lines from {account.entries[0].time} to {account.entries[-1].time}, all in order"
        )
    if account.torn:
        print("the last line is half written, as a kill leaves it: the reply that it describes has not left")
    if noted is not None:
        print(f"the head that you noted is line {noted:,}")
    return print(f"head {account.head}")
