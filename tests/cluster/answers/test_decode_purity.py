"""The decode engine knows nothing of adapters."""

import json
from pathlib import Path

from support.clusters.running_cluster import RunningCluster

from engine.access import ADMIN_KEY_VARIABLE, IN_ENVIRONMENT
from engine.hooks.ledger import hooks_for


def reports_of(cluster: RunningCluster, worker: str) -> dict[str, dict]:
    """What the processes of a worker's engine reported of themselves, by process."""
    folder = Path(cluster.engine(worker).environ()["PRELUDE_ENGINE_REPORTS"])
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return {report["process"]: report for report in reports}


def test_decode_engine_holds_no_adapter_tensor(cluster: RunningCluster):
    scheduler = reports_of(cluster, "decode-0")["scheduler-0"]
    assert scheduler["lora_enabled"] is False
    assert scheduler["adapter_tensors"] == 0
    # The same count sees the slots of the prefill engine, so it can fail.
    assert reports_of(cluster, "prefill-0")["scheduler-0"]["adapter_tensors"] > 0


def test_decode_engine_was_started_without_lora(cluster: RunningCluster):
    assert not any("lora" in word for word in cluster.engine("decode-0").cmdline())
    info = cluster.ask_engine("decode-0", "GET", "/server_info")
    assert info.json()["enable_lora"] is not True
    assert cluster.describe("decode-0").engine_key not in info.text  # nor any other key that works
    assert info.json()["admin_api_key"] == IN_ENVIRONMENT


def test_decode_engine_refuses_a_request_that_names_an_adapter(cluster: RunningCluster):
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 1, "lora_path": "sha256:" + "0" * 64}
    answer = cluster.ask_engine("decode-0", "POST", "/v1/completions", json=body)
    assert answer.status_code == 400
    assert "LoRA is not enabled" in answer.text


def test_decode_engine_loads_no_adapter(cluster: RunningCluster):
    body, key = {"lora_name": "x", "lora_path": str(cluster.adapters["a0"])}, admin_key_of(cluster, "decode-0")
    answer = cluster.ask_engine("decode-0", "POST", "/load_lora_adapter", key=key, json=body)
    assert answer.status_code == 400
    assert "LoRA is not enabled" in answer.text


def test_engines_ask_for_their_keys(cluster: RunningCluster):
    """Each opens what it is for (`tests/engine/test_access.py` has every path), and nobody else sees it."""
    routers, admin = cluster.describe("prefill-0").engine_key, admin_key_of(cluster, "prefill-0")
    assert len({routers, admin, cluster.describe("decode-0").engine_key}) == 3
    unload = {"lora_name": "sha256:" + "0" * 64}
    for method, path, opened_by in (("GET", "/server_info", routers), ("POST", "/unload_lora_adapter", admin)):
        for key in ("", "guess", routers, admin):
            answer = cluster.ask_engine("prefill-0", method, path, key=key, json=unload)
            assert (answer.status_code != 401) is (key == opened_by), (path, answer.text)
    words = cluster.engine("prefill-0").cmdline()
    assert routers not in words
    assert admin not in words
    assert routers not in (cluster.logs / "prefill-0.log").read_text()
    assert admin not in (cluster.logs / "prefill-0.log").read_text()


def admin_key_of(cluster: RunningCluster, name: str) -> str:
    """What only the agent knows, and whoever may read its engine's environment."""
    return cluster.engine(name).environ()[ADMIN_KEY_VARIABLE]


def test_every_engine_process_has_its_hooks(cluster: RunningCluster):
    for worker, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        expected = [hook.name for hook in hooks_for(role, "cpu")]
        reports = reports_of(cluster, worker)
        assert set(reports) == {"server", "scheduler-0"}
        for report in reports.values():
            assert report["hooks"] == expected
