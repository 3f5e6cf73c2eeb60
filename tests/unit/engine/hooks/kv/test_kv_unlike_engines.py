"""A decode engine and a prefill engine whose KV is unlike its own, by SGLang's own code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PEER = "10.0.0.1:9000"
# In a process of its own: SGLang's imports change much.
_CODE = f"""
import json
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
from sglang.srt.disaggregation.common import conn
from engine.hooks.kv.room import decline_unlike

ours = {{"page_size": 64, "kv_cache_dtype": "bfloat16"}}
topology = {{"attn_tp_size": 1, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "follow_bootstrap_room": True}}
original = conn.CommonKVManager.try_ensure_parallel_info
unlike = []
for theirs in ({{}}, {{"page_size": 1}}, {{"kv_cache_dtype": "fp8_e4m3"}}):
    answer = SimpleNamespace(status_code=200, json=lambda: {{**topology, **ours, **theirs}})
    conn.requests = SimpleNamespace(get=lambda url, timeout: answer)  # of the prefill engine's bootstrap server
    manager = SimpleNamespace(
        prefill_info_table={{}},
        kv_args=SimpleNamespace(page_size=64),
        kv_cache_dtype_str="bfloat16",
        dcp_size=1,
        attn_tp_size=1,
        kv_layout=None,
        dsv41_spec_layout=None,
        is_mla_backend=False,
        is_hybrid_mla_backend=False,
        _resolve_rank_mapping=lambda _info: None,
    )
    declined = not decline_unlike(original, manager, "{PEER}")
    try:
        raised = None if original(manager, "{PEER}") else "no"
    except RuntimeError as error:
        raised = str(error)
    unlike.append([declined, list(manager.prefill_info_table), raised])
print(json.dumps(unlike))
"""


@pytest.mark.slow
def test_an_engine_goes_on_without_it():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    alike, other_pages, other_dtype = json.loads(done.stdout.splitlines()[-1])
    assert alike == [False, [PEER], None]
    for (declined, known, raised), error in ((other_pages, "Page size"), (other_dtype, "KV cache dtype")):
        assert declined
        assert known == []
        assert raised.startswith(f"{error} mismatch"), "without the hook"
    assert f"no KV from the prefill engine at {PEER}: Page size mismatch" in done.stderr
