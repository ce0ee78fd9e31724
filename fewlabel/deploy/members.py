"""Who belongs to a federation: what its sites are given, how a site enrols, and which calls come from a member.

A site's key never leaves it. The site sends the public half in an enrolment that the key has signed, for one federation
and one client. The coordinator keeps the members in `members.json`. A signature shows who has the key, not who they
are, so both sides should also compare the key's fingerprint by another way.
"""

import base64
import datetime
import json
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fewlabel.core import schema, storage
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.schema import Natural
from fewlabel.deploy import keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

T = TypeVar("T")
MEMBERS, TRUST, ABOUT, TERMS = "members.json", "trust", "federation.json", "terms.json"
LOCK, REPORTED = ".members", "reported.json"
GROWN = 2  # a member is named if it reports so many times the images that it reported before
DAYS_OLD = 30  # an enrolment, at most
AHEAD, LATE = 5, 305  # seconds that the clock of a node's call may be ahead, or behind with its time under way
LARGEST = 1 << 16  # bytes of a file that somebody else wrote
PURPOSE = b"fewlabel enrolment 1\n"  # so that nothing else that the key ever signs is taken for one


# A federation


@dataclass(frozen=True)
class Federation:
    """What a site knows about a federation, beside its certificate and its terms."""

    name: str
    address: str  # host:port
    version: str  # of the coordinator's FewLabel
    methods: tuple[str, ...] = ()  # that it means to run; if none is named, any

    def __post_init__(self) -> None:
        check_name(self.name)
        keys.host_and_port(self.address)


def create(folder: Path, federation: Federation, terms: Mapping[str, Any]) -> Path:
    """Create a federation: its keys and certificates, and in the folder `trust` what its sites need."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is there already and not empty; choose another directory")
    trust = folder / TRUST
    try:
        trust.mkdir(parents=True)
        folder.chmod(0o700)
        keys.create_authority(folder, federation.name)
        keys.create_server_certificate(folder, federation.address)
        storage.write(folder / MEMBERS, b'{"members": []}\n')
        shutil.copyfile(folder / f"{keys.CA}.pem", trust / f"{keys.CA}.pem")
        storage.write(trust / TERMS, as_json(terms))
        storage.write(trust / ABOUT, as_json(asdict(federation)))
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from None
    return trust


def read_trust(trust: Path) -> Federation:
    """Read what the folder `trust` says about its federation."""
    return read(Federation, trust / ABOUT)


def authority(trust: Path) -> str:
    """Identify a federation by its authority's certificate, because two federations may have one name."""
    return keys.certificate_fingerprint(trust / f"{keys.CA}.pem")


# Enrolment


@dataclass(frozen=True)
class Enrolment:
    """A site's request to be a client of a federation."""

    federation: str
    authority: str
    client: Natural
    name: str
    key: str  # public, as OpenSSH writes it
    nonce: str
    time: str
    version: str
    signature: str = ""

    def signed_part(self) -> bytes:
        return PURPOSE + json.dumps(asdict(replace(self, signature="")), sort_keys=True).encode()


def enrol(trust: Path, key: Path, client: int, name: str) -> Enrolment:
    """Make a site's enrolment and sign it by its key."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    private = keys.load_key(key)
    request = Enrolment(
        read_trust(trust).name,
        authority(trust),
        client,
        check_name(name),
        keys.public_half(private),
        secrets.token_hex(16),
        keys.now().isoformat(timespec="seconds"),
        version("fewlabel"),
    )
    signature = private.sign(request.signed_part(), ec.ECDSA(hashes.SHA384()))
    return replace(request, signature=base64.b64encode(signature).decode())


def read_enrolment(path: Path) -> Enrolment:
    """Read an enrolment. Refuse it unless its own key has signed it."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    request = read(Enrolment, path)
    check_name(request.name)
    try:
        signature, key = base64.b64decode(request.signature, validate=True), keys.load_public(request.key)
        if keys.public_text(key) != request.key:
            raise ValueError("a second spelling would pass for a second key")
        key.verify(signature, request.signed_part(), ec.ECDSA(hashes.SHA384()))
    except (ValueError, InvalidSignature):
        raise BadInput(f"{path} is not what its key has signed; have the site send it again") from None
    return request


# Members


