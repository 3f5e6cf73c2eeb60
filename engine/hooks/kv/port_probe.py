"""Whether the processes behind ports have gone, by ports that refuse connections."""

import socket
import threading
import time
from collections import Counter

ENDED_AFTER_S = 2.0  # what the process has sent has arrived by then, or is lost
_PROBE_EVERY_S = 0.25
_TIMEOUT_S = 1.0


class PortProbe:
    """Probes the ports that somebody watches.

    A process that is stopped, slow or cut off does not refuse: only a host that has no such port does. So a port that
    refuses each connection for ENDED_AFTER_S belongs to no process any longer.
    """

    def __init__(self, ended_after_s: float = ENDED_AFTER_S) -> None:
        self._ended_after_s = ended_after_s
        self._lock = threading.Condition()
        self._watchers: Counter[tuple[str, int]] = Counter()
        self._refuses_since: dict[tuple[str, int], float] = {}
        self._ended: set[tuple[str, int]] = set()
        self._thread: threading.Thread | None = None

    def watch(self, host: str, port: int) -> None:
        """Probe it from now on."""
        with self._lock:
            self._watchers[host, port] += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._probe, name="kv-port-probe", daemon=True)
                self._thread.start()
            self._lock.notify()

    def unwatch(self, host: str, port: int) -> None:
        """Probe it no longer, unless somebody else watches; what is known is forgotten with the last watcher."""
        with self._lock:
            self._watchers[host, port] -= 1
            if self._watchers[host, port] <= 0:
                del self._watchers[host, port]
                self._refuses_since.pop((host, port), None)
                self._ended.discard((host, port))

    def has_ended(self, host: str, port: int) -> bool:
        """Whether the process that had this port has ended, while it was watched."""
        with self._lock:
            return (host, port) in self._ended

    def _probe(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._watchers)
                watched = list(self._watchers)
            for address in watched:
                self._note(address, _refuses(address))
            time.sleep(_PROBE_EVERY_S)

    def _note(self, address: tuple[str, int], refuses: bool) -> None:
        now = time.monotonic()
        with self._lock:
            if address not in self._watchers:
                return
            if not refuses:
                self._refuses_since.pop(address, None)
            elif now - self._refuses_since.setdefault(address, now) >= self._ended_after_s:
                self._ended.add(address)


def _refuses(address: tuple[str, int]) -> bool:
    try:
        socket.create_connection(address, timeout=_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except (OSError, UnicodeError):  # the latter of a name that is none
        return False  # no proof of anything
    return False
