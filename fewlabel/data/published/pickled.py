"""Numbers, strings, lists, dictionaries and arrays out of a pickle, without the module that runs what a pickle says.

The Python version of CIFAR is pickled. A pickle is a program for a small machine that may import and call anything;
here is that machine with the few instructions that plain data need. It imports and calls nothing: the three names of
NumPy that an array is written with are mere signs, and every other name or instruction is refused.
"""

import re
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

ARRAY, KIND = object(), object()
SIGNS = {
    "numpy.core.multiarray _reconstruct": ARRAY,
    "numpy._core.multiarray _reconstruct": ARRAY,
    "numpy ndarray": None,
    "numpy dtype": KIND,
}
NUMBERS = {b"K": "<B", b"M": "<H", b"J": "<i", b"G": ">d"}
STRINGS = {b"U": "<B", b"T": "<i", b"X": "<I", b"C": "<B", b"B": "<I"}  # by the width of their length
PLACES = {b"q": "<B", b"r": "<I", b"h": "<B", b"j": "<I"}
CONSTANTS: dict[bytes, Callable[[], Any]] = {
    b"N": lambda: None,
    b"\x88": lambda: True,
    b"\x89": lambda: False,
    b"]": list,
    b"}": dict,
    b")": tuple,
}
SHORT_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}


class Blank:
    """An array or a dtype that is yet to be filled in."""

    def __init__(self, sign: object, arguments: Any) -> None:
        self.sign, self.arguments = sign, arguments


def unpickle(data: memoryview) -> Any:
    """The value in a pickle of protocol 0 to 3. Strings of Python 2 are bytes; a long one is a view of the data."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at = 0

    def take(count: int) -> memoryview:
        nonlocal at
        at += count
        if count < 0 or at > len(data):
            raise ValueError("the pickle ends early")
        return data[at - count : at]

    def number(form: str) -> Any:
        return struct.unpack(form, take(struct.calcsize(form)))[0]

    def line() -> str:
        found = bytearray()
        while (byte := bytes(take(1))) != b"\n":
            found += byte
        return found.decode("ascii")

    def since_mark() -> list[Any]:
        start = marks.pop()
        found = stack[start:]
        del stack[start:]
        return found

    while (op := bytes(take(1))) != b".":
        if op == b"\x80":
            take(1)
        elif op in NUMBERS:
            stack.append(number(NUMBERS[op]))
        elif op == b"I":
            stack.append(int(line()))  # 00 and 01 are false and true
        elif op in STRINGS:
            text = take(number(STRINGS[op]))
            stack.append(str(text, "utf-8") if op == b"X" else text if len(text) > 1 << 16 else bytes(text))
        elif op == b"S":
            stack.append(quoted(line()))
        elif op in CONSTANTS:
            stack.append(CONSTANTS[op]())
        elif op == b"(":
            marks.append(len(stack))
        elif op in b"tld":
            items = since_mark()
            stack.append(tuple(items) if op == b"t" else items if op == b"l" else pairs(items))
        elif op in SHORT_TUPLES:
            stack[-SHORT_TUPLES[op] :] = [tuple(stack[-SHORT_TUPLES[op] :])]
        elif op in b"ae":
            items = since_mark() if op == b"e" else [stack.pop()]
            only(stack[-1], list).extend(items)
        elif op in b"su":
            items = since_mark() if op == b"u" else [stack.pop(-2), stack.pop()]
            only(stack[-1], dict).update(pairs(items))
        elif op in PLACES or op in b"pg":
            place = number(PLACES[op]) if op in PLACES else int(line())
            if op in b"qrp":
                memo[place] = stack[-1]
            else:
                stack.append(memo[place])
        elif op == b"c":
            name = f"{line()} {line()}"
            if name not in SIGNS:
                raise ValueError(f"the pickle names '{name.replace(' ', '.')}', which is no number, string or array")
            stack.append(SIGNS[name])
        elif op == b"R":
            arguments, sign = stack.pop(), stack.pop()
            if sign is not ARRAY and sign is not KIND:
                raise ValueError("the pickle calls something")
            stack.append(Blank(sign, arguments))
        elif op == b"b":
            state, blank = stack.pop(), only(stack.pop(), Blank)
            stack.append(array(*state) if blank.sign is ARRAY else kind(blank.arguments[0], state[1]))
            memo.update({place: stack[-1] for place, value in memo.items() if value is blank})
        else:
            raise ValueError(f"the pickle has an instruction {op!r} that plain data do not need")
    return stack.pop()


def only(value: Any, wanted: type) -> Any:
    if type(value) is not wanted:
        raise ValueError(f"the pickle fills a {type(value).__name__} as if it were a {wanted.__name__}")
    return value


def pairs(items: list[Any]) -> dict[Any, Any]:
    return dict(zip(items[::2], items[1::2], strict=True))


def quoted(text: str) -> bytes:
    """A string of protocol 0, which CIFAR uses for names alone."""
    if not re.fullmatch(r"'[^'\\]*'|\"[^\"\\]*\"", text):
        raise ValueError(f"the pickle has a string {text[:40]} with escapes")
    return text[1:-1].encode("ascii")


def kind(name: str | bytes, order: str | bytes) -> np.dtype[Any]:
    name, order = (word if isinstance(word, str) else bytes(word).decode("ascii") for word in (name, order))
    if not re.fullmatch(r"[buif][1248]", name) or order not in ("|", "<", ">"):
        raise ValueError(f"the pickle has an array of {name}, not of numbers")
    return np.dtype(name).newbyteorder(order)  # type: ignore[arg-type]


def array(_: int, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool, data: memoryview | bytes) -> np.ndarray:
    if not isinstance(dtype, np.dtype) or dtype.hasobject:
        raise ValueError("the pickle has an array that is not of numbers")
    return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")
