"""The command `fewlabel label`: which images to label next, and the page on which people do it."""

import getpass
import hashlib
import json
import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from click import Choice as Choices
from typer import Argument, Option

from fewlabel.cli.options import DataDir, Form, Format, Kind
from fewlabel.core.errors import BadInput
from fewlabel.deploy import site_folder
from fewlabel.engine import record
from fewlabel.labeling import batches
from fewlabel.labeling.strategies import STRATEGIES, USUAL
from fewlabel.report.loopback import LoopbackServer
from fewlabel.report.terminal import Screen, tell

if TYPE_CHECKING:
    from fewlabel.data.own.listing import Listing
    from fewlabel.labeling.answers import Answers


def label(
    path: Annotated[Path | None, Argument(metavar="[PATH|SITE]", hidden=True)] = None,
    run: Annotated[
        Path | None, Option("--run", metavar="RUN", help="Whose model chooses: a run, or an exported model.")
    ] = None,
    count: Annotated[int, Option("--count", metavar="N", min=1, help="How many images.")] = 50,
    strategy: Annotated[
        str | None,
        Option(
            "--strategy",
            metavar="NAME",
            click_type=Choices(list(STRATEGIES)),
            help="random, least-certain, margin, k-center or uncertain-diverse, the default; without --run, random.",
        ),
    ] = None,
    who: Annotated[str | None, Option("--who", metavar="NAME", help="Who answers; by default your user name.")] = None,
    out: Annotated[
        Path | None, Option("--out", metavar="FILE", help="The table of answers; by default beside the images.")
    ] = None,
    kind: Annotated[Kind | None, Option(help="What PATH is; by default what it looks like.")] = None,
    port: Annotated[int, Option("--port", metavar="N", min=0, max=65535, help="By default any that is free.")] = 0,
    simulated: Annotated[
        bool, Option("--simulate", help="Let the hidden labels of RUN's data answer, to measure what labels bring.")
    ] = False,
    data_dir: DataDir = None,
    form: Format = Form.TEXT,
) -> None:
    """Label the images that help most, on a page in your browser.

    PATH holds your images: a folder, a table (csv) or an npz. SITE is the
    folder of a site. The images stay where they are, and only this machine
    can open the page. Each answer is on disk before the next image appears.
    Then train with the labels: --set labels.file=FILE. A site uses its own
    from its next run on.

    Examples:
      fewlabel label my/images --run runs/ours
      fewlabel label site --run model.safetensors --count 20
      fewlabel label --simulate --run runs/ours --count 100 --out labels.csv
    """
    if simulated:
        return answer_by_hidden_labels(path, run, strategy or USUAL, count, out, form)
    if form == "json":
        raise BadInput("--format json is for --simulate; the answers of people are in their table")
    if path is None:
        raise BadInput("label needs PATH, where your images are, or SITE; or --simulate with a --run")
    if run is None and strategy not in (None, "random"):
        raise BadInput(
            f"--strategy {strategy} needs --run, the run whose model chooses; without one, images are random"
        )
    return label_on_a_page(path, run, strategy or (USUAL if run else "random"), count, who, out, kind, port)


def answer_by_hidden_labels(
    path: Path | None, run: Path | None, strategy: str, count: int, out: Path | None, form: Form
) -> None:
    from fewlabel.labeling.simulate import simulate

    if run is None or path is not None:
        raise BadInput("--simulate takes --run, a simulation whose hidden labels answer, and no PATH")
    found = simulate(run, strategy, count, out or run / f"labels-{strategy}-{count}.csv")
    if form == "json":
        return print(json.dumps({**found._asdict(), "file": str(found.file)}, indent=1))
    many = sum(found.clients.values())
    print(f"{many:,} labels at {len(found.clients)} clients, chosen by {strategy}, after {found.before:,} earlier ones")
    print(", ".join(f"{name} {number:,}" for name, number in found.classes.items()))
    return print(f"to train with them: --set labels.file={shlex.quote(str(found.file))}")


