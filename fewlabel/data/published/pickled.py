"""Read CIFAR's Python files, which are pickles, with an unpickler that makes nothing but plain data.

A pickle may name any function and have it called. Ours knows only the names that NumPy writes an array with, and
answers each of them with a stand-in of our own; every other name is refused. So nothing outside of this file is called
with what a pickle says. A file is opened only after its checksum has matched.
"""

import pickle
import re
from typing import IO, Any

import numpy as np


class Dtype:
    """Stands in for NumPy's dtype: remembers its name and its byte order."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name, self.order = name, b"|"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = state[1]

    def of_numbers(self) -> np.dtype[Any]:
        name, order = (word if isinstance(word, str) else word.decode("ascii") for word in (self.name, self.order))
        if not re.fullmatch(r"[buif][1248]", name) or order not in ("|", "<", ">"):
            raise ValueError(f"the pickle has an array of {name}, not of numbers")
        return np.dtype(name).newbyteorder(order)  # type: ignore[arg-type]


class Array:
    """Stands in for NumPy's array until all of it has been read."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.fortran, self.data = state

    def of_numbers(self) -> np.ndarray:
        return np.frombuffer(self.data, self.dtype.of_numbers()).reshape(self.shape, order="F" if self.fortran else "C")


STAND_INS = {
    "numpy.core.multiarray._reconstruct": Array,
    "numpy._core.multiarray._reconstruct": Array,
    "numpy.ndarray": None,
    "numpy.dtype": Dtype,
}


class PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in STAND_INS:
            raise ValueError(f"the pickle names '{module}.{name}', which is no number, string or array")
        return STAND_INS[f"{module}.{name}"]


def unpickle(file: IO[bytes]) -> dict[Any, Any]:
    """Return the dictionary in a pickle, whose values may be arrays. Strings of Python 2 become bytes."""
    try:
        found = PlainUnpickler(file, encoding="bytes").load()
        if not isinstance(found, dict):
            raise ValueError(f"the pickle should hold a dictionary, but holds a {type(found).__name__}")
        return {key: value.of_numbers() if isinstance(value, Array) else value for key, value in found.items()}
    except ValueError:
        raise
    except Exception as error:  # damaged bytes may raise anything here
        raise ValueError(f"the pickle cannot be read: {str(error) or type(error).__name__}") from None
