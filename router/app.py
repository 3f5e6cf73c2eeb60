"""The router as an ASGI application: builds its parts and routes paths to endpoints."""

from __future__ import annotations

import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from random import Random
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from adapters.catalog.quota_leases import GaugeAsk, Leases, RateAsk
from adapters.catalog.records import AuditEvent
from adapters.errors import AdapterError
from adapters.scopes import Scope
from cluster.config.discovery import DiscoveryConfig
from cluster.config.quotas import FairQueueConfig, QuotasConfig, TenantQuota
from cluster.config.router import RouterConfig
from cluster.config.schema import RoleChangeMode
from cluster.control.transport import PLAIN, Transport
from cluster.discovery.source import WorkerSource
from process.lifetime import meanwhile
from process.tracing.span import Tracing
from router.api.request_flow import RequestFlow, RouterApp, error_response
from router.api.status_pages import Pages
from router.api.tokenization import TokenizationEndpoint
from router.api.training import TrainerAddress, TrainingEndpoint
from router.console import listeners
from router.console.state import ConsoleState
from router.errors import NotOffered, RouterError, UnknownPath, WrongMethod, answer_of
from router.fleet.capacity import has_capacity
from router.fleet.fleet import Fleet
from router.fleet.fleet_state import FleetState
from router.fleet.role_changes import RoleChanges
from router.fleet.worker_loads import WorkerLoads
from router.generation.backends import Backends
from router.generation.engine_calls import Engines
from router.generation.request import Requests
from router.http import admin_listener
from router.http.connections import ConnectionLimits
from router.identity.access import principal_of
from router.identity.audit import Append, AuditLog
from router.identity.gate import CONSOLE_SCOPE_OF, PUBLIC, SCOPE_OF, Gate, check_scope
from router.identity.gate import Pages as WebPages
from router.management.adapters_http import AdaptersEndpoint
from router.management.adapters_import import ImportEndpoint
from router.management.adapters_workers import WorkersEndpoint
from router.management.management import Management
from router.management.usage_http import UsageEndpoint
from router.metrics import Metrics
from router.placement.placer import Placer
from router.placement.request import PromptMeter
from router.protocol.field_values import DEFAULT_CONTEXT_LENGTH, Limits
from router.protocol.request_body import BodyBudget
from router.protocol.validation import Endpoint
from router.quotas.quotas import Quotas
from router.quotas.sharing import Sharing
from router.quotas.usage import Usage
from router.revisions.adapter_service import AdapterService
from router.revisions.memory_only import MemoryOnlyRevisions

if TYPE_CHECKING:
    from router.identity.oidc import OidcTokens

