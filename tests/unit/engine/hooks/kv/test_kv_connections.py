"""KV connections of a prefill engine that break and are made again."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from nixl._bindings import nixlBackendError, nixlCancelledError, nixlNotFoundError, nixlRemoteDisconnectError

from engine.hooks.kv import connections as module
from engine.hooks.kv.connections import Connections
from engine.hooks.kv.posts import Posts

ROOM = 7
TIMEOUT_S = 10.0
BROKEN = nixlRemoteDisconnectError("NIXL_ERR_REMOTE_DISCONNECT")


class Agent:
    """NIXL's: the remote agents that it knows, and what was done to them, in order."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.calls: list[str] = []
        self.state: str | Exception = "PROC"  # of each transfer
        self.fails_to_post: Exception | None = None

    def add_remote_agent(self, metadata: bytes) -> None:
        self.calls.append(f"add {metadata.decode()}")
        self.known.add(metadata.decode())

    def remove_remote_agent(self, name: str) -> None:
        self.calls.append(f"remove {name}")
        if name not in self.known:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        self.known.remove(name)

    def initialize_xfer(self, _operation: str, _source: Any, _target: Any, name: str) -> str:
        if name not in self.known:
            raise nixlNotFoundError("NIXL_ERR_NOT_FOUND")
        return "handle"

    def transfer(self, _handle: str) -> str:
        if self.fails_to_post is not None:
            raise self.fails_to_post
        return "PROC"

    def check_xfer_state(self, _handle: str) -> str:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def release_xfer_handle(self, _handle: str) -> None: ...


