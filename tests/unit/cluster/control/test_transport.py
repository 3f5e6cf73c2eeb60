"""Mutual TLS of the control protocol: who may call what, and who is not talked to, over real sockets."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from support.clusters.certificates import authority, expired, issued

from cluster.agent.peers import Peer
from cluster.control import control_pb2 as pb
from cluster.control.control_pb2_grpc import WorkerControlStub
from cluster.control.service import serve_control
from cluster.control.transport import AgentChannel, Transport
from cluster.control.worker_state import WorkerStateHub
from cluster.discovery.source import Endpoint
from cluster.errors import DescriptionRefused, RoleChangeRefused
from process.certificates.authority import Authority
from process.certificates.contexts import Following
from process.certificates.files import CertificateFiles
from process.certificates.identity import ROLES
from process.free_ports import free_port
from process.lifetime import meanwhile

REVISION = "sha256:" + "0" * 64


@dataclass
class Worker:
    """A decode worker, which holds no adapters, with the real control service."""

    transport: Transport
    name: str = "d"
    adapters: Any = None
    hub: WorkerStateHub = field(default_factory=WorkerStateHub)
    worker: Any = None
    drained: list[float | None] = field(default_factory=list)

    def describe(self) -> pb.WorkerDescription:
        return pb.WorkerDescription(name=self.name, role=pb.ROLE_DECODE, engine_key="a key")

    async def drain(self, deadline_s: float | None) -> bool:
        self.drained.append(deadline_s)
        return True

    def undrain(self) -> bool:
        return False

    async def change_role(self, role: str, *_: object, even_last: bool) -> None:
        raise RoleChangeRefused(f"it cannot become {role}")


@asynccontextmanager
async def served(files: CertificateFiles, *, roles_change: bool = False) -> AsyncIterator[tuple[Worker, str]]:
    port = free_port()
    worker = Worker(
        Transport(files, roles_change=roles_change), worker=SimpleNamespace(host="127.0.0.1", control_port=port)
    )
    async with serve_control(worker):  # type: ignore[arg-type]
        yield worker, f"127.0.0.1:{port}"


@asynccontextmanager
async def called(files: CertificateFiles, address: str) -> AsyncIterator[Any]:
    async with Transport(files).channel(address, "decode", "d") as channel:
        yield WorkerControlStub(channel)


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return authority(tmp_path / "certs")


async def outcome(stub: Any, method: str) -> grpc.StatusCode:
    """What a call of this method ends with, as far as it gets."""
    requests = {
        "Describe": pb.DescribeRequest(),
        "WatchState": pb.WatchStateRequest(),
        "EnsureAdapter": pb.EnsureAdapterRequest(revision_id=REVISION),
        "PinAdapter": pb.PinAdapterRequest(revision_id=REVISION),
        "PutAdapter": iter([pb.PutAdapterRequest(chunk=b"x")]),
        "EvictAdapter": pb.EvictAdapterRequest(revision_id=REVISION),
        "Drain": pb.DrainRequest(),
        "Undrain": pb.UndrainRequest(),
        "ChangeRole": pb.ChangeRoleRequest(role=pb.ROLE_PREFILL),
    }
    call = getattr(stub, method)(requests[method], timeout=120)
    try:
        if method == "WatchState":
            assert (await call.read()).ready is False
            call.cancel()
        else:
            await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


_ROUTER = {"Describe", "WatchState", "EnsureAdapter", "PinAdapter", "PutAdapter", "EvictAdapter", "ChangeRole"}
_OPERATOR = {"Describe", "WatchState", "EnsureAdapter", "PinAdapter", "EvictAdapter", "Drain", "Undrain", "ChangeRole"}
_PEER = {"Describe", "WatchState"}
MAY_CALL = {
    "router": _ROUTER,
    "operator": _OPERATOR,
    "prefill": _PEER,
    "decode": _PEER,
    "switching": _PEER,
    "unified": set(),
    "trainer": set(),
}


@pytest.mark.parametrize("role", ROLES)
async def test_roles_make_their_calls_only(ca: Authority, role: str):
    """A change of who may call what is a change of this test."""
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["WorkerControl"].methods}
    async with (
        served(issued(ca, "decode", "d")) as (worker, address),
        called(issued(ca, role, "caller"), address) as stub,
    ):
        found = {method: await outcome(stub, method) for method in methods}
    allowed = MAY_CALL[role]
    assert {method for method, code in found.items() if code is not grpc.StatusCode.PERMISSION_DENIED} == allowed
    # What gets through reaches the service: a decode worker holds no adapters.
    through = {"Describe", "WatchState", "Drain", "Undrain"} & allowed
    assert {method for method, code in found.items() if code is grpc.StatusCode.OK} == through
    assert {found[method] for method in allowed - through} <= {grpc.StatusCode.FAILED_PRECONDITION}
    assert worker.drained == ([None] if "Drain" in allowed else [])


@pytest.mark.parametrize("role", ["router", "operator", "prefill", "decode", "switching"])
@pytest.mark.parametrize("roles_change", [False, True])
async def test_keys_of_engines_are_for_those_who_send_requests(ca: Authority, role: str, roles_change: bool):
    """A worker that may be a prefill worker now has a certificate that says so, of the kind that is in use."""
    async with (
        served(issued(ca, "decode", "d"), roles_change=roles_change) as (_, address),
        called(issued(ca, role, "caller"), address) as stub,
    ):
        described = await stub.Describe(pb.DescribeRequest(), timeout=120)
    assert bool(described.engine_key) is (role in ("router", "switching" if roles_change else "prefill"))


@pytest.mark.parametrize("name", ["d", ""], ids=["listed", "found"])
@pytest.mark.parametrize("certified", ["prefill", "decode", "switching", "unified"])
@pytest.mark.parametrize("roles_change", [False, True])
async def test_one_certificate_is_for_both_roles_of_workers_that_change(
    ca: Authority, roles_change: bool, certified: str, name: str
):
    """With it, a worker may have either role, whichever it began in; with that of one role, none but this one."""
    transport = Transport(issued(ca, "router", "r"), roles_change=roles_change)
    engine_tls = transport.engine_tls("decode", "d")
    assert engine_tls is not None
    assert engine_tls()[1] == f"d.{'switching' if roles_change else 'decode'}.prelude.local"
    async with served(issued(ca, certified, "d")) as (_, address):
        for begins in ("prefill", "decode", "unified"):
            channel = AgentChannel(transport, address, begins, name)
            is_reached = certified == (begins if begins == "unified" or not roles_change else "switching")
            says = f"its certificate is that of spiffe://prelude.local/{certified}/d"
            is_refused = not is_reached and not name
            with pytest.raises(DescriptionRefused, match=says) if is_refused else nullcontext():
                assert ((await outcome(await channel.stub(), "Describe")) is grpc.StatusCode.OK) is is_reached
            await channel.aclose()


class TestUnknownCallers:
    @pytest.mark.parametrize("method", ["Describe", "PutAdapter", "WatchState"])
    async def test_a_certificate_of_another_trust_domain_names_nobody(self, ca: Authority, method: str):
        async with served(issued(ca, "decode", "d")) as (_, address):
            files = issued(ca, "router", "r", trust_domain="elsewhere")
            # It would look for the agent in its own domain, so it is told the agent's name.
            transport = Transport(files)
            transport.identity = Transport(issued(ca, "router", "x")).identity
            async with transport.channel(address, "decode", "d") as channel:
                found = await outcome(WorkerControlStub(channel), method)
        assert found is grpc.StatusCode.UNAUTHENTICATED

    async def test_others_get_no_connection(self, ca: Authority, tmp_path: Path):
        """By a certificate of another authority, an expired one, none, or in plain text.

        A process refuses such files at its start; an attacker has no such checks.
        """
        known = ca.certificate.read_bytes()
        forged, old = (
            issued(authority(tmp_path / "other"), "router", "r", ca=ca.certificate),
            expired(ca, "r"),
        )
        offered = [(files.key.read_bytes(), files.certificate.read_bytes()) for files in (forged, old)]
        target = (("grpc.ssl_target_name_override", "d.decode.prelude.local"),)
        async with served(issued(ca, "decode", "d")) as (_, address):
            for pair in (*offered, ()):
                credentials = grpc.ssl_channel_credentials(known, *pair)
                async with grpc.aio.secure_channel(address, credentials, options=target) as channel:
                    assert await outcome(WorkerControlStub(channel), "Describe") is grpc.StatusCode.UNAVAILABLE
            async with grpc.aio.insecure_channel(address) as channel:
                assert await outcome(WorkerControlStub(channel), "Describe") is grpc.StatusCode.UNAVAILABLE
            good = issued(ca, "router", "r2")
            credentials = grpc.ssl_channel_credentials(known, good.key.read_bytes(), good.certificate.read_bytes())
            async with grpc.aio.secure_channel(address, credentials, options=target) as channel:
                assert await outcome(WorkerControlStub(channel), "Describe") is grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("issuer", "role", "name"),
    [("certs", "decode", "other"), ("certs", "prefill", "d"), ("certs", "router", "d"), ("other", "decode", "d")],
    ids=["swapped names", "another role", "a router that acts as a worker", "another authority"],
)
async def test_only_the_worker_that_is_meant_is_talked_to(
    ca: Authority, tmp_path: Path, issuer: str, role: str, name: str
):
    theirs = ca if issuer == "certs" else authority(tmp_path / issuer)
    async with (
        served(issued(theirs, role, name)) as (_, address),
        called(issued(ca, "router", "r"), address) as stub,
    ):
        found = await outcome(stub, "Describe")
    assert found is grpc.StatusCode.UNAVAILABLE


def replace(files: CertificateFiles, by: CertificateFiles) -> None:
    """As `prelude certs renew` does: the key first, each file at once."""
    for old, new in ((files.key, by.key), (files.certificate, by.certificate)):
        shutil.move(new, old)


class TestReload:
    async def test_new_files_serve_the_next_handshake_and_end_no_stream(self, ca: Authority, tmp_path: Path):
        """Both sides change their authority's certificates while a stream runs; old ones are refused afterwards."""

        server, client = issued(ca, "decode", "d"), issued(ca, "router", "r")
        other = authority(tmp_path / "other")
        async with served(server) as (worker, address):
            transport = Transport(client)
            clock = [0.0]
            for following in (transport._pem, worker.transport._pem):
                following._clock, following._looked_at = lambda: clock[0], 0.0
            channel = AgentChannel(transport, address, "decode", "d")
            stream = (await channel.stub()).WatchState(pb.WatchStateRequest(heartbeat_s=0.05))
            assert isinstance(await stream.read(), pb.WorkerState)
            # A new authority. Both believe it: it comes in one file with a certificate, as a mounted secret does.
            for files, role, name in ((server, "decode", "d"), (client, "router", "r")):
                new = issued(other, role, name, stem=f"new-{role}")
                replace(files, new)
            ca.certificate.write_bytes(other.certificate.read_bytes())
            before = await channel.stub()
            assert await outcome(before, "Describe") is grpc.StatusCode.OK  # by the connection that there is
            clock[0] += 2
            for _ in range(3):  # the running stream goes on
                assert isinstance(await stream.read(), pb.WorkerState)
            async with Transport(client).channel(address, "decode", "d") as fresh:
                assert await outcome(WorkerControlStub(fresh), "Describe") is grpc.StatusCode.OK
            assert (transport.version, worker.transport._pem.version) == (1, 1)
            for _ in range(3):
                assert isinstance(await stream.read(), pb.WorkerState)
            stream.cancel()
            renewed = await channel.stub()
            assert await outcome(renewed, "Describe") is grpc.StatusCode.OK
            await channel.aclose()

    def test_files_that_cannot_be_used_change_nothing(self, ca: Authority):
        files = issued(ca, "router", "r")
        clock = [0.0]
        following = Following(files, lambda given: given.certificate.read_bytes(), lambda: clock[0])
        before = following.current()
        new = issued(ca, "router", "r", stem="new")
        shutil.copy(new.key, files.key)  # half a pair
        clock[0] = 2.0
        assert (following.current(), following.version) == (before, 0)
        shutil.copy(new.certificate, files.certificate)
        clock[0] = 2.5  # it has just looked
        assert following.current() == before
        clock[0] = 4.0
        assert (following.current(), following.version) == (new.certificate.read_bytes(), 1)
        replace(files, expired(ca, "r"))
        clock[0] = 6.0
        assert (following.current(), following.version) == (new.certificate.read_bytes(), 1)
        files.key.unlink()
        clock[0] = 8.0
        assert (following.current(), following.version) == (new.certificate.read_bytes(), 1)

    @pytest.mark.parametrize(
        ("identity", "domain"),
        [(("switching", "d"), None), (("decode", "e"), None), (("decode", "d"), "other.example")],
        ids=["for `role_changes`", "another name", "another trust domain"],
    )
    async def test_a_running_process_stays_who_it_is(
        self, ca: Authority, identity: tuple[str, str], domain: str | None, caplog: pytest.LogCaptureFixture
    ):
        """A certificate of another identity is for its next start: until then nobody looks for that."""
        files = issued(ca, "decode", "d")
        async with served(files) as (worker, address):
            assert worker.transport._pem is not None
            clock = worker.transport._pem._clock = lambda: 1e9
            replace(files, issued(ca, *identity, trust_domain=domain, stem="new"))
            async with called(issued(ca, "router", "r"), address) as stub:
                assert await outcome(stub, "Describe") is grpc.StatusCode.OK
            assert (worker.transport._pem._looked_at, worker.transport.version) == (clock(), 0)
            assert "changed certificate not used" in caplog.text

    def test_a_certificate_for_clients_may_have_any_name(self, ca: Authority):
        """Such as that of a public authority, after one of `prelude certs`."""
        made = issued(ca, "router", "r")
        files, clock = CertificateFiles(made.certificate, made.key), [0.0]
        following = Following(files, lambda given: given.certificate.read_bytes(), lambda: clock[0])
        replace(files, issued(ca, "operator", "o", stem="new"))
        clock[0] = 2.0
        assert (following.current(), following.version) == (files.certificate.read_bytes(), 1)


