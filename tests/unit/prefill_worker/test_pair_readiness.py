"""A worker of pairs is ready with one warm pair: one sick peer keeps nobody out.

Where peers are found, who joins is warmed, and who leaves is no longer waited for.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.adapters.held_adapters import until
from support.adapters.tiny_model import write_model_config
from support.clusters.configs import config_of
from support.clusters.dns_server import DnsServer, dns_server
from support.clusters.paired_agents import NoEngine, Peer, running, state_where
from support.engines.engine_stand_in import Engine

from cluster.agent import worker_agent
from cluster.agent.engine_spec import engine_spec
from cluster.agent.worker_agent import WorkerAgent
from cluster.config.schema import ClusterConfig
from cluster.config.workers import NOBODY
from cluster.control import control_pb2 as pb
from cluster.local.found_worker import with_found_worker
from cluster.local.ports import with_ports
from decode_worker.agent import DecodeAgent
from engine.arguments import environment
from engine.errors import EngineError
from engine.hooks.kv.peers import FOUND_PEERS_VARIABLE, write_found_peers
from engine.supervisor import EngineSnapshot, EngineStatus, EngineSupervisor
from prefill_worker import agent as agent_of_prefill
from prefill_worker.agent import PrefillAgent
from prefill_worker.warm_up import WARM_UP_REQUESTS
from process.free_ports import free_port

PREFILL, DECODE = "prefill.example.org", "decode.example.org"
PORT = free_port()  # of the agents that are found
IMPOSSIBLE = "KV transfer to this decode worker is impossible"


@pytest.fixture
def config(tmp_path: Path) -> ClusterConfig:
    workers = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    return with_ports(config_of(workers, write_model_config(tmp_path)))


async def ready_page(agent: WorkerAgent) -> tuple[int, dict]:
    url = f"http://{agent.worker.host}:{agent.worker.metrics_port}/ready"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.json()


async def test_a_prefill_worker_is_ready_beside_a_sick_decode_engine(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own, Engine(is_sick=True).served() as well, Engine(is_sick=True).served() as sick:
        agent = PrefillAgent(config, "p0", tmp_path / "scratch")
        async with running(agent, own, Peer("d0", well.url), Peer("d1", sick.url)):
            await state_where(agent, ready=False, reason="not warm yet with d0, d1", not_warm_with=["d0", "d1"])
            assert (await ready_page(agent))[0] == 503
            well.may_answer.set()
            state = await state_where(agent, ready=True, not_warm_with=["d1"])
            assert [(pair.decode_name, pair.decode_incarnation) for pair in state.warm_pairs] == [("d0", "d0-1")]
            assert state.reason == ""
            assert await ready_page(agent) == (200, {"ready": True, "reason": "", "not_warm_with": ["d1"]})
            sick.may_answer.set()  # it has recovered
            await state_where(agent, ready=True, not_warm_with=[])


async def test_a_decode_worker_is_ready_beside_a_sick_prefill_engine(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own:
        agent = DecodeAgent(config, "d0", tmp_path / "scratch")
        well, sick = Peer("p0"), Peer("p1")
        async with running(agent, own, well, sick):
            await state_where(agent, ready=False, reason="not warm yet with p0, p1")
            well.hub.update(hung=True, warm_pairs=[pb.WarmPair(decode_name="d0", decode_incarnation="one")])
            await state_where(agent, ready=False, reason="not warm yet with p1")
            well.hub.update(hung=False)
            await state_where(agent, ready=True, reason="", not_warm_with=["p1"])


async def test_pairs_with_a_suspected_engine_are_warmed_again(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own, Engine().served() as theirs:
        agent = PrefillAgent(config, "p0", tmp_path / "scratch")
        peer = Peer("d0", theirs.url)
        async with running(agent, own, peer):
            await state_where(agent, ready=True)
            peer.hub.update(hung=True)
            await until(lambda: not agent.hub.state.warm_pairs)
            theirs.may_answer.clear()
            peer.hub.update(hung=False)
            await state_where(agent, not_warm_with=["d0"])
            assert not agent.hub.state.warm_pairs
            theirs.may_answer.set()
            await state_where(agent, not_warm_with=[])
            assert [pair.decode_name for pair in agent.hub.state.warm_pairs] == ["d0"]
            snapshot = EngineSnapshot(EngineStatus.UP, "one", (), 0, "", suspicion="its own engine")
            agent._engine_changed(snapshot)
            assert (agent.hub.state.ready, list(agent.hub.state.warm_pairs)) == (False, [])
            agent._engine_changed(EngineSnapshot(EngineStatus.UP, "one", (), 0, ""))
            await state_where(agent, ready=True)


async def test_engines_that_were_used_become_a_pair_with_one_request(config: ClusterConfig, tmp_path: Path):
    """A full decode engine answers each of them after all that wait there already."""
    async with Engine().served() as own, Engine().served() as first, Engine().served() as second:
        agent, late = PrefillAgent(config, "p0", tmp_path / "scratch"), Peer("d1", second.url)
        late.hub.update(engine_state=pb.ENGINE_STATE_STARTING, incarnation="")
        async with running(agent, own, Peer("d0", first.url), late):
            await state_where(agent, ready=True, not_warm_with=[])
            assert len(first.completions) == len(WARM_UP_REQUESTS)
            late.hub.update(engine_state=pb.ENGINE_STATE_UP, incarnation="d1-1", ready=True)
            await until(lambda: len(agent.hub.state.warm_pairs) == 2)
            assert len(second.completions) == 1
            late.hub.update(incarnation="d1-2", ready=False)  # started again
            await until(lambda: len(second.completions) == 1 + len(WARM_UP_REQUESTS))


async def test_a_pair_with_a_full_decode_engine_is_not_waited_for(config: ClusterConfig, tmp_path: Path):
    """A user's request would wait there, too. Where the warm-up fails, the next one has to end first."""
    async with Engine().served() as own, Engine().served() as first, Engine(500, is_sick=True).served() as full:
        agent, late = PrefillAgent(config, "p0", tmp_path / "scratch"), Peer("d1", full.url)
        late.hub.update(engine_state=pb.ENGINE_STATE_STARTING, incarnation="")
        async with running(agent, own, Peer("d0", first.url), late):
            await state_where(agent, ready=True, not_warm_with=[])
            load = pb.Load(awaiting_room_requests=1)
            late.hub.update(engine_state=pb.ENGINE_STATE_UP, incarnation="d1-1", ready=True, load=load)
            await until(lambda: len(agent.hub.state.warm_pairs) == 2)
            await until(lambda: len(full.completions) == 1)
            full.may_answer.set()
            full.may_answer.clear()  # one is answered, with an error
            await until(lambda: len(full.completions) == 2)
            assert [pair.decode_name for pair in agent.hub.state.warm_pairs] == ["d0"]
            full.may_answer.set()
            await until(lambda: len(agent.hub.state.warm_pairs) == 2)


