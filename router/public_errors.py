"""Removes addresses and paths of this deployment from the messages of adapter errors."""

from collections.abc import Mapping
from pathlib import Path

from adapters.errors import AdapterError, CatalogUnavailable
from adapters.store.errors import (
    AdapterNotTrusted,
    RevisionNotStored,
    StoreConflict,
    StoreCorrupt,
    StoreFull,
    StoreUnavailable,
)

# By code, because workers report errors by code.
_PUBLIC_MESSAGES: Mapping[str, str] = {
    CatalogUnavailable.code: "the catalog does not answer; try again",
    StoreUnavailable.code: "the adapter store does not answer; try again",
    StoreFull.code: "there is no room for the adapter; the operator must free or add space",
    StoreCorrupt.code: "the adapter's stored bytes are damaged; it must be imported again",
    StoreConflict.code: "the adapter store has this revision in another dtype; a store is for one serving dtype",
    AdapterNotTrusted.code: (
        "no key that the workers trust has signed the adapter; import it again, or let the operator set "
        "integrity.signing_key and integrity.trusted_keys"
    ),
    RevisionNotStored.code: "the adapter store does not have this revision; it must be imported again",
}


def redact_addresses(error: AdapterError) -> AdapterError:
    """The error, or one of the same class with a public message. The caller logs the original."""
    message = str(error)
    public = _PUBLIC_MESSAGES.get(error.code, message)
    return error if public == message else type(error)(public)


def without_path(error: AdapterError, path: Path, shown: str) -> AdapterError:
    """The error, or one of the same class with `shown` instead of a path on the router's machine."""
    message = str(error)
    public = message.replace(str(path), shown)
    return error if public == message else type(error)(public)


def public_message(code: str, message: str) -> str:
    """The public message for a worker's error with this code."""
    return _PUBLIC_MESSAGES.get(code, message)
