"""What do labels buy, and which images should people label? The study behind docs/label.md.

    python -m experiments.labels.study pbc ham --set pbc.data.path=pbc.npz
    python -m experiments.labels.study digits --seeds 0 --counts 20 --strategies random,margin

It runs each file of this folder with labels alone and with FewLabel's own method. Then `fewlabel label --simulate` lets
hidden labels answer for each strategy and number of labels, with the model of that very run, and the run is done again
with these labels. Done again, the command goes on: a run that is finished and a table that is written are left alone.
At the end, and with --table alone, it prints a table for each file.
"""

import argparse
import contextlib
import io
import statistics
import tomllib
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

from fewlabel.cli.main import main as fewlabel
from fewlabel.engine import record
from fewlabel.engine.run import prepare
from fewlabel.engine.sweep import run_all
from fewlabel.experiment import Experiment, read
from fewlabel.report.results import Result
from fewlabel.report.runs import FLOOR

HERE = Path(__file__).parent
OWN = "tutor"
METHODS = (FLOOR, OWN)
METRICS = ("accuracy", "balanced_accuracy", "auc")


def experiment(name: str, method: str, seed: int, changes: Sequence[str]) -> Experiment:
    table = {"recipe": "fewlabel", **tomllib.loads((HERE / f"{name}.toml").read_text())}
    return read(table, [*changes, f"method.name={method}", f"seed={seed}"])


def place(out: Path, name: str, method: str, seed: int, strategy: str = "", count: int = 0) -> Path:
    return out / name / f"{method}-{f'{strategy}-{count}' if count else 'none-0'}-seed{seed}"


def lay_out(directory: Path, wanted: Experiment) -> Path:
    return directory if record.is_run(directory) else prepare(wanted, directory)


def simulate(run: Path, strategy: str, count: int) -> Path:
    """Let hidden labels answer, unless they have: the same run always gives the same table."""
    file = run / f"labels-{strategy}-{count}.csv"
    if not file.exists():
        with contextlib.redirect_stdout(io.StringIO()):
            words = ["label", "--simulate", "--run", run, "--strategy", strategy, "--count", count, "--out", file]
            if code := fewlabel([str(word) for word in words]):
                raise SystemExit(code)
    return file


def study(given: argparse.Namespace) -> None:
    """Run what is not finished: first all without more labels, then all with."""
    own = {
        name: [text.removeprefix(f"{name}.") for text in given.set if text.startswith(f"{name}.")]
        for name in given.files
    }
    cells = list(product(given.files, METHODS, given.seeds))
    first = [
        lay_out(place(given.out, name, method, seed), experiment(name, method, seed, own[name]))
        for name, method, seed in cells
    ]
    run_all(first, workers=given.workers, watch=tell)
    more = []
    for (name, method, seed), run in zip(cells, first, strict=True):
        for strategy, count in product(given.strategies, given.counts):
            labels = f"labels.file={simulate(run, strategy, count)}"
            directory = place(given.out, name, method, seed, strategy, count)
            more.append(lay_out(directory, experiment(name, method, seed, [*own[name], labels])))
    run_all(more, workers=given.workers, watch=tell)


def tell(directory: Path, line: dict[str, object]) -> None:
    if line.get("done"):
        print(f"{directory} is finished", flush=True)


def scores(given: argparse.Namespace, name: str, method: str, metric: str, strategy: str, count: int) -> list[float]:
    """Return a metric of the last round for each seed that is finished, in percent."""
    found = []
    for seed in given.seeds:
        directory = place(given.out, name, method, seed, strategy, count)
        if record.is_run(directory) and record.is_finished(directory):
            last = Result(directory).last
            found.append(100 * last["test"][metric] if last else float("nan"))
    return found


def shown(values: Sequence[float]) -> str:
    if not values:
        return "–"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}"


def tables(given: argparse.Namespace, name: str) -> None:
    """Print the mean over seeds, and its standard deviation, of each cell in Markdown."""
    for metric in METRICS:
        print(f"\n{name}, {metric.replace('_', ' ')} (mean ± standard deviation over {len(given.seeds)} seeds)\n")
        print(f"| method | strategy | 0 | {' | '.join(map(str, given.counts))} |")
        print(f"|---|---|{'---|' * (1 + len(given.counts))}")
        for method, strategy in product(METHODS, given.strategies):
            cells = [scores(given, name, method, metric, strategy, count) for count in (0, *given.counts)]
            print(f"| {method} | {strategy} | {' | '.join(map(shown, cells))} |")
        for strategy in given.strategies:
            print(f"\n{bought(given, name, metric, strategy)}")


def bought(given: argparse.Namespace, name: str, metric: str, strategy: str) -> str:
    """Say how many labels buy what unlabeled images bring, on a straight line between the numbers that were tried."""
    unlabeled = scores(given, name, OWN, metric, strategy, 0)
    curve = [(count, scores(given, name, FLOOR, metric, strategy, count)) for count in (0, *given.counts)]
    if not unlabeled or not all(values for _, values in curve):
        return f"{strategy}: not all runs are finished"
    target, means = statistics.mean(unlabeled), [(count, statistics.mean(values)) for count, values in curve]
    gain = f"unlabeled images bring {target - means[0][1]:+.1f} points ({OWN} against {FLOOR}, no more labels)"
    labels = reached(means, target)
    if target <= means[0][1]:
        return f"{strategy}: {gain}: no label need be bought for that"
    if labels is None:
        return f"{strategy}: {gain}; {means[-1][0]} labels more do not buy that: {means[-1][1] - means[0][1]:+.1f}"
    return f"{strategy}: {gain}; labels alone reach that with about {labels:.0f} labels more"


def reached(curve: Sequence[tuple[int, float]], target: float) -> float | None:
    """Return where a line through these points first reaches a value, or None if it never does."""
    for (low, before), (high, after) in pairwise(curve):
        if before < target <= after:
            return low + (high - low) * (target - before) / (after - before)
    return None


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="files of this folder, without .toml")
    parser.add_argument("--set", action="append", default=[], help="a setting of a file: pbc.data.path=pbc.npz")
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--counts", type=numbers, default=[100, 400], help="labels more, over all clients")
    parser.add_argument("--strategies", type=words, default=["random", "least-certain", "uncertain-diverse"])
    parser.add_argument("--out", type=Path, default=Path("runs/labels"))
    parser.add_argument("--workers", type=int)
    parser.add_argument("--table", action="store_true", help="print the tables of what is finished, and run nothing")
    given = parser.parse_args()
    if not given.table:
        study(given)
    for name in given.files:
        tables(given, name)


if __name__ == "__main__":
    main()
