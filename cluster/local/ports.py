"""Free ports for the processes of a cluster on this machine, and sockets bound to given ones."""

import contextlib
import socket
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from cluster.config.schema import ClusterConfig
from cluster.config.workers import WorkerConfig
from cluster.errors import ConfigError, StartError
from process.addresses import host_and_port
from process.free_ports import bound_socket

_PORT_FIELDS = ("control_port", "metrics_port", "engine_port")


def with_ports(config: ClusterConfig) -> ClusterConfig:
    """The configuration with every port of 0 replaced by a free port. Raises StartError."""
    with contextlib.ExitStack() as held:  # kept open until all are chosen, so that they differ

        def free_port(field: str, host: str) -> int:
            try:
                return held.enter_context(bound_socket(host)).getsockname()[1]
            except OSError as error:
                why = error.strerror or error
                raise StartError(f"no port can be opened at {host}: {why}; {field} needs one") from error

        workers = {}
        for name, worker in config.workers.items():
            fields = _PORT_FIELDS + (("bootstrap_port",) if config.may_be(worker.role, "prefill") else ())
            open_fields = [field for field in fields if getattr(worker, field) == 0]
            chosen: dict[str, Any] = {field: free_port(f"workers.{name}.{field}", worker.host) for field in open_fields}
            workers[name] = worker.model_copy(update=chosen)
        router = config.router
        if router.port == 0:
            router = router.model_copy(update={"port": free_port("router.port", router.host)})
        admin = router.admin
        if admin.port is None and not _is_free(admin.host, router.admin_port, workers.values()):
            admin = admin.model_copy(update={"port": 0})
        port = admin.port if admin.port is not None else router.admin_port
        admin = admin.model_copy(update={"port": port or free_port("router.admin.port", admin.host)})
        router = router.model_copy(update={"admin": admin})
    return config.model_copy(update={"workers": workers, "router": router})


def _is_free(host: str, port: int, workers: Iterable[WorkerConfig]) -> bool:
    """True if no worker of the configuration and no process of this machine has the port."""
    if any(port == getattr(worker, field) for worker in workers for field in (*_PORT_FIELDS, "bootstrap_port")):
        return False
    try:
        bound_listener("", host, port).close()
    except ConfigError:
        return False
    return True


def check_free(config: ClusterConfig) -> None:
    """Raise ConfigError for the first port of the cluster that is in use on this machine."""
    router = config.router
    wanted = [("router.port", router.host, router.port), ("router.admin.port", router.admin.host, router.admin_port)]
    if config.trainer is not None:
        place = urlsplit(config.trainer.url)
        for port in (place.port or 0, (place.port or 0) + 1):  # its status pages are at the next one
            wanted.append(("trainer.url", place.hostname or "", port))
    for name, worker in config.workers.items():
        wanted += [
            (f"workers.{name}.{field}", worker.host, getattr(worker, field))
            for field in (*_PORT_FIELDS, "bootstrap_port")
            if getattr(worker, field)
        ]
    for field, host, port in wanted:
        bound_listener(field, host, port).close()


def bound_listener(field: str, host: str, port: int) -> socket.socket:
    """A socket bound to the port that a field of cluster.yaml names. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        where, why = host_and_port(host, port), getattr(error, "strerror", "no host has such a name")
        raise ConfigError(f"{field}: {where} is not available ({why}); choose another") from error
    return listener
