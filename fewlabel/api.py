"""Runs from Python: one experiment, several side by side between their floor and their ceiling, and their models."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.errors import BadInput
from fewlabel.experiment import Experiment, load
from fewlabel.report.comparison import Comparison
from fewlabel.report.results import CEILING, FLOOR, Result

if TYPE_CHECKING:
    from fewlabel.inference.predict import Predictions


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    *,
    workers: int | None = None,
    resume: bool = False,
    backend: str = "simulator",
) -> Result:
    """Runs an experiment in a directory of its own; with `resume`, goes on with what `out` holds of it.

    The backend "flower-ray" has Flower's simulation do it, on Ray and perhaps a cluster, with the same bits.
    """
    from fewlabel.engine.backends import check
    from fewlabel.engine.run import execute, laid_out

    check(backend)
    if resume and out is None:
        raise BadInput("resume=True needs the directory to go on with: out=…")
    directory = fresh_directory(experiment) if out is None else Path(out)
    if not (resume and (directory / "experiment.toml").exists()):
        with laid_out(experiment, directory):
            execute(directory, workers=workers, backend=backend)
    elif load(directory / "experiment.toml") == experiment:
        execute(directory, workers=workers, backend=backend)
    else:
        raise BadInput(f"{directory} holds a run of another experiment; choose another directory")
    return Result(directory)


def compare(
    experiments: Iterable[Experiment] = (),
    *,
    methods: Iterable[Any] = (),
    seeds: Sequence[int] | None = None,
    base: Experiment | None = None,
    out: Path | str = Path("runs/compare"),
    workers: int | None = None,
) -> Comparison:
    """Runs experiments side by side, what was run before below `out` not again, and adds floor and ceiling.

    `methods`, by name or as objects, take everything else from `base`; `seeds` replace the experiments' own.
    """
    from fewlabel.engine.sweep import sweep

    base = base or Experiment()
    wanted = [*experiments, *(replace(base, method=method, name="") for method in methods)] or [base]
    wanted = [*wanted, *bounds(wanted)]
    if seeds is not None:
        wanted = [replace(experiment, seed=seed) for experiment in wanted for seed in seeds]
    return Comparison([Result(directory) for directory in sweep(wanted, Path(out), workers=workers)])


def predict(
    run: Result | Path | str, images: Path | str | Iterable[Path | str], *, unsure_below: float = 0.8
) -> "Predictions":
    """What a run's last model says of files, folders, patterns or npz files; `unreadable` names what is left out."""
    from fewlabel.inference import predict as predictions

    several = [images] if isinstance(images, Path | str) else images
    return predictions.predict(directory_of(run), several, unsure_below)


def export(run: Result | Path | str, to: str, out: Path | str | None = None) -> Path:
    """Writes a run's last model as "onnx" or "safetensors", and a model card beside it; returns the model's path."""
    from fewlabel.inference import export as exports

    return exports.export(directory_of(run), to, None if out is None else Path(out)).model


def directory_of(run: Result | Path | str) -> Path:
    return run.directory if isinstance(run, Result) else Path(run)


def bounds(experiments: Sequence[Experiment]) -> list[Experiment]:
    """The floors and ceilings that these experiments lack: those in the same circumstances."""
    found: list[Experiment] = []
    for experiment in experiments:
        if experiment.name == CEILING:  # its labels are everyone's: nothing in it tells what the floor would have
            continue
        for row in (FLOOR, CEILING):
            bound = replace(experiment, method=row, name="")
            known = [replace(other, method=bound.method) for other in (*experiments, *found) if other.name == row]
            if bound not in known:
                found.append(bound)
    return found


def fresh_directory(experiment: Experiment, root: Path = Path("runs")) -> Path:
    """Where a run goes that was given no directory: the first of its name that is not taken."""
    name = f"{experiment.name}-{experiment.data.name}-seed{experiment.seed}".replace(":", "-").replace("/", "-")
    places = (root / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(p for p in places if not p.exists() or (p.is_dir() and not any(p.iterdir())))
