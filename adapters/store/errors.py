"""Errors of the store of adapters' bytes.

    AdapterError
    ├── StoreUnavailable      503  the store cannot be reached, read or written; try again
    ├── StoreFull             507  no room for the bytes, in the store or at a fetch's destination
    ├── StoreCorrupt          422  an object does not match its own digest
    ├── AdapterNotTrusted     422  no key that the worker trusts has signed the bytes
    ├── StoreConflict         409  other bytes are stored for the revision; stored content is never replaced by other
    └── RevisionNotStored     404  the store has no such revision

Every message names the key and what would be right.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adapters.errors import AdapterError
from process.exhaustion import is_disk_full


class StoreUnavailable(AdapterError):
    code = "adapter_store_unavailable"
    http_status = 503
    retryable = True


class StoreFull(AdapterError):
    code = "adapter_store_full"
    http_status = 507


@contextmanager
def disk_full_at(destination: Path) -> Iterator[None]:
    """Raise StoreFull if the block finds no space for a file at `destination`."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise StoreFull(
                f"there is no room for an adapter at {destination} ({error.strerror}); free or add disk space"
            ) from error
        raise


class StoreCorrupt(AdapterError):
    code = "adapter_store_corrupt"
    http_status = 422


class AdapterNotTrusted(AdapterError):
    code = "adapter_not_trusted"
    http_status = 422


class StoreConflict(AdapterError):
    code = "adapter_store_conflict"
    http_status = 409


class RevisionNotStored(AdapterError):
    code = "adapter_revision_not_stored"
    http_status = 404
