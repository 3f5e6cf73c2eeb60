"""Startup checks: no router serves without authentication, or without any usable key, unless it is configured to."""

from contextlib import closing
from datetime import UTC, datetime

from adapters.errors import CatalogUnavailable
from cluster.config.fields import is_loopback
from cluster.config.router import AuthConfig
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from process.addresses import host_and_port


def check_identity(config: ClusterConfig) -> str:
    """Check who may use the router. Returns a notice for the operator, which may be empty.

    Blocking: reads the catalog and the issuers' keys. Raises ConfigError, with its location.
    """
    router = config.router
    if router.auth is None:
        return _check_open(config)
    if not router.auth.keys and not router.auth.oidc:
        raise ConfigError(
            "it lets nobody in: set `keys: true`, or name an issuer in `oidc`", location=("router", "auth")
        )
    _check_issuers(router.auth)
    return _check_keys(config) if router.auth.keys and not router.auth.oidc else ""


def _check_issuers(auth: AuthConfig) -> None:
    if not auth.oidc:
        return
    from router.identity.issuer import IssuerError, read_keys  # heavy, and most clusters have none

    for number, issuer in enumerate(auth.oidc):
        try:
            read_keys(issuer)
        except IssuerError as error:
            raise ConfigError(
                f"tokens of {issuer.issuer} cannot be verified: {error}. Correct the URL, or see that this machine "
                "reaches it",
                location=("router", "auth", "oidc", number, "issuer"),
            ) from error


def _check_open(config: ClusterConfig) -> str:
    router = config.router
    if is_loopback(router.host):
        return "There is no authentication: the router serves this machine only."
    if not router.insecure:
        raise ConfigError(
            f"{router.host} can be reached from other machines, and nobody has to authenticate. Set `router: {{auth: "
            "{}}` and make a key with `prelude keys create`, or host to 127.0.0.1; `insecure: true` serves openly",
            location=("router", "host"),
        )
    return f"There is no authentication: whoever reaches {host_and_port(router.host, router.port)} can use the router."


def _check_keys(config: ClusterConfig) -> str:
    from cluster.open_library import open_configured_catalog  # heavy, for `prelude up`

    try:
        with closing(open_configured_catalog(config)) as catalog:
            keys = catalog.keys.list()
    except CatalogUnavailable as error:  # the router starts all the same, and reads the keys when it can
        return f"Keys cannot be checked now: {error}"
    except ValueError as error:
        raise ConfigError(str(error), location=("catalog", "url")) from error
    now = datetime.now(UTC)
    if not any(key.is_usable(now) for key in keys):
        what = "the keys in the catalog are all revoked or expired" if keys else "there is no key in the catalog"
        raise ConfigError(
            f"{what}, so nobody could use the router; make one with `prelude keys create --tenant TENANT NAME`",
            location=("router", "auth", "keys"),
        )
    return ""
