"""Sums of which a server learns nothing but the sum (Bonawitz et al., CCS 2017, against a server that may lie).

Each site adds a mask to its numbers that it shares with each other site, and that cancels in the sum, and a mask of its
own. The secrets behind both are dealt to all sites in Shamir's shares. At the end, `threshold` sites open the own
masks of those that are in the sum, and the shared ones of those that dropped out: never both of one site, because they
first sign who is in the sum, and open only what enough of them have signed. Whoever has only one of the two masks of a
site sees uniform numbers.

The steps are: `advertise` (each site), `deal` (each), `mask` (each), `agree` (each), `opened` (each), `unmasked` (the
server). Members' keys sign what sites say to each other, because all of it passes through the server. Shamir's shares
are Flower's. Keys are agreed on by X25519, derived by HKDF-SHA256, shares travel by AES-GCM, and masks are AES-256-CTR.
"""

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fewlabel.core.errors import BadInput
from fewlabel.core.fixed import WHOLE
from fewlabel.data.settings import FEWEST

PURPOSE = b"fewlabel sum 1\n"  # so that nothing else that a member's key ever signs is taken for a part of this
NONCE = 12  # bytes
Verify = Callable[[int, bytes, str], None]  # client, what it signed, signature in hex; raises BadInput if it did not
Sign = Callable[[bytes], str]
Numbers = npt.NDArray[np.uint64]  # modulo 2^64


@dataclass(frozen=True)
class Advert:
    """The keys of a site for one sum, signed by the member's key."""

    client: int
    call: int  # how often it was asked in this round before
    mask_key: str  # public, for masks that are shared with another site
    share_key: str  # public, for what another site sends
    seed_hash: str  # of the seed of its own mask
    start: str = ""  # hash of what it trained from; see `masked_site.start_of`
    signature: str = ""


@dataclass(frozen=True)
class Roster:
    """Who takes part in a sum, and how much each counts. All sites must see the same one."""

    run: str
    round: int
    task: str
    adverts: tuple[Advert, ...]  # by client
    shares: dict[int, int]  # by client, in whole numbers; see core.fixed

    @property
    def clients(self) -> list[int]:
        return [advert.client for advert in self.adverts]

    @property
    def digest(self) -> bytes:
        """Identify this sum, with every key in it."""
        return hashlib.sha256(canonical(asdict(self))).digest()

    def of(self, client: int) -> Advert:
        return self.adverts[self.clients.index(client)]


@dataclass(frozen=True)
class Secrets:
    """What a site keeps to itself for one sum."""

    client: int
    advert: Advert
    mask_key: str  # private, in hex
    share_key: str  # private, in hex
    seed: str  # of its own mask, in hex


@dataclass(frozen=True)
class Shares:
    """One site's shares of another's two secrets, in hex."""

    mask_key: str
    seed: str


@dataclass(frozen=True)
class Opening:
    """What a site opens: by client, its share of the seed of who is in the sum, or of the key of who dropped out."""

    client: int
    seeds: dict[int, str] = field(default_factory=dict)
    mask_keys: dict[int, str] = field(default_factory=dict)