_CONVERTED = re.compile(r":path\}")  # how a route marks a name that may have slashes
_PATHS = sorted({path for _, path in SCOPE_OF if "{" not in path})
_ADMIN_PATH = re.compile(r"/metrics$|/debug/|/console")
_LEASE_S = 2.0  # for the catalog to answer
_ABORT_S = 2.0  # for requests that the server cancelled to abort their engine calls


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the router has to know of the base model and its engines."""

    name: str
    vocabulary: int
    fingerprint: str
    max_adapter_bytes: int  # of one adapter's weight files
    max_expert_rank: int  # of LoRA on experts that workers accept
    context_length: int = DEFAULT_CONTEXT_LENGTH
    max_running_requests: int = 64  # of an engine


def build_app(
    config: RouterConfig,
    model: ServedModel,
    *,
    adapters: AdapterService,
    metrics: Metrics,
    sources: Sequence[WorkerSource],  # of workers, which may come and go
    discovery: DiscoveryConfig = DiscoveryConfig(),
    admin: socket.socket | None = None,  # bound, for the admin listener; None: there is none
    shares_quotas: bool = False,  # with other routers of this catalog
    role_changes: RoleChangeMode = "off",
    transport: Transport = PLAIN,  # to agents and engines
    max_engine_connections: int = 20_000,
    random: Random | None = None,  # for placement between equal workers
    tracing: Tracing | None = None,
    trainer: TrainerAddress | None = None,  # None: nothing is trained
) -> RouterApp:
    """The whole router. It connects to the workers when the server starts it."""
    loads, requests, bodies = WorkerLoads(), Requests(), BodyBudget(config.limits.in_flight_bytes)
    limits = config.quotas
    if limits is None and role_changes == "auto":  # what waits at engines, workers of a new role cannot take
        limits = QuotasConfig(default=TenantQuota(changes_per_min=None))
    quotas = _quotas(
        limits, metrics, loads, lambda: fleet.state, model.max_running_requests, adapters.directory.present_name
    )
    metrics.in_flight.set_function(lambda: len(requests))
    metrics.body_bytes.set_function(lambda: bodies.room.num_held)
    placer = Placer(loads, random=random, slo=config.slo)
    fleet = Fleet(
        sources,
        loads,
        model=model.name,
        heartbeat_s=config.heartbeat_s,
        connect_timeout_s=config.connect_timeout_s,
        discovery=discovery,
        transport=transport,
        on_leave=placer.policy.prefixes.forget,
    )
    engines = Engines(
        metrics,
        connect_timeout_s=config.connect_timeout_s,
        max_connections=max_engine_connections,
        transport=transport,
    )
    metrics.engine_connections.set_function(lambda: len(engines.connections))
    metrics.gen_ai.model = model.name
    backends = Backends(
        config=config,
        model=model.name,
        fingerprint=model.fingerprint,
        limits=Limits(config.max_choices, model.vocabulary, model.context_length, config.limits),
        fleet=fleet,
        engines=engines,
        placer=placer,
        prompts=PromptMeter(),
        adapters=adapters,
        quotas=quotas,
        usage=Usage(lambda rows: adapters.with_catalog(lambda catalog: catalog.usage.put(rows))),
        requests=requests,
        bodies=bodies,
        audit=AuditLog(_audit_sink(adapters), metrics.audit_lost.inc),
        metrics=metrics,
        tracing=tracing or Tracing(),
    )
    memory_only = MemoryOnlyRevisions(fleet, adapters)
    changes_roles = role_changes in ("auto", "dry-run")
    roles = RoleChanges(fleet, config, metrics, is_dry_run=role_changes == "dry-run", waiting=lambda: quotas.waiting)
    training = TrainingEndpoint(backends, trainer)
    policies = training.models if training.is_offered else None
    console = ConsoleState(backends, requests, role_change=lambda: roles.explanation, policies=policies)
    pages = Pages(backends, None if trainer is None else trainer.status)
    sharing = _sharing(quotas, adapters, metrics) if shares_quotas else None
    tokens = _tokens(config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        admin_pages = (
            nullcontext() if admin is None else admin_listener.serving(admin_app, admin, ConnectionLimits.of(config))
        )
        async with (
            fleet.following(),
            engines.open(),
            adapters.following(backends.audit.configured),
            tokens.following() if tokens else nullcontext(),
            admin_pages,
            backends.audit.running(),
            backends.usage.running(),
            training.open(),
            nullcontext() if sharing is None else sharing.running(),
        ):
            try:
                async with meanwhile(memory_only.run(), *([roles.run()] if changes_roles else ())):
                    yield
            finally:
                bodies.close()
            await requests.wait_until_empty(_ABORT_S)

    flows = {endpoint.value: RequestFlow(endpoint, backends) for endpoint in Endpoint}
    trainer_key = None if trainer is None else trainer.key
    management = Management(backends, memory_only, model.max_adapter_bytes, model.max_expert_rank, trainer_key)
    # An adapter's name may contain slashes, so paths that end in a verb must match before it does.
    management_routes: list[Route] = []
    for endpoint_kind in (UsageEndpoint, ImportEndpoint, WorkersEndpoint, AdaptersEndpoint):
        management_routes += endpoint_kind(management).routes

    console_routes = listeners.client_routes(config, console, model.name)

    async def refuse(request: Request, error: Exception) -> Response:
        backends.audit.denied(request.scope, principal_of(request.scope), error)
        return _error_response(request, error)

    app = Starlette(
        routes=[
            *(Route(path, flow, methods=["POST"]) for path, flow in flows.items()),
            *TokenizationEndpoint(backends).routes,
            *training.routes,
            Route("/v1/responses/{id:path}", _not_stored, methods=["GET", "POST", "DELETE"]),
            *management_routes,
            *pages.routes,
            *console_routes,
        ],
        lifespan=lifespan,
        exception_handlers={**_HANDLERS, RouterError: refuse, AdapterError: refuse},
    )
    public = dict.fromkeys(_operations_of(console_routes), PUBLIC) | CONSOLE_SCOPE_OF
    for route in app.router.routes:
        _guard(route, public)
    gate = Gate(
        config.auth,
        adapters.directory,
        tokens,
        [path for (_, path), scope in public.items() if scope is PUBLIC],
        trainer_key,
    )
    web_pages = WebPages(config.hosts, config.cors_origins, probes=("/health", "/ready"))
    router = RouterApp(app, flows, backends, gate, web_pages)
    admin_routes = Starlette(
        routes=[
            *pages.admin_routes,
            *listeners.admin_routes(config, console, model.name, router),
        ],
        exception_handlers=_HANDLERS,
    )
    app.router.redirect_slashes = admin_routes.router.redirect_slashes = False
    admin_pages_of = WebPages(config.hosts, (), probes=("/health",))

    async def admin_app(scope: Any, receive: Any, send: Any) -> None:
        try:
            admin_pages_of.check(scope)
        except RouterError as error:
            await error_response(error)(scope, receive, send)
            return
        await admin_routes(scope, receive, send)

    return router


def _quotas(
    config: QuotasConfig | None,
    metrics: Metrics,
    loads: WorkerLoads,
    fleet: Callable[[], FleetState],
    max_running_requests: int,
    present_name: Callable[[str], str],
) -> Quotas:
    def has_free_capacity(coming_tokens: float, coming_sequences: float) -> bool:
        return has_capacity(
            fleet(),
            loads.clock(),
            queue_s=FairQueueConfig.queue_s,
            worker_sequences=max_running_requests,
            coming_tokens=coming_tokens,
            coming_sequences=coming_sequences,
        )

    quotas = Quotas(config, metrics, has_free_capacity, present_name=present_name)
    if quotas.queue is not None:
        loads.on_change = quotas.queue.look
    return quotas


def _sharing(quotas: Quotas, adapters: AdapterService, metrics: Metrics) -> Sharing:
    async def lease(member: str, rates: Sequence[RateAsk], gauges: Sequence[GaugeAsk]) -> Leases:
        return await adapters.with_catalog(lambda catalog: catalog.quotas.lease(member, rates, gauges), _LEASE_S)

    async def leave(member: str) -> None:
        await adapters.with_catalog(lambda catalog: catalog.quotas.leave(member), _LEASE_S)

    return Sharing(quotas, lease, leave, metrics)


def _tokens(config: RouterConfig) -> OidcTokens | None:
    if config.auth is None or not config.auth.oidc:
        return None
    from router.identity.oidc import OidcTokens  # heavy, and most routers have no issuer

    return OidcTokens(config.auth.oidc)


def _operations_of(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """Method and path of each operation. HEAD is not counted: it comes with GET."""
    for route in routes:
        assert isinstance(route, Route)
        path = _CONVERTED.sub("}", route.path)
        for method in sorted((route.methods or {"POST"}) - {"HEAD"}):
            yield method, path


def _guard(route: Any, more: Mapping[tuple[str, str], Scope | None]) -> None:
    """Make a route check the caller's scope. Raises KeyError for a route without an entry in the tables of scopes."""
    scope_of = {**SCOPE_OF, **more}
    needed = {method: scope_of[method, path] for method, path in _operations_of([route])}
    if "GET" in needed:
        needed["HEAD"] = needed["GET"]
    endpoint = route.app

    async def check_and_serve(scope: Any, receive: Any, send: Any) -> None:
        check_scope(principal_of(scope), needed[scope["method"]])
        await endpoint(scope, receive, send)

    route.app = check_and_serve


