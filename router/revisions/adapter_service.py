"""The cluster's adapters as this router knows them: names resolved from memory, the catalog and the store behind it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from adapters.catalog.cached import CachedResolver
from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.errors import AdapterError, AdapterNotFound, CatalogUnavailable, InvalidReference
from adapters.identity import AdapterReference
from adapters.library import AdapterLibrary
from adapters.store.errors import StoreUnavailable
from router.metrics import Metrics
from router.public_errors import redact_addresses
from router.revisions.configured_adapters import ConfiguredAdapters

T = TypeVar("T")

_RETRY_S = 1.0  # after a catalog or store that could not be opened
_START_S = 10.0  # that a start waits at most for the adapters of cluster.yaml; later requests for them wait instead
_RESOLVE_TIMEOUT_S = 10.0
_MAX_LOOKUPS = 1000  # different references that the database is being asked for
_LOOKUP_THREADS = 8  # unknown names are made up at will: they get no more threads than these
_CALL_THREADS = 4
_IMPORT_THREADS = 2
_EXPORT_THREADS = 2  # of their own: a training loop's push does not wait for them
_CLOSE_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class AdapterService:
    """Resolves references, and lends the library to whatever manages adapters. Blocking work is done in threads.

    A catalog or store that cannot be reached is opened again and again: the base model is served without them.
    """

    def __init__(
        self,
        open_catalog: Callable[[], SqlCatalog],
        open_library: Callable[[SqlCatalog], AdapterLibrary],
        directories: Mapping[str, Path],
        metrics: Metrics,
        *,
        resolve_timeout_s: float = _RESOLVE_TIMEOUT_S,
    ) -> None:
        """`directories` are those of cluster.yaml. Raises ValueError for a name that is none or is given twice."""
        self._open_catalog = open_catalog
        self._open_library = open_library
        self._configured = ConfiguredAdapters(directories)
        self._metrics = metrics
        self._resolve_timeout_s = resolve_timeout_s
        self._catalog: SqlCatalog | None = None
        self._library: AdapterLibrary | None = None
        self._resolver: CachedResolver | None = None
        self._lookups: dict[str, asyncio.Task[AdapterRevision | AdapterError]] = {}
        self._lookup_threads = ThreadPoolExecutor(_LOOKUP_THREADS, "resolve")
        self._call_threads = ThreadPoolExecutor(_CALL_THREADS, "catalog")
        self._import_threads = ThreadPoolExecutor(_IMPORT_THREADS, "import")
        self._export_threads = ThreadPoolExecutor(_EXPORT_THREADS, "export")
        metrics.read_catalog_staleness(lambda: self.staleness_s)

    def open(self) -> bool:
        """Opens what can be reached, the rest is left for later; whether all is open. Blocking.

        Raises what another try does not mend: CatalogTooNew, BaseModelInvalid, and ValueError for a wrong URL.
        """
        try:
            if self._catalog is None:
                self._catalog = self._open_catalog()
                self._resolver = CachedResolver(self._catalog)
                self._resolver.start()
            if self._library is None:
                self._library = self._open_library(self._catalog)
        except (CatalogUnavailable, StoreUnavailable) as error:
            log.warning("adapters cannot be reached", extra={"fields": {"code": error.code, "reason": str(error)}})
        return self._library is not None

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Keeps in step with the catalog inside this block, which begins when cluster.yaml's adapters are imported."""
        importing = asyncio.create_task(self._open_and_import(), name="adapters of cluster.yaml")
        try:
            if self._library is not None:
                await asyncio.wait({importing}, timeout=_START_S)
            yield
        finally:
            importing.cancel()
            for lookup in tuple(self._lookups.values()):
                lookup.cancel()
            await asyncio.gather(importing, *self._lookups.values(), return_exceptions=True)
            # A daemon: a database that hangs must not keep the event loop, which waits for its own threads.
            closing = threading.Thread(target=self.close, name="close adapters", daemon=True)
            closing.start()
            await asyncio.to_thread(closing.join, _CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Ends the threads, those that wait for a database as soon as it answers or their time is over. Blocking."""
        for threads in (self._lookup_threads, self._call_threads, self._import_threads, self._export_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._resolver is not None:
            self._resolver.close()
        if self._catalog is not None:
            self._catalog.close()

    # ---- names --------------------------------------------------------------------------------------------------

    async def resolve(self, reference: str) -> AdapterRevision:
        """The revision that a reference stands for.

        Raises InvalidReference, AdapterNotFound, CatalogUnavailable, or what is wrong with a directory of cluster.yaml.
        """
        try:
            revision = await self._resolved(reference)
        except AdapterNotFound:
            self._metrics.resolutions.labels("not_found").inc()
            raise
        except CatalogUnavailable:
            self._metrics.resolutions.labels("unavailable").inc()
            raise
        except AdapterError:
            self._metrics.resolutions.labels("invalid").inc()
            raise
        return revision

    @property
    def staleness_s(self) -> float:
        """Seconds since the names in memory were known to be those of the catalog; infinite where they never were."""
        return float("inf") if self._resolver is None else self._resolver.staleness_s

    async def _resolved(self, reference: str) -> AdapterRevision:
        try:
            return await self._from_memory_or_catalog(reference)
        except AdapterNotFound:
            wanted = AdapterReference.parse(reference)
            key = wanted.tenant, wanted.name
            try:
                async with asyncio.timeout(self._resolve_timeout_s):
                    was_pending = await self._configured.settled(key)
            except TimeoutError:
                raise CatalogUnavailable(f"{wanted.full_name!r} is still being imported; try again") from None
            if error := self._configured.error_of(key):
                raise error from None
            if not was_pending:
                raise
        await self.refresh()
        return await self._from_memory_or_catalog(reference)

    async def _from_memory_or_catalog(self, reference: str) -> AdapterRevision:
        if self._resolver is None:
            AdapterReference.parse(reference)
            raise _not_answering(reference)
        if found := self._resolver.lookup(reference):
            self._metrics.resolutions.labels("memory").inc()
            return found
        outcome = await self._looked_up(reference)
        if isinstance(outcome, AdapterError):
            raise type(outcome)(*outcome.args)  # a fresh one: others wait for the same
        self._metrics.resolutions.labels("database").inc()
        return outcome

    async def _looked_up(self, reference: str) -> AdapterRevision | AdapterError:
        """What the catalog says, which is asked once however many wait for it."""
        lookup = self._lookups.get(reference)
        if lookup is None:
            if len(self._lookups) >= _MAX_LOOKUPS:
                raise CatalogUnavailable(f"{len(self._lookups)} other names are being looked up; try again")
            lookup = asyncio.create_task(self._look_up(reference), name="look up")
            self._lookups[reference] = lookup
            lookup.add_done_callback(lambda done: self._forget(reference, done))
        try:
            async with asyncio.timeout(self._resolve_timeout_s):
                return await asyncio.shield(lookup)
        except TimeoutError:
            raise _not_answering(reference) from None

    async def _look_up(self, reference: str) -> AdapterRevision | AdapterError:
        assert self._resolver is not None
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._lookup_threads, self._resolver.resolve, reference)
        except CatalogUnavailable as error:
            log.info("name not resolved", extra={"fields": {"reason": str(error)}})
            return _not_answering(reference)
        except (AdapterNotFound, InvalidReference) as error:
            return error.with_traceback(None)

    def _forget(self, reference: str, done: asyncio.Task[AdapterRevision | AdapterError]) -> None:
        del self._lookups[reference]
        if not done.cancelled():
            done.exception()  # whoever waited has raised it

    # ---- the library --------------------------------------------------------------------------------------------

    async def with_catalog(self, work: Callable[[SqlCatalog], T], timeout_s: float = _RESOLVE_TIMEOUT_S) -> T:
        """What `work` makes of the catalog, in a thread. Raises CatalogUnavailable after `timeout_s` too."""
        if self._catalog is None:
            raise CatalogUnavailable("the catalog has not been reached yet; try again")
        return await self._called(self._call_threads, partial(work, self._catalog), timeout_s)

    async def with_library(self, work: Callable[[AdapterLibrary], T], timeout_s: float) -> T:
        """What `work`, which may take long, makes of the library, in a thread. A time-out does not end the thread."""
        return await self._called(self._import_threads, partial(work, self._opened_library), timeout_s)

    async def from_library(self, work: Callable[[AdapterLibrary], T], timeout_s: float) -> T:
        """As `with_library`, for what changes nothing. Raises StoreUnavailable after `timeout_s` too."""
        late = StoreUnavailable(f"the adapter store took longer than {timeout_s:g} s; try again")
        return await self._called(self._export_threads, partial(work, self._opened_library), timeout_s, late)

    async def refresh(self) -> None:
        """Takes in what has changed up to now, so that this router sees at once what it has done itself."""
        if self._resolver is not None:
            with suppress(CatalogUnavailable):  # then it is seen when the catalog answers again
                await self._called(self._call_threads, self._resolver.refresh, _RESOLVE_TIMEOUT_S)

    @property
    def _opened_library(self) -> AdapterLibrary:
        if self._library is None:
            raise StoreUnavailable("the catalog or the adapter store has not been reached yet; try again")
        return self._library

    async def _called(
        self, threads: Executor, work: Callable[[], T], timeout_s: float, late: AdapterError | None = None
    ) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except AdapterError as error:
            told = redact_addresses(error)
            if told is not error:
                fields = {"code": error.code, "reason": str(error)}
                log.warning("catalog or adapter store failed", extra={"fields": fields})
            raise told from None
        except TimeoutError:
            raise late or CatalogUnavailable(
                f"the catalog or the adapter store took longer than {timeout_s:g} s; whether the change was made is "
                "not known: look before making it again"
            ) from None

    async def _open_and_import(self) -> None:
        while self._library is None:
            await asyncio.sleep(_RETRY_S)
            try:
                await asyncio.get_running_loop().run_in_executor(self._import_threads, self.open)
            except Exception:  # the edge of this task: what cannot be mended here may be mended outside
                log.exception("adapters cannot be opened")

        library = self._library

        def in_thread(work: Callable[..., AdapterRevision], *arguments: object) -> Awaitable[AdapterRevision]:
            return asyncio.get_running_loop().run_in_executor(self._import_threads, partial(work, *arguments))

        await self._configured.import_all(library, in_thread)


def _not_answering(reference: str) -> CatalogUnavailable:
    # The catalog's own words name its address, which is none of a client's business.
    return CatalogUnavailable(f"the catalog does not answer, so {reference!r} cannot be resolved; try again")
