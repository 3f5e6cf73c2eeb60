"""Bodies of the hooks into a prefill engine's writes: what is posted to NIXL, and what it reads meanwhile."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from engine.hooks.kv.connections import Connections
from engine.hooks.kv.messages import MessageSender

log = logging.getLogger(__name__)

QUIET = b"QUIET"
_MAX_QUESTION_BYTES = 64
# Of rooms that nothing is posted for any longer. A chunk or an address that comes later than this many failed rooms
# after its own room is not recognized.
MAX_CLOSED_ROOMS = 1 << 16


@dataclass(slots=True, eq=False)
class _Post:
    room: int
    peers: tuple[str, ...]
    handle: Any
    is_posted: bool = False
    is_left: bool = False  # the thread that made it looks at it no longer


class Posts:
    """Writes that NIXL has not completed, by room, and rooms that get none any longer."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._agent: Any = None
        self._connections: Any = None  # a Connections
        self._pending: dict[int, list[_Post]] = {}
        self._closed: OrderedDict[int, None] = OrderedDict()
        self._own = threading.local()  # the chunk of this thread

    def watch(self, manager) -> None:
        """Note the posts of this KV manager; more calls change nothing."""
        with self._lock:
            if not isinstance(manager.agent, NotingAgent):
                self._agent = manager.agent
                self._connections = Connections(manager, self._lock, self._has_pending)
                manager.agent = NotingAgent(manager.agent, self)

    def begin_chunk(self, room: int) -> None:
        """What this thread posts from now on is for this room. Connects again to its peers where that is needed."""
        self.end_chunk()
        peers = self._connections.peers(room)
        self._connections.begin_chunk(peers)
        self._own.room, self._own.peers, self._own.posts = room, peers, []

    def end_chunk(self) -> None:
        """This thread is done with its chunk: with all posts, or because one failed and it left the others alone."""
        posts: list[_Post] = getattr(self._own, "posts", [])
        peers: tuple[str, ...] = getattr(self._own, "peers", ())
        self._own.room, self._own.peers, self._own.posts = None, (), []
        with self._lock:
            for post in posts:
                post.is_left = True
            for room in {post.room for post in posts}:
                self._settle(room)
        self._connections.end_chunk(peers)

    def failed(self, error: Exception) -> None:
        """NIXL took no transfer of this thread's chunk."""
        self._connections.note(getattr(self._own, "peers", ()), error)

    def _has_pending(self, peer: str) -> bool:
        for room in list(self._pending):
            self._settle(room)
        return any(peer in post.peers for posts in self._pending.values() for post in posts)

    def begin(self, handle: Any) -> _Post | None:
        """Note what is posted now. Raises NIXL's nixlCancelledError if the room is closed."""
        room = getattr(self._own, "room", None)
        if room is None:
            return None
        with self._lock:
            if room in self._closed:
                from nixl._bindings import nixlCancelledError  # SGLang logs it in one line

                raise nixlCancelledError(f"KV room {room} has failed: nothing is written for it any longer")
            post = _Post(room, self._own.peers, handle)
            self._pending.setdefault(room, []).append(post)
        self._own.posts.append(post)
        return post

    def close(self, room: int) -> None:
        """Let nothing more be posted for the room."""
        with self._lock:
            self._closed[room] = None
            self._closed.move_to_end(room)
            while len(self._closed) > MAX_CLOSED_ROOMS:
                self._closed.popitem(last=False)

    def are_done(self, room: int) -> bool:
        """Whether NIXL has nothing of this room to do: to read, or to write elsewhere."""
        with self._lock:
            self._settle(room)
            return room not in self._pending

    def _settle(self, room: int) -> None:
        left = [post for post in self._pending.get(room, ()) if not self._is_done(post)]
        if left:
            self._pending[room] = left
        else:
            self._pending.pop(room, None)

    def _is_done(self, post: _Post) -> bool:
        if not post.is_posted:
            return False
        failure: Exception | None = None
        try:
            state = self._agent.check_xfer_state(post.handle)
        except Exception as error:  # noqa: BLE001 a class of errors for each state of a connection
            state, failure = "ERR", error
        if state != "ERR":
            return state == "DONE"
        self._connections.note(post.peers, failure)
        if not post.is_left:
            return False  # its thread still looks at the handle, which is gone after a release
        try:
            self._agent.release_xfer_handle(post.handle)
        except Exception:  # noqa: BLE001 NIXL cannot release what is still under way
            return False
        return True


