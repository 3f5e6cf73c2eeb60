"""Bodies that no client would write, to the real router: refused with a reason, and nothing is left of them."""

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.router_stand_ins import ClusterStandIn, running_cluster
from support.router_stand_ins.cluster import check_error
from support.routers.engine_fields import ENGINE_INTERNAL

from router.protocol.validation import FIELDS

PATHS = {  # with what a good request has, beside the model
    "/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input", "/v1/tokenize": "prompt",
    "/v1/embeddings": "input", "/v1/detokenize": "tokens", "/v1/adapters": "input", "/v1/adapters/a0/rollback": "input",
}  # fmt: skip
GOOD = {
    "model": "base", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": False,
    "tokens": [1, 2], "input": "Hi",
}  # fmt: skip
TEXTS = st.sampled_from(
    ["", "base", "a0", "base:a0", "а0", "a0\x00", "../a0", "a" * 5000, "\ud800", "\U0001f600", "{%"]
)
KINDS_OF_ITEMS = st.sampled_from(
    ["message", "function_call", "function_call_output", "reasoning", "user", "assistant", "input_text", "output_text",
     "text", "refusal", "function", "json_schema", "{}"]
)  # fmt: skip
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e308, -0.0, float("nan"), float("inf")])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS | KINDS_OF_ITEMS
NAMES_OF_PARTS = {"type", "role", "content", "text", "format", "name", "call_id", "output", "arguments", "function"}
NAMES = st.sampled_from(sorted(ENGINE_INTERNAL.union(GOOD, NAMES_OF_PARTS, *FIELDS.values()))) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
ITEMS = st.lists(st.dictionaries(st.sampled_from(sorted(NAMES_OF_PARTS)), VALUES, max_size=6), max_size=3)
SPOILERS = st.sampled_from(
    [b"", b"\xff", b"\x00", b"\xef\xbb\xbf", b"}", b"{", b",", b'"', b"\\u0000", b"\\ud800", b"/*", b"NaN", b"[" * 400]
)
KINDS = st.sampled_from(
    ["application/json"] * 30
    + ["text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "application/x-tar", ""]
)
ENCODINGS = st.sampled_from([""] * 30 + ["gzip", "identity, gzip", "br"])


@st.composite
def _requests(draw: Any) -> tuple[str, bytes]:
    """A path and a body: a good one with hostile fields, twice named fields, and perhaps bytes that are not JSON."""
    path = draw(st.sampled_from(sorted(PATHS)))
    is_good, is_of_items, is_json = draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 3)) > 0
    names = [] if is_good else draw(st.lists(st.sampled_from(sorted(GOOD)), max_size=4))
    pairs: list[tuple[str, Any]] = [(name, GOOD[name]) for name in ("model", PATHS[path], *names)]
    if is_of_items:
        pairs.append((PATHS[path], draw(ITEMS)))
    if not is_good:
        pairs += draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))
    written = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs)
    body = f"{{{written}}}".replace("Infinity", "1e999").encode()  # which is JSON, but no float64
    if not is_json:
        place = draw(st.integers(0, len(body)))
        body = body[:place] + draw(SPOILERS) + body[place + draw(st.integers(0, 3)) :]
    return path, body


async def _post(cluster: ClusterStandIn, path: str, body: bytes, headers: dict[str, str]) -> int:
    url, timeout = f"{cluster.url}{path}", ClientTimeout(30)
    async with cluster.http.post(url, data=body, headers=headers, timeout=timeout) as answer:
        content = await answer.read()
        assert answer.status < 500, f"{path} {headers} {body!r:.3000}: {answer.status} {content!r:.1000}"
        check_error(answer.status, content)
    for worker in cluster.workers:
        worker.engine.bodies.clear()
        worker.engine.headers.clear()
    return answer.status


async def _is_unharmed(cluster: ClusterStandIn) -> None:
    """As ready as before, with nothing to do."""
    status, page = await cluster.admin("/ready")
    assert status == 200
    assert all(worker["ready"] for worker in page["workers"].values())
    assert (await cluster.admin("/debug/requests"))[1]["requests"] == []
    assert (await cluster.post(prompt="Hi"))[0] == 200
    assert not any(worker.engine.num_running for worker in cluster.workers)


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(400, marks=pytest.mark.slow),
        pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def test_hostile_bodies(tmp_path: Path, count: int):
    statuses = Counter[int]()
    with asyncio.Runner() as runner:
        manager = running_cluster(1, 1, 1, folder=tmp_path, management=True)
        cluster = runner.run(manager.__aenter__())

        @settings(
            max_examples=count, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(_requests(), KINDS, ENCODINGS)
        def send(request: tuple[str, bytes], kind: str, encoding: str) -> None:
            headers = {"content-type": kind, "content-encoding": encoding}
            given = {name: value for name, value in headers.items() if value or name == "content-type"}
            statuses[runner.run(_post(cluster, *request, given))] += 1

        try:
            send()
            runner.run(_is_unharmed(cluster))
        finally:
            runner.run(manager.__aexit__(None, None, None))
    print(f"{statuses.total()} requests: {dict(statuses)}")
    assert statuses.total() == count
    assert statuses[200] > count / 80
    assert statuses[400] > count / 4
