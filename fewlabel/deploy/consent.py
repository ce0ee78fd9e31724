"""What a site would send, said before it takes part, from the types of a method's uploads: nothing is left out."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from fewlabel.core import tree, wire
from fewlabel.core.described import leaves
from fewlabel.core.metrics import MINIMUM, PER_CLASS, SITE_BINS
from fewlabel.core.schema import comments
from fewlabel.core.tasks import tasks
from fewlabel.experiment import ROWS, Experiment, read_method

WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "yes or no", Tensor: "a tensor"}

ALWAYS = """\
Whatever the method, FewLabel itself sends:
  info, when the site joins: its number, how many images it has with and without a label, how many to test on, and the
    versions of Python, FewLabel, PyTorch and NumPy with the kind of CPU
  pixels, once, where the federation's terms leave mean and std open: of each channel the sum of all pixels and of their
    squares, and how many there are; they tell how bright this site's images are, and how that varies
  evaluate, in measured rounds, where the site holds {minimum} images to test on or more: a confusion matrix, and of
    each class how many scores fall into each of {bins} intervals; classes with fewer than {few} images are left out
  statistics, where model.buffers = recomputed: BatchNorm's means and variances over all images of the site
  instead of a reply: why an order is refused, or the name of the error that stopped it, without what it says
Flower's own programs tell the server that the site is there, and an error of their own where they cannot go on.
Nothing else leaves. `fewlabel audit` shows what did."""


def consent(method: str | Experiment, network: tree.Tree | None = None) -> str:
    """What each task of a method sends up from a site, and what that can betray; with its bytes for a known network."""
    if isinstance(method, str):
        name, used = method, read_method(ROWS[method][0] if method in ROWS else method)
    else:
        name, used = method.name, method.method
    size = "" if network is None else f", {len(wire.pack(network, tree.Tree)):,} bytes for this network"
    lines = [f"What leaves a site that takes part in '{name}'."]
    for task in tasks(type(used)).values():
        if "client" in task.places:
            lines += [f"{task.name}, whenever the server asks for it:", *told(task.upload, "  ", size)]
    about = leaves(used) or "The method does not say what this can betray; ask who wrote it."
    always = ALWAYS.format(minimum=MINIMUM, bins=SITE_BINS, few=PER_CLASS)
    return "\n".join([*lines, f"In its own words: {about}", always])


def told(kind: Any, indent: str, size: str) -> Iterator[str]:
    """A line for each field of an upload."""
    inner, optional = opened(kind)
    if not (isinstance(inner, type) and is_dataclass(inner)):
        yield f"{indent}{words(kind)}"
        return
    if optional:
        yield f"{indent}nothing, or"
    beside, hints = comments(inner), get_type_hints(inner)
    for field in fields(inner):
        hint = hints[field.name]
        whole = size if hint == tree.Tree else ""
        about = f" ({beside[field.name]})" if field.name in beside else ""
        yield f"{indent}{field.name}: {words(hint)}{whole}{about}"
        if is_dataclass(part := opened(hint)[0]):
            yield from told(part, f"{indent}  ", size)


def opened(kind: Any) -> tuple[Any, bool]:
    """A type without its `| None`, and whether it had one."""
    if get_origin(kind) in (Union, UnionType):
        inner = [part for part in get_args(kind) if part is not NoneType]
        return inner[0], True
    return kind, False


def words(kind: Any) -> str:
    inner, optional = opened(kind)
    if optional:
        return f"{words(inner)}, or nothing"
    if inner == tree.Tree:
        return "tensors by the names of the network's"
    parts = [part for part in get_args(inner) if part is not ...]
    if get_origin(inner) is tuple:
        return f"a list, each {words(parts[0])}" if get_args(inner)[1:] == (...,) else " and ".join(map(words, parts))
    if get_origin(inner) is dict:
        return f"by name, {words(parts[1])}"
    return "nothing" if inner in (None, NoneType) else WORDS.get(inner) or "several parts"
