"""The command `fewlabel check-method`: test whether your own method keeps what every method must."""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit

from fewlabel.cli.options import Changes, Form, Format
from fewlabel.core import schema
from fewlabel.core.errors import BadInput
from fewlabel.experiment import method_named


def check_method(
    method: Annotated[str, Argument(metavar="METHOD", hidden=True)],
    changes: Changes = None,
    form: Format = Form.TEXT,
) -> None:
    """Test whether your own method keeps what every method must.

    METHOD is module:Class. Small runs on digits test it in every place where
    it says that labels may be: with one worker and two, killed and resumed,
    with other hidden labels, and without any one client. Each promise gets
    a line: ok, or failed and why. The exit code is 1 if one failed. This
    takes a minute or less.

    Examples:
      fewlabel check-method mine:Class
      fewlabel check-method mine:Class --set method.confidence=0.3
    """
    from fewlabel.engine.conformance import check

    table: dict[str, Any] = {"method": {}}
    for change in changes or []:
        key, sign, value = change.partition("=")
        if not sign or not key.strip().startswith("method."):
            raise BadInput(f"--set takes a setting of the method here, such as method.confidence=0.3, found '{change}'")
        schema.assign(table, key.strip(), schema.parse(value.strip()))
    found, chosen = [], method_named(method, table["method"])
    with tempfile.TemporaryDirectory(prefix="fewlabel-check-") as folder:
        for finding in check(chosen, Path(folder)):
            found.append(finding)
            if form == "text":
                where = f" (labels.at = {finding.place})" if finding.place else ""
                print(f"{'failed' if finding.why else 'ok':6}  {finding.promise}{where}", end="", flush=True)
                print(f": {' '.join(finding.why.split())}" if finding.why else "", flush=True)
    if form == "json":
        print(json.dumps({"method": method, "promises": [one._asdict() for one in found]}, indent=1))
    if any(finding.why for finding in found):
        raise Exit(1)
