"""POST /v1/adapters/{name}/prewarm and …/evict: operators' control over residency."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.catalog.records import AdapterRevision
from router.fleet.worker_link import WorkerLink
from router.identity.audit import note_of
from router.management.management import Handler, Management, json_answer
from router.management.worker_calls import on_each
from router.metrics import AdapterChange
from router.protocol.field_values import decoded
from router.protocol.request_body import Fields

_FIELDS = ("workers", "reference")


class WorkersEndpoint:
    """The paths that change residency. All workers are called concurrently; failures are reported by worker."""

    def __init__(self, management: Management) -> None:
        self._management = management

    @property
    def routes(self) -> list[Route]:
        handlers: dict[AdapterChange, Handler] = {"prewarm": self.prewarm, "evict": self.evict}
        return [
            Route(f"/v1/adapters/{{name:path}}/{verb}", self._management.guarded(handler, verb), methods=["POST"])
            for verb, handler in handlers.items()
        ]

    async def prewarm(self, request: Request) -> Response:
        """Make a revision resident before its first request."""
        fields, timeout_s = await self._management.fields(request, *_FIELDS), self._timeout_s
        return await self._on_each(
            request,
            fields,
            lambda link, revision: link.ensure_adapter(
                revision.revision_id, timeout_s, prewarm=True, tenant=revision.tenant
            ),
        )

    async def evict(self, request: Request) -> Response:
        """Remove a revision from host memory and disk, unless it is in use."""
        fields, timeout_s = await self._management.fields(request, *_FIELDS), self._timeout_s
        return await self._on_each(
            request, fields, lambda link, revision: link.evict_adapter(revision.revision_id, True, timeout_s)
        )

    @property
    def _timeout_s(self) -> float:
        return self._management.backends.config.adapter_timeout_s

    async def _on_each(
        self, request: Request, fields: Fields, call: Callable[[WorkerLink, AdapterRevision], Awaitable[object]]
    ) -> Response:
        names = decoded(fields, "workers", list[str] | None, "a list of workers' names, or null for all")
        pin = decoded(fields, "reference", str | None, "an alias, 'r' and a number, or a revision id")
        revision = await self._management.resolved(request, self._management.changeable(request), pin)
        note_of(request.scope).new = f"r{revision.number} {revision.revision_id}"
        workers = [view.name for view in self._management.holders(names, revision.manifest.positions)]
        fleet = self._management.backends.fleet
        outcomes = await on_each(workers, lambda worker: call(fleet.link(worker), revision))
        if outcomes.all_failed:
            raise next(iter(outcomes.errors.values()))
        answer = {"name": revision.full_name, "number": revision.number, "revision": revision.revision_id}
        return json_answer({**answer, "workers": outcomes.described()})
