"""Agents of pairs follow the same sources as routers: who joins is warmed, who leaves is no longer waited for."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest
from support.clusters.dns_server import DnsServer, dns_server
from support.clusters.paired_agents import Engine, Peer, running, state_where
from support.commands import SMALL_LLAMA

from cluster.agent.engine_spec import engine_spec
from cluster.config.schema import ClusterConfig
from cluster.control import control_pb2 as pb
from cluster.local.found_worker import with_found_worker
from decode_worker.agent import DecodeAgent
from engine.arguments import environment
from engine.hooks.kv.peers import FOUND_PEERS_VARIABLE
from prefill_worker.agent import PrefillAgent
from process.free_ports import free_port

PREFILL, DECODE = "prefill.example.org", "decode.example.org"
PORT = free_port()  # of the agents that are found
IMPOSSIBLE = "KV transfer to this decode worker is impossible"


def config_of(server: DnsServer, folder: Path, name: str, role: str, **decode: str) -> ClusterConfig:
    """Of a worker that `workers` does not list, in a cluster that lists nobody."""
    (folder / "config.json").write_text(json.dumps(SMALL_LLAMA))
    data = {
        "model": {"path": folder, "name": "demo"},
        "discovery": {
            "prefill": {"dns": PREFILL, "control_port": PORT},
            "decode": {"dns": DECODE, "control_port": PORT, **decode},
            "interval_s": 0.05,
            "nameservers": [f"127.0.0.1:{server.port}"],
        },
    }
    return with_found_worker(ClusterConfig.model_validate(data), name, role, "127.0.0.1")


def peer(name: str, role: int, url: str = "http://127.0.0.1:9", **fields) -> Peer:
    found = Peer(name, url, f"127.0.0.{10 + int(name[1:])}", PORT)
    described = {"role": role, "model": "demo", "agent_id": name} | fields
    if role == pb.ROLE_PREFILL:
        described |= {"kv_host": "127.0.0.1", "kv_bootstrap_port": 9}
    found.description.MergeFrom(pb.WorkerDescription(**described))
    return found


async def test_a_prefill_worker_warms_pairs_with_decode_workers_that_come(tmp_path: Path):
    async with dns_server() as dns, Engine().served() as own, Engine().served() as theirs:
        agent = PrefillAgent(config_of(dns, tmp_path, "p7", "prefill"), "p7", tmp_path / "scratch")
        dns.set_addresses(DECODE, [])
        first, second = (peer(name, pb.ROLE_DECODE, theirs.url) for name in ("d0", "d1"))
        async with running(agent, own, first, second):
            await state_where(agent, ready=False, reason="not warm yet with any decode worker")
            dns.set_addresses(DECODE, [first.host])
            state = await state_where(agent, ready=True)
            assert [(pair.decode_name, pair.decode_incarnation) for pair in state.warm_pairs] == [("d0", "d0-1")]
            dns.set_addresses(DECODE, [second.host])
            async with asyncio.timeout(10):
                async for state in agent.hub.watch(30):
                    if [pair.decode_name for pair in state.warm_pairs] == ["d1"]:
                        break
            assert list(agent.peers) == ["d1"]
            assert state.ready


async def test_a_decode_worker_is_ready_when_a_prefill_worker_that_came_has_warmed_it(tmp_path: Path):
    async with dns_server() as dns, Engine().served() as own:
        agent = DecodeAgent(config_of(dns, tmp_path, "d7", "decode"), "d7", tmp_path / "scratch")
        prefill = peer("p0", pb.ROLE_PREFILL)
        async with running(agent, own, prefill):
            dns.set_addresses(PREFILL, [prefill.host])
            await state_where(agent, ready=False, reason="not warm yet with p0")
            prefill.hub.update(warm_pairs=[pb.WarmPair(decode_name="d7", decode_incarnation="one")])
            await state_where(agent, ready=True)


async def test_kv_ports_are_open_to_those_that_are_found_and_accepted(tmp_path: Path):
    async with dns_server() as dns, Engine().served() as own, Engine().served() as theirs:
        config = config_of(dns, tmp_path, "p7", "prefill")
        agent = PrefillAgent(config, "p7", tmp_path / "scratch")
        assert agent.spec.kv_peers == ("127.0.0.1",)  # its own host; not everybody
        assert environment(agent.spec, {})[FOUND_PEERS_VARIABLE] == str(agent.spec.kv_found_peers)

        async def until_open_to(*hosts: str) -> None:
            assert agent.spec.kv_found_peers is not None
            async with asyncio.timeout(30):
                while set(agent.spec.kv_found_peers.read_text().split()) != set(hosts):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        dns.set_addresses(DECODE, [])
        decode, stranger = peer("d0", pb.ROLE_DECODE, theirs.url), peer("d1", pb.ROLE_UNIFIED, theirs.url)
        async with running(agent, own, decode, stranger):
            await until_open_to()
            dns.set_addresses(DECODE, [stranger.host])
            async with asyncio.timeout(30):
                while not refusals(agent):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            await until_open_to()
            dns.set_addresses(DECODE, [stranger.host, decode.host])
            await until_open_to(decode.host)
            await state_where(agent, ready=True)
            dns.set_addresses(DECODE, [])
            await until_open_to()


def refusals(agent: PrefillAgent) -> list[str]:
    return [reason for each in agent.peers._followed if (reason := each._contact.refusal)]


@pytest.mark.parametrize(
    ("worker", "expected"),
    [({}, (("127.0.0.1",), True)), ({"engine": {"kv_peers": ["10.2.0.0/16"]}}, (("10.2.0.0/16",), False))],
)
def test_who_has_to_be_found(tmp_path: Path, worker: dict, expected):
    (tmp_path / "config.json").write_text(json.dumps(SMALL_LLAMA))
    data = {
        "model": {"path": tmp_path, "name": "demo"},
        "discovery": {
            "prefill": {"dns": PREFILL, "control_port": PORT, "worker": worker},
            "decode": {"dns": DECODE, "control_port": PORT},
        },
    }
    config = with_found_worker(ClusterConfig.model_validate(data), "p7", "prefill", "127.0.0.1")
    spec = engine_spec(config, "p7", tmp_path / "engine")
    assert (spec.kv_peers, spec.kv_found_peers is not None) == expected


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
        agent = PrefillAgent(config_of(dns, tmp_path, "p7", "prefill"), "p7", tmp_path / "scratch")
        fit = peer("d0", pb.ROLE_DECODE, theirs.url, tensor_parallel=2)
        unfit = peer("d1", pb.ROLE_DECODE, theirs.url, **fields)
        async with running(agent, own, fit, unfit):
            dns.set_addresses(DECODE, [fit.host])
            await state_where(agent, ready=True)
            dns.set_addresses(DECODE, [fit.host, unfit.host])
            await state_where(agent, not_warm_with=["d1"])
            async with asyncio.timeout(10):
                while not (found := [each for each in caplog.records if each.getMessage() == IMPOSSIBLE]):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    (record,) = found
    assert record.fields["decode"] == "d1"
    assert (says or "it needs heads cut in 3, and this engine cuts them in 2 for another") in record.fields["reason"]
