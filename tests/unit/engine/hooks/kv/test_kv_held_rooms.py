"""When the pages of a failed room are free, between real sockets; and SGLang's own queue under the hooks."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import zmq

from engine.hooks.kv import held_rooms as module
from engine.hooks.kv.held_rooms import HeldRooms
from engine.hooks.kv.port_probe import PortProbe
from engine.hooks.kv.posts import QUIET

WITHIN_S = 20.0
ENDED_AFTER_S = 0.6


class Rank:
    """A prefill rank's KV port."""

    def __init__(self, context: zmq.Context) -> None:
        self.socket = context.socket(zmq.PULL)
        self.socket.rcvtimeo = int(WITHIN_S * 1000)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self._context = context

    @property
    def info(self) -> dict:
        return {"rank_ip": "127.0.0.1", "rank_port": self.port}

    def asked(self) -> list[bytes]:
        return self.socket.recv_multipart()

    def say(self, question: list[bytes], *message: bytes) -> None:
        """Send a message to whom the question came from; the right answer if none is given."""
        answer = self._context.socket(zmq.PUSH)
        answer.connect(f"tcp://{question[2].decode()}:{question[3].decode()}")
        answer.send_multipart(list(message) or [QUIET, question[4]])
        answer.close(linger=1000)


class Receiver:
    def __init__(self, manager, room: int, *ranks: Rank) -> None:
        self.kv_mgr, self.bootstrap_room = manager, room
        self.bootstrap_infos = [rank.info for rank in ranks]


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def manager(context: zmq.Context) -> SimpleNamespace:
    """Of a decode rank."""
    server_socket = context.socket(zmq.PULL)
    port = server_socket.bind_to_random_port("tcp://127.0.0.1")
    return SimpleNamespace(server_socket=server_socket, local_ip="127.0.0.1", rank_port=port, failure_records={})


@pytest.fixture
def held(manager) -> HeldRooms:
    return HeldRooms(manager, PortProbe(ended_after_s=ENDED_AFTER_S))


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_room_is_held_until_each_rank_has_answered(context, manager, held: HeldRooms):
    one, other = Rank(context), Rank(context)
    receiver = Receiver(manager, 7, one, other)
    assert held.are_quiet([receiver]) == [False]
    assert receiver in held
    question, others = one.asked(), other.asked()
    assert question[:4] == [b"ABORT", b"7", b"127.0.0.1", str(manager.rank_port).encode()]
    assert question[4] != others[4]
    one.say(question)
    one.say(question)  # again, for a question that was repeated
    time.sleep(0.2)
    assert held.are_quiet([receiver]) == [False]
    other.say(others)
    wait_until(lambda: held.are_quiet([receiver]) == [True])
    assert held.are_quiet([receiver]) == [True]


def test_a_rank_is_asked_again(context, manager, held: HeldRooms):
    rank = Rank(context)
    receiver = Receiver(manager, 7, rank)
    for _ in range(3):
        wait_until(lambda: held.are_quiet([receiver]) == [False] and rank.socket.poll(0) > 0)
        question = rank.asked()
    rank.say(question)
    wait_until(lambda: held.are_quiet([receiver]) == [True])


def test_bad_answers_end_nothing(context, manager, held: HeldRooms):
    rank, stranger = Rank(context), Rank(context)
    receiver, others = Receiver(manager, 7, rank), Receiver(manager, 8, stranger)
    assert held.are_quiet([receiver, others]) == [False, False]
    question, foreign = rank.asked(), stranger.asked()
    for message in ([QUIET, b"7"], [QUIET, bytes(16)], [QUIET], [b"ABORT", question[4]], [QUIET, question[4], b""]):
        stranger.say(foreign, *message)
    stranger.say(foreign)
    wait_until(lambda: held.are_quiet([others]) == [True])
    assert held.are_quiet([receiver]) == [False]


def test_messages_without_end_do_not_stop_the_scheduler(context, manager, held: HeldRooms):
    num_read = 0

    def recv_multipart(_flags: int) -> list[bytes]:
        nonlocal num_read
        num_read += 1
        assert num_read <= 1000
        return [b"noise"]

    manager.server_socket.close()
    manager.server_socket = SimpleNamespace(recv_multipart=recv_multipart)
    assert held.are_quiet([Receiver(manager, 7, Rank(context))]) == [False]
    assert num_read == 1000


def test_a_rank_whose_process_has_gone_writes_nothing(context, manager, held: HeldRooms):
    rank = Rank(context)
    receiver = Receiver(manager, 7, rank)
    assert held.are_quiet([receiver]) == [False]
    rank.asked()
    rank.socket.close(linger=0)
    closed_at = time.monotonic()
    wait_until(lambda: held.are_quiet([receiver]) == [True])
    assert time.monotonic() - closed_at >= ENDED_AFTER_S / 2


