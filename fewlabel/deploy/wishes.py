"""What a coordinator knows and asks about labels: how many each site reported, and how many more it is asked for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from fewlabel.core import storage
from fewlabel.core.schema import Natural
from fewlabel.deploy import members

FILE = "labels.json"


@dataclass(frozen=True)
class Labels:
    """The file `labels.json`, by the number of a client."""

    reported: dict[str, Natural] = field(default_factory=dict)  # labeled images, in its last run
    wanted: dict[str, Natural] = field(default_factory=dict)  # labels that it is asked for


def read(folder: Path) -> Labels:
    path = folder / FILE
    return members.read(Labels, path) if path.exists() else Labels()


def first_labels(folder: Path, reported: Mapping[int, int]) -> list[str]:
    """Say which members report labels that had none in an earlier run. From then on they count as sites with labels."""
    before, names = read(folder).reported, members.names(folder)
    return [
        f"{members.called(names, client)} reports {number:,} labels, and had none in an earlier run"
        for client, number in reported.items()
        if number and before.get(str(client)) == 0
    ]


def change(folder: Path, reported: Mapping[int, int] | None = None, wanted: Mapping[int, int] | None = None) -> None:
    """Remember what sites reported, or what they are asked for."""
    with storage.locked(folder / members.LOCK):
        before = read(folder)
        now = before.reported | {str(client): number for client, number in (reported or {}).items()}
        asked = before.wanted | {str(client): number for client, number in (wanted or {}).items()}
        asked = {client: number for client, number in asked.items() if number}
        storage.write(folder / FILE, members.as_json({"reported": now, "wanted": asked}))
