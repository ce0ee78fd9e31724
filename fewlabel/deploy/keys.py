"""Who may speak to whom: a federation's certificates, a site's key, and the enrolment that binds a client to its key.

A site's key never leaves it. What does is its public half in an enrolment that the key has signed, for one federation
and one client; the coordinator keeps what it has admitted in `members.json`. Whoever hands over such a file should
tell the fingerprint by another way too: a signature shows who has the key, not who they are.
"""

import base64
import datetime
import fcntl
import hashlib
import ipaddress
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fewlabel.core import schema
from fewlabel.core.errors import BadInput, StorageError
from fewlabel.core.schema import Natural

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

    from fewlabel.deploy.site import Introduction

T = TypeVar("T")
CA, SERVER, MEMBERS, TRUST, ABOUT = "ca", "server", "members.json", "trust", "federation.json"
YEARS_CA, DAYS_SERVER, DAYS_LEFT = 10, 397, 30
DAYS_OLD = 30  # an enrolment, at most
AHEAD, LATE = 5, 305  # seconds that the clock of a node's call may be ahead, or behind with its time under way
LARGEST = 1 << 16  # bytes of a file that somebody else wrote
PURPOSE = b"fewlabel enrolment 1\n"  # so that nothing else that the key ever signs is taken for one


# A federation


@dataclass(frozen=True)
class Federation:
    """What a site knows of a federation, beside its certificate and its terms."""

    name: str
    address: str  # host:port
    version: str  # of the coordinator's FewLabel
    methods: tuple[str, ...] = ()  # that it means to run; none named: any

    def __post_init__(self) -> None:
        named(self.name)
        host_and_port(self.address)


def create(folder: Path, federation: Federation, terms: Mapping[str, Any]) -> Path:
    """Keys and certificates of a federation, and below `trust` what its sites need."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} is there already and not empty; choose another directory")
    trust = folder / TRUST
    try:
        trust.mkdir(parents=True)
        folder.chmod(0o700)
        key = new_key(folder / f"{CA}.key")
        put(folder / f"{CA}.pem", certificate(f"{federation.name} CA", key))
        certify(folder, federation.address)
        put(folder / MEMBERS, b'{"members": []}\n')
        shutil.copyfile(folder / f"{CA}.pem", trust / f"{CA}.pem")
        put(trust / "terms.json", document(terms))
        put(trust / ABOUT, document(asdict(federation)))
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from None
    return trust


def read_trust(trust: Path) -> Federation:
    """What `create` put below `trust`."""
    return read(Federation, trust / ABOUT)


def certify(folder: Path, address: str) -> None:
    """A key and a certificate for the server at an address, and for this machine from inside."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    ca = load_pem_private_key((folder / f"{CA}.key").read_bytes(), None)
    (folder / f"{SERVER}.key").unlink(missing_ok=True)
    key = new_key(folder / f"{SERVER}.key")
    hosts = dict.fromkeys([host_and_port(address)[0], "localhost", "127.0.0.1"])
    made = certificate("FewLabel server", key, list(hosts), (ca, load_certificate(folder / f"{CA}.pem")))
    put(folder / f"{SERVER}.pem", made)


def renewed(folder: Path, address: str) -> bool:
    """Whether the server's certificate had to be made anew, for it ends soon."""
    ends = load_certificate(folder / f"{SERVER}.pem").not_valid_after_utc
    if ends > now() + datetime.timedelta(days=DAYS_LEFT):
        return False
    certify(folder, address)
    return True


def certificate(
    name: str, key: "EllipticCurvePrivateKey", hosts: list[str] | None = None, issuer: tuple[Any, Any] | None = None
) -> bytes:
    """A server's certificate for `hosts`, signed by an issuer's key; or, without them, an authority's own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
    signer, above = (key, subject) if issuer is None else (issuer[0], issuer[1].subject)
    days = 365 * YEARS_CA if issuer is None else DAYS_SERVER
    usage = dict.fromkeys(
        ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only",
         "decipher_only"), False
    )  # fmt: skip
    ca = issuer is None
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(above)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now() - datetime.timedelta(minutes=5))
        .not_valid_after(now() + datetime.timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca, 0 if ca else None), critical=True)
        .add_extension(x509.KeyUsage(digital_signature=not ca, key_cert_sign=ca, crl_sign=ca, **usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if hosts:
        made = made.add_extension(x509.SubjectAlternativeName([general_name(host) for host in hosts]), critical=False)
        made = made.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def general_name(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def load_certificate(path: Path) -> "x509.Certificate":
    from cryptography import x509

    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise BadInput(f"there is no file {path}") from None
    except ValueError:
        raise BadInput(f"{path} is no certificate") from None


def authority(trust: Path) -> str:
    """A federation by its authority's certificate: two of one name are two."""
    from cryptography.hazmat.primitives import hashes

    return load_certificate(trust / f"{CA}.pem").fingerprint(hashes.SHA256()).hex()


