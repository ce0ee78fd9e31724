"""Everything that is measured, one after another: what `make bench` prints.

What each found stays in runs/bench/ as JSON.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("overhead", "views", "fedavg", "small", "scale", "rscfed", "arithmetic")


def rows(name: str, found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Ratios with their intervals, and targets with whether they are met, wherever they stand."""
    for what, ratio in found.get("ratios", {}).items():
        low, high = ratio["interval_95"]
        yield name, what, f"{ratio['ratio']:.3f} [{low:.3f}, {high:.3f}]"
    for target, met in found.get("targets", {}).items():
        yield name, target, "met" if met else "missed"
    for part, inner in found.items():
        if isinstance(inner, dict) and part not in ("ratios", "targets"):
            yield from rows(f"{name}: {part}", inner)


def print_table() -> None:
    folder = ROOT / "runs" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    table: list[tuple[str, str, str]] = []
    for name in NAMES:
        print(f"{name} …", file=sys.stderr)
        done = subprocess.run(
            [sys.executable, "-m", "fewlabel", "bench", name], cwd=ROOT, stdout=subprocess.PIPE, check=False
        )
        if done.returncode:
            table.append((name, "", f"failed with exit code {done.returncode}"))
            continue
        (folder / f"{name}.json").write_bytes(done.stdout)
        table += rows(name, json.loads(done.stdout))
    widths = [max(len(row[column]) for row in table) for column in range(2)]
    for row in table:
        print(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}")


if __name__ == "__main__":
    print_table()
