"""API keys: 256 random bits, of which only the SHA-256 is kept.

A key has as much entropy as its digest, so the digest needs neither salt nor a slow hash: nobody can try 2^256 keys.
"""

import hashlib
import re
import secrets

PREFIX = "sk-fair-"
"""So that a scanner finds a key that was committed by mistake."""

DIGEST_PREFIX = "sha256:"

DIGEST_PATTERN = f"^{DIGEST_PREFIX}[0-9a-f]{{64}}$"

_BYTES = 32


def new_key() -> str:
    return PREFIX + secrets.token_urlsafe(_BYTES)


def digest(key: str) -> bytes:
    """The SHA-256 of a key, as it came in a header."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def written(digest: bytes) -> str:
    return DIGEST_PREFIX + digest.hex()


def read(text: str) -> bytes:
    """The digest that `written` wrote. ValueError if `text` is none."""
    if not re.fullmatch(DIGEST_PATTERN.strip("^$"), text):
        raise ValueError(f"must be {DIGEST_PREFIX} and 64 hexadecimal digits")
    return bytes.fromhex(text.removeprefix(DIGEST_PREFIX))
