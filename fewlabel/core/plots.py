"""What a method may ask to have drawn of the values that it logs (`fed.log`) or shows (`site.show`)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """A plot in a report's section, which `about` explains."""

    section: str
    about: str


@dataclass(frozen=True)
class PerClass(Plot):
    """A value for each class, over the rounds: `fed.log(KEY=tensor)` with one entry a class."""

    key: str
    title: str


@dataclass(frozen=True)
class PerClient(Plot):
    """A share for each client, over the rounds: `fed.log(PREFIX_3=0.2)` for client 3; shares are drawn in percent."""

    prefix: str
    title: str


@dataclass(frozen=True)
class ClassMatrix(Plot):
    """A matrix of classes in the last round: `fed.log(KEY=...)` at labeled clients, `site.show(KEY=...)` at others."""

    key: str


WEIGHTS = "Weights in the average"
WEIGHTS_ABOUT = (
    "How much each client counts in the server's new model. Where groups are averaged apart, each adds up to 100. "
    "Blank: not in that round."
)
CLIENT_WEIGHTS = PerClient(WEIGHTS, WEIGHTS_ABOUT, "weight", "weight of each client")
