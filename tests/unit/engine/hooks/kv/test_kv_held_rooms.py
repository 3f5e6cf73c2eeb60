"""When pages of KV are free, by SGLang's own queues and allocators and real ports; and whose KV is taken."""

import logging
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from support.waiting import wait_until

from engine.hooks.kv import held_rooms
from engine.hooks.kv.held_rooms import Writers, end_beside_retracted, with_kept_sources
from engine.hooks.kv.port_probe import PortProbe
from engine.hooks.kv.room import decline_unlike, wait_for_the_running_step

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


def test_a_rank_at_no_name_hides_no_other(writers: Writers):
    """An error would end the thread that looks, and no pages of an engine that has gone would be free again."""
    nowhere, gone = Receiver(1), Receiver(0)
    nowhere.bootstrap_infos[0]["rank_ip"] = "prefill..svc"
    with listening() as server:
        gone.bootstrap_infos[0]["rank_port"] = port_of(server)
    assert not writers.have_ended(nowhere)
    wait_until(lambda: writers.have_ended(gone))
    assert not writers.have_ended(nowhere)


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


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Any]:
    """A group of this process alone, as the ranks of an engine have one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Rooms:
    """SGLang's queue of a decode engine's failed rooms, and what it keeps of answers."""

    def __init__(self, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
        from sglang.srt.disaggregation.decode import DecodeTransferQueue

        self.ended: set[int] = set()  # rooms whose prefill engine has gone
        self.watched: list[list[int]] = []
        self.asked: list[int] = []
        self.takes_messages = True  # the prefill ranks' sockets
        self._free: list[int] = []
        self._release = DecodeTransferQueue.resolve_deferred_releases
        self.manager = object.__new__(CommonKVManager)
        self.manager._deferred_abort_ack_tracker, self.manager._deferred_abort_generation = {}, 0
        self.manager.connection_pool, self.manager.connection_lock = {}, threading.Lock()
        self._invalidate = CommonKVReceiver.invalidate_cached_bootstrap_infos
        self._queue = queue = object.__new__(DecodeTransferQueue)
        queue.gloo_group, queue._deferred_releases, queue.deferred_kv_release_timeout = ranks, [], float("inf")
        queue.enable_host_receive, queue._observe_deferred_kv_release = False, lambda **_: None
        queue._do_release = lambda waiting, _: self._free.append(waiting.req.bootstrap_room)
        writers = Writers()
        writers.have_ended = lambda receiver: receiver.bootstrap_room in self.ended
        writers.forget = lambda receivers: self.watched.append(sorted(each.bootstrap_room for each in receivers))
        monkeypatch.setattr(held_rooms, "_writers", lambda: writers)

    def fail(self, room: int, num_ranks: int) -> Any:
        """Its receiver."""
        receiver = Receiving(bootstrap_room=room, kv_mgr=self.manager, abort_notified=True)
        receiver.bootstrap_infos = self.manager.connection_pool[f"prefill-{room}"] = [0] * num_ranks
        receiver._connection_pool_entries = {f"prefill-{room}": receiver.bootstrap_infos}
        receiver.invalidate_cached_bootstrap_infos = lambda: self._invalidate(receiver)

        def ask(force_arm: bool) -> None:
            self.asked.append(room)
            receiver._abort_generation = self.manager.register_deferred_abort_room(room)

        receiver._send_abort_notification = ask
        socket = SimpleNamespace(getsockopt=lambda _: zmq.POLLIN | (zmq.POLLOUT if self.takes_messages else 0))
        receiver._connect_to_bootstrap_server = lambda _: (socket, threading.Lock())
        ask(True)
        request = SimpleNamespace(bootstrap_room=room)
        self._queue._defer_release(SimpleNamespace(req=request, kv_receiver=receiver, metadata_buffer_index=room))
        return receiver

    def freed(self, hooked: bool = True) -> list[int]:
        """The rooms whose pages the next step frees."""
        self._free.clear()
        if hooked:
            held_rooms.release_what_nobody_writes_to(self._release, self._queue)
        else:
            self._release(self._queue)
        return sorted(self._free)


class Receiving(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.slow
def test_sglangs_queue_keeps_the_pages_until_the_writers_have_answered_or_gone(sglang, ranks, monkeypatch):
    rooms = Rooms(ranks, monkeypatch)
    answering, _silent, partly, unheard = (rooms.fail(*each) for each in ((1, 2), (2, 2), (3, 2), (4, 1)))
    rooms.asked.clear()
    assert rooms.freed() == []
    for rank in (0, 1):
        rooms.manager.note_abort_ack(1, rank, answering._abort_generation)
    rooms.manager.note_abort_ack(3, 0, partly._abort_generation)
    assert rooms.freed() == [1]  # those that have answered
    rooms.ended.add(2)
    assert rooms.freed(hooked=False) == []  # SGLang alone waits on
    assert rooms.freed() == [2]  # those whose engine has gone
    assert rooms.manager.connection_pool.keys() == {"prefill-1", "prefill-3", "prefill-4"}  # 2's is asked for anew
    rooms.ended.add(3)
    assert [rooms.freed(), rooms.freed()] == [[3], []]
    first_question, now = unheard._abort_generation, time.monotonic
    monkeypatch.setattr(held_rooms, "time", SimpleNamespace(monotonic=lambda: now() + 6))
    rooms.takes_messages = False  # its socket is full: nobody waits for that
    assert rooms.freed() == []
    monkeypatch.setattr(held_rooms, "time", SimpleNamespace(monotonic=lambda: now() + 17))
    rooms.takes_messages = True
    assert (rooms.freed(), rooms.asked) == ([], [4])  # the question is repeated
    rooms.manager.note_abort_ack(4, 0, first_question)
    assert rooms.freed() == []  # and the answer to the first counts no longer
    rooms.manager.note_abort_ack(4, 0, unheard._abort_generation)
    assert rooms.freed() == [4]
    assert rooms.watched == [[1, 2, 3, 4], [2, 3, 4], [3, 4], [4], [4], [4], [4], [4], []]


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


@pytest.mark.slow
@pytest.mark.parametrize("retracted", [["somebody"], []])
def test_transfers_end_beside_retracted_requests(sglang, retracted: list[str]):
    from sglang.srt.disaggregation.base import KVPoll

    states = [("failed", KVPoll.Failed), ("there", KVPoll.Success), ("late", KVPoll.Transferring)]
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


@pytest.mark.slow
def test_pages_are_kept_while_a_chunk_is_on_its_way(sglang, ranks):
    """A prefill engine's pages of a failed room, while NIXL may read them, on all ranks or on none."""
    from sglang.srt.disaggregation.base import KVPoll

    manager = SimpleNamespace(_staging_outstanding=defaultdict(int), _deferred_ack_poisoned_rooms=set())
    senders = [SimpleNamespace(kv_mgr=manager, bootstrap_room=room) for room in (1, 2, 3, None)]
    states = [KVPoll.Failed, KVPoll.Failed, KVPoll.Success, KVPoll.Failed]  # the last one has no decode engine
    poll = with_kept_sources(lambda *_: list(map(int, states)))

    def kept() -> list[bool]:
        return [each == KVPoll.Transferring for each in poll(senders, ranks, ranks)]

    assert kept() == [False] * 4
    manager._staging_outstanding[1] = 1  # a chunk that a thread has taken, and NIXL has not finished
    assert kept() == [True, False, False, False]
    manager._staging_outstanding[1] = 0
    assert kept() == [False] * 4
    manager._staging_outstanding[2] = 1
    manager._deferred_ack_poisoned_rooms.add(2)  # a write of it has failed, and this one may never end
    assert kept() == [False] * 4


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 16])
def test_pages_that_were_just_freed_come_last_and_after_a_wait(sglang, monkeypatch, page: int):
    import torch
    from sglang.srt.disaggregation.decode import alloc_for_decode_prealloc
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    waits: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    common = {"dtype": torch.float32, "device": "cpu", "kvcache": None, "need_sort": True}
    allocator = TokenToKVPoolAllocator(256, **common) if page == 1 else PagedTokenToKVPoolAllocator(256, page, **common)

    def give(tokens: int) -> Any:
        details = {"fill_len": tokens, "prefix_len": 0, "total_prefix_len": 0, "prefix_indices": None}
        details |= {"req": SimpleNamespace(kv=SimpleNamespace()), "uses_swa_tail": False, "swa_tail_len": 0}
        return wait_for_the_running_step(alloc_for_decode_prealloc, allocator, delta_len=tokens, **details)

    used = allocator.alloc(128)
    allocator.free(used)
    steps = []
    for need in (48, 40, 64):  # of 256: the third must take what was freed
        taken = give(need)
        steps.append((len(waits), bool(set(taken.tolist()) & set(used.tolist()))))
    assert steps == [(0, False), (0, False), (1, True)]


