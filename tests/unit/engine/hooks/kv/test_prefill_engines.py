"""A decode engine and prefill engines that it has given up or whose KV is unlike its own, by SGLang's own code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LOST, OTHER = "10.0.0.1:9000", "10.0.0.2:9000"
# In a process of its own: SGLang's imports change much.
_CODE = f"""
import json, threading
from types import SimpleNamespace
from engine import cpu_support
cpu_support.install()
from sglang.srt.disaggregation.common import conn
from engine.hooks.kv.prefill_engines import begin_anew, decline_unlike

manager = SimpleNamespace(
    connection_lock=threading.Lock(),
    connection_pool={{}},
    prefill_info_table={{"{LOST}": None, "{OTHER}": None}},
    addr_to_rooms_tracker={{}},
    heartbeat_failures={{"{LOST}": 3, "{OTHER}": 1}},
)
result = conn.CommonKVManager._handle_node_failure(manager, "{LOST}")
without = dict(manager.heartbeat_failures)
for _ in range(2):
    begin_anew(result, manager, "{LOST}")
lost = [list(manager.prefill_info_table), without, manager.heartbeat_failures]

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
        _resolve_rank_mapping=lambda _info: None,
    )
    declined = not decline_unlike(original, manager, "{LOST}")
    try:
        raised = None if original(manager, "{LOST}") else "no"
    except RuntimeError as error:
        raised = str(error)
    unlike.append([declined, list(manager.prefill_info_table), raised])
print(json.dumps([lost, unlike]))
"""


@pytest.mark.slow
def test_an_engine_goes_on_without_them():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (known, without, with_hook), (alike, other_pages, other_dtype) = json.loads(done.stdout.splitlines()[-1])
    assert known == [OTHER]
    assert without == {LOST: 3, OTHER: 1}  # at the limit already
    assert with_hook == {OTHER: 1}
    assert alike == [False, [LOST], None]
    for (declined, known, raised), error in ((other_pages, "Page size"), (other_dtype, "KV cache dtype")):
        assert declined
        assert known == []
        assert raised.startswith(f"{error} mismatch"), "without the hook"
    assert f"no KV from the prefill engine at {LOST}: Page size mismatch" in done.stderr
