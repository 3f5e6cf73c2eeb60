"""JSON Web Tokens of OIDC issuers, instead of API keys. A token is verified once and then cached until it expires."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import jwt

from adapters.identity import is_tenant_name
from adapters.scopes import Scope
from cluster.config.router import OidcConfig
from process.lifetime import meanwhile
from router.errors import IdentityUnavailable, Unauthenticated
from router.identity.access import Principal
from router.identity.issuer import ALGORITHMS, Issuer, IssuerError

_MAX_KNOWN = 10_000  # tokens, and as many that were refused
_REFUSED_S = 10.0  # then a refused token is looked at again: its key may have come
_LEEWAY_S = 30.0  # between the issuer's clock and this one
_MAX_SUBJECT = 100  # characters, in logs
_OPTIONS: Any = {"require": ["exp", "iss", "aud"], "enforce_minimum_key_length": True}
# What PyJWT lets through for claims of strange types.
_MALFORMED = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


@dataclass(frozen=True, slots=True)
class _Known:
    principal: Principal
    expires_at: float  # by the clock


class OidcTokens:
    """The tokens of all issuers. Remembers them by their SHA-256 digests."""

    def __init__(self, issuers: Sequence[OidcConfig], clock: Callable[[], float] = time.time) -> None:
        self._issuers = {each.issuer: Issuer(each, self._forget) for each in issuers}
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # why, and until when

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Keep the issuers' keys up to date inside the block."""
        async with meanwhile(*(each.run() for each in self._issuers.values())):
            yield

    def known(self, token: str) -> Principal | None:
        """The holder of a token that was verified before; None for a new one. Raises Unauthenticated."""
        digest = hashlib.sha256(token.encode()).digest()
        if found := self._known.get(digest):
            if self._clock() < found.expires_at:
                self._known.move_to_end(digest)
                return found.principal
            del self._known[digest]
            raise Unauthenticated("the token has expired")
        if refused := self._refused.get(digest):
            if self._clock() < refused[1]:
                raise Unauthenticated(refused[0])
            del self._refused[digest]
        return None

    async def verified(self, token: str) -> Principal:
        """The holder of a token. Raises Unauthenticated, and IdentityUnavailable while its key cannot be read."""
        digest = hashlib.sha256(token.encode()).digest()
        try:
            known = await self._verified(token)
        except Unauthenticated as error:
            _remember(self._refused, digest, (str(error), self._clock() + _REFUSED_S))
            raise
        _remember(self._known, digest, known)
        return known.principal

    async def _verified(self, token: str) -> _Known:
        try:
            key_id = jwt.get_unverified_header(token).get("kid")
            unverified = jwt.decode(token, options={"verify_signature": False})
            issuer = self._issuers.get(str(unverified.get("iss")))
        except _MALFORMED:
            raise Unauthenticated("the authorization header has neither an API key nor a token") from None
        if issuer is None:
            raise Unauthenticated("the token is of an issuer that this router does not know")
        try:
            key = await issuer.key(key_id)
        except IssuerError:
            raise IdentityUnavailable("the issuer's keys cannot be read now; try again") from None
        if key is None:
            raise Unauthenticated("the token is signed with a key that its issuer does not have")
        config = issuer.config
        try:
            claims = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=config.audience,
                issuer=config.issuer,
                leeway=_LEEWAY_S,
                options=_OPTIONS,
            )
            expires_at = float(int(claims["exp"])) + _LEEWAY_S
        except _MALFORMED as error:
            reason = str(error) if isinstance(error, jwt.PyJWTError) else "a claim has a wrong type"
            raise Unauthenticated(f"the token is not valid: {reason}") from None
        return _Known(_principal_of(claims, config, expires_at), expires_at)

    def _forget(self) -> None:
        """Forget an issuer's tokens, because its keys have changed."""
        self._known.clear()
        self._refused.clear()


def _principal_of(claims: dict[str, Any], config: OidcConfig, expires_at: float) -> Principal:
    tenant = _claim(claims, config.tenant_claim)
    if not is_tenant_name(tenant):
        found = "is missing" if tenant is None else "is not a tenant's name"
        raise Unauthenticated(f"the token's claim {config.tenant_claim!r} {found}")
    subject = "".join(each if each.isprintable() else "?" for each in str(claims.get("sub", "nobody")))
    name = f"{tenant} token of {subject[:_MAX_SUBJECT]}"
    return Principal(tenant, name, _scopes_of(claims, config), expires_at=_as_time(expires_at))


def _as_time(seconds: float) -> datetime | None:
    """None for what is beyond the calendar."""
    try:
        return datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _scopes_of(claims: dict[str, Any], config: OidcConfig) -> frozenset[Scope]:
    value = _claim(claims, config.scope_claim)
    given = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    words = [each for each in given if isinstance(each, str)]
    if config.scopes is not None:
        return frozenset(scope for word in words for scope in config.scopes.get(word, ()))
    return frozenset(scope for scope in Scope if scope in words)


def _claim(claims: dict[str, Any], name: str) -> Any:
    """A claim by its name, or by a path with dots; None if there is none."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _remember(entries: OrderedDict[bytes, Any], digest: bytes, entry: Any) -> None:
    entries[digest] = entry
    if len(entries) > _MAX_KNOWN:
        entries.popitem(last=False)
