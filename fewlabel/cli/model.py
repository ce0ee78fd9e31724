"""The commands that use a run's model: `fewlabel predict` and `fewlabel export`."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from typer import Argument, Option

from fewlabel.cli.data import show_lines
from fewlabel.cli.options import Form, Format
from fewlabel.core.errors import BadInput
from fewlabel.report.terminal import Screen, tell

if TYPE_CHECKING:
    from fewlabel.inference.predict import Predictions


Run = Annotated[Path, Argument(metavar="RUN", hidden=True)]
Weights = Annotated[
    str | None, Option(metavar="CHOICE", help="last: of the last round, the default; validation: of its best round.")
]
Prior = Annotated[
    str | None,
    Option(metavar="PRIOR", help="How frequent classes are: equal, labels, FILE or cat=0.9,dog=0.1."),
]


def predict(
    run: Run,
    images: Annotated[list[str], Argument(metavar="IMAGES...", hidden=True)],
    table: Annotated[
        Path | None, Option("--csv", metavar="FILE", help="Write all probabilities to FILE; show a summary.")
    ] = None,
    unsure_below: Annotated[
        float, Option(metavar="P", min=0, max=1, help="Mark an image as unsure if its best class has less.")
    ] = 0.8,
    weights: Weights = None,
    prior: Prior = None,
    form: Format = Form.TEXT,
) -> None:
    """Predict the class of images with a run's model.

    RUN is a run's directory, or an exported safetensors file. IMAGES are
    files, folders, patterns or npz files. If some cannot be read, they are
    listed and the exit code is 2. By default the model expects classes as it
    was trained to: with the recipe fewlabel, all equally frequent.

    Examples:
      fewlabel predict runs/fedprox-digits-seed0 new/*.png
      fewlabel predict runs/ours scans/ --weights validation --prior labels
      fewlabel predict runs/ours scans/ --csv found.csv --unsure-below 0.95
    """
    if table is not None and table.is_dir():
        raise BadInput(f"--csv {table} is a directory; name a file in it")
    if table is not None and not table.absolute().parent.is_dir():
        raise BadInput(f"--csv {table} cannot be written: there is no directory {table.parent}")
    from fewlabel.inference.predict import predict_files

    with Screen(1) as screen:
        found = predict_files(
            run,
            images,
            unsure_below,
            lambda done, total: screen.show(done / total, f"{done:,} of {total:,} files"),
            weights=weights,
            prior=prior,
        )
    for note in found.notes:
        tell(note)
    if table is not None:
        found.csv(table)
    if form == "json":
        print(json.dumps(found.to_json(), indent=1))
    else:
        show(found, table)
    if found.unreadable:
        count = len(found.unreadable)
        raise BadInput(f"{count:,} file{'s' * (count > 1)} could not be read, {len(found):,} images were")


def show(found: "Predictions", table: Path | None) -> None:
    """Print a line for each image. If they are in a file, print how many images each class has."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000  # programs read whole lines
    shown = Table(box=None, pad_edge=False)
    shown.add_column("class" if table else "image", overflow="fold")
    if table:
        shown.add_column("images", justify="right")
        shown.add_column("unsure", justify="right")
        all_, unsure = (Counter(a.label for a in found.answers if a.unsure or every) for every in (True, False))
        for name in found.classes:
            shown.add_row(name, f"{all_[name]:,}", f"{unsure[name]:,}")
    else:
        shown.add_column("class", overflow="fold")
        shown.add_column("probability", justify="right", no_wrap=True)
        shown.add_column("", overflow="fold")
        for answer in found.answers:
            mark = f"unsure: or {answer.second} {answer.second_probability:.2f}" if answer.unsure else ""
            name = answer.file.encode("utf-8", "backslashreplace").decode()
            shown.add_row(name, answer.label, f"{answer.probability:.3f}", mark)
    console.print(shown)
    show_lines("cannot be read", [f"{name}: {reason}" for name, reason in found.unreadable.items()])
    unsure_images = sum(answer.unsure for answer in found.answers)
    print(f"{len(found):,} images, {unsure_images:,} of them unsure (probability below {found.unsure_below:g})")
    if table:
        print(table)


def export(
    run: Run,
    to: Annotated[
        str,
        Option("--to", metavar="FORMAT", help="onnx, with preprocessing, or safetensors, only weights."),
    ],
    out: Annotated[Path | None, Option("--out", metavar="DIR", help="Where to write. Default: RUN/export.")] = None,
    weights: Weights = None,
    prior: Prior = None,
    form: Format = Form.TEXT,
) -> None:
    """Export a run's model, with a model card.

    RUN is the directory of a finished run. MODEL_CARD.md says what the model
    was trained on, how good it is, how to use it, and what it must not be used
    for. A prior becomes part of the model.

    Examples:
      fewlabel export runs/fedprox-digits-seed0 --to onnx
      fewlabel export runs/ours --to safetensors --out ours
    """
    from fewlabel.inference.export import export_model

    written = export_model(run, to, out, weights=weights, prior=prior)
    print(
        json.dumps({key: str(path) for key, path in written._asdict().items()})
        if form == "json"
        else "\n".join(map(str, written))
    )
