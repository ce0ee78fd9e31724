"""The backends that can do the jobs of a run, by name. To add one, write one file and add one line here.

Its `with_executor(experiment, workers, body)` must make an `executor.Executor` and call `body` with it.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from fewlabel.core.errors import BadInput, install, unknown


class Backend(NamedTuple):
    module: str  # loaded when it is used: backends are heavy
    needs: tuple[str, ...] = ()  # packages
    install: str = ""


BACKENDS = {
    "simulator": Backend("fewlabel.engine.local"),
    "flower-ray": Backend("fewlabel.engine.ray", ("flwr", "ray"), f"Flower with its simulation: {install('flower')}"),
}


def check(name: str) -> None:
    """Refuse a backend that does not exist or cannot be used here."""
    if name not in BACKENDS:
        raise BadInput(unknown("backend", name, BACKENDS))
    if not all(map(find_spec, BACKENDS[name].needs)):
        raise BadInput(f"the backend '{name}' needs {BACKENDS[name].install}")


def load(name: str) -> Callable[..., None]:
    """Return a backend's `with_executor`."""
    check(name)
    found: Any = import_module(BACKENDS[name].module)
    with_executor: Callable[..., None] = found.with_executor
    return with_executor
