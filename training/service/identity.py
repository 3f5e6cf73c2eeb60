"""Whose request it is: the router has authenticated its client, and says so under a secret that only it has."""

import re
from collections.abc import Mapping
from hmac import compare_digest
from typing import NamedTuple, Protocol

from starlette.requests import Request

from training.service.errors import KeyRefused

TRAINER_HEADER = "x-prelude-trainer"  # its secret, with a push that a client's key permits
OBJECT_HEADER = "x-prelude-object"  # of an answer: what the request was about, for the router's audit log
TENANT_HEADER = "x-prelude-tenant"
SAMPLER_ALIAS = re.compile(r"sampler-[0-9a-f]{16}-[0-9]{1,10}")  # at the router, of a sampling session's weights
_SECRET, _CREDENTIAL = "authorization", "x-prelude-credential"


class Caller(NamedTuple):
    tenant: str  # the router tells it from earlier ones of the name
    key: str | None  # or a token, for the router


def name_of(tenant: str) -> str:
    """Of `acme#29810324`, a later tenant of that name, `acme`."""
    return tenant.partition("#")[0]


class Identities(Protocol):
    async def caller(self, request: Request) -> Caller:
        """Raises KeyRefused."""

    async def check_operator(self, request: Request) -> None:
        """Raises KeyRefused."""


def headers_of_router(secret: str, tenant: str, credential: str | None) -> dict[str, str]:
    """The headers of a router's call for a client. `credential`: the client's; None: nobody asks for one."""
    headers = {_SECRET: f"Bearer {secret}", TENANT_HEADER: tenant}
    return headers if credential is None else {**headers, _CREDENTIAL: credential}


class CallsOfRouter:
    """Knows the router by its secret, and believes what it says."""

    def __init__(self, secret: str) -> None:
        self._expected = f"Bearer {secret}".encode()

    async def caller(self, request: Request) -> Caller:
        headers = request.headers
        self._check(headers)
        return Caller(headers[TENANT_HEADER], headers.get(_CREDENTIAL))

    async def check_operator(self, request: Request) -> None:
        """The operator has the secret, too. Calls that the router passes on name a tenant, whatever their path is."""
        self._check(request.headers)
        if TENANT_HEADER in request.headers:
            raise KeyRefused("this is for the operator")

    def _check(self, headers: Mapping[str, str]) -> None:
        if not compare_digest(headers.get(_SECRET, "").encode("latin-1"), self._expected):
            raise KeyRefused("this trainer takes the router's calls only: give clients the router's URL")
