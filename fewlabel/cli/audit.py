"""The command `fewlabel audit`: check a site's log, and show what it says."""

import json
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from fewlabel.cli.options import Form, Format
from fewlabel.core.errors import StorageError
from fewlabel.deploy import keys, log_heads, members, site_folder
from fewlabel.deploy.site_folder import FILE as SITE
from fewlabel.deploy.site_log import FILE, Account, verify

MANY = 10  # faults that are shown


def audit(
    file: Annotated[Path, Argument(metavar="FILE", hidden=True)],
    head: Annotated[
        str | None,
        Option("--head", metavar="HASH", help="A head that you noted earlier and that must still be in the log."),
    ] = None,
    federation: Annotated[
        Path | None,
        Option(metavar="DIR", help="A federation's folder, or its heads.jsonl: the log must have what was kept of it."),
    ] = None,
    form: Format = Form.TEXT,
) -> None:
    """Check a site's log, and show what came and left.

    FILE is a site's folder, its state folder, or the audit.jsonl in it. If
    a line was changed, removed, inserted or moved, or is not signed by the
    site's key, the command names it and the exit code is 4. If lines were
    cut off at the end, or if someone with the key wrote the log anew, you
    only notice it by lines that were kept elsewhere: a coordinator keeps
    the last line of each reply (--federation), and you may note the head
    that is printed (--head). If the log lacks one, the exit code is 4 too.

    Examples:
      fewlabel audit site
      fewlabel audit site/state --head 1f3c9a0b
      fewlabel audit audit.jsonl --federation lungs
    """
    path, account, about = checked(file, federation)
    if account.faults:
        more = f"; and {len(account.faults) - MANY} more" if len(account.faults) > MANY else ""
        raise StorageError(f"{path} is not as it was written: {'; '.join(account.faults[:MANY])}{more}")
    noted = account.line_of(head) if head is not None else None
    anchored = kept_of(account, federation, about) if federation is not None else None
    if form == "json":
        found = {"lines": len(account.entries), "head": account.head, "torn": account.torn, "tasks": account.totals()}
        found |= {"signed_by": about} if about else {}
        found |= {} if anchored is None else {"kept": anchored}
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
    if anchored is not None:
        print(f"the log has all {anchored:,} lines that the coordinator kept of it")
    print(signatures(account, about))
    return print(f"head {account.head}")


def signatures(account: Account, signer: str) -> str:
    """Say how many lines are signed, and by whom."""
    signed = sum(1 for entry in account.entries if entry.signature)
    if not signed:
        return "no line of it is signed, as in logs of before 0.2"
    first = f"; the {len(account.entries) - signed:,} before them are not" * (signed < len(account.entries))
    if not signer:
        return f"{signed:,} lines are signed, by whom was not checked: give the site's folder, or --federation"
    return f"{signed:,} lines are signed by the key {signer}{first}"


def checked(file: Path, federation: Path | None) -> tuple[Path, Account, str]:
    """Return a log's path, what it says, and whose key has signed it, as far as a key is at hand."""
    folder = next((place for place in (file, file.parent, file.parent.parent) if (place / SITE).exists()), None)
    path = file / FILE if file.is_dir() else file
    known: dict[str, Any] = {}
    if folder is not None:
        site = site_folder.read(folder)
        path = Path(site.place.state) / FILE if file == folder else path
        public = members.read_enrolment(folder / site_folder.ENROLMENT).key
        known = {keys.fingerprint(public): keys.load_public(public)}
    elif federation is not None and federation.is_dir():
        known = dict(log_heads.signers(federation))
    account = verify(path)
    signer = log_heads.signer_of(account, known)
    if known and any(entry.signature for entry in account.entries):
        if signer is None:
            raise StorageError(f"{path} is not as it was written: nobody whose key is known has signed its last line")
        return path, verify(path, known[signer]), signer
    return path, account, ""


def kept_of(account: Account, federation: Path, signer: str) -> int:
    """Return how many lines a coordinator kept of a log. Raise an error if the log lacks one of them."""
    kept = [one for one in log_heads.read(log_heads.heads_file(federation)) if one.key == signer]
    if not kept:
        raise StorageError("the coordinator kept no line that the key of this log has signed")
    if faults := log_heads.compare(account, kept):
        more = f"; and {len(faults) - MANY} more" if len(faults) > MANY else ""
        raise StorageError(f"the log is not the one that the coordinator knows: {'; '.join(faults[:MANY])}{more}")
    return sum(1 for one in kept if one.hash)