async def test_a_peer_is_watched_over_tls(ca: Authority):
    async with served(issued(ca, "decode", "d")) as (worker, address):
        worker.hub.add_resident(REVISION)
        changed = asyncio.Event()
        contact = SimpleNamespace(
            name="d", endpoint=Endpoint(address, "decode", "d"), describe=lambda _: None, lost=lambda: None
        )
        peer = Peer(contact, changed.set, Transport(issued(ca, "prefill", "p")))  # type: ignore[arg-type]
        async with meanwhile(peer.run()):
            await asyncio.wait_for(changed.wait(), 120)
            assert peer.state is not None
            assert not peer.state.residency.resident  # of 100,000 adapters it has no use for one
    assert peer.description is not None
    assert peer.description.name == "d"


class TestWorkersOfUnknownName:
    """Those that were found by address: their certificate says who they are."""

    async def test_it_is_the_one_that_its_certificate_names(self, ca: Authority):
        async with served(issued(ca, "decode", "d")) as (_, address):
            channel = AgentChannel(Transport(issued(ca, "router", "r")), address, "decode", "")
            described = await (await channel.stub()).Describe(pb.DescribeRequest(), timeout=120)
            channel.check_name(described.name)
            with pytest.raises(DescriptionRefused, match="its name is 'e', and its certificate is that of 'd'"):
                channel.check_name("e")
            await channel.aclose()

    @pytest.mark.parametrize(
        ("role", "trusts", "says"),
        [
            ("prefill", True, "its certificate is that of spiffe://prelude.local/prefill/d, where decode workers are"),
            ("decode", False, "it has no certificate of this cluster"),
        ],
    )
    async def test_others_are_refused(self, ca: Authority, tmp_path: Path, role: str, trusts: bool, says: str):
        theirs = ca if trusts else authority(tmp_path / "others")
        async with served(issued(theirs, role, "d")) as (_, address):
            channel = AgentChannel(Transport(issued(ca, "router", "r")), address, "decode", "")
            with pytest.raises(DescriptionRefused, match=says):
                await channel.stub()

    async def test_nobody_is_there(self, ca: Authority):
        channel = AgentChannel(Transport(issued(ca, "router", "r")), f"127.0.0.1:{free_port()}", "decode", "")
        with pytest.raises(TimeoutError, match="cannot be reached"):
            await channel.stub()


@pytest.mark.parametrize(
    ("address", "allows_plain", "is_refused"),
    [
        ("192.0.2.7:70", False, True),
        ("[2001:db8::7]:70", False, True),
        ("prefill-0.example.org:70", False, True),
        ("127.0.0.3:70", False, False),
        ("[::1]:70", False, False),
        ("localhost:70", False, False),
        ("192.0.2.7:70", True, False),
    ],
)
async def test_a_found_worker_beyond_loopback_is_not_called_in_plain_text(
    address: str, allows_plain: bool, is_refused: bool
):
    channel = AgentChannel(Transport(allows_plain=allows_plain), address, "decode", "")
    refused = pytest.raises(DescriptionRefused, match="is another machine, and there is no `tls`")
    with refused if is_refused else nullcontext():
        await channel.stub()
    await channel.aclose()


async def test_a_found_worker_beyond_loopback_is_called_over_tls(ca: Authority):
    transport = Transport(issued(ca, "router", "r"), allows_plain=False)
    channel = AgentChannel(transport, "192.0.2.7:70", "decode", "d")
    await channel.stub()
    await channel.aclose()
