"""Who is a worker: endpoints come and go, names are unique, nobody silent is kept forever."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from support.waiting import until

from cluster.control import control_pb2 as pb
from cluster.discovery.roster import Contact, Roster
from cluster.discovery.source import Endpoint, StaticList
from cluster.errors import DescriptionRefused
from process.lifetime import meanwhile

MODEL = "demo"
A, B, C = "10.0.0.1:9000", "10.0.0.2:9000", "10.0.0.3:9000"


class Source:
    """A source that a test changes."""

    label = "test"
    roles = frozenset({"decode"})

    def __init__(self, *addresses: str) -> None:
        self.endpoints = frozenset(Endpoint(each, "decode") for each in addresses)
        self.has_answered = True
        self.on_change: Callable[[], None] = lambda: None

    async def refresh(self) -> None: ...

    async def follow(self, on_change: Callable[[], None]) -> None:
        self.on_change = on_change
        await asyncio.Event().wait()

    def now_has(self, *addresses: str) -> None:
        self.endpoints = frozenset(Endpoint(each, "decode") for each in addresses)
        self.on_change()


class Follower:
    def __init__(self, contact: Contact) -> None:
        self.contact = contact
        self.is_running = False
        self.unused = asyncio.Event()
        self.unused.set()

    async def run(self) -> None:
        self.is_running = True
        try:
            await asyncio.Event().wait()
        finally:
            self.is_running = False

    async def until_unused(self) -> None:
        await self.unused.wait()

    def describe(self, name: str, agent_id: str = "", **fields) -> None:
        described = {"role": pb.ROLE_DECODE, "model": MODEL, "engine_url": "http://10.0.0.1:9001", **fields}
        self.contact.describe(pb.WorkerDescription(name=name, agent_id=agent_id, **described))


class Owner:
    def __init__(self) -> None:
        self.followers: dict[str, Follower] = {}  # by address: the newest
        self.members: dict[str, str] = {}
        self.events: list[tuple[str, str, str]] = []
        self.num_ended = 0

    def start(self, contact: Contact) -> Follower:
        follower = self.followers[contact.endpoint.address] = Follower(contact)
        return follower

    def joined(self, name: str, follower: Follower) -> None:
        assert name not in self.members
        self.members[name] = follower.contact.endpoint.address
        self.events.append(("joined", name, follower.contact.endpoint.address))

    def left(self, name: str, follower: Follower) -> None:
        assert self.members.pop(name) == follower.contact.endpoint.address
        self.events.append(("left", name, follower.contact.endpoint.address))

    def ended(self, follower: Follower) -> None:
        assert not follower.is_running
        self.num_ended += 1

    def changed(self) -> None: ...


@asynccontextmanager
async def running_roster(
    *addresses: str,
    listed: dict[str, tuple[str, str]] | None = None,
    max_workers: int = 10,
    forget_after_s: float = 60,
) -> AsyncIterator[tuple[Roster[Follower], Owner, Source]]:
    owner, source = Owner(), Source(*addresses)
    sources = [StaticList(listed or {}), source]
    roster: Roster[Follower] = Roster(
        sources, owner, model=MODEL, max_workers=max_workers, forget_after_s=forget_after_s
    )
    async with meanwhile(roster.run()):
        await settle()
        yield roster, owner, source
    assert not any(follower.is_running for follower in owner.followers.values())


async def settle() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


def test_listed_workers_are_members_before_anybody_was_reached():
    owner = Owner()
    Roster([StaticList({"a": ("decode", A), "b": ("prefill", B)})], owner, model=MODEL, max_workers=1, forget_after_s=1)
    assert owner.members == {"a": A, "b": B}


async def test_found_workers_join_when_they_say_who_they_are_and_leave_with_their_endpoint():
    async with running_roster(A) as (roster, owner, source):
        assert owner.members == {}
        assert not roster.is_settled
        owner.followers[A].describe("d0")
        assert roster.is_settled
        source.now_has(A, B)
        assert not roster.is_settled
        await settle()
        assert owner.followers[B].is_running
        owner.followers[B].describe("d1")
        assert owner.members == {"d0": A, "d1": B}
        first = owner.followers[A]
        first.unused.clear()  # it has requests in flight
        source.now_has(B)
        await settle()
        assert owner.members == {"d1": B}
        assert first.is_running
        source.now_has(A, B)  # it is back before they have ended
        await settle()
        owner.followers[A].describe("d0")
        assert owner.members == {"d0": A, "d1": B}
        assert owner.followers[A] is not first
        assert first.contact.number != owner.followers[A].contact.number
        first.describe("d0")  # is heard no more
        first.contact.lost()
        first.unused.set()
        await settle()
        assert not first.is_running
        assert owner.num_ended == 1
        assert owner.members == {"d0": A, "d1": B}


@pytest.mark.parametrize("order", [(A, B, C), (C, B, A), (B, C, A)])
async def test_of_several_with_one_name_the_reachable_one_with_the_lowest_address_is_the_member(order, caplog):
    caplog.set_level(logging.ERROR)
    async with running_roster(A, B, C) as (_roster, owner, source):
        for address in order:
            owner.followers[address].describe("d0", agent_id=f"agent at {address}")
        assert owner.members == {"d0": A}
        for _ in range(3):
            owner.followers[B].describe("d0", agent_id=f"agent at {B}")  # reconnects: nothing new to log
        owner.followers[A].contact.lost()
        assert owner.members == {"d0": B}
        owner.followers[A].describe("d0", agent_id="another one")
        assert owner.members == {"d0": A}
        source.now_has(B, C)
        assert owner.members == {"d0": B}
        source.now_has()
        assert owner.members == {}
    logged = [record.fields for record in caplog.records if "same name" in record.getMessage()]
    assert {"worker": "d0", "used": A, "ignored": [B, C]} in logged
    assert len(logged) <= 6


async def test_one_agent_at_two_addresses_is_no_duplicate(caplog):
    caplog.set_level(logging.ERROR)
    async with running_roster(A, B) as (_roster, owner, _source):
        for address in (B, A):
            owner.followers[address].describe("d0", agent_id="the same")
        assert owner.members == {"d0": A}
    assert not caplog.records


async def test_a_name_of_cluster_yaml_is_taken_even_while_its_worker_is_down(caplog):
    async with running_roster(A, C, listed={"d0": ("decode", C)}) as (_roster, owner, _source):
        for _ in range(2):
            with pytest.raises(DescriptionRefused, match=r"that of the worker at .* in cluster\.yaml"):
                owner.followers[A].describe("d0")
        assert owner.members == {"d0": C}
        owner.followers[A].describe("d1")
        assert owner.members == {"d0": C, "d1": A}
    assert len([record for record in caplog.records if record.getMessage() == "worker refused"]) == 1


async def test_a_worker_of_cluster_yaml_with_another_model_is_refused_and_stays_a_member(caplog):
    async with running_roster(listed={"a": ("decode", A)}) as (_roster, owner, _source):
        follower = owner.followers[A]
        for _ in range(2):
            with pytest.raises(DescriptionRefused, match=f"it serves the model 'v2', not '{MODEL}'"):
                follower.describe(**BASE | {"name": "elsewhere", "model": "v2"})
        assert owner.members == {"a": A}
        assert caplog.text.count("worker refused") == 1
        follower.describe(**BASE | {"name": "a"})
        assert owner.members == {"a": A}


async def test_another_worker_may_answer_at_an_address():
    async with running_roster(A) as (roster, owner, _source):
        owner.followers[A].describe("d0")
        owner.followers[A].describe("d1")
        assert owner.events == [("joined", "d0", A), ("left", "d0", A), ("joined", "d1", A)]
        with pytest.raises(DescriptionRefused):
            owner.followers[A].describe("d1", model="another")
        assert owner.members == {}
        assert roster.is_settled
        owner.followers[A].describe("d1")
        assert owner.members == {"d1": A}


async def test_a_silent_worker_is_forgotten_in_time_unless_it_is_listed():
    async with running_roster(A, B, listed={"listed": ("decode", C)}, forget_after_s=0.1) as (roster, owner, _source):
        loop = asyncio.get_running_loop()
        for address, name in ((A, "d0"), (B, "d1"), (C, "listed")):
            owner.followers[address].describe(name)
        began_at = loop.time()
        for address in (A, B, C):
            owner.followers[address].contact.lost()
            owner.followers[address].contact.lost()
        assert owner.members == {"d0": A, "d1": B, "listed": C}
        owner.followers[B].describe("d1")
        await until(lambda: "d0" not in owner.members)
        assert loop.time() - began_at >= 0.1
        assert owner.members == {"d1": B, "listed": C}
        assert not roster.is_settled
        owner.followers[A].describe("d0")  # its endpoint was followed on
        assert owner.members == {"d0": A, "d1": B, "listed": C}


async def test_their_number_is_bounded_and_those_that_are_known_stay(caplog):
    caplog.set_level(logging.ERROR)
    async with running_roster(B, C, listed={"listed": ("decode", "10.0.0.9:9000")}, max_workers=2) as (
        _roster,
        owner,
        source,
    ):
        assert set(owner.followers) == {B, C, "10.0.0.9:9000"}
        source.now_has(A, B, C)
        source.now_has(A, B, C)
        assert set(owner.followers) == {B, C, "10.0.0.9:9000"}
        source.now_has(A, C)
        assert set(owner.followers) == {A, B, C, "10.0.0.9:9000"}
    assert [record.fields for record in caplog.records] == [{"max_workers": 2, "ignored": 1}]


async def test_a_follower_and_a_source_that_break_harm_nobody(monkeypatch):
    monkeypatch.setattr("cluster.discovery.roster._RETRY_S", 0.0)

    async with running_roster(A) as (_roster, owner, source):

        async def breaks(*_) -> None:
            raise RuntimeError("broken")

        monkeypatch.setattr(Follower, "run", breaks)
        source.now_has(A, B)
        await settle()
        monkeypatch.undo()
        await settle()
        owner.followers[A].describe("d0")
        assert owner.members == {"d0": A}


BASE = {"name": "d0"}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": ""}, "its name is ''"),
        ({"name": "a/../b"}, "its name is 'a/../b'"),
        ({"name": "x" * 64}, "its name is "),
        ({"name": "d0\n"}, "its name is "),
        ({"role": pb.ROLE_PREFILL}, "its role is prefill, where decode workers are looked for"),
        ({"role": 77}, "its role is unknown"),
        ({"model": "m" * 1000}, "its model|serves the model 'mmm"),
        ({"engine_url": ""}, "its engine_url"),
        ({"engine_url": "ftp://10.0.0.1:1"}, "its engine_url"),
        ({"engine_url": "http://10.0.0.1"}, "its engine_url"),
        ({"engine_url": "http://10.0.0.1:99999"}, "its engine_url"),
        ({"engine_url": "http://10.0.0.1:1/path"}, "its engine_url"),
        ({"engine_url": "http://user@10.0.0.1:1"}, "its engine_url"),
        ({"engine_url": "http://10.0.0.1:1?x=\r\nhost:y"}, "its engine_url"),
        ({"engine_url": "http://" + "h" * 300 + ":1"}, "its engine_url"),
        ({"engine_url": "http://" + "h" * 64 + ":1"}, "its engine_url"),
        ({"engine_url": "http://h..svc:1"}, "its engine_url"),
        ({"engine_url": "http://.:1"}, "its engine_url"),
        ({"engine_url": "http://[::1:1"}, "its engine_url"),
        ({"domain": "x" * 1000}, "its domain"),
        ({"agent_id": "a\x00"}, "its agent_id"),
        ({"engine_key": "a\r\nhost: b"}, "its engine_key"),
        ({"engine_key": "a" * 257}, "its engine_key"),
    ],
)
async def test_hostile_descriptions(fields, says):
    async with running_roster(A) as (_roster, owner, _source):
        with pytest.raises(DescriptionRefused, match=says) as refused:
            owner.followers[A].describe(**BASE | fields)
        assert len(str(refused.value)) < 300
        assert owner.members == {}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_host": "", "kv_bootstrap_port": 1}, "its kv_host"),
        ({"kv_host": "a b", "kv_bootstrap_port": 1}, "its kv_host"),
        ({"kv_host": "h..svc", "kv_bootstrap_port": 1}, "its kv_host"),
        ({"kv_host": "h", "kv_bootstrap_port": 0}, "its kv_bootstrap_port is 0"),
        ({"kv_host": "h", "kv_bootstrap_port": 70000}, "its kv_bootstrap_port is 70000"),
    ],
)
def test_hostile_descriptions_of_prefill_workers(fields, says):
    from cluster.discovery.descriptions import check_description

    described = {"name": "p", "role": pb.ROLE_PREFILL, "model": MODEL, "engine_url": "http://[fd00::1]:1/"}
    check_description(pb.WorkerDescription(**described, kv_host="fd00::1", kv_bootstrap_port=1), MODEL)
    with pytest.raises(DescriptionRefused, match=says):
        check_description(pb.WorkerDescription(**described | fields), MODEL)