@dataclass(frozen=True)
class Member:
    """A site that was admitted."""

    client: Natural
    name: str
    key: str
    nonce: str
    time: str
    node: Natural | None = None  # Flower's number for its key, once it is registered


@dataclass(frozen=True)
class Members:
    """The file `members.json`."""

    members: tuple[Member, ...] = ()
    removed: tuple[Member, ...] = ()  # whose keys are never admitted again


@dataclass(frozen=True)
class Reported:
    """The file `reported.json`: how many images each client said it has, in the last run."""

    images: dict[str, Natural]


def members(folder: Path) -> tuple[Member, ...]:
    return read(Members, folder / MEMBERS).members


def removed(folder: Path) -> tuple[Member, ...]:
    return read(Members, folder / MEMBERS).removed


def write_members(folder: Path, whole: tuple[Member, ...], gone: tuple[Member, ...] | None = None) -> None:
    parts = {"members": sorted(whole, key=lambda m: m.client), "removed": removed(folder) if gone is None else gone}
    storage.write(folder / MEMBERS, as_json({name: [asdict(m) for m in part] for name, part in parts.items()}))


def admit(folder: Path, request: Enrolment) -> Member:
    """Make a site a member, unless `check_enrolment` refuses it."""
    with storage.locked(folder / LOCK):
        there = members(folder)
        check_enrolment(folder, request, there)
        member = Member(request.client, request.name, request.key, request.nonce, request.time)
        write_members(folder, (*there, member))
        return member


def remove(folder: Path, site: str) -> Member:
    """End a membership, by the site's name or number. Its key cannot be enrolled again."""
    with storage.locked(folder / LOCK):
        found = find(folder, site)
        rest = tuple(member for member in members(folder) if member != found)
        write_members(folder, rest, (*removed(folder), found))
        return found


def find(folder: Path, site: str) -> Member:
    """Return a member by the site's name or number."""
    there = members(folder)
    found = [one for one in there if site == str(one.client)] or [one for one in there if site == one.name]
    if len(found) != 1:
        known = ", ".join(f"{member.client} '{member.name}'" for member in found or there) or "no site"
        raise BadInput(f"'{site}' is {'more than one site' if found else 'no member'}: there is {known}")
    return found[0]


def check_enrolment(folder: Path, request: Enrolment, there: tuple[Member, ...]) -> None:
    """Refuse an enrolment that is for another federation, too old, or clashes with a member."""
    ours = read_trust(folder / TRUST).name
    if (request.federation, request.authority) != (ours, authority(folder / TRUST)):
        other = f"'{request.federation}'" if request.federation != ours else "another one of the same name"
        raise BadInput(f"the enrolment is for {other}, and this federation is '{ours}'")
    for member in removed(folder):
        if keys.same_key(member.key, request.key) or member.nonce == request.nonce:
            raise BadInput(f"'{member.name}' was removed with this key; a new `fewlabel site init` makes another one")
    for member in there:
        if keys.same_key(member.key, request.key) or member.nonce == request.nonce:
            raise BadInput(f"'{member.name}' is enrolled with this key already, as client {member.client}")
        if member.client == request.client:
            raise BadInput(f"client {member.client} is '{member.name}' already; the site needs another --client")
    try:
        age = keys.now() - datetime.datetime.fromisoformat(request.time)
    except (ValueError, TypeError):
        raise BadInput(f"the enrolment's time is no time: {request.time!r:.60}") from None
    if not datetime.timedelta(days=-1) < age < datetime.timedelta(days=DAYS_OLD):
        raise BadInput(
            f"the enrolment is of {request.time}, and must not be older than {DAYS_OLD} days; make a new one"
        )


def note_node(folder: Path, member: Member, node: int) -> None:
    """Write down which of Flower's nodes a member is."""
    with storage.locked(folder / LOCK):
        there = members(folder)
        write_members(folder, tuple(replace(one, node=node) if one.key == member.key else one for one in there))


def reported(folder: Path) -> dict[str, int]:
    """Return how many images each client said it has, by its number."""
    return read(Reported, folder / REPORTED).images if (folder / REPORTED).exists() else {}