# A site


@dataclass(frozen=True)
class Enrolment:
    """A site's wish to be a client of a federation."""

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
    """What a site asks for, signed by its key."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    private = load_key(key)
    wish = Enrolment(
        read_trust(trust).name,
        authority(trust),
        client,
        named(name),
        public_half(private),
        secrets.token_hex(16),
        now().isoformat(timespec="seconds"),
        version("fewlabel"),
    )
    signature = private.sign(wish.signed_part(), ec.ECDSA(hashes.SHA384()))
    return replace(wish, signature=base64.b64encode(signature).decode())


def read_enrolment(path: Path) -> Enrolment:
    """An enrolment whose signature its own key has made."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    wish = read(Enrolment, path)
    named(wish.name)
    try:
        signature, key = base64.b64decode(wish.signature, validate=True), load_public(wish.key)
        if written(key) != wish.key:
            raise ValueError("a second spelling would pass for a second key")
        key.verify(signature, wish.signed_part(), ec.ECDSA(hashes.SHA384()))
    except (ValueError, InvalidSignature):
        raise BadInput(f"{path} is not what its key has signed; have the site send it again") from None
    return wish


def new_key(path: Path, ssh: bool = False) -> "EllipticCurvePrivateKey":
    """A new key on P-384 in a file that nobody else may read; Flower wants nodes' keys as OpenSSH writes them."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP384R1())
    form = serialization.PrivateFormat.OpenSSH if ssh else serialization.PrivateFormat.PKCS8
    data = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
    except FileExistsError:
        raise BadInput(f"{path} is there already, and a key is never overwritten") from None
    return key


def load_key(path: Path) -> "EllipticCurvePrivateKey":
    """A site's key, if nobody else can read it."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        if path.stat().st_mode & 0o077:
            raise BadInput(f"others may read {path}; forbid it by: chmod 600 {path}")
        key = load_ssh_private_key(path.read_bytes(), None)
    except FileNotFoundError:
        raise BadInput(f"there is no key {path}; `fewlabel site init` makes one") from None
    except (ValueError, TypeError):
        raise BadInput(f"{path} is no private key as `fewlabel site init` makes it") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP384R1):
        raise BadInput(f"{path} is not a key on P-384")
    return key


def public_half(key: "EllipticCurvePrivateKey") -> str:
    return written(key.public_key())


def written(key: "EllipticCurvePublicKey") -> str:
    """A public key in the one spelling that counts."""
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def load_public(text: str) -> "EllipticCurvePublicKey":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    try:
        key = load_ssh_public_key(text.encode())
    except UnsupportedAlgorithm:
        raise ValueError("no public key") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP384R1):
        raise ValueError("not a public key on P-384")
    return key


def fingerprint(public: str) -> str:
    """As `ssh-keygen -l` shows it: short enough to compare by telephone."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


# The members


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
    members: tuple[Member, ...] = ()
    removed: tuple[Member, ...] = ()  # whose keys are good for nothing any more


def members(folder: Path) -> tuple[Member, ...]:
    return read(Members, folder / MEMBERS).members


def removed(folder: Path) -> tuple[Member, ...]:
    return read(Members, folder / MEMBERS).removed


def admit(folder: Path, wish: Enrolment) -> Member:
    """Makes a site a member, unless it is one, or another has its place, or it meant another federation."""
    with alone(folder):
        there = members(folder)
        check_wish(folder, wish, there)
        member = Member(wish.client, wish.name, wish.key, wish.nonce, wish.time)
        write_members(folder, (*there, member))
        return member


def remove(folder: Path, site: str) -> Member:
    """Ends a membership, by the site's name or number; its key cannot be enrolled again."""
    with alone(folder):
        there = members(folder)
        found = [one for one in there if site == str(one.client)] or [one for one in there if site == one.name]
        if len(found) != 1:
            known = ", ".join(f"{member.client} '{member.name}'" for member in found or there) or "no site"
            raise BadInput(f"'{site}' is {'more than one site' if found else 'no member'}: there is {known}")
        write_members(folder, tuple(member for member in there if member != found[0]), (*removed(folder), *found))
        return found[0]


def check_wish(folder: Path, wish: Enrolment, there: tuple[Member, ...]) -> None:
    ours = read_trust(folder / TRUST).name
    if (wish.federation, wish.authority) != (ours, authority(folder / TRUST)):
        other = f"'{wish.federation}'" if wish.federation != ours else "another one of the same name"
        raise BadInput(f"the enrolment is for {other}, and this federation is '{ours}'")
    for member in removed(folder):
        if same_key(member.key, wish.key) or member.nonce == wish.nonce:
            raise BadInput(f"'{member.name}' was removed with this key; a new `fewlabel site init` makes another one")
    for member in there:
        if same_key(member.key, wish.key) or member.nonce == wish.nonce:
            raise BadInput(f"'{member.name}' is enrolled with this key already, as client {member.client}")
        if member.client == wish.client:
            raise BadInput(f"client {member.client} is '{member.name}' already; the site needs another --client")
    try:
        age = now() - datetime.datetime.fromisoformat(wish.time)
    except (ValueError, TypeError):
        raise BadInput(f"the enrolment's time is no time: {wish.time!r:.60}") from None
    if not datetime.timedelta(days=-1) < age < datetime.timedelta(days=DAYS_OLD):
        raise BadInput(f"the enrolment is of {wish.time}, and must not be older than {DAYS_OLD} days; make a new one")


