"""What the tokenizer, engines and grammars make of a request is said in a 4xx, and everything goes on serving."""

import httpx
import pytest
import zmq
from support.clusters.running_cluster import RunningCluster

GOOD = {"model": "demo", "prompt": "Hello", "max_tokens": 2, "temperature": 0}
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
LONG = [{"role": "user", "content": "sea " * 4000}]
NONSENSE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}

# name: (path, body, status, words of the message)
CASES = {
    "token out of range": ("completions", {**GOOD, "prompt": [1, 10**6]}, 400, ("1000000",)),
    "over-long prompt": ("completions", {**GOOD, "prompt": [7] * 3000}, 400, ("3000", "2048")),
    "over-long chat": ("chat/completions", {**CHAT, "messages": LONG}, 400, ("2048",)),
    "bad schema": ("chat/completions", {**CHAT, "response_format": NONSENSE}, 400, ()),
    "bad regex": ("completions", {**GOOD, "regex": "("}, 400, ()),
}


@pytest.mark.parametrize("name", CASES)
def test_is_refused_with_the_reason(cluster: RunningCluster, name: str):
    path, body, status, words = CASES[name]
    answer = httpx.post(f"{cluster.url}/v1/{path}", json=body, timeout=60)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["type"]
    for word in words:
        assert word in error["message"], error["message"]


def test_everything_still_serves(cluster: RunningCluster):
    """After all of the above: same engines as at the start, empty, and answering."""
    for adapter in ({}, {"adapter": "a0"}, {"adapter": "a1"}):
        answer = httpx.post(f"{cluster.url}/v1/completions", json={**GOOD, **adapter}, timeout=60)
        assert answer.status_code == 200
    cluster.check_no_engine_ended()


def test_foreign_messages_to_the_kv_thread_are_dropped(cluster: RunningCluster):
    """Each of these would end the thread in which prefill learns where decode wants its KV."""
    cluster.wait_ready(60)
    worker = cluster.config.workers["prefill-0"]
    ranks = {f"{place}_rank": 0 for place in ("prefill_dp", "prefill_cp", "target_tp", "target_pp")}
    found = httpx.get(f"http://{worker.host}:{worker.bootstrap_port}/route", params=ranks, timeout=5).json()
    assert found["rank_ip"] == worker.host  # and not every interface of the machine
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(f"tcp://{found['rank_ip']}:{found['rank_port']}")
        socket.setsockopt(zmq.LINGER, 5000)
        socket.send_multipart([b""])
        texts = ("hello", "WATERMARK", "ABORT", "NixlMsgGuard", "NixlMsgGuard \xff", "NixlMsgGuard 7 host 1 agent")
        for text in (*texts, "NixlMsgGuard None host 1 agent no-metadata 1", "NixlMsgGuard x host 1 agent  0 1"):
            socket.send_multipart(text.encode("latin-1").split(b" "))
    for adapter in ({}, {"adapter": "a0"}):
        answer = httpx.post(f"{cluster.url}/v1/completions", json={**GOOD, **adapter}, timeout=60)
        assert answer.status_code == 200, answer.text
    assert "messages to the KV thread dropped" in (cluster.logs / "prefill-0.log").read_text()