class NotingAgent:
    """A NIXL agent whose posts are noted."""

    def __init__(self, agent, posts: Posts) -> None:
        self._agent, self._posts = agent, posts
        self.check_xfer_state = agent.check_xfer_state  # called without pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def make_prepped_xfer(self, *args, **kwargs):
        """Make a transfer to a peer whose pages are known."""
        return self._taken(self._agent.make_prepped_xfer, *args, **kwargs)

    def initialize_xfer(self, *args, **kwargs):
        """Make a transfer to a peer."""
        return self._taken(self._agent.initialize_xfer, *args, **kwargs)

    def _taken(self, call, *args, **kwargs):
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self._posts.failed(error)
            raise

    def transfer(self, handle, *args, **kwargs):
        """Post it, unless its room is closed."""
        post = self._posts.begin(handle)
        try:
            return self._taken(self._agent.transfer, handle, *args, **kwargs)
        finally:
            if post is not None:
                post.is_posted = True


class _NotingQueue:
    """A queue of chunks whose reader says by each call that it is done with the chunk before."""

    def __init__(self, queue, posts: Posts) -> None:
        self._queue, self._posts = queue, posts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def get(self):
        self._posts.end_chunk()
        chunk = self._queue.get()
        self._posts.begin_chunk(chunk.room)
        return chunk


_posts = Posts()  # of this process: a rank has one KV manager
_sender = MessageSender()  # of the KV thread


def note_posts(original, manager, queue, *args, **kwargs):
    """Note what this thread posts, and to which room."""
    _posts.watch(manager)
    return original(manager, _NotingQueue(queue, _posts), *args, **kwargs)


def answer_aborts(result, manager, message):
    """Close a room that a decode engine asks about, and answer once nothing of it is under way.

    The question is `ABORT, room, address, port` and a fifth part, which the answer repeats. Decode engines ask until
    they have the answer, so none is kept here. SGLang's own notice has four parts, and gets no answer.

    The places of the room's KV are forgotten, four bytes for each page. SGLang keeps those of a request that ends
    before its prompt is read.
    """
    if len(message) != 5 or message[0] != b"ABORT" or len(message[4]) > _MAX_QUESTION_BYTES:
        return result
    try:
        room, host, port = int(message[1]), message[2].decode("ascii"), int(message[3])
        _posts.close(room)
        if _posts.are_done(room):
            if room in manager.transfer_infos:
                manager.transfer_infos[room] = {}  # not removed: the scheduler may be about to look it up
            _sender.send(host, port, [QUIET, message[4]])
    except ValueError as error:
        log.debug("a question about a KV room that cannot be answered: %s", error)
    return result


def with_kept_sources(poll):
    """SGLang's poll of KV senders, for which a failed room is being sent until NIXL reads nothing of it any longer."""

    def poll_and_keep(pollers, attn_cp_cpu_group, attn_tp_cpu_group):
        from sglang.srt.disaggregation.base import KVPoll

        polls = poll(pollers, attn_cp_cpu_group, attn_tp_cpu_group)
        failed = [
            number
            for number, state in enumerate(polls)
            if state == KVPoll.Failed and hasattr(pollers[number], "bootstrap_room")  # not of requests for nobody
        ]
        if failed:
            rooms = [pollers[number].bootstrap_room for number in failed]
            are_quiet = _close(rooms, attn_cp_cpu_group, attn_tp_cpu_group)
            for number, is_quiet in zip(failed, are_quiet, strict=True):
                if not is_quiet:
                    polls[number] = int(KVPoll.Transferring)
        return polls

    return poll_and_keep


def keep_source_of_chunked(original, scheduler):
    """Put off the end of a prompt that is aborted between its chunks while NIXL reads those that are computed."""
    request = scheduler._pending_chunked_abort_req
    if request is not None and scheduler.chunked_req is request:
        [is_quiet] = _close([request.bootstrap_room], scheduler.attn_cp_cpu_group, scheduler.attn_tp_cpu_group)
        if not is_quiet:
            request.disagg_kv_sender.abort()  # else the rest of its KV would be waited for, too
            return None
    return original(scheduler)


def _close(rooms: list[int], *groups) -> list[bool]:
    """Close rooms that have failed on some rank; whether NIXL reads nothing of them on any rank."""
    for room in rooms:
        _posts.close(room)
    return all_agree([_posts.are_done(room) for room in rooms], *groups)


def all_agree(flags: list[bool], *groups) -> list[bool]:
    """Each flag, True if it is on every rank of the groups. All ranks must call it with as many flags."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(flags, dtype=torch.uint8)
    for group in groups:
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=group)
    return [bool(flag) for flag in tensor.tolist()]
