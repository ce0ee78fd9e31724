"""Runs whose numbers are known: the files of a run, written by hand."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fewlabel.engine import record
from fewlabel.experiment import Experiment, dumps
from fewlabel.report.results import Result
from fewlabel.report.runs import METRICS


def lay_out(
    directory: Path,
    experiment: Experiment,
    lines: Sequence[dict[str, Any]],
    finished: bool = True,
    partition: dict[str, Any] | None = None,
) -> Result:
    directory.mkdir(parents=True)
    (directory / record.EXPERIMENT).write_text(dumps(experiment))
    (directory / record.PARTITION).write_text(json.dumps(partition or {"classes": ["a", "b"]}))
    (directory / record.ROUNDS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    if finished:
        (directory / record.SUMMARY).write_text(json.dumps({"versions": {"fewlabel": "0.1.0"}}))
    return Result(directory)


def metrics(value: float, **more: Any) -> dict[str, Any]:
    """All metrics of a split with one value."""
    return dict.fromkeys(METRICS, value) | more
