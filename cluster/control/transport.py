"""Channels to agents, the streams in them, and the port of an agent: plain, or with mutual TLS by certificates."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Self

import grpc

from cluster.config.certificates import cluster_files
from cluster.config.fields import host_of, is_loopback
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.errors import DescriptionRefused
from process.certificates.contexts import Following, make_client_context
from process.certificates.expiry import Validity
from process.certificates.files import CertificateFiles
from process.certificates.identity import Identity, certified_role

ROLES = {pb.ROLE_PREFILL: "prefill", pb.ROLE_DECODE: "decode", pb.ROLE_UNIFIED: "unified"}
# An agent that ends for one of another role listens again at once. None is reached over the environment's proxy.
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
)
_HANDSHAKE_S = 5.0
MISSED_HEARTBEATS = 3


class Transport:
    """Creates one process's channels to others, and its own ports."""

    def __init__(
        self, files: CertificateFiles | None = None, *, allows_plain: bool = True, roles_change: bool = False
    ) -> None:
        """Raises CertificateError. Without files, everything is plain text; `allows_plain`: also beyond loopback.

        `roles_change`: prefill and decode workers may have become each other.
        """
        self.files = files
        self._allows_plain = allows_plain
        self._roles_change = roles_change
        self._pem = None if files is None else Following(files, _read)
        self._context = None if files is None else Following(files, make_client_context)
        self.identity: Identity | None = None if self._pem is None else self._pem.checked.identity

    @classmethod
    def of(cls, config: ClusterConfig, name: str) -> Self:
        """Of a worker, of `router` or of `operator`. Raises CertificateError."""
        insecure, roles_change = config.router.insecure, config.roles_may_change
        return cls(cluster_files(config, name), allows_plain=insecure, roles_change=roles_change)

    @property
    def is_secure(self) -> bool:
        return self.identity is not None

    def check_plain(self, address: str) -> None:
        """Raise DescriptionRefused for an address that must not be talked to in plain text: of a worker that was found,
        since those of cluster.yaml are checked at the start.
        """
        host = host_of(address)
        if not (self.is_secure or self._allows_plain or is_loopback(host)):
            raise DescriptionRefused(
                f"{host} is another machine, and there is no `tls`; `router: {{insecure: true}}` allows plain text"
            )

    @property
    def validity(self) -> dict[str, Validity]:
        """When this process's certificate is valid (`cluster`), and its authority's that ends first (`ca`)."""
        if self._pem is None:
            return {}
        self._pem.current()
        found = self._pem.checked
        return {"cluster": found.validity} | ({} if found.ca_validity is None else {"ca": found.ca_validity})

    def certified_role(self, role: str) -> str:
        """The role in the certificate of a worker that has, or begins in, this one."""
        return certified_role(role, self._roles_change)

    def check_role(self, description: pb.WorkerDescription, role: str) -> None:
        """Raise DescriptionRefused for a worker that must not have the role that it says, since it began in `role`."""
        said = ROLES.get(description.role, "unknown")
        if self.certified_role(said) != self.certified_role(role):
            raise DescriptionRefused(f"its role is {said}, where {role} workers are looked for")

    def channel(self, address: str, role: str, name: str) -> grpc.aio.Channel:
        """A channel to a worker's agent. With TLS, it connects only to the holder of that worker's certificate."""
        if self._pem is None or self.identity is None:
            return grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        certificate, key, ca = self._pem.current()
        credentials = grpc.ssl_channel_credentials(ca, key, certificate)
        target = ("grpc.ssl_target_name_override", self.identity.peer(self.certified_role(role), name).dns)
        return grpc.aio.secure_channel(address, credentials, options=(*_CHANNEL_OPTIONS, target))

    @property
    def version(self) -> int:
        """Changes when the certificate files change. Existing channels keep the old certificate."""
        if self._pem is None:
            return 0
        self._pem.current()
        return self._pem.version

    async def identity_at(self, address: str, role: str) -> Identity:
        """The worker of this role at an address, as its certificate by our authorities proves.

        Raises DescriptionRefused for anybody else, and TimeoutError if nobody answers.
        """
        assert self._context is not None
        assert self.identity is not None
        context = make_client_context(self._context.files)
        context.check_hostname = False  # the name is what is asked for
        context.set_alpn_protocols(["h2"])
        port = address.rpartition(":")[2]
        try:
            async with asyncio.timeout(_HANDSHAKE_S):
                _, writer = await asyncio.open_connection(host_of(address), int(port), ssl=context)
        except ssl.SSLError as error:
            raise DescriptionRefused(f"it has no certificate of this cluster: {error.reason or error}") from error
        except OSError as error:
            if isinstance(error, TimeoutError):
                raise
            raise TimeoutError(f"{address} cannot be reached: {error.strerror or error}") from error
        certificate = writer.get_extra_info("peercert") or {}
        writer.transport.abort()
        uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
        try:
            (uri,) = uris
            found = Identity.parse(uri)
        except ValueError as error:
            raise DescriptionRefused("its certificate names no process of a cluster") from error
        wanted = self.certified_role(role)
        if (found.role, found.trust_domain) != (wanted, self.identity.trust_domain):
            raise DescriptionRefused(f"its certificate is that of {found.uri}, where {wanted} workers are looked for")
        return found

    def engine_tls(self, role: str, name: str) -> Callable[[], tuple[ssl.SSLContext, str]] | None:
        """For HTTPS to a worker's engine, at each connection: the context, and the name that the engine must have."""
        if self._context is None or self.identity is None:
            return None
        following, server = self._context, self.identity.peer(self.certified_role(role), name).dns
        return lambda: (following.current(), server)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Let a server listen, with the newest certificate at each handshake. Returns the port."""
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
    """A channel to one agent, which is replaced when this process's certificate changes."""

    def __init__(self, transport: Transport, address: str, role: str, name: str) -> None:
        """`name` may be empty. With TLS a worker then proves a name, which `check_name` holds it to."""
        self._transport = transport
        self._address, self._role, self._name = address, role, name
        self._proven = ""  # the name in the certificate of a worker whose name was not known
        self._channel: grpc.aio.Channel | None = None
        self._version = 0

    async def stub(self) -> WorkerControlStub:
        """Ask for it before each new stream. Calls of an earlier channel end when it is replaced.

        Raises DescriptionRefused as `Transport.check_plain` and, like TimeoutError, as `Transport.identity_at` if the
        worker's name is not known.
        """
        self._transport.check_plain(self._address)
        version, is_new = self._transport.version, self._channel is None
        if self._transport.is_secure and not self._name:
            proven = (await self._transport.identity_at(self._address, self._role)).name
            is_new, self._proven = is_new or proven != self._proven, proven
        if is_new or version != self._version:
            await self.aclose()
            name = self._name or self._proven
            self._channel = self._transport.channel(self._address, self._role, name)
            self._version = version
        assert self._channel is not None
        return WorkerControlStub(self._channel)

    def check_name(self, name: str) -> None:
        """Raise DescriptionRefused for a name that is not the one in the worker's certificate."""
        if self._proven and name != self._proven:
            raise DescriptionRefused(f"its name is {name[:80]!r}, and its certificate is that of {self._proven!r}")

    async def aclose(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()


async def next_state(stream, heartbeat_s: float) -> pb.WorkerState:
    """The stream's next message, or `grpc.aio.EOF` at its end. Raises TimeoutError if the worker is silent.

    Waits several heartbeats instead of one long timeout: after this process or the machine was suspended, a single
    timeout would expire before the messages that have already arrived are read.
    """
    read = asyncio.ensure_future(stream.read())
    try:
        for _ in range(MISSED_HEARTBEATS):
            done, _ = await asyncio.wait([read], timeout=heartbeat_s)
            if done:
                return read.result()
    finally:
        read.cancel()
    raise TimeoutError(f"silent for {MISSED_HEARTBEATS} heartbeats")


def _read(files: CertificateFiles) -> tuple[bytes, bytes, bytes]:
    assert files.ca is not None
    return files.certificate.read_bytes(), files.key.read_bytes(), files.ca.read_bytes()
