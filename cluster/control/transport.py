"""Channels to agents and the port of an agent: plain, or with mutual TLS by the process's certificate."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any

import grpc

from cluster.config.certificates import cluster_files
from cluster.config.schema import ClusterConfig
from cluster.control.control_pb2_grpc import WorkerControlStub
from process.certificates.contexts import Following, make_client_context
from process.certificates.files import CertificateFiles
from process.certificates.identity import Identity

_Option = tuple[str, Any]


class Transport:
    """How one process reaches the others and is reached by them."""

    def __init__(self, files: CertificateFiles | None = None) -> None:
        """Raises CertificateError. Without files everything is plain text."""
        self._pem = None if files is None else Following(files, _read)
        self._context = None if files is None else Following(files, make_client_context)
        self.identity: Identity | None = None if self._pem is None else self._pem.checked.identity

    @classmethod
    def of(cls, config: ClusterConfig, name: str) -> Transport:
        """Of a worker, of `router` or of `operator`. Raises CertificateError."""
        return cls(cluster_files(config, name))

    @property
    def is_secure(self) -> bool:
        return self.identity is not None

    @property
    def expiry(self) -> dict[str, float]:
        """When this process's certificate and its authorities expire, in seconds since the epoch."""
        if self._pem is None:
            return {}
        self._pem.current()
        found = self._pem.checked
        return {"cluster": found.not_after} | ({} if found.ca_not_after is None else {"ca": found.ca_not_after})

    def channel(self, address: str, role: str, name: str, options: Sequence[_Option] = ()) -> grpc.aio.Channel:
        """A channel to a worker's agent. With TLS only the holder of that worker's certificate is talked to."""
        if self._pem is None or self.identity is None:
            return grpc.aio.insecure_channel(address, options=options)
        certificate, key, ca = self._pem.current()
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        target = ("grpc.ssl_target_name_override", self.identity.peer(role, name).dns)
        return grpc.aio.secure_channel(address, credentials, options=(*options, target))

    @property
    def version(self) -> int:
        """Changes when the files do. Channels keep what they were made with."""
        if self._pem is None:
            return 0
        self._pem.current()
        return self._pem.version

    def client_context(self) -> ssl.SSLContext | None:
        """For HTTPS to engines; None without TLS."""
        return None if self._context is None else self._context.current()

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Have a server listen; its handshakes follow the files. Returns the port."""
        if self._pem is None:
            return server.add_insecure_port(address)
        pem = self._pem

        def configuration() -> grpc.ServerCertificateConfiguration:
            certificate, key, ca = pem.current()
            return grpc.ssl_server_certificate_configuration([(key, certificate)], ca)

        credentials = grpc.dynamic_ssl_server_credentials(
            configuration(), configuration, require_client_authentication=True
        )
        return server.add_secure_port(address, credentials)


PLAIN = Transport()


class AgentChannel:
    """A channel to one agent, made anew when this process's certificate has changed."""

    def __init__(
        self, transport: Transport, address: str, role: str, name: str, options: Sequence[_Option] = ()
    ) -> None:
        self._transport = transport
        self._target = (address, role, name, options)
        self._channel: grpc.aio.Channel | None = None
        self._version = 0

    async def stub(self) -> WorkerControlStub:
        """Ask for it before each new stream. Calls of an earlier channel end when it is replaced."""
        version = self._transport.version
        if self._channel is None or version != self._version:
            await self.aclose()
            self._channel, self._version = self._transport.channel(*self._target), version
        return WorkerControlStub(self._channel)

    async def aclose(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


def _read(files: CertificateFiles) -> tuple[bytes, bytes, bytes]:
    assert files.ca is not None
    return files.certificate.read_bytes(), files.key.read_bytes(), files.ca.read_bytes()
