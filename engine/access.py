"""Access control of an engine's HTTP server: keys, new at each start of its agent, and mutual TLS beyond loopback.

Its hooks take the keys from the environment, where no page and no log shows them.
"""

from __future__ import annotations

import os
import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # SGLang imports prometheus_client, as certificates do, when it has set its directory for metrics
    from process.certificates.files import CertificateFiles

KEY_VARIABLE = "PRELUDE_ENGINE_KEY"
ADMIN_KEY_VARIABLE = "PRELUDE_ENGINE_ADMIN_KEY"
# In SGLang's arguments in place of the keys: /server_info and the log show those, to whoever has the first key.
IN_ENVIRONMENT = "in-the-environment"

_OPEN = frozenset({"/health", "/metrics", "/metrics/"})  # SGLang opens whatever begins so, such as /health_generate
_FOR_ROUTERS = frozenset({"/abort_request"})
_KEY_BYTES = 32

# Whom a call is for: the context for its handshake now, and the name in the certificate of the engine's agent.
Tls = Callable[[], tuple[ssl.SSLContext, str]]


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Bearer tokens for requests and for administration. Neither can be used in place of the other."""

    requests: str = field(repr=False)  # for routers and peers: to generate and to abort
    admin: str = field(repr=False)  # for the agent alone: to load adapters, and the rest

    @classmethod
    def new(cls) -> EngineKeys:
        return cls(secrets.token_urlsafe(_KEY_BYTES), secrets.token_urlsafe(_KEY_BYTES))


@dataclass(frozen=True, slots=True)
class EngineTls:
    """An engine serves HTTPS with its agent's certificate, to clients that have one of the same authority."""

    files: CertificateFiles
    call: Tls  # how its own agent calls it


def ask_for_own_keys(original, **request):
    """Decide with the keys of the environment. Aborting is for those who may generate."""
    if KEY_VARIABLE not in os.environ:
        return original(**request)
    from sglang.srt.utils.auth import AuthLevel

    path = request["path"]
    keys = {"api_key": os.environ[KEY_VARIABLE], "admin_api_key": os.environ[ADMIN_KEY_VARIABLE]}
    level = AuthLevel.NORMAL if path in _FOR_ROUTERS else request["auth_level"]
    asked = path if path in _OPEN else f"/with-key{path}"
    return original(**{**request, **keys, "auth_level": level, "path": asked})


def with_mutual_tls(uvicorn):
    """uvicorn as SGLang uses it, but clients need a certificate, and changed files serve the next handshake.

    It has no `run`: an engine whose server would not ask for certificates does not start.
    """

    class Config(uvicorn.Config):  # type: ignore[name-defined]
        def load(self) -> None:
            super().load()
            if self.ssl_certfile:
                from process.certificates.contexts import Following, make_server_context, server_context
                from process.certificates.files import CertificateFiles

                files = CertificateFiles(Path(self.ssl_certfile), Path(self.ssl_keyfile), Path(self.ssl_ca_certs))
                self.ssl = server_context(Following(files, make_server_context))

    return SimpleNamespace(Config=Config, Server=uvicorn.Server)