def threshold(clients: int) -> int:
    """Return how many sites must be left in the end, and can open masks together: more than two thirds.

    Two groups of so many have more than a third of all sites in common. So a server that shows different lists of
    survivors to different sites needs more than a third of them on its side.
    """
    return max(FEWEST, 2 * clients // 3 + 1)


# A site


def advertise(run: str, round: int, task: str, client: int, call: int, sign: Sign, start: str = "") -> Secrets:
    """Draw a site's secrets for one sum, and sign what the others need of them."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    mask, share, seed = X25519PrivateKey.generate(), X25519PrivateKey.generate(), secrets.token_bytes(32)
    mask_key, share_key = (key.public_key().public_bytes_raw().hex() for key in (mask, share))
    draft = Advert(client, call, mask_key, share_key, hashlib.sha256(seed).hexdigest(), start)
    advert = replace(draft, signature=sign(signed_part(run, round, task, draft)))
    return Secrets(client, advert, mask.private_bytes_raw().hex(), share.private_bytes_raw().hex(), seed.hex())


def signed_part(run: str, round: int, task: str, advert: Advert) -> bytes:
    """Return what a member's key signs of its round keys."""
    return PURPOSE + b"keys\n" + canonical([run, round, task, asdict(bare(advert))])


def check_roster(own: Secrets, roster: Roster, run: str, round: int, task: str, verify: Verify) -> None:
    """Refuse a sum that is not this one, is of too few sites, or of a site that no member's key has signed for."""
    clients = roster.clients
    if (roster.run, roster.round, roster.task) != (run, round, task):
        raise BadInput("the list of sites is for another sum")
    if clients != sorted(set(clients)) or own.client not in clients or roster.of(own.client) != own.advert:
        raise BadInput("the list of sites does not hold this site's own keys, or holds a site twice")
    if len(clients) < FEWEST:
        raise BadInput(f"a masked sum is of {FEWEST} sites or more, and this one of {len(clients)}")
    if sorted(roster.shares) != clients or min(roster.shares.values()) < 0:
        raise BadInput("the list of sites does not say how much each of them counts")
    if sum(roster.shares.values()) > WHOLE + len(clients):  # the largest numbers would leave the low bits to the others
        raise BadInput(f"all sites together count more than {WHOLE}, so the sum could show one site's numbers")
    for advert in roster.adverts:
        verify(advert.client, signed_part(run, round, task, advert), advert.signature)
    if {advert.start for advert in roster.adverts} != {own.advert.start}:
        raise BadInput("the sites of this sum trained from different models or settings, so the sum could show one")


def bare(advert: Advert) -> Advert:
    return replace(advert, signature="")


def deal(own: Secrets, roster: Roster) -> dict[int, str]:
    """Return for each site, this one too, its shares of this site's two secrets, which only that site can read."""
    from flwr.common.secure_aggregation.crypto.shamir import create_shares

    number, needed = len(roster.adverts), threshold(len(roster.adverts))
    keys, seeds = (create_shares(bytes.fromhex(one), needed, number) for one in (own.mask_key, own.seed))
    return {
        advert.client: seal(own, roster, advert, canonical(asdict(Shares(key.hex(), seed.hex()))))
        for advert, key, seed in zip(roster.adverts, keys, seeds, strict=True)
    }


def mask(own: Secrets, roster: Roster, dealers: Sequence[int], numbers: Tensor) -> Tensor:
    """Return a site's numbers behind its own mask and those that it shares with all `dealers`.

    `dealers` are the sites that have dealt shares of their secrets, this one among them.
    """
    check_group(own, roster, dealers, roster.clients, "have dealt shares")
    hidden = unsigned(numbers) + stream(bytes.fromhex(own.seed), len(numbers))
    for client in dealers:
        if client != own.client:
            key = pair_key(own.mask_key, roster.of(client).mask_key, roster, own.client, client)
            shared = stream(key, len(numbers))
            hidden = hidden + shared if own.client < client else hidden - shared
    return signed(hidden)


def survivors_part(roster: Roster, survivors: Sequence[int]) -> bytes:
    """Return what a member's key signs of who is in the sum."""
    return PURPOSE + b"survivors\n" + roster.digest + canonical(list(survivors))


def agree(own: Secrets, roster: Roster, dealers: Sequence[int], survivors: Sequence[int], sign: Sign) -> str:
    """Sign who is in the sum. A site does this once for a sum."""
    check_group(own, roster, survivors, dealers, "are in the sum")
    return sign(survivors_part(roster, survivors))


def opened(
    own: Secrets,
    roster: Roster,
    sealed: Mapping[int, str],
    survivors: Sequence[int],
    signatures: Mapping[int, str],
    verify: Verify,
) -> Opening:
    """Open this site's shares: of the seeds of survivors, and of the keys of those that dropped out after dealing.

    `sealed` is what all dealt to this site. Enough sites must have signed the same survivors.
    """
    if strangers := sorted(set(signatures) - set(survivors)):
        raise BadInput(f"client {strangers[0]} has signed who is in the sum, and is not in it")
    for client, signature in signatures.items():
        verify(client, survivors_part(roster, survivors), signature)
    if len(signatures) < (needed := threshold(len(roster.adverts))):
        raise BadInput(f"{len(signatures)} sites have signed who is in the sum, and it takes {needed}")
    found = {client: unseal(own, roster, roster.of(client), text) for client, text in sealed.items()}
    return Opening(
        own.client,
        {client: shares.seed for client, shares in found.items() if client in survivors},
        {client: shares.mask_key for client, shares in found.items() if client not in survivors},
    )


def check_group(own: Secrets, roster: Roster, group: Sequence[int], within: Sequence[int], what: str) -> None:
    """Refuse a list of sites that is not of this sum, lacks this site, or has too few sites."""
    needed = threshold(len(roster.adverts))
    if list(group) != sorted(set(group)) or not set(group) <= set(within) or own.client not in group:
        raise BadInput(f"the list of sites that {what} is not of this sum, or lacks this site")
    if len(group) < needed:
        raise BadInput(f"{len(group)} sites {what}, and of {len(roster.adverts)} it takes {needed}")


# The server


def unmasked(
    roster: Roster, dealers: Sequence[int], masked: Mapping[int, Tensor], openings: Sequence[Opening]
) -> Tensor:
    """Return the sum of the numbers of all sites in `masked`."""
    needed = threshold(len(roster.adverts))
    if len(openings) < needed:
        raise BadInput(f"{len(openings)} sites have opened masks, and it takes {needed}")
    lengths = {len(one) for one in masked.values()}
    if len(lengths) != 1:
        raise BadInput("sites have sent different amounts of masked numbers")
    length = lengths.pop()
    total: Numbers = np.zeros(length, np.uint64)
    for hidden in masked.values():
        total = total + unsigned(hidden)
    for client in dealers:
        parts = [opening.seeds if client in masked else opening.mask_keys for opening in openings]
        secret = combined([part[client] for part in parts if client in part], needed, client)
        if client in masked:
            if hashlib.sha256(secret).hexdigest() != roster.of(client).seed_hash:
                raise BadInput(f"the shares of client {client}'s mask do not fit together")
            total = total - stream(secret, length)
            continue
        check_mask_key(secret, roster.of(client))
        for other in masked:  # what they share with a site that dropped out has nothing to cancel it
            key = pair_key(secret.hex(), roster.of(other).mask_key, roster, client, other)
            shared = stream(key, length)
            total = total - shared if other < client else total + shared
    return signed(total)


def combined(shares: Sequence[str], needed: int, client: int) -> bytes:
    from flwr.common.secure_aggregation.crypto.shamir import combine_shares

    if len(shares) < needed:
        raise BadInput(f"{len(shares)} sites have opened their shares of client {client}'s mask, and it takes {needed}")
    try:
        return combine_shares([bytes.fromhex(share) for share in shares])
    except ValueError:
        raise BadInput(f"the shares of client {client}'s mask do not fit together") from None


def check_mask_key(secret: bytes, advert: Advert) -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    try:
        public = X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw().hex()
    except ValueError:
        public = ""
    if public != advert.mask_key:
        raise BadInput(f"the shares of client {advert.client}'s mask do not fit together")


# Keys and streams


def pair_key(private: str, public: str, roster: Roster, one: int, other: int, purpose: str = "mask") -> bytes:
    """Agree on a key with another site, for one purpose in one sum."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    pair = sorted((one, other)) if purpose == "mask" else [one, other]
    info = PURPOSE + canonical([purpose, *pair])
    try:
        secret = X25519PrivateKey.from_private_bytes(bytes.fromhex(private))
        shared = secret.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(public)))
    except ValueError:
        raise BadInput("a key of a masked sum is none") from None
    return HKDF(hashes.SHA256(), 32, salt=roster.digest, info=info).derive(shared)


def stream(key: bytes, length: int) -> Numbers:
    """Return so many 64-bit numbers that nobody can tell from uniform ones without the key. A key is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    made = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * length))
    return np.frombuffer(made, dtype="<u8").astype(np.uint64)


