"""When pages of KV are free, by SGLang's own queues and allocators and real ports; and whose KV is taken."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from support.engines.own_process import printed_by

from engine.hooks.kv.held_rooms import Writers
from engine.hooks.kv.port_probe import PortProbe

WITHIN_S = 20.0
ENDED_AFTER_S = 0.6


class Receiver:
    def __init__(self, *ports: int) -> None:
        self.bootstrap_infos = [{"rank_ip": "127.0.0.1", "rank_port": port} for port in ports]


@pytest.fixture
def writers() -> Writers:
    return Writers(PortProbe(ended_after_s=ENDED_AFTER_S))


def listening() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0), backlog=64)


def port_of(server: socket.socket) -> int:
    return server.getsockname()[1]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_ranks_have_ended_once_each_of_their_ports_refuses(writers: Writers):
    with listening() as one, listening() as other:
        receiver = Receiver(port_of(one), port_of(other))
        assert not writers.have_ended(receiver)
        one.close()
        time.sleep(2 * ENDED_AFTER_S)
        assert not writers.have_ended(receiver)
        other.close()
        closed_at = time.monotonic()
        wait_until(lambda: writers.have_ended(receiver))
        assert time.monotonic() - closed_at >= ENDED_AFTER_S / 2


def test_a_rank_that_is_silent_is_no_proof(writers: Writers):
    """A process that is stopped: its host takes connections for it, and nobody reads them."""
    with listening() as server:
        receiver = Receiver(port_of(server))
        until = time.monotonic() + 3 * ENDED_AFTER_S
        while time.monotonic() < until:
            assert not writers.have_ended(receiver)
            time.sleep(0.02)


def test_ports_that_nobody_watches_are_forgotten(writers: Writers):
    with listening() as server:
        port = port_of(server)
        one, other = Receiver(port), Receiver(port)
        writers.have_ended(one)
        writers.have_ended(other)
    wait_until(lambda: writers.have_ended(one))
    writers.forget({other})
    assert writers.have_ended(other)
    writers.forget(set())
    assert not writers._probe._watchers
    assert not writers._probe.has_ended("127.0.0.1", port)  # another process may have the port by now


# SGLang's queue and what it keeps of answers. What is not under test is a stand-in; freed pages are noted.
_HELD = """
import json, sys, threading, zmq
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
import torch.distributed as dist
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.base import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVManager
from sglang.srt.disaggregation.nixl.conn import NixlKVManager
from engine.hooks.kv import held_rooms

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
Queue = decode.DecodeTransferQueue
free, ended = [], set()

class Manager(CommonKVManager):
    def __init__(self): self._deferred_abort_ack_tracker, self._deferred_abort_generation = {}, 0

class Receiver(SimpleNamespace):
    __hash__ = object.__hash__

class Watched(held_rooms.Writers):
    def have_ended(self, receiver): return receiver.bootstrap_room in ended
    def forget(self, receivers): watched.append(sorted(each.bootstrap_room for each in receivers))

manager, watched, asked = Manager(), [], []
writers = Watched()
held_rooms._writers = lambda: writers
queue = object.__new__(Queue)
queue.gloo_group, queue._deferred_releases, queue.deferred_kv_release_timeout = dist.group.WORLD, [], float("inf")
queue.enable_host_receive, queue._observe_deferred_kv_release = False, lambda **_: None
queue._do_release = lambda waiting, _: free.append(waiting.req.bootstrap_room)

def fail(room, num_ranks):
    receiver = Receiver(bootstrap_room=room, kv_mgr=manager, abort_notified=True, bootstrap_infos=[0] * num_ranks)
    def ask(force_arm):
        asked.append(room)
        receiver._abort_generation = manager.register_deferred_abort_room(room)
    receiver._send_abort_notification = ask
    socket = SimpleNamespace(getsockopt=lambda _: taken[0])
    receiver._connect_to_bootstrap_server = lambda _: (socket, threading.Lock())
    ask(True)
    request = SimpleNamespace(bootstrap_room=room)
    queue._defer_release(SimpleNamespace(req=request, kv_receiver=receiver, metadata_buffer_index=room))
    return receiver

