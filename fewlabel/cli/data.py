"""The commands `fewlabel data ...`: look at data, download, deal out and write them, without any run."""

import json
import math
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from fewlabel.cli.options import Changes, DataDir, Form, Format, Kind, table_of
from fewlabel.core.errors import BadInput

if TYPE_CHECKING:
    import numpy as np

    from fewlabel.data.datasets import Dataset, Split
    from fewlabel.data.own.check import CheckReport
    from fewlabel.data.partition import Partition
    from fewlabel.experiment import Experiment

app = typer.Typer(suggest_commands=False, rich_markup_mode="rich")


class SiteKind(StrEnum):
    FOLDER = "folder"
    NPZ = "npz"


Name = Annotated[str, Argument(metavar="NAME", hidden=True)]
What = Annotated[str | None, Argument(metavar="FILE|NAME", hidden=True)]


@app.callback(invoke_without_command=True)
def data(context: typer.Context) -> None:
    """Check, show, download, deal out and split data.

    Every command has its own help, such as `fewlabel data check --help`.

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
        bool, Option("--skip-unreadable", help="Leave such files out, as data.unreadable = 'skip' does.")
    ] = False,
    form: Format = Form.TEXT,
) -> None:
    """Check your own images.

    PATH is a folder with a folder for each class, a table (csv) or an npz.
    The check names files that cannot be read, duplicates, and patients in
    several splits. The exit code is 2 if something would spoil a run.

    Examples:
      fewlabel data check my/images
      fewlabel data check table.csv --column label=diagnosis --format json
    """
    from fewlabel.data.own.check import check_images
    from fewlabel.data.own.layouts import list_images
    from fewlabel.data.own.listing import guess_kind
    from fewlabel.report.terminal import Screen

    named = dict(assignment(text) for text in columns or [])
    listing = list_images(kind or guess_kind(path), path, named, by="--column ")
    total = len(listing.items)
    with Screen(total) as screen:
        report = check_images(listing, lambda opened: screen.show(opened, f"{opened:,} of {total:,} images"))
    if form == "json":
        print(json.dumps(report.to_json(skip), indent=1))
    else:
        show_report(report)
    if problems := report.problems(skip):
        raise BadInput(f"this would spoil a run: {'; '.join(problems)}")


@app.command()
def info(name: Name, changes: Changes = None, data_dir: DataDir = None, form: Format = Form.TEXT) -> None:
    """Show what a data set holds and where its files are.

    NAME is one of `fewlabel list datasets`; your own data need data.path.

    Examples:
      fewlabel data info digits
      fewlabel data info folder --set data.path=my/images --format json
    """
    experiment = experiment_of(None, [f"data.name={name}", *(changes or [])])
    show_info(about(load(experiment), experiment), form)


@app.command()
def get(name: Name, data_dir: DataDir = None, form: Format = Form.TEXT) -> None:
    """Download a published data set.

    NAME is one of `fewlabel list datasets`. Files that are here already are
    not downloaded again. An interrupted download continues where it stopped.

    Examples:
      fewlabel data get cifar10
      fewlabel data get bloodmnist --data-dir /data
    """
    from fewlabel.data import datasets
    from fewlabel.data.published import download, files
    from fewlabel.report.terminal import Screen, size

    source = datasets.source_of(name)
    if not source.editions:
        raise BadInput(f"'{name}' is for your own images: there is nothing to download")
    try:
        _, paths = files.find(name, source)
    except BadInput:
        if source.page:  # no command can download it, and this error says how to get it
            raise
        with Screen(1) as screen:

            def progress(file: str, done: int, total: int | None) -> None:
                known = f" of {size(total)}" if total else ""
                screen.show(done / total if total else 0, f"{file}  {size(done)}{known}")

            paths = download.fetch(source.editions[0].files, files.home(name), progress)
    if form == "json":
        return print(json.dumps({"name": name, "files": [str(path) for path in paths]}, indent=1))
    return print("\n".join(map(str, paths)) or f"{name} comes with FewLabel: there is nothing to download")


@app.command()
def partition(
    what: What = None,
    changes: Changes = None,
    png: Annotated[
        Path | None, Option("--png", metavar="FILE", help="Draw it into this file, too: PNG, SVG or PDF.")
    ] = None,
    data_dir: DataDir = None,
    form: Format = Form.TEXT,
) -> None:
    """Show which client would hold which images, before anyone trains.

    FILE is an experiment (TOML), NAME a data set; by default digits.

    Examples:
      fewlabel data partition --set clients.alpha=0.1
      fewlabel data partition experiment.toml --png partition.png
    """
    from rich.console import Console

    from fewlabel.data.labels import known
    from fewlabel.data.own.listing import KINDS
    from fewlabel.report import clients

    experiment = experiment_of(what, changes)
    dataset, dealt = dealt_out(experiment)
    train = dataset.splits["train"]
    labels, holders = train.labels.numpy(), holders_of(train, experiment)
    if png is not None:
        clients.plot(dealt, labels, dataset.classes, png, holders=holders)
    unused = left_out(dealt, len(train), holders)
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
            for bar in clients.bars(dealt, labels, dataset.classes, holders)
        ]
        whole = {"checksum": dealt.checksum, "classes": dataset.classes, "shares": rows, "left_out": unused}
        return print(json.dumps(whole, indent=1))
    Console(highlight=False, emoji=False).print(clients.draw(dealt, labels, dataset.classes, holders=holders))
    hidden = sum(len(known(labels, holding.unlabeled)) for holding in dealt.shares)
    if hidden and experiment.data.name in KINDS:
        print(f"hidden: {hidden:,} labels that are known; labels.at=every-client and labels.fraction=1 use them all")
    return show_left_out(unused)


@app.command()
def split(
    what: What = None,
    to: Annotated[Path | None, Option("--to", metavar="DIR", help="An empty or new directory.")] = None,
    kind: Annotated[SiteKind, Option("--as", help="A folder for each class, or arrays.")] = SiteKind.FOLDER,
    changes: Changes = None,
    data_dir: DataDir = None,
    form: Format = Form.TEXT,
) -> None:
    """Write each client's images as a site, to rehearse a federation.

    FILE is an experiment (TOML), NAME a data set; by default digits.
    A site gets the labels that the experiment gives it, and no others.
    Images are written at the size that the network sees, and patients
    by number, if they are known.

    Examples:
      fewlabel data split digits --to sites
      fewlabel data split experiment.toml --to sites --as npz
    """
    from fewlabel.data import site_files

    if to is None:
        raise BadInput("data split needs --to, the directory to write into")
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
    return print(f"images are written at {size}x{size}, as the network sees them; data.image_size changes that")


def assignment(text: str) -> tuple[str, str]:
    role, sign, name = text.partition("=")
    if not sign:
        raise BadInput(f"--column takes a=b, such as label=dx, found '{text}'")
    return role.strip(), name.strip()


def experiment_of(what: str | None, changes: Sequence[str] | None) -> "Experiment":
    """Read an experiment from its file, or take the default one with the data set of this name."""
    from fewlabel.experiment import read, rooted

    file = what is not None and (what.endswith(".toml") or Path(what).is_file())
    base = rooted(table_of(Path(what)), Path(what).parent) if file and what else {}
    named = [] if file or what is None else [f"data.name={what}"]
    return read(base, [*named, *(changes or [])])


def load(experiment: "Experiment") -> "Dataset":
    from fewlabel.engine.world import dataset_of

    return dataset_of(experiment, fresh=True)


def dealt_out(experiment: "Experiment") -> "tuple[Dataset, Partition]":
    """Load an experiment's data set and deal it out to its clients."""
    from fewlabel.data import partition

    dataset = load(experiment)
    return dataset, partition.of(dataset, experiment)


