"""Make the parts of the manual that come from the code: `python docs/generated.py` writes them into the pages.

A page asks for one by `<!-- generated: settings rscfed -->`. The part stands below that line, up to
`<!-- end generated -->`, so that a page is whole wherever it is read.
"""

import dataclasses
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import bloodcells
import click
import typer

import fewlabel
from fewlabel import learn
from fewlabel.cli.main import app
from fewlabel.core import described
from fewlabel.core.tasks import field_names, tasks
from fewlabel.experiment import ROWS
from fewlabel.methods import METHODS
from fewlabel.report import terminal


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown. A bar inside a cell is escaped, because it would begin another cell."""
    lines = [list(head), ["---" for _ in head], *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def settings(method: str = "") -> str:
    """Return what `fewlabel list settings METHOD` prints."""
    rows = [row for row in terminal.settings_of(method) if not (method and row["name"] == "method.name")]
    told = (
        [f"`{row['name']}`", f"`{row['default']}`", "; ".join(filter(None, [row["about"], row["allowed"]]))]
        for row in rows
    )
    return table(["setting", "default", "what it is; what it may be"], told)


def names(what: str) -> str:
    """Return what `fewlabel list WHAT` prints."""
    return table(["name", "what it is"], ([f"`{row['name']}`", row["about"]] for row in terminal.known(what)))


def methods() -> str:
    """Return all methods, and where labels may be for each."""
    rows = terminal.known("methods")
    return table(
        ["name", "what it is", "labels at"],
        ([f"`{r['name']}`", r["about"], ", ".join(r["label_places"])] for r in rows),
    )


def all_leaves() -> str:
    """Return what leaves a site with each method, in the method's words. Methods that say the same share a line."""
    found: dict[str, list[str]] = {}
    everything = {name: METHODS[method] for name, (method, *_) in ROWS.items()} | METHODS
    for name, method in everything.items():
        found.setdefault(described.leaves(method), []).append(f"`{name}`")
    return table(["method", "what leaves a site"], ([", ".join(names), said] for said, names in found.items()))


def leaves(method: str) -> str:
    """Return what leaves a site: in the method's words, and by the annotations of its tasks."""
    found, chosen = tasks(type(METHODS[method])), described.leaves(METHODS[method])
    rows = (
        [f"`{task.name}`", contents(task.message), contents(task.upload), contents(task.state)]
        for task in found.values()
        if "client" in task.places
    )

    head = ["task at a site", "it gets", "it sends", "it keeps for itself"]
    return f"{chosen}\n\n{table(head, rows)}"


def contents(kind: object) -> str:
    """Return the fields of a message's type."""
    return ", ".join(f"`{name}`" for name in field_names(kind)) or "nothing"


def paragraphs(method: str) -> list[str]:
    """Return the paragraphs of a method's docstring, without its title."""
    return inspect.cleandoc(sys.modules[type(METHODS[method]).__module__].__doc__ or "").split("\n\n")[1:]


def idea(method: str) -> str:
    """Return the first paragraph: how the method works."""
    return paragraphs(method)[0]


def differs(method: str) -> str:
    """Return the other paragraphs: where our version differs from the paper."""
    return "\n\n".join(paragraphs(method)[1:])


def cli() -> str:
    """Return every command with its options."""
    return "\n\n".join(command(typer.main.get_command(app), "fewlabel"))


def command(found: click.Command, name: str) -> Iterable[str]:
    words, _, examples = (
        inspect.cleandoc(found.help or "").replace("\\[", "[").replace("\f", "").partition("Examples:\n")
    )
    yield f"{'##' if ' ' not in name else '###'} {name}"
    yield re.sub(r"(?<!\n)\n(?!\n)", " ", words).strip()
    if examples:
        yield f"```sh\n{inspect.cleandoc(examples)}\n```"
    options = [part for part in found.params if isinstance(part, click.Option) and part.name != "help"]
    if options:
        yield table(["option", "what it does"], ([option(one), one.help or ""] for one in options))
    if found.epilog:
        yield found.epilog
    for part, below in getattr(found, "commands", {}).items():
        if not below.hidden:
            yield from command(below, f"{name} {part}")


