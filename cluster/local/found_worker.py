"""The settings of a worker that `workers` of cluster.yaml does not list, for its own process."""

import re

from cluster.config.fields import NAME_PATTERN, check_host
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError, StartError
from cluster.local.ports import with_ports


def with_found_worker(config: ClusterConfig, name: str, role: str, host: str | None) -> ClusterConfig:
    """The configuration plus this worker, with `discovery`'s settings for its role; ports of 0 are chosen.

    Raises ConfigError.
    """
    if not re.fullmatch(NAME_PATTERN, name) or not name.isprintable():
        raise ConfigError(f"--name: {name!r} has other characters than letters, digits, . _ -, or more than 63")
    if host is None or not _is_one_host(host):
        found = "" if host is None else f" (found {host})"
        raise ConfigError(
            f"--host: {name} is not among `workers`; give the address of this host, where routers and peers reach it"
            + found
        )
    try:
        config = config.with_found_worker(name, role, host)
    except ValueError as error:
        raise ConfigError(f"discovery.{role}.worker: {error}") from error
    try:
        chosen = with_ports(config.model_copy(update={"workers": {name: config.workers[name]}}))
    except StartError as error:
        raise ConfigError(f"--host: {error}") from error
    return config.model_copy(update={"workers": {**config.workers, **chosen.workers}})


def _is_one_host(host: str) -> bool:
    try:
        return check_host(host) not in ("0.0.0.0", "::")
    except ValueError:
        return False
