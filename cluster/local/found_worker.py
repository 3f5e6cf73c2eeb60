"""The settings of a worker that `workers` of cluster.yaml does not list, for its own process."""

import ipaddress
import re

from pydantic import ValidationError

from cluster.config.fields import NAME_PATTERN
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from cluster.local.ports import with_ports


def with_found_worker(config: ClusterConfig, name: str, role: str, host: str | None) -> ClusterConfig:
    """The configuration plus this worker, with `discovery`'s settings for its role; ports of 0 are chosen.

    Raises ConfigError.
    """
    if not re.fullmatch(NAME_PATTERN, name) or not name.isprintable():
        raise ConfigError(f"--name: {name!r} has other characters than letters, digits, . _ -, or more than 63")
    if host is None or _is_wildcard(host):
        found = "" if host is None else f" (found {host})"
        raise ConfigError(
            f"--host: {name} is not among `workers`; give the address of this host, where routers and peers reach it"
            + found
        )
    try:
        config = config.with_found_worker(name, role, host)
        chosen = with_ports(config.model_copy(update={"workers": {name: config.workers[name]}}))
    except (ValidationError, ValueError) as error:
        raise ConfigError(f"discovery.{role}.worker: {error}") from error
    except OSError as error:
        raise ConfigError(f"--host: no port can be opened at {host}: {error.strerror or error}") from error
    return config.model_copy(update={"workers": {**config.workers, **chosen.workers}})


def _is_wildcard(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host
