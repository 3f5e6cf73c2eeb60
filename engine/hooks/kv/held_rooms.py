"""Bodies of the hooks into the pages of KV rooms that have failed, and into transfers beside retracted requests.

A decode engine keeps the pages of a failed room until each prefill rank has said that its writes have ended, or has
ended itself. `engine.arguments` switches SGLang's time limit off, which frees them without such proof. A prefill engine
keeps them while NIXL may read them.
"""

import functools
import logging
import time
import weakref
from typing import Any

from engine.hooks.kv.port_probe import PortProbe

log = logging.getLogger(__name__)

ASK_AFTER_S = 5.0  # a prefill rank may have lost a question, or been unable to answer; doubled each time
_ASK_AFTER_AT_MOST_S = 60.0


class Writers:
    """The prefill ranks that may write to failed rooms."""

    def __init__(self, probe: PortProbe | None = None) -> None:
        self._probe = PortProbe() if probe is None else probe
        self._ranks: weakref.WeakKeyDictionary[Any, set[tuple[str, int]]] = weakref.WeakKeyDictionary()  # by receiver
        self._asks: weakref.WeakKeyDictionary[Any, tuple[float, float]] = weakref.WeakKeyDictionary()  # (due at, after)

    def have_ended(self, receiver: Any) -> bool:
        """Whether all ranks' processes have gone. Watches them from the first call on."""
        if receiver not in self._ranks:
            infos = receiver.bootstrap_infos or ()
            self._ranks[receiver] = {(str(info["rank_ip"]), int(info["rank_port"])) for info in infos}
            for host, port in self._ranks[receiver]:
                self._probe.watch(host, port)
        return all(self._probe.has_ended(host, port) for host, port in self._ranks[receiver])

    def ask_again(self, receiver: Any) -> None:
        """Ask whether the writes have ended, from ASK_AFTER_S after the last question on. Waits for nobody."""
        now = time.monotonic()
        due_at, after = self._asks.setdefault(receiver, (now + ASK_AFTER_S, ASK_AFTER_S))
        if now < due_at:
            return
        if after == ASK_AFTER_S:  # not at once: most answers come within a step
            ranks = ", ".join(f"{host}:{port}" for host, port in sorted(self._ranks.get(receiver, ())))
            log.warning("KV room %d has failed: keeping its pages until %s answers", receiver.bootstrap_room, ranks)
        after = min(2 * after, _ASK_AFTER_AT_MOST_S)
        self._asks[receiver] = (now + after, after)
        if _takes_messages(receiver):
            receiver._send_abort_notification(force_arm=True)

    def forget(self, receivers: set[Any]) -> None:
        """Watch the ranks of these receivers only."""
        for receiver in set(self._ranks) - receivers:
            for host, port in self._ranks.pop(receiver):
                self._probe.unwatch(host, port)


def _takes_messages(receiver: Any) -> bool:
    """Whether sending to its prefill ranks would not wait: not if a rank has been away for a thousand messages."""
    import zmq

    for info in receiver.bootstrap_infos:
        socket, lock = receiver._connect_to_bootstrap_server(info)
        with lock:
            if not socket.getsockopt(zmq.EVENTS) & zmq.POLLOUT:
                return False
    return True


@functools.cache
def _writers() -> Writers:
    return Writers()


def release_what_nobody_writes_to(original, queue):
    """Release the pages of failed rooms; also where the prefill engine has gone and will never answer."""
    if not queue._deferred_releases:
        return
    writers = _writers()
    for waiting, _since, _deadline, _buffer, num_answers in queue._deferred_releases:
        receiver = waiting.kv_receiver
        if not num_answers:
            continue
        if writers.have_ended(receiver):
            log.warning("KV room %d: its prefill engine has ended", receiver.bootstrap_room)
            receiver.invalidate_cached_bootstrap_infos()  # later requests ask anew where it is, unless they have
            for number in range(num_answers):  # ranks that there are not, so that none counts twice
                receiver.kv_mgr.note_abort_ack(receiver.bootstrap_room, -1 - number, receiver._abort_generation)
        else:
            writers.ask_again(receiver)
    original(queue)
    writers.forget({waiting.kv_receiver for waiting, *_ in queue._deferred_releases})


def end_beside_retracted(result, scheduler):
    """Take requests whose KV has arrived or failed out of the queue, also while retracted requests wait for pages.

    SGLang looks at no transfer then. But if nothing runs, only they can free pages: a retracted request comes back when
    its tokens, what is reserved for its answer, and what is reserved for all others have room.
    """
    from sglang.srt.disaggregation.base import KVPoll

    queue = scheduler.disagg_decode_transfer_queue
    if not scheduler.disagg_decode_prealloc_queue.retracted_queue or not queue.queue or queue.enable_staging:
        return result
    polls = queue._poll_with_metadata_gate()
    ended = (KVPoll.Failed,) if scheduler.enable_hisparse else (KVPoll.Failed, KVPoll.Success)
    requests = [each.req.rid for each, poll in zip(queue.queue, polls, strict=True) if poll in ended]
    if requests:
        scheduler.waiting_queue.extend(queue.pop_transferred(requests))
    return result


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
