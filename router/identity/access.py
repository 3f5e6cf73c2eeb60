"""Who makes a request, by the catalog's keys, and which adapters they may use, show and change.

Keys, grants and the names of deleted tenants are in memory, so no request waits for the catalog to be authenticated.
"""

import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from adapters.catalog.api_keys import digest_of, key_id_of
from adapters.catalog.records import ApiKey, Change, Grant
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.keys import matches
from adapters.catalog.sql.tenants import digest_of_tenant
from adapters.errors import AdapterNotFound
from adapters.identity import DEFAULT_TENANT, AdapterReference, full_name_of
from adapters.scopes import Permission, Scope

_SCOPE_KEY = "prelude.principal"  # in the ASGI scope
SHARED_NAMESPACE = "*"  # of prefix caches; no tenant can have this name

_GrantKey = tuple[str, str, str | None, Permission | None]  # grantee, owner, name; no grant is for changes
_VERBS = {Permission.INFER: "use", Permission.READ: "see", None: "change"}


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key or a token.

    Quotas count by the tenant, and by `key_id` if a key has its own quota. `principal_of(scope)` is available before a
    request's body is read. Requests share these objects, so keep no state in them.
    """

    tenant: str
    name: str  # for logs, histories of aliases and the audit log; never a key
    scopes: frozenset[Scope]
    key_id: str | None = None  # None: a token, or nobody asks for keys
    expires_at: datetime | None = field(default=None, compare=False)  # of a token
    # Of the tenant that the key was made for, whose requests may outlast it. None: of a token's tenant, at each time.
    generation: int | None = field(default=None, compare=False)
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

    def follow(self, catalog: SqlCatalog, changes: Sequence[Change] | None) -> None:
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
            if not self._to_reload and self._keys_since is not None:
                changed = catalog.keys.changed_since(self._keys_since)
                # Of a name's next tenant, too, whose deletion is a change that is still to be told.
                self._to_reload = catalog.tenants.generations() != self._generations
                if not self._to_reload:
                    self._keys |= _holders(changed, self._generations)
            while self._to_reload:
                generations = catalog.tenants.generations()
                keys, grants = catalog.keys.list(), _granted(catalog.grants.list())
                # Else a tenant was deleted meanwhile, and a key may be the one's before, or the next one's.
                if catalog.tenants.generations() == generations:
                    self._keys = _holders(keys, generations)
                    self._grants, self._generations = grants, generations
                    self._grants_to_read = self._to_reload = False
            if self._grants_to_read:
                self._grants = _granted(catalog.grants.list())
            self._keys_since, self._grants_to_read, self.is_loaded = None, False, True

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

    def cache_namespace(self, principal: Principal, *, is_shared: bool) -> str:
        """The prefix-cache namespace of a request. KV is shared only within a namespace.

        It contains the tenant's name and its generation. Until the catalog has been read, that number is unknown, and
        the namespace is one that is never used again.
        """
        if is_shared:
            return SHARED_NAMESPACE
        return self.lasting_name(principal) if self.is_loaded else f"{principal.tenant}#{self._own_generation}"

    def lasting_name(self, principal: Principal) -> str:
        """Its tenant's name, with the generation if an earlier one of the name was deleted, as far as that is known."""
        if principal.generation is None:
            return self.present_name(principal.tenant)
        return _lasting(principal.tenant, principal.generation)

    def present_name(self, tenant: str) -> str:
        """As `lasting_name`, of the present tenant of this name."""
        return _lasting(tenant, _generation_of(tenant, self._generations))

    @property
    def generations(self) -> Mapping[str, int]:
        """Of tenants' names, by their digests. Never changes: changes make another one."""
        return self._generations

    def may(self, principal: Principal, owner: str, name: str, permission: Permission | None) -> bool:
        """Whether a principal has this permission for an adapter, as far as tenants go. None: to change it.

        Decided by the names alone, so result and time are the same whether or not the adapter exists.
        """
        if principal.tenant == owner or principal.crosses_tenants:
            return True
        grants = self._grants
        return (principal.tenant, owner, None, permission) in grants or (
            principal.tenant, owner, name, permission
        ) in grants  # fmt: skip


def _holders(keys: Iterable[ApiKey], generations: Mapping[str, int]) -> dict[str, tuple[ApiKey, Principal]]:
    """By the keys' ids."""
    holders = {}
    for key in keys:
        name, generation = f"{key.tenant} key {key.key_id} ({key.name})", _generation_of(key.tenant, generations)
        holders[key.key_id] = key, Principal(key.tenant, name, key.scopes, key.key_id, generation=generation)
    return holders


def _lasting(tenant: str, generation: int) -> str:
    return f"{tenant}#{generation}" if generation else tenant


def _generation_of(tenant: str, generations: Mapping[str, int]) -> int:
    return generations.get(digest_of_tenant(tenant), 0) if generations else 0


def _granted(grants: Sequence[Grant]) -> frozenset[_GrantKey]:
    return frozenset((each.grantee, each.owner, each.name, each.permission) for each in grants)


class AccessDenied(AdapterNotFound):
    """The adapter belongs to another tenant. The client gets the same answer as for one that does not exist."""

    def __init__(self, message: str, adapter: str = "") -> None:
        super().__init__(message)
        self.adapter = adapter  # its full name, for the audit log


def check_access(
    directory: Directory, principal: Principal, tenant: str, name: str, permission: Permission | None
) -> None:
    """Raise AccessDenied unless the principal has this permission for the adapter. None: permission to change it.

    Called before any lookup, so that existing and unknown names get the same answer in the same time.
    """
    if directory.may(principal, tenant, name, permission):
        return
    full_name = full_name_of(tenant, name)
    hint = f"; adapters of {principal.tenant} are named '{principal.tenant}/…'" if tenant == DEFAULT_TENANT else ""
    raise AccessDenied(
        f"there is no adapter {full_name!r} that {principal.tenant} may {_VERBS[permission]}{hint}", full_name
    )


def check_reference(directory: Directory, principal: Principal, reference: str, permission: Permission | None) -> None:
    """As `check_access`, for the adapter of a reference. Raises InvalidReference, too."""
    if not principal.crosses_tenants:
        parsed = AdapterReference.parse(reference)
        check_access(directory, principal, parsed.tenant, parsed.name, permission)


def viewer_of(principal: Principal, permission: Permission) -> tuple[str, Permission | None] | None:
    """For `SqlCatalog.list`: the tenant whose adapters to list; None: all tenants."""
    return None if principal.crosses_tenants else (principal.tenant, permission)
