"""Whose request it is, by the API key in `X-API-Key`: `tml-` and a key of the cluster, because the SDK wants `tml-`."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from ipaddress import ip_address
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from starlette.requests import Request

from adapters.catalog.api_keys import digest_of, key_id_of
from adapters.catalog.records import ApiKey
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.keys import matches
from adapters.identity import DEFAULT_TENANT
from adapters.scopes import Scope
from training.service.errors import KeyRefused, ScopeMissing

_PREFIX = "tml-"
_REFRESH_S = 5.0  # between two reads of the catalog's keys


class Caller(NamedTuple):
    tenant: str
    key: str | None  # for the router


class Identities(Protocol):
    async def caller(self, request: Request) -> Caller:
        """Raises KeyRefused and ScopeMissing."""


class Anybody:
    """Without keys everybody is one tenant. For loopback only, where a web page must not get in either."""

    async def caller(self, request: Request) -> Caller:
        if "x-api-key" not in request.headers:  # a page of another site cannot send it
            raise KeyRefused("send any X-API-Key that begins with tml-")
        host = urlsplit(f"//{request.headers.get('host', '')}").hostname or ""
        if host != "localhost":  # a page could have pointed its own name here
            try:
                ip_address(host)
            except ValueError:
                raise KeyRefused("this trainer asks for no key: call it by an IP address or localhost") from None
        return Caller(DEFAULT_TENANT, None)


class KeysOfCatalog:
    """The keys of `prelude keys create`, with the scope adapters:write."""

    def __init__(self, catalog: SqlCatalog) -> None:
        self._catalog = catalog
        self._keys: dict[str, ApiKey] = {}
        self._read_at = -_REFRESH_S
        self._lock = asyncio.Lock()

    async def caller(self, request: Request) -> Caller:
        key = request.headers.get("x-api-key", "").removeprefix(_PREFIX)
        async with self._lock:
            if time.monotonic() - self._read_at >= _REFRESH_S:
                self._keys = {each.key_id: each for each in await asyncio.to_thread(self._catalog.keys.list)}
                self._read_at = time.monotonic()
        found = self._keys.get(key_id_of(key) or "")
        if found is None or not matches(found, digest_of(key)) or not found.is_usable(datetime.now(UTC)):
            raise KeyRefused("the API key is unknown, expired or revoked; it is tml- and a key of the cluster")
        if not found.scopes & {Scope.ADAPTERS_WRITE, Scope.ADMIN}:
            raise ScopeMissing(f"this needs a key with the scope {Scope.ADAPTERS_WRITE}")
        return Caller(found.tenant, key)
