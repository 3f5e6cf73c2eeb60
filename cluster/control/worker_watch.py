"""Client of one worker's control stream: keeps its state current and detects its loss."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable

import grpc

from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.heartbeat import next_state
from cluster.control.transport import PLAIN, AgentChannel, Transport
from cluster.errors import DescriptionRefused

log = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
_DESCRIBE_TIMEOUT_S = 6.0
_RETRY_S = (0.1, 0.2, 0.5, 1.0, 2.0)
_REFUSED_RETRY_S = 5.0
_CHANNEL_OPTIONS = (
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.enable_http_proxy", 0),
)


class WorkerWatch:
    """Follows one worker. `state` is None while it is unreachable, `description` until it was reached once."""

    def __init__(
        self,
        name: str,
        address: str,
        on_change: Callable[[WorkerWatch], None],
        *,
        role: str = "",
        transport: Transport = PLAIN,
    ) -> None:
        self.name = name
        self.address = address
        self.description: pb.WorkerDescription | None = None
        self.state: pb.WorkerState | None = None
        self._on_change = on_change
        self._transport = transport
        self._role = role
        self._channel = AgentChannel(transport, address, role, name, _CHANNEL_OPTIONS)
        self.control: WorkerControlStub  # created in `run`: a channel belongs to an event loop

    @property
    def engine_tls(self) -> Callable[[], tuple[ssl.SSLContext, str]] | None:
        """For HTTPS to its engine; by its name, which may be known once it was described."""
        return self._transport.engine_tls(self._role, self.name)

    @property
    def incarnation(self) -> str:
        """Of its engine; empty unless that is up and well."""
        state = self.state
        is_well = state is not None and state.engine_state == pb.ENGINE_STATE_UP and not state.hung
        return state.incarnation if state is not None and is_well else ""

    def described(self, description: pb.WorkerDescription) -> None:
        """Called whenever the worker was reached. Raises DescriptionRefused if it must not be used."""

    def lost(self) -> None:
        """Called when it is no longer followed, before the next attempt."""

    async def run(self) -> None:
        """Follow the worker until cancelled, reconnecting whenever the stream ends or falls silent."""
        failures = 0
        try:
            while True:
                pause_s = _RETRY_S[min(failures, len(_RETRY_S) - 1)]
                try:
                    self.control = await self._channel.stub()
                    description = await self.control.Describe(pb.DescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S)
                    self._channel.check_name(description.name)
                    self.described(description)
                    self.description = description
                    failures = 0
                    await self._follow()
                except DescriptionRefused:
                    pause_s = _REFUSED_RETRY_S
                except (grpc.aio.AioRpcError, TimeoutError) as error:
                    log.debug("control stream lost", extra={"fields": {"worker": self.name, "error": repr(error)}})
                if self.state is not None:
                    self.state = None
                    self._on_change(self)
                self.lost()
                await asyncio.sleep(pause_s)
                failures += 1
        finally:
            await self._channel.aclose()

    async def _follow(self) -> None:
        """Apply states until the stream ends. Raises TimeoutError if the worker is silent."""
        call = self.control.WatchState(pb.WatchStateRequest(heartbeat_s=HEARTBEAT_S))
        try:
            while True:
                state = await next_state(call, HEARTBEAT_S)
                if state is grpc.aio.EOF:
                    return
                state.ClearField("residency")  # of no use to peers; a worker may hold 100,000 adapters
                self.state = state
                self._on_change(self)
        finally:
            call.cancel()
