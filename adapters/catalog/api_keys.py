"""API keys: `prelude_<id>_<secret>`. The id is public; the catalog has the digest of the whole key, never the key."""

import hashlib
import re
import secrets

PREFIX = "prelude_"
_ID_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"  # 32 of them, none that is mistaken for another
ID_LENGTH = 12
_SECRET_BYTES = 32  # random, so that one round of SHA-256 is as good as a slow hash
_KEY = re.compile(rf"{PREFIX}[a-z0-9]{{{ID_LENGTH}}}_[A-Za-z0-9_-]{{43}}")
_KEY_ID = slice(len(PREFIX), len(PREFIX) + ID_LENGTH)


def new_key() -> tuple[str, str]:
    """A new key's id, and the key."""
    key_id = "".join(secrets.choice(_ID_LETTERS) for _ in range(ID_LENGTH))
    return key_id, f"{PREFIX}{key_id}_{secrets.token_urlsafe(_SECRET_BYTES)}"


def key_id_of(key: str) -> str | None:
    """The id in a key; None if it does not have the form of one."""
    return key[_KEY_ID] if _KEY.fullmatch(key) else None


def digest_of(key: str) -> bytes:
    """What the catalog keeps of a key: 32 bytes."""
    return hashlib.sha256(key.encode()).digest()
