"""The principal of a request: the holder of its key or token. Handlers read it from the ASGI scope."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from adapters.identity import DEFAULT_TENANT
from adapters.scopes import Scope

_SCOPE_KEY = "prelude.principal"  # in the ASGI scope


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key or a token.

    Quotas count by `tenant`, and by `key_id` if a key has its own quota. `principal_of(scope)` is available before a
    request's body is read. Requests share these objects, so keep no state in them.
    """

    tenant: str
    name: str  # for logs, histories of aliases and the audit log; never a key
    scopes: frozenset[Scope]
    key_id: str | None = None  # None: a token, or nobody asks for keys
    expires_at: datetime | None = field(default=None, compare=False)  # of a token
    # The tenant that gets no more than its share of what all have together; None: it crosses tenants.
    confined_to: str | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "confined_to", None if self.crosses_tenants else self.tenant)

    def has(self, scope: Scope) -> bool:
        """Whether the principal has this scope; `admin` includes all."""
        return scope in self.scopes or Scope.ADMIN in self.scopes

    @property
    def crosses_tenants(self) -> bool:
        """Whether the principal may act on all tenants' adapters."""
        return Scope.ADMIN in self.scopes


# Everybody, where the router has no authentication.
ANYBODY = Principal(DEFAULT_TENANT, "http", frozenset({Scope.ADMIN}))

NOBODY = Principal("", "nobody", frozenset())  # on public paths


def set_principal(scope: dict[str, Any], principal: Principal) -> None:
    """Record the principal of a request."""
    scope[_SCOPE_KEY] = principal


def principal_of(scope: Mapping[str, Any]) -> Principal:
    """The principal of a request, which authentication has set before any handler runs."""
    return scope[_SCOPE_KEY]
