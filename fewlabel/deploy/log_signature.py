"""Signatures of the lines of a site's log, by the key that the site is enrolled with."""

import base64
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fewlabel.deploy import keys

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

PURPOSE = "fewlabel log 1\n"  # so that nothing else that the key ever signs is taken for a line


def signed(key: Path, head: str) -> str:
    """Sign the hash of a line."""
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    made = private(key, key.stat().st_mtime_ns).sign((PURPOSE + head).encode(), ec.ECDSA(hashes.SHA384()))
    return base64.b64encode(made).decode()


@lru_cache(4)
def private(key: Path, changed: int) -> Any:
    """Load a key once, and again if its file has changed."""
    return keys.load_key(key)


def verified(key: "EllipticCurvePublicKey", head: str, signature: str) -> bool:
    """Return True if this key has signed the hash of a line."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    try:
        key.verify(base64.b64decode(signature, validate=True), (PURPOSE + head).encode(), ec.ECDSA(hashes.SHA384()))
    except (ValueError, InvalidSignature):
        return False
    return True
