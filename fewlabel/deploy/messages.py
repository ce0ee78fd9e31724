"""What a server and its sites say to each other, beside the messages of a method, and how large it may be.

These types are packed by `wire`, so nothing else can cross. `flower` and `engine.flower_messages` carry the bytes.
"""

from dataclasses import dataclass

from torch import Tensor

from fewlabel.core.errors import FewLabelError
from fewlabel.core.federation import ClientInfo
from fewlabel.data.site_files import Terms
from fewlabel.engine.executor import Job

MAX_ORDER = 1 << 20  # bytes
MAX_INTRODUCTION = 1 << 16  # bytes
MAX_WANTED = 10**6  # labels that a site may be asked for
MAX_IMAGES = 10**8  # that a site may claim to have


@dataclass(frozen=True)
class Order:
    """What a server asks of a site. The message of the method travels beside it."""

    experiment: str  # as TOML
    terms: Terms
    # Of kind info, pixels, client, hidden, statistics, evaluate, or a step of a masked sum. `run` is no directory, but
    # the run's name.
    job: Job
    wanted: int = 0  # labels that the coordinator would like this site to add; its people decide


@dataclass(frozen=True)
class Introduction:
    """All that a site tells about itself."""

    info: ClientInfo
    versions: dict[str, str]
    test: int = 0  # images to test on; 0 if they are too few to speak of


# The steps of a masked sum, beside `masking.Advert`, `Roster` and `Opening`. Keys of dictionaries are clients.


@dataclass(frozen=True)
class Dealt:
    """Shares of a site's secrets, for each site that shall keep some. Only that one can read them."""

    sealed: dict[int, str]


@dataclass(frozen=True)
class Inbox:
    """What the others, and the site itself, have dealt to a site."""

    sealed: dict[int, str]


@dataclass(frozen=True)
class Masked:
    """A site's weights in whole numbers, masked."""

    numbers: Tensor  # int64


@dataclass(frozen=True)
class Group:
    """The sites whose masked weights have come."""

    clients: tuple[int, ...]


@dataclass(frozen=True)
class Signature:
    """A site's signature of a group."""

    text: str


@dataclass(frozen=True)
class Signatures:
    """The signatures of a group."""

    by: dict[int, str]


class Refused(FewLabelError):
    """An order that a site does not carry out. The server is told why."""
