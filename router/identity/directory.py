"""All keys and grants of the catalog, and names of deleted tenants, in memory.

So no request waits for the catalog to be authenticated.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Protocol

from adapters.catalog.api_keys import digest_of, key_id_of
from adapters.catalog.records import ApiKey, Change, Grant
from adapters.catalog.sql.keys import matches
from adapters.catalog.sql.tenants import digest_of_tenant
from adapters.scopes import Permission
from router.identity.principal import Principal

SHARED_NAMESPACE = "*"  # of prefix caches; no tenant can have this name

_GrantKey = tuple[str, str, str | None, Permission]  # grantee, owner, name


class _Keys(Protocol):
    def list(self) -> Sequence[ApiKey]: ...
    def changed_since(self, sequence: int) -> Sequence[ApiKey]: ...


class _Grants(Protocol):
    def list(self) -> Sequence[Grant]: ...


class _Tenants(Protocol):
    def generations(self) -> Mapping[str, int]: ...


class AccessCatalog(Protocol):
    """The parts of a catalog that the directory reads. Each can raise CatalogUnavailable."""

    @property
    def keys(self) -> _Keys: ...

    @property
    def grants(self) -> _Grants: ...

    @property
    def tenants(self) -> _Tenants: ...


class Directory:
    """Keys and grants as of the last known change. They stay in force while the catalog is unreachable."""

    def __init__(self, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self.is_loaded = False
        self._now = now
        self._keys: dict[str, tuple[ApiKey, Principal]] = {}  # by id
        self._grants: frozenset[_GrantKey] = frozenset()
        self._generations: Mapping[str, int] = {}  # of tenants' names, by digest
        self._own_generation = secrets.token_hex(8)  # until it knows better
        self._to_reload = True
        self._keys_since: int | None = None  # keys changed after this sequence are to be read
        self._grants_to_read = False
        self._lock = threading.Lock()

    def follow(self, catalog: AccessCatalog, changes: Sequence[Change] | None) -> None:
        """Read what the changes affect, or everything if they are None. Blocking.

        Raises CatalogUnavailable; then call it again with the same changes.
        """
        with self._lock:
            if changes is None:
                self._to_reload = True
            for change in changes or ():
                self._to_reload |= change.kind == "tenants"
                self._grants_to_read |= change.kind == "grants"
                if change.kind == "keys" and self._keys_since is None:
                    self._keys_since = change.sequence - 1
            if self._to_reload:
                self._keys = {key.key_id: (key, _principal_of(key)) for key in catalog.keys.list()}
                self._grants = _granted(catalog.grants.list())
                # After the keys: so a key of a name's next tenant is never here without the generation.
                self._generations = catalog.tenants.generations()
            else:
                if self._keys_since is not None:
                    for key in catalog.keys.changed_since(self._keys_since):
                        self._keys[key.key_id] = key, _principal_of(key)
                if self._grants_to_read:
                    self._grants = _granted(catalog.grants.list())
            self._to_reload, self._keys_since, self._grants_to_read = False, None, False
            self.is_loaded = True

    def principal_of_key(self, key: str) -> Principal | None:
        """The holder of a key; None if it is unknown, expired or revoked. Takes microseconds."""
        key_id = key_id_of(key)
        if key_id is None:
            return None
        digest = digest_of(key)
        found = self._keys.get(key_id)
        if found is None or not matches(found[0], digest) or not found[0].is_usable(self._now()):
            return None
        return found[1]

    def cache_namespace(self, tenant: str, *, is_shared: bool) -> str:
        """The prefix-cache namespace of a tenant's request. KV is shared only within a namespace.

        It contains the tenant's name and how many tenants of that name were deleted. Until the catalog has been read,
        that number is unknown, and the namespace is one that is never used again.
        """
        if is_shared:
            return SHARED_NAMESPACE
        if not self.is_loaded:
            return f"{tenant}#{self._own_generation}"
        generation = self._generations.get(digest_of_tenant(tenant), 0) if self._generations else 0
        return f"{tenant}#{generation}" if generation else tenant

    @property
    def generations(self) -> Mapping[str, int]:
        """How often a tenant of a name was deleted, by the name's digest. Never changes: changes make another one."""
        return self._generations

    def may(self, principal: Principal, owner: str, name: str, permission: Permission) -> bool:
        """Whether a principal may use this adapter, as far as tenants go.

        Decided by the names alone, so result and time are the same whether or not the adapter exists.
        """
        if principal.tenant == owner or principal.crosses_tenants:
            return True
        grants = self._grants
        return (principal.tenant, owner, None, permission) in grants or (
            principal.tenant, owner, name, permission
        ) in grants  # fmt: skip


def _principal_of(key: ApiKey) -> Principal:
    return Principal(key.tenant, f"{key.tenant} key {key.key_id} ({key.name})", key.scopes, key.key_id)


def _granted(grants: Sequence[Grant]) -> frozenset[_GrantKey]:
    return frozenset((each.grantee, each.owner, each.name, each.permission) for each in grants)
