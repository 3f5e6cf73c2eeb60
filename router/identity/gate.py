"""Authenticates every request before it is routed, by its headers alone, and has the scope that each route needs.

Also refuses requests of other sites' pages, and answers those of pages that `router.cors_origins` allows.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from hmac import compare_digest
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from adapters.catalog.api_keys import PREFIX
from adapters.identity import is_tenant_name
from adapters.scopes import Scope
from cluster.config.router import AuthConfig
from router.errors import CredentialInQuery, Forbidden, ForeignPage, IdentityUnavailable, Unauthenticated
from router.identity.access import ANYBODY, NOBODY, Directory, Principal
from training.service.identity import SAMPLER_ALIAS, TENANT_HEADER

if TYPE_CHECKING:
    from router.identity.oidc import OidcTokens  # heavy

PUBLIC = None  # no key is asked for

TRAINING = "/api/v1/"  # how paths of the trainer begin, whose clients send their key in another header

_ONE = "/v1/adapters/{name}"
_INFER, _READ, _WRITE = Scope.INFER, Scope.ADAPTERS_READ, Scope.ADAPTERS_WRITE

SCOPE_OF: dict[tuple[str, str], Scope | None] = {
    ("POST", "/v1/chat/completions"): _INFER,
    ("POST", "/v1/completions"): _INFER,
    ("POST", "/v1/responses"): _INFER,
    ("POST", "/v1/embeddings"): _INFER,
    ("POST", "/v1/tokenize"): _INFER,
    ("POST", "/tokenize"): _INFER,
    ("POST", "/v1/detokenize"): _INFER,
    ("POST", "/detokenize"): _INFER,
    **{(method, "/v1/responses/{id}"): _INFER for method in ("GET", "POST", "DELETE")},
    ("GET", "/v1/models"): _INFER,
    ("GET", "/v1/models/{id}"): _INFER,
    ("GET", "/health"): PUBLIC,
    ("GET", "/ready"): PUBLIC,
    ("GET", "/v1/usage"): _READ,
    ("GET", "/v1/adapters"): _READ,
    ("GET", _ONE): _READ,
    ("GET", f"{_ONE}/aliases/{{alias}}"): _READ,
    ("POST", "/v1/adapters"): _WRITE,
    ("DELETE", _ONE): _WRITE,
    ("POST", f"{_ONE}/push"): _WRITE,
    ("POST", f"{_ONE}/restore"): _WRITE,
    ("POST", f"{_ONE}/rollback"): _WRITE,
    **{(method, f"{_ONE}/aliases/{{alias}}"): _WRITE for method in ("PUT", "DELETE")},
    **{("POST", f"{_ONE}/{verb}"): Scope.WORKERS_OPERATE for verb in ("prewarm", "evict")},
    **{(method, f"{TRAINING}{{path}}"): Scope.TRAIN for method in ("GET", "POST", "PUT", "DELETE")},
}

# Of the console, where the listener of clients has it. Its files are the same for everybody.
CONSOLE_SCOPE_OF: dict[tuple[str, str], Scope | None] = {
    ("GET", "/console/state"): Scope.ADMIN,  # names all tenants' adapters
    ("GET", "/console/policies"): Scope.ADMIN,
}

PUBLIC_PATHS = frozenset(path for (_, path), scope in SCOPE_OF.items() if scope is PUBLIC)

Headers = list[tuple[bytes, bytes]]

_EXPOSED = b"x-request-id, x-prelude-adapter, x-prelude-revision, x-prelude-trained-positions, retry-after"
_PREFLIGHT_S = b"600"
_MAX_CALLED = 1000  # names that are remembered as its own; there are few, unless somebody makes them up
_MAX_HEADER = 16 * 1024  # bytes; tokens with many claims have a few kilobytes
_QUERY_NAMES = frozenset({"key", "api_key", "api-key", "apikey", "x-api-key", "token", "access_token", "authorization"})
_HOW = "send `Authorization: Bearer KEY`, once"
_OF_SAMPLERS = re.compile(rf"/v1/adapters/[^@]+/aliases/{SAMPLER_ALIAS.pattern}")
_TINKER_PREFIX = b"tml-"  # before keys, without which the Tinker SDK sends none


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


class Gate:
    """Authenticates requests. Without `auth`, every request gets a principal that may do everything."""

    def __init__(
        self,
        auth: AuthConfig | None,
        directory: Directory,
        tokens: OidcTokens | None = None,
        more_public_paths: Collection[str] = (),
        trainer_key: str | None = None,
    ) -> None:
        self._is_open = auth is None
        self._takes_keys = auth is not None and auth.keys
        self._directory = directory
        self._tokens = tokens
        self._trainer_key = trainer_key
        self._public_paths = PUBLIC_PATHS.union(more_public_paths)

    def known(self, scope: dict[str, Any]) -> Principal | None:
        """The principal of a request; None if its token must first be `verified`.

        Raises Unauthenticated, CredentialInQuery and IdentityUnavailable.
        """
        if self._is_open:
            return ANYBODY
        if scope["path"] in self._public_paths:
            return NOBODY
        credential = credential_in(scope)
        if credential.startswith(PREFIX):
            if self._takes_keys:
                return self._holder_of(credential)
        elif self._trainer_key is not None and compare_digest(credential, self._trainer_key):
            return _trainer(scope)
        elif self._tokens is not None:
            return self._tokens.known(credential)
        raise Unauthenticated("the API key is not valid")

    async def verified(self, scope: dict[str, Any]) -> Principal:
        """The principal of a request whose token is not known yet. Raises Unauthenticated and IdentityUnavailable."""
        assert self._tokens is not None
        return await self._tokens.verified(credential_in(scope))

    def _holder_of(self, key: str) -> Principal:
        if (found := self._directory.principal_of_key(key)) is not None:
            return found
        if not self._directory.is_loaded:
            raise IdentityUnavailable("the router has not reached the catalog of keys yet; try again")
        raise Unauthenticated("the API key is unknown, expired or revoked")


def _trainer(scope: dict[str, Any]) -> Principal:
    """The trainer, which ends sampling sessions whose clients and keys have gone, and may do nothing else."""
    tenant = dict(scope["headers"]).get(TENANT_HEADER.encode(), b"").decode("latin-1")
    if scope["method"] != "DELETE" or not _OF_SAMPLERS.fullmatch(scope["path"]) or not is_tenant_name(tenant):
        raise Forbidden("with its own key the trainer may remove aliases of sampling sessions only")
    return Principal(tenant, "trainer", frozenset({_WRITE}))


def check_scope(principal: Principal, needed: Scope | None) -> None:
    """Raise Forbidden if a principal lacks what a route needs. None: the route is public."""
    if needed is not None and not principal.has(needed):
        held = ", ".join(sorted(principal.scopes)) or "no scope"
        raise Forbidden(f"this needs a key with the scope {needed}; yours has {held}")


def credential_in(scope: dict[str, Any]) -> str:
    """The bearer token. Raises Unauthenticated and CredentialInQuery."""
    if scope["query_string"]:
        _check_query(scope["query_string"])
    found: bytes | None = None
    is_training = scope["path"].startswith(TRAINING)
    for name, value in scope["headers"]:
        if is_training and name == b"x-api-key":
            name, value = b"authorization", b"bearer " + value.removeprefix(_TINKER_PREFIX)
        if name == b"authorization":
            if found is not None:  # what is behind a proxy may have read the other one
                raise Unauthenticated(f"there are several authorization headers; {_HOW}")
            found = value
    if found is None:
        raise Unauthenticated(f"an API key is needed; {_HOW}")
    kind, _, credential = found.partition(b" ")
    if kind.lower() != b"bearer" or len(found) > _MAX_HEADER or not credential.isascii():
        raise Unauthenticated(f"the authorization header is not valid; {_HOW}")
    return credential.decode("ascii").strip()


def _check_query(query: bytes) -> None:
    given: Collection[tuple[str, str]] = parse_qsl(query.decode("latin-1"), keep_blank_values=True)
    for name, value in given:
        if name.lower() in _QUERY_NAMES or value.startswith((PREFIX, "Bearer ")):
            raise CredentialInQuery(
                f"the URL seems to have a key, which ends up in logs: {_HOW}, and have a key that was in a URL revoked"
            )
