"""Body of the hook that makes a prefill rank's broken connections to decode ranks again."""

from __future__ import annotations

import sys
import time


def reload_broken_peers(original, manager, room_transfer_infos):
    """Let SGLang reload peers to which a transfer failed: it takes those only that NIXL has dropped of itself.

    NIXL 1.5.1 keeps a peer whose connection has broken, and each later transfer to it fails. SGLang calls this while it
    handles a chunk's error; all chunks of a peer come from this thread, and those before have ended.
    """
    from sglang.srt.disaggregation.nixl import conn

    error, now = sys.exc_info()[1], time.monotonic()
    if isinstance(error, conn._NIXL_TRANSPORT_ERRORS) or isinstance(
        getattr(error, "__cause__", None), conn._NIXL_TRANSPORT_ERRORS
    ):
        for peer in room_transfer_infos:
            last = manager._peer_reload_times.get(peer, -conn._PEER_RELOAD_MIN_INTERVAL_S)
            is_due = now - last >= conn._PEER_RELOAD_MIN_INTERVAL_S
            if is_due and peer in manager.decode_kv_args_table and manager.agent.check_remote_metadata(peer):
                manager.agent.remove_remote_agent(peer)
    original(manager, room_transfer_infos)
