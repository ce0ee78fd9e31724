"""Frozen dataclasses to bytes and back: the one format for all that is sent or stored, safe to read from anyone.

A buffer is a safetensors file. Its tensors are named "0", "1", … in the order of the walk over the value. Its metadata
holds the format version under "fewlabel", the rest of the value as compact JSON under "value", and the caller's header.
The JSON has no type names: only the declared type says how to read it. Equal values give equal bytes.
"""

import json
import math
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import c_char
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, lru_cache
from itertools import accumulate, repeat
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints, overload

import safetensors
import torch
from torch import Tensor

from fewlabel.core.errors import RunFailed

T = TypeVar("T")
Bytes = bytes | bytearray | memoryview
CPU = torch.device("cpu")
VERSION = "1"
MAX_BYTES = 1 << 31
MAX_HEADER = 1 << 24  # bytes of JSON, which may take twenty times as much memory once parsed
MAX_TENSORS = 1 << 16
MAX_TEXT = 1 << 20
MAX_DEPTH = MAX_DIMENSIONS = 32
MAX_KNOWN = 32  # heads that are remembered

_RESERVED = {"fewlabel", "value"}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_INSTEAD = {"list": "use tuple", "set": "use tuple", "frozenset": "use tuple", "ndarray": "use Tensor"}
_INSTEAD |= {"dict": "use str or int keys", "Union": "use X | None", "UnionType": "use X | None"}
_INTS = {"U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64}
_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_DTYPES = {"BOOL": torch.bool, **_INTS, **_FLOATS}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_SORTED = ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "I8", "U8", "BOOL")  # as safetensors lays tensors out
_ORDER = {_DTYPES[name]: place for place, name in enumerate(_SORTED)}
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)  # the last quote is optional to stay linear
_BRACKET = re.compile(r"[\[\]{}]")
_DEEPER = {"[": 1, "{": 1, "]": -1, "}": -1}
_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 160


class WireError(RunFailed):
    """A value cannot be packed, or bytes are not a value of the expected type."""


class _PathError(Exception):
    """An error deep inside a value. Each container around it puts its part of the path in front."""

    path = ""


@dataclass(slots=True)
class _Box:
    """The tensors of one buffer. Packing puts them in, unpacking takes them out."""

    tensors: dict[str, Any]
    finite: bool = False
    device: torch.device = CPU  # where tensors go when they are taken out
    suspect: bool = False  # whether each tensor must be searched for NaN and Inf


_Step = Callable[[Any, _Box], Any]
_Codec = tuple[_Step, _Step]  # value to JSON, JSON to value


