"""Checks a worker's description of itself before the worker is used."""

import re
from urllib.parse import urlsplit

from cluster.config.fields import LAST_PORT, NAME_PATTERN, host_of
from cluster.control import control_pb2 as pb
from cluster.errors import DescriptionRefused
from process.addresses import host_and_port

_NAME = re.compile(NAME_PATTERN)
_LABEL = r"[A-Za-z0-9_:-]{1,63}"  # Python's resolver raises no OSError for an empty or a longer one
_HOST = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(\.{_LABEL})*\.?|\[[0-9A-Fa-f:.]{{2,45}}\]")
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{0,256}")  # it becomes part of a header
_MAX_LABEL = 253  # characters of a domain or an agent's id
_MAX_SHOWN = 80


def check_description(description: pb.WorkerDescription, model: str) -> None:
    """Raise DescriptionRefused, with the reason, for a worker that a source must not provide."""
    if not _NAME.fullmatch(description.name):
        raise DescriptionRefused(
            f"its name is {_shown(description.name)}; a name has up to 63 letters, digits, dots, dashes and underscores"
        )
    check_model(description, model)
    _check_url(description.engine_url)
    if description.role == pb.ROLE_PREFILL:
        if not _HOST.fullmatch(description.kv_host):
            raise DescriptionRefused(f"its kv_host is {_shown(description.kv_host)}, which is no host")
        if not 1 <= description.kv_bootstrap_port <= 65535:
            raise DescriptionRefused(f"its kv_bootstrap_port is {description.kv_bootstrap_port}, which is no port")
    if not _KEY.fullmatch(description.engine_key):
        raise DescriptionRefused("its engine_key has other characters than a token's, or over 256")
    for field in ("domain", "agent_id"):
        value = getattr(description, field)
        if len(value) > _MAX_LABEL or not value.isprintable():
            raise DescriptionRefused(f"its {field} is {_shown(value)}; it may have {_MAX_LABEL} printable characters")


def metrics_address(agent: str, description: pb.WorkerDescription) -> str:
    """host:port of an agent's HTTP, on the host at which the agent was reached; empty if it does not say."""
    port = description.metrics_port
    return host_and_port(host_of(agent), port) if 1 <= port <= LAST_PORT else ""


def _check_url(url: str) -> None:
    shown = f"its engine_url is {_shown(url)}; expected http://host:port"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise DescriptionRefused(shown) from error
    host = parts.hostname or ""
    expected = f"{parts.scheme}://{host_and_port(host, port or 0)}"
    is_http = parts.scheme in ("http", "https")
    if not is_http or not port or not _HOST.fullmatch(host) or url.rstrip("/").lower() != expected:
        raise DescriptionRefused(shown)


def _shown(value: str) -> str:
    return repr(value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}…")


def check_model(description: pb.WorkerDescription, model: str) -> None:
    """Raise DescriptionRefused if its engine serves another base model, by name."""
    if description.model != model:
        raise DescriptionRefused(f"it serves the model {_shown(description.model)}, not {model!r}")