def step(hooked=True):
    free.clear()
    if hooked: held_rooms.release_what_nobody_writes_to(Queue.resolve_deferred_releases, queue)
    else: Queue.resolve_deferred_releases(queue)
    return sorted(free)

answering, silent, partly, unheard = fail(1, 2), fail(2, 2), fail(3, 2), fail(4, 1)
asked.clear()
steps = [step()]
for rank in (0, 1): manager.note_abort_ack(1, rank, answering._abort_generation)
manager.note_abort_ack(3, 0, partly._abort_generation)
steps += [step()]                # those that have answered
ended.add(2)
steps += [step(hooked=False)]    # SGLang alone waits on
steps += [step()]                # those whose engine has gone
ended.add(3)
steps += [step(), step()]
old, now = unheard._abort_generation, held_rooms.time.monotonic
held_rooms.time.monotonic = lambda: now() + 6
taken = [zmq.POLLIN]             # its socket is full: nobody waits for that
steps += [step()]
held_rooms.time.monotonic = lambda: now() + 17
taken = [zmq.POLLIN | zmq.POLLOUT]
steps += [step()]                # the question is repeated, and the answer to the first counts no longer
manager.note_abort_ack(4, 0, old)
steps += [step()]
manager.note_abort_ack(4, 0, unheard._abort_generation)
steps += [step()]
print(json.dumps([steps, watched, asked]))
"""


@pytest.mark.slow
def test_sglangs_queue_keeps_the_pages_until_the_writers_have_answered_or_gone(tmp_path):
    (steps, watched, asked), _ = printed_by(_HELD, str(tmp_path / "ranks"))
    assert steps == [[], [1], [], [2], [3], [], [], [], [], [4]]
    assert watched == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4], [4], [4], [4], [4], []]
    assert asked == [4]


class Waiting(SimpleNamespace):
    """A queue of SGLang's, of requests whose KV is on its way."""

    def _poll_with_metadata_gate(self) -> list[int]:
        return [state for _, state in self.states]

    @property
    def queue(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(req=SimpleNamespace(rid=rid)) for rid, _ in self.states]

    def pop_transferred(self, rids: list[str]) -> list[str]:
        self.states = [(rid, state) for rid, state in self.states if rid not in rids]
        return rids


_BESIDE = """
import json
from engine import cpu_support
cpu_support.install()
from sglang.srt.disaggregation.base import KVPoll
print(json.dumps({name: int(getattr(KVPoll, name)) for name in ("Failed", "Success", "Transferring")}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("retracted", [["somebody"], []])
def test_transfers_end_beside_retracted_requests(monkeypatch, retracted: list[str]):
    poll = SimpleNamespace(**printed_by(_BESIDE)[0])
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.base", SimpleNamespace(KVPoll=poll))
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    from engine.hooks.kv.held_rooms import end_beside_retracted

    states = [("failed", poll.Failed), ("there", poll.Success), ("late", poll.Transferring)]
    queue = Waiting(states=states, enable_staging=False)
    scheduler = SimpleNamespace(
        disagg_decode_transfer_queue=queue,
        disagg_decode_prealloc_queue=SimpleNamespace(retracted_queue=retracted),
        enable_hisparse=False,
        waiting_queue=[],
    )
    end_beside_retracted(None, scheduler)
    assert scheduler.waiting_queue == (["failed", "there"] if retracted else [])
    assert [rid for rid, _ in queue.states] == (["late"] if retracted else ["failed", "there", "late"])


_KEPT = """
import json, sys
from collections import defaultdict
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
import torch.distributed as dist
from sglang.srt.disaggregation.base import KVPoll
from engine.hooks.kv.held_rooms import with_kept_sources

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
manager = SimpleNamespace(_staging_outstanding=defaultdict(int), _deferred_ack_poisoned_rooms=set())
senders = [SimpleNamespace(kv_mgr=manager, bootstrap_room=room) for room in (1, 2, 3, None)]
states = [KVPoll.Failed, KVPoll.Failed, KVPoll.Success, KVPoll.Failed]  # the last one has no decode engine
group = dist.group.WORLD
poll = with_kept_sources(lambda *_: list(map(int, states)))
seen = []

def look():
    seen.append([each == KVPoll.Transferring for each in poll(senders, group, group)])