def pack(value: object, kind: Any = None, header: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of `value` for `unpack(kind, …)`. `kind` is its declared type, by default its class."""
    kind = type(value) if kind is None else kind
    encode, _ = _codec(kind)
    with _speaking_of(kind):
        box = _Box({})
        metadata = {"fewlabel": VERSION, "value": _to_json(encode(value, box)), **_extra(dict(header or {}))}
        _at_most(MAX_TENSORS, len(box.tensors), "tensors")
        looks = tuple([(tensor.dtype, tensor.shape) for tensor in box.tensors.values()])
        known = len(metadata["value"]) < MAX_TEXT >> 4  # longer heads are not worth the memory
        entries = tuple(metadata.items())
        head, sizes = _head(entries, looks) if known else _head.__wrapped__(entries, looks)
        parts = ((c_char * size).from_address(box.tensors[name].data_ptr()) for name, size in sizes)
        return b"".join((head, *parts))


@lru_cache(MAX_KNOWN)
def _head(
    metadata: tuple[tuple[str, str], ...], looks: tuple[tuple[torch.dtype, torch.Size], ...]
) -> tuple[bytes, list[tuple[str, int]]]:
    """Return the bytes before the tensors, and the names and sizes of the tensors that have any bytes, in order.

    The head is what safetensors would write, except for the metadata: safetensors writes it in random order.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    sizes, end = list[tuple[str, int]](), 0
    named = [(str(number), *look) for number, look in enumerate(looks)]
    for name, dtype, shape in sorted(named, key=lambda one: (_ORDER[one[1]], one[0])):
        start, end = end, end + shape.numel() * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        if end > start:
            sizes.append((name, end - start))
    head = _to_json(entries).encode()
    head += b" " * (-len(head) % 8)
    _at_most(MAX_HEADER, len(head), "bytes besides its tensors")
    return len(head).to_bytes(8, "little") + head, sizes


@overload
def unpack(
    kind: type[T], data: Bytes, *, finite: bool = ..., max_bytes: int = ..., device: torch.device = ...
) -> T: ...
@overload
def unpack(kind: Any, data: Bytes, *, finite: bool = ..., max_bytes: int = ..., device: torch.device = ...) -> Any: ...
def unpack(
    kind: Any, data: Bytes, *, finite: bool = False, max_bytes: int = MAX_BYTES, device: torch.device = CPU
) -> Any:
    """Return the value of type `kind` in `data`, whoever wrote it. Anything wrong raises WireError and nothing else.

    A bytearray may become part of the value. Tensors are put on `device`.
    """
    _, decode = _codec(kind)
    with _speaking_of(kind):
        _at_most(max_bytes, memoryview(data).nbytes, "bytes")
        content, tensors = _opened(data)
        box = _Box(tensors, finite, device, finite and not _all_finite(data, tensors))
        value = decode(content, box)
        if box.tensors:
            raise _PathError(f"tensor {_brief.repr(min(box.tensors))} belongs to no part of the value")
        return value


def header(data: bytes | memoryview) -> dict[str, str]:
    """Return the header that `pack` was given, without reading any tensor."""
    with _speaking_of(None):
        return {name: text for name, text in _metadata(data).items() if name not in _RESERVED}


def check_kind(kind: Any) -> None:
    """Raise TypeError, with the path, if values of type `kind` cannot be sent."""
    _codec(kind)


def check_like(value: object, network: Mapping[str, Tensor]) -> None:
    """Raise WireError unless each dict of tensors that shares a name with `network`, or is called `model`, fits it.

    Norm statistics may be absent. No variance may be below zero.
    """
    _compare(value, network, type(value).__name__)


def _compare(value: object, network: Mapping[str, Tensor], path: str) -> None:
    if is_dataclass(value):
        for field in fields(value):
            _compare(getattr(value, field.name), network, f"{path}.{field.name}")
    elif isinstance(value, tuple):
        for i, part in enumerate(value):
            _compare(part, network, f"{path}[{i}]")
    elif isinstance(value, dict):
        named = path.endswith(".model") or not network.keys().isdisjoint(value)
        is_tree = named and all(isinstance(part, Tensor) for part in value.values())
        for key in {**network, **value} if is_tree else value:
            if not is_tree:
                _compare(value[key], network, f"{path}[{_brief.repr(key)}]")
            elif key in value or not key.endswith(_STATISTICS):
                a, b = network.get(key), value.get(key)
                if a is None or b is None or a.dtype != b.dtype or a.shape != b.shape:
                    where = f"{path}[{_brief.repr(key)}]"
                    raise WireError(f"{where}: expected {_looks(a)}, found {_looks(b)}.")
                if key.endswith("running_var") and b.numel() and b.min() < 0:
                    raise WireError(f"{path}[{_brief.repr(key)}]: a variance is not below zero.")


def _looks(tensor: Tensor | None) -> str:
    return "no such entry" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


@contextmanager
def _speaking_of(kind: Any) -> Iterator[None]:
    """Turn any error inside into a WireError that names the kind and the path."""
    try:
        yield
    except Exception as error:
        fault = _fault(error, getattr(kind, "__name__", "value"))
        raise WireError(f"{fault.path}: {fault}.") from None


def _fault(error: Exception, where: str) -> _PathError:
    if not isinstance(error, _PathError):
        error = _PathError(f"failed with {type(error).__name__} {_brief.repr(str(error))}")
    error.path = where + error.path
    return error


def _at_most(limit: int, number: int, things: str) -> None:
    if number > limit:
        raise _PathError(f"it has {number} {things}, more than {limit}")


def _metadata(data: bytes | bytearray | memoryview) -> dict[str, str]:
    view = memoryview(data).cast("B")
    length = int.from_bytes(view[:8], "little")
    if length > len(view) - 8:
        raise _PathError("the buffer is cut short")
    _at_most(MAX_HEADER, length, "bytes besides its tensors")
    head = _from_json(str(view[8 : 8 + length], "utf-8"))
    metadata = head.get("__metadata__") if isinstance(head, dict) else None
    if not isinstance(metadata, dict) or not isinstance(metadata.get("value"), str):
        raise _PathError("the buffer is not one that fewlabel has packed")
    if (version := metadata.get("fewlabel")) != VERSION:
        raise _PathError(f"the format version is {_brief.repr(version)}, but only {VERSION!r} can be read")
    _at_most(MAX_TENSORS, len(head) - 1, "tensors")
    _extra({name: text for name, text in metadata.items() if name not in _RESERVED})
    return metadata


def _opened(data: bytes | bytearray | memoryview) -> tuple[Any, dict[str, Any]]:
    """Return the JSON and the tensors of a buffer.

    All uploads of a network have the same head. Once one has been checked, the others need no check.
    """
    view = memoryview(data).cast("B")
    head = bytes(view[: 8 + int.from_bytes(view[:8], "little")])
    known = _KNOWN.get((head, len(view)))
    if known is None:
        content = _from_json(_metadata(data)["value"])
        tensors = dict(safetensors.deserialize(bytes(data)))  # type: ignore[no-untyped-call]
        if tensors and len(head) < MAX_TEXT:
            if len(_KNOWN) >= MAX_KNOWN:
                _KNOWN.clear()
            parsed = _parse(str(head[8:], "utf-8"))
            _KNOWN[head, len(view)] = (
                content,
                [(n, t["dtype"], t["shape"], parsed[n]["data_offsets"]) for n, t in tensors.items()],
            )
        return content, tensors
    content, entries = known
    body = view[len(head) :] if isinstance(data, bytearray) else memoryview(bytearray(view[len(head) :]))
    return content, {n: {"dtype": dtype, "shape": shape, "data": body[a:b]} for n, dtype, shape, (a, b) in entries}


def _all_finite(data: Bytes, tensors: dict[str, Any]) -> bool:
    """Return True if one sum over a network's weights, which lie side by side, shows that none is NaN or Inf."""
    kinds = {entry["dtype"] for entry in tensors.values()}
    if kinds != {"F32"} or not isinstance(data, bytearray):
        return False
    start = 8 + int.from_bytes(data[:8], "little")
    return start == len(data) or math.isfinite(torch.frombuffer(data, dtype=torch.float32, offset=start).sum())


def _extra(entries: dict[str, str]) -> dict[str, str]:
    if taken := _RESERVED & entries.keys():
        raise _PathError(f"the header cannot have {min(taken)!r}, which is a name of the format")
    _inside("header", _codec(dict[str, str])[0], entries, _Box({}), True)
    return entries


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(entries := dict(pairs)) != len(pairs):
        raise _PathError("the JSON names an entry twice")
    return entries


_to_json = json.JSONEncoder(ensure_ascii=False, check_circular=False, separators=(",", ":")).encode
_parse = json.JSONDecoder(object_pairs_hook=_unique).decode


def _from_json(text: str) -> Any:
    if text.count("[") + text.count("{") > MAX_DEPTH:
        brackets = _BRACKET.findall(_STRING.sub("", text))
        _at_most(MAX_DEPTH, max(accumulate(map(_DEEPER.__getitem__, brackets)), default=0), "levels of JSON")
    return _parse(text)


@cache
def _codec(kind: Any) -> _Codec:
    return _build(kind, getattr(kind, "__name__", "value"), ())


def _build(kind: Any, path: str, around: tuple[Any, ...]) -> _Codec:
    """Build the two closures for `kind`. `around` has the kinds that it was found in."""
    cls, args = get_origin(kind) or kind, get_args(kind)
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    if kind in around or len(around) > MAX_DEPTH:
        raise TypeError(f"{path}: {name} cannot be sent; a type cannot contain itself or go deeper than {MAX_DEPTH}")
    if kind in _PLAIN:
        return _PLAIN[kind]

    def inner(part: Any, where: str = "[…]") -> _Codec:
        return _build(part, path + where, (*around, kind))

    if cls in (Union, UnionType) and len(args) == 2 and NoneType in args:
        encode, decode = inner(args[args[0] is NoneType], "")
        return _optional(encode), _optional(decode)
    if cls is tuple and kind is not tuple:
        many = args[1:] == (...,)
        codecs = [inner(arg) for arg in args[: 1 if many else None]]
        return _items([c[0] for c in codecs], many, tuple, list), _items([c[1] for c in codecs], many, list, tuple)
    if cls is dict and args and args[0] in _KEYS:
        encode, decode = inner(args[1])
        return _entries(_KEYS[args[0]][0], encode), _entries(_KEYS[args[0]][1], decode)
    if not (isinstance(cls, type) and is_dataclass(cls) and cls.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        other = "only frozen dataclasses, tensors, plain values, tuples and dicts can"
        instead = "make it frozen" if is_dataclass(cls) else _INSTEAD.get(getattr(cls, "__name__", ""), other)
        raise TypeError(f"{path}: {name} cannot be sent; {instead}")
    if unset := [field.name for field in fields(cls) if not field.init]:
        raise TypeError(f"{path}.{unset[0]}: a field with init=False cannot be sent")
    try:
        hints = get_type_hints(cls)
    except NameError as error:
        raise TypeError(f"{path}: {name} cannot be sent; {error}") from None
    return _record(cls, {field.name: inner(hints[field.name], f".{field.name}") for field in fields(cls)})


def _inside(key: Any, step: _Step, value: Any, box: _Box, is_field: bool = False) -> Any:
    try:
        return step(value, box)
    except Exception as error:
        raise _fault(error, f".{key}" if is_field else f"[{_brief.repr(key)}]") from None


def _optional(step: _Step) -> _Step:
    return lambda value, box: None if value is None else step(value, box)


def _items(steps: list[_Step], many: bool, source: type, target: type) -> _Step:
    def walk(value: Any, box: _Box) -> Any:
        _expect(source, value)
        if not many and len(value) != len(steps):
            raise _PathError(f"expected {len(steps)} items, found {len(value)}")
        pairs = enumerate(zip(value, repeat(steps[0]) if many else steps, strict=False))
        return target([_inside(i, step, part, box) for i, (part, step) in pairs])

    return walk


def _entries(on_key: _Step, on_value: _Step) -> _Step:
    def walk(value: Any, box: _Box) -> Any:
        _expect(dict, value)
        result, key = {}, None
        try:  # one `try` for all entries: a network has many
            for key, part in value.items():
                result[on_key(key, box)] = on_value(part, box)
        except Exception as error:
            raise _fault(error, f"[{_brief.repr(key)}]") from None
        return result

    return walk


def _record(cls: type, codecs: dict[str, _Codec]) -> _Codec:
    def encode(value: Any, box: _Box) -> Any:
        _expect(cls, value)
        return {name: _inside(name, step, getattr(value, name), box, True) for name, (step, _) in codecs.items()}

    def decode(value: Any, box: _Box) -> Any:
        _expect(dict, value)
        for odd in sorted(value.keys() ^ codecs.keys()):
            raise _PathError(f"the field {_brief.repr(odd)} is {'missing' if odd in codecs else 'unknown'}")
        return cls(**{name: _inside(name, step, value[name], box, True) for name, (_, step) in codecs.items()})

    return encode, decode


def _expect(kind: type, value: object) -> None:
    if type(value) is not kind:
        raise _PathError(f"expected {kind.__name__}, found {type(value).__name__}")


def _same(kind: type) -> _Codec:
    def check(value: Any, _: _Box) -> Any:
        _expect(kind, value)
        return value

    return check, check


def _int(value: Any, _: _Box) -> Any:
    _expect(int, value)
    if not -(1 << 63) <= value < 1 << 63:
        raise _PathError("the int does not fit in 64 bits")
    return value


def _float(value: Any, box: _Box) -> float:
    if not isinstance(value, float):
        if type(value) is not int:
            raise _PathError(f"expected float, found {type(value).__name__}")
        _int(value, box)
    if box.finite and not math.isfinite(value):
        raise _PathError(f"expected a finite float, found {value}")
    return float(value)


def _text(value: Any, _: _Box) -> Any:
    _expect(str, value)
    if len(value) > MAX_TEXT or not value.isascii():
        _at_most(MAX_TEXT, len(value), "characters")
        value.encode()  # raises on a lone surrogate, which would be trouble wherever the text is written
    return value


def _key_in(key: str, box: _Box) -> Any:
    if not re.fullmatch(r"0|-?[1-9][0-9]{0,18}", key):
        raise _PathError("the key is not an int")
    return _int(int(key), box)


def _tensor_out(value: object, box: _Box) -> int:
    if not isinstance(value, Tensor):
        raise _PathError(f"expected Tensor, found {type(value).__name__}")
    if value.dtype not in _NAMES or value.layout is not torch.strided or value.is_meta:
        raise _PathError(f"a {value.layout} tensor of {value.dtype} on {value.device} cannot be sent")
    number = len(box.tensors)
    plain = value.is_cpu and value.is_contiguous() and not value.is_neg()  # a look is faster than a conversion
    box.tensors[str(number)] = value if plain else value.detach().cpu().resolve_neg().contiguous()
    return number


def _tensor_in(value: Any, box: _Box) -> Tensor:
    _expect(int, value)
    if (entry := box.tensors.pop(str(value), None)) is None:
        raise _PathError(f"tensor {value} is missing or used twice")
    shape, data, dtype = entry["shape"], entry["data"], _DTYPES.get(entry["dtype"])
    _at_most(MAX_DIMENSIONS, len(shape), "dimensions")  # PyTorch's time grows with their square
    if dtype is None:
        raise _PathError(f"tensors of {entry['dtype']} are not accepted")
    if dtype is torch.bool and bytes(data).translate(None, b"\0\1"):
        raise _PathError("the tensor has a bool that is neither 0 nor 1")
    # `data` is part of a bytearray made for this value alone, so the tensor may keep it. PyTorch refuses an empty one.
    tensor = torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)
    # A NaN or Inf makes the sum NaN or Inf, but so may an overflow. Only then each value is looked at.
    if box.suspect and dtype.is_floating_point and not math.isfinite(tensor.sum()) and not tensor.isfinite().all():
        raise _PathError("expected finite values, found NaN or Inf")
    return tensor if box.device.type == "cpu" else tensor.to(box.device)


_KNOWN: dict[tuple[bytes, int], tuple[Any, list[tuple[str, str, list[int], list[int]]]]] = {}
_KEYS: dict[Any, _Codec] = {str: (_text, _text), int: (lambda key, box: str(_int(key, box)), _key_in)}
_PLAIN: dict[Any, _Codec] = {kind: _same(kind) for kind in (bool, NoneType)}
_PLAIN |= {None: _PLAIN[NoneType], int: (_int, _int), float: (_float, _float), str: (_text, _text)}
_PLAIN[Tensor] = _tensor_out, _tensor_in
