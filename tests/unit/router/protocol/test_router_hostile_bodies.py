"""Bodies that no client would write, to the real router: refused with a reason, and nothing is left of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.routers.engine_fields import ENGINE_INTERNAL
from support.routers.hostile_requests import HostileRequest, sending

from router.protocol.validation import FIELDS, Endpoint

PATHS = {
    "/v1/chat/completions": Endpoint.CHAT,
    "/v1/completions": Endpoint.COMPLETIONS,
    "/v1/responses": Endpoint.RESPONSES,
    "/v1/embeddings": Endpoint.EMBEDDINGS,
    "/v1/tokenize": Endpoint.COMPLETIONS,
    "/v1/detokenize": Endpoint.COMPLETIONS,
    "/v1/adapters": Endpoint.COMPLETIONS,
    "/v1/adapters/a0/rollback": Endpoint.COMPLETIONS,
}
GOOD = {
    "model": "base", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": False,
    "tokens": [1, 2], "input": "Hi",
}  # fmt: skip
TEXTS = st.sampled_from(
    ["", "base", "a0", "base:a0", "а0", "a0\x00", "../a0", "a" * 5000, "\ud800", "\U0001f600", "{%"]
)
NUMBERS = st.sampled_from([0, 1, -1, 2**31, 2**63, 10**400, 1e308, -0.0, float("nan"), float("inf")])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXTS
NAMES = st.sampled_from(sorted(ENGINE_INTERNAL.union(GOOD, *FIELDS.values()))) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))
SPOILERS = st.sampled_from(
    [b"", b"\xff", b"\x00", b"\xef\xbb\xbf", b"}", b"{", b",", b'"', b"\\u0000", b"\\ud800", b"/*", b"NaN", b"[" * 400]
)
KINDS = st.sampled_from(
    ["application/json"] * 30
    + ["text/plain", "application/json; charset=utf-16", "multipart/form-data; boundary=x", "application/x-tar", ""]
)
ENCODINGS = st.sampled_from([""] * 30 + ["gzip", "identity, gzip", "br"])


@st.composite
def _bodies(draw: Any) -> bytes:
    """A good request with hostile fields, twice named fields, and perhaps bytes that are not JSON."""
    names = draw(st.sampled_from([["prompt"], ["messages"], ["tokens"], ["input"]]))
    names = names + draw(st.just([]) | st.lists(st.sampled_from(sorted(GOOD)), max_size=4))
    pairs: list[tuple[str, Any]] = [(name, GOOD[name]) for name in ("model", *names)]
    pairs += draw(st.just([]) | st.lists(st.tuples(NAMES, VALUES), max_size=4))
    written = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs)
    body = f"{{{written}}}".encode()
    if draw(st.integers(0, 3)) == 0:
        place = draw(st.integers(0, len(body)))
        body = body[:place] + draw(SPOILERS) + body[place + draw(st.integers(0, 3)) :]
    return body


def check(count: int, folder: Path) -> Counter[int]:
    with sending(folder) as sender:

        @settings(
            max_examples=count, database=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(st.sampled_from(sorted(PATHS)), _bodies(), KINDS, ENCODINGS)
        def send(path: str, body: bytes, kind: str, encoding: str) -> None:
            headers = {"content-type": kind}
            if encoding:
                headers["content-encoding"] = encoding
            sender.add(HostileRequest("POST", path, headers, body))

        send()
    return sender.statuses


@pytest.mark.slow
def test_hostile_bodies(tmp_path: Path):
    statuses = check(400, tmp_path)
    assert statuses[200] > 5
    assert statuses[400] > 100


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_hostile_bodies(tmp_path: Path):
    statuses = check(100_000, tmp_path)
    print(f"{statuses.total()} requests: {dict(statuses)}")
    assert statuses.total() == 100_000
