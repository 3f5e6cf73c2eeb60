"""Shared by all management handlers: the guard, their context, and the resolution of names."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Set
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from hmac import compare_digest
from typing import TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from adapters.catalog.records import AdapterRevision
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.rights import Right
from adapters.errors import AdapterError, CatalogUnavailable, RightWithdrawn
from adapters.identity import full_name_of, split_adapter_name
from adapters.scopes import Permission, Scope
from router.errors import (
    ManagementOff,
    NoWorkerAvailable,
    RouterError,
    Stopping,
    UnknownWorker,
)
from router.fleet.fleet_state import WorkerView
from router.generation.backends import Backends
from router.identity.access import check_access, principal_of
from router.identity.audit import begin_note, note_of
from router.management.request_fields import check_known
from router.metrics import AdapterChange, ChangeResult
from router.protocol.request_body import ClientGone, Fields, read_body, split
from router.revisions.memory_only import MemoryOnlyRevisions
from training.service.identity import TRAINER_HEADER

_MAX_BODY_BYTES = 64 * 1024
_CLIENT_LEFT = 499
_BEGUN_KEY = "prelude.begun"  # in the ASGI scope

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
AdapterKey = tuple[str, str]  # tenant and name


def json_answer(body: object, status: int = 200) -> Response:
    """As Starlette's JSONResponse, with times."""
    return Response(msgspec.json.encode(body), status, media_type="application/json")


