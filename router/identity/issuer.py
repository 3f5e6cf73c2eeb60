"""The public keys of one OIDC issuer, read in a thread and kept while the issuer is unreachable."""

import asyncio
import logging
import time
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from cluster.config.fields import is_loopback
from cluster.config.router import OidcConfig

# None that shares a secret: whoever knows a public key could sign with it.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
_MIN_RSA_BITS = 2048
_MAX_BYTES = 1024**2  # of a document
_READ_TIMEOUT_S = 5.0
_RETRY_S = 5.0  # after a failure
_MIN_GAP_S = 5.0  # between two reads because of unknown key ids, which clients can make up

log = logging.getLogger(__name__)

PublicKeys = Mapping[str | None, jwt.PyJWK]  # by key id


class IssuerError(Exception):
    """The issuer's keys cannot be read. The message says why."""


class _Metadata(msgspec.Struct):
    issuer: str
    jwks_uri: str


class _KeySet(msgspec.Struct):
    keys: list[dict[str, Any]]


class _SameScheme(urllib.request.HTTPRedirectHandler):
    """Follows redirects, except from https to http."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.type != newurl.partition(":")[0]:
            raise IssuerError(f"{req.full_url} redirects to {newurl}, which is another scheme")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def read_keys(config: OidcConfig) -> PublicKeys:
    """Read the issuer's public keys that sign tokens and are strong enough. Blocking. Raises IssuerError."""
    url = config.jwks_url
    if url is None:
        place = f"{config.issuer.rstrip('/')}/.well-known/openid-configuration"
        metadata = _read(place, _Metadata)
        if metadata.issuer != config.issuer:
            raise IssuerError(f"{place} is of the issuer {metadata.issuer!r}; write exactly that")
        url = metadata.jwks_uri
        parts = urlsplit(url)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise IssuerError(f"{place} names the keys' URL {url}, which is not https")
    keys: dict[str | None, jwt.PyJWK] = {}
    refused = ["there is none"]
    for each in _read(url, _KeySet).keys:
        if each.get("use", "sig") != "sig" or each.get("kty") == "oct":
            continue
        try:
            key = jwt.PyJWK(each)
        except (jwt.PyJWTError, ValueError, TypeError, KeyError) as error:
            refused.append(str(error))
            continue
        if isinstance(key.key, RSAPublicKey) and key.key.key_size < _MIN_RSA_BITS:
            refused.append(f"{key.key_id!r} is an RSA key of {key.key.key_size} bits; {_MIN_RSA_BITS} are needed")
        else:
            keys[key.key_id] = key
    if not keys:
        raise IssuerError(f"{url} has no key that can be used: {refused[-1]}")
    return keys


class Issuer:
    """An issuer's keys as last read. Used from the event loop."""

    def __init__(self, config: OidcConfig, on_change: Callable[[], None]) -> None:
        """`on_change` is called when the keys have changed: tokens verified by the old ones must be verified again."""
        self.config = config
        self._on_change = on_change
        self._keys: PublicKeys = {}
        self._error: IssuerError | None = None  # of the last read
        self._read_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None
        self._threads = ThreadPoolExecutor(1, "issuer")

    async def run(self) -> None:
        """Read the keys periodically, until cancelled."""
        try:
            while True:
                await self._read_once()
                wait_s = self.config.refresh_s if self._error is None else min(_RETRY_S, self.config.refresh_s)
                await asyncio.sleep(wait_s)
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def key(self, key_id: str | None) -> jwt.PyJWK | None:
        """The key with this id; None if the issuer has no such key. Raises IssuerError if that is unknown now."""
        found = self._keys.get(key_id)
        if found is None and time.monotonic() - self._read_at > _MIN_GAP_S:
            await self._read_once()
            found = self._keys.get(key_id)
        if found is None and self._error is not None:
            raise self._error
        return found

    async def _read_once(self) -> None:
        """Read the keys, once for all concurrent callers."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="read issuer's keys")
            self._reading.add_done_callback(self._forget_reading)
        await asyncio.shield(self._reading)

    def _forget_reading(self, _: asyncio.Task[None]) -> None:
        self._reading = None

    async def _read(self) -> None:
        fields = {"issuer": self.config.issuer}
        had_failed = self._error is not None
        try:
            async with asyncio.timeout(2 * _READ_TIMEOUT_S):
                keys = await asyncio.get_running_loop().run_in_executor(self._threads, read_keys, self.config)
        except Exception as error:  # noqa: BLE001  # whatever it sends, known keys stay, and it is asked again
            why = "it did not answer in time" if isinstance(error, TimeoutError) else repr(error)
            self._error = error if isinstance(error, IssuerError) else IssuerError(why)
            if not had_failed:
                fields |= {"reason": str(self._error)}
                log.warning("issuer's keys could not be read; keeping the known ones", extra={"fields": fields})
        else:
            self._error = None
            if had_failed:
                log.warning("issuer's keys read again", extra={"fields": fields})
            changed = {name: key.key for name, key in keys.items()} != {n: k.key for n, k in self._keys.items()}
            self._keys = keys
            if changed:
                self._on_change()
        finally:
            self._read_at = time.monotonic()


def _read(url: str, kind: Any) -> Any:
    opener = urllib.request.build_opener(_SameScheme)
    try:
        with opener.open(url, timeout=_READ_TIMEOUT_S) as response:
            body = response.read(_MAX_BYTES + 1)
    except (OSError, HTTPException, ValueError) as error:
        raise IssuerError(f"{url} cannot be read: {error}") from error
    if len(body) > _MAX_BYTES:
        raise IssuerError(f"{url} has over {_MAX_BYTES} bytes")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise IssuerError(f"{url} is not what OIDC says: {error}") from error
