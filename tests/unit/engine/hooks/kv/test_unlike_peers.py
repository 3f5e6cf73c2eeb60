"""A decode engine and prefill engines whose KV is unlike its own, by SGLang's own check."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# In a process of its own: SGLang's imports change much.
_CODE = """
import json
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
from sglang.srt.disaggregation.common import conn
from engine.hooks.kv.unlike_peers import decline_unlike

ours = {"page_size": 64, "kv_cache_dtype": "bfloat16"}
topology = {"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "follow_bootstrap_room": True}
original = conn.CommonKVManager.try_ensure_parallel_info
found = []
for theirs in ({}, {"page_size": 1}, {"kv_cache_dtype": "fp8_e4m3"}):
    answer = SimpleNamespace(status_code=200, json=lambda: {**topology, **ours, **theirs})
    conn.requests = SimpleNamespace(get=lambda url, timeout: answer)  # of the prefill engine's bootstrap server
    manager = SimpleNamespace(
        prefill_info_table={},
        kv_args=SimpleNamespace(page_size=64),
        kv_cache_dtype_str="bfloat16",
        dcp_size=1,
        _resolve_rank_mapping=lambda _info: None,
    )
    declined = not decline_unlike(original, manager, "10.0.0.1:9000")
    try:
        raised = None if original(manager, "10.0.0.1:9000") else "no"
    except RuntimeError as error:
        raised = str(error)
    found.append([declined, list(manager.prefill_info_table), raised])
print(json.dumps(found))
"""


@pytest.mark.slow
def test_the_engine_goes_on_without_their_kv():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    alike, other_pages, other_dtype = json.loads(done.stdout.splitlines()[-1])
    assert alike == [False, ["10.0.0.1:9000"], None]
    for (declined, known, raised), error in ((other_pages, "Page size"), (other_dtype, "KV cache dtype")):
        assert declined
        assert known == []
        assert raised.startswith(f"{error} mismatch"), "without the hook"
    assert "no KV from the prefill engine at 10.0.0.1:9000: Page size mismatch" in done.stderr