def place_at(folder: Path, member: Member, node: int) -> None:
    """Notes a member's node."""
    with alone(folder):
        there = members(folder)
        write_members(folder, tuple(replace(one, node=node) if one.key == member.key else one for one in there))


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Waits until nobody else changes the members."""
    with (folder / ".members").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def same_key(one: str, other: str) -> bool:
    """Whatever stands behind them as a comment."""
    return one.split()[:2] == other.split()[:2]


def write_members(folder: Path, whole: tuple[Member, ...], gone: tuple[Member, ...] | None = None) -> None:
    parts = {"members": sorted(whole, key=lambda m: m.client), "removed": removed(folder) if gone is None else gone}
    put(folder / MEMBERS, document({name: [asdict(m) for m in part] for name, part in parts.items()}))


def admitted(folder: Path) -> Mapping[int, int]:
    """Which client each node is."""
    return {member.node: member.client for member in members(folder) if member.node is not None}


class Roll:
    """Tells members by the calls of their nodes, each of which signs the time; who has been admitted since is known."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._read = folder, (0, 0, 0)
        self._keys: dict[bytes, tuple[Member, EllipticCurvePublicKey]] = {}
        self._gone: frozenset[bytes] = frozenset()
        self.refresh()

    def refresh(self) -> None:
        """Reads the members, if they have changed."""
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        try:
            there = (self.folder / MEMBERS).stat()
            changed = there.st_mtime_ns, there.st_ino, there.st_size  # two changes may be of one tick of the clock
            if changed == self._read:
                return
            found = [(member, load_public(member.key)) for member in members(self.folder)]
            gone = [load_public(member.key) for member in removed(self.folder)]
        except (OSError, ValueError, BadInput) as error:
            raise StorageError(f"the members in {self.folder} cannot be read: {error}") from None

        def name(key: "EllipticCurvePublicKey") -> bytes:
            return base64.b64encode(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))

        self._keys = {name(key): (member, key) for member, key in found}
        self._gone, self._read = frozenset(map(name, gone)), changed

    def signer(self, public: bytes, time: bytes, signature: bytes) -> Member:
        """Whose key it is that has signed a time of about now: a key and a signature as Flower's nodes write them."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec

        self.refresh()
        if public in self._gone:
            raise BadInput("it was removed from the federation, and can come back with a new key alone")
        if public not in self._keys:
            raise BadInput("its key is not enrolled; the coordinator enrols it: fewlabel federation enrol")
        member, key = self._keys[public]
        try:
            age = (now() - datetime.datetime.fromisoformat(time.decode("ascii"))).total_seconds()
            key.verify(base64.b64decode(signature, validate=True), time, ec.ECDSA(hashes.SHA256()))
        except (ValueError, TypeError, InvalidSignature):
            raise BadInput("it is not signed by its key") from None
        if not -AHEAD < age < LATE:
            raise BadInput(f"it was signed {age:.0f} s ago by the clock here; set the clock at '{member.name}' right")
        return member


def gate(folder: Path) -> "Callable[[int, Introduction], None]":
    """Refuses a node whose key is not that of the client which it claims to be."""

    def admit(node: int, introduction: "Introduction") -> None:
        claimed, client = introduction.info.id, admitted(folder).get(node)
        if client is None:
            raise BadInput(f"it claims to be client {claimed}, and its key is not enrolled")
        if client != claimed:
            raise BadInput(f"it claims to be client {claimed}, and its key is that of client {client}")

    return admit


# Files and words


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[0-9A-Za-z.:-]+", host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"an address is HOST:PORT, such as learn.example.org:9443, found '{address:.80}'")
    return host, int(port)


def named(name: str) -> str:
    """A name that can be shown to people and does not mislead them."""
    if not re.fullmatch(r"\w[\w .,()-]{0,62}", name):
        raise BadInput(f"a name has up to 63 letters, digits, spaces and . , ( ) - only, found {name[:80]!r}")
    return name


def read(cls: type[T], path: Path) -> T:
    """A small JSON file that somebody else may have written."""
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


def document(table: Mapping[str, Any]) -> bytes:
    return json.dumps(table, indent=1).encode() + b"\n"


def put(path: Path, data: bytes) -> None:
    """Puts a file in place as a whole or not at all."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(data)
    aside.replace(path)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