look()
manager._staging_outstanding[1] = 1  # a chunk that a thread has taken, and NIXL has not finished
look()
manager._staging_outstanding[1] = 0
look()
manager._staging_outstanding[2] = 1
manager._deferred_ack_poisoned_rooms.add(2)  # a write of it has failed, and this one may never end
look()
print(json.dumps(seen))
"""


@pytest.mark.slow
def test_pages_are_kept_while_a_chunk_is_on_its_way(tmp_path):
    """A prefill engine's pages of a failed room, while NIXL may read them, on all ranks or on none."""
    (before, under_way, after, broken), _ = printed_by(_KEPT, str(tmp_path / "ranks"))
    assert before == after == broken == [False] * 4
    assert under_way == [True, False, False, False]


_PAGES = """
import json
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
from engine.hooks.kv.room import wait_for_the_running_step

found = {}
common = dict(dtype=torch.float32, device="cpu", kvcache=None, need_sort=True)
waits = []
torch.cuda.synchronize = waits.append

def give(allocator, tokens):
    details = dict(fill_len=tokens, prefix_len=0, total_prefix_len=0, prefix_indices=None, swa_tail_len=0)
    request = SimpleNamespace(kv=SimpleNamespace())
    return wait_for_the_running_step(
        alloc_for_decode_prealloc, allocator, req=request, delta_len=tokens, uses_swa_tail=False, **details
    )

def reused(allocator):
    used = allocator.alloc(128)
    allocator.free(used)
    steps = []
    for need in (48, 40, 64):  # of 256: the third must take what was freed
        taken = give(allocator, need)
        steps.append([len(waits), bool(set(taken.tolist()) & set(used.tolist()))])
    while (taken := give(allocator, 16)) is not None:
        pass
    waits.clear()
    return steps

allocators = TokenToKVPoolAllocator(256, **common), PagedTokenToKVPoolAllocator(256, 16, **common)
found["reused"] = [reused(each) for each in allocators]
print(json.dumps(found))
"""


@pytest.mark.slow
def test_pages_that_were_just_freed_come_last_and_after_a_wait():
    found, _ = printed_by(_PAGES)
    assert found["reused"] == [[[0, False], [0, False], [1, True]]] * 2


PEER = "10.0.0.1:9000"
_UNLIKE = f"""
import json
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
from sglang.srt.disaggregation.common import conn
from engine.hooks.kv.room import decline_unlike

ours = {{"page_size": 64, "kv_cache_dtype": "bfloat16"}}
topology = {{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "follow_bootstrap_room": True}}
original = conn.CommonKVManager.try_ensure_parallel_info
unlike = []
for theirs in ({{}}, {{"page_size": 1}}, {{"kv_cache_dtype": "fp8_e4m3"}}):
    answer = SimpleNamespace(status_code=200, json=lambda: {{**topology, **ours, **theirs}})
    conn.requests = SimpleNamespace(get=lambda url, timeout: answer)  # of the prefill engine's bootstrap server
    manager = SimpleNamespace(
        prefill_info_table={{}},
        kv_args=SimpleNamespace(page_size=64),
        kv_cache_dtype_str="bfloat16",
        dcp_size=1,
        attn_tp_size=1,
        kv_layout=None,
        dsv41_spec_layout=None,
        is_mla_backend=False,
        is_hybrid_mla_backend=False,
        _resolve_rank_mapping=lambda _info: None,
    )
    declined = not decline_unlike(original, manager, "{PEER}")
    try:
        raised = None if original(manager, "{PEER}") else "no"
    except RuntimeError as error:
        raised = str(error)
    unlike.append([declined, list(manager.prefill_info_table), raised])
print(json.dumps(unlike))
"""


@pytest.mark.slow
def test_an_engine_goes_on_without_a_prefill_engine_unlike_itself():
    (alike, other_pages, other_dtype), errors = printed_by(_UNLIKE)
    assert alike == [False, [PEER], None]
    for (declined, known, raised), error in ((other_pages, "Page size"), (other_dtype, "KV cache dtype")):
        assert declined
        assert known == []
        assert raised.startswith(f"{error} mismatch"), "without the hook"
    assert f"no KV from the prefill engine at {PEER}: Page size mismatch" in errors
