"""What the people at a site agree to: what a method would send, read from the types of its uploads."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from fewlabel.core import tree, wire
from fewlabel.core.coarse import LEAST
from fewlabel.core.described import leaves
from fewlabel.core.schema import comments
from fewlabel.core.tasks import tasks
from fewlabel.experiment import Experiment, method_named

WORDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "yes or no", Tensor: "a tensor"}

ALWAYS = f"""\
With every method, FewLabel itself sends:
  info, when your site joins: its number, how many images it has with a label, without one and to test on, the versions
    of Python, FewLabel, PyTorch and NumPy, and the kind of CPU
  pixels, once, if the federation has not fixed mean and std: for each channel the sum of all pixels, the sum of their
    squares, and how many there are. They show how bright your images are, and how much that varies.
  evaluate, once in a measured round, if your site has {LEAST} or more images to test on: accuracy, mean AUC, and the
    recall of each class with {LEAST} or more, in steps that at least {LEAST} images stand for, rounded by chance; and
    how many test images you have, in all and of each class, in whole multiples of {LEAST}. Your policy.toml may set
    another number, and how many answers you give in all. A single image changes each share with a probability of at
    most 1 in {LEAST}; a coordinator who asks very often could still learn something about one.
  statistics, if model.buffers = recomputed: BatchNorm's means and variances over all of your images
  keys, shares, masked, survivors and opening, if clients.sums = masked: your weights behind masks that cancel only in
    the sum of at least three sites, and the keys, encrypted shares and signatures that this takes. Your weights leave
    in no other way then. All else that a task sends leaves as it is.
  epsilon, with each reply, if your policy or the experiment protects single images: how much of that is spent
  a reason instead of a reply: why your site refuses an order, or which kind of error stopped it, without its text
Flower's own programs tell the server that your site is there, and report their own errors.
Nothing else leaves your site. `fewlabel audit` shows what has left."""


def consent(method: str | Experiment, network: tree.Tree | None = None) -> str:
    """Describe what each task of a method sends from a site, and what that can reveal.

    With a network, say also how many bytes it has.
    """
    name, used = (method, method_named(method)) if isinstance(method, str) else (method.name, method.method)
    size = "" if network is None else f", {len(wire.pack(network, tree.Tree)):,} bytes for this network"
    lines = [f"If you take part in '{name}', this leaves your site."]
    for task in tasks(type(used)).values():
        if "client" in task.places:
            lines += [f"{task.name}, whenever the server asks for it:", *field_lines(task.upload, "  ", size)]
    about = leaves(used) or "The method does not say what this can reveal; ask who wrote it."
    return "\n".join([*lines, f"The method says about it: {about}", ALWAYS])


def consent_to_all(federation: str) -> str:
    """Describe what leaves a site of a federation that has not named its methods."""
    from fewlabel.report.terminal import known

    rows = [f"{row['name']}: {row['leaves']}" for row in known("methods") if "leaves" in row]
    return "\n".join(
        [f"'{federation}' names no method, so it may run any of these. What leaves your site:", *rows, ALWAYS]
    )


def consented(methods: str, experiment: Experiment) -> bool:
    """Return True if an experiment's method sends what one of these methods sends. No methods stand for all."""

    def sends(method: Any) -> tuple[type, str]:
        return type(method), leaves(method)

    names = [name.strip() for name in methods.split(",") if name.strip()]
    return not names or sends(experiment.method) in {sends(method_named(name)) for name in names}


def field_lines(kind: Any, indent: str, size: str) -> Iterator[str]:
    """Return a line for each field of an upload."""
    inner, optional = without_none(kind)
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
        if is_dataclass(part := without_none(hint)[0]):
            yield from field_lines(part, f"{indent}  ", size)


def without_none(kind: Any) -> tuple[Any, bool]:
    """Return a type without its `| None`, and whether it had one."""
    if get_origin(kind) in (Union, UnionType):
        inner = [part for part in get_args(kind) if part is not NoneType]
        return inner[0], True
    return kind, False


def words(kind: Any) -> str:
    """Return a type in words."""
    inner, optional = without_none(kind)
    if optional:
        return f"{words(inner)}, or nothing"
    if inner == tree.Tree:
        return "tensors with the names of the network's weights"
    parts = [part for part in get_args(inner) if part is not ...]
    if get_origin(inner) is tuple:
        return f"a list, each {words(parts[0])}" if get_args(inner)[1:] == (...,) else " and ".join(map(words, parts))
    if get_origin(inner) is dict:
        return f"by name, {words(parts[1])}"
    return "nothing" if inner in (None, NoneType) else WORDS.get(inner) or "several parts"
