"""The Python interface: run one experiment, compare several, and use their models."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.errors import BadInput
from fewlabel.engine import backends, record
from fewlabel.experiment import Experiment, load
from fewlabel.report.comparison import Comparison
from fewlabel.report.results import Result
from fewlabel.report.runs import CEILING, FLOOR

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
    """Run an experiment in a directory of its own, by default below runs/.

    With `resume`, go on with the run that `out` holds. The backend "flower-ray" runs on Flower's simulation, that is on
    Ray and perhaps a cluster, with the same results.
    """
    from fewlabel.engine.run import execute, laid_out
    from fewlabel.report.terminal import tell_notes

    backends.check(backend)
    if resume and out is None:
        raise BadInput("resume=True needs the directory to go on with: out=…")
    directory = fresh_directory(experiment) if out is None else Path(out)
    if not (resume and record.is_run(directory)):
        with laid_out(experiment, directory):
            tell_notes([Result(directory)])
            execute(directory, workers=workers, backend=backend)
    elif load(directory / record.EXPERIMENT) == experiment:
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
    """Run experiments side by side and compare them, with the rows labels-only and all-labels added.

    `methods` are names or objects, and take all other settings from `base`. `seeds` replace those of the experiments.
    Runs below `out` that are finished are not run again.
    """
    from fewlabel.engine.sweep import lay_out, run_all
    from fewlabel.report.terminal import tell_notes

    base = base or Experiment()
    wanted = [*experiments, *(replace(base, method=method, name="") for method in methods)] or [base]
    wanted = [*wanted, *bounds(wanted)]
    if seeds is not None:
        wanted = [replace(experiment, seed=seed) for experiment in wanted for seed in seeds]
    directories = lay_out(wanted, Path(out))
    tell_notes([Result(directory) for directory in directories])
    run_all(directories, workers=workers)
    return Comparison([Result(directory) for directory in directories])


def predict(
    run: Result | Path | str, images: Path | str | Iterable[Path | str], *, unsure_below: float = 0.8
) -> "Predictions":
    """Predict the classes of images with a run's last model.

    Images are files, folders, patterns or npz files. The result's `unreadable` names those that could not be read.
    """
    from fewlabel.inference.predict import predict_files

    several = [images] if isinstance(images, Path | str) else images
    return predict_files(directory_of(run), several, unsure_below)


def export(run: Result | Path | str, to: str, out: Path | str | None = None) -> Path:
    """Export a run's last model to "onnx" or "safetensors", with a model card beside it. Return the model's path."""
    from fewlabel.inference.export import export_model

    return export_model(directory_of(run), to, None if out is None else Path(out)).model


def directory_of(run: Result | Path | str) -> Path:
    return run.directory if isinstance(run, Result) else Path(run)


def bounds(experiments: Sequence[Experiment]) -> list[Experiment]:
    """Return the floors and ceilings that these experiments lack, with the same other settings."""
    found: list[Experiment] = []
    for experiment in experiments:
        if experiment.name == CEILING:  # it has every label, so nothing in it tells which ones the floor has
            continue
        for row in (FLOOR, CEILING):
            bound = replace(experiment, method=row, name="")
            known = [replace(other, method=bound.method) for other in (*experiments, *found) if other.name == row]
            if bound not in known:
                found.append(bound)
    return found


def fresh_directory(experiment: Experiment, root: Path = Path("runs")) -> Path:
    """Return the directory of a run that was given none: the first of its name that is free."""
    name = f"{experiment.name}-{experiment.data.name}-seed{experiment.seed}".replace(":", "-").replace("/", "-")
    places = (root / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(p for p in places if not p.exists() or (p.is_dir() and not any(p.iterdir())))
