"""Hooks that guard the engine's HTTP server: keys that no page and no log shows, and mutual TLS."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

KEY_VARIABLE = "PRELUDE_ENGINE_KEY"
ADMIN_KEY_VARIABLE = "PRELUDE_ENGINE_ADMIN_KEY"
# In SGLang's arguments in place of the keys: /server_info and the log show those, to whoever has the first key.
IN_ENVIRONMENT = "in-the-environment"

_OPEN = frozenset({"/health", "/metrics", "/metrics/"})  # SGLang opens whatever begins so, such as /health_generate
_FOR_ROUTERS = frozenset({"/abort_request"})


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
