"""The decode engine knows nothing of adapters."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
from support.running_cluster import RunningCluster

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
    assert httpx.get(f"{cluster.engine_url('decode-0')}/server_info", timeout=30).json()["enable_lora"] is not True


def test_decode_engine_refuses_a_request_that_names_an_adapter(cluster: RunningCluster):
    body = {"model": "demo", "prompt": "Hello", "max_tokens": 1, "lora_path": "sha256:" + "0" * 64}
    answer = httpx.post(f"{cluster.engine_url('decode-0')}/v1/completions", json=body, timeout=30)
    assert answer.status_code == 400
    assert "LoRA is not enabled" in answer.text


def test_decode_engine_loads_no_adapter(cluster: RunningCluster):
    body = {"lora_name": "x", "lora_path": str(cluster.adapters["a0"])}
    answer = httpx.post(f"{cluster.engine_url('decode-0')}/load_lora_adapter", json=body, timeout=30)
    assert answer.status_code == 400
    assert "LoRA is not enabled" in answer.text


def test_every_engine_process_has_its_hooks(cluster: RunningCluster):
    for worker, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        expected = [hook.name for hook in hooks_for(role, "cpu")]
        reports = reports_of(cluster, worker)
        assert set(reports) == {"server", "scheduler-0"}
        for report in reports.values():
            assert report["hooks"] == expected
