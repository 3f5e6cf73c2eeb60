"""A node of an engine that spans several: its ranks end with their process, and wait for the first node's to drain."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.clusters.dns_server import dns_server

from cluster.agent import engine_node
from cluster.agent.engine_node import EngineNode
from cluster.agent.engine_spec import engine_spec
from cluster.config.schema import ClusterConfig
from cluster.errors import ConfigError
from engine import supervisor
from engine.arguments import EngineNodes, command, environment
from engine.hooks.guards.kv import FOUND_PEERS_VARIABLE, PEERS_VARIABLE
from engine.hooks.ledger import hooks_for
from engine.kv_peers import KvPeers
from process.free_ports import free_port

WITHIN_S = 60.0  # on a machine that stalls
MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 512,
}  # fmt: skip
# SGLang at a node that is not the first: a scheduler, and a server that knows /health only.
STAND_IN = """
import http.server, json, os, subprocess, sys
port, folder, what, *hooks = sys.argv[1:]
with open(f"{folder}/{os.getpid()}.json", "w") as file:
    json.dump({"process": what, "pid": os.getpid(), "hooks": hooks}, file)
if what != "server":
    sys.stdin.read()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *words): pass
rank = subprocess.Popen([sys.executable, __file__, port, folder, "scheduler-1", *hooks], stdin=subprocess.PIPE)
while not os.path.exists(f"{folder}/{rank.pid}.json") or not os.path.getsize(f"{folder}/{rank.pid}.json"): pass
http.server.HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


def config(folder: Path, **worker: Any) -> ClusterConfig:
    (folder / "config.json").write_text(json.dumps(MODEL))
    decode = {"role": "decode", "tensor_parallel": 2, "nodes": 2, "rendezvous_port": free_port(), **worker}
    return ClusterConfig.model_validate(
        {"model": {"path": folder, "name": "demo"}, "workers": {"p": {"role": "prefill"}, "d": decode}}
    )


class TestConfig:
    @pytest.mark.parametrize(
        ("worker", "message"),
        [
            ({"role": "prefill"}, r"workers.d.nodes: found 2 at a prefill worker, but only a decode worker"),
            ({"role": "unified"}, r"workers.d.nodes: found 2 at a unified worker, but only a decode worker"),
            ({"tensor_parallel": 3}, r"workers.d.nodes: tensor_parallel is 3, which 2 nodes cannot share"),
            ({"rendezvous_port": 0}, r"workers.d.rendezvous_port: give one"),
            ({"replicas": 2}, r"workers.d.nodes: leave out `gpus` and `replicas`"),
        ],
    )
    def test_what_cannot_span_nodes_is_refused(self, tmp_path: Path, worker: dict[str, Any], message: str):
        with pytest.raises(ValueError, match=message):
            config(tmp_path, **worker)

    def test_the_worker_is_the_first_node(self, tmp_path: Path):
        found = config(tmp_path, host="10.0.0.7", rendezvous_port=5000)
        spec = engine_spec(found, "d", tmp_path)
        assert spec.nodes == EngineNodes(2, 0, "10.0.0.7:5000", "10.0.0.7")
        assert list(spec.local_ranks) == [0]
        assert "--nnodes" not in command(engine_spec(found, "p", tmp_path))

    def test_another_node_serves_itself_only(self, tmp_path: Path):
        found = config(tmp_path, host="fd00::8", rendezvous_port=5000)
        spec = EngineNode(found, "d", tmp_path, 1, "fd00::7").spec
        words = command(spec)
        assert words[words.index("--dist-init-addr") + 1] == "[fd00::7]:5000"
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert environment(spec, {})["SGLANG_HOST_IP"] == "fd00::8"
        assert list(spec.local_ranks) == [1]
        assert spec.keys is None

    @pytest.mark.parametrize("rank", [0, 2, -1])
    def test_there_is_no_such_node(self, tmp_path: Path, rank: int):
        with pytest.raises(ConfigError, match=rf"--node-rank: d has nodes: 2, so expected 1 to 1 .*found {rank}"):
            EngineNode(config(tmp_path), "d", tmp_path, rank, "127.0.0.1")


PREFILL = "_control._tcp.prefill.example.org"


