"""The section `router` of `cluster.yaml`."""

from typing import Annotated, Any, ClassVar
from urllib.parse import urlsplit

from pydantic import Field, ValidationInfo, field_validator

from adapters.identity import DEFAULT_TENANT
from adapters.scopes import Scope, parse_scope
from cluster.config.fields import LAST_PORT, ConfigPath, Host, Port, Seconds, Section, is_loopback
from cluster.config.limits import RequestLimits
from cluster.config.quotas import QuotasConfig

_HOST = r"^[a-z0-9]([a-z0-9._-]*[a-z0-9])?$"
_ORIGIN = r"^[a-z][a-z0-9+.-]*://[a-z0-9.:\[\]_-]+$"  # as browsers send it


class ClientTlsConfig(Section):
    """TLS for clients of the router. Files are PEM, and are read again when they change."""

    certificate: ConfigPath  # with the chain up to its authority
    key: ConfigPath


class OidcConfig(Section):
    """An OIDC issuer whose JSON Web Tokens the router accepts instead of API keys."""

    issuer: str  # URL, as in the tokens' `iss`; https, except on loopback
    audience: Annotated[str, Field(min_length=1)]  # must be in the tokens' `aud`
    jwks_url: str | None = None  # of its public keys; None: from its /.well-known/openid-configuration
    tenant_claim: Annotated[str, Field(min_length=1)] = "tenant"  # the claim with the tenant's name; "a.b": nested
    scope_claim: Annotated[str, Field(min_length=1)] = "scope"  # a list, or words in one string
    # The scopes that values of the scope claim give. None: values that are names of scopes give these.
    scopes: dict[str, tuple[Scope, ...]] | None = None
    refresh_s: ClassVar[float] = 300.0  # between two reads of the public keys; an unknown key is read for at once

    @field_validator("issuer", "jwks_url")
    @classmethod
    def _is_encrypted(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if not parts.hostname or parts.scheme not in ("https", "http"):
            raise ValueError("expected a URL that begins with https://")
        if parts.scheme == "http" and not is_loopback(parts.hostname):
            raise ValueError("whoever is between the router and the issuer could forge tokens; use https://")
        return url

    @field_validator("scopes", mode="before")
    @classmethod
    def _known_scopes(cls, scopes: Any) -> Any:
        for value, granted in scopes.items() if isinstance(scopes, dict) else ():
            for each in granted if isinstance(granted, (list, tuple)) else ():
                try:
                    parse_scope(each)
                except ValueError as error:
                    raise ValueError(f"{value}: {error}") from error
        return scopes


class AuthConfig(Section):
    """Who may use the router."""

    keys: bool = True  # API keys of the catalog: `prelude keys create`
    oidc: tuple[OidcConfig, ...] = ()  # issuers of tokens


class AdminConfig(Section):
    """The router's admin listener: /console, /metrics, /debug/…, /ready in detail. It asks for no key: keep it private.

    The console's API calls below /console/v1/ need keys as at the router.
    """

    host: Host = "127.0.0.1"
    port: Port | None = None  # None: the one after router.port; `prelude up` takes another one if that is in use
    # Serve beyond this machine, in plain text. Only for networks that admit nobody but operators and scrapers.
    insecure: bool = False


class HttpConfig(Section):
    """Connections of the router. The limits hold for the admin listener, too."""

    max_connections: Annotated[int, Field(ge=1)] = 10_000
    max_connections_per_address: Annotated[int, Field(ge=1)] = 4096
    idle_timeout_s: Seconds = 75.0  # of a connection, between requests


class SloConfig(Section):
    """The times that an answer must meet to count as good, in the metrics and for placement beside unified workers.

    A stream must meet both times. An answer that is not streamed may take as long as a stream with an event per token.
    """

    first_token_s: Seconds = 2.0  # from a request's head to its first event
    event_gap_s: Seconds = 0.1  # mean time per later token; per event where engines count no tokens


class RouterConfig(Section):
    """The router: its HTTP server, its timeouts and retries."""

    host: Host = "127.0.0.1"
    port: Port = 8000
    auth: AuthConfig | None = None  # None: no authentication, loopback only
    # Serve beyond this machine without authentication, and let the router and the workers use plain text there.
    insecure: bool = False
    # By which clients call this router, beside `localhost` and IP addresses. Where there are no keys, others are
    # refused: a web page could have pointed its own name here.
    hosts: tuple[Annotated[str, Field(pattern=_HOST)], ...] = ()
    # Of web pages that may call this router from browsers (CORS), such as https://chat.example.org.
    cors_origins: tuple[Annotated[str, Field(pattern=_ORIGIN)], ...] = ()
    share_base_prefixes: bool = False  # one prefix cache for the base model's prompts of all tenants
    tls: ClientTlsConfig | None = None  # None: plain HTTP
    admin: AdminConfig = AdminConfig()
    console: bool = False  # the admin listener's /console also at / of this port; with `auth`, for administrators
    http: HttpConfig = HttpConfig()
    max_body_bytes: Annotated[int, Field(ge=1024)] = 16 * 1024**2
    limits: RequestLimits = RequestLimits()  # cluster/config/limits.py documents them
    quotas: QuotasConfig | None = None  # cluster/config/quotas.py documents them; None: none
    adapter_timeout_s: Seconds = 60.0  # to load a cold adapter
    first_event_timeout_s: Seconds = 300.0  # queueing, prefill and KV transfer
    event_gap_timeout_s: Seconds = 120.0  # between two events of a stream
    answer_timeout_s: Seconds = 1800.0  # a complete answer without streaming; on unified workers including prefill
    debug_header: bool = False  # answer the header `x-prelude-debug: placement` with the workers that served
    slo: SloConfig = SloConfig()
    drain_timeout_s: Seconds = 30.0  # to finish requests in flight at shutdown
    management: bool = False  # serve /v1/adapters; anyone who reaches the router can then change adapters

    max_choices: ClassVar[int] = 128  # sequences of one request, prompts x n: OpenAI's limit of n
    connect_timeout_s: ClassVar[float] = 5.0  # to workers of the same network
    # A request is retried elsewhere if its workers report no progress for this long before its first event or answer.
    progress_timeout_s: ClassVar[float] = 60.0
    body_timeout_s: ClassVar[float] = 60.0  # to receive a client's request
    # Longest gap in a worker's state stream. A worker that misses three gets no requests.
    heartbeat_s: ClassVar[float] = 2.0
    max_attempts: ClassVar[int] = 3  # placements tried per sequence
    upload_timeout_s: ClassVar[float] = 600.0  # per step: receive an upload, store it

    @field_validator("quotas")
    @classmethod
    def _quotas_are_of_somebody(cls, quotas: QuotasConfig | None, info: ValidationInfo) -> QuotasConfig | None:
        named = [] if quotas is None else sorted(quotas.tenants.keys() - {DEFAULT_TENANT})
        if named and info.data.get("auth", AuthConfig()) is None:
            raise ValueError(
                f"quotas.tenants.{named[0]}: without `auth` everybody is the tenant {DEFAULT_TENANT!r}; set "
                "`auth: {}`, or give the limits under `quotas.default`"
            )
        return quotas

    @property
    def admin_port(self) -> int:
        """The admin listener's port; 0: any free one."""
        if self.admin.port is not None:
            return self.admin.port
        return self.port + 1 if 0 < self.port < LAST_PORT else 0
