"""The content-addressed store of adapters' bytes."""

from adapters.store.envelope import Envelope
from adapters.store.errors import (
    AdapterNotTrusted,
    RevisionNotStored,
    StoreConflict,
    StoreCorrupt,
    StoreFull,
    StoreUnavailable,
)
from adapters.store.s3_objects import S3Access
from adapters.store.store import AdapterStore, StoredObject, open_store

__all__ = [
    "AdapterNotTrusted",
    "AdapterStore",
    "Envelope",
    "RevisionNotStored",
    "S3Access",
    "StoreConflict",
    "StoreCorrupt",
    "StoreFull",
    "StoreUnavailable",
    "StoredObject",
    "open_store",
]