class Manager:
    """SGLang's, with decode ranks that listen at ports of this machine."""

    def __init__(self) -> None:
        self.agent: Any = Agent()
        self.transfer_infos: dict[int, dict[str, object]] = {}
        self.decode_kv_args_table: dict[str, Any] = {}
        self.prep_handles: dict[str, object] = {"": "own"}
        self.prep_handles_slice_dst: dict[str, object] = {}
        self.listeners: dict[str, socket.socket] = {}

    def add_peer(self, name: str, room: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.listeners[name] = listener
        info = SimpleNamespace(endpoint="127.0.0.1", dst_port=listener.getsockname()[1], agent_metadata=name.encode())
        info.agent_name = name
        self.decode_kv_args_table[name] = info
        self.transfer_infos.setdefault(room, {})[name] = object()
        self.agent.add_remote_agent(info.agent_metadata)
        self._prepare_payload_xfer(info)

    def _prepare_payload_xfer(self, info: Any) -> None:
        self.prep_handles[info.agent_name] = object()


@pytest.fixture
def manager() -> Iterator[Manager]:
    made = Manager()
    made.add_peer("first", ROOM)
    made.agent.calls.clear()
    yield made
    for listener in made.listeners.values():
        listener.close()


@pytest.fixture
def agent(manager: Manager) -> Agent:
    """The real one, under the one that notes posts."""
    return manager.agent


@pytest.fixture
def posts(manager: Manager, agent: Agent) -> Posts:
    posts = Posts()
    posts.watch(manager)
    return posts


def send(manager: Manager, posts: Posts, room: int = ROOM) -> None:
    """A chunk of one transfer, as SGLang's thread sends it."""
    posts.begin_chunk(room)
    for name in manager.transfer_infos[room]:
        manager.agent.transfer(manager.agent.initialize_xfer("WRITE", None, None, name))


def break_connection(manager: Manager, posts: Posts, agent: Agent, error: Exception = BROKEN) -> None:
    agent.fails_to_post = error
    with pytest.raises(type(error)):
        send(manager, posts)
    agent.state = "ERR"
    agent.fails_to_post = None
    posts.end_chunk()


def test_a_connection_that_holds_is_left_alone(manager: Manager, posts: Posts, agent: Agent):
    send(manager, posts)
    agent.state = "DONE"
    send(manager, posts)
    assert agent.calls == []


@pytest.mark.parametrize("error", [BROKEN, nixlBackendError("NIXL_ERR_BACKEND"), nixlNotFoundError("none")])
def test_a_connection_that_broke_is_made_again(
    manager: Manager, posts: Posts, agent: Agent, error: Exception, caplog: pytest.LogCaptureFixture
):
    prepared = manager.prep_handles["first"]
    break_connection(manager, posts, agent, error)
    send(manager, posts)
    assert agent.calls == ["remove first", "add first"]
    assert manager.prep_handles["first"] is not prepared
    assert manager.prep_handles[""] == "own"
    port = manager.decode_kv_args_table["first"].dst_port
    assert [each.getMessage() for each in caplog.records] == [
        f"KV connection to the decode engine at 127.0.0.1:{port} is broken: {error}",
        f"KV connection to the decode engine at 127.0.0.1:{port} is made again",
    ]
    agent.state = "DONE"
    send(manager, posts)
    assert len(agent.calls) == 2


@pytest.mark.parametrize("error", [nixlCancelledError("closed room"), RuntimeError("something else")])
def test_other_errors_say_nothing_about_the_connection(manager: Manager, posts: Posts, agent: Agent, error: Exception):
    agent.state = "DONE"
    agent.fails_to_post = error
    with pytest.raises(type(error)):
        send(manager, posts)
    agent.fails_to_post = None
    send(manager, posts)
    assert agent.calls == []


@pytest.mark.parametrize("state", ["ERR", BROKEN])
def test_a_transfer_that_fails_later_counts_too(manager: Manager, posts: Posts, agent: Agent, state: Any):
    send(manager, posts)
    agent.state = state
    send(manager, posts)
    assert agent.calls == ["remove first", "add first"]


def test_nothing_is_removed_while_a_transfer_may_be_under_way(manager: Manager, posts: Posts, agent: Agent):
    """Another thread's chunk goes to the same peer."""
    begun, may_end = threading.Event(), threading.Event()

    def other() -> None:
        send(manager, posts)
        begun.set()
        assert may_end.wait(TIMEOUT_S)
        posts.end_chunk()

    thread = threading.Thread(target=other)
    thread.start()
    assert begun.wait(TIMEOUT_S)
    agent.fails_to_post = BROKEN
    with pytest.raises(nixlRemoteDisconnectError):
        send(manager, posts)
    agent.fails_to_post = None
    send(manager, posts)
    assert agent.calls == []
    agent.state = "DONE"
    may_end.set()
    thread.join()
    send(manager, posts)
    assert agent.calls == ["remove first", "add first"]


def test_a_peer_that_does_not_answer_stays_broken(
    manager: Manager, posts: Posts, agent: Agent, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_LAST_PAUSE_S", 0.02)
    port = manager.listeners["first"].getsockname()[1]
    manager.listeners["first"].close()
    break_connection(manager, posts, agent)
    for _ in range(3):
        send(manager, posts)
        time.sleep(0.03)
    assert agent.calls == []
    manager.listeners["first"] = socket.create_server(("127.0.0.1", port))
    agent.state = "DONE"
    send(manager, posts)
    assert agent.calls == ["remove first", "add first"]


def test_attempts_become_rarer(manager: Manager, posts: Posts, agent: Agent, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 1000.0)
    manager.listeners["first"].close()
    break_connection(manager, posts, agent)
    tried: list[object] = []
    monkeypatch.setattr(module.socket, "create_connection", lambda *args, **_: tried.append(args) or refuse())
    for _ in range(5):
        send(manager, posts)
    assert len(tried) == 1


def refuse() -> None:
    raise ConnectionRefusedError("refused")


def test_an_attempt_that_got_half_way_is_made_again(
    manager: Manager, posts: Posts, agent: Agent, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.0)
    break_connection(manager, posts, agent)
    working = agent.add_remote_agent
    monkeypatch.setattr(agent, "add_remote_agent", lambda _metadata: refuse())
    with pytest.raises(nixlNotFoundError):
        send(manager, posts)
    monkeypatch.setattr(agent, "add_remote_agent", working)
    time.sleep(0.01)
    agent.state = "DONE"
    send(manager, posts)
    assert agent.calls == ["remove first", "remove first", "add first"]


def test_rooms_without_known_peers_have_none(manager: Manager, posts: Posts):
    manager.transfer_infos[9] = {"unknown": object()}
    connections = Connections(manager, threading.RLock(), lambda _: False)
    assert connections.peers(9) == ()
    assert connections.peers(10) == ()
    assert connections.peers(ROOM) == ("first",)
