"""The Python interface: run one experiment, compare several, and use their models."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core.errors import BadInput
from fewlabel.engine import backends, record
from fewlabel.experiment import RECIPES, USUAL, Experiment, load, method_by_recipe
from fewlabel.report.comparison import Comparison
from fewlabel.report.results import Result
from fewlabel.report.runs import CEILING, FLOOR

if TYPE_CHECKING:
    from fewlabel.inference.predict import Predictions
    from fewlabel.inference.prior import Prior


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    *,
    workers: int | None = None,
    resume: bool = False,
    backend: str = "simulator",
) -> Result:
    """Run an experiment in a directory of its own, by default below runs/.

    An experiment that has no `train` trains by the recipe "fewlabel". With `resume`, go on with the run that `out`
    holds. The backend "flower-ray" runs on Flower's simulation, that is on
    Ray and perhaps a cluster, with the same results. In a notebook and on a terminal you see the progress.
    """
    from fewlabel.engine.run import execute, laid_out
    from fewlabel.report.terminal import Rounds, tell_notes

    backends.check(backend)
    if resume and out is None:
        raise BadInput("resume=True needs the directory to go on with: out=…")
    directory = fresh_directory(experiment) if out is None else Path(out)

    def played(directory: Path) -> None:
        with Rounds(load(directory / record.EXPERIMENT), directory) as shown:
            execute(directory, workers=workers, backend=backend, watch=shown.watch if shown.live else None)

    if not (resume and record.is_run(directory)):
        with laid_out(trained(experiment), directory):
            tell_notes([Result(directory)])
            played(directory)
    else:
        check_same(load(directory / record.EXPERIMENT), experiment, directory)
        played(directory)
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

    `methods` are names or objects, and take all other settings from `base`. Those that have no `train` train by the
    recipe "fewlabel". If `base` does, so do the sites of an object, but for the settings that you changed in it.
    `seeds` replace those of the experiments.
    Runs below `out` that are finished are not run again. In a notebook and on a terminal you see the progress.
    """
    from fewlabel.engine.sweep import lay_out, run_all
    from fewlabel.report.terminal import Runs, tell_notes

    base = base or Experiment()
    # A recipe's name also sets how sites train, as it did for `base`.
    train: Any = base.train if base.recipe_name == "own" or base.train is None else base.recipe_name
    wanted = [*experiments, *(replace(base, method=method, name="", train=train) for method in methods)] or [base]
    wanted = [trained(experiment) for experiment in wanted]
    wanted = [*wanted, *bounds(wanted)]
    if seeds is not None:
        wanted = [replace(experiment, seed=seed) for experiment in wanted for seed in seeds]
    directories = lay_out(wanted, Path(out))
    tell_notes([Result(directory) for directory in directories])
    done = sum(map(record.is_finished, directories))
    with Runs({directory: load(directory / record.EXPERIMENT) for directory in directories}, done) as shown:
        run_all(directories, workers=workers, watch=shown.watch if shown.live else lambda directory, line: None)
    return Comparison([Result(directory) for directory in directories])


def predict(
    run: Result | Path | str,
    images: Path | str | Iterable[Path | str],
    *,
    unsure_below: float = 0.8,
    weights: str | None = None,
    prior: "Prior | None" = None,
) -> "Predictions":
    """Predict the classes of images with a run's model.

    `weights` are those of the "last" round, which is the default, or of the round that "validation" chose. `prior` says
    how frequent classes are: "equal", "labels", or a share for each class.

    Images are files, folders, patterns or npz files. The result's `unreadable` names those that could not be read.
    """
    from fewlabel.inference.predict import predict_files

    several = [images] if isinstance(images, Path | str) else images
    return predict_files(directory_of(run), several, unsure_below, weights=weights, prior=prior)


def export(
    run: Result | Path | str,
    to: str,
    out: Path | str | None = None,
    *,
    weights: str | None = None,
    prior: "Prior | None" = None,
) -> Path:
    """Export a run's model to "onnx" or "safetensors", with a model card beside it. Return the model's path.

    `weights` and `prior` are as for `predict`.
    """
    from fewlabel.inference.export import export_model

    place = None if out is None else Path(out)
    return export_model(directory_of(run), to, place, weights=weights, prior=prior).model


def directory_of(run: Result | Path | str) -> Path:
    return run.directory if isinstance(run, Result) else Path(run)


def trained(experiment: Experiment) -> Experiment:
    """Return an experiment with our recipe, unless it says how to train. What is changed in a method stays."""
    if experiment.train is not None:
        return experiment
    return replace(experiment, train=RECIPES[USUAL], method=method_by_recipe(experiment.method, USUAL))


def check_same(stored: Experiment, given: Experiment, directory: Path) -> None:
    """Refuse to resume a run with another experiment. A run of FewLabel 0.1 has no recipe, and goes on without one."""
    if given in (stored, stored.resolved) or trained(given) == stored.resolved:
        return
    if (
        replace(given, rounds=stored.rounds) == stored
        or replace(trained(given), rounds=stored.rounds) == stored.resolved
    ):
        record.check_rounds(directory, stored.rounds, given.rounds)
    raise BadInput(f"{directory} holds a run of another experiment; choose another directory")


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