def grown(folder: Path, sizes: Mapping[int, int]) -> list[str]:
    """Say which members report far more images than in an earlier run, and remember what all report now.

    Of a member that is odd, the earlier number is kept, so that it is named in the next run, too.
    """
    path, sentences = folder / REPORTED, list[str]()
    with storage.locked(folder / LOCK):
        before = reported(folder)
        names = {str(member.client): f" '{member.name}'" for member in members(folder)}
        now = {str(client): size for client, size in sizes.items()}
        for client, size in now.items():
            if size > GROWN * before.get(client, size):
                who = f"client {client}{names.get(client, '')}"
                sentences.append(f"{who} reports {size:,} images, and reported {before[client]:,} in an earlier run")
                now[client] = before[client]
        storage.write(path, as_json({"images": before | now}))
    return sentences


def clients_by_node(folder: Path) -> Mapping[int, int]:
    return {member.node: member.client for member in members(folder) if member.node is not None}


def names(folder: Path) -> dict[int, str]:
    """Return what people call each client, in quotes."""
    return {member.client: f"'{member.name}'" for member in members(folder)}


def called(names: Mapping[int, str], client: int) -> str:
    """Return what people call a client, or its number if it has no name."""
    return names.get(client, f"client {client}")


def check_client(folder: Path, node: int, claimed: int) -> None:
    """Refuse a node that claims to be another client than the one that its key was enrolled for."""
    client = clients_by_node(folder).get(node)
    if client is None:
        raise BadInput(f"it claims to be client {claimed}, and its key is not enrolled")
    if client != claimed:
        raise BadInput(f"it claims to be client {claimed}, and its key is that of {called(names(folder), client)}")


class Roll:
    """Knows which member makes a call, because every call of a node has a signed time. It follows `members.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._read = folder, (0, 0, 0)
        self._keys: dict[bytes, tuple[Member, EllipticCurvePublicKey]] = {}
        self._gone: frozenset[bytes] = frozenset()
        self.refresh()

    def refresh(self) -> None:
        """Read the members again if they have changed."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        try:
            there = (self.folder / MEMBERS).stat()
            changed = there.st_mtime_ns, there.st_ino, there.st_size  # two changes may fall into one tick of the clock
            if changed == self._read:
                return
            found = [(member, keys.load_public(member.key)) for member in members(self.folder)]
            gone = [keys.load_public(member.key) for member in removed(self.folder)]
        except (OSError, ValueError, BadInput) as error:
            raise StorageError(f"the members in {self.folder} cannot be read: {error}") from None

        def name(key: "EllipticCurvePublicKey") -> bytes:
            return base64.b64encode(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

        self._keys = {name(key): (member, key) for member, key in found}
        self._gone, self._read = frozenset(map(name, gone)), changed

    def signer(self, public: bytes, time: bytes, signature: bytes) -> Member:
        """Return the member whose key has signed a time of about now. Flower's nodes send all three with each call."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        self.refresh()
        if public in self._gone:
            raise BadInput("it was removed from the federation, and can only come back with a new key")
        if public not in self._keys:
            raise BadInput("its key is not enrolled; the coordinator enrols it: fewlabel federation enrol")
        member, key = self._keys[public]
        try:
            age = (keys.now() - datetime.datetime.fromisoformat(time.decode("ascii"))).total_seconds()
            key.verify(base64.b64decode(signature, validate=True), time, ec.ECDSA(hashes.SHA256()))
        except (ValueError, TypeError, InvalidSignature):
            raise BadInput("it is not signed by its key") from None
        if not -AHEAD < age < LATE:
            raise BadInput(f"it was signed {age:.0f} s ago by the clock here; set the clock at '{member.name}' right")
        return member


# Names and files


def now_text() -> str:
    return keys.now().isoformat(timespec="seconds")


def check_name(name: str) -> str:
    """Refuse a name that could mislead people when it is shown."""
    if not re.fullmatch(r"\w[\w .,()-]{0,62}", name):
        raise BadInput(f"a name has up to 63 letters, digits, spaces and . , ( ) - only, found {name[:80]!r}")
    return name


def read(cls: type[T], path: Path) -> T:
    """Read a small JSON file that somebody else may have written."""
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST if cls is not Members else -1)
        table = json.loads(data)
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except (ValueError, RecursionError):
        raise BadInput(f"{path} is not one of FewLabel's files: it is no JSON, or too long") from None
    try:
        return schema.read(cls, table)
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def as_json(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, indent=1).encode() + b"\n"
