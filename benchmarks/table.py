"""Everything that is measured, one after another: what `make bench` prints.

What each found stays in runs/bench/ as JSON; `python -m benchmarks.table FOLDER` prints what is in such a folder.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "runs" / "bench"
NAMES = ("overhead", "views", "fedavg", "small", "scale", "rscfed", "arithmetic", "flower")


def rows(name: str, found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Ratios with their intervals, targets with whether they are met, and what else ran, wherever they stand."""
    for what, ratio in found.get("ratios", {}).items():
        low, high = ratio["interval_95"]
        yield name, what, f"{ratio['ratio']:.3f} [{low:.3f}, {high:.3f}]"
    for target, met in found.get("targets", {}).items():
        yield name, target, "met" if met else "missed"
    yield from ((name, what, f"{found[what]:.2f}") for what in ("others", "load") if what in found)
    for part, inner in found.items():
        if isinstance(inner, dict) and part not in ("ratios", "targets"):
            yield from rows(f"{name}: {part}", inner)


def measure(folder: Path) -> Iterator[tuple[str, str, str]]:
    """Runs all of them, and says which failed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        print(f"{name} …", file=sys.stderr)
        command = [sys.executable, "-m", "fewlabel", "bench", name]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
        file = folder / f"{name}.json"
        file.unlink(missing_ok=True)  # an older one would pass for what was found now
        if done.returncode:
            yield name, "", f"failed with exit code {done.returncode}"
        else:
            file.write_bytes(done.stdout)


def print_table(folder: Path, failed: Iterable[tuple[str, str, str]] = ()) -> None:
    files = [folder / f"{name}.json" for name in NAMES]
    table = [row for file in files if file.exists() for row in rows(file.stem, json.loads(file.read_bytes()))]
    table += failed
    widths = [max((len(row[column]) for row in table), default=0) for column in range(2)]
    for row in table:
        print(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print_table(Path(sys.argv[1]))
    else:
        print_table(FOLDER, list(measure(FOLDER)))
