"""The keys that sign adapters: those of cluster.yaml, or a pair that a cluster on one machine makes for itself."""

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from adapters.files.durable import fsync, make_folder
from adapters.store.signing import Signer, Trust, public_key_from_pem
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError

KEY_VARIABLE = "PRELUDE_SIGNING_KEY"  # a private key in PEM, where integrity.signing_key is not given
_PRIVATE, _PUBLIC = "private.pem", "public.pem"
_Key = TypeVar("_Key")

log = logging.getLogger(__name__)


def signer_of(config: ClusterConfig) -> Signer | None:
    """The signer of imports; None if the cluster has no key. Generates the key pair of a cluster on one machine.

    Raises ConfigError.
    """
    integrity = config.integrity
    if integrity.signing_key is not None:
        return _read(integrity.signing_key, Signer.from_pem, "integrity.signing_key")
    if pem := os.environ.get(KEY_VARIABLE):
        try:
            return Signer.from_pem(pem.encode())
        except ValueError as error:
            raise ConfigError(f"{KEY_VARIABLE}: {error}") from error
    if integrity.key_directory is None:
        return None
    if not (integrity.key_directory / _PRIVATE).exists():
        _make_pair(integrity.key_directory)
    return _read(integrity.key_directory / _PRIVATE, Signer.from_pem, "integrity.key_directory")


def trust_of(config: ClusterConfig) -> Trust:
    """The keys that workers trust, and whether they accept unsigned adapters. Raises ConfigError."""
    integrity, folder = config.integrity, config.integrity.key_directory
    given = tuple(_read(path, public_key_from_pem, "integrity.trusted_keys") for path in integrity.trusted_keys)
    accepts = integrity.accept_unverified
    if given or folder is None:
        if not given and not accepts:
            log.warning("adapters are not verified: integrity.trusted_keys is not set; pushes are refused")
        accepts_objects = accepts if accepts is not None else not given
        return Trust(lambda: given, accepts_objects, bool(accepts))
    is_own_store = config.store.url == f"file://{folder.parent / 'store'}"  # into another one, others may import
    accepts_objects = accepts if accepts is not None else not is_own_store
    return Trust(_OwnKey(folder / _PUBLIC), accepts_objects, bool(accepts))


class _OwnKey:
    """The public key of a cluster on one machine. Until it has been generated, no signature is trusted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._keys: tuple[Ed25519PublicKey, ...] = ()

    def __call__(self) -> Sequence[Ed25519PublicKey]:
        # Loads ask in several threads at once: two that both read the file are better than one that finds no key.
        if not self._keys and self._path.exists():
            self._keys = (_read(self._path, public_key_from_pem, "integrity.key_directory"),)
        return self._keys


def _make_pair(folder: Path) -> None:
    """Create the folder with both keys atomically; another process may be first."""
    signer = Signer.generate()
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    try:
        make_folder(folder.parent)
        temporary.mkdir(mode=0o700)
        for name, pem in ((_PRIVATE, signer.private_pem), (_PUBLIC, signer.public_pem)):
            with open(os.open(temporary / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(pem)
            fsync(temporary / name)  # adapters that it has signed outlast a power cut, too
        fsync(temporary)
        temporary.rename(folder)
        fsync(folder.parent)
    except OSError as error:
        if not (folder / _PRIVATE).exists():
            raise ConfigError(
                f"integrity.key_directory: a key cannot be made in {folder} ({error.strerror}); name a folder that may "
                "be written, or a key in integrity.signing_key"
            ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _read(path: Path, parse: Callable[[bytes], _Key], field: str) -> _Key:
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{field}: {path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"{field}: {path}: {error}") from error