def seal(own: Secrets, roster: Roster, to: Advert, text: bytes) -> str:
    """Encrypt a text for one site."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    key = pair_key(own.share_key, to.share_key, roster, own.client, to.client, "shares")
    nonce = secrets.token_bytes(NONCE)
    return (nonce + AESGCM(key).encrypt(nonce, text, roster.digest)).hex()


def unseal(own: Secrets, roster: Roster, sender: Advert, sealed: str) -> Shares:
    """Decrypt what a site dealt to this one."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    key = pair_key(own.share_key, sender.share_key, roster, sender.client, own.client, "shares")
    try:
        nonce, text = bytes.fromhex(sealed)[:NONCE], bytes.fromhex(sealed)[NONCE:]
        found = json.loads(AESGCM(key).decrypt(nonce, text, roster.digest))
        return Shares(str(found["mask_key"]), str(found["seed"]))
    except (InvalidTag, ValueError, KeyError, TypeError):
        raise BadInput(f"what client {sender.client} dealt to this site was changed on its way") from None


def canonical(value: object) -> bytes:
    """Return one spelling of a value, to sign it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def unsigned(numbers: Tensor) -> Numbers:
    """Return numbers modulo 2^64."""
    return numbers.numpy().view(np.uint64)


def signed(numbers: Numbers) -> Tensor:
    return torch.from_numpy(numbers.view(np.int64).copy())