def test_a_rank_that_is_silent_is_no_proof(manager, held: HeldRooms):
    """A process that is stopped: its host takes connections for it, and nobody reads them."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        rank = SimpleNamespace(info={"rank_ip": "127.0.0.1", "rank_port": server.getsockname()[1]})
        receiver = Receiver(manager, 7, rank)
        until = time.monotonic() + 3 * ENDED_AFTER_S
        while time.monotonic() < until:
            assert held.are_quiet([receiver]) == [False]
            time.sleep(0.02)


def test_a_room_without_ranks_is_free(manager, held: HeldRooms):
    receiver = Receiver(manager, 7)
    receiver.bootstrap_infos = None  # no rank was found, so none has addresses
    assert held.are_quiet([receiver]) == [True]


def test_who_is_waited_for_is_logged(context, manager, held: HeldRooms, caplog, monkeypatch):
    monkeypatch.setattr(module, "_LOG_EVERY_S", 0.0)
    rank = Rank(context)
    with caplog.at_level(logging.WARNING):
        held.are_quiet([Receiver(manager, 7, rank)])
    assert "KV room 7 failed" in caplog.text
    assert f"127.0.0.1:{rank.port}" in caplog.text


def test_ports_that_nobody_watches_are_forgotten(context, manager, held: HeldRooms):
    rank = Rank(context)
    receiver = Receiver(manager, 7, rank)
    held.are_quiet([receiver])
    rank.socket.close(linger=0)
    wait_until(lambda: held.are_quiet([receiver]) == [True])
    probe = held._probe
    assert not probe._watchers
    assert not probe._ended
    assert not probe.has_ended("127.0.0.1", rank.port)  # another process may have the port by now


# SGLang's queue, pools and state machine, in a process of its own: its imports change much. What is not under test of
# a scheduler is a stand-in; freed pages are noted.
_CODE = """
import collections, json, sys, threading
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
import torch.distributed as dist
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, NixlKVReceiver
from engine.hooks.kv import held_rooms

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
hooked = sys.argv[2] == "hooked"
if hooked:
    original = decode.DecodeTransferQueue._poll_with_metadata_gate
    decode.DecodeTransferQueue._poll_with_metadata_gate = lambda queue: held_rooms.hold_failed(original, queue)
seen = []

class Held:
    quiet = False
    def __init__(self): self.rooms = set()
    def __contains__(self, receiver): return receiver in self.rooms
    def are_quiet(self, receivers):
        self.rooms.update(receivers)
        return [self.quiet for _ in receivers]

held = Held()
held_rooms._held_rooms = lambda manager: held
decode.release_kv_cache = lambda request, *_args, **_more: seen.append(f"{request.rid}'s pages are free")

class Manager(NixlKVManager):
    def __init__(self):
        self.request_status, self.failure_records, self.failure_lock = {}, {}, threading.Lock()
        self.addr_to_rooms_tracker, self.transfer_statuses = collections.defaultdict(set), {}
        self.required_prefill_response_num_table, self.prefill_response_tracker = {}, {}
        self.waiting_timeout, self.enable_staging = 300, False
    check_transfer_done = update_transfer_status = lambda self, *_: False

manager = Manager()
NixlKVReceiver._send_abort_notification = lambda self: None

class Request(SimpleNamespace):
    def finished(self): return self.finished_reason is not None

def waiting(rid, room):
    receiver = NixlKVReceiver(manager, "prefill:1", room)
    receiver.bootstrap_infos, receiver.started_transfer = [], True
    manager.update_status(room, KVPoll.WaitingForInput)
    request = Request(rid=rid, bootstrap_room=room, bootstrap_host="a", finished_reason=None, finished_output=None,
                      return_logprob=False)
    return decode.DecodeRequest(req=request, kv_receiver=receiver, metadata_buffer_index=room)

def stream_output(requests, _):
    for request in requests:
        if not (request.finished() and request.finished_output):
            seen.append(f"{request.rid} is answered")
            request.finished_output = True

metrics = SimpleNamespace(enable_metrics=False)
scheduler = SimpleNamespace(
    waiting_queue=[], spec_algorithm=None, enable_decode_hicache=False, enable_hisparse=False, metrics_reporter=metrics,
    output_streamer=SimpleNamespace(stream_output=stream_output),
    server_args=SimpleNamespace(disaggregation_transfer_backend="nixl"),
)
freed = SimpleNamespace(free=lambda index: seen.append(f"buffer {index} is free"))
buffers = SimpleNamespace(bootstrap_room=[[0]] * 10)
queue = decode.DecodeTransferQueue(dist.group.WORLD, freed, 0, buffers, scheduler, None)
scheduler.disagg_decode_transfer_queue = queue
scheduler.disagg_decode_prealloc_queue = SimpleNamespace(retracted_queue=["somebody"])
queue.extend([waiting("a", 1), waiting("b", 2)])

def step(retracted=False):
    seen.clear()
    if retracted:
        held_rooms.end_beside_retracted(None, scheduler)
    else:
        queue.pop_transferred()
    return list(seen)

steps = [step()]
queue.queue[0].kv_receiver.abort()
steps += [step(), step()]
held.quiet = True
steps += [step(retracted=sys.argv[3] == "retracted"), [each.req.rid for each in queue.queue]]
print(json.dumps(steps))
"""

ANSWERED, FREE = ["a is answered"], ["a's pages are free", "buffer 1 is free"]


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["running", "retracted"])
def test_sglangs_queue_keeps_the_pages(tmp_path, beside: str):
    def steps(hooks: str) -> list:
        command = [sys.executable, "-c", _CODE, str(tmp_path / hooks), hooks, beside]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    assert steps("hooked") == [[], ANSWERED, [], FREE, ["b"]]
    if beside == "running":
        assert steps("without") == [[], [*ANSWERED, *FREE], [], [], ["b"]]
