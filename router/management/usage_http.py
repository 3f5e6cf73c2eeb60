"""/v1/usage: tokens by tenant, key and adapter, for billing. See docs/quotas.md."""

from datetime import UTC, datetime

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.catalog.usage import UsageQuery
from adapters.errors import CatalogUnavailable
from router.identity.access import principal_of
from router.management.management import Management, json_answer
from router.management.request_fields import check_known


class UsageEndpoint:
    """It changes nothing, so `router.management` may be off."""

    def __init__(self, management: Management) -> None:
        self._management = management

    @property
    def routes(self) -> list[Route]:
        return [Route("/v1/usage", self.show, methods=["GET"])]

    async def show(self, request: Request) -> Response:
        """Sums over whole hours: of all tenants for an administrator, else of the caller's own."""
        check_known(request.query_params, ("from", "to", "group_by", "tenant"))
        query = UsageQuery.parse(request.query_params, datetime.now(UTC), self._viewer(request))
        sums = await self._management.ask(request, lambda catalog: catalog.usage.sums(query))
        return json_answer({"object": "usage", **query.described, "data": sums})

    def _viewer(self, request: Request) -> str | None:
        principal, directory = principal_of(request.scope), self._management.backends.adapters.directory
        if principal.crosses_tenants:
            return None
        if not directory.is_loaded:  # it may be another tenant of that name that was deleted
            raise CatalogUnavailable("the catalog has not been read yet; try again")
        return directory.lasting_name(principal)
