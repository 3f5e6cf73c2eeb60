"""Whose request it is: the router says so, and nobody else can."""

import asyncio

import pytest
from starlette.requests import Request
from support.training.trainer import SECRET

from training.service.errors import KeyRefused
from training.service.identity import Caller, CallsOfRouter, headers_of_router


def caller(headers: dict[str, str]) -> Caller:
    given = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    return asyncio.run(CallsOfRouter(SECRET).caller(Request({"type": "http", "headers": given})))


@pytest.mark.parametrize("key", ["prelude_key", None])
def test_the_router_is_believed(key: str | None):
    assert caller(headers_of_router(SECRET, "acme", key)) == Caller("acme", key)


@pytest.mark.parametrize("secret", ["", SECRET[:-1], f"{SECRET}x", "prelude_key", "\xe4"])
def test_nobody_else_is(secret: str):
    with pytest.raises(KeyRefused, match="give clients the router's URL"):
        caller(headers_of_router(secret, "acme", "prelude_key"))
    with pytest.raises(KeyRefused):
        caller({"x-api-key": "tml-prelude_key", "x-prelude-tenant": "acme"})
