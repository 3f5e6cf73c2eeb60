"""What a prefill engine knows of its writes, and what it answers to decode engines that ask."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest
import zmq

from engine.hooks.kv import posts as module
from engine.hooks.kv.messages import MessageSender
from engine.hooks.kv.posts import Posts

ROOM, OTHER = 7, 8
TIMEOUT_S = 10.0


class Agent:
    """NIXL's, whose transfers get on as the test says."""

    def __init__(self) -> None:
        self.states: dict[str, str] = {}
        self.released: list[str] = []
        self.can_release = True
        self.fails = False
        self.posting: threading.Event | None = None  # each post waits for it

    def transfer(self, handle: str) -> str:
        if self.posting is not None:
            assert self.posting.wait(TIMEOUT_S)
        self.states[handle] = "PROC"
        if self.fails:
            raise RuntimeError("remote disconnected")
        return "PROC"

    def check_xfer_state(self, handle: str) -> str:
        if self.states[handle] == "lost":
            raise RuntimeError("remote disconnected")
        return self.states[handle]

    def release_xfer_handle(self, handle: str) -> None:
        if not self.can_release:
            raise RuntimeError("still in progress")
        self.released.append(handle)


class Manager:
    def __init__(self) -> None:
        self.agent = Agent()
        self.transfer_infos: dict[int, dict[str, object]] = {}  # no peers: those are another module's


@pytest.fixture
def posts(monkeypatch) -> Posts:
    """Those of this process, none so far."""
    fresh = Posts()
    monkeypatch.setattr(module, "_posts", fresh)
    return fresh


@pytest.fixture
def manager(posts: Posts) -> Manager:
    manager = Manager()
    posts.watch(manager)
    return manager


@pytest.fixture
def agent(manager: Manager) -> Agent:
    """The real one."""
    return manager.agent._agent


def test_a_room_is_done_when_its_posts_are(posts: Posts, manager: Manager, agent: Agent):
    assert posts.are_done(ROOM)
    posts.begin_chunk(ROOM)
    manager.agent.transfer("kv")
    manager.agent.transfer("aux")
    agent.states["kv"] = "DONE"
    assert (posts.are_done(ROOM), posts.are_done(OTHER)) == (False, True)
    agent.states["aux"] = "DONE"
    assert posts.are_done(ROOM)


def test_a_post_that_has_begun_counts(posts: Posts, manager: Manager, agent: Agent):
    """Between the check whether the room is closed and NIXL's own note of the write."""
    agent.posting = threading.Event()

    def post() -> None:
        posts.begin_chunk(ROOM)
        manager.agent.transfer("kv")

    thread = threading.Thread(target=post)
    thread.start()
    while ROOM not in posts._pending:
        thread.join(0.001)
    posts.close(ROOM)
    assert not posts.are_done(ROOM)
    agent.posting.set()
    thread.join()
    assert not posts.are_done(ROOM)
    agent.states["kv"] = "DONE"
    assert posts.are_done(ROOM)


def test_a_closed_room_gets_no_post(posts: Posts, manager: Manager, agent: Agent):
    posts.close(ROOM)
    posts.begin_chunk(ROOM)
    with pytest.raises(Exception, match="KV room 7 has failed"):
        manager.agent.transfer("kv")
    assert not agent.states
    posts.begin_chunk(OTHER)
    manager.agent.transfer("kv")
    assert (posts.are_done(ROOM), posts.are_done(OTHER)) == (True, False)


def test_what_belongs_to_no_room_is_posted(posts: Posts, manager: Manager, agent: Agent):
    posts.close(ROOM)
    manager.agent.transfer("kv")
    assert agent.states == {"kv": "PROC"}
    assert not posts._pending


@pytest.mark.parametrize("state", ["ERR", "lost"])
def test_a_failed_post_is_released_when_its_thread_has_left_it(
    posts: Posts, manager: Manager, agent: Agent, state: str
):
    posts.begin_chunk(ROOM)
    manager.agent.transfer("kv")
    agent.states["kv"] = state
    assert not posts.are_done(ROOM)
    assert not agent.released  # its thread still reads its state
    agent.can_release = False
    posts.end_chunk()
    assert not posts.are_done(ROOM)
    agent.can_release = True
    assert posts.are_done(ROOM)
    assert agent.released == ["kv"]


