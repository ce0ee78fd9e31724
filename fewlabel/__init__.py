"""FewLabel: federated learning for when few have labels. These names are the Python API; each loads when it is used."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fewlabel.api import compare, export, predict, run
    from fewlabel.core import tree
    from fewlabel.core.errors import FewLabelError
    from fewlabel.core.federation import (
        EVERY_CLIENT,
        SERVER,
        SOME_CLIENTS,
        ClientInfo,
        Federation,
        Model,
        Site,
        Weights,
        broadcast,
    )
    from fewlabel.core.tasks import on_client, on_server
    from fewlabel.experiment import Checkpoint, Clients, Data, Evaluate, Experiment, Labels, Net, Stream, Train, Views
    from fewlabel.methods import METHODS
    from fewlabel.report.comparison import Comparison
    from fewlabel.report.results import Result

    __version__: str

__all__ = [
    "EVERY_CLIENT",
    "METHODS",
    "SERVER",
    "SOME_CLIENTS",
    "Checkpoint",
    "ClientInfo",
    "Clients",
    "Comparison",
    "Data",
    "Evaluate",
    "Experiment",
    "Federation",
    "FewLabelError",
    "Labels",
    "Model",
    "Net",
    "Result",
    "Site",
    "Stream",
    "Train",
    "Views",
    "Weights",
    "__version__",
    "broadcast",
    "compare",
    "export",
    "on_client",
    "on_server",
    "predict",
    "run",
    "tree",
]

if not TYPE_CHECKING:  # a type checker that saw this would take any misspelt name for one of ours
    _HOMES = {
        "api": "compare export predict run",
        "core.errors": "FewLabelError",
        "experiment": "Checkpoint Clients Data Evaluate Experiment Labels Net Stream Train Views",
        "core.federation": "EVERY_CLIENT SERVER SOME_CLIENTS ClientInfo Federation Model Site Weights broadcast",
        "core.tasks": "on_client on_server",
        "methods": "METHODS",
        "report.comparison": "Comparison",
        "report.results": "Result",
    }

    def __getattr__(name):
        """Load a name when it is used. PyTorch takes seconds to load, and `fewlabel --help` should not wait for it."""
        from importlib import import_module, metadata

        if name == "__version__":
            value = metadata.version("fewlabel")
        elif name == "tree":
            value = import_module("fewlabel.core.tree")
        else:
            home = next((home for home, names in _HOMES.items() if name in names.split()), None)
            if home is None:
                raise AttributeError(f"module 'fewlabel' has no attribute '{name}'")
            value = getattr(import_module(f"fewlabel.{home}"), name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted(__all__)
