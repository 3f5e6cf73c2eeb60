"""Peers whose connection has broken are dropped from NIXL, so that SGLang reloads them; others stay."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from engine import cpu_support

cpu_support.install()

from sglang.srt.disaggregation.nixl import conn  # noqa: E402
from sglang.srt.disaggregation.nixl.conn import NixlKVManager  # noqa: E402

from engine.hooks.kv.connections import reload_broken_peers  # noqa: E402


class Agent:
    """NIXL 1.5.1: it knows a peer until that is removed."""

    def __init__(self) -> None:
        self.known, self.calls = {"decode"}, []

    def check_remote_metadata(self, peer: str) -> bool:
        return peer in self.known

    def remove_remote_agent(self, peer: str) -> None:
        self.known.discard(peer)
        self.calls.append(("remove", peer))

    def add_remote_agent(self, metadata: bytes) -> None:
        self.known.add(metadata.decode())
        self.calls.append(("add", metadata.decode()))


def manager_of() -> NixlKVManager:
    import threading

    manager = object.__new__(NixlKVManager)
    manager.agent = Agent()
    manager.decode_kv_args_table = {"decode": SimpleNamespace(agent_metadata=b"decode", kv_xfer_segments=1)}
    manager._peer_reload_lock, manager._peer_reload_times = threading.Lock(), {}
    manager.prep_handles, manager.prep_handles_slice_dst, manager._prepared_state_plans = {"decode": 1}, {}, {}
    manager._prepare_payload_xfer = manager._prepare_state_xfer = lambda info: None
    manager.request_status, manager._deferred_ack_targets, manager._deferred_ack_poisoned_rooms = {}, {}, set()
    manager._staging_outstanding, manager.acknowledged = {}, []
    manager._send_abort_acks = lambda room, targets: manager.acknowledged.append(room) if targets else None
    return manager


def failed(manager: NixlKVManager, fail: Callable[[], None], hooked: bool = True) -> list[tuple[str, str]]:
    """What SGLang's worker does with a chunk of room 7 that `fail` sends; the calls of NIXL."""
    original, infos = NixlKVManager._reload_invalidated_peers, {"decode": SimpleNamespace(room=7)}
    manager.agent.calls.clear()
    try:
        fail()
    except Exception as error:  # noqa: BLE001 as SGLang's worker does
        if isinstance(error, conn._NixlPostError):
            manager.poison_deferred_ack_room(7)
        if hooked:
            reload_broken_peers(original, manager, infos | {"unknown": SimpleNamespace(room=7)})
        else:
            original(manager, infos)
    manager.register_deferred_ack_target(7, SimpleNamespace(ip="::1", port=1))  # the decode engine asks
    manager._maybe_ack_drained_abort(7)
    return manager.agent.calls


def breaks(kind: type[Exception]) -> None:
    raise kind("broken")


class Rejected:
    """A write that NIXL takes not, or takes in part."""

    def __init__(self, is_active: bool = False) -> None:
        self.is_active, self.is_released = is_active, False

    def release(self) -> None:
        if self.is_active:
            raise RuntimeError("NIXL_ERR_REPOST_ACTIVE")
        self.is_released = True


@pytest.mark.parametrize("kind", conn._NIXL_TRANSPORT_ERRORS)
def test_a_broken_connection_is_made_again(kind: type[Exception]):
    assert failed(manager_of(), lambda: breaks(kind), hooked=False) == []
    manager = manager_of()
    for _ in range(2):
        assert failed(manager, lambda: breaks(kind)) == [("remove", "decode"), ("add", "decode")]
    assert manager.prep_handles == {}


@pytest.mark.parametrize("kind", conn._NIXL_TRANSPORT_ERRORS)
def test_a_room_whose_write_is_rejected_is_acknowledged_once_the_connection_is_closed(kind: type[Exception]):
    manager = manager_of()
    manager.agent.transfer = lambda handle: breaks(kind)
    failed(manager, lambda: manager._post_xfer(Rejected(), "rejected"), hooked=False)
    assert manager.acknowledged == []  # by SGLang alone, never
    write = Rejected()
    assert failed(manager, lambda: manager._post_xfer(write, "rejected")) == [("remove", "decode"), ("add", "decode")]
    assert write.is_released
    assert manager.acknowledged == [7]


def test_a_room_is_not_acknowledged_while_nixl_does_not_give_up_its_write():
    manager = manager_of()
    manager.agent.transfer = lambda handle: breaks(conn._NIXL_TRANSPORT_ERRORS[0])
    assert failed(manager, lambda: manager._post_xfer(Rejected(is_active=True), "rejected")) == []
    assert manager.acknowledged == []


def test_a_room_is_not_acknowledged_while_another_chunk_of_it_is_under_way():
    manager = manager_of()
    manager._staging_outstanding[7] = 1
    failed(manager, lambda: breaks(conn._NIXL_TRANSPORT_ERRORS[0]))
    assert manager.acknowledged == []


def test_other_errors_say_nothing_of_the_connection():
    assert failed(manager_of(), lambda: breaks(ValueError)) == []
