"""Bodies of the hooks that keep a decode engine's KV pages from new owners while prefill engines may write to them."""

from __future__ import annotations

import contextlib
import functools
import logging
import secrets
import time
import weakref
from dataclasses import dataclass, field
from http import HTTPStatus

from engine.hooks.kv.messages import MessageSender
from engine.hooks.kv.port_probe import PortProbe
from engine.hooks.kv.posts import QUIET, all_agree

log = logging.getLogger(__name__)

_FIRST_ASK_S, _LAST_ASK_S = 0.05, 0.2  # between questions, which become rarer
_LOG_EVERY_S = 30.0
_MAX_MESSAGES = 1000  # read at a time: whoever sends without end must not stop the scheduler


@dataclass(slots=True)
class _Room:
    """A failed room, and the prefill ranks that may still write to its pages, by what they are asked with."""

    number: int
    ranks: dict[bytes, tuple[str, int]]
    since: float = field(default_factory=time.monotonic)
    ask_at: float = 0.0
    ask_every_s: float = _FIRST_ASK_S
    log_at: float = field(default_factory=lambda: time.monotonic() + _LOG_EVERY_S)


class HeldRooms:
    """The failed rooms of one rank of a decode engine."""

    def __init__(self, manager, probe: PortProbe | None = None) -> None:
        self._manager = manager
        self._sender = MessageSender()
        self._probe = PortProbe() if probe is None else probe
        self._rooms: weakref.WeakKeyDictionary[object, _Room] = weakref.WeakKeyDictionary()  # by receiver

    def __contains__(self, receiver) -> bool:
        return receiver in self._rooms

    def are_quiet(self, receivers: list) -> list[bool]:
        """Of each failed room, whether no prefill rank can write to its pages any longer. Asks those that might."""
        for receiver in receivers:
            if receiver not in self._rooms:
                self._rooms[receiver] = self._new_room(receiver)
        self._take_answers()
        for receiver in receivers:
            self._ask(self._rooms[receiver])
        return [not self._rooms[receiver].ranks for receiver in receivers]

    def _new_room(self, receiver) -> _Room:
        # Which ranks got addresses does not matter: one that got none has nothing to write.
        ranks = {(str(info["rank_ip"]), int(info["rank_port"])) for info in receiver.bootstrap_infos or ()}
        for host, port in ranks:
            self._probe.watch(host, port)
        # Nobody else knows the question, so nobody else can answer it.
        return _Room(receiver.bootstrap_room, {secrets.token_bytes(16): rank for rank in ranks})

    def _take_answers(self) -> None:
        import zmq

        rooms = {question: room for room in self._rooms.values() for question in room.ranks}
        for _ in range(_MAX_MESSAGES if rooms else 0):
            try:
                message = self._manager.server_socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(message) == 2 and message[0] == QUIET and message[1] in rooms:
                self._is_quiet(rooms.pop(message[1]), message[1])

    def _is_quiet(self, room: _Room, question: bytes) -> None:
        self._probe.unwatch(*room.ranks.pop(question))

    def _ask(self, room: _Room) -> None:
        for question, (host, port) in list(room.ranks.items()):
            if self._probe.has_ended(host, port):
                log.warning("KV room %d: the prefill rank at %s:%d has ended", room.number, host, port)
                self._is_quiet(room, question)
        if (now := time.monotonic()) < room.ask_at:
            return
        room.ask_at, room.ask_every_s = now + room.ask_every_s, min(_LAST_ASK_S, 2 * room.ask_every_s)
        own = [self._manager.local_ip.encode("ascii"), str(self._manager.rank_port).encode("ascii")]
        for question, (host, port) in room.ranks.items():
            with contextlib.suppress(ValueError):  # an address that cannot be reached: logged with those that wait
                self._sender.send(host, port, [b"ABORT", str(room.number).encode("ascii"), *own, question])
        if room.ranks and now >= room.log_at:
            room.log_at = now + _LOG_EVERY_S
            waited_for = ", ".join(f"{host}:{port}" for host, port in room.ranks.values())
            log.warning(
                "KV room %d failed %.0f s ago; its pages are kept, as the prefill ranks at %s may still write to them",
                room.number, now - room.since, waited_for,
            )  # fmt: skip


@functools.cache
def _held_rooms(manager) -> HeldRooms:
    return HeldRooms(manager)


def hold_failed(original, queue):
    """The states of the rooms that wait for KV, in which a failed room is being received while writes may come."""
    from sglang.srt.disaggregation.base import KVPoll

    polls = original(queue)
    # A request without a prefill engine, as in SGLang's own warm-up, has no ranks.
    waiting = [
        (number, each) for number, each in enumerate(queue.queue) if hasattr(each.kv_receiver, "bootstrap_infos")
    ]
    if not waiting:
        return polls
    held = _held_rooms(waiting[0][1].kv_receiver.kv_mgr)
    failed = [(number, each) for number, each in waiting if polls[number] == KVPoll.Failed or each.kv_receiver in held]
    if not failed:
        return polls
    # On one rank a room may fail before it does on the others, whose pages must be kept as well.
    are_quiet = all_agree(held.are_quiet([each.kv_receiver for _, each in failed]), queue.gloo_group)
    for (number, each), is_quiet in zip(failed, are_quiet, strict=True):
        polls[number] = int(KVPoll.Failed if is_quiet else KVPoll.Transferring)
        if not is_quiet:
            _answer(queue.scheduler, each)
    return polls


def _answer(scheduler, waiting) -> None:
    """Tell the client that its request has failed, once: it need not wait for the pages."""
    from sglang.srt.disaggregation.utils import prepare_abort

    request = waiting.req
    if request.finished():
        return
    reason = waiting.kv_receiver.kv_mgr.failure_records.get(request.bootstrap_room, "another rank failed")
    message = f"Decode transfer failed for request {request.rid} {request.bootstrap_room=}: {reason}"
    prepare_abort(request, message, status_code=HTTPStatus.INTERNAL_SERVER_ERROR)
    scheduler.output_streamer.stream_output([request], request.return_logprob)


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
