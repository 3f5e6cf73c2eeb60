"""Why a request goes where it goes: the page, the command and the header."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.router_stand_ins import MODEL, REVISION_ID, ClusterStandIn, eventually, running_cluster

from cli.main import main


async def explained(cluster: ClusterStandIn, query: str = "") -> tuple[int, dict[str, Any]]:
    status, answer, *_ = await cluster.admin(f"/debug/placement{query}")
    return status, answer


def test_the_page_ranks_the_workers_that_can_read_the_prompt() -> None:
    async def scenario() -> None:
        async with running_cluster(2, 1, 1) as cluster:
            holder = cluster.prefill_by_affinity[0]
            await holder.make_resident(REVISION_ID)
            await cluster.fleet.wait_until_resident(REVISION_ID, [holder.name], 5)
            status, found = await explained(cluster, "?adapter=a0&prompt_tokens=1000&answer_tokens=100")
            assert status == 200
            assert (found["revision"], found["prompt_tokens"], found["wanted_copies"]) == (REVISION_ID, 1000, 1)
            assert found["placement"] == f"{holder.name}>d0"
            first, *others = found["readers"]
            assert (first["worker"], first["decode"], first["home"], first["has_adapter"]) == (
                holder.name, "d0", 1, True,
            )  # fmt: skip
            assert set(first["costs_ms"]) == {"queue", "residency", "home", "prefix", "room"}
            assert first["cost_ms"] == pytest.approx(sum(first["costs_ms"].values()), abs=0.01)
            assert all(other["costs_ms"]["residency"] > 0 and not other["has_adapter"] for other in others)
            assert sorted(each["cost_ms"] for each in found["readers"]) == [e["cost_ms"] for e in found["readers"]]
            await holder.change(draining=True)
            _, found = await eventually(
                lambda: explained(cluster, "?adapter=a0"), lambda answer: bool(answer[1]["not_placeable"])
            )
            assert list(found["not_placeable"]) == [holder.name]
            assert len(found["readers"]) == 2
            assert not any(worker.ensured or worker.engine.bodies for worker in cluster.workers)

    asyncio.run(scenario())


def test_the_base_model_has_no_homes() -> None:
    async def scenario() -> None:
        async with running_cluster(0, 0, 2) as cluster:
            found = (await explained(cluster))[1]
            assert found["revision"] is None
            assert [each["home"] for each in found["readers"]] == [None, None]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("query", "status", "says"),
    [
        ("?prompt_tokens=many", 400, "prompt_tokens must be an integer"),
        ("?prompt_tokens=-1", 400, "prompt_tokens must be an integer"),
        ("?answer_tokens=99999999999999999999", 400, "answer_tokens must be an integer"),
        ("?adapter=nobody", 404, "nobody"),
    ],
)
def test_wrong_questions(query: str, status: int, says: str) -> None:
    async def scenario() -> None:
        async with running_cluster() as cluster:
            found, answer = await explained(cluster, query)
            assert found == status
            assert says in answer["error"]["message"]

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("debug_header", [False, True])
def test_the_header_is_answered_where_it_is_allowed(stream: bool, debug_header: bool) -> None:
    async def scenario() -> None:
        async with running_cluster(debug_header=debug_header) as cluster:
            url, body = f"{cluster.url}/v1/completions", {"model": MODEL, "prompt": "Hi", "adapter": "a0"}
            for asks in (True, False):
                headers = {"x-prelude-debug": "placement"} if asks else {}
                async with cluster.http.post(url, json={**body, "stream": stream}, headers=headers) as answer:
                    assert answer.status == 200
                    await answer.read()
                    found = answer.headers.get("x-prelude-placement")
                assert (found is not None) == (asks and debug_header)
                if found:
                    assert found.startswith("p0>d0 (home 1; queue ")

    asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True])
def test_an_explained_answer_says_where_the_adapter_was(stream: bool) -> None:
    async def scenario() -> None:
        async with running_cluster(debug_header=True) as cluster:
            (worker,) = cluster.prefill

            async def residency(adapter: str | None = "a0", asks: bool = True) -> str | None:
                body = {"model": MODEL, "prompt": "Hi", "stream": stream, **({"adapter": adapter} if adapter else {})}
                headers = {"x-prelude-debug": "placement"} if asks else {}
                async with cluster.http.post(f"{cluster.url}/v1/completions", json=body, headers=headers) as answer:
                    assert answer.status == 200
                    await answer.read()
                    return answer.headers.get("x-prelude-residency")

            # A load from the store is on the disk, too, by its end; this is reported before the load is.
            worker.ensure_delay_s = 0.3
            asked = asyncio.create_task(residency())
            await eventually(lambda: _ready(worker.ensured), bool)
            await worker.send_delta(on_disk=[REVISION_ID])
            assert await asked == "store"
            worker.ensure_delay_s = 0.0
            assert await residency() == "host"
            assert await residency(asks=False) is None
            assert await residency(adapter=None) is None
            worker.resident.discard(REVISION_ID)
            await worker.send_delta(evicted=[REVISION_ID])
            assert await residency() == "disk"

    asyncio.run(scenario())


async def _ready(value: Any) -> Any:
    return value


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> None:
        async with running_cluster(2, 1) as cluster:
            for words, says in (
                (["--adapter", "a0"], f"{REVISION_ID}, 500 prompt tokens: "),
                (["--prompt-tokens", "7"], "the base model, 7 prompt tokens: p0>d0"),
            ):
                await asyncio.to_thread(main, ["router", "explain", "--url", cluster.admin_url, *words])
                lines = capsys.readouterr().out.splitlines()
                assert lines[0].startswith(says)
                assert lines[1].split()[:3] == ["worker", "home", "adapter"]
                assert len(lines) == 4
            await asyncio.to_thread(main, ["router", "explain", "--url", cluster.admin_url, "--json"])
            assert len(json.loads(capsys.readouterr().out)["readers"]) == 2
            with pytest.raises(SystemExit, match="nobody"):
                await asyncio.to_thread(main, ["router", "explain", "--url", cluster.admin_url, "--adapter", "nobody"])
        with pytest.raises(SystemExit, match="cannot be asked"):
            await asyncio.to_thread(main, ["router", "explain", "--url", cluster.admin_url])

    asyncio.run(scenario())
