"""Imports the directories of cluster.yaml's `adapters:` when the router starts, each independently."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from adapters.catalog.records import AdapterRevision
from adapters.errors import AdapterError, AdapterNotFound, CatalogConflict
from adapters.formats.positions import GivenPositions
from adapters.identity import full_name_of, split_adapter_name
from adapters.library import AdapterLibrary
from adapters.packed.packing import pack_directory
from cluster.config.schema import AdapterConfig
from router.public_errors import redact_addresses, without_path

AdapterKey = tuple[str, str]  # tenant and name
# The name, the latest revision before, the new one, and the error of an import that will not be tried again.
NoteImport = Callable[[str, AdapterRevision | None, AdapterRevision | None, Exception | None], None]

_IMPORTED_BY = "cluster.yaml"
_RETRY_S = 2.0  # after a transient error of the catalog or the store

log = logging.getLogger(__name__)


class ConfiguredAdapters:
    """Imports each directory once, retries transient errors, and remembers why an import failed."""

    def __init__(self, adapters: Mapping[str, AdapterConfig]) -> None:
        """Raises ValueError for an invalid name or a duplicate."""
        self._adapters: dict[AdapterKey, AdapterConfig] = {}
        self._errors: dict[AdapterKey, AdapterError] = {}
        self._is_settled: dict[AdapterKey, asyncio.Event] = {}
        for name, adapter in adapters.items():
            key = split_adapter_name(name)
            if key in self._adapters:
                raise ValueError(f"the adapter {name!r} is given twice, with and without its tenant; keep one")
            self._adapters[key] = adapter
            self._is_settled[key] = asyncio.Event()

    async def import_all(
        self,
        library: AdapterLibrary,
        in_thread: Callable[..., Awaitable[AdapterRevision]],
        note: NoteImport = lambda *_: None,
    ) -> None:
        """Return when every directory is imported or found unusable. `in_thread` bounds the concurrency.

        `note` is told of each new revision and of each failure.
        """
        async with asyncio.TaskGroup() as group:
            for key in self._adapters:
                group.create_task(self._import(key, library, in_thread, note), name=f"import {full_name_of(*key)}")

    async def wait_until_settled(self, key: AdapterKey) -> bool:
        """Wait for the end of the first attempt to import an adapter. False if it has ended already."""
        event = self._is_settled.get(key)
        if event is None or event.is_set():
            return False
        await event.wait()
        return True

    def error_of(self, key: AdapterKey) -> AdapterError | None:
        """Why an adapter's directory could not be imported, with a public message. A new object for each caller."""
        error = self._errors.get(key)
        return None if error is None else type(error)(*error.args)

    async def _import(
        self,
        key: AdapterKey,
        library: AdapterLibrary,
        in_thread: Callable[..., Awaitable[AdapterRevision]],
        note: NoteImport,
    ) -> None:
        name, adapter = full_name_of(*key), self._adapters[key]
        added: list[tuple[AdapterRevision | None, AdapterRevision]] = []
        while True:
            error: AdapterError | None = None
            failure: Exception | None = None
            try:
                revision = await in_thread(import_if_new, library, name, adapter.path, added.append, adapter.positions)
            except AdapterError as unusable:
                failure = unusable
                fields = {"adapter": name, "code": unusable.code, "reason": str(unusable)}
                log.warning("adapter of cluster.yaml not imported", extra={"fields": fields})
                if not isinstance(unusable, CatalogConflict):  # deleted; the catalog's own error says so to clients
                    error = without_path(redact_addresses(unusable), adapter.path, "its directory").with_traceback(None)
                    error.__context__ = error.__cause__ = None
            except Exception as unforeseen:  # the edge of this import; the router and other adapters must go on
                log.exception("adapter of cluster.yaml not imported", extra={"fields": {"adapter": name}})
                failure = unforeseen
                error = AdapterError("its import failed; the router's log has the reason")
            else:
                imported = {"adapter": name, "revision": revision.revision_id, "number": revision.number}
                log.info("adapter of cluster.yaml imported", extra={"fields": imported})
                for warning in revision.warnings if added else ():  # not again at each start
                    log.warning("adapter of cluster.yaml", extra={"fields": {"adapter": name, "warning": warning}})
            if error is None:
                self._errors.pop(key, None)
            else:
                self._errors[key] = error
            self._is_settled[key].set()
            if error is None or not error.retryable:
                for old, new in added:
                    note(name, old, new, None)
                if failure is not None:
                    note(name, None, None, failure)
                return
            await asyncio.sleep(_RETRY_S)


def import_if_new(
    library: AdapterLibrary,
    name: str,
    directory: Path,
    added: Callable[[tuple[AdapterRevision | None, AdapterRevision]], None] = lambda _: None,
    positions: GivenPositions | None = None,
) -> AdapterRevision:
    """Import a directory as the latest revision. If the adapter already has that revision, no alias moves. Blocking.

    `added` is given the latest revision before and the new one.
    """
    # The operator's own files: a process for each, as for uploads, would take longer than reading most of them.
    library = replace(library.begun(name), packer=pack_directory)

    def end_if_known(revision_id: str) -> None:
        if known := _resolved(library, f"{name}@{revision_id}"):
            raise _Known(known)

    add = partial(library.import_directory, name, directory, by=_IMPORTED_BY, positions=positions)
    old = _resolved(library, name)
    try:
        new = add(on_content=end_if_known)
    except _Known as known:
        found = known.revision
        if found.stored and library.store.exists(found.revision_id):
            return found
        return add(moves_latest=False)
    added((old, new))
    return new


class _Known(Exception):
    """Ends the import of content that the adapter already has, before it is written."""

    def __init__(self, revision: AdapterRevision) -> None:
        self.revision = revision


def _resolved(library: AdapterLibrary, reference: str) -> AdapterRevision | None:
    try:
        return library.catalog.resolve(reference)
    except AdapterNotFound:
        return None
