"""The status pages: models, health, readiness, metrics, and the requests in flight."""

import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from adapters.catalog.records import AdapterRevision, AdapterSummary
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.catalog import MAX_PAGE
from adapters.errors import AdapterNotFound, CatalogUnavailable, InvalidReference
from adapters.identity import split_adapter_name
from adapters.scopes import Permission
from cluster.config.workers import ENGINE_METRICS_PATH
from router.errors import InvalidField, UnknownModel
from router.fleet.saturation import ROLES, show_saturation
from router.generation.backends import Backends
from router.identity.access import principal_of, viewer_of
from router.metrics import WORKER_STATES, Metrics
from router.placement.placement import placements
from router.placement.request import PlacementRequest
from router.placement.unplaceable import lacks_unified_worker
from router.revisions.adapter_service import reference_in

_OPEN_METRICS = "application/openmetrics-text"
_MAX_PLACEMENTS = 100  # shown on the readiness page


class Pages:
    """The pages that need no engine."""

    def __init__(self, backends: Backends, trainer: str | None = None) -> None:
        """`trainer`: host:port of its metrics."""
        self._backends, self._trainers = backends, [] if trainer is None else [trainer]
        self._adapters = backends.adapters
        self._requests = backends.requests
        self._started_at = int(time.time())

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
        ]

    @property
    def admin_routes(self) -> list[Route]:
        """The pages of the admin listener."""
        return [
            Route("/health", self.health),
            Route("/ready", self.ready_in_detail),
            Route("/metrics", self.metrics),
            Route("/metrics/targets", self.targets),
            Route("/debug/requests", self.requests),
        ]

    async def models(self, request: Request) -> Response:
        """The base model and a page of at most 1,000 servable adapters, ordered by tenant and name.

        If `has_more` is true, `?after=` the `last_id` gives the next page.
        """
        after = request.query_params.get("after")
        try:
            key = None if after in (None, self._backends.model) else split_adapter_name(str(after))
        except ValueError as error:
            raise InvalidField(f"after: {error}", param="after") from None

        principal = principal_of(request.scope)
        viewer = viewer_of(principal, Permission.INFER)

        def page_of(catalog: SqlCatalog) -> tuple[Sequence[AdapterSummary], bool]:
            page = catalog.list(after=key, limit=MAX_PAGE, viewer=viewer)
            if len(page) < MAX_PAGE:
                return page, False
            last = page[-1].tenant, page[-1].name
            return page, bool(catalog.list(after=last, limit=1, viewer=viewer))

        try:
            page, has_more = await self._adapters.with_catalog(page_of, principal=principal)
        except CatalogUnavailable as error:  # its message names the catalog's address
            raise CatalogUnavailable("the catalog does not answer, so its adapters cannot be listed") from error
        fleet = self._backends.fleet.state
        usable = [
            each for each in page if not lacks_unified_worker(PlacementRequest(each.revision_id, each.positions), fleet)
        ]
        cards = [self._adapter_card(each) for each in usable]
        last_id = page[-1].full_name if page else self._backends.model
        data = [self._base_card(), *cards] if key is None else cards
        return JSONResponse({"object": "list", "data": data, "has_more": has_more, "last_id": last_id})

    async def model(self, request: Request) -> Response:
        """One model, by any name that a request may use."""
        name = request.path_params["id"]
        reference = reference_in(name, None, self._backends.model)
        if reference is None:
            return JSONResponse(self._base_card())
        try:
            revision = await self._adapters.resolve(reference, principal_of(request.scope))
        except (AdapterNotFound, InvalidReference) as error:
            raise UnknownModel(f"the model {name!r} does not exist: {error}", param="model") from error
        card = {**self._adapter_card(revision), "id": name}
        return JSONResponse(card if revision.split is None else {**card, "weights": revision.split.target.weights})

    async def health(self, _: Request) -> Response:
        """200 while this process runs."""
        return JSONResponse({"status": "alive"})

    async def ready(self, _: Request) -> Response:
        """200 if some placement can take a request, else 503 with a short reason. Names no worker."""
        body = self._readiness()
        return JSONResponse({"ready": body["ready"], "reason": body["reason"]}, 200 if body["ready"] else 503)

    async def ready_in_detail(self, _: Request) -> Response:
        """As `ready`, with the usable placements, and the reason for each worker that gets no requests."""
        body = self._readiness()
        return JSONResponse(body, 200 if body["ready"] else 503)

    async def metrics(self, request: Request) -> Response:
        """This router's metrics. While it traces, as OpenMetrics to those who take that: it has room for exemplars."""
        metrics = self._backends.metrics
        self._bring_up_to_date(metrics)
        if self._backends.tracing.is_on and _OPEN_METRICS in request.headers.get("accept", ""):
            return Response(metrics.open_metrics_page(), media_type=f"{_OPEN_METRICS}; version=1.0.0; charset=utf-8")
        return Response(metrics.page(), media_type="text/plain; version=0.0.4")

    async def targets(self, request: Request) -> Response:
        """What to scrape, as Prometheus's HTTP service discovery reads it: this router, agents, engines by them."""
        agents = [view.metrics_address for view in self._backends.fleet.state.workers.values() if view.metrics_address]
        return JSONResponse(
            [
                {"targets": [request.url.netloc], "labels": {"job": "prelude-router"}},
                {"targets": agents, "labels": {"job": "prelude-workers"}},
                {"targets": self._trainers, "labels": {"job": "prelude-trainer"}},
                {"targets": agents, "labels": {"job": "prelude-engines", "__metrics_path__": ENGINE_METRICS_PATH}},
            ]
        )

    async def requests(self, _: Request) -> Response:
        """Every request in flight, with its phase."""
        return JSONResponse({"requests": self._requests.described()})

    def _readiness(self) -> dict[str, Any]:
        fleet = self._backends.fleet.state
        ready = [str(placement) for placement in islice(placements(PlacementRequest(None), fleet), _MAX_PLACEMENTS)]
        workers = {
            name: {"role": view.role, "ready": view.is_placeable, "reason": view.why_not_placeable}
            for name, view in fleet.workers.items()
        }
        reason = "" if ready else "no pair of workers is ready and warm, and no unified worker is ready"
        if not self._adapters.has_opened:  # another router may have it; this one would refuse every adapter
            reason = "the catalog or the adapter store has not been reachable since this router started"
        return {"ready": not reason, "reason": reason, "placements": ready, "workers": workers}

    def _bring_up_to_date(self, metrics: Metrics) -> None:
        """Set what is counted at a scrape."""
        fleet = self._backends.fleet.state
        metrics.worker_in_flight.clear()  # of workers that have left
        for worker, load in fleet.loads.items():
            metrics.worker_in_flight.labels(worker).set(load.num_sequences)
        metrics.set_workers(
            {(role, state): 0 for role in ROLES for state in WORKER_STATES}
            | Counter((view.role, view.condition) for view in fleet.workers.values())
        )
        show_saturation(fleet, metrics, self._backends.placer.prefill_demand, self._backends.quotas.waiting)

    def _base_card(self) -> dict[str, Any]:
        return self._card(self._backends.model, self._started_at, root=self._backends.model, parent=None)

    def _adapter_card(self, adapter: AdapterRevision | AdapterSummary) -> dict[str, Any]:
        created_at = int(adapter.created_at.timestamp())
        card = self._card(adapter.full_name, created_at, root=adapter.revision_id, parent=self._backends.model)
        content = adapter.manifest if isinstance(adapter, AdapterRevision) else adapter
        return {**card, "positions": content.positions, "trained_positions": content.trained_positions}

    def _card(self, name: str, created_at: int, *, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created_at,
            "owned_by": "prelude",
            "root": root,
            "parent": parent,
        }
