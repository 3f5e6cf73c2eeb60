"""Access control of an engine's HTTP server: keys, new at each start of its agent, and mutual TLS beyond loopback."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from process.certificates.files import CertificateFiles

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
