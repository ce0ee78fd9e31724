"""Frozen dataclasses from plain tables and back, checked here so that a misspelt setting never runs as a default."""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from fewlabel.core.errors import BadInput

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """The numbers that a field may hold, as in `lr: Annotated[float, Range(0, open_low=True)]`. None is no limit."""

    low: float | None = None
    high: float | None = None
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, x: float) -> bool:
        above = self.low is None or x > self.low or (x == self.low and not self.open_low)
        below = self.high is None or x < self.high or (x == self.high and not self.open_high)
        return above and below

    def __str__(self) -> str:
        if None not in (self.low, self.high) and not (self.open_low or self.open_high):
            return f"from {self.low} to {self.high}"
        low = [] if self.low is None else [f"{'above' if self.open_low else 'at least'} {self.low}"]
        high = [] if self.high is None else [f"{'below' if self.open_high else 'at most'} {self.high}"]
        return " and ".join(low + high)


Positive = Annotated[float, Range(0, open_low=True)]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Count = Annotated[int, Range(1)]
Natural = Annotated[int, Range(0)]


def read(cls: type[T], data: Mapping[str, Any], where: str = "") -> T:
    """Build `cls` from a plain table, which is found at `where` in the settings. Missing settings get their default."""
    return cast(T, _value(cls, data, where, [_join(where, key) for key in keys(cls)]))


def check(value: Any) -> None:
    """Check an object that was built in Python, by the same rules as `read` checks a table."""
    _value(type(value), value, "", None)


def plain(value: Any) -> dict[str, Any]:
    """Return the table that `read` turns back into `value`."""
    table = {}
    for f in fields(value):
        item = getattr(value, f.name)
        # TOML has no null. A None is left out, unless `read` would then fill in another default.
        if item is not None or f.default is not None:
            table[f.name] = f.metadata.get("plain", _plain)(item)
    return table


def keys(cls: Any) -> list[str]:
    """Return all dotted keys that a table of `cls` may set."""
    return list(settings(cls))


def settings(cls: Any) -> dict[str, tuple[str, str]]:
    """Describe every setting of `cls`: its help text and its allowed values."""
    found: dict[str, tuple[str, str]] = {}
    beside = comments(cls)
    for f, hint in _fields(cls):
        custom = "read" in f.metadata
        core, ranges, _ = (None, [], False) if custom else _open(hint)
        if is_dataclass(core):
            found |= {_join(f.name, key): about for key, about in settings(core).items()}
        else:
            kind = "" if custom else " ".join([_accepts(core, built=False)[1], *map(str, ranges)])
            found[f.name] = beside.get(f.name, ""), kind
    return found


@cache
def comments(cls: Any) -> dict[str, str]:
    """Return the comments beside the fields of a class and of its bases, if their source can be read."""
    texts = {name: about for base in reversed(cls.__bases__) for name, about in comments(base).items()}
    try:
        lines = inspect.getsource(cls).splitlines()
    except (OSError, TypeError):
        return texts
    name = ""
    for line in lines:
        if found := re.match(r"    (\w+): .*  # (?!type:|noqa)(.+)", line):
            name = found[1]
            texts[name] = found[2]
        elif name and (more := re.match(r"    #   (.+)", line)):  # the comment goes on below
            texts[name] += f" {more[1]}"
        else:
            name = ""
    return texts


def parse(text: str) -> Any:
    """Read the VALUE of `--set key=VALUE`. It is TOML, so that types are explicit, but words need no quotes."""
    if text == "none":
        return None
    try:
        table = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    return table["value"] if len(table) == 1 else text  # a line break in the text could have begun another key


def assign(data: dict[str, Any], dotted: str, value: Any) -> None:
    """Put `value` at `a.b.c`, creating the tables on the way."""
    *path, last = dotted.split(".")
    if not (last and all(path)):
        raise BadInput(f"a setting's name is words joined by dots, found {_shown(dotted)}")
    for depth, name in enumerate(path, start=1):
        data = data.setdefault(name, {})
        if not isinstance(data, dict):
            raise BadInput(f"cannot set {dotted}: {'.'.join(path[:depth])} must be a table, found {_shown(data)}")
    data[last] = value


