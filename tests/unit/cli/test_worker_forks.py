"""A worker's process starts engines beside its gRPC threads."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.adapters.tiny_model import write_model_config

CLUSTER = "model: {path: ., name: demo}\nworkers: {u: {role: unified}}\n"
# The worker's command as it is; instead of its agent, one that starts processes while it answers calls.
SCENE = """
import asyncio, contextlib, os, sys
from cli import main

class Agent:
    async def run(self):
        server = grpc.aio.server()
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [asyncio.create_task(call(channel)) for _ in range(4)]
            codes = {await started() for _ in range(150)}
            for each in calls:
                each.cancel()
        await server.stop(None)
        print("codes", codes, os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))

async def started():
    process = await asyncio.create_subprocess_exec("true", start_new_session=True)
    return await process.wait()

async def call(channel):
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await channel.unary_unary("/no.such/Method")(b"")

def agent_class(role):
    global grpc
    found = real(role)
    import grpc
    return lambda *_: Agent()

real, main._agent_class = main._agent_class, agent_class
assert "grpc" not in sys.modules
main.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_process_that_a_worker_starts_does_not_crash_in_grpcs_fork_handlers(tmp_path: Path):
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    write_model_config(tmp_path)
    found = subprocess.run(
        [sys.executable, "-c", SCENE, "unified-worker", "--name", "u"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (found.returncode, found.stdout) == (0, "codes {0} None\n"), found.stderr
