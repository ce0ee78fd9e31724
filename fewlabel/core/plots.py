"""The plots that a method can ask for, of values that it logs (`fed.log`) or shows (`site.show`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """A plot in a section of the report. `about` explains it to the reader."""

    section: str
    about: str


@dataclass(frozen=True)
class PerClass(Plot):
    """A value for each class over the rounds: `fed.log(KEY=tensor)` with one entry for each class."""

    key: str
    title: str


@dataclass(frozen=True)
class PerClient(Plot):
    """A share for each client over the rounds, in percent: `fed.log(PREFIX_3=0.2)` for client 3."""

    prefix: str
    title: str


@dataclass(frozen=True)
class ClassMatrix(Plot):
    """Class matrices of three rounds: `fed.log(KEY=...)` for labeled clients, `site.show(KEY=...)` for the others.

    If those of labeled clients do not leave their sites, `site.show(labeled_KEY=...)` serves as well.
    """

    key: str


WEIGHTS = "Weights in the average"
WEIGHTS_ABOUT = (
    "How much each client counts in the server's new model. Where groups are averaged apart, each adds up to 100. "
    "Blank: not in that round."
)
CLIENT_WEIGHTS = PerClient(WEIGHTS, WEIGHTS_ABOUT, "weight", "weight of each client")
