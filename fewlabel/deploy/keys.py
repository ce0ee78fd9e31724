"""Keys and certificates: the server's certificate, by which sites know it, and a site's key, by which it is known.

`cryptography` loads late, because the command's help must be there at once.
"""

import base64
import datetime
import hashlib
import ipaddress
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.core import storage
from fewlabel.core.errors import BadInput

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey

CA, SERVER = "ca", "server"  # names of files, which end with .pem and .key
YEARS_CA, DAYS_SERVER, DAYS_LEFT = 10, 397, 30


# Certificates


def create_authority(folder: Path, name: str) -> None:
    """Create the key and the certificate of a federation's own authority."""
    storage.write(folder / f"{CA}.pem", certificate(f"{name} CA", new_key(folder / f"{CA}.key")))


def create_server_certificate(folder: Path, address: str) -> None:
    """Create a key and a certificate for the server at an address, which also hold on the server's own machine."""
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    ca = load_pem_private_key((folder / f"{CA}.key").read_bytes(), None)
    (folder / f"{SERVER}.key").unlink(missing_ok=True)
    key = new_key(folder / f"{SERVER}.key")
    hosts = dict.fromkeys([host_and_port(address)[0], "localhost", "127.0.0.1"])
    made = certificate("FewLabel server", key, list(hosts), (ca, load_certificate(folder / f"{CA}.pem")))
    storage.write(folder / f"{SERVER}.pem", made)


def renew_if_due(folder: Path, address: str) -> bool:
    """Make the server's certificate anew if it ends soon. Return True if that was so."""
    ends = load_certificate(folder / f"{SERVER}.pem").not_valid_after_utc
    if ends > now() + datetime.timedelta(days=DAYS_LEFT):
        return False
    create_server_certificate(folder, address)
    return True


def certificate(
    name: str, key: "EllipticCurvePrivateKey", hosts: list[str] | None = None, issuer: tuple[Any, Any] | None = None
) -> bytes:
    """Return a server's certificate for `hosts`, signed by the issuer (key, certificate).

    Without an issuer, return the certificate of an authority, signed by itself.
    """
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


def certificate_fingerprint(path: Path) -> str:
    from cryptography.hazmat.primitives import hashes

    return load_certificate(path).fingerprint(hashes.SHA256()).hex()


# Keys


def new_key(path: Path, ssh: bool = False) -> "EllipticCurvePrivateKey":
    """Create a key on P-384 in a file that nobody else may read. Flower wants keys of nodes as OpenSSH writes them."""
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
    """Load a site's key. Refuse it if others can read it."""
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
    return public_text(key.public_key())


def public_text(key: "EllipticCurvePublicKey") -> str:
    """Write a public key in the one spelling that counts."""
    from cryptography.hazmat.primitives import serialization

    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def load_public(text: str) -> "EllipticCurvePublicKey":
    """Read a public key, or raise ValueError."""
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


def same_key(one: str, other: str) -> bool:
    """Compare two public keys without the comments that may follow them."""
    return one.split()[:2] == other.split()[:2]


def fingerprint(public: str) -> str:
    """Return what `ssh-keygen -l` shows: it is short enough to compare on the telephone."""
    digest = hashlib.sha256(base64.b64decode(public.split()[1])).digest()
    return f"SHA256:{base64.b64encode(digest).decode().rstrip('=')}"


# Addresses and time


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[0-9A-Za-z.:-]+", host) or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"an address is HOST:PORT, such as learn.example.org:9443, found '{address:.80}'")
    return host, int(port)


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