def test_a_post_left_behind_by_another_that_failed_is_waited_for(posts: Posts, manager: Manager, agent: Agent):
    posts.begin_chunk(ROOM)
    manager.agent.transfer("kv")
    agent.fails = True
    with pytest.raises(RuntimeError):
        manager.agent.transfer("aux")
    agent.states["aux"] = "ERR"
    posts.begin_chunk(OTHER)
    assert not posts.are_done(ROOM)
    agent.states["kv"] = "DONE"
    assert posts.are_done(ROOM)
    assert agent.released == ["aux"]


def test_nothing_is_kept_of_chunks_that_are_done(posts: Posts, manager: Manager, agent: Agent):
    for room in range(10):
        posts.begin_chunk(room)
        manager.agent.transfer("kv")
        agent.states["kv"] = "DONE"
    posts.end_chunk()
    assert not posts._pending


def test_closed_rooms_are_bounded(posts: Posts, monkeypatch):
    monkeypatch.setattr(module, "MAX_CLOSED_ROOMS", 3)
    for room in (1, 2, 3, 1, 4):
        posts.close(room)
    assert list(posts._closed) == [3, 1, 4]


def test_threads_of_a_manager_note_their_posts(posts: Posts):
    """The hook, around a thread that posts a chunk of each room and then waits for more."""
    manager, chunks = Manager(), queue.Queue()
    agent = manager.agent
    waits = threading.Event()

    def worker(manager, chunks, staging_buffer=None):
        while (chunk := chunks.get()).room:
            assert chunks.qsize() >= 0  # other calls reach the real queue
            manager.agent.transfer(chunk.room)
        waits.set()

    threads = [
        threading.Thread(target=module.note_posts, args=(worker, manager, chunks, None), daemon=True) for _ in range(2)
    ]
    for room in (ROOM, OTHER, 0, 0):
        chunks.put(SimpleNamespace(room=room))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert agent.states == {ROOM: "PROC", OTHER: "PROC"}
    assert (posts.are_done(ROOM), posts.are_done(OTHER)) == (False, False)


@pytest.fixture
def port():
    """A decode engine's, and what it gets."""
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.rcvtimeo = int(TIMEOUT_S * 1000)
    yield socket.bind_to_random_port("tcp://127.0.0.1"), socket.recv_multipart
    context.destroy(linger=0)


def question(port: int, room: int = ROOM, text: bytes = b"q1") -> list[bytes]:
    return [b"ABORT", str(room).encode(), b"127.0.0.1", str(port).encode(), text]


def test_a_room_is_quiet_once_nothing_of_it_is_under_way(
    posts: Posts, manager: Manager, agent: Agent, port, monkeypatch
):
    monkeypatch.setattr(module, "_sender", MessageSender())
    number, received = port
    posts.begin_chunk(ROOM)
    manager.agent.transfer("kv")
    manager.transfer_infos = {ROOM: {"decode:0": b"its pages"}, OTHER: {"decode:0": b"others"}}
    assert module.answer_aborts(True, manager, question(number)) is True
    assert manager.transfer_infos[ROOM], "its writes are under way"
    agent.states["kv"] = "DONE"
    module.answer_aborts(True, manager, question(number, text=b"q2"))
    assert manager.transfer_infos == {ROOM: {}, OTHER: {"decode:0": b"others"}}
    assert received() == [module.QUIET, b"q2"]  # and nothing for the first
    with pytest.raises(Exception, match="has failed"):
        manager.agent.transfer("more")


@pytest.mark.parametrize(
    "message",
    [
        [b"ABORT", b"7", b"127.0.0.1", b"1"],  # SGLang's own
        [b"ABORT", b"-1"],
        [b"ABORT", b"seven", b"127.0.0.1", b"1", b"q"],
        [b"ABORT", b"7", b"127.0.0.1", b"1", bytes(65)],
        [b"STOP", b"7", b"127.0.0.1", b"1", b"q"],
        [],
    ],
)
def test_other_messages_close_nothing(posts: Posts, manager: Manager, message: list[bytes]):
    assert module.answer_aborts(None, manager, message) is None
    assert not posts._closed


