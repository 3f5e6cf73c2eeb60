"""Whose request it is: keys of the catalog, or anybody on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from starlette.requests import Request

from adapters.catalog.sql import SqlCatalog
from adapters.scopes import Scope
from training.service.errors import KeyRefused, ScopeMissing
from training.service.identity import Anybody, Caller, KeysOfCatalog


def request(**headers: str) -> Request:
    given: Iterable[tuple[bytes, bytes]] = [
        (name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()
    ]
    return Request({"type": "http", "headers": list(given)})


def test_keys_are_those_of_the_catalog(tmp_path: Path):
    catalog = SqlCatalog.open(f"sqlite:///{tmp_path}/catalog.db")
    make = catalog.keys.create
    _, writer = make("acme", "writer", {Scope.ADAPTERS_WRITE}, expires_at=None, by=None)
    _, admin = make("ops", "admin", {Scope.ADMIN}, expires_at=datetime.now(UTC) + timedelta(days=1), by=None)
    _, reader = make("acme", "reader", {Scope.INFER, Scope.ADAPTERS_READ}, expires_at=None, by=None)
    record, revoked = make("acme", "gone", {Scope.ADMIN}, expires_at=None, by=None)
    catalog.keys.revoke(record.key_id)

    async def ask() -> None:
        identities = KeysOfCatalog(catalog)
        assert await identities.caller(request(x_api_key=f"tml-{writer}")) == Caller("acme", writer)
        assert await identities.caller(request(x_api_key=f"tml-{admin}")) == Caller("ops", admin)
        with pytest.raises(ScopeMissing, match="adapters:write"):
            await identities.caller(request(x_api_key=f"tml-{reader}"))
        for key in (revoked, writer[:-1], writer[:-1] + "_", "", "prelude_"):
            with pytest.raises(KeyRefused):
                await identities.caller(request(x_api_key=f"tml-{key}"))
        with pytest.raises(KeyRefused):
            await identities.caller(request())
        _, new = make("acme", "new", {Scope.ADAPTERS_WRITE}, expires_at=None, by=None)
        identities._read_at = -1e9  # as after the time between two reads
        assert (await identities.caller(request(x_api_key=f"tml-{new}"))).tenant == "acme"

    asyncio.run(ask())
    catalog.close()


@pytest.mark.parametrize("host", ["127.0.0.1:8100", "localhost:8100", "[::1]:8100", "localhost"])
def test_without_keys_this_machine_is_one_tenant(host: str):
    assert asyncio.run(Anybody().caller(request(x_api_key="tml-any", host=host))) == Caller("default", None)


@pytest.mark.parametrize(
    "headers", [{"host": "127.0.0.1"}, {"x_api_key": "tml-any", "host": "evil.example"}, {"x_api_key": "tml-any"}]
)
def test_without_keys_no_web_page_gets_in(headers: dict[str, str]):
    with pytest.raises(KeyRefused):
        asyncio.run(Anybody().caller(request(**headers)))
