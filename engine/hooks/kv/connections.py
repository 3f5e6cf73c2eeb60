"""Connections of a prefill rank to decode ranks, made again after they broke."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 0.3  # the thread that probes has other peers' chunks to send
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.25, 2.0  # between attempts, which become rarer


class Connections:
    """Which peers of a NIXL agent can no longer be reached, and new connections to those that answer again.

    NIXL does not reconnect to an agent whose connection has broken, as after a cut link: every later transfer to it
    fails, and SGLang keeps the agent for good. A new connection removes the agent from NIXL and adds it again, so no
    transfer to it may be under way: `lock` guards what `has_transfers` says of a peer.
    """

    def __init__(self, manager, lock: Any, has_transfers: Callable[[str], bool]) -> None:
        self._manager, self._agent = manager, manager.agent
        self._has_transfers = has_transfers
        self._changed = threading.Condition(lock)
        self._num_chunks: Counter[str] = Counter()  # in work, by peer
        self._broken: set[str] = set()
        self._connecting: set[str] = set()
        self._next_attempt: dict[str, float] = {}
        self._pause_s: dict[str, float] = {}

    def peers(self, room: int) -> tuple[str, ...]:
        """The agents that get the KV of a room."""
        return tuple(each for each in list(self._manager.transfer_infos.get(room, ())) if self._info(each) is not None)

    def note(self, peers: tuple[str, ...], error: Exception | None) -> None:
        """A transfer to these peers failed; without an error it is in state ERR."""
        from nixl._bindings import nixlBackendError, nixlNotFoundError, nixlRemoteDisconnectError

        if error is not None and not isinstance(
            error, nixlBackendError | nixlNotFoundError | nixlRemoteDisconnectError
        ):
            return  # says nothing about the connection
        with self._changed:
            for peer in set(peers) - self._broken:
                log.warning("KV connection to the decode engine at %s is broken: %s", self._address(peer), error)
                self._broken.add(peer)

    def begin_chunk(self, peers: tuple[str, ...]) -> None:
        """Connect again to those of the peers whose connection broke, if they answer."""
        with self._changed:
            self._changed.wait_for(lambda: self._connecting.isdisjoint(peers))
            due = [each for each in peers if self._is_due(each)]
            self._connecting.update(due)
            self._num_chunks.update(peers)
        for peer in due:
            self._try_to_connect(peer)

    def end_chunk(self, peers: tuple[str, ...]) -> None:
        """The thread that has begun a chunk for these peers uses it no longer."""
        with self._changed:
            self._num_chunks.subtract(peers)
            for peer in peers:
                if self._num_chunks[peer] <= 0:
                    del self._num_chunks[peer]

    def _is_due(self, peer: str) -> bool:
        return (
            peer in self._broken
            and peer not in self._num_chunks
            and peer not in self._connecting
            and time.monotonic() >= self._next_attempt.get(peer, 0.0)
            and not self._has_transfers(peer)
        )

    def _try_to_connect(self, peer: str) -> None:
        failure: Exception | None = None
        try:
            self._connect(peer)
            log.warning("KV connection to the decode engine at %s is made again", self._address(peer))
        except Exception as error:  # noqa: BLE001 the chunk fails next, with an error that SGLang handles
            log.warning("KV connection to the decode engine at %s cannot be made: %s", self._address(peer), error)
            failure = error
        with self._changed:
            pause_s = self._pause_s.pop(peer, _FIRST_PAUSE_S)
            self._next_attempt[peer] = time.monotonic() + pause_s
            if failure is None:
                self._broken.discard(peer)
            else:
                self._pause_s[peer] = min(_LAST_PAUSE_S, 2 * pause_s)
            self._connecting.discard(peer)
            self._changed.notify_all()

    def _connect(self, peer: str) -> None:
        from nixl._bindings import nixlNotFoundError

        info = self._info(peer)
        # UCX waits for seconds for a host that does not answer; the engine's other port tells at once.
        socket.create_connection(_address(info), timeout=_PROBE_TIMEOUT_S).close()
        self._manager.prep_handles.pop(peer, None)  # descriptors of the agent that is removed
        self._manager.prep_handles_slice_dst.pop(peer, None)
        with contextlib.suppress(nixlNotFoundError):  # removed before, by an attempt that got no further
            self._agent.remove_remote_agent(peer)
        self._agent.add_remote_agent(info.agent_metadata)
        self._manager._prepare_payload_xfer(info)

    def _info(self, peer: str) -> Any:
        return self._manager.decode_kv_args_table.get(peer)

    def _address(self, peer: str) -> str:
        info = self._info(peer)
        return peer if info is None else "{}:{}".format(*_address(info))


def _address(info: Any) -> tuple[str, int]:
    """Host and port of a decode rank's KV thread."""
    return info.endpoint.strip("[]"), info.dst_port