def option(found: click.Option) -> str:
    value = "" if found.is_flag else f" {found.metavar or found.type.name.upper()}"
    if isinstance(found.type, click.Choice) and not found.metavar:
        value = f" {'|'.join(str(getattr(choice, 'value', choice)) for choice in found.type.choices)}"
    return f"`{', '.join(found.opts)}{value}`"


AUTHORS = ("core.federation.Model", "core.federation.Reply", "core.images.Labeled", "core.images.Unlabeled")


def public() -> dict[str, object]:
    """Return the names that users import, and what they are."""
    names = sorted(fewlabel.__all__, key=str.lower)
    return {name: value for name in names if callable(value := getattr(fewlabel, name))}


def python() -> str:
    """Return the public names, each with the first sentence of its docstring. `reference` has all of it."""
    rows = ([f"`fl.{name}`", first_sentence(value)] for name, value in public().items())
    return table(["name", "what it is or does"], rows)


def first_sentence(value: object) -> str:
    if dataclasses.is_dataclass(value) and (inspect.getdoc(value) or "").startswith(f"{value.__name__}("):
        return f"settings: {', '.join(f'`{field.name}`' for field in dataclasses.fields(value))}"
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return "a type for annotations"
    words = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", words)[0]


def reference() -> str:
    """Return what the built manual adds to the page on Python: signatures, members, and what methods are written with.

    Sphinx reads it from the code, so it cannot stand in the page's source.
    """
    kinds = {True: "autoclass", False: "autofunction"}
    shown = {name: kinds[inspect.isclass(value)] for name, value in public().items()}
    parts = [
        f".. {kind}:: fewlabel.{name}\n" + "   :members:\n" * (kind == "autoclass") for name, kind in shown.items()
    ]
    modules = [f"learn.{module.name}" for module in pkgutil.iter_modules(learn.__path__)]
    own = [f".. autoclass:: fewlabel.{name}\n   :members:\n" for name in AUTHORS]
    own += [f".. automodule:: fewlabel.{name}\n   :members:\n" for name in ("core.tree", *modules)]
    return f"\n\n## In full\n\n{rst(parts)}\n\n## To write methods with\n\n{rst(own)}\n"


def rst(parts: Iterable[str]) -> str:
    return "```{eval-rst}\n" + "\n".join(parts) + "```"


def reason() -> str:
    """Return the sentences of the README about it."""
    return bloodcells.reason()


FUNCTIONS = (settings, names, methods, all_leaves, leaves, idea, differs, cli, python, reason)
PARTS = {part.__name__: part for part in FUNCTIONS}


MARK = re.compile(r"(<!-- generated: (\w+) ?([\w-]*) -->)\n.*?\n<!-- end generated -->", re.S)


def part(mark: re.Match[str]) -> str:
    return PARTS[mark[2]](*filter(None, [mark[3]]))


def written(page: str) -> str:
    """Return a page with its generated parts as they are today."""
    return MARK.sub(lambda mark: f"{mark[1]}\n{part(mark)}\n<!-- end generated -->", page)


def bare(page: str) -> str:
    """Return a page without the marks, as the built manual reads it: in Markdown a comment would end a table."""
    return re.sub(r"\n?<!-- (?:generated: [\w -]+|end generated) -->(?=\n|$)", "", page)


DOCS = Path(__file__).parent
SOURCES = sorted([DOCS.parent / "README.md", *DOCS.glob("*.md"), *DOCS.glob("methods/*.md")])
PAGES = [path for path in SOURCES if MARK.search(path.read_text())]

if __name__ == "__main__":
    for path in PAGES:
        if (page := written(path.read_text())) != path.read_text():
            path.write_text(page)
            print(f"{path.relative_to(DOCS.parent)} is brought up to date")