@dataclass(frozen=True, slots=True)
class Management:
    """The context of every handler."""

    backends: Backends
    memory_only: MemoryOnlyRevisions
    max_adapter_bytes: int  # of one adapter's weight files
    max_expert_rank: int  # of LoRA on experts that workers accept
    trainer_key: str | None = None

    def guarded(self, handler: Handler, change: AdapterChange | None) -> Handler:
        """Wrap a handler: refuse requests unread if management is off, and count them under `change`.

        `change` is None for a handler that changes nothing.
        """

        async def guard(request: Request) -> Response:
            try:
                async with self._recorded(request, change) if change is not None else nullcontext():
                    if change is not None:
                        await self._begin(request)
                    if not self.backends.config.management:
                        raise ManagementOff(
                            "this router does not manage adapters; set router.management to true in cluster.yaml, "
                            "where only those reach the router who may"
                        )
                    return await handler(request)
            except RightWithdrawn:
                await self.backends.adapters.refresh()  # so that whoever may still make the change can do so at once
                raise
            except ClientGone:
                return Response(status_code=_CLIENT_LEFT)
            except asyncio.CancelledError:  # by the server, at the drain timeout
                raise Stopping("the router is stopping") from None

        return guard

    @asynccontextmanager
    async def _recorded(self, request: Request, change: AdapterChange) -> AsyncIterator[None]:
        """Count a change and write it to the audit log, however the block ends."""
        begin_note(request.scope)
        failure: BaseException | None = None
        result: ChangeResult = "done"
        try:
            yield
        except BaseException as error:  # also when the client has left, or the server cancels the request
            failure, result = error, "failed"
            if isinstance(error, ClientGone):
                result = "left"
            elif isinstance(error, (RouterError, AdapterError)) and error.http_status < 500:
                result = "refused"
            raise
        finally:
            self.backends.metrics.adapter_changes.labels(change, result).inc()
            await self.backends.audit.changed(request.scope, principal_of(request.scope), f"adapter.{change}", failure)

    async def _begin(self, request: Request) -> None:
        """Note by which tenants' generations a change begins: it is refused if it ends in another one."""
        directory = self.backends.adapters.directory
        if not directory.is_loaded:
            await self.backends.adapters.refresh()
        if directory.is_loaded:
            request.scope[_BEGUN_KEY] = directory.generations

    async def changed(self, only: Set[str] | None = None) -> None:
        """Apply a catalog change to this router's cached names and to the workers' memory-only pins.

        `only`: the revisions whose aliases have changed; None: any.
        """
        await self.backends.adapters.refresh()
        await self.memory_only.reconcile(only)

    async def ask(self, request: Request, work: Callable[[SqlCatalog], T]) -> T:
        """Run `work` on the catalog in a thread, in the turn of the caller's tenant. Raises as `with_catalog`."""
        return await self.backends.adapters.with_catalog(work, principal=principal_of(request.scope))

    async def change(self, request: Request, tenant: str, work: Callable[[SqlCatalog], T]) -> T:
        """As `ask`, for changes of a tenant's adapter: they raise RightWithdrawn if the caller's right has ended."""
        right = self.right(request, tenant)
        return await self.backends.adapters.with_catalog(work, principal=principal_of(request.scope), right=right)

    def right(self, request: Request, tenant: str) -> Right:
        """The caller's right to change a tenant's adapters, as of when the request began. Raises CatalogUnavailable."""
        if (generations := request.scope.get(_BEGUN_KEY)) is None:
            raise CatalogUnavailable("the catalog has not been read yet; try again")
        principal = principal_of(request.scope)
        scope = Scope.ADMIN if principal.crosses_tenants else Scope.ADAPTERS_WRITE
        return Right((principal.tenant, tenant), generations, principal.key_id, scope, principal.expires_at)

    def is_from_trainer(self, request: Request) -> bool:
        """Whether the files of an upload are the trainer's, which has packed them; the principal is its client."""
        given = request.headers.get(TRAINER_HEADER, "").encode("latin-1")
        return self.trainer_key is not None and compare_digest(given, self.trainer_key.encode("latin-1"))

    async def fields(self, request: Request, *known: str) -> Fields:
        """The fields of a JSON body, none without a body. Raises RequestError for an unknown one."""
        headers = dict(request.scope["headers"])
        if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
            return {}
        config = self.backends.config
        body = await read_body(headers, request.receive, max_bytes=_MAX_BODY_BYTES, timeout_s=config.body_timeout_s)
        fields = split(body)
        check_known(fields, known)
        return fields

    def readable(self, request: Request, name: str | None = None) -> AdapterKey:
        """The adapter of the path, or `name`, which the caller may see. Raises InvalidReference and AccessDenied."""
        return self._checked(request, name, Permission.READ)

    def changeable(self, request: Request, name: str | None = None) -> AdapterKey:
        """The adapter of the path, or `name`, which the caller may change: every change begins here, and is counted.

        Raises InvalidReference, AccessDenied and QuotaExceeded.
        """
        key = self._checked(request, name, None)
        self.backends.quotas.take_change(key[0])
        return key

    def _checked(self, request: Request, name: str | None, permission: Permission | None) -> AdapterKey:
        key = split_adapter_name(request.path_params["name"] if name is None else name)
        note_of(request.scope).object = full_name_of(*key)
        check_access(self.backends.adapters.directory, principal_of(request.scope), *key, permission)
        return key

    async def resolved(self, request: Request, key: AdapterKey, pin: str | None) -> AdapterRevision:
        """The revision that `pin` selects: an alias, r7 or sha256:…; None for the latest."""
        reference = full_name_of(*key) if pin is None else f"{full_name_of(*key)}@{pin}"
        return await self.ask(request, lambda catalog: catalog.resolve(reference))

    def holders(self, names: Collection[str] | None, positions: str) -> list[WorkerView]:
        """The named workers, or all connected ones that can apply an adapter with these positions.

        Raises UnknownWorker for an unknown name, and NoWorkerAvailable if no worker is connected.
        """
        fleet = self.backends.fleet.state.workers
        roles = ("unified",) if positions == "all" else ("prefill", "unified")
        if names is None:
            if not (found := [view for view in fleet.values() if view.role in roles and view.is_connected]):
                raise NoWorkerAvailable("no worker that can hold this adapter is connected; try again soon")
            return found
        for name in names:
            if name not in fleet or fleet[name].role not in roles:
                fitting = ", ".join(sorted(view.name for view in fleet.values() if view.role in roles)) or "none"
                raise UnknownWorker(
                    f"workers: {name!r} is no worker that can hold this adapter; those are {fitting}", param="workers"
                )
        return [fleet[name] for name in dict.fromkeys(names)]
