"""What clients are told of adapters' errors whose own words name addresses and folders of this deployment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from adapters.errors import AdapterError, CatalogUnavailable
from adapters.store.errors import RevisionNotStored, StoreConflict, StoreCorrupt, StoreFull, StoreUnavailable

# By code, since workers' errors come as codes.
_FIXED_WORDS: Mapping[str, str] = {
    CatalogUnavailable.code: "the catalog does not answer; try again",
    StoreUnavailable.code: "the adapter store does not answer; try again",
    StoreFull.code: "there is no room for the adapter; the operator must free or add space",
    StoreCorrupt.code: "the adapter's stored bytes are damaged; it must be imported again",
    StoreConflict.code: "the adapter store has this revision in another dtype; a store is for one serving dtype",
    RevisionNotStored.code: "the adapter store does not have this revision; it must be imported again",
}


def redact_addresses(error: AdapterError) -> AdapterError:
    """The error, or one of its kind in words that clients may read. The caller logs the first one's."""
    said = str(error)
    if (words := _FIXED_WORDS.get(error.code, said)) == said:
        return error
    return type(error)(words)


def without_path(error: AdapterError, path: Path, shown: str) -> AdapterError:
    """The error, or one of its kind that says `shown` where it named a path of the router's machine."""
    said = str(error)
    if (words := said.replace(str(path), shown)) == said:
        return error
    return type(error)(words)


def public_message(code: str, said: str) -> str:
    """What a client may read of an error that a worker told with this code."""
    return _FIXED_WORDS.get(code, said)
