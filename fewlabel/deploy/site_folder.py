"""A site's folder: its settings, its key, what the coordinator gave it, and the enrolment that it sends back."""

import shutil
import tomllib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fewlabel.core import schema, storage
from fewlabel.core.errors import BadInput
from fewlabel.core.schema import Natural
from fewlabel.deploy import keys, members

FILE, KEY, ENROLMENT, SOCKET, STATE = "site.toml", "key", "enrolment.json", "socket", "state"
UNREADABLE = "unreadable"
LONGEST = 100  # bytes of a socket's path


@dataclass(frozen=True)
class SiteConfig:
    """What a site says about its data and about what it lets run."""

    client: Natural  # its number in the federation
    data: str  # path
    state: str  # directory for the log, and for what methods keep between rounds
    kind: str = ""  # folder, csv, npz or dicom; by default what the path looks like
    modules: str = ""  # with your own methods or networks that this site trusts, separated by commas
    methods: str = ""  # that it has consented to, separated by commas; by default all that it knows
    terms: str = ""  # directory with the terms that it was given; by default those of its first order
    unreadable: Literal["fatal", "skip"] = "fatal"  # what to do about images that cannot be read
    policy: str = ""  # file; by default policy.toml beside site.toml
    key: str = ""  # file of the key that signs the log; by default the site's own
    peers: str = ""  # file with the other members' keys, for masked sums; by default peers.json beside site.toml
    labels: str = ""  # table of labels that people added here; by default labels.csv beside site.toml, if it is there


@dataclass(frozen=True)
class SiteFile:
    """The file site.toml."""

    name: str
    trust: str  # folder, as the coordinator gave it
    key: str  # file
    place: SiteConfig


def create(folder: Path, name: str, given: Path, config: SiteConfig) -> members.Enrolment:
    """Set up a site in a new folder: its settings, its key, a copy of the coordinator's folder, and its enrolment."""
    trust, state = folder / members.TRUST, Path(config.state)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    trust.mkdir()
    for part in (f"{keys.CA}.pem", members.ABOUT, members.TERMS):  # and nothing else that may lie or be linked there
        shutil.copyfile(given / part, trust / part)
    keys.new_key(folder / KEY, ssh=True)
    write(folder, SiteFile(name, str(trust), str(folder / KEY), config))
    request = members.enrol(trust, folder / KEY, config.client, name)
    storage.write(folder / ENROLMENT, members.as_json(asdict(request)))
    return request


def refuse_used(folder: Path) -> None:
    """Refuse a folder that has something in it, or whose path is too long for a socket."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is there already and not empty; choose another directory")
    whole = folder.resolve()
    if len(str(whole / SOCKET).encode()) > LONGEST:
        most = LONGEST - len(SOCKET) - 1
        raise BadInput(f"{whole} is too long a path for a socket; choose one of at most {most} bytes")


def write(folder: Path, site: SiteFile) -> None:
    import tomli_w

    table = schema.plain(site)
    place = {name: value for name, value in table.pop("place").items() if value != ""}
    if (unreadable := place.pop(UNREADABLE)) != SiteConfig.unreadable:
        table["data"] = {UNREADABLE: unreadable}
    table["place"] = place
    storage.write(folder / FILE, tomli_w.dumps(table).encode())


def read(folder: Path) -> SiteFile:
    """Read a site's settings."""
    try:
        table = tomllib.loads((folder / FILE).read_text())
    except FileNotFoundError:
        raise BadInput(f"{folder} holds no site; `fewlabel site init` sets one up") from None
    except ValueError as error:
        raise BadInput(f"{folder / FILE} is not TOML: {error}") from None
    try:
        return schema.read(SiteFile, with_data(table))
    except BadInput as error:
        raise BadInput(f"{folder / FILE}: {error}") from None


def completed(folder: Path, site: SiteFile) -> SiteConfig:
    """Return a site's settings, with the usual places of those files that they do not name."""
    place = site.place
    if place.policy and not Path(place.policy).is_file():  # or nothing would be limited
        raise BadInput(f"{folder / FILE}: place.policy is {place.policy}, and there is no such file")
    return replace(
        place,
        policy=place.policy or str(folder / "policy.toml"),
        key=place.key or site.key,
        peers=place.peers or str(folder / "peers.json"),
        labels=place.labels or str(folder / "labels.csv"),
    )


def with_data(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of site.toml with `data.unreadable`, its name in every other file, among those of its place."""
    given, place = table.pop("data", {}), table.get("place")
    if not isinstance(given, dict) or set(given) - {UNREADABLE}:
        raise BadInput(f"[data] has one setting, {UNREADABLE}; where the images are is place.data")
    return table if not isinstance(place, dict) or not given else {**table, "place": {**place, **given}}