def holders_of(train: "Split", experiment: "Experiment") -> "np.ndarray | None":
    """Return who holds each image, if a column of the data decides that."""
    return train.clients if experiment.clients.partition == "by-column" else None


def left_out(dealt: "Partition", images: int, holders: "np.ndarray | None") -> dict[str, int]:
    """Count the images that nobody holds, by the reason."""
    nameless = 0 if holders is None else int(sum(str(name) in ("", "-1") for name in holders))
    used = sum(map(len, dealt.shares)) + len(dealt.server) + len(dealt.validation)
    why = {"without a client in their column": nameless, "of clients that take no part": images - nameless - used}
    return {reason: count for reason, count in why.items() if count}


def show_left_out(unused: dict[str, int]) -> None:
    for why, count in unused.items():
        print(f"left out: {count:,} images {why}")


def about(dataset: "Dataset", experiment: "Experiment") -> dict[str, Any]:
    """Describe a data set, for `info` and for programs."""
    import numpy as np

    from fewlabel.data import datasets
    from fewlabel.data.own.layouts import list_images
    from fewlabel.data.own.listing import KINDS
    from fewlabel.data.published import files

    source = datasets.source_of(dataset.name)
    paths = [Path(experiment.data.path)] if experiment.data.path else files.find(dataset.name, source)[1]
    counts = {
        name: np.bincount(split.labels.numpy() + 1, minlength=len(dataset.classes) + 1).tolist()
        for name, split in dataset.splits.items()
    }
    unused, data = {}, experiment.data
    if data.name in KINDS:
        listed = len(list_images(data.name, data.path, data.columns).items)
        why = "without a label, of patients or copies of images in other splits"
        why = f"with different labels, or {why}" if dataset.notes and data.conflicting == "leave-out" else why
        why = f"that cannot be read, or {why}" if data.unreadable == "skip" else why
        unused = {why: listed - sum(map(sum, counts.values()))}
    return {
        "name": dataset.name,
        "about": source.about,
        "files": [str(path) for path in paths],
        "channels": dataset.channels,
        "image_size": dataset.image_size,
        "digest": dataset.digest,
        "classes": dataset.classes,
        "splits": {
            name: {"images": sum(some), "classes": some[1:], "unlabeled": some[0]} for name, some in counts.items()
        },
        "left_out": {why: count for why, count in unused.items() if count},
    }


