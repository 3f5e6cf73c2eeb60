"""vLLM's routes: /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from support.router_stand_ins import (
    BASE,
    TEMPLATE,
)
from support.routers.management_calls import WEIGHTS, answered_by, ask, managing

from samples.random_adapters import write_random_lora


class TestVllm:
    async def test_load_and_unload(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        write_random_lora(root / "one", BASE, seed=1)
        write_random_lora(root / "deeper" / "two", BASE, seed=2)
        async with managing(adapter_root=root) as cluster:

            async def load(name: str, path: str, **fields: Any) -> tuple[int, Any]:
                body = {"lora_name": name, "lora_path": path, **fields}
                return await ask(cluster, "POST", "/v1/load_lora_adapter", json=body)

            async def unload(name: str) -> tuple[int, Any]:
                return await ask(cluster, "POST", "/v1/unload_lora_adapter", json={"lora_name": name})

            assert await load("bot", "one") == (200, "Success: LoRA adapter 'bot' added successfully.")
            first = await answered_by(cluster, "bot")
            assert str(first).startswith("sha256:")
            assert (await load("bot", "deeper/two"))[0] == 400
            assert (await load("bot", str(root / "deeper" / "two"), load_inplace=True))[0] == 200
            assert await answered_by(cluster, "bot") != first
            assert await unload("bot") == (200, "Success: LoRA adapter 'bot' removed successfully.")
            assert await answered_by(cluster, "bot") == 404
            status, answer = await unload("bot")
            assert (status, answer["error"]["message"]) == (404, "The lora adapter 'bot' cannot be found.")
            assert (await load("bot", "one"))[0] == 200  # again: for vLLM it was gone
            assert await answered_by(cluster, "bot") == first
            assert (await load("base", "one"))[0] == 400
            status, answer = await ask(cluster, "POST", "/v1/load_lora_adapter", json={"lora_name": "x"})
            assert (status, answer["error"]["param"]) == (400, "lora_path")

    @pytest.mark.slow
    @pytest.mark.parametrize("base_model", ["base", "/models/some/where", "another-model", None])
    async def test_fields_of_other_tools_are_ignored(self, tmp_path: Path, base_model: str | None) -> None:
        """Those that the Kubernetes Gateway API's sidecar for dynamic LoRA sends, and ones that nobody knows."""
        write_random_lora(tmp_path / "root" / "one", BASE, seed=1)
        async with managing(adapter_root=tmp_path / "root") as cluster:
            body: dict[str, Any] = {"lora_name": "bot", "lora_path": "one", "base_model_name": base_model}
            loaded = await ask(cluster, "POST", "/v1/load_lora_adapter", json=body)
            assert loaded == (200, "Success: LoRA adapter 'bot' added successfully.")
            assert str(await answered_by(cluster, "bot")).startswith("sha256:")
            body = {**body, "load_inplace": True, "lora_int_id": "seven", "is_3d_lora_weight": {"of": [1]}}
            assert (await ask(cluster, "POST", "/v1/load_lora_adapter", json=body))[0] == 200
            assert (await ask(cluster, "POST", "/v1/unload_lora_adapter", json=body))[0] == 200
            assert await answered_by(cluster, "bot") == 404
            status, answer = await ask(cluster, "POST", "/v1/load_lora_adapter", json={**body, "lora_path": 7})
            assert (status, answer["error"]["param"]) == (400, "lora_path")  # what is read is still checked

    async def test_only_below_the_root(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        write_random_lora(root / "one", BASE, seed=1)
        write_random_lora(tmp_path / "root-2", BASE, seed=2)
        (root / "out").symlink_to(tmp_path / "root-2")
        (root / "in").symlink_to(root / "one")
        (root / "circle").symlink_to(root / "circle")
        write_random_lora(root / "two", BASE, seed=3)
        (root / "two" / WEIGHTS).unlink()
        (root / "two" / WEIGHTS).symlink_to(tmp_path / "root-2" / WEIGHTS)
        async with managing(adapter_root=root) as cluster:
            for path, expected in (
                ("in", 200),
                ("out", 400),
                ("../root-2", 400),
                (str(tmp_path / "root-2"), 400),
                ("one/../../root-2", 400),
                (".", 400),
                ("", 400),
                ("/", 400),
                ("none", 422),
                ("circle", 422),
                ("nul\0", 422),
                ("one/adapter_config.json", 422),
                ("two", 422),  # its weights are a link to outside
            ):
                body = {"lora_name": "bot", "lora_path": path, "load_inplace": True}
                status, answer = await ask(cluster, "POST", "/v1/load_lora_adapter", json=body)
                assert status == expected, (path, answer)
                if status != 200 and not path.startswith(str(tmp_path)):
                    assert str(tmp_path) not in answer["error"]["message"], answer

    @pytest.mark.slow
    async def test_more_directories_than_are_taken(self, tmp_path: Path) -> None:
        root = write_random_lora(tmp_path / "root" / "one", BASE, seed=1).parent
        go_on = threading.Event()
        async with managing(adapter_root=root) as cluster:

            async def load(name: str) -> int:
                body = {"lora_name": name, "lora_path": "one"}
                async with cluster.http.post(f"{cluster.url}/v1/load_lora_adapter", json=body) as response:
                    return response.status

            for _ in range(2):  # the threads that import are busy
                cluster.adapters._import_threads.submit(go_on.wait, 120)
            try:
                asking = [asyncio.create_task(load(f"bot-{number}")) for number in range(6)]
                waiting = set(asking)
                async with asyncio.timeout(100):  # the machine may stall
                    while len(waiting) > 4:
                        _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                done, waiting = await asyncio.wait(asking, timeout=0.5)
                assert [each.result() for each in done] == [429, 429]
            finally:
                go_on.set()
            assert {await each for each in waiting} == {200}
            assert await load("bot") == 200

    async def test_no_root(self) -> None:
        async with managing() as cluster:
            body = {"lora_name": "bot", "lora_path": str(TEMPLATE / "a0")}
            status, answer = await ask(cluster, "POST", "/v1/load_lora_adapter", json=body)
            assert status == 400
            assert "router.adapter_root" in answer["error"]["message"]
