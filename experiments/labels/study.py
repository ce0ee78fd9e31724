"""What do labels buy, and which images should people label? The study behind docs/label.md.

    python -m experiments.labels.study pbc ham --set pbc.data.path=pbc.npz
    python -m experiments.labels.study digits --seeds 0 --counts 20 --strategies random,margin

It runs each file of this folder with labels alone and with FewLabel's own method. Then `fewlabel label --simulate` lets
hidden labels answer for each strategy and number of labels, with the model of that very run, and the run is done again
with these labels. Done again, the command goes on: a run that is finished and a table that is written are left alone.
`python -m experiments.sides labels runs/labels/pbc` keeps what came out, for the tables of docs/label.md.
"""

import argparse
import contextlib
import io
import tomllib
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from fewlabel.cli.main import main as fewlabel
from fewlabel.engine import record
from fewlabel.engine.run import prepare
from fewlabel.engine.sweep import run_all
from fewlabel.experiment import Experiment, read
from fewlabel.report.runs import FLOOR

HERE = Path(__file__).parent
OWN = "tutor"
METHODS = (FLOOR, OWN)


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
    cells = list(product(given.files, given.methods, given.seeds))
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


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="files of this folder, without .toml")
    parser.add_argument("--set", action="append", default=[], help="a setting of a file: pbc.data.path=pbc.npz")
    parser.add_argument("--methods", type=words, default=METHODS)
    parser.add_argument("--seeds", type=numbers, default=[0, 1, 2])
    parser.add_argument("--counts", type=numbers, default=[100, 400], help="labels more, over all clients")
    parser.add_argument("--strategies", type=words, default=["random", "least-certain", "uncertain-diverse"])
    parser.add_argument("--out", type=Path, default=Path("runs/labels"))
    parser.add_argument("--workers", type=int)
    study(parser.parse_args())


if __name__ == "__main__":
    main()