def _audit_sink(adapters: AdapterService) -> Append:
    async def append(events: Sequence[AuditEvent]) -> None:
        await adapters.with_catalog(lambda catalog: catalog.audit.append(events))

    return append


async def _not_stored(request: Request) -> Response:
    raise NotOffered(
        f"{request.url.path[:100]} is not offered: responses are not stored; POST /v1/responses answers at once, and "
        "takes the whole conversation as input"
    )


def _error_response(_: Request, error: Exception) -> Response:
    return error_response(error)


def _routing_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    routing_error: RouterError
    if error.status_code == 405:
        takes = (error.headers or {})["Allow"]
        routing_error = WrongMethod(f"{request.url.path} does not take {request.method}; it takes {takes}")
    else:
        path = request.url.path[:100]
        there = "; docs/api.md has the paths"
        if _ADMIN_PATH.match(path):
            there = ": it is on the router's admin listener"
        elif near := get_close_matches(path, _PATHS, 1):
            there = f"; did you mean {near[0]}?"
        routing_error = UnknownPath(f"there is nothing at {path}{there}")
    answer = answer_of(routing_error)
    return Response(answer.body, answer.status, {**answer.headers, **(error.headers or {})})


_HANDLERS: dict[Any, Any] = {
    HTTPException: _routing_error,
    RouterError: _error_response,
    AdapterError: _error_response,
    Exception: _error_response,
}