@pytest.mark.parametrize(
    ("host", "port"), [(b"\xff", b"1"), (b"a;b", b"1"), (b"127.0.0.1", b"0"), (b"127.0.0.1", b"http"), (b"", b"1")]
)
def test_nobody_can_be_answered_at_a_bad_address(posts: Posts, manager: Manager, host: bytes, port: bytes, monkeypatch):
    monkeypatch.setattr(module, "_sender", MessageSender())
    assert module.answer_aborts(True, manager, [b"ABORT", b"7", host, port, b"q"]) is True
    assert not module._sender._sockets


def test_sockets_are_bounded(monkeypatch):
    monkeypatch.setattr("engine.hooks.kv.messages._MAX_SOCKETS", 2)
    sender = MessageSender()
    for port in (1, 2, 3):
        sender.send("127.0.0.1", port, [b""])
    assert list(sender._sockets) == [("127.0.0.1", 2), ("127.0.0.1", 3)]


def test_a_port_that_takes_nothing_makes_nobody_wait():
    sender = MessageSender()
    for _ in range(3000):
        sender.send("127.0.0.1", 1, [b"x"])


@pytest.fixture
def alone(monkeypatch) -> None:
    """One rank; another module has the agreement of several."""
    monkeypatch.setattr(module, "all_agree", lambda flags, *_groups: flags)


FAILED, TRANSFERRING, SUCCESS = 0, 3, 4


@pytest.fixture
def states(monkeypatch) -> None:
    """SGLang's names of states, without SGLang."""
    values = SimpleNamespace(KVPoll=SimpleNamespace(Failed=FAILED, Transferring=TRANSFERRING, Success=SUCCESS))
    monkeypatch.setitem(__import__("sys").modules, "sglang.srt.disaggregation.base", values)


@pytest.mark.usefixtures("alone", "states")
def test_a_failed_room_is_being_sent_until_nothing_reads_its_pages(posts: Posts, manager: Manager, agent: Agent):
    senders = [SimpleNamespace(bootstrap_room=room) for room in (ROOM, OTHER)] + [SimpleNamespace()]
    poll = module.with_kept_sources(lambda *_: [FAILED, SUCCESS, FAILED])
    posts.begin_chunk(ROOM)
    manager.agent.transfer("kv")
    assert poll(senders, None, None) == [TRANSFERRING, SUCCESS, FAILED]
    assert list(posts._closed) == [ROOM]
    agent.states["kv"] = "DONE"
    assert poll(senders, None, None) == [FAILED, SUCCESS, FAILED]


@pytest.mark.usefixtures("states")
def test_a_room_that_another_rank_reads_is_kept(posts: Posts, monkeypatch):
    monkeypatch.setattr(module, "all_agree", lambda flags, *_groups: [False for _ in flags])
    poll = module.with_kept_sources(lambda *_: [FAILED])
    assert poll([SimpleNamespace(bootstrap_room=ROOM)], None, None) == [TRANSFERRING]


@pytest.mark.usefixtures("alone")
def test_a_prompt_aborted_between_chunks_ends_when_nothing_reads_them(posts: Posts, manager: Manager, agent: Agent):
    aborted: list[bool] = []
    request = SimpleNamespace(bootstrap_room=ROOM, disagg_kv_sender=SimpleNamespace(abort=lambda: aborted.append(True)))
    scheduler = SimpleNamespace(
        _pending_chunked_abort_req=request, chunked_req=request, attn_cp_cpu_group=None, attn_tp_cpu_group=None
    )
    posts.begin_chunk(ROOM)
    manager.agent.transfer("kv")
    module.keep_source_of_chunked(lambda _: pytest.fail("its pages are free"), scheduler)
    assert aborted == [True]
    agent.states["kv"] = "DONE"
    assert module.keep_source_of_chunked(lambda _: "ended", scheduler) == "ended"
    for aborted_request, chunked in ((None, request), (request, None)):
        scheduler._pending_chunked_abort_req, scheduler.chunked_req = aborted_request, chunked
        assert module.keep_source_of_chunked(lambda _: "as before", scheduler) == "as before"
