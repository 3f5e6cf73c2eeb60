"""The console's routes on the admin listener and, with `router.console`, on the clients' listener."""

import re
from typing import Any

from starlette.routing import Route

from cluster.config.router import RouterConfig
from router.console.page import FOLDER, page_routes
from router.console.state import ConsoleState
from router.errors import ConsoleRefused

_STATE, _POLICIES = f"{FOLDER}/state", f"{FOLDER}/policies"
# What the page asks of the API for clients. A name has at most one slash.
_CALLS = re.compile(
    r"GET /v1/(models|adapters(/[^/]+){0,2})|POST /v1/((chat/)?completions|adapters((/[^/]+){1,2}/rollback)?)"
    r"|PUT /v1/adapters(/[^/]+){1,2}/aliases/[^/]+"
)


def client_routes(config: RouterConfig, state: ConsoleState, model: str) -> list[Route]:
    """The page at `/`. Its state shows the requests of all tenants, so with `auth` only administrators get it."""
    if not config.console:
        return []
    needs_key = config.auth is not None
    pages = page_routes(
        "/",
        calls="",
        model=model,
        needs_key=needs_key,
        state_needs_key=needs_key,
        is_managed=config.management,
        is_trained=state.is_trained,
    )
    return [*pages, Route(_STATE, state.state), Route(_POLICIES, state.policies)]


def admin_routes(config: RouterConfig, state: ConsoleState, model: str, clients: Any) -> list[Route]:
    """The page at `/console`, and below it the API calls that the page makes.

    `clients`, the clients' ASGI application, answers these calls as on its own listener, with the same keys, scopes,
    quotas and log.
    """
    # Set apart by settings: a listener's address does not say who reaches it.
    is_open_to_others = config.auth is None and config.admin.insecure and not config.insecure

    async def call(scope: Any, receive: Any, send: Any) -> None:
        if is_open_to_others:
            raise ConsoleRefused(
                "the admin listener can be reached from other machines, and the router asks nobody for a key: set "
                "router.auth, or router.admin.host to 127.0.0.1 without router.admin.insecure"
            )
        path = scope["path"].removeprefix(FOLDER)
        if not _CALLS.fullmatch(f"{scope['method']} {path}"):
            raise ConsoleRefused(
                f"the console does not pass on {scope['method']} {path[:80]!r}; send it to the router's port"
            )
        del scope["path_params"]  # in place: a connection refers to its scope
        scope["path"], scope["raw_path"] = path, scope["raw_path"].removeprefix(FOLDER.encode())
        await clients(scope, receive, send)

    pages = page_routes(
        FOLDER,
        calls=FOLDER,
        model=model,
        needs_key=config.auth is not None,
        state_needs_key=False,
        is_managed=config.management,
        is_trained=state.is_trained,
    )
    calls = Route(f"{FOLDER}/v1/{{rest:path}}", _Asgi(call), methods=["GET", "POST", "PUT"])
    return [*pages, Route(_STATE, state.state), Route(_POLICIES, state.policies), calls]


class _Asgi:
    """Wraps an ASGI application in an object, because Starlette would take a function for a request handler."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)
