"""Body of the hook that makes a prefill rank's broken connections to decode ranks again."""

from __future__ import annotations

import logging
import sys
import traceback

log = logging.getLogger(__name__)


def reload_broken_peers(original, manager, room_transfer_infos):
    """Let SGLang reload the peers of a failed chunk, and acknowledge its room.

    Nothing is written to the old connections any longer.

    NIXL 1.5.1 keeps a peer whose connection has broken, and each later transfer to it fails; SGLang reloads only peers
    that NIXL has dropped. SGLang also never acknowledges a room whose write NIXL has rejected, because a part may be
    under way. That ends with the handle of the write and the connection.

    SGLang calls this while it handles a chunk's error. All chunks of a peer come from this thread, and those before
    have ended.
    """
    from sglang.srt.disaggregation.nixl import conn

    _, error, trace = sys.exc_info()
    if not isinstance(error, conn._NIXL_TRANSPORT_ERRORS) and not isinstance(
        getattr(error, "__cause__", None), conn._NIXL_TRANSPORT_ERRORS
    ):
        return original(manager, room_transfer_infos)
    try:
        _close(manager, room_transfer_infos, trace)
    except Exception:
        log.exception("the KV connection to %s is not closed", ", ".join(room_transfer_infos))
        return original(manager, room_transfer_infos)
    original(manager, room_transfer_infos)
    for room in {info.room for info in room_transfer_infos.values()}:
        manager._deferred_ack_poisoned_rooms.discard(room)
        manager._maybe_ack_drained_abort(room)  # not if a chunk is still counted
    return None


def _close(manager, peers, trace) -> None:
    post_xfer = type(manager)._post_xfer.__code__
    for frame, _ in traceback.walk_tb(trace):
        if frame.f_code is post_xfer:
            frame.f_locals["xfer_handle"].release()  # raises if NIXL does not give up the write
    for peer in peers:
        manager._peer_reload_times.pop(peer, None)  # SGLang reloads a peer once per second at most
        if peer in manager.decode_kv_args_table and manager.agent.check_remote_metadata(peer):
            manager.agent.remove_remote_agent(peer)
