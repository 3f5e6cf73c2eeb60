"""The router as a process: start, serve, stop accepting, drain, exit."""

import asyncio
import ctypes
import gc
import logging
import math
import os
import socket
import ssl
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import uvicorn

from adapters.model.base_model import BaseModel
from adapters.packed.packing_process import pack_in_process
from cluster.config.certificates import client_files
from cluster.config.schema import ClusterConfig
from cluster.config.tracing import trace_settings
from cluster.control.transport import Transport
from cluster.discovery.configured import configured_sources
from cluster.discovery.source import StaticList
from cluster.errors import ConfigError
from cluster.local.ports import bound_listener
from cluster.open_library import open_configured_catalog, open_library
from cluster.trainer_key import trainer_key
from process.addresses import host_and_port
from process.certificates.contexts import Following, make_server_context, server_context
from process.certificates.expiry import export_expiry
from process.certificates.identity import ROUTER, TRAINER
from process.exhaustion import RouterDescriptors, raise_open_files
from process.tracing import start_tracing
from process.uvicorn_server import StoppedByOneSignal
from router.api.training import TrainerAddress
from router.app import ServedModel, build_app
from router.http.client_connection import client_protocol
from router.http.connections import ClientConnections, ConnectionLimits
from router.http.tls_handshake import tls_client_protocol
from router.metrics import Metrics
from router.protocol.field_values import DEFAULT_CONTEXT_LENGTH
from router.revisions.adapter_service import AdapterService

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h
# linux/filter.h: (operation, to skip if so, to skip if not, operand). Load the byte with TCP's flags, and drop SYN.
_NO_SYN = ((0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF))
_HANDSHAKE_S = 0.1  # for the last packet of handshakes that have begun
_YOUNG_OBJECTS = 50_000  # made and not freed since the last collection; a request in flight has about 100

log = logging.getLogger(__name__)


def run(config: ClusterConfig) -> NoReturn:
    """Serve until SIGTERM or SIGINT, then end the process after the last request or the drain timeout.

    Raises ConfigError and AdapterError before it serves.
    """
    base = BaseModel.read(config.model.path)
    metrics = Metrics()
    try:
        adapters = AdapterService(
            lambda: open_configured_catalog(config),
            lambda catalog: open_library(config, catalog, pack_in_process),
            config.adapters,
            metrics,
        )
        adapters.open()
    except ValueError as error:
        raise ConfigError(str(error)) from error
    transport, clients = Transport.of(config, ROUTER), client_tls(config)
    export_expiry(
        metrics.registry, lambda: transport.validity | ({} if clients is None else {"clients": clients.validity()})
    )
    tracing = start_tracing(trace_settings(config.tracing), "prelude-router", socket.gethostname())
    router = config.router
    descriptors = _descriptors(router.http.max_connections)
    app = build_app(
        router,
        ServedModel(
            name=config.model.name,
            vocabulary=base.vocabulary,
            fingerprint=base.fingerprint,
            max_adapter_bytes=config.adapter_limits.max_bytes,
            max_expert_rank=config.adapter_limits.max_expert_rank,
            context_length=_context_length(config, base),
            max_running_requests=_max_running_requests(config),
        ),
        adapters=adapters,
        metrics=metrics,
        admin=bound_listener("router.admin.port", router.admin.host, router.admin_port),
        sources=[StaticList(worker_addresses(config)), *configured_sources(config.discovery)],
        discovery=config.discovery,
        shares_quotas=_shares_quotas(config),
        role_changes=config.role_changes,
        transport=transport,
        max_engine_connections=descriptors.engines,
        tracing=tracing,
        trainer=_trainer(config, transport),
    )
    connections = ClientConnections(
        replace(ConnectionLimits.of(router), max_connections=descriptors.clients),
        lambda code: metrics.refused_connections.labels(code).inc(),
    )
    metrics.connections.set_function(lambda: len(connections))
    server = RouterServer(uvicorn_config(app, config, connections, clients), connections)
    spare_garbage_collection()
    admin = host_and_port(router.admin.host, router.admin_port)
    log.info("router starting", extra={"fields": {"host": router.host, "port": router.port, "admin": admin}})
    server.run(sockets=[bound_listener("router.port", router.host, router.port)])
    tracing.stop()
    log.info("router stopped")
    _exit()


def _trainer(config: ClusterConfig, transport: Transport) -> TrainerAddress | None:
    if config.trainer is None:
        return None
    assert config.trainer.key is not None
    tls = transport.engine_tls(TRAINER, TRAINER)
    return TrainerAddress(config.trainer.url, trainer_key(config.trainer.key), tls)


