"""Bodies of the hooks into connections of ranks: for KV and for messages, made again; and NIXL's progress thread."""

import logging
import os
import sys
import threading

from engine.hooks.hook import module_with
from engine.hooks.report import DEVICE_VARIABLE

log = logging.getLogger(__name__)

SETTLED_AFTER_S = 2.0  # what a broken connection has sent has arrived by then, or is lost
_RETRY_MS, _RETRY_AT_MOST_MS = 100, 2000
_CONNECTING = threading.Lock()
# UCX's events wake the progress thread; the delay bounds the wait for an event that it missed. On two H200 200 us costs
# 0.02 of a core at rest (polling: a whole one), and transfers of 1 to 64 MiB take as long as with polling, or less.
_DELAY_US = {"cpu": 2000, "cuda": 200}  # a GPU's transfers are shorter


def reload_broken_peers(original, manager, room_transfer_infos):
    """Let SGLang reload the peers of a chunk that failed, and answer for its room where nothing is written any longer.

    NIXL 1.5.1 keeps a peer whose connection has broken, and each later transfer to it fails; SGLang reloads only peers
    that NIXL has dropped. SGLang also never answers for a room whose write NIXL has rejected, because a part may be
    under way. It is not after `nixlRemoteDisconnectError`: a write has one UCX endpoint (`engine.arguments` sees to
    that), which has failed, and is closed by force with the peer. After other errors a healthy one goes on writing.

    SGLang calls this while it handles a chunk's error. All chunks of a peer come from this thread, and those before
    have ended.
    """
    from sglang.srt.disaggregation.nixl import conn

    error = sys.exc_info()[1]
    causes = (error, getattr(error, "__cause__", None))
    if not any(isinstance(each, conn._NIXL_TRANSPORT_ERRORS) for each in causes):
        return original(manager, room_transfer_infos)
    try:
        for peer in room_transfer_infos:
            manager._peer_reload_times.pop(peer, None)  # SGLang reloads a peer once per second at most
            if peer in manager.decode_kv_args_table and manager.agent.check_remote_metadata(peer):
                manager.agent.remove_remote_agent(peer)
    except Exception:
        log.exception("the KV connection to %s is not closed", ", ".join(room_transfer_infos))
        return original(manager, room_transfer_infos)
    original(manager, room_transfer_infos)
    is_broken = any(isinstance(each, conn.nixlRemoteDisconnectError) for each in causes)
    for room in {info.room for info in room_transfer_infos.values()}:
        if is_broken and manager._staging_outstanding.get(room, 0) <= 0:
            timer = threading.Timer(SETTLED_AFTER_S, manager._deferred_ack_poisoned_rooms.discard, (room,))
            timer.daemon = True
            timer.start()  # decode engines repeat their question
    return None


def connect_until_it_works(original, manager, endpoint, is_ipv6=False):
    """The socket to a rank; a new one connects until it succeeds.

    SGLang lets libzmq connect once, and replaces sockets whose connection has ended. One that has never been made does
    not end, and swallows all messages.
    """
    import zmq

    with _CONNECTING:  # nobody has a new socket before this ends
        known = manager._socket_cache.get(endpoint)
        socket = original(manager, endpoint, is_ipv6=is_ipv6)
        if socket is not known:
            socket.disconnect(endpoint)
            socket.setsockopt(zmq.RECONNECT_IVL, _RETRY_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RETRY_AT_MOST_MS)
            socket.connect(endpoint)
        return socket


def patient(bindings):
    """NIXL's C++ bindings, with a progress thread that sleeps between events."""
    delay_us = _DELAY_US[os.environ[DEVICE_VARIABLE]]

    class PatientAgentConfig(bindings.nixlAgentConfig):  # type: ignore[name-defined]
        def __setattr__(self, name: str, value) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    return module_with(bindings, nixlAgentConfig=PatientAgentConfig)
