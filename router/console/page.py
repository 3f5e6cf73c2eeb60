"""The console's static files, read once and served with a Content-Security-Policy."""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE = "console.html"
FOLDER = "/console"
_STATIC = files("router.console").joinpath("static")
_MEDIA_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
ASSETS = tuple(each.name for each in _STATIC.iterdir() if each.name.endswith((".css", ".js", ".svg")))

# Nothing but this router's own files and answers. Trusted types: a script cannot even parse text as HTML.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "cache-control": "no-store",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


def page_routes(
    path: str, *, calls: str, model: str, needs_key: bool, state_needs_key: bool, is_managed: bool, is_trained: bool
) -> list[Route]:
    """Routes for the page at `path` and its files in FOLDER. `calls`: the prefix of `/v1/…` in the page's API calls."""
    values = {
        "calls": calls,
        "model": model,
        "needs-key": str(needs_key).lower(),
        "state-needs-key": str(state_needs_key).lower(),
        "managed": str(is_managed).lower(),
        "trained": str(is_trained).lower(),
    }
    attributes = "".join(f' data-{name}="{_escaped(value)}"' for name, value in values.items())
    page = _content(PAGE).replace(b"<body", f"<body{attributes}".encode(), 1)
    return [_route(path, page, PAGE), *(_route(f"{FOLDER}/{name}", _content(name), name) for name in ASSETS)]


def _route(path: str, content: bytes, name: str) -> Route:
    media_type = _MEDIA_TYPES[name.rpartition(".")[2]]

    async def serve(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, serve)


def _content(name: str) -> bytes:
    return _STATIC.joinpath(name).read_bytes()


def _escaped(value: str) -> str:
    return value.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