def _descriptors(max_connections: int) -> RouterDescriptors:
    """Raise this process's limit of open files as far as it may, divide it, and say so where it does not suffice."""
    wanted = RouterDescriptors.wanted(max_connections)
    limit = raise_open_files(wanted.limit)
    found = wanted.within(limit)
    if found.clients < wanted.clients:
        fields = {"open_files": limit, "max_connections": max_connections, "clients": found.clients}
        fields["engine_connections"] = found.engines
        log.warning("the limit of open files is too low for router.http.max_connections", extra={"fields": fields})
    return found


def spare_garbage_collection() -> None:
    """Exempt all objects that exist now from garbage collection, and collect less often.

    Requests leave few reference cycles. A full collection over all modules would stop every stream for tens of
    milliseconds, and a collection of the objects of a burst of 128 requests, with a threshold of 10,000 objects, for
    milliseconds.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)


def _exit() -> NoReturn:
    """End the process without waiting for threads, which may take minutes in an import or a hanging database query.

    Unfinished work is recovered as after a kill.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _context_length(config: ClusterConfig, base: BaseModel) -> int:
    """The longest context length of all engines. Discovered engines count with `engine.context_length`."""
    lengths = {config.engine_of(worker).context_length for worker in config.workers}
    if config.discovery.by_role:
        lengths.add(config.engine.context_length)
    known = [length or base.context_length or DEFAULT_CONTEXT_LENGTH for length in lengths]
    return max(known, default=DEFAULT_CONTEXT_LENGTH)


def _max_running_requests(config: ClusterConfig) -> int:
    """The smallest `max_running_requests` of all engines."""
    engines = [config.engine_of(worker) for worker in config.workers]
    return min((engine.max_running_requests for engine in engines), default=config.engine.max_running_requests)


def _shares_quotas(config: ClusterConfig) -> bool:
    router = config.router
    if router.quotas is None:
        return False
    if router.quotas.shared is not None:
        return router.quotas.shared
    return (config.catalog.url or "").startswith("postgres")


def worker_addresses(config: ClusterConfig) -> Mapping[str, tuple[str, str]]:
    """Role and agent address of every worker of cluster.yaml."""
    return {
        name: (worker.role, host_and_port(worker.host, worker.control_port)) for name, worker in config.workers.items()
    }


def client_tls(config: ClusterConfig) -> Following[ssl.SSLContext] | None:
    """TLS for clients, None for plain HTTP. Raises CertificateError."""
    files = client_files(config)
    return None if files is None else Following(files, make_server_context)


def uvicorn_config(
    app: object,
    config: ClusterConfig,
    connections: ClientConnections,
    clients: Following[ssl.SSLContext] | None = None,
) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=config.router.host,
        port=config.router.port,
        loop="uvloop",
        http=client_protocol(connections)
        if clients is None
        else tls_client_protocol(connections, server_context(clients)),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # nobody reads the client's address
        timeout_keep_alive=math.ceil(config.router.http.idle_timeout_s),
        timeout_graceful_shutdown=math.ceil(config.router.drain_timeout_s),
    )


def _take_no_more(listening: socket.socket) -> None:
    """Have the system begin no more connections for a listener; it still completes those that it has begun.

    Without this, it would make connections between the last `accept` and `close`, and reset them. A client whose SYN
    is dropped repeats it a second later, and is refused.
    """
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in _NO_SYN))
    with suppress(OSError):  # a system without such filters
        filter_ = struct.pack("HP", len(_NO_SYN), ctypes.addressof(program))
        listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, filter_)


def _accept_waiting(listening: socket.socket) -> Iterator[socket.socket]:
    """The connections that the system has made for a listener, and the event loop has not accepted."""
    listening.setblocking(False)
    with suppress(OSError):  # there is none, or no room for it
        while True:
            accepted, _ = listening.accept()
            accepted.setblocking(False)
            yield accepted


class RouterServer(StoppedByOneSignal):
    """Clients that connected before it stops get their answers: uvicorn's would close those without a complete request,
    and the system those that wait to be accepted.
    """

    def __init__(self, config: uvicorn.Config, connections: ClientConnections) -> None:
        super().__init__(config)
        self._connections = connections

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._connections.stop()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        for listening in sockets or ():
            _take_no_more(listening)
        await asyncio.sleep(_HANDSHAKE_S)
        loop = asyncio.get_running_loop()
        protocol: Any = self.config.http_protocol_class
        make = partial(
            protocol,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
            _loop=loop,
        )
        waiting = [accepted for listening in sockets or () for accepted in _accept_waiting(listening)]
        adopted = [asyncio.create_task(loop.connect_accepted_socket(make, each)) for each in waiting]
        await super().shutdown(sockets)
        await asyncio.gather(*adopted, return_exceptions=True)