class TestKvPeers:
    """The ranks of another node exchange KV with the same prefill workers as those of the first one."""

    def node(self, folder: Path, prefill: dict[str, Any], **discovery: Any) -> EngineNode:
        data = config(folder).model_dump(exclude_unset=True) | {"discovery": {"prefill": prefill} | discovery}
        return EngineNode(ClusterConfig.model_validate(data), "d", folder / "scratch", 1, "127.0.0.1")

    @pytest.mark.parametrize(
        "prefill",
        [
            {"dns": "prefill.example.org", "control_port": 9000},
            {"dns": PREFILL},
        ],
    )
    def test_its_kv_ports_refuse_strangers_however_peers_are_found(self, tmp_path: Path, prefill: dict[str, Any]):
        spec = self.node(tmp_path, prefill).spec
        names = environment(spec, {})[PEERS_VARIABLE].split(",")
        assert not KvPeers(names, lambda _name: set(), found=spec.kv_found_peers).include("10.9.9.9")

    def test_it_finds_them_itself(self, tmp_path: Path):
        async def scenario() -> None:
            async with dns_server() as dns:
                dns.set_services(PREFILL, ["10.9.0.1:9000"])
                here = {"interval_s": 0.05, "nameservers": [f"127.0.0.1:{dns.port}"]}
                node = self.node(tmp_path, {"dns": PREFILL}, **here)
                found = node.spec.kv_found_peers
                assert found is not None
                assert environment(node.spec, {})[FOUND_PEERS_VARIABLE] == str(found)
                peers = KvPeers(node.spec.kv_peers or (), found=found)
                assert not peers.include("10.9.0.1")
                async with node._finding_kv_peers():
                    await until(lambda: peers.include("10.9.0.1"))
                    assert not peers.include("10.9.0.2")
                    dns.set_services(PREFILL, ["10.9.0.2:9000", "10.9.0.3:9000"])
                    await until(lambda: peers.include("10.9.0.2") and not peers.include("10.9.0.1"))
                assert peers.include("10.9.0.3")
                self.node(tmp_path, {"dns": PREFILL}, **here)  # of the next start: those of before may be gone
                assert not peers.include("10.9.0.3")

        asyncio.run(scenario())


@dataclass
class Running:
    """A node of stand-ins, and the signal that ends it."""

    node: EngineNode
    stop: asyncio.Future[signal.Signals]

    async def answers(self, path: str, status: int) -> None:
        await until(lambda: self.status(path) == status)

    def status(self, path: str) -> int:
        try:
            return httpx.get(f"http://127.0.0.1:{self.node.worker.metrics_port}{path}", timeout=5).status_code
        except httpx.HTTPError:
            return 0


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not await asyncio.to_thread(is_so):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def stand_in_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rendezvous_port: int) -> Running:
    stop: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(engine_node, "stop_signal", lambda: stop)
    monkeypatch.setattr(engine_node, "_STOP_LIMIT_S", 3600.0)  # it would end the tests
    monkeypatch.setattr(engine_node, "_LOOK_EVERY_S", 0.1)
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    found = config(tmp_path, metrics_port=free_port(), engine_port=free_port(), rendezvous_port=rendezvous_port)
    node = EngineNode(found, "d", tmp_path / "scratch", 1, "127.0.0.1")
    hooks = [hook.name for hook in hooks_for("decode", "cpu")]
    line = [sys.executable, str(script), str(node.spec.port), str(node.spec.report_dir), "server", *hooks]
    monkeypatch.setattr(supervisor, "command", lambda _spec: line)
    return Running(node, stop)


def rank_of(running: Running) -> psutil.Process:
    (found,) = [
        psutil.Process(int(path.stem))
        for path in running.node.spec.report_dir.glob("*.json")
        if json.loads(path.read_text())["process"] == "scheduler-1"
    ]
    return found


@pytest.mark.slow
def test_the_end_of_a_rank_is_the_end_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        running = stand_in_node(tmp_path, monkeypatch, free_port())

        async def kill_when_ready() -> None:
            await running.answers("/ready", 200)
            await running.answers("/health", 200)
            await running.answers("/engine/metrics", 503)
            rank_of(running).kill()

        killer = asyncio.create_task(kill_when_ready())
        with pytest.raises(SystemExit, match="1"):
            async with asyncio.timeout(2 * WITHIN_S):
                await running.node.run()  # which does not start it again
        await killer

    asyncio.run(scenario())


@pytest.mark.slow
def test_it_stops_after_the_first_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def scenario() -> None:
        looked = asyncio.Event()

        def look(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            looked.set()
            writer.close()

        first = await asyncio.start_server(look, "127.0.0.1", 0)
        running = stand_in_node(tmp_path, monkeypatch, first.sockets[0].getsockname()[1])

        async def stop_both() -> psutil.Process:
            await running.answers("/ready", 200)
            rank = rank_of(running)
            running.stop.set_result(signal.SIGTERM)
            await asyncio.wait_for(looked.wait(), WITHIN_S)
            await running.answers("/ready", 503)
            assert rank.is_running()
            first.close()
            return rank

        stopper = asyncio.create_task(stop_both())
        async with asyncio.timeout(2 * WITHIN_S):
            await running.node.run()
        rank = await stopper
        assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE

    asyncio.run(scenario())