def flatten(table: Mapping[str, Any], join: str = ".", above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested tables, each with its joined name, such as `a.b.c`."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from flatten(value, join, f"{above}{key}{join}")
        else:
            yield above + key, value


def _value(hint: Any, raw: Any, at: str, tree: list[str] | None) -> Any:
    """Return `raw` as `hint` demands it. `tree` has the keys to suggest; it is None if `raw` is already built."""
    core, ranges, optional = _open(hint)
    built, args, value = tree is None, get_args(core), raw
    if optional and (raw is None or (not built and raw == "none")):
        return None
    classes, kind = _accepts(core, built)
    if not isinstance(raw, classes) or (isinstance(raw, bool) and core in (int, float)):
        lacks = get_origin(core) is tuple and isinstance(raw, str | int) and isinstance(parse(f"[{raw}]"), list)
        example = f", as in '{at}=[{raw}]'," if lacks and not built else ","  # only the brackets are missing
        raise BadInput(f"{at or 'the settings'} must be {kind}{example} found {_shown(raw)}")
    if get_origin(core) is Literal:
        value = "none" if raw is None and not built else raw  # `parse` cannot know that "none" is a choice here
        if not any(type(value) is type(choice) and value == choice for choice in args):
            near = _nearest(raw, [choice for choice in args if isinstance(choice, str)])
            raise BadInput(f"{at} must be {kind}; found {_shown(raw)}" + (f" (did you mean '{near}'?)" if near else ""))
    elif get_origin(core) is tuple:
        value = tuple(_value(args[0], item, f"{at}[{i}]", tree) for i, item in enumerate(raw))
    elif get_origin(core) is dict:
        names = [_value(str, name, f"a key of {at}", tree) for name in raw]
        value = {name: _value(args[1], raw[name], _join(at, name), tree) for name in names}
    elif is_dataclass(core):
        value = _built(raw, at) if tree is None else _table(core, raw, at, tree)
    elif core is float:
        if not abs(raw) <= sys.float_info.max:  # also refuses nan and whole numbers that are too large for a float
            raise BadInput(f"{at} must be a finite number, found {_shown(raw)}")
        value = float(raw)
    for allowed in ranges:
        if value not in allowed:
            raise BadInput(f"{at} must be {allowed}, found {_shown(raw)}")
    if optional and isinstance(value, str) and value == "none":
        raise BadInput(f"{at} must not be the text 'none', which a file reads as no value; use None")
    return value


def _table(cls: Any, table: Mapping[str, Any], at: str, tree: list[str]) -> Any:
    known, given = {f.name: (f, hint) for f, hint in _fields(cls)}, {}
    for name in table:
        if name not in known:
            # A right name in the wrong table is found by its last word.
            everywhere = {key.rpartition(".")[2]: key for key in tree} | {key: key for key in tree}
            near = _nearest(name, list(known))
            key = _join(at, near) if near else everywhere.get(_nearest(name, list(everywhere)))
            mend = f"did you mean '{key}'?" if key else f"the settings here are: {', '.join(known) or 'none'}"
            raise BadInput(f"unknown setting '{_join(at, name)}'; {mend}")
    for name, (f, hint) in known.items():
        place = _join(at, name)
        if name in table:
            custom = f.metadata.get("read")
            given[name] = custom(table[name], place) if custom else _value(hint, table[name], place, tree)
        elif f.default is MISSING and f.default_factory is MISSING:
            kind = "" if "read" in f.metadata else f"; it must be {_accepts(_open(hint)[0], built=False)[1]}"
            raise BadInput(f"{place} is missing and has no default{kind}")
    return cls(**given)


def _built(value: Any, at: str) -> Any:
    for f, hint in _fields(type(value)):
        item, place = getattr(value, f.name), _join(at, f.name)
        if "read" not in f.metadata:
            _value(hint, item, place, None)
        elif is_dataclass(item):
            _built(item, place)
    return value


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return plain(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return "none" if value is None else value


def _fields(cls: type) -> list[tuple[Field[Any], Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return [(f, hints[f.name]) for f in fields(cls)]


def _open(hint: Any) -> tuple[Any, list[Range], bool]:
    """Unwrap a type. Return what is inside, the ranges around it, and whether it may be None."""
    if get_origin(hint) is Annotated:
        core, ranges, optional = _open(get_args(hint)[0])
        return core, ranges + [mark for mark in get_args(hint)[1:] if isinstance(mark, Range)], optional
    if get_origin(hint) in (Union, UnionType):
        inner = [arg for arg in get_args(hint) if arg is not NoneType]
        return (*_open(inner[0])[:2], True) if len(inner) == 1 else (hint, [], False)
    return hint, [], False


def _accepts(core: Any, built: bool) -> tuple[Any, str]:
    """Return the Python classes that a value of this type may have, and the words for them."""
    if get_origin(core) is Literal:
        return object, f"one of {', '.join(map(str, get_args(core)))}"
    if is_dataclass(core):
        return (core, f"a {core.__name__}") if built else (Mapping, "a table")  # type: ignore[union-attr]
    kinds: dict[Any, tuple[Any, str]] = {
        bool: (bool, "true or false"),
        int: (int, "a whole number"),
        float: ((int, float), "a number"),
        str: (str, "text"),
        tuple: (tuple, "a tuple") if built else ((list, tuple), "a list"),
        dict: (Mapping, "a table"),
    }
    origin = get_origin(core) or core
    if origin not in kinds or (origin is tuple and get_args(core)[1:] != (...,)):
        raise TypeError(f"a setting cannot be of type {core}; a method's own types go through metadata['read']")
    return kinds[origin]


def _shown(raw: Any) -> str:
    if raw is None or isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, (int, float, str)):
        return text if len(text := repr(raw)) <= 80 else f"{text[:77]}..."
    return "a table" if isinstance(raw, Mapping) else f"a {type(raw).__name__}"


def _nearest(word: Any, choices: list[str]) -> str:
    return next(iter(get_close_matches(word.lower(), choices, n=1)), "") if isinstance(word, str) else ""


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name
