"""The commands `fewlabel data ...`: see what there is, before and apart from any run."""

import json
import math
import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fewlabel.core.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    from fewlabel.data.datasets import Dataset, Split
    from fewlabel.data.own.check import Report
    from fewlabel.data.partition import Partition
    from fewlabel.experiment import Experiment

app = typer.Typer(suggest_commands=False, rich_markup_mode="rich")


class Form(StrEnum):
    TEXT = "text"
    JSON = "json"


class Kind(StrEnum):
    FOLDER = "folder"
    CSV = "csv"
    NPZ = "npz"
    DICOM = "dicom"


class Written(StrEnum):
    FOLDER = "folder"
    NPZ = "npz"


def use_data_dir(folder: Path | None) -> None:
    if folder is not None:
        os.environ["FEWLABEL_DATA"] = str(folder)


Name = Annotated[str, Argument(metavar="NAME", hidden=True)]
What = Annotated[str | None, Argument(metavar="FILE|NAME", hidden=True)]
Changes = Annotated[
    list[str] | None, Option("--set", metavar="A.B=C", help="A setting, as clients.alpha=0.1; repeatable.")
]
DataDir = Annotated[
    Path | None, Option(metavar="DIR", exists=True, file_okay=False, callback=use_data_dir, help="Where data are read.")
]
Format = Annotated[Form, Option("--format", help="json: exactly one JSON document on stdout.")]


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """Check, show, get, deal out and split data.

    Every command explains itself, as in `fewlabel data check --help`.

    Examples:
      fewlabel data check my/images
      fewlabel data info digits
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def check(
    path: Annotated[Path, Argument(metavar="PATH", hidden=True)],
    kind: Annotated[Kind | None, Option(help="What PATH is; by default what it looks like.")] = None,
    columns: Annotated[
        list[str] | None, Option("--column", metavar="A=B", help="A table's column, such as label=dx; repeatable.")
    ] = None,
    skip: Annotated[
        bool, Option("--skip-unreadable", help="They are left out, as by data.unreadable = 'skip'.")
    ] = False,
    form: Format = Form.TEXT,
) -> None:
    """Look at every image of your own.

    PATH is a folder with a folder for each class, a table (csv) or an npz.
    What cannot be read, duplicates and patients in several splits are named,
    and the exit code is 2 if something would spoil a run.

    Examples:
      fewlabel data check my/images
      fewlabel data check table.csv --column label=diagnosis --format json
    """
    from fewlabel.data.own import check as look
    from fewlabel.data.own import read as own
    from fewlabel.data.own.listing import guess
    from fewlabel.report.terminal import Screen

    named = dict(assignment(text) for text in columns or [])
    found = own.find(kind or guess(path), path, named, by="--column ")
    total = len(found.items)
    with Screen(total) as screen:
        report = look.check(found, lambda seen: screen.show(seen, f"{seen:,} of {total:,} images"))
    if form == "json":
        print(json.dumps(report.to_json(skip), indent=1))
    else:
        show_report(report)
    if problems := report.problems(skip):
        raise BadInput(f"this would spoil a run: {'; '.join(problems)}")


@app.command()
def info(name: Name, changes: Changes = None, data_dir: DataDir = None, form: Format = Form.TEXT) -> None:
    """Show what a data set holds and where its files are.

    NAME is one of `fewlabel list datasets`, or your own by data.path.

    Examples:
      fewlabel data info digits
      fewlabel data info folder --set data.path=my/images --format json
    """
    experiment = experiment_of(None, [f"data.name={name}", *(changes or [])])
    show_info(about(load(experiment), experiment), form)


@app.command()
def get(name: Name, data_dir: DataDir = None, form: Format = Form.TEXT) -> None:
    """Download a published data set.

    NAME is one of `fewlabel list datasets`. What is here is not downloaded,
    and what was interrupted goes on where it stopped.

    Examples:
      fewlabel data get cifar10
      fewlabel data get bloodmnist --data-dir /data
    """
    from fewlabel.data import datasets
    from fewlabel.data.published import download, files
    from fewlabel.report.terminal import Screen, size

    source = datasets.source(name)
    if not source.forms:
        raise BadInput(f"'{name}' is for images of your own: there is nothing to download")
    try:
        _, paths = files.find(name, source)
    except BadInput:
        if source.page:  # where no command can get it, that sentence says all
            raise
        with Screen(1) as screen:

            def progress(file: str, done: int, total: int | None) -> None:
                known = f" of {size(total)}" if total else ""
                screen.show(done / total if total else 0, f"{file}  {size(done)}{known}")

            paths = download.fetch(source.forms[0].files, files.home(name), progress)
    if form == "json":
        return print(json.dumps({"name": name, "files": [str(path) for path in paths]}, indent=1))
    return print("\n".join(map(str, paths)) or f"{name} comes with FewLabel: there is nothing to download")


@app.command()
def partition(
    what: What = None,
    changes: Changes = None,
    png: Annotated[Path | None, Option("--png", metavar="FILE", help="Draw it there too, as PNG, SVG or PDF.")] = None,
    data_dir: DataDir = None,
    form: Format = Form.TEXT,
) -> None:
    """Draw who would hold what, before anyone trains.

    FILE is an experiment (TOML), or NAME a data set; by default digits.

    Examples:
      fewlabel data partition --set clients.alpha=0.1
      fewlabel data partition experiment.toml --png partition.png
    """
    from rich.console import Console

    from fewlabel.data.labels import known
    from fewlabel.data.own import read as own
    from fewlabel.report import clients

    experiment = experiment_of(what, changes)
    dataset, dealt = dealt_out(experiment)
    train = dataset.splits["train"]
    labels, whose = train.labels.numpy(), holders(train, experiment)
    if png is not None:
        clients.plot(dealt, labels, dataset.classes, png, holders=whose)
    nobodys = left_out(dealt, len(train), whose)
    if form == "json":
        rows = [
            {
                "name": bar.name,
                "images": bar.size,
                "labeled": bar.labeled.tolist(),
                "unlabeled": bar.unlabeled.tolist(),
                "unknown": bar.unknown,
                "wrong": bar.wrong,
            }
            for bar in clients.bars(dealt, labels, dataset.classes, whose)
        ]
        told = {"checksum": dealt.checksum, "classes": dataset.classes, "shares": rows, "left_out": nobodys}
        return print(json.dumps(told, indent=1))
    Console(highlight=False, emoji=False).print(clients.draw(dealt, labels, dataset.classes, holders=whose))
    hidden = sum(len(known(labels, share.unlabeled)) for share in dealt.shares)
    if hidden and experiment.data.name in own.KINDS:
        print(f"hidden: {hidden:,} labels that are known; labels.at=every-client and labels.fraction=1 use them all")
    return show_left_out(nobodys)


@app.command()
def split(
    what: What = None,
    to: Annotated[Path | None, Option("--to", metavar="DIR", help="An empty or new directory.")] = None,
    kind: Annotated[Written, Option("--as", help="A folder for each class, or arrays.")] = Written.FOLDER,
    changes: Changes = None,
    data_dir: DataDir = None,
    form: Format = Form.TEXT,
) -> None:
    """Write each client's share as a site of its own.

    FILE is an experiment (TOML), or NAME a data set; by default digits.
    A site gets the labels that the experiment gives it, and no others:
    a federation can be rehearsed before it exists. Images are written at
    the size that the network sees, and patients by number where known.

    Examples:
      fewlabel data split digits --to sites
      fewlabel data split experiment.toml --to sites --as npz
    """
    from fewlabel.data import site_files

    if to is None:
        raise BadInput("data split needs --to, the directory for what it writes")
    experiment = experiment_of(what, changes)
    dataset, dealt = dealt_out(experiment)
    written = site_files.write(dataset, dealt, to, kind, experiment.seed)
    if form == "json":
        return print(json.dumps([site.to_json() for site in written], indent=1))
    show_rows(
        ["", "labeled", "unlabeled"],
        [[str(site.path), f"{site.labeled:,}", f"{site.unlabeled:,}"] for site in written],
    )
    size = dataset.image_size
    return print(f"images are written at {size}x{size}, as the network sees them; data.image_size is another size")


def assignment(text: str) -> tuple[str, str]:
    role, sign, name = text.partition("=")
    if not sign:
        raise BadInput(f"--column takes a=b, such as label=dx, found '{text}'")
    return role.strip(), name.strip()


def experiment_of(what: str | None, changes: Sequence[str] | None) -> "Experiment":
    """An experiment by its file, by the name of its data set alone, or as it is by default."""
    from fewlabel.cli.options import table_of
    from fewlabel.experiment import read, rooted

    file = what is not None and (what.endswith(".toml") or Path(what).is_file())
    base = rooted(table_of(Path(what)), Path(what).parent) if file and what else {}
    named = [] if file or what is None else [f"data.name={what}"]
    return read(base, [*named, *(changes or [])])


def load(experiment: "Experiment") -> "Dataset":
    from fewlabel.engine.world import dataset_of

    return dataset_of(experiment, fresh=True)


def dealt_out(experiment: "Experiment") -> "tuple[Dataset, Partition]":
    from fewlabel.data import partition

    dataset = load(experiment)
    return dataset, partition.of(dataset, experiment)


def holders(train: "Split", experiment: "Experiment") -> "np.ndarray | None":
    """Who holds each image, where clients are dealt out by that."""
    return train.clients if experiment.clients.partition == "by-column" else None


def left_out(dealt: "Partition", images: int, whose: "np.ndarray | None") -> dict[str, int]:
    """Images that nobody has, by why."""
    nameless = 0 if whose is None else int(sum(str(name) in ("", "-1") for name in whose))
    there = sum(map(len, dealt.shares)) + len(dealt.server) + len(dealt.validation)
    why = {"without a client in their column": nameless, "of clients that take no part": images - nameless - there}
    return {reason: count for reason, count in why.items() if count}


def show_left_out(told: dict[str, int]) -> None:
    for why, count in told.items():
        print(f"left out: {count:,} images {why}")


def about(dataset: "Dataset", experiment: "Experiment") -> dict[str, Any]:
    """A data set for programs to read."""
    import numpy as np

    from fewlabel.data import datasets
    from fewlabel.data.own import read as own
    from fewlabel.data.published import files

    source = datasets.source(dataset.name)
    lying = [Path(experiment.data.path)] if experiment.data.path else files.find(dataset.name, source)[1]
    counts = {
        name: np.bincount(split.labels.numpy() + 1, minlength=len(dataset.classes) + 1).tolist()
        for name, split in dataset.splits.items()
    }
    unused, data = {}, experiment.data
    if data.name in own.KINDS:
        listed = len(own.find(data.name, data.path, data.columns).items)
        why = "without a label, of patients or copies of images in other splits"
        why = f"that cannot be read, or {why}" if data.unreadable == "skip" else why
        unused = {why: listed - sum(map(sum, counts.values()))}
    return {
        "name": dataset.name,
        "about": source.about,
        "files": [str(path) for path in lying],
        "channels": dataset.channels,
        "image_size": dataset.image_size,
        "digest": dataset.digest,
        "classes": dataset.classes,
        "splits": {
            name: {"images": sum(some), "classes": some[1:], "unlabeled": some[0]} for name, some in counts.items()
        },
        "left_out": {why: count for why, count in unused.items() if count},
    }


def show_info(told: dict[str, Any], form: Form) -> None:
    if form == "json":
        return print(json.dumps(told, indent=1))
    size, splits = told["image_size"], told["splits"]
    print(f"{told['name']}: {told['about']}")
    print(f"read at {size}x{size}, {'grey' if told['channels'] == 1 else 'colour'}")
    print("\n".join(told["files"]), end="\n" if told["files"] else "")
    counts = {
        label: [split["classes"][number] for split in splits.values()] for number, label in enumerate(told["classes"])
    }
    if any(unlabeled := [split["unlabeled"] for split in splits.values()]):
        counts["without label"] = unlabeled
    counts["all"] = [split["images"] for split in splits.values()]
    show_rows(
        ["class", *splits, "all"], [[label, *(f"{n:,}" for n in (*row, sum(row)))] for label, row in counts.items()]
    )
    return show_left_out(told["left_out"])


def show_report(report: "Report") -> None:
    """What was found, and each file that is not as it should be on a line of its own."""
    found, sizes = report.found, report.sizes
    print(f"{found.kind} {found.path}: {report.images:,} images, {'colour' if report.channels == 3 else 'grey'}")
    if sizes:
        common, *_ = (f"{width}x{height} ({count:,})" for (width, height), count in sizes.most_common(1))
        least, *_, most = sorted(sizes, key=math.prod) * 2
        other = f", {len(sizes) - 1:,} other from {'{}x{}'.format(*least)} to {'{}x{}'.format(*most)}"
        print(f"sizes: {common}{other if len(sizes) > 1 else ''}")
    columns = report.classes.values()
    rows = [[label, *(f"{counts[label]:,}" for counts in columns)] for label in found.classes]
    if report.unlabeled:
        rows.append(["without label", *(f"{counts['']:,}" for counts in columns)])
    show_rows(["class", *(split or "images" for split in report.classes)], rows)
    show_lines("cannot be read", [f"{name}: {reason}" for name, reason in report.unreadable.items()])
    show_lines("empty", report.empty)
    equal = [same for same in report.duplicates if same not in report.conflicts and same not in report.leaks]
    show_lines("the same image", [" = ".join(item.name for item in same) for same in equal])
    for title, attribute, wrong in (
        ("the same image with different labels", "label", report.conflicts),
        ("the same image in several splits", "split", report.leaks),
    ):
        told = [" = ".join(f"{item.name} ({getattr(item, attribute) or 'none'})" for item in same) for same in wrong]
        show_lines(title, told)
    show_lines("patient in several splits", [f"{name}: {', '.join(s)}" for name, s in report.straddling.items()])
    show_lines("in no class's folder", found.loose)
    show_lines("not images, left alone", found.strays)
    show_lines("perhaps not meant", report.notes)


def show_lines(title: str, lines: Sequence[str]) -> None:
    if lines:
        # A name may hold bytes that are no text; they are shown by their numbers.
        told = "\n  ".join(lines).encode("utf-8", "backslashreplace").decode()
        print(f"{title} ({len(lines):,}):\n  {told}")


def show_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(head):
        table.add_column(title, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, emoji=False).print(table)