def show_info(found: dict[str, Any], form: Form) -> None:
    if form == "json":
        return print(json.dumps(found, indent=1))
    size, splits = found["image_size"], found["splits"]
    print(f"{found['name']}: {found['about']}")
    print(f"read at {size}x{size}, {'grey' if found['channels'] == 1 else 'colour'}")
    print("\n".join(found["files"]), end="\n" if found["files"] else "")
    counts = {
        label: [split["classes"][number] for split in splits.values()] for number, label in enumerate(found["classes"])
    }
    if any(unlabeled := [split["unlabeled"] for split in splits.values()]):
        counts["without label"] = unlabeled
    counts["all"] = [split["images"] for split in splits.values()]
    show_rows(
        ["class", *splits, "all"], [[label, *(f"{n:,}" for n in (*row, sum(row)))] for label, row in counts.items()]
    )
    return show_left_out(found["left_out"])


def show_report(report: "CheckReport") -> None:
    """Print what was found, with a line for each file that is not as it should be."""
    listing, sizes = report.listing, report.sizes
    print(f"{listing.kind} {listing.path}: {report.images:,} images, {'colour' if report.channels == 3 else 'grey'}")
    if sizes:
        common, *_ = (f"{width}x{height} ({count:,})" for (width, height), count in sizes.most_common(1))
        least, *_, most = sorted(sizes, key=math.prod) * 2
        other = f", {len(sizes) - 1:,} other from {'{}x{}'.format(*least)} to {'{}x{}'.format(*most)}"
        print(f"sizes: {common}{other if len(sizes) > 1 else ''}")
    columns = report.classes.values()
    rows = [[label, *(f"{counts[label]:,}" for counts in columns)] for label in listing.classes]
    if report.unlabeled:
        rows.append(["without label", *(f"{counts['']:,}" for counts in columns)])
    show_rows(["class", *(split or "images" for split in report.classes)], rows)
    show_lines("cannot be read", [f"{name}: {reason}" for name, reason in report.unreadable.items()])
    show_lines("empty", report.empty)
    equal = [same for same in report.duplicates if same not in report.conflicts and same not in report.leaks]
    show_lines("the same image", [" = ".join(item.name for item in same) for same in equal])
    for title, attribute, wrong in (
        ("the same image with different labels, left out of a run by default", "label", report.conflicts),
        ("the same image in several splits", "split", report.leaks),
    ):
        lines = [" = ".join(f"{item.name} ({getattr(item, attribute) or 'none'})" for item in same) for same in wrong]
        show_lines(title, lines)
    show_lines("patient in several splits", [f"{name}: {', '.join(s)}" for name, s in report.straddling.items()])
    show_lines("in no class's folder", listing.loose)
    show_lines("not images, left alone", listing.strays)
    show_lines("perhaps a mistake", report.notes)


def show_lines(title: str, lines: Sequence[str]) -> None:
    if lines:
        # Names may hold bytes that are no text; these are shown as numbers.
        text = "\n  ".join(lines).encode("utf-8", "backslashreplace").decode()
        print(f"{title} ({len(lines):,}):\n  {text}")


def show_rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, title in enumerate(head):
        table.add_column(title, justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False, emoji=False).print(table)
