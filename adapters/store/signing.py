"""Signatures of stored and pushed adapters: Ed25519 over an envelope, which binds a revision id to bytes.

A revision id is a digest of the adapter in full precision. A worker has only the packed form, which cannot prove its
revision. So the importer signs, with a key that workers do not have.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from adapters.store.envelope import Envelope
from adapters.store.errors import AdapterNotTrusted

_CONTEXT = b"prelude adapter signature 1\0"  # separates domains: the key may sign other things


class Signer:
    """Signs envelopes."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def from_pem(cls, pem: bytes) -> Self:
        """Raises ValueError."""
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except TypeError as error:
            raise ValueError("the key is encrypted; give it without a password") from error
        except ValueError as error:
            raise ValueError("not a private key in PEM") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise ValueError("not an Ed25519 key; make one with `openssl genpkey -algorithm ed25519`")
        return cls(key)

    @classmethod
    def generate(cls) -> Self:
        return cls(Ed25519PrivateKey.generate())

    def signed(self, envelope: Envelope) -> Envelope:
        """The envelope with its signature, which is deterministic."""
        return replace(envelope, signature=self._key.sign(_CONTEXT + envelope.statement))

    @property
    def private_pem(self) -> bytes:
        none = serialization.NoEncryption()
        return self._key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, none)

    @property
    def public_pem(self) -> bytes:
        kind = serialization.PublicFormat.SubjectPublicKeyInfo
        return self._key.public_key().public_bytes(serialization.Encoding.PEM, kind)


def public_key_from_pem(pem: bytes) -> Ed25519PublicKey:
    """Raises ValueError."""
    try:
        key = serialization.load_pem_public_key(pem)
    except ValueError as error:
        raise ValueError("not a public key in PEM") from error
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError("not an Ed25519 key")
    return key


@dataclass(frozen=True, slots=True)
class Trust:
    """Which adapters a worker accepts. Each check calls `keys`: a cluster's first key may be made later."""

    keys: Callable[[], Sequence[Ed25519PublicKey]]
    accepts_unverified_objects: bool  # of the store and of the disk cache
    accepts_unverified_pushes: bool

    def check_object(self, envelope: Envelope) -> None:
        """Raise AdapterNotTrusted if a trusted signature is required and the store's object has none."""
        if not self._is_verified(envelope) and not self.accepts_unverified_objects:
            raise AdapterNotTrusted(
                f"the store's object of {envelope.revision_id} {_what_is_wrong(envelope)}; import the adapter again, "
                "or if you trust what the store has: `prelude adapters sign`"
            )

    def check_push(self, envelope: Envelope) -> None:
        """Raise AdapterNotTrusted if a trusted signature is required and the push has none."""
        if not self._is_verified(envelope) and not self.accepts_unverified_pushes:
            raise AdapterNotTrusted(
                f"the push of {envelope.revision_id} {_what_is_wrong(envelope)}; give the router integrity.signing_key "
                "and this worker its public key in integrity.trusted_keys"
            )

    def _is_verified(self, envelope: Envelope) -> bool:
        statement = _CONTEXT + envelope.statement
        return bool(envelope.signature) and any(_has_signed(key, envelope.signature, statement) for key in self.keys())


def _has_signed(key: Ed25519PublicKey, signature: bytes, statement: bytes) -> bool:
    try:
        key.verify(signature, statement)
    except InvalidSignature:
        return False
    return True


def _what_is_wrong(envelope: Envelope) -> str:
    return "is signed by no key that this worker trusts" if envelope.signature else "has no signature"
