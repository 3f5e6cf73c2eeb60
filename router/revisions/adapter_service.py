"""Access to the catalog and the library: resolves names from memory, runs blocking work in threads."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from adapters.catalog.records import AdapterRevision, Change
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.cached import CachedResolver
from adapters.catalog.sql.rights import Right
from adapters.errors import AdapterError, AdapterNotFound, CatalogUnavailable, InvalidReference
from adapters.identity import AdapterReference, scaled_id
from adapters.library import AdapterLibrary
from adapters.scopes import Permission
from adapters.store.errors import StoreUnavailable
from cluster.config.schema import AdapterConfig
from router.errors import ConflictingAdapters, InvalidField, TooManyCatalogCalls, UnknownModel
from router.identity.access import Directory, Principal, check_reference
from router.metrics import Metrics
from router.public_errors import redact_addresses
from router.revisions.configured_adapters import ConfiguredAdapters, NoteImport

T = TypeVar("T")
_Outcome = AdapterRevision | AdapterError | TooManyCatalogCalls  # of a lookup

_RETRY_S = 1.0  # between attempts to open the catalog and the store
_START_S = 10.0  # to import the adapters of cluster.yaml before the router serves; the rest is imported meanwhile
_RESOLVE_TIMEOUT_S = 10.0
_MAX_LOOKUPS = 1000  # concurrent queries, of different references
_LOOKUP_THREADS = 8  # separate, because clients can make up unknown names at will
_CALL_THREADS = 4
_AT_ONCE = 2  # lookups, and other calls, of one tenant
_WAITING = 250  # more of them, of each kind
_IMPORT_THREADS = 2
_CLOSE_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


class _Line:
    """One tenant's calls, running and waiting."""

    __slots__ = ("num_calls", "slots")

    def __init__(self, at_once: int) -> None:
        self.num_calls = 0
        self.slots = asyncio.Semaphore(at_once)


class TenantTurns:
    """Lets so many calls of one tenant run at a time; its others wait, first come, first served.

    Each call takes a thread and, while it reads rows, the interpreter: without turns one tenant's pages would keep all
    others' calls waiting, and the event loop, too.
    """

    def __init__(self, at_once: int, *, waiting: int) -> None:
        """`waiting`: calls of one tenant that may wait."""
        self._at_once = at_once
        self._most = at_once + waiting
        self._lines: dict[str, _Line] = {}  # of the tenants that have calls

    @asynccontextmanager
    async def turn(self, tenant: str | None) -> AsyncIterator[None]:
        """Run the block in the tenant's turn; None: at once. Raises TooManyCatalogCalls, at once.

        Each call before it has a deadline, and so has the wait.
        """
        if tenant is None:
            yield
            return
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = _Line(self._at_once)
        if line.num_calls >= self._most:
            raise TooManyCatalogCalls(
                f"{line.num_calls} requests of tenant {tenant} ask the catalog, which is the most at a time; try again"
            )
        line.num_calls += 1
        try:
            async with line.slots:
                yield
        finally:
            line.num_calls -= 1
            if not line.num_calls:
                del self._lines[tenant]


