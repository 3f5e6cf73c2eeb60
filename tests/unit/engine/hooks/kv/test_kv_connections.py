"""Peers whose connection has broken are dropped from NIXL, so that SGLang reloads them; others stay."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from nixl._bindings import nixlBackendError, nixlCancelledError, nixlRemoteDisconnectError

from engine.hooks.kv import connections
from engine.hooks.kv.connections import connect_until_it_works, reload_broken_peers

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("sglang")]

TRANSPORT_ERRORS = (nixlRemoteDisconnectError, nixlBackendError, nixlCancelledError)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SETTLED_AFTER_S", 0.2)


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


def new_manager() -> Any:
    """SGLang's, which has not been constructed."""
    from sglang.srt.disaggregation.nixl.conn import NixlKVManager

    return object.__new__(NixlKVManager)


def manager_of() -> Any:
    manager = new_manager()
    manager.agent = Agent()
    manager.decode_kv_args_table = {"decode": SimpleNamespace(agent_metadata=b"decode", kv_xfer_segments=1)}
    manager._peer_reload_lock, manager._peer_reload_times = threading.Lock(), {}
    manager.prep_handles, manager.prep_handles_slice_dst, manager._prepared_state_plans = {"decode": 1}, {}, {}
    manager._prepare_payload_xfer = manager._prepare_state_xfer = lambda info: None
    manager.request_status, manager._deferred_ack_targets, manager._deferred_ack_poisoned_rooms = {}, {}, set()
    manager._staging_outstanding, manager.acknowledged = {}, []
    manager._send_abort_acks = lambda room, targets: manager.acknowledged.append(room) if targets else None
    return manager


def failed(manager: Any, fail: Callable[[], None], hooked: bool = True) -> list[tuple[str, str]]:
    """What SGLang's worker does with a chunk of room 7 that `fail` sends; the calls of NIXL."""
    from sglang.srt.disaggregation.nixl import conn

    original, infos = type(manager)._reload_invalidated_peers, {"decode": SimpleNamespace(room=7)}
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
    return manager.agent.calls


def breaks(kind: type[Exception]) -> None:
    raise kind("broken")


@pytest.mark.parametrize("kind", TRANSPORT_ERRORS)
def test_a_broken_connection_is_made_again(kind: type[Exception]):
    assert failed(manager_of(), lambda: breaks(kind), hooked=False) == []
    manager = manager_of()
    for _ in range(2):
        assert failed(manager, lambda: breaks(kind)) == [("remove", "decode"), ("add", "decode")]
    assert manager.prep_handles == {}


@pytest.mark.parametrize("kind", TRANSPORT_ERRORS)
@pytest.mark.parametrize("under_way", [0, 1])
def test_a_room_is_answered_for_if_its_only_endpoint_is_closed_and_nothing_else_is_under_way(
    kind: type[Exception], under_way: int
):
    """After other errors than a disconnect, NIXL goes on writing over an endpoint that is healthy."""
    manager = manager_of()
    manager.agent.transfer = lambda handle: breaks(kind)
    failed(manager, lambda: manager._post_xfer(1, "rejected"), hooked=False)
    asked(manager)
    assert manager.acknowledged == []  # by SGLang alone, never
    manager._staging_outstanding[7] = under_way
    assert failed(manager, lambda: manager._post_xfer(1, "rejected")) == [("remove", "decode"), ("add", "decode")]
    asked(manager)
    assert manager.acknowledged == []  # what has been sent may arrive yet
    for timer in [each for each in threading.enumerate() if isinstance(each, threading.Timer)]:
        timer.join()
    manager._staging_outstanding.clear()
    asked(manager)
    is_proven = kind is nixlRemoteDisconnectError and not under_way
    assert manager.acknowledged == ([7] if is_proven else [])


def asked(manager: Any) -> None:
    """A decode engine asks about the room."""
    manager.register_deferred_ack_target(7, SimpleNamespace(ip="::1", port=1))
    manager._maybe_ack_drained_abort(7)


@pytest.mark.parametrize("hooked", [False, True])
def test_a_message_socket_that_could_not_connect_at_first_does_so_later(hooked: bool):
    manager = new_manager()
    manager._zmq_ctx, manager._socket_lock, manager.defer_decode_allocation = zmq.Context(), threading.Lock(), False
    manager._socket_cache, manager._monitor_cache, manager._socket_send_locks = {}, {}, {}
    original = type(manager)._connect
    if hooked:
        manager._connect = lambda endpoint, is_ipv6=False: connect_until_it_works(original, manager, endpoint, is_ipv6)
    with manager._zmq_ctx.socket(zmq.PULL) as pull:
        endpoint = f"tcp://127.0.0.1:{pull.bind_to_random_port('tcp://127.0.0.1')}"
        pull.unbind(endpoint)
        manager._send_multipart_locked(endpoint, [b"lost"])
        time.sleep(0.5)  # the connection is refused
        pull.bind(endpoint)
        for _ in range(20):
            manager._send_multipart_locked(endpoint, [b"result"])
        assert bool(pull.poll(3000 if hooked else 500)) is hooked
    for socket in (*manager._socket_cache.values(), *manager._monitor_cache.values()):
        socket.close(linger=0)
    manager._zmq_ctx.term()


def test_other_errors_say_nothing_of_the_connection():
    assert failed(manager_of(), lambda: breaks(ValueError)) == []
