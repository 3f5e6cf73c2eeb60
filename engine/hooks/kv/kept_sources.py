"""Body of the hook that keeps a prefill engine's pages of a failed room while NIXL may read them."""

from __future__ import annotations


def with_kept_sources(poll):
    """SGLang's poll of KV senders, for which a failed room is being sent until NIXL reads nothing of it any longer.

    A room may fail by an abort while its last chunk is on its way. The decode engine would take what it gets.
    """

    def poll_and_keep(senders, attn_cp_cpu_group, attn_tp_cpu_group):
        import torch.distributed as dist
        from sglang.srt.disaggregation.base import KVPoll
        from sglang.srt.disaggregation.utils import all_reduce_flags

        polls = list(poll(senders, attn_cp_cpu_group, attn_tp_cpu_group))
        failed = [number for number, state in enumerate(polls) if state == KVPoll.Failed]
        are_read = [int(_is_read(senders[number])) for number in failed]
        for group in (attn_tp_cpu_group, attn_cp_cpu_group):  # a room is kept on all ranks, or on none
            are_read = all_reduce_flags(are_read, group, dist.ReduceOp.MAX)
        for number, is_read in zip(failed, are_read, strict=True):
            if is_read:
                polls[number] = int(KVPoll.Transferring)
        return polls

    return poll_and_keep


def _is_read(sender) -> bool:
    """Whether NIXL may still read the pages of a room, for a transfer that may yet be complete."""
    manager, room = sender.kv_mgr, sender.bootstrap_room
    # A write of a room that SGLang calls poisoned has failed, so the decode engine will not take it.
    return manager._staging_outstanding.get(room, 0) > 0 and room not in manager._deferred_ack_poisoned_rooms
