"""Callers of a router, for tests of quotas."""

from __future__ import annotations

from adapters.scopes import Scope
from router.identity.access import Principal


def caller(tenant: str, key_id: str | None = None) -> Principal:
    """A caller of a tenant who may infer, and nothing else."""
    return Principal(tenant, tenant, frozenset({Scope.INFER}), key_id)


ACME, BETA = caller("acme"), caller("beta")
