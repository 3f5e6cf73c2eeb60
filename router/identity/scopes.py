"""The scope that each route needs. A route without an entry cannot be served."""

from __future__ import annotations

from adapters.scopes import Scope

PUBLIC = None  # no key is asked for

_ONE = "/v1/adapters/{name}"
_INFER, _READ, _WRITE = Scope.INFER, Scope.ADAPTERS_READ, Scope.ADAPTERS_WRITE

SCOPE_OF: dict[tuple[str, str], Scope | None] = {
    ("POST", "/v1/chat/completions"): _INFER,
    ("POST", "/v1/completions"): _INFER,
    ("POST", "/v1/score"): _INFER,
    ("POST", "/v1/responses"): _INFER,
    ("POST", "/v1/embeddings"): _INFER,
    ("POST", "/v1/tokenize"): _INFER,
    ("POST", "/tokenize"): _INFER,
    ("POST", "/v1/detokenize"): _INFER,
    ("POST", "/detokenize"): _INFER,
    **{(method, path): _INFER for path in ("/v1/rerank", "/v1/classify") for method in ("GET", "POST")},
    **{(method, "/v1/responses/{id}"): _INFER for method in ("GET", "POST", "DELETE")},
    ("GET", "/v1/models"): _INFER,
    ("GET", "/v1/models/{id}"): _INFER,
    ("GET", "/health"): PUBLIC,
    ("GET", "/ready"): PUBLIC,
    ("GET", "/openapi.json"): PUBLIC,
    ("GET", "/v1/adapters"): _READ,
    ("GET", _ONE): _READ,
    ("GET", f"{_ONE}/export"): _READ,
    ("GET", f"{_ONE}/aliases/{{alias}}"): _READ,
    ("POST", "/v1/adapters"): _WRITE,
    ("DELETE", _ONE): _WRITE,
    ("POST", f"{_ONE}/push"): _WRITE,
    ("POST", f"{_ONE}/restore"): _WRITE,
    ("POST", f"{_ONE}/rollback"): _WRITE,
    ("PUT", f"{_ONE}/aliases/{{alias}}"): _WRITE,
    ("POST", "/v1/unload_lora_adapter"): _WRITE,
    # It reads directories of the router's machine, which have no tenants.
    ("POST", "/v1/load_lora_adapter"): Scope.ADMIN,
    **{("POST", f"{_ONE}/{verb}"): Scope.WORKERS_OPERATE for verb in ("prewarm", "pin", "unpin", "evict")},
}

# Of the console, where the listener of clients has it. Its files are the same for everybody.
CONSOLE_SCOPE_OF: dict[tuple[str, str], Scope | None] = {
    ("GET", "/console/state"): Scope.ADMIN,  # names all tenants' adapters
}

PUBLIC_PATHS = frozenset(path for (_, path), scope in SCOPE_OF.items() if scope is PUBLIC)