async def test_the_first_try_between_used_engines_is_short(
    config: ClusterConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The decode engine may wait for an earlier engine of this worker, until a failure."""
    monkeypatch.setattr(agent_of_prefill, "FIRST_TRY_S", 0.1)
    async with Engine().served() as own, Engine(is_sick=True).served() as theirs:
        agent, peer = PrefillAgent(config, "p0", tmp_path / "scratch"), Peer("d0", theirs.url)
        peer.hub.update(ready=True)
        async with running(agent, own, peer):
            await until(lambda: len(theirs.aborted) == 1)
            await until(lambda: len(theirs.completions) == 2)  # this one has more time
            await asyncio.sleep(0.3)
            assert len(theirs.aborted) == 1
            theirs.may_answer.set()
            await state_where(agent, ready=True)


async def test_an_engine_that_restarts_while_a_pair_is_warmed_is_warmed_anew(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own, Engine(is_sick=True).served() as theirs:
        agent = PrefillAgent(config, "p0", tmp_path / "scratch")
        async with running(agent, own, Peer("d0", theirs.url)):
            await until(lambda: bool(theirs.completions))
            agent._engine_changed(EngineSnapshot(EngineStatus.UP, "two", (), 0, ""))
            theirs.may_answer.set()
            await state_where(agent, ready=True)
            assert len(theirs.completions) == 2 * len(WARM_UP_REQUESTS)


async def test_a_new_prefill_engine_runs_what_it_can_without_the_decode_engine(config: ClusterConfig, tmp_path: Path):
    async with Engine().served() as own, Engine().served() as theirs:
        agent, peer = PrefillAgent(config, "p0", tmp_path / "scratch"), Peer("d0", theirs.url)
        peer.hub.update(ready=True)
        async with running(agent, own, peer):
            await state_where(agent, ready=True)
            hosts = [each["bootstrap_host"] for each in own.completions]
            assert hosts == [NOBODY] * len(WARM_UP_REQUESTS) + [agent.describe().kv_host]
            assert len({each["bootstrap_room"] for each in own.completions}) == len(hosts)
            assert [each["bootstrap_room"] for each in theirs.completions] == [own.completions[-1]["bootstrap_room"]]


@pytest.mark.parametrize(
    ("was_warm", "incarnation", "num_alone"),
    [("zero", "one", 0), ("zero", "zero", len(WARM_UP_REQUESTS)), ("", "one", len(WARM_UP_REQUESTS))],
)
async def test_an_engine_that_has_switched_was_used(
    config: ClusterConfig, tmp_path: Path, was_warm: str, incarnation: str, num_alone: int
):
    """Not one that is started again: its agent takes it over with its old incarnation."""
    async with Engine().served() as own, Engine().served() as theirs:
        before = DecodeAgent(config, "p0", tmp_path / "before")
        before._engine_changed(EngineSnapshot(EngineStatus.UP, "zero", (), 0, ""))
        before._warm_incarnation, before._stop = was_warm, asyncio.get_running_loop().create_future()
        before._supervisor = EngineSupervisor(before.spec, 60, lambda _snapshot: None)
        before._supervisor.snapshot = EngineSnapshot(EngineStatus.UP, incarnation, (), 0, "")
        agent, peer = PrefillAgent(config, "p0", tmp_path / "scratch"), Peer("d0", theirs.url)
        peer.hub.update(ready=True)
        agent.take_over(before)
        async with running(agent, own, peer):
            await state_where(agent, ready=True)
            assert (len(own.completions), len(theirs.completions)) == (num_alone + 1, 1)


def test_an_engine_does_not_start_with_other_weights_than_its_worker_is_known_for(
    config: ClusterConfig, tmp_path: Path
):
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"some weights")
    agent = PrefillAgent(config, "p0", tmp_path / "scratch")
    agent._check_weights()
    assert agent.describe().base_weights
    weights.write_bytes(b"other weights")
    with pytest.raises(EngineError, match=f"{tmp_path} have changed since this worker started: restart the worker"):
        agent._check_weights()
    (tmp_path / "config.json").unlink()
    with pytest.raises(EngineError, match=r"model\.path: .* cannot be read"):
        agent._check_weights()


def found_config(
    server: DnsServer | None, folder: Path, name: str, role: str, role_changes: Any = False, **worker: Any
) -> ClusterConfig:
    """Of a worker that `workers` does not list, in a cluster that lists nobody."""
    discovery = {
        "prefill": {"dns": PREFILL, "control_port": PORT, "worker": worker},
        "decode": {"dns": DECODE, "control_port": PORT},
        "interval_s": 0.05,
        "nameservers": [f"127.0.0.1:{server.port}"] if server else (),
    }
    config = config_of({}, write_model_config(folder), role_changes=role_changes, discovery=discovery)
    return with_found_worker(config, name, role, "127.0.0.1")


def peer(name: str, role: int, url: str = "http://127.0.0.1:9", **fields) -> Peer:
    found = Peer(name, url, f"127.0.0.{10 + int(name[1:])}", PORT)
    described = {"role": role, "model": "demo", "agent_id": name} | fields
    if role == pb.ROLE_PREFILL:
        described |= {"kv_host": "127.0.0.1", "kv_bootstrap_port": 9}
    found.description.MergeFrom(pb.WorkerDescription(**described))
    return found


async def test_a_prefill_worker_warms_pairs_with_decode_workers_that_come(tmp_path: Path):
    async with dns_server() as dns, Engine().served() as own, Engine().served() as theirs:
        agent = PrefillAgent(found_config(dns, tmp_path, "p7", "prefill"), "p7", tmp_path / "scratch")
        dns.set_addresses(DECODE, [])
        first, second = (peer(name, pb.ROLE_DECODE, theirs.url) for name in ("d0", "d1"))
        async with running(agent, own, first, second):
            await state_where(agent, ready=False, reason="not warm yet with any decode worker")
            dns.set_addresses(DECODE, [first.host])
            state = await state_where(agent, ready=True)
            assert [(pair.decode_name, pair.decode_incarnation) for pair in state.warm_pairs] == [("d0", "d0-1")]
            dns.set_addresses(DECODE, [second.host])
            await until(lambda: [pair.decode_name for pair in agent.hub.state.warm_pairs] == ["d1"])
            assert list(agent.peers) == ["d1"]
            assert agent.hub.state.ready


@pytest.mark.parametrize("pool", [PREFILL, DECODE])
async def test_peers_are_found_in_both_pools_where_roles_change(tmp_path: Path, pool: str):
    """And KV ports are open to them, whichever role they have: the next one may be another."""
    async with dns_server() as dns, Engine().served() as own, Engine().served() as theirs:
        config = found_config(dns, tmp_path, "p7", "prefill", role_changes="manual")
        agent = PrefillAgent(config, "p7", tmp_path / "scratch")
        for each in (PREFILL, DECODE):
            dns.set_addresses(each, [])
        decode, prefill = peer("d0", pb.ROLE_DECODE, theirs.url), peer("p1", pb.ROLE_PREFILL)
        async with running(agent, own, decode, prefill):
            dns.set_addresses(pool, [decode.host, prefill.host])
            await state_where(agent, ready=True)
            assert list(agent.peers) == ["d0"]
            found = agent.spec.kv_found_peers
            assert found is not None
            await until(lambda: set(found.read_text().split()) == {decode.host, prefill.host})
        DecodeAgent(config, "p7", tmp_path / "scratch")  # the next one
        assert set(found.read_text().split()) == {decode.host, prefill.host}


async def test_peers_of_an_earlier_process_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    agent = DecodeAgent(found_config(None, tmp_path, "d7", "decode"), "d7", tmp_path / "scratch")
    assert agent.spec.kv_found_peers is not None
    write_found_peers(agent.spec.kv_found_peers, ["10.0.0.7"])

    stopped: asyncio.Future[int] = asyncio.Future()
    stopped.set_result(15)
    for name, value in (("EngineSupervisor", NoEngine), ("stop_signal", lambda: stopped), ("_STOP_LIMIT_S", 1e6)):
        monkeypatch.setattr(worker_agent, name, value)
    assert await agent.run() == ""
    assert agent.spec.kv_found_peers.read_text() == ""


async def test_kv_ports_are_open_to_those_that_are_found_and_accepted(tmp_path: Path):
    async with dns_server() as dns, Engine().served() as own, Engine().served() as theirs:
        config = found_config(dns, tmp_path, "p7", "prefill")
        agent = PrefillAgent(config, "p7", tmp_path / "scratch")
        assert agent.spec.kv_peers == ("127.0.0.1",)  # its own host; not everybody
        assert environment(agent.spec, {})[FOUND_PEERS_VARIABLE] == str(agent.spec.kv_found_peers)

        async def until_open_to(*hosts: str) -> None:
            found = agent.spec.kv_found_peers
            assert found is not None
            await until(lambda: set(found.read_text().split() if found.exists() else ()) == set(hosts))

        dns.set_addresses(DECODE, [])
        decode, stranger = peer("d0", pb.ROLE_DECODE, theirs.url), peer("d1", pb.ROLE_UNIFIED, theirs.url)
        async with running(agent, own, decode, stranger):
            await until_open_to()
            dns.set_addresses(DECODE, [stranger.host])
            await until(lambda: any(each._contact.refusal for each in agent.peers._followed))
            await until_open_to()
            dns.set_addresses(DECODE, [stranger.host, decode.host])
            await until_open_to(decode.host)
            await state_where(agent, ready=True)
            dns.set_addresses(DECODE, [])
            await until_open_to()


@pytest.mark.parametrize("role_changes", [False, "manual"])
@pytest.mark.parametrize(
    ("worker", "peers"), [({}, ("127.0.0.1",)), ({"engine": {"kv_peers": ["10.2.0.0/16"]}}, ("10.2.0.0/16",))]
)
def test_who_has_to_be_found(tmp_path: Path, worker: dict, peers: tuple[str, ...], role_changes: Any):
    """Prefill workers, too, with which a prefill worker exchanges KV when it or they have another role."""
    config = found_config(None, tmp_path, "p7", "prefill", role_changes, **worker)
    half = config.model_copy(update={"discovery": config.discovery.model_copy(update={"decode": None})})
    for found, finds in ((config, True), (half, bool(role_changes))):
        spec = engine_spec(found, "p7", tmp_path / "engine")
        assert (spec.kv_peers, spec.kv_found_peers is not None) == (peers, finds and not worker)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tensor_parallel": 3, "engine_version": ""}, None),  # one prefill rank's heads in three parts
        ({"engine_version": "0.0.1"}, "it runs SGLang 0.0.1, not "),
        ({"kv_page_tokens": 64}, "its KV has pages of 64 tokens, and this engine's of 1"),
        ({"base_weights": "1:" + "0" * 32}, "its base model has other weights than this worker's"),
        ({"base_weights": "2:" + "0" * 32, "tensor_parallel": 3}, None),  # of a release that computes it in another way
        ({"dtype": "float16"}, "its model.dtype is float16, and this worker's "),
    ],
)
async def test_no_pair_is_warmed_that_could_not_exchange_kv(tmp_path: Path, caplog, fields, says):
    caplog.set_level(logging.ERROR)

    async with dns_server() as dns, Engine().served() as own, Engine().served() as theirs:
        agent = PrefillAgent(found_config(dns, tmp_path, "p7", "prefill"), "p7", tmp_path / "scratch")
        fit = peer("d0", pb.ROLE_DECODE, theirs.url, tensor_parallel=2)
        unfit = peer("d1", pb.ROLE_DECODE, theirs.url, **fields)
        async with running(agent, own, fit, unfit):
            dns.set_addresses(DECODE, [fit.host])
            await state_where(agent, ready=True)
            dns.set_addresses(DECODE, [fit.host, unfit.host])
            await state_where(agent, not_warm_with=["d1"])
            await until(lambda: any(each.getMessage() == IMPOSSIBLE for each in caplog.records))
    (record,) = (each for each in caplog.records if each.getMessage() == IMPOSSIBLE)
    assert record.fields["decode"] == "d1"
    assert (says or "it needs heads cut in 3, and this engine cuts them in 2 for another") in record.fields["reason"]
