"""Peers whose connection has broken are dropped from NIXL, so that SGLang reloads them; others stay."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine import cpu_support

cpu_support.install()

from sglang.srt.disaggregation.nixl.conn import _NIXL_TRANSPORT_ERRORS, NixlKVManager  # noqa: E402

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
    return manager


def failed(manager: NixlKVManager, error: Exception, hooked: bool = True) -> list[tuple[str, str]]:
    original = NixlKVManager._reload_invalidated_peers
    try:
        raise error
    except Exception:  # noqa: BLE001 as SGLang's worker does
        if hooked:
            reload_broken_peers(original, manager, {"decode": None, "unknown": None})
        else:
            original(manager, {"decode": None})
    return manager.agent.calls


@pytest.mark.parametrize("kind", _NIXL_TRANSPORT_ERRORS)
def test_a_broken_connection_is_made_again(kind: type[Exception]):
    assert failed(manager_of(), kind("broken"), hooked=False) == []
    manager = manager_of()
    assert failed(manager, kind("broken")) == [("remove", "decode"), ("add", "decode")]
    assert manager.prep_handles == {}
    assert len(failed(manager, kind("broken"))) == 2, "SGLang reloads a peer once per second at most"


def test_other_errors_say_nothing_of_the_connection():
    assert failed(manager_of(), ValueError("a chunk of another size")) == []
