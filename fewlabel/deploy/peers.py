"""The other members as a site knows them: their keys, which a person at the site has compared, sign masked sums.

The coordinator hands the list over, and everything that sites say to each other passes through its server. So a site
believes a list only once a person has compared the fingerprints with the other sites, by another way.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from fewlabel.core import storage
from fewlabel.core.errors import BadInput
from fewlabel.core.schema import Natural
from fewlabel.deploy import keys, log_signature, members

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

FILE = "peers.json"
Verify = Callable[[int, bytes, str], None]  # client, what it signed, signature; raises BadInput if it did not


@dataclass(frozen=True)
class Peer:
    """A member, as the others need to know it."""

    client: Natural
    name: str
    key: str  # public, as OpenSSH writes it


@dataclass(frozen=True)
class Peers:
    """The file peers.json."""

    federation: str
    authority: str  # fingerprint of the federation's certificate
    members: tuple[Peer, ...]


def of(folder: Path) -> Peers:
    """Return the members of a federation, from the coordinator's folder."""
    trust = folder / members.TRUST
    there = tuple(Peer(member.client, member.name, member.key) for member in members.members(folder))
    return Peers(members.read_trust(trust).name, members.authority(trust), there)


def write(peers: Peers, path: Path) -> None:
    storage.write(path, members.as_json(asdict(peers)))


def read(path: Path) -> Peers:
    """Read a list of members that somebody else may have written."""
    found = members.read(Peers, path)
    for peer in found.members:
        members.check_name(peer.name)
        try:
            keys.load_public(peer.key)
        except ValueError:
            raise BadInput(f"{path}: the key of '{peer.name}' is no public key on P-384") from None
    clients = [peer.client for peer in found.members]
    if len(set(clients)) < len(clients) or len({peer.key.split()[1] for peer in found.members}) < len(clients):
        raise BadInput(f"{path} has two members with one number, or with one key")
    return found


def check(peers: Peers, trust: Path, client: int, key: Path) -> None:
    """Refuse a list that is of another federation, or in which this site has another key."""
    if (peers.federation, peers.authority) != (members.read_trust(trust).name, members.authority(trust)):
        raise BadInput(f"the list is of '{peers.federation}', which is not this site's federation")
    own = next((peer for peer in peers.members if peer.client == client), None)
    if own is None or not keys.same_key(own.key, keys.public_half(keys.load_key(key))):
        raise BadInput(f"the list does not have this site's key for client {client}; have it enrolled first")


def signer(key: str) -> Callable[[bytes], str]:
    """Return what signs by a site's own key."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    if not key:
        raise BadInput("masked sums need a key, and this site takes part without one")
    private = log_signature.private(Path(key), Path(key).stat().st_mtime_ns)
    return lambda text: private.sign(text, ec.ECDSA(hashes.SHA384())).hex()


def verifier(path: Path) -> Verify:
    """Return what checks signatures by the keys in a site's list of members."""
    if not path.is_file():
        raise BadInput("this site has no list of the other members' keys; `fewlabel site peers` reads one")
    known = public_keys(path, path.stat().st_mtime_ns)
    return partial(verify, known, "; `fewlabel site peers` reads a new list")


def verifier_of(folder: Path) -> Verify:
    """Return what checks signatures by the keys of a federation's members, at the coordinator."""
    return partial(verify, {peer.client: keys.load_public(peer.key) for peer in of(folder).members}, "")


def verify(known: "Mapping[int, EllipticCurvePublicKey]", mend: str, client: int, text: bytes, signature: str) -> None:
    """Refuse a text that a client's key has not signed."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    if client not in known:
        raise BadInput(f"client {client} is not in the list of members{mend}")
    try:
        known[client].verify(bytes.fromhex(signature), text, ec.ECDSA(hashes.SHA384()))
    except (ValueError, InvalidSignature):
        raise BadInput(f"client {client}'s part is not signed by the key that it is known by") from None


@lru_cache(4)
def public_keys(path: Path, changed: int) -> "dict[int, EllipticCurvePublicKey]":
    """Load the keys of a list once, and again if its file has changed."""
    return {peer.client: keys.load_public(peer.key) for peer in read(path).members}
