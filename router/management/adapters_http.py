"""/v1/adapters: lists and shows adapters, moves their aliases, deletes and restores them. See docs/api.md."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Annotated, Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from adapters.catalog.described import (
    adapter_as_json,
    deletion_as_json,
    details_as_json,
    history_as_json,
    move_as_json,
)
from adapters.catalog.records import AdapterSummary, AliasMove, AliasTarget
from adapters.catalog.sql import SqlCatalog
from adapters.catalog.sql.catalog import MAX_PAGE
from adapters.identity import LATEST, full_name_of, is_revision_id, split_adapter_name
from adapters.scopes import Permission
from router.errors import InvalidField
from router.identity.access import principal_of, viewer_of
from router.identity.audit import note_of
from router.management.management import Management, json_answer
from router.management.request_fields import check_known
from router.protocol.field_values import decoded

_DEFAULT_PAGE = 100
_DEFAULT_MOVES = 20
_Percent = Annotated[int, msgspec.Meta(ge=1, le=100)]
_MAX_WEIGHTS = 4  # that are looked at: a query each; an error shows that there are more than three
_MAX_WITH_WORKERS = 50  # revisions whose workers are named: it takes a walk over the fleet, in the event loop
_NUMBER = re.compile(r"r([1-9][0-9]{0,8})")


class AdaptersEndpoint:
    """The paths that use the catalog only."""

    def __init__(self, management: Management) -> None:
        self._management = management

    @property
    def routes(self) -> list[Route]:
        guarded = self._management.guarded
        one = "/v1/adapters/{name:path}"
        return [
            Route("/v1/adapters", guarded(self.list, None), methods=["GET"]),
            Route(f"{one}/restore", guarded(self.restore, "restore"), methods=["POST"]),
            Route(f"{one}/rollback", guarded(self.rollback, "rollback"), methods=["POST"]),
            Route(f"{one}/aliases/{{alias}}", guarded(self.history, None), methods=["GET"]),
            Route(f"{one}/aliases/{{alias}}", guarded(self.set_alias, "alias"), methods=["PUT"]),
            Route(f"{one}/aliases/{{alias}}", guarded(self.remove_alias, "unalias"), methods=["DELETE"]),
            Route(one, guarded(self.show, None), methods=["GET"]),
            Route(one, guarded(self.delete, "delete"), methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        """A page of adapters, ordered by tenant and name."""
        params = request.query_params
        check_known(params, ("tenant", "prefix", "after", "limit", "deleted"))
        limit = _limit(params.get("limit"))
        after = None if params.get("after") is None else split_adapter_name(params["after"])
        tenant, prefix = (_printable(params, each) for each in ("tenant", "prefix"))
        deleted = _flag(params.get("deleted"))
        viewer = viewer_of(principal_of(request.scope), Permission.READ)
        if deleted and viewer is not None:  # a grant ends with its adapter
            viewer = viewer[0], None

        def page(catalog: SqlCatalog) -> tuple[Sequence[AdapterSummary], bool]:
            found = catalog.list(tenant, prefix, after, limit, deleted=deleted, viewer=viewer)
            if len(found) < limit:
                return found, False
            last = found[-1].tenant, found[-1].name
            return found, bool(catalog.list(tenant, prefix, last, 1, deleted=deleted, viewer=viewer))

        found, has_more = await self._management.ask(request, page)
        body = {"object": "list", "data": [adapter_as_json(each) for each in found], "has_more": has_more}
        return json_answer({**body, "last_id": found[-1].full_name if found else None})

    async def show(self, request: Request) -> Response:
        """One adapter: aliases, newest revisions and, for the first of these, the workers that have them."""
        check_known(request.query_params, ("limit",))
        tenant, name = self._management.readable(request)
        limit = _limit(request.query_params.get("limit"))
        details = await self._management.ask(request, lambda catalog: catalog.show(tenant, name, limit))
        fleet = self._management.backends.fleet
        body = details_as_json(details)
        holders = fleet.holders_of([each.revision_id for each in details.revisions[:_MAX_WITH_WORKERS]])
        revisions = [{**each, "workers": held} for each, held in zip_longest(body["revisions"], holders)]
        return json_answer({**body, "revisions": revisions})

    async def delete(self, request: Request) -> Response:
        """Delete an adapter. It can be restored until garbage collection."""
        await self._management.fields(request)
        tenant, name = self._management.changeable(request)
        await self._change(request, tenant, lambda catalog: catalog.delete(tenant, name))
        return json_answer(deletion_as_json(full_name_of(tenant, name), deleted=True))

    async def restore(self, request: Request) -> Response:
        """Undo a deletion."""
        await self._management.fields(request)
        tenant, name = self._management.changeable(request)
        quota = self._management.backends.quotas.catalog_quota(tenant)
        await self._change(request, tenant, lambda catalog: catalog.restore(tenant, name, quota=quota))
        return json_answer(deletion_as_json(full_name_of(tenant, name), deleted=False))

    async def history(self, request: Request) -> Response:
        """An alias's moves, newest first."""
        check_known(request.query_params, ("limit",))
        tenant, name = self._management.readable(request)
        alias, limit = request.path_params["alias"], _limit(request.query_params.get("limit"), _DEFAULT_MOVES)
        moves = await self._management.ask(
            request, lambda catalog: catalog.alias_history(tenant, name, alias, limit + 1)
        )
        return json_answer(history_as_json(full_name_of(tenant, name), moves, limit))

    async def set_alias(self, request: Request) -> Response:
        """Point an alias at a revision, or by `weights` at two; with `expected`, only if it points there now."""
        fields = await self._management.fields(request, "revision", "weights", "expected")
        tenant, name = self._management.changeable(request)
        alias, by = request.path_params["alias"], principal_of(request.scope).name
        revision = decoded(fields, "revision", str, what := "'r' and a number, or a revision id 'sha256:…'")
        weights = decoded(fields, "weights", dict[str, _Percent], 'percent by revision: {"r7": 95, "r8": 5}')
        given = revision if weights is None else weights
        if given is None or (revision is not None and weights is not None):
            raise InvalidField(f"revision ({what}) or weights (of two) is required, and not both", param="revision")
        what = f"{what}, weights of two, or null where there is no such alias"
        expected = decoded(fields, "expected", str | dict[str, _Percent] | None, what)

        def target(catalog: SqlCatalog, param: str, given: str | dict[str, int]) -> AliasTarget:
            if isinstance(given, str):
                return AliasTarget(_number(catalog, tenant, name, param, given))
            few = list(given.items())[:_MAX_WEIGHTS]
            try:
                return AliasTarget.split([(_number(catalog, tenant, name, param, each), n) for each, n in few])
            except ValueError as error:
                raise InvalidField(f"{param}: {error}", param=param) from None

        def move(catalog: SqlCatalog) -> AliasMove:
            to, at = target(catalog, "revision" if weights is None else "weights", given), None
            if "expected" in fields:
                at = AliasTarget(0) if expected is None else target(catalog, "expected", expected)
            quota = self._management.backends.quotas.catalog_quota(tenant)
            return catalog.set_alias(tenant, name, alias, to, expected=at, by=by, quota=quota)

        return self._moved(request, full_name_of(tenant, name), await self._change(request, tenant, move))

    async def remove_alias(self, request: Request) -> Response:
        """Remove an alias. A revision in memory only goes with its last one: workers may let go of it at once."""
        await self._management.fields(request)
        tenant, name = self._management.changeable(request)
        alias, full_name = request.path_params["alias"], full_name_of(tenant, name)
        note_of(request.scope).object = f"{full_name}@{alias}"
        gone = await self._management.change(request, tenant, lambda catalog: catalog.remove_alias(tenant, name, alias))
        await self._management.changed(frozenset())  # `gone` is all that workers may let go of
        if gone is not None:
            await self._management.memory_only.forget(gone)
        return json_answer({"object": "adapter.alias", "name": full_name, "alias": alias, "deleted": True})

    async def rollback(self, request: Request) -> Response:
        """Point an alias at its previous revision."""
        fields = await self._management.fields(request, "alias")
        tenant, name = self._management.changeable(request)
        alias, by = decoded(fields, "alias", str | None, "an alias") or LATEST, principal_of(request.scope).name
        quota = self._management.backends.quotas.catalog_quota(tenant)
        move = await self._change(
            request, tenant, lambda catalog: catalog.rollback(tenant, name, alias, by=by, quota=quota)
        )
        return self._moved(request, full_name_of(tenant, name), move)

    def _moved(self, request: Request, full_name: str, move: AliasMove) -> Response:
        note = note_of(request.scope)
        note.object = f"{full_name}@{move.alias}"
        note.old = None if move.origin is None else str(move.origin)
        note.new = str(move.target)
        return json_answer(move_as_json(full_name, move))

    async def _change(self, request: Request, tenant: str, change: Any) -> Any:
        result = await self._management.change(request, tenant, change)
        await self._management.changed()
        return result


def _number(catalog: SqlCatalog, tenant: str, name: str, param: str, text: str) -> int:
    if number := _NUMBER.fullmatch(text):
        return int(number[1])
    if not is_revision_id(text):
        raise InvalidField(
            f"{param} must be 'r' and a number from 1, or 'sha256:' and 64 lower-case hex digits (found {text[:80]!r})",
            param=param,
        )
    return catalog.resolve(f"{full_name_of(tenant, name)}@{text}").number


def _limit(text: str | None, default: int = _DEFAULT_PAGE) -> int:
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 1 <= int(text) <= MAX_PAGE):
        raise InvalidField(f"limit must be an integer from 1 to {MAX_PAGE} (found {text[:40]!r})", param="limit")
    return int(text)


def _printable(params: Mapping[str, str], param: str) -> str | None:
    """A text for the catalog. Not every database takes a NUL."""
    text = params.get(param)
    if text is not None and not text.isprintable():
        raise InvalidField(f"{param} must have printable characters only (found {text[:80]!r})", param=param)
    return text


def _flag(text: str | None) -> bool:
    if text not in (None, "true", "false"):
        raise InvalidField(f"deleted must be true or false (found {text[:40]!r})", param="deleted")
    return text == "true"
