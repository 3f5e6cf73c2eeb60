"""Which adapters a principal may use, show and change."""

from __future__ import annotations

from adapters.errors import AdapterNotFound
from adapters.identity import DEFAULT_TENANT, AdapterReference, full_name_of
from adapters.scopes import Permission
from router.identity.directory import Directory
from router.identity.principal import Principal

_VERBS = {Permission.INFER: "use", Permission.READ: "see", None: "change"}


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
    if principal.crosses_tenants or principal.tenant == tenant:
        return
    if permission is not None and directory.may(principal, tenant, name, permission):
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
