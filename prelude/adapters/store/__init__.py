"""The content-addressed store of adapters' bytes."""

from prelude.adapters.store.envelope import Envelope
from prelude.adapters.store.errors import (
    AdapterNotTrusted,
    RevisionNotStored,
    StoreConflict,
    StoreCorrupt,
    StoreFull,
    StoreUnavailable,
)
from prelude.adapters.store.s3_objects import S3Access
from prelude.adapters.store.store import AdapterStore, LeftOver, StoredObject, open_store

__all__ = [
    "AdapterNotTrusted",
    "AdapterStore",
    "Envelope",
    "LeftOver",
    "RevisionNotStored",
    "S3Access",
    "StoreConflict",
    "StoreCorrupt",
    "StoreFull",
    "StoreUnavailable",
    "StoredObject",
    "open_store",
]
