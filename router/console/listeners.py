"""The console's routes on the admin listener and, with `router.console`, on the clients' listener."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cluster.config.fields import is_loopback
from cluster.config.router import RouterConfig
from router.console.page import FOLDER, page_routes
from router.console.state import ConsoleState
from router.errors import ConsoleRefused

_STATE = f"{FOLDER}/state"
# What the page asks of the API for clients. It changes nothing, and exports nothing: a name has at most one slash.
_CALLS = re.compile(r"GET /v1/(models|adapters(/[^/]+){0,2})|POST /v1/(chat/)?completions")
_EXPORT = "/export"


def client_routes(config: RouterConfig, state: ConsoleState, model: str) -> list[Route]:
    """The page at `/`. Its state shows the requests of all tenants, so with `auth` only administrators get it."""
    if not config.console:
        return []
    needs_key = config.auth is not None
    pages = page_routes(
        "/", calls="", model=model, needs_key=needs_key, state_needs_key=needs_key, is_managed=config.management
    )
    return [*pages, _state_route(_Guard(config, config.host), state)]


def admin_routes(config: RouterConfig, state: ConsoleState, model: str, clients: Any) -> list[Route]:
    """The page at `/console`, and below it the API calls that the page makes.

    `clients`, the clients' ASGI application, answers these calls as on its own listener, with the same keys, scopes,
    quotas and log.
    """
    guard = _Guard(config, config.admin.host)

    async def call(scope: Any, receive: Any, send: Any) -> None:
        guard.check_call(Headers(scope=scope))
        path = scope["path"].removeprefix(FOLDER)
        if not _CALLS.fullmatch(f"{scope['method']} {path}") or path.endswith(_EXPORT):
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
    )
    calls = Route(f"{FOLDER}/v1/{{rest:path}}", _Asgi(call), methods=["GET", "POST"])
    return [*pages, _state_route(guard, state), calls]


def _state_route(guard: _Guard, state: ConsoleState) -> Route:
    async def guarded(request: Request) -> Response:
        guard.check_host(request.headers)
        return await state.state(request)

    return Route(_STATE, guarded)


class _Asgi:
    """Wraps an ASGI application in an object, because Starlette would take a function for a request handler."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._app(scope, receive, send)


class _Guard:
    """Rejects calls made by pages of other sites. Without keys, a browser could send them on the user's behalf."""

    def __init__(self, config: RouterConfig, listens_at: str) -> None:
        self._asks_for_keys = config.auth is not None
        self._is_local = is_loopback(listens_at)
        self._is_insecure = config.insecure

    def check_host(self, headers: Headers) -> None:
        """Raise ConsoleRefused for a host name that a foreign site may have pointed at this machine."""
        host = _split(f"//{headers.get('host', '')}").hostname or ""
        if self._is_local and not self._asks_for_keys and not is_loopback(host):
            raise ConsoleRefused(
                f"the console is for this machine, and was called {host[:80]!r}; open it at 127.0.0.1 or localhost"
            )

    def check_call(self, headers: Headers) -> None:
        """As `check_host`; also for calls by pages of another site, and for calls from other machines without a key."""
        self.check_host(headers)
        origin = headers.get("origin")
        if origin is not None and _split(origin).netloc != headers.get("host"):
            raise ConsoleRefused(f"the page that made this call is of {origin[:80]!r}, not of this router")
        if not (self._asks_for_keys or self._is_local or self._is_insecure):
            raise ConsoleRefused(
                "the admin listener can be reached from other machines, and the router asks nobody for a key: set "
                "router.auth, or router.admin.host to 127.0.0.1"
            )


def _split(url: str) -> SplitResult:
    """Raise ConsoleRefused for a malformed URL such as `//[`, which no browser sends."""
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConsoleRefused(f"a header of this call has {url[:80]!r}, which is no address ({error})") from error
