"""Hooks that guard the engine's HTTP server: keys that no page and no log shows, and mutual TLS."""

from __future__ import annotations

import functools
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
    """uvicorn as SGLang uses it, but clients need a certificate, and changed files serve the next handshake."""
    return SimpleNamespace(run=functools.partial(_run, uvicorn), Config=uvicorn.Config, Server=uvicorn.Server)


def _run(uvicorn, app, **settings):
    if not settings.get("ssl_certfile"):
        return uvicorn.run(app, **settings)
    from process.certificates.contexts import Following, make_server_context, server_context
    from process.certificates.files import CertificateFiles

    names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
    files = CertificateFiles(*(Path(settings[name]) for name in names))
    config = uvicorn.Config(app, **settings)
    config.load()
    config.ssl = server_context(Following(files, make_server_context))
    return uvicorn.Server(config).run()