class AdapterService:
    """Resolves references and gives endpoints access to the catalog and the library.

    If the catalog or the store is unreachable, opening it is retried, and the base model is served meanwhile.
    """

    def __init__(
        self,
        open_catalog: Callable[[], SqlCatalog],
        open_library: Callable[[SqlCatalog], AdapterLibrary],
        configured: Mapping[str, AdapterConfig],
        metrics: Metrics,
    ) -> None:
        """`configured` are those of cluster.yaml. Raises ValueError for an invalid name or a duplicate."""
        self._open_catalog = open_catalog
        self._open_library = open_library
        self._configured = ConfiguredAdapters(configured)
        self._metrics = metrics
        self._resolve_timeout_s = _RESOLVE_TIMEOUT_S
        self.directory = Directory()  # keys and grants
        self._catalog: SqlCatalog | None = None
        self._library: AdapterLibrary | None = None
        self._resolver: CachedResolver | None = None
        # By the tenant that asks, whose turn it has to wait for, and the reference.
        self._lookups: dict[tuple[str | None, str], asyncio.Task[_Outcome]] = {}  # that requests may join
        self._running_lookups: set[asyncio.Task[_Outcome]] = set()
        self._lookup_turns = TenantTurns(_AT_ONCE, waiting=_WAITING)
        self._call_turns = TenantTurns(_AT_ONCE, waiting=_WAITING)
        self._import_turns = TenantTurns(_IMPORT_THREADS // 2, waiting=_WAITING)
        self._lookup_threads = ThreadPoolExecutor(_LOOKUP_THREADS, "resolve")
        self._call_threads = ThreadPoolExecutor(_CALL_THREADS, "catalog")
        self._import_threads = ThreadPoolExecutor(_IMPORT_THREADS, "import")
        metrics.catalog_staleness.set_function(lambda: self.staleness_s)

    def open(self) -> bool:
        """Open the catalog and the store, as far as reachable. True if both are open. Blocking.

        Raises permanent errors: CatalogTooNew, BaseModelInvalid, and ValueError for an invalid URL.
        """
        try:
            if self._catalog is None:
                self._catalog = self._open_catalog()
                self._resolver = CachedResolver(self._catalog, on_changes=self._follow)
                self._resolver.start()
            if self._library is None:
                self._library = self._open_library(self._catalog)
        except (CatalogUnavailable, StoreUnavailable) as error:
            log.warning(
                "catalog or adapter store unreachable", extra={"fields": {"code": error.code, "reason": str(error)}}
            )
        return self._library is not None

    def _follow(self, changes: Sequence[Change] | None) -> None:
        assert self._catalog is not None
        assert self._resolver is not None
        self.directory.follow(self._catalog, changes)
        self._metrics.splits.end_others(self._resolver.resolve)

    @asynccontextmanager
    async def following(self, note: NoteImport = lambda *_: None) -> AsyncIterator[None]:
        """Import the adapters of cluster.yaml, at most for a while, then run the block; clean up at its end.

        `note` is told of each new revision and of each failure.
        """
        importing = asyncio.create_task(self._open_and_import(note), name="adapters of cluster.yaml")
        try:
            if self._library is not None:
                await asyncio.wait({importing}, timeout=_START_S)
            yield
        finally:
            importing.cancel()
            lookups = tuple(self._running_lookups)
            for lookup in lookups:
                lookup.cancel()
            await asyncio.gather(importing, *lookups, return_exceptions=True)
            # A daemon, because the event loop waits for its own threads at its end and a database may hang.
            closing = threading.Thread(target=self.close, name="close adapters", daemon=True)
            closing.start()
            await asyncio.to_thread(closing.join, _CLOSE_TIMEOUT_S)

    def close(self) -> None:
        """Stop the threads. Waits for running database queries or their timeouts. Blocking."""
        for threads in (self._lookup_threads, self._call_threads, self._import_threads):
            threads.shutdown(wait=False, cancel_futures=True)
        if self._resolver is not None:
            self._resolver.close()
        if self._catalog is not None:
            self._catalog.close()

    # ---- names --------------------------------------------------------------------------------------------------

    async def resolve(self, reference: str, principal: Principal | None = None) -> AdapterRevision:
        """The revision that a reference resolves to.

        `principal`: who wants to use the adapter, in whose tenant's turn the catalog is asked; None: this router.

        Raises InvalidReference, AccessDenied, AdapterNotFound, CatalogUnavailable, TooManyCatalogCalls, or why a
        directory of cluster.yaml is unusable.
        """
        try:
            if principal is not None:
                check_reference(self.directory, principal, reference, Permission.INFER)
            return await self._resolved(reference, None if principal is None else principal.confined_to)
        except AdapterError as error:
            self._count_refused(error)
            raise

    def _count_refused(self, error: AdapterError) -> None:
        outcomes = {AdapterNotFound: "not_found", CatalogUnavailable: "unavailable"}
        outcome = next((name for kind, name in outcomes.items() if isinstance(error, kind)), "invalid")
        self._metrics.resolutions.labels(outcome).inc()

    @property
    def has_opened(self) -> bool:
        """Whether the catalog and the store have been reachable once. Names in memory outlast later outages."""
        return self._library is not None

    @property
    def staleness_s(self) -> float:
        """The age of the names in memory; infinite before the catalog's first answer."""
        return float("inf") if self._resolver is None else self._resolver.staleness_s

    async def _resolved(self, reference: str, tenant: str | None) -> AdapterRevision:
        try:
            return await self._from_memory_or_catalog(reference, tenant)
        except AdapterNotFound:
            parsed = AdapterReference.parse(reference)
            key = parsed.tenant, parsed.name
            try:
                async with asyncio.timeout(self._resolve_timeout_s):
                    was_pending = await self._configured.wait_until_settled(key)
            except TimeoutError:
                raise CatalogUnavailable(f"{parsed.full_name!r} is still being imported; try again") from None
            if error := self._configured.error_of(key):
                raise error from None
            if not was_pending:
                raise
        await self.refresh()
        return await self._from_memory_or_catalog(reference, tenant)

    async def _from_memory_or_catalog(self, reference: str, tenant: str | None) -> AdapterRevision:
        if self._resolver is None:
            AdapterReference.parse(reference)
            raise _unavailable(reference)
        if found := self._resolver.lookup(reference):
            self._metrics.resolutions.labels("memory").inc()
            return found
        outcome = await self._shared_lookup(reference, tenant)
        if isinstance(outcome, Exception):
            raise type(outcome)(*outcome.args)  # a copy, because other requests raise the same one
        self._metrics.resolutions.labels("database").inc()
        return outcome

    async def _shared_lookup(self, reference: str, tenant: str | None) -> _Outcome:
        """The catalog's answer, by one query for all requests of a tenant that wait for it."""
        key = tenant, reference
        lookup = self._lookups.get(key)
        if lookup is None:
            if len(self._running_lookups) >= _MAX_LOOKUPS:
                raise CatalogUnavailable(f"{len(self._running_lookups)} other names are being looked up; try again")
            lookup = asyncio.create_task(self._look_up(reference, tenant), name="look up")
            self._lookups[key] = lookup
            self._running_lookups.add(lookup)
            lookup.add_done_callback(lambda done: self._forget(key, done))
        try:
            async with asyncio.timeout(self._resolve_timeout_s):
                return await asyncio.shield(lookup)
        except TimeoutError:
            raise _unavailable(reference) from None

    async def _look_up(self, reference: str, tenant: str | None) -> _Outcome:
        assert self._resolver is not None
        loop = asyncio.get_running_loop()
        try:
            async with self._lookup_turns.turn(tenant):
                return await loop.run_in_executor(self._lookup_threads, self._resolver.resolve, reference)
        except CatalogUnavailable as error:
            log.info("name not resolved", extra={"fields": {"reason": str(error)}})
            return _unavailable(reference)
        except (AdapterNotFound, InvalidReference, TooManyCatalogCalls) as error:
            return error.with_traceback(None)

    def _forget(self, key: tuple[str | None, str], done: asyncio.Task[_Outcome]) -> None:
        self._running_lookups.discard(done)
        if self._lookups.get(key) is done:
            del self._lookups[key]
        if not done.cancelled():
            done.exception()  # marks it as retrieved; the waiting requests have raised it

    # ---- the library --------------------------------------------------------------------------------------------

    async def with_catalog(
        self,
        work: Callable[[SqlCatalog], T],
        timeout_s: float = _RESOLVE_TIMEOUT_S,
        *,
        principal: Principal | None = None,
        right: Right | None = None,
    ) -> T:
        """Run `work` on the catalog in a thread. `principal`: who asks, in whose tenant's turn; None: this router.

        `right`: what its changes are permitted by; None: it makes none, or the router's own. Raises CatalogUnavailable,
        also after `timeout_s`, and TooManyCatalogCalls.
        """
        if self._catalog is None:
            raise CatalogUnavailable("the catalog has not been reached yet; try again")
        tenant = None if principal is None else principal.confined_to
        catalog = self._catalog if right is None else self._catalog.permitted(right)
        async with self._call_turns.turn(tenant):
            return await self._in_thread(self._call_threads, partial(work, catalog), timeout_s)

    async def with_library(
        self, work: Callable[[AdapterLibrary], T], timeout_s: float, right: Right, principal: Principal
    ) -> T:
        """Run `work`, which may take long, on the library in a thread, in the turn of the principal's tenant.

        A timeout does not end the thread.
        """
        if self._library is None:
            raise StoreUnavailable("the catalog or the adapter store has not been reached yet; try again")
        work_on = partial(work, self._library.permitted(right))
        async with self._import_turns.turn(principal.confined_to):
            return await self._in_thread(self._import_threads, work_on, timeout_s)

    async def refresh(self) -> None:
        """Read the catalog's changes now, so that this router sees its own change immediately."""
        if self._resolver is not None:
            with suppress(CatalogUnavailable):  # the periodic refresh catches up
                await self._in_thread(self._call_threads, self._resolver.refresh, _RESOLVE_TIMEOUT_S)
        self._lookups.clear()  # later requests must not join one that may have read the catalog before the change

    async def _in_thread(self, threads: Executor, work: Callable[[], T], timeout_s: float) -> T:
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.get_running_loop().run_in_executor(threads, work)
        except AdapterError as error:
            public = redact_addresses(error)
            if public is not error:
                fields = {"code": error.code, "reason": str(error)}
                log.warning("catalog or adapter store failed", extra={"fields": fields})
            raise public from None
        except TimeoutError:
            raise CatalogUnavailable(
                f"the catalog or the adapter store took longer than {timeout_s:g} s; whether the change was made is "
                "not known: look before making it again"
            ) from None

    async def _open_and_import(self, note: NoteImport) -> None:
        while self._library is None:
            await asyncio.sleep(_RETRY_S)
            try:
                await asyncio.get_running_loop().run_in_executor(self._import_threads, self.open)
            except Exception:  # the edge of this task; an operator may fix the cause
                log.exception("adapters cannot be opened")

        library = self._library

        def in_thread(work: Callable[..., AdapterRevision], *arguments: object) -> Awaitable[AdapterRevision]:
            return asyncio.get_running_loop().run_in_executor(self._import_threads, partial(work, *arguments))

        await self._configured.import_all(library, in_thread, note)


def _unavailable(reference: str) -> CatalogUnavailable:
    # The catalog's own message names its address.
    return CatalogUnavailable(f"the catalog does not answer, so {reference!r} cannot be resolved; try again")


def reference_in(model: str, adapter: str | None, base: str) -> str | None:
    """The adapter that a request names, None for the base model.

    Accepted: `adapter` with `model` = base, `model` = "base:adapter", `model` = "adapter"; naming it twice is allowed.
    """
    if model == base:
        return adapter
    in_model = model.removeprefix(f"{base}:")
    if not in_model:
        raise InvalidField(f"model {model!r} names no adapter after the colon", param="model")
    if adapter is not None and adapter != in_model:
        raise ConflictingAdapters(
            f"adapter is {adapter!r} but model names {in_model!r}; say one of them, or set model to {base!r}",
            param="adapter",
        )
    return in_model


async def resolve(
    model: str, adapter: str | None, base: str, adapters: AdapterService, principal: Principal
) -> AdapterRevision | None:
    """The revision that a principal's request names; None: the base model. Raises UnknownModel or an AdapterError."""
    reference = reference_in(model, adapter, base)
    if reference is None:
        return None
    try:
        return await adapters.resolve(reference, principal)
    except (AdapterNotFound, InvalidReference) as error:
        if adapter is not None or model.startswith(f"{base}:"):
            raise
        raise UnknownModel(
            f"the model {model!r} does not exist: the base model is {base!r}, and as an adapter: {error}",
            param="model",
        ) from error
    except CatalogUnavailable:
        raise
    except AdapterError as error:
        raise type(error)(f"the adapter {reference!r} cannot be served: {error}") from error


def scaled_id_of(revision: AdapterRevision | None, scale: float | None) -> str | None:
    """What workers call the revision at a request's scale; None: the base model. Raises InvalidField."""
    if revision is None:
        if scale is not None:
            raise InvalidField("adapter_scale needs an adapter: name one, or remove the scale", param="adapter_scale")
        return None
    if scale not in (None, 1) and not revision.stored:
        raise InvalidField(
            f"adapter_scale must be 1 for {revision.full_name}@r{revision.number} (found {scale:g}), since it is in "
            "memory only: import it to use others",
            param="adapter_scale",
        )
    return scaled_id(revision.revision_id, scale or 1.0)
