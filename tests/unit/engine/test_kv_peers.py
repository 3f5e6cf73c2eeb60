"""Who may reach the KV ports of an engine, over real sockets where libzmq or aiohttp decides."""

import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
from aiohttp import web

from engine.hooks.kv import peers as hooks
from engine.hooks.kv.peers import KvPeers, write_found_peers


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("10.0.0.2", True),
        ("::ffff:10.0.0.2", True),  # as a server on both families sees it
        ("10.0.0.3", False),
        ("10.2.200.1", True),
        ("10.3.0.1", False),
        ("fd00::5", True),
        ("fd01::5", False),
        ("127.0.0.1", True),  # this host's own processes
        ("::1", True),
        ("", False),
        ("decode-0", False),
    ],
)
def test_addresses_and_networks(address: str, expected: bool):
    assert KvPeers(["10.0.0.2", "10.2.0.0/16", "fd00::/16"]).include(address) is expected


@pytest.mark.parametrize(
    ("failure", "is_kept"), [(socket.EAI_AGAIN, True), (socket.EAI_FAIL, True), (socket.EAI_NONAME, False)]
)
def test_a_failed_lookup_forgets_nobody(monkeypatch: pytest.MonkeyPatch, failure: int, is_kept: bool):
    clock, answers = [0.0], ["10.0.0.7"]

    def getaddrinfo(name: str, *_args: object, **_options: object) -> list[tuple]:
        if name == "decode-0" and not answers:
            raise socket.gaierror(failure, "failed")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (answers[0] if name == "decode-0" else "10.0.0.9", 0))]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    peers = KvPeers(["decode-0", "decode-1"], lambda: clock[0])
    assert peers.include("10.0.0.7")
    answers.clear()
    clock[0] = 5.0  # what has been resolved holds for some time
    assert peers.include("10.0.0.7")
    for clock[0] in (10.0, 20.0):
        assert peers.include("10.0.0.7") is is_kept
        assert peers.include("10.0.0.9")
    answers.append("10.0.0.8")  # it answers again, and its pod has moved
    clock[0] = 30.0
    assert peers.include("10.0.0.8")
    assert not peers.include("10.0.0.7")


@pytest.mark.parametrize("name", ["decode..svc", ".", "d" * 64])
def test_a_name_that_is_none_is_nobodys(name: str):
    """An error would end the thread that answers handshakes, and no peer could connect any more."""
    assert not KvPeers([name, "10.0.0.2"]).include("10.0.0.3")


def test_a_stranger_is_logged_once_and_not_without_bound(caplog: pytest.LogCaptureFixture):
    peers = KvPeers(["10.0.0.2"])
    for _ in range(3):
        assert not peers.include("10.0.0.3")
    assert len(caplog.records) == 1
    assert "10.0.0.3" in caplog.text
    assert "engine.kv_peers" in caplog.text
    for number in range(1000):
        peers.include(f"10.1.{number // 250}.{number % 250}")
    assert len(caplog.records) <= 64


def test_found_peers_come_and_go(tmp_path: Path):
    file = tmp_path / "engine-kv-peers"
    peers = KvPeers(["10.0.0.2"], found=file)
    assert not peers.include("10.0.0.7")  # the agent has written nothing yet
    write_found_peers(file, ["10.0.0.7", "fd00:0::7"])
    assert all(map(peers.include, ["10.0.0.2", "10.0.0.7", "::ffff:10.0.0.7", "fd00::7"]))
    write_found_peers(file, ["10.0.0.8"])
    assert (peers.include("10.0.0.7"), peers.include("10.0.0.8")) == (False, True)
    write_found_peers(file, [])
    assert not peers.include("10.0.0.8")
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_the_engines_processes_read_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(hooks.PEERS_VARIABLE, "10.0.0.2")
    monkeypatch.setenv(hooks.FOUND_PEERS_VARIABLE, str(tmp_path / "found"))
    peers = hooks._peers("10.0.0.3")
    write_found_peers(tmp_path / "found", ["10.0.0.7"])
    assert all(map(peers.include, ["10.0.0.2", "10.0.0.3", "10.0.0.7"]))
    assert not peers.include("10.0.0.8")


async def test_the_bootstrap_server_tells_peers_only(monkeypatch: pytest.MonkeyPatch):
    async def route(_request: web.Request) -> web.Response:
        return web.Response(text="where the ranks are")

    app = web.Application()
    monkeypatch.delenv(hooks.PEERS_VARIABLE, raising=False)
    hooks.bootstrap_for_peers(None, SimpleNamespace(app=app))
    assert len(app.middlewares) == 0
    monkeypatch.setenv(hooks.PEERS_VARIABLE, "10.0.0.2")
    hooks.bootstrap_for_peers(None, SimpleNamespace(app=app))
    [guard] = app.middlewares
    answers = [await guard(SimpleNamespace(remote=remote), route) for remote in ("10.0.0.2", "10.0.0.3", None)]
    assert [answer.status for answer in answers] == [200, 403, 403]


@pytest.mark.slow
def test_a_message_arrives_once_its_sender_is_a_peer(monkeypatch: pytest.MonkeyPatch):
    """libzmq asks the handler for each connection. Engines keep one socket for a peer, which has to connect again."""
    monkeypatch.setenv(hooks.PEERS_VARIABLE, "10.0.0.2")
    is_known, was_refused = threading.Event(), threading.Event()
    asked: list[str] = []

    def include(_self: KvPeers, address: str) -> bool:
        asked.append(address)
        was_refused.set()
        return is_known.is_set()

    monkeypatch.setattr(KvPeers, "include", include)

    def make(context: zmq.Context, kind: int, host: str | None = None) -> tuple[int, zmq.Socket]:
        pull = context.socket(kind)
        return pull.bind_to_random_port(f"tcp://{host}"), pull

    context = zmq.Context()
    port, pull = hooks.socket_for_peers(make, context, zmq.PULL, host="127.0.0.1")
    unguarded = context.socket(zmq.PULL)  # made later: none of the hook's
    other_port = unguarded.bind_to_random_port("tcp://127.0.0.1")
    with zmq.Context() as elsewhere, elsewhere.socket(zmq.PUSH) as sender, elsewhere.socket(zmq.PUSH) as other:
        sender.linger = other.linger = 0
        other.connect(f"tcp://127.0.0.1:{other_port}")
        other.send(b"unguarded")
        assert unguarded.recv() == b"unguarded"
        sender.connect(f"tcp://127.0.0.1:{port}")
        sender.send(b"early")
        assert was_refused.wait(30)
        assert not pull.poll(200)
        is_known.set()
        assert pull.poll(30_000), "it never connected again"
        assert pull.recv() == b"early"
    assert set(asked) == {"127.0.0.1"}
    pull.close(0)
    unguarded.close(0)
    context.term()  # ends the handler's thread
