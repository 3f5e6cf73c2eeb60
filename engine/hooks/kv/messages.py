"""Messages to the KV ports of other engines that never make their sender wait."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

_MAX_SOCKETS = 64  # of engines that have ended, some may stay this long
_MAX_UNSENT = 1000  # messages to one port
_HEARTBEAT_MS = 5000  # without answers it connects again: TCP alone notices a cut link after minutes
_HOST = re.compile(r"[0-9A-Za-z._:-]{1,253}")


class MessageSender:
    """Sends messages, of one thread. A message that cannot be sent is lost: senders repeat what matters."""

    def __init__(self) -> None:
        self._sockets: OrderedDict[tuple[str, int], Any] = OrderedDict()

    def send(self, host: str, port: int, message: list[bytes]) -> None:
        """Raises ValueError if that is no address of an engine."""
        import zmq

        try:
            self._socket(host, port).send_multipart(message, zmq.NOBLOCK)
        except zmq.Again:
            pass  # a process that is stopped: it has enough of them already

    def _socket(self, host: str, port: int) -> Any:
        import zmq

        key = host, port
        if key not in self._sockets:
            if not _HOST.fullmatch(host) or not 0 < port < 1 << 16:
                raise ValueError(f"no address of an engine: {host!r}, {port}")
            if len(self._sockets) >= _MAX_SOCKETS:
                self._sockets.popitem(last=False)[1].close()
            socket: Any = zmq.Context.instance().socket(zmq.PUSH)
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, _MAX_UNSENT)
            socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * _HEARTBEAT_MS)
            socket.setsockopt(zmq.IPV6, int(":" in host))
            try:
                socket.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            except zmq.ZMQError as error:
                socket.close()
                raise ValueError(f"no address of an engine: {host!r}, {port}: {error}") from error
            self._sockets[key] = socket
        self._sockets.move_to_end(key)
        return self._sockets[key]