def label_on_a_page(
    path: Path,
    run: Path | None,
    strategy: str,
    count: int,
    who: str | None,
    out: Path | None,
    kind: Kind | None,
    port: int,
) -> None:
    from fewlabel.labeling.answers import Answers, agreed, standing
    from fewlabel.labeling.page import MAX_BODY, METHODS, answer_for
    from fewlabel.labeling.session import Session

    listing, usual = images_at(path, kind)
    who = (who or getpass.getuser()).strip()
    if not who or not who.isprintable():
        raise BadInput("--who must be a name, such as --who ann")
    answers = Answers(out or usual)
    batch = batch_for(listing, answers, who, run, strategy, count)
    session = Session(listing, batch, answers, who)
    with LoopbackServer(answer_for(session), port, METHODS, MAX_BODY) as server:
        state = session.state()
        tell(f"{state['done']} of {state['total']} images are answered; the answers are in {answers.file}")
        print(server.address, flush=True)
        tell("open this address in a browser on this machine; Ctrl-C ends it, and nothing is lost")
        try:
            server.serve()
        except KeyboardInterrupt:
            show_end(session.state(), bool(agreed(standing(answers.read()))))


def images_at(path: Path, kind: Kind | None) -> "tuple[Listing, Path]":
    """List the images of a person or a site. Return them, and the usual place of their answers."""
    from fewlabel.data.own.layouts import list_images
    from fewlabel.data.own.listing import guess_kind, undivided
    from fewlabel.deploy.site_terms import load_terms

    if not (path / site_folder.FILE).is_file():
        given = path.expanduser().absolute()
        return list_images(kind or guess_kind(path), path), given.with_name(f"{given.stem}-labels.csv")
    if kind is not None:
        raise BadInput(f"--kind is for images of your own; {path / site_folder.FILE} says what this site's are")
    site = site_folder.read(path)
    terms = load_terms(Path(site.trust))
    listing = list_images(site.place.kind or guess_kind(Path(site.place.data)), site.place.data)
    place = site_folder.completed(path.absolute(), site)
    return undivided(listing, terms.classes, terms.scale), Path(place.labels)


def batch_for(
    listing: "Listing", answers: "Answers", who: str, run: Path | None, strategy: str, count: int
) -> batches.Batch:
    """Return the batch that this person goes on with, or choose a new one."""
    from fewlabel.core.rng import Rng
    from fewlabel.inference.predict import StoredModel
    from fewlabel.labeling.answers import DONE, agreed, standing
    from fewlabel.labeling.chosen import choose_images, classes_for, name_of, unlabeled

    found = standing(answers.read())
    model = StoredModel.open(run) if run is not None else None
    which = model_hash(run) if run is not None else ""
    known = batches.load(answers.file)
    if begun := batches.to_go_on(known, which, strategy, lambda name: who in found.get(answers.path_of(name), {})):
        return begun
    classes = classes_for(listing, model, run)
    done = {image for image, each in found.items() if any(one.note in DONE for one in each.values())}
    answered = {name for item in unlabeled(listing) if answers.path_of(name := name_of(listing, item)) in done}
    labels = Counter(agreed(found).values())
    rng = Rng("label", strategy, which, len(known))
    with Screen(1) as screen:
        choice = choose_images(
            listing,
            answered,
            count,
            strategy,
            rng,
            model,
            classes,
            [labels[name] for name in classes],
            lambda read, total: screen.show(read / total, f"{read:,} of {total:,} images"),
        )
    for name, why in choice.unreadable.items():
        tell(f"{name} cannot be read and is left out: {why}")
    batch = batches.Batch(which, strategy, classes, tuple(name_of(listing, item) for item in choice.items), choice.p)
    batches.add(answers.file, batch)
    return batch


def model_hash(run: Path) -> str:
    file = run if run.is_file() else run / record.MODEL
    return hashlib.sha256(file.read_bytes()).hexdigest()


def show_end(state: dict[str, Any], labels: bool) -> None:
    """Say what was done, about which images people disagree, and how to train with labels, if there are any."""
    counts = ", ".join(f"{one['name']} {one['count']}" for one in state["classes"] if one["count"])
    print(f"{state['done']} of {state['total']} images answered: {counts or 'no label'}")
    if state["advice"]:
        print(state["advice"])
    for one in state["disagreements"]:
        print(f"different labels: {one['path']}: {', '.join(f'{who} {name}' for who, name in one['labels'].items())}")
    if labels:
        print(f"to train with them: --set labels.file={shlex.quote(state['file'])}")
