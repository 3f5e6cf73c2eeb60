"""Authenticates every request before it is routed, by its headers alone."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol
from urllib.parse import parse_qsl

from adapters.catalog.api_keys import PREFIX
from adapters.scopes import Scope
from cluster.config.router import AuthConfig
from router.errors import CredentialInQuery, Forbidden, IdentityUnavailable, Unauthenticated
from router.identity.directory import Directory
from router.identity.principal import ANYBODY, NOBODY, Principal
from router.identity.scopes import PUBLIC_PATHS

_MAX_HEADER = 16 * 1024  # bytes; tokens with many claims have a few kilobytes
_QUERY_NAMES = frozenset({"key", "api_key", "api-key", "apikey", "x-api-key", "token", "access_token", "authorization"})
_HOW = "send `Authorization: Bearer KEY`, once"


class Tokens(Protocol):
    """Verifies bearer tokens that are not API keys."""

    def known(self, token: str) -> Principal | None:
        """The holder of a token that was verified before. Raises Unauthenticated for one that was refused before."""
        ...

    async def verified(self, token: str) -> Principal:
        """The holder of a token. Raises Unauthenticated and IdentityUnavailable."""
        ...


class Gate:
    """Authenticates requests. Without `auth`, every request gets a principal that may do everything."""

    def __init__(
        self,
        auth: AuthConfig | None,
        directory: Directory,
        tokens: Tokens | None = None,
        more_public_paths: Collection[str] = (),
    ) -> None:
        self._is_open = auth is None
        self._takes_keys = auth is not None and auth.keys
        self._directory = directory
        self._tokens = tokens
        self._public_paths = PUBLIC_PATHS.union(more_public_paths)

    def known(self, scope: dict[str, Any]) -> Principal | None:
        """The principal of a request; None if its token must first be `verified`.

        Raises Unauthenticated, CredentialInQuery and IdentityUnavailable.
        """
        if self._is_open:
            return ANYBODY
        if scope["path"] in self._public_paths:
            return NOBODY
        credential = _credential_in(scope)
        if credential.startswith(PREFIX):
            if self._takes_keys:
                return self._holder_of(credential)
        elif self._tokens is not None:
            return self._tokens.known(credential)
        raise Unauthenticated("the API key is not valid")

    async def verified(self, scope: dict[str, Any]) -> Principal:
        """The principal of a request whose token is not known yet. Raises Unauthenticated and IdentityUnavailable."""
        assert self._tokens is not None
        return await self._tokens.verified(_credential_in(scope))

    def _holder_of(self, key: str) -> Principal:
        if (found := self._directory.principal_of_key(key)) is not None:
            return found
        if not self._directory.is_loaded:
            raise IdentityUnavailable("the router has not reached the catalog of keys yet; try again")
        raise Unauthenticated("the API key is unknown, expired or revoked")


def check_scope(principal: Principal, needed: Scope | None) -> None:
    """Raise Forbidden if a principal lacks what a route needs. None: the route is public."""
    if needed is not None and not principal.has(needed):
        held = ", ".join(sorted(principal.scopes)) or "no scope"
        raise Forbidden(f"this needs a key with the scope {needed}; yours has {held}")


def _credential_in(scope: dict[str, Any]) -> str:
    """The bearer token. Raises Unauthenticated and CredentialInQuery."""
    if scope["query_string"]:
        _check_query(scope["query_string"])
    found: bytes | None = None
    for name, value in scope["headers"]:
        if name == b"authorization":
            if found is not None:  # what is behind a proxy may have read the other one
                raise Unauthenticated(f"there are several authorization headers; {_HOW}")
            found = value
    if found is None:
        raise Unauthenticated(f"an API key is needed; {_HOW}")
    kind, _, credential = found.partition(b" ")
    if kind.lower() != b"bearer" or len(found) > _MAX_HEADER or not credential.isascii():
        raise Unauthenticated(f"the authorization header is not valid; {_HOW}")
    return credential.decode("ascii").strip()


def _check_query(query: bytes) -> None:
    given: Collection[tuple[str, str]] = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    for name, value in given:
        if name.lower() in _QUERY_NAMES or value.startswith((PREFIX, "Bearer ")):
            raise CredentialInQuery(
                f"the URL seems to have a key, which ends up in logs: {_HOW}, and have a key that was in a URL revoked"
            )