PEER = "10.0.0.1:9000"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "error"),
    [({}, None), ({"page_size": 1}, "Page size mismatch"), ({"kv_cache_dtype": "fp8_e4m3"}, "KV cache dtype mismatch")],
)
def test_an_engine_goes_on_without_a_prefill_engine_unlike_itself(
    sglang, monkeypatch, caplog: pytest.LogCaptureFixture, theirs: dict[str, Any], error: str | None
):
    from sglang.srt.disaggregation.common import conn

    topology = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "follow_bootstrap_room": True}
    info = {**topology, "page_size": 64, "kv_cache_dtype": "bfloat16", **theirs}
    answer = SimpleNamespace(status_code=200, json=lambda: info)  # of the prefill engine's bootstrap server
    monkeypatch.setattr(conn, "requests", SimpleNamespace(get=lambda url, timeout: answer))
    manager = SimpleNamespace(
        prefill_info_table={},
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
    original = conn.CommonKVManager.try_ensure_parallel_info
    with caplog.at_level(logging.ERROR):
        assert decline_unlike(original, manager, PEER) is (error is None)
    assert list(manager.prefill_info_table) == ([] if error else [PEER])
    if error:
        assert f"no KV from the prefill engine at {PEER}: {error}" in caplog.text
        with pytest.raises(RuntimeError, match=error):
            original(manager, PEER)  # without the hook
