"""The small pages: models, health, readiness, metrics, and where every request is."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.catalog import Catalog
from adapters.errors import AdapterNotFound, InvalidReference
from adapters.revision import Revision
from router.errors import UnknownModel
from router.exchange import Backends
from router.placement import PlacementRequest, lacks_unified_worker, rank_placements
from router.references import reference_in
from router.requests import Requests


class Pages:
    """Everything that answers without asking an engine."""

    def __init__(self, backends: Backends, catalog: Catalog, requests: Requests) -> None:
        self._backends = backends
        self._catalog = catalog
        self._requests = requests
        self._started_at = int(time.time())

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            Route("/debug/requests", self.requests),
        ]

    async def models(self, _: Request) -> Response:
        """The base model and every adapter that can be served."""
        fleet = self._backends.fleet.state
        revisions = [entry.revision for entry in self._catalog.list() if entry.revision is not None]
        usable = [each for each in revisions if not lacks_unified_worker(PlacementRequest.of(each), fleet)]
        return _json({"object": "list", "data": [self._base_card(), *map(self._adapter_card, usable)]})

    async def model(self, request: Request) -> Response:
        """One of them, by any name that a request may use."""
        name = request.path_params["id"]
        reference = reference_in(name, None, self._backends.model)
        if reference is None:
            return _json(self._base_card())
        try:
            revision = self._catalog.resolve(reference)
        except (AdapterNotFound, InvalidReference) as error:
            raise UnknownModel(f"the model {name!r} does not exist: {error}", param="model") from error
        return _json({**self._adapter_card(revision), "id": name})

    async def health(self, _: Request) -> Response:
        """This process answers."""
        return _json({"status": "alive"})

    async def ready(self, _: Request) -> Response:
        """200 when some placement can take a request, else 503; with what each worker waits for."""
        fleet = self._backends.fleet.state
        placements = [str(placement) for placement in rank_placements(PlacementRequest(None), fleet)]
        workers = {
            name: {"role": view.role, "ready": view.is_placeable, "reason": view.why_not_placeable}
            for name, view in fleet.workers.items()
        }
        reason = "" if placements else "no pair of workers is ready and warm, and no unified worker is ready"
        body = {"ready": bool(placements), "reason": reason, "placements": placements, "workers": workers}
        return _json(body, 200 if placements else 503)

    async def metrics(self, _: Request) -> Response:
        for worker, count in self._backends.fleet.state.in_flight.items():
            self._backends.metrics.worker_in_flight.labels(worker).set(count)
        return Response(self._backends.metrics.page(), media_type="text/plain; version=0.0.4")

    async def requests(self, _: Request) -> Response:
        """Where every request in flight is."""
        return _json({"requests": self._requests.described()})

    def _base_card(self) -> dict[str, Any]:
        return self._card(self._backends.model, root=self._backends.model, parent=None)

    def _adapter_card(self, revision: Revision) -> dict[str, Any]:
        return self._card(revision.full_name, root=revision.revision_id, parent=self._backends.model)

    def _card(self, name: str, *, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "prelude",
            "root": root,
            "parent": parent,
        }


def _json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, media_type="application/json")
