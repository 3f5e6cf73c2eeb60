"""Errors about adapters, references to them, and base models.

    AdapterError
    ├── InvalidReference      400  the text is not an adapter reference
    ├── AdapterNotFound       404  no such adapter, alias or revision in the catalog
    ├── AdapterMissing        422  it is known, but its directory does not exist; not 404: the reference is right
    ├── AdapterMalformed      422  its files contradict themselves or their format
    ├── AdapterUnsupported    422  sound files of a kind that is not served
    ├── AdapterIncompatible   422  made for another base model, or beyond this deployment's limits
    ├── AdapterTooLarge       413  more bytes than the deployment accepts
    ├── BaseModelInvalid      500  the base model's config.json cannot be used
    ├── CatalogUnavailable    503  the catalog's database is unreachable or too slow
    ├── HostExhausted         503  this host is out of descriptors or memory; nothing is wrong with the adapter
    ├── CatalogConflict       409  the catalog is not in the state that the change expects
    ├── CatalogTooNew         500  the catalog's tables are those of a newer release
    ├── TenantFull            403  the tenant would have more than its quota
    ├── RightWithdrawn        403  the key, token or tenant ended before the change was made
    ├── RevisionBeingRemoved  409  its bytes are being collected as garbage; store them again
    ├── HubFailed             502  a repository of the Hugging Face Hub cannot be had
    └── AccessNotFound        404  no such key, grant or tenant in the catalog

Every message names the offending value and what would be right.
"""

from typing import ClassVar

from process.exhaustion import is_exhaustion


class AdapterError(Exception):
    """Base class of all errors about adapters. `str(error)` may be shown to the client."""

    code: ClassVar[str] = "adapter_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False


class InvalidReference(AdapterError, ValueError):
    """Of a name, an id or a reference. A ValueError, too, as whoever validates fields expects it."""

    code = "invalid_adapter_reference"
    http_status = 400


class AdapterNotFound(AdapterError):
    code = "adapter_not_found"
    http_status = 404


class AdapterMissing(AdapterError):
    code = "adapter_missing"
    http_status = 422


class AdapterMalformed(AdapterError):
    code = "adapter_malformed"
    http_status = 422


class AdapterUnsupported(AdapterError):
    code = "adapter_unsupported"
    http_status = 422


class AdapterIncompatible(AdapterError):
    code = "adapter_incompatible"
    http_status = 422


class AdapterTooLarge(AdapterError):
    code = "adapter_too_large"
    http_status = 413


class BaseModelInvalid(AdapterError):
    code = "base_model_invalid"
    http_status = 500


class CatalogUnavailable(AdapterError):
    code = "catalog_unavailable"
    http_status = 503
    retryable = True


class HostExhausted(AdapterError):
    code = "host_exhausted"
    http_status = 503
    retryable = True

    @classmethod
    def check(cls, error: Exception) -> None:
        """Raise it for such an error, before a file is blamed."""
        if is_exhaustion(error):
            raise cls(f"this host has no means left to read a file ({error.args[-1]}); try again soon") from error


class CatalogConflict(AdapterError):
    code = "catalog_conflict"
    http_status = 409


class CatalogTooNew(AdapterError):
    code = "catalog_too_new"
    http_status = 500


class TenantFull(AdapterError):
    code = "tenant_quota_reached"
    http_status = 403


class RightWithdrawn(AdapterError):
    code = "right_withdrawn"
    http_status = 403


class RevisionBeingRemoved(AdapterError):
    code = "revision_being_removed"
    http_status = 409
    retryable = True


class HubFailed(AdapterError):
    code = "hub_failed"
    http_status = 502


class AccessNotFound(AdapterError):
    code = "access_not_found"
    http_status = 404
