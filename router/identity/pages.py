"""Which web pages may call a listener.

Where nobody needs a key, a page of any site could call the router from its visitor's browser: a form or an upload needs
no preflight, and a name that the page's owner points at this machine makes the answers readable, too (DNS rebinding).
"""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from router.errors import ForeignPage

Headers = list[tuple[bytes, bytes]]

_EXPOSED = b"x-request-id, x-prelude-adapter, x-prelude-revision, x-prelude-trained-positions, retry-after"
_PREFLIGHT_S = b"600"
_MAX_CALLED = 1000  # names that are remembered as its own; there are few, unless somebody makes them up


class Pages:
    """Tells the pages of a listener's own, and of `origins`, from those of other sites."""

    def __init__(self, hosts: Collection[str], origins: Collection[str], probes: Collection[str] = ()) -> None:
        self._hosts = frozenset(hosts)
        self._origins = frozenset(origin.encode() for origin in origins)
        self._probes = frozenset(probes)  # paths that say nothing, for load balancers that call by any name
        self._called: set[bytes] = set()  # by these names of its own
        self.has_origins = bool(origins)

    def check(self, scope: Any) -> None:
        """Raise ForeignPage for a call that a page of another site may have made. For listeners without keys."""
        if scope["path"] in self._probes:
            return
        given = dict(scope["headers"])
        host, origin = given.get(b"host"), given.get(b"origin")
        if host is not None and host not in self._called and not self._is_own(host):  # no browser leaves it out
            raise ForeignPage(
                f"this router asks for no key, and was called {_shown(host)}: use an IP address or localhost, or name "
                "the host in router.hosts"
            )
        if origin in self._origins:
            return
        if origin is not None and origin.partition(b"://")[2] != host:
            raise ForeignPage(
                f"this router asks for no key, and the page that made this call is of {_shown(origin)}: name that in "
                "router.cors_origins"
            )
        is_link = scope["method"] == "GET" and given.get(b"sec-fetch-mode") == b"navigate"
        if origin is None and not is_link and given.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
            raise ForeignPage("this router asks for no key, and a page of another site made this call")

    def answer_headers(self, scope: Any) -> Headers:
        """The headers with which a browser lets a page of `origins` read the answer."""
        if not self._origins:
            return []
        origin = dict(scope["headers"]).get(b"origin")
        vary = (b"vary", b"origin")
        if origin not in self._origins:
            return [vary]
        return [vary, (b"access-control-allow-origin", origin), (b"access-control-expose-headers", _EXPOSED)]

    def preflight(self, scope: Any) -> Headers | None:
        """The headers that answer a browser's question whether a page of `origins` may call; None: it asks no such."""
        if scope["method"] != "OPTIONS" or not self._origins:
            return None
        given = dict(scope["headers"])
        if given.get(b"origin") not in self._origins or b"access-control-request-method" not in given:
            return None
        return [
            (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, DELETE"),
            (b"access-control-allow-headers", given.get(b"access-control-request-headers", b"authorization")),
            (b"access-control-max-age", _PREFLIGHT_S),
        ]

    def _is_own(self, host: bytes) -> bool:
        """A name that a page's owner could point elsewhere is none of ours unless it is configured."""
        try:
            name = (urlsplit(f"//{host.decode('latin-1')}").hostname or "").rstrip(".")
            if name != "localhost" and name not in self._hosts:
                ip_address(name)
        except ValueError:
            return False
        if len(self._called) < _MAX_CALLED:
            self._called.add(host)
        return True


def _shown(value: bytes) -> str:
    return repr(value[:80].decode("latin-1"))
